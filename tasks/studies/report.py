"""report.md, report.csv and the figures of a sweep, from whatever runs are finished."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.studies.columns import Column, Spread, columns_of
from tasks.studies.config import ReportConfig, SweepConfig
from tasks.studies.figures import draw_figures
from tasks.studies.plan import PlannedRun
from tasks.studies.state import RunState, state_of
from tasks.studies.table import Row, markdown_table, paired, pairs_of, rows_of, write_csv


@dataclass(frozen=True)
class Report:
    """What was written, and the text of report.md."""

    text: str
    files: tuple[Path, ...]
    missing: int
    """Runs that are not finished."""


def write_report(sweep: SweepConfig, runs: Sequence[PlannedRun], folder: Path, figures: bool = True) -> Report:
    """Write report.md, report.csv and the figures into `folder`, which is made if need be.

    Raises ValueError for a column that cannot be read, and ImportError for figures without matplotlib.
    """
    columns = columns_of(sweep.report)
    states = [state_of(run) for run in runs]
    rows = rows_of(states)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_figures(sweep, rows, folder) if figures else []
    text = report_text(sweep, rows, columns)
    links = "".join(f"\n![{picture.stem}]({picture.name})\n" for picture in pictures)
    _write_text(folder / "report.md", text + links)
    write_csv(folder / "report.csv", rows, columns)
    missing = sum(state.status != "finished" for state in states)
    return Report(text, (folder / "report.md", folder / "report.csv", *pictures), missing)


def report_text(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The tables in Markdown: means over seeds, differences from the baselines, and the runs that are not there."""
    shown = [column for column in columns if any(Spread.of(row.values(column)).count for row in rows)]
    without = [column.heading for column in columns if column not in shown]
    parts = [f"# {sweep.title or 'Sweep'}", _intro(sweep, rows), _means(sweep, rows, shown or columns)]
    if without and shown:
        parts.append(f"Not measured by any finished run: {', '.join(without)}.")
    parts += _comparisons(sweep, rows, shown)
    problems = _problems([state for row in rows for state in row.states])
    return "\n\n".join([*parts, *problems]) + "\n"


def _intro(sweep: SweepConfig, rows: Sequence[Row]) -> str:
    finished = sum(row.finished for row in rows)
    total = sum(len(row.states) for row in rows)
    seeds = ", ".join(map(str, sweep.seeds))
    return (
        f"{finished} of {total} runs finished. Mean ± sample standard deviation over seeds ({seeds}); of a setting "
        f"with one finished run, its value. Task {sweep.task.name}, base {sweep.base.name}."
    )


def _means(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    header = [*_axis_names(sweep), "runs", *(column.heading for column in columns)]
    body = []
    for row in rows:
        runs = f"{row.finished}" if row.finished == len(row.states) else f"{row.finished} of {len(row.states)}"
        labels = row.setting.labels or ("base",)
        body.append([*labels, runs, *(str(Spread.of(row.values(column))) for column in columns)])
    return markdown_table(header, body)


def _axis_names(sweep: SweepConfig) -> list[str]:
    names = [*(["variant"] if sweep.variants else []), *(key.rpartition(".")[2] for key in sweep.grid)]
    return names or ["setting"]


def _comparisons(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    pairs = pairs_of(rows, sweep.report)
    if sweep.report.compare is not None:
        wanted = {(column.key, column.place) for column in columns_of(ReportConfig(columns=sweep.report.compare))}
        columns = [column for column in columns if (column.key, column.place) in wanted]
    if not pairs or not columns:
        return []
    body = [
        [pair.row.setting.name, pair.baseline.setting.name, *(str(paired(pair, column)) for column in columns)]
        for pair in pairs
    ]
    explained = (
        "Setting minus baseline within each seed: mean ± standard deviation, × ratio of the means, and in how many of "
        "the seeds that both have finished the setting is lower or higher."
    )
    return [
        "## Paired differences",
        explained,
        markdown_table(["setting", "baseline", *(c.heading for c in columns)], body),
    ]


_WORDS = {
    "changed": "finished, but with other settings than the sweep's, and left out",
    "failed": "failed",
    "unfinished": "begun, but not finished",
    "missing": "not there",
}


def _problems(states: Sequence[RunState]) -> list[str]:
    """What is missing from the tables, by kind; [] where nothing is."""
    counts = Counter(state.status for state in states if state.status != "finished")
    if not counts:
        return []
    lines = []
    for status, words in _WORDS.items():
        names = [state.run.name + _detail(state) for state in states if state.status == status]
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            lines.append(f"- {len(names)} {words}: {', '.join(names[:10])}{more}")
    return ["## Missing runs", "\n".join(lines)]


def _detail(state: RunState) -> str:
    return f" ({'; '.join(state.changes[:3])})" if state.status == "changed" else ""


def _write_text(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
