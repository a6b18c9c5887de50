"""Metrics over epochs, averaged over the seeds of a setting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsgdac_accel.plotting import Records, series
from tasks.studies.table import Row


@dataclass(frozen=True)
class Curve:
    """Epochs (1.0 is the end of the first), and mean, smallest and largest value over seeds at each."""

    epochs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_of(row: Row, keys: Sequence[str], scale: float = 1.0) -> Curve | None:
    """One metric of a setting over epochs, the first of `keys` that its runs have logged; None without any.

    Of finished runs where there are any, as a shorter one would bend the mean; else of those under way. An epoch that
    not all of them have measured is left out, and so is a value that is not finite.
    """
    states = [state for state in row.states if state.status == "finished"] or list(row.states)
    runs = [state.records for state in states if state.records]
    key = next((key for key in keys if any(key in record for records in runs for record in records)), None)
    if key is None:
        return None
    by_run = [_by_epoch(records, key) for records in runs]
    by_run = [values for values in by_run if values]
    shared = sorted(set.intersection(*(set(values) for values in by_run))) if by_run else []
    columns = [[scale * values[epoch] for values in by_run] for epoch in shared]
    return Curve(shared, list(map(statistics.fmean, columns)), list(map(min, columns)), list(map(max, columns)))


def steps_per_epoch(records: Records) -> float:
    """Optimizer steps in an epoch, from the records: exact once an epoch's last step was logged; NaN without epochs.

    >>> steps_per_epoch([{"step": 5, "epoch": 0}, {"step": 10, "epoch": 0}, {"step": 15, "epoch": 1}])
    10.0
    """
    ratios = [
        record["step"] / (record["epoch"] + 1)
        for record in records
        if isinstance(record.get("epoch"), int) and record.get("step")
    ]
    return max(ratios, default=math.nan)


def _by_epoch(records: Records, key: str) -> dict[float, float]:
    per_epoch = steps_per_epoch(records)
    if not math.isfinite(per_epoch):
        return {}
    steps, values = series(records, key)
    points = zip(steps, values, strict=True)
    return {round(step / per_epoch, 6): value for step, value in points if math.isfinite(value)}
