"""Metrics over epochs, averaged over the seeds of a setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
from scipy.special import stdtrit

from tasks.common.plotting import Records, series
from tasks.studies.table import Row


@dataclass(frozen=True)
class Curve:
    """Mean over seeds at each epoch, with its 95 % confidence interval; 1.0 is the end of the first epoch."""

    epochs: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int
    """Number of runs that the mean is over."""
    finished: bool
    """False if no run is finished, and those under way were taken."""

    def magnitude(self) -> Curve:
        """Return the curve of the absolute value of the mean."""
        signs = [math.copysign(1.0, mean) for mean in self.mean]
        low, mean, high = ([sign * value for sign, value in zip(signs, values, strict=True)]
                           for values in (self.low, self.mean, self.high))  # fmt: skip
        ends = [sorted(pair) for pair in zip(low, high, strict=True)]
        return replace(self, mean=mean, low=[end[0] for end in ends], high=[end[1] for end in ends])


def curve_of(row: Row, keys: Sequence[str], scale: float = 1.0) -> Curve | None:
    """Average one metric of a setting over its seeds: the first of `keys` that was logged. None if none was.

    Uses the finished runs, because a shorter run would bend the mean; if there are none, those under way. Leaves out
    values that are not finite, and epochs that some run did not measure.
    """
    finished = [state for state in row.states if state.status == "finished"]
    runs = [state.records for state in finished or row.states if state.records]
    key = next((key for key in keys if any(key in record for records in runs for record in records)), None)
    if key is None:
        return None
    by_run = [values for records in runs if len(values := _by_epoch(records, key))]
    shared = scale * pd.concat(by_run, axis=1).sort_index().dropna() if by_run else pd.DataFrame()
    mean = shared.mean(axis=1)
    half = shared.std(axis=1, ddof=1).fillna(0.0) * interval_factor(len(by_run))
    return Curve(
        shared.index.tolist(),
        mean.tolist(),
        (mean - half).tolist(),
        (mean + half).tolist(),
        seeds=len(by_run),
        finished=bool(finished),
    )


def interval_factor(count: int) -> float:
    """Return what to multiply a standard deviation over `count` runs by, for half a 95 % interval of their mean.

    Student's t with count - 1 degrees of freedom, over the root of count; 0 for a single run, which has no interval.

    >>> round(interval_factor(3), 3)
    2.484
    """
    return float(stdtrit(count - 1, 0.975)) / math.sqrt(count) if count > 1 else 0.0


def steps_per_epoch(records: Records) -> float:
    """Return the optimizer steps in an epoch: exact once the last step of an epoch was logged; NaN without epochs.

    >>> steps_per_epoch([{"step": 5, "epoch": 0}, {"step": 10, "epoch": 0}, {"step": 15, "epoch": 1}])
    10.0
    """
    ratios = [
        record["step"] / (record["epoch"] + 1)
        for record in records
        if isinstance(record.get("epoch"), int) and record.get("step")
    ]
    return max(ratios, default=math.nan)


def _by_epoch(records: Records, key: str) -> pd.Series:
    """Return the finite values by epoch, which may be a fraction."""
    per_epoch = steps_per_epoch(records)
    if not math.isfinite(per_epoch):
        return pd.Series(dtype=float)
    steps, values = series(records, key)
    points = {round(step / per_epoch, 6): value for step, value in zip(steps, values, strict=True)}
    return pd.Series({epoch: value for epoch, value in points.items() if math.isfinite(value)}, dtype=float)
