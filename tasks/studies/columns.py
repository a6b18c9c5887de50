"""Columns of a report: where a number comes from, what it is called and how it is written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsgdac_accel.plotting import Records
from tasks.studies.config import ReportConfig
from tasks.studies.state import RunState

NO_VALUE = "–"

_HEADINGS = {
    "test_accuracy": "test accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "bleu": "BLEU",
    "test_loss": "test loss",
    "train_loss": "train loss",
    "worker_train_loss": "workers' train loss",
    "seconds": "time (min)",
    "train_seconds": "training (s)",
    "radius": "radius",
    "gossip/radius": "radius",
    "curvature.lambda_1": "top eigenvalue",
    "curvature.lambda_min": "smallest eigenvalue",
    "curvature.trace": "trace",
    "curvature/lambda_1": "top eigenvalue",
}
_SCALES = {"test_accuracy": 100.0, "test/accuracy": 100.0, "seconds": 1 / 60}
_PLACES = ("last", "max", "min")


@dataclass(frozen=True)
class Column:
    """One number of a run."""

    key: str
    """Of summary.json, with dots into sections, or of metrics.jsonl, with slashes."""
    place: str
    """Where to read a metric: last, max, min, or after so many epochs; "" for a key of summary.json."""
    heading: str

    def value(self, state: RunState) -> float:
        """The number of a finished run, in the unit of the heading; NaN where it has none."""
        return self.raw(state) * _SCALES.get(self.key, 1.0)

    def raw(self, state: RunState) -> float:
        """The number as the run has written it."""
        if state.status != "finished":
            return math.nan
        return _in_records(state.records, self.key, self.place) if self.place else _in_summary(state.summary, self.key)


def columns_of(report: ReportConfig) -> list[Column]:
    """The columns that a report asks for.

    Raises ValueError for a place that is none.

    >>> columns_of(ReportConfig(columns=["test_loss", "gossip/radius@max"]))[1]
    Column(key='gossip/radius', place='max', heading='radius (max)')
    """
    if isinstance(report.columns, dict):
        return [_column(text, heading) for text, heading in report.columns.items()]
    return [_column(text) for text in report.columns]


def _column(text: str, heading: str = "") -> Column:
    key, at, place = text.partition("@")
    if at and "/" not in key:
        raise ValueError(f"columns: {text}: only a metric, such as gossip/radius@max, is read at a place. Drop {at}.")
    if at and place not in _PLACES and not (place.isdecimal() and int(place)):
        raise ValueError(f"columns: {text}: the place must be last, max, min or an epoch such as @48; got {place!r}.")
    place = place or ("last" if "/" in key else "")
    words = {"": "", "last": "", "max": " (max)", "min": " (min)"}
    name = _HEADINGS.get(key) or key.rpartition("/")[2].removeprefix("curvature.")
    return Column(key, place, heading or name + words.get(place, f" (epoch {place})"))


def _in_summary(summary: dict[str, Any], key: str) -> float:
    value: Any = summary
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return _number(value)


def _in_records(records: Records, key: str, place: str) -> float:
    found = [(record.get("epoch"), _number(record[key])) for record in records if key in record]
    if place.isdecimal():
        found = [(epoch, value) for epoch, value in found if epoch == int(place) - 1]  # logged from 0
    numbers = [value for _, value in found if math.isfinite(value)]
    if place in ("max", "min"):
        return (max if place == "max" else min)(numbers, default=math.nan)
    return found[-1][1] if found else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; NaN where there are too few values."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of the finite values; the others are not counted.

        >>> Spread.of([1.0, 3.0, math.nan])
        Spread(mean=2.0, std=1.4142135623730951, count=2)
        """
        finite = [value for value in values if math.isfinite(value)]
        mean = statistics.fmean(finite) if finite else math.nan
        return cls(mean, statistics.stdev(finite) if len(finite) > 1 else math.nan, len(finite))

    def __str__(self) -> str:
        """Two significant digits of the deviation, or four of the mean where there is none.

        >>> print(Spread(0.25137, 0.0333, 5), Spread(82.1234, math.nan, 1), Spread(5.51e-7, 1.2e-7, 3))
        0.251 ± 0.033 82.12 5.51e-07 ± 1.2e-07
        """
        if not self.count:
            return NO_VALUE
        if not math.isfinite(self.std):
            return f"{self.mean:.4g}"
        if self.std == 0:
            return f"{self.mean:.4g} ± 0"
        if self.std < 1e-5 or abs(self.mean) >= 1e5:
            return f"{self.mean:.3g} ± {self.std:.2g}"
        decimals = max(0, 1 - math.floor(math.log10(self.std)))
        return f"{self.mean:.{decimals}f} ± {self.std:.{decimals}f}"
