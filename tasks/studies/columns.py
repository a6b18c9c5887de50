"""Columns of a report: where a number comes from, its heading, and its scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.common.plotting import Records, number

_HEADINGS = {
    "test_accuracy": "test accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "bleu": "BLEU",
    "bleu_paper": "BLEU, as in the paper",
    "test_loss": "test loss",
    "train_loss": "train loss of the deployed model",
    "worker_train_loss": "workers' train loss, last epoch",
    "seconds": "time (min)",
    "train_seconds": "training (s)",
    "train_minutes": "training (min)",
    "train_cpu_seconds": "training, processor (s)",
    "validation_loss": "validation loss",
    "validation_accuracy": "validation accuracy (%)",
    "radius": "radius",
    "gossip/radius": "radius",
    "curvature.lambda_1": "top eigenvalue",
    "curvature.lambda_min": "smallest eigenvalue",
    "curvature.trace": "trace",
    "curvature/lambda_1": "top eigenvalue",
}
_SCALES = {
    "test_accuracy": 100.0,
    "test/accuracy": 100.0,
    "validation_accuracy": 100.0,
    "seconds": 1 / 60,
    "train_minutes": 1 / 60,
}
KNOWN = frozenset(_HEADINGS)
"""Numbers of the tasks of this package."""
_OTHER_NAMES = {"train_minutes": "train_seconds"}
"""Columns that show a key of summary.json in another unit."""
_PLACES = {"last": "", "max": " (max)", "min": " (min)"}
"""Places to read a metric at, with the suffix of the heading."""


@dataclass(frozen=True)
class Column:
    """One number of a run."""

    key: str
    """Key of summary.json, with dots into sections, or of metrics.jsonl, with slashes."""
    place: str
    """Where to read a metric: last, max, min, or the number of an epoch; "" for a key of summary.json."""
    heading: str

    @property
    def name(self) -> str:
        """The column as the sweep names it."""
        return f"{self.key}@{self.place}" if self.place else self.key

    @property
    def written_name(self) -> str:
        """The column in report.csv, where numbers are as the run wrote them.

        >>> columns_of(["train_minutes"])[0].written_name
        'train_seconds'
        """
        return f"{self.key}@{self.place}" if self.place else _OTHER_NAMES.get(self.key, self.key)

    @property
    def scale(self) -> float:
        """Factor from the number that the run wrote to the unit of the heading."""
        return _SCALES.get(self.key, 1.0)

    def raw(self, summary: Mapping[str, Any], records: Records) -> float:
        """Return the number as the run wrote it; NaN if it has none."""
        return _in_records(records, self.key, self.place) if self.place else _in_summary(summary, self.key)


def columns_of(columns: Sequence[str] | Mapping[str, str]) -> list[Column]:
    """Return the columns with these texts, or text: heading.

    Raises ValueError for an invalid place.

    >>> columns_of(["test_loss", "gossip/radius@max"])[1]
    Column(key='gossip/radius', place='max', heading='radius (max)')
    """
    if isinstance(columns, Mapping):
        return [_column(text, heading) for text, heading in columns.items()]
    return [_column(text) for text in columns]


def _column(text: str, heading: str = "") -> Column:
    key, at, place = text.partition("@")
    if at and "/" not in key:
        raise ValueError(f"columns: {text}: only a metric, such as gossip/radius@max, is read at a place. Drop {at}.")
    if at and place not in _PLACES and not (place.isdecimal() and int(place)):
        raise ValueError(f"columns: {text}: the place must be last, max, min or an epoch such as @48; got {place!r}.")
    place = place or ("last" if "/" in key else "")
    suffix = _PLACES.get(place, f" (epoch {place})") if place else ""
    name = _HEADINGS.get(key) or key.rpartition("/")[2].removeprefix("curvature.")
    return Column(key, place, heading or name + suffix)


def _in_summary(summary: Mapping[str, Any], key: str) -> float:
    value: Any = summary
    for part in _OTHER_NAMES.get(key, key).split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return number(value)


def _in_records(records: Records, key: str, place: str) -> float:
    found = [(record.get("epoch"), number(record[key])) for record in records if key in record]
    if place.isdecimal():
        found = [(epoch, value) for epoch, value in found if epoch == int(place) - 1]  # logged from 0
    if place in ("max", "min"):
        finite = [value for _, value in found if math.isfinite(value)]
        return (max if place == "max" else min)(finite, default=math.nan)
    return found[-1][1] if found else math.nan
