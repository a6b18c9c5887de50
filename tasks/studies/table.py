"""The numbers of a sweep: a row per setting, mean and spread over its seeds, and differences seed by seed.

The spread between seeds is often several times that of the difference between two algorithms with one seed, as a seed
fixes initialisation, data and order for both. So differences are taken within a seed, and then averaged.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.studies.columns import Column, Spread
from tasks.studies.config import ReportConfig
from tasks.studies.plan import Setting
from tasks.studies.state import RunState


@dataclass(frozen=True)
class Row:
    """A setting and its runs, by seed."""

    setting: Setting
    states: tuple[RunState, ...]

    def values(self, column: Column) -> list[float]:
        """One per seed; NaN for a run that is not finished."""
        return [column.value(state) for state in self.states]

    @property
    def finished(self) -> int:
        return sum(state.status == "finished" for state in self.states)


@dataclass(frozen=True)
class Pair:
    """A setting and the one that it is compared with."""

    row: Row
    baseline: Row


@dataclass(frozen=True)
class Paired:
    """Differences within a seed, over the seeds that both settings have finished."""

    difference: Spread
    ratio: float
    """Of the means over those seeds; NaN where the baseline's is 0."""
    lower: int
    higher: int
    """In how many seeds the setting's value is below or above the baseline's."""

    def __str__(self) -> str:
        """The difference, the ratio, and in how many of the seeds it has the sign that most of them have."""
        if not self.difference.count:
            return str(self.difference)
        count, word = (self.lower, "lower") if self.lower >= self.higher else (self.higher, "higher")
        sign = "+" if self.difference.mean > 0 else ""
        digits = ".0f" if abs(self.ratio) >= 100 else ".3g"
        ratio = f", × {self.ratio:{digits}}" if math.isfinite(self.ratio) else ""
        return f"{sign}{self.difference}{ratio}, {word} in {count} of {self.difference.count}"


def rows_of(states: Sequence[RunState]) -> list[Row]:
    """One row per setting, in the order of the sweep, its runs in the order of the seeds."""
    by_setting: dict[tuple[str, ...], list[RunState]] = {}
    for state in states:
        by_setting.setdefault(state.run.setting.labels, []).append(state)
    return [Row(runs[0].run.setting, tuple(runs)) for runs in by_setting.values()]


def pairs_of(rows: Sequence[Row], report: ReportConfig) -> list[Pair]:
    """Who is compared with whom: a row with that which has the baseline's label and is otherwise equal."""
    by_labels = {row.setting.labels: row for row in rows}
    baselines = report.baselines
    wanted = list(baselines.items()) if isinstance(baselines, dict) else [(None, label) for label in baselines]
    pairs = []
    for label, baseline in wanted:
        axis = next(row.setting.labels.index(baseline) for row in rows if baseline in row.setting.labels)
        for row in rows:
            labels = row.setting.labels
            if labels[axis] == baseline or label not in (None, labels[axis]):
                continue
            other = by_labels.get((*labels[:axis], baseline, *labels[axis + 1 :]))
            if other is not None:
                pairs.append(Pair(row, other))
    return pairs


def paired(pair: Pair, column: Column) -> Paired:
    """The setting minus its baseline, seed by seed."""
    both = zip(pair.row.values(column), pair.baseline.values(column), strict=True)
    both_finite = [(ours, theirs) for ours, theirs in both if math.isfinite(ours) and math.isfinite(theirs)]
    differences = [ours - theirs for ours, theirs in both_finite]
    mean = Spread.of([theirs for _, theirs in both_finite]).mean
    ratio = Spread.of([ours for ours, _ in both_finite]).mean / mean if mean else math.nan
    lower, higher = sum(value < 0 for value in differences), sum(value > 0 for value in differences)
    return Paired(Spread.of(differences), ratio, lower, higher)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its columns aligned in the text as well.

    >>> print(markdown_table(["a", "b"], [["1", "22"]]))
    | a | b  |
    |---|----|
    | 1 | 22 |
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def write_csv(file: Path, rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """All numbers as the runs wrote them: a line per run, then lines with mean, std and count per setting."""
    axes = max((len(row.setting.labels) for row in rows), default=0)
    names = [f"label_{number}" for number in range(1, axes + 1)]
    headings = [_csv_name(column) for column in columns]
    with open(file, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["kind", "setting", *names, "seed", "status", *headings])
        for row in rows:
            for state in row.states:
                values = [_csv_number(column.raw(state)) for column in columns]
                writer.writerow(["run", row.setting.name, *row.setting.labels, state.run.seed, state.status, *values])
        for row in rows:
            spreads = [Spread.of([column.raw(state) for state in row.states]) for column in columns]
            for kind in ("mean", "std", "count"):
                values = [_csv_number(getattr(spread, kind)) for spread in spreads]
                writer.writerow([kind, row.setting.name, *row.setting.labels, "", "", *values])


def _csv_name(column: Column) -> str:
    return f"{column.key}@{column.place}" if column.place else column.key


def _csv_number(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""
