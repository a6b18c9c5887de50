"""The numbers of a sweep: a row per setting with mean and spread over seeds, and differences within a seed.

A seed fixes initialization, data and order for all settings. The spread between seeds is often several times the
difference between two algorithms with one seed, so differences are taken within a seed and then averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tasks.studies.columns import Column
from tasks.studies.config import ReportConfig
from tasks.studies.plan import Setting
from tasks.studies.published import Published
from tasks.studies.state import RunState

NO_VALUE = "–"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; NaN if there are too few values."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of the finite values.

        >>> Spread.of([1.0, 3.0, math.nan])
        Spread(mean=2.0, std=1.4142135623730951, count=2)
        """
        finite = pd.Series(values, dtype=float)
        finite = finite[finite.abs() < math.inf]
        return cls(float(finite.mean()), float(finite.std(ddof=1)), len(finite))

    def __str__(self) -> str:
        """Show two significant digits of the deviation, or four of the mean if there is none.

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


@dataclass(frozen=True)
class Row:
    """A setting and its runs, one per seed."""

    setting: Setting
    states: tuple[RunState, ...]
    chosen: str = ""
    """Labels of this setting that were chosen among those of a method, see `ReportConfig.choose`."""

    def raw_values(self, column: Column) -> pd.Series:
        """Return the numbers as the runs wrote them, by seed; NaN for a run that is not finished."""
        values = {
            state.run.seed: column.raw(state.summary, state.records) if state.status == "finished" else math.nan
            for state in self.states
        }
        return pd.Series(values, dtype=float)

    def values(self, column: Column) -> pd.Series:
        """Return the numbers in the unit of the heading, by seed; NaN for a run that is not finished."""
        return self.raw_values(column) * column.scale

    @property
    def finished(self) -> int:
        """Number of finished runs."""
        return sum(state.status == "finished" for state in self.states)

    @property
    def failed(self) -> list[RunState]:
        """The failed runs."""
        return [state for state in self.states if state.status == "failed"]

    def runs_in_words(self) -> str:
        """Say how many of the runs are in the numbers, and how many failed."""
        of = "" if self.finished == len(self.states) else f" of {len(self.states)}"
        return f"{self.finished}{of}" + (f", {len(self.failed)} failed" if self.failed else "")

    def shown(self, column: Column) -> str:
        """Return the mean and spread of a column; `failed` if no run is finished and one has failed.

        Says how many runs the numbers are from if some finished runs have none that is finite.
        """
        spread = Spread.of(self.values(column))
        if not self.finished and self.failed:
            return "failed"
        return f"{spread} ({spread.count} of {self.finished})" if 0 < spread.count < self.finished else str(spread)


def rows_of(states: Sequence[RunState]) -> list[Row]:
    """Return one row per setting, in the order of the sweep, with its runs in the order of the seeds."""
    by_setting: dict[tuple[str, ...], list[RunState]] = {}
    for state in states:
        by_setting.setdefault(state.run.setting.labels, []).append(state)
    return [Row(runs[0].run.setting, tuple(runs)) for runs in by_setting.values()]


# ---- differences within a seed


@dataclass(frozen=True)
class Pair:
    """A setting and the baseline that it is compared with."""

    row: Row
    baseline: Row


@dataclass(frozen=True)
class Paired:
    """Differences within a seed, over the seeds that both settings have finished."""

    difference: Spread
    ratio: float
    """Ratio of the means over those seeds; NaN if the baseline's is 0."""
    lower: int
    higher: int
    """Number of seeds in which the setting is below or above the baseline."""

    def __str__(self) -> str:
        """Show the difference, the ratio, and the number of seeds in which the difference has its usual sign."""
        if not self.difference.count:
            return str(self.difference)
        count, word = (self.lower, "lower") if self.lower >= self.higher else (self.higher, "higher")
        sign = "+" if self.difference.mean > 0 else ""
        digits = ".0f" if abs(self.ratio) >= 100 else ".3g"
        ratio = f", × {self.ratio:{digits}}" if math.isfinite(self.ratio) else ""
        return f"{sign}{self.difference}{ratio}, {word} in {count} of {self.difference.count}"


def pairs_of(rows: Sequence[Row], report: ReportConfig) -> list[Pair]:
    """Pair each row with the row that has the baseline's label and otherwise the same labels."""
    by_labels = {row.setting.labels: row for row in rows}
    pairs = []
    for label, baseline in report.wanted_pairs():
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
    """Return the setting minus its baseline, seed by seed."""
    both = pd.DataFrame({"ours": pair.row.values(column), "baseline": pair.baseline.values(column)})
    both = both[(both.abs() < math.inf).all(axis=1)]
    difference = both["ours"] - both["baseline"]
    mean = both["baseline"].mean()
    ratio = float(both["ours"].mean() / mean) if mean else math.nan
    return Paired(Spread.of(difference), ratio, int((difference < 0).sum()), int((difference > 0).sum()))


# ---- output


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, with aligned columns.

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


def write_csv(
    file: Path, rows: Sequence[Row], columns: Sequence[Column], paper: Mapping[str, Mapping[str, Published]]
) -> None:
    """Write all numbers as the runs wrote them: a line per run, then mean, std and count per setting.

    Settings with published values, which are given by the names of setting and column, also have the lines paper and
    paper_std.
    """
    runs, spreads = [], []
    for row in rows:
        values = pd.DataFrame({column.written_name: row.raw_values(column) for column in columns})
        values = values.where(values.abs() < math.inf)
        spread = values.agg(["mean", "std"]).astype(object)
        spread.loc["count"] = values.count()
        theirs = paper.get(row.setting.name, {})
        given = [column for column in columns if column.name in theirs]
        if given:
            spread.loc["paper"] = {c.written_name: theirs[c.name].mean / c.scale for c in given}
            spread.loc["paper_std"] = {c.written_name: theirs[c.name].std / c.scale for c in given}
        labels = {f"label_{number}": label for number, label in enumerate(row.setting.labels, start=1)}
        statuses = [state.status for state in row.states]
        runs.append(_lines(row, labels, values.astype(object), "run", list(values.index), statuses))
        spreads.append(_lines(row, labels, spread, list(spread.index), "", ""))
    pd.concat([*runs, *spreads]).to_csv(file, index=False, encoding="utf-8", lineterminator="\r\n")


def _lines(
    row: Row, labels: dict[str, str], values: pd.DataFrame, kind: object, seed: object, status: object
) -> pd.DataFrame:
    """Put the columns that say what a line is before its values."""
    described = pd.DataFrame({"kind": kind, "setting": row.setting.name, **labels, "seed": seed, "status": status},
                             index=values.index)  # fmt: skip
    return described.join(values)
