"""The setting of each method that a report shows, chosen on a validation split."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.studies.columns import columns_of
from tasks.studies.config import ChooseConfig, SweepConfig
from tasks.studies.plan import Setting
from tasks.studies.table import Row, Spread


def chosen_rows(sweep: SweepConfig, rows: Sequence[Row]) -> list[Row]:
    """Return one row per method, and per value of the grid that is not chosen over: the best of its settings.

    The best one has the smallest mean over the seeds. Settings that lack seeds which others of the method have finished
    do not take part. Without `report.choose`, the rows are returned as they are.
    """
    choose = sweep.report.choose
    if choose is None:
        return list(rows)
    candidates: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        candidates.setdefault(_method(sweep, choose, row.setting.labels), []).append(row)
    return [_best(labels, settings, choose) for labels, settings in candidates.items()]


def _method(sweep: SweepConfig, choose: ChooseConfig, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a setting with its method in place of the variant, without the values to choose over."""
    variant, values = (labels[:1], labels[1:]) if sweep.variants else ((), labels)
    methods = [next((method for method, of in choose.methods.items() if label in of), label) for label in variant]
    kept = [value for key, value in zip(sweep.grid, values, strict=True) if key not in choose.over]
    return *methods, *kept


def _best(labels: tuple[str, ...], settings: Sequence[Row], choose: ChooseConfig) -> Row:
    (column,) = columns_of([choose.by])
    spreads = [Spread.of(row.values(column)) for row in settings]
    complete = max(spread.count for spread in spreads)
    comparable = [number for number, spread in enumerate(spreads) if spread.count == complete]
    best = settings[min(comparable, key=lambda number: spreads[number].mean) if complete else 0]
    chosen = [label for label in best.setting.labels if label not in labels]
    return Row(Setting(labels, best.setting.overrides), best.states, ", ".join(chosen) if complete else "")
