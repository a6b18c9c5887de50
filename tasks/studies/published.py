"""Published values, and how far ours are from them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

_VALUE = re.compile(r"(?P<mean>-?\d+(?:\.(?P<decimals>\d+))?)(?:\s*(?:±|\+-)\s*(?P<std>\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Published:
    """A value of a paper, in the unit of the report."""

    text: str
    """The value as printed."""
    mean: float
    std: float
    """Standard deviation over the paper's runs; 0 if it gives none."""
    rounding: float
    """Half a unit of the last printed digit of the mean."""

    def allowed(self, our_std: float) -> float:
        """Return twice the spread of single runs, 2 sqrt(s1² + s2²), and what rounding can add.

        The standard deviations are those over runs, not those of the means, which are smaller by the root of the
        number of runs.

        Args:
            our_std: standard deviation over our runs; NaN for a single one counts as 0.
        """
        return 2 * math.hypot(self.std, our_std if math.isfinite(our_std) else 0.0) + self.rounding


def published(value: Any) -> Published:
    """Read a value such as `79.71 ± 0.13`, "79.71" or 96, as text if it has a point.

    Raises ValueError for anything else, such as a float: 80.00 would have lost the zeros that say how it is rounded.

    >>> published("79.71 ± 0.13")
    Published(text='79.71 ± 0.13', mean=79.71, std=0.13, rounding=0.005)
    """
    if isinstance(value, float):
        raise ValueError(f"paper: a value with a point must be quoted, to keep its zeros; got {value}. Quote it.")
    found = _VALUE.fullmatch(str(value).strip())
    if found is None:
        raise ValueError(f"paper: a value must be like 79.71 ± 0.13, '79.71' or 96; got {value!r}. Write it so.")
    decimals = len(found["decimals"] or "")
    return Published(str(value).strip(), float(found["mean"]), float(found["std"] or 0), 0.5 * 10**-decimals)
