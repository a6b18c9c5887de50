"""report.md, report.csv and the figures of a sweep, from the runs that are finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.studies.choice import chosen_rows
from tasks.studies.columns import Column, columns_of
from tasks.studies.config import SweepConfig
from tasks.studies.figures import draw_figures
from tasks.studies.plan import PlannedRun
from tasks.studies.state import RunState, state_of
from tasks.studies.table import Row, Spread, markdown_table, paired, pairs_of, rows_of, write_csv


@dataclass(frozen=True)
class Report:
    """The written files, and the text of report.md."""

    text: str
    files: tuple[Path, ...]
    missing: int
    """Number of runs that are not finished."""


def write_report(sweep: SweepConfig, runs: Sequence[PlannedRun], folder: Path, figures: bool = True) -> Report:
    """Write report.md, report.csv and the figures into `folder`, which is created if needed.

    Raises ImportError for figures without matplotlib.
    """
    columns = columns_of(sweep.report.columns)
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
    """Return the tables in Markdown: means over seeds, differences from the baselines, and the missing runs."""
    shown = [column for column in columns if any(Spread.of(row.values(column)).count for row in rows)]
    without = [column.heading for column in columns if column not in shown]
    chosen = chosen_rows(sweep, rows)
    parts = [f"# {sweep.title or 'Sweep'}", _intro(sweep, rows), _means(sweep, chosen, shown or columns)]
    if without and shown:
        parts.append(f"Not measured by any finished run: {', '.join(without)}.")
    parts += _comparisons(sweep, chosen, shown)
    problems = _problems([state for row in rows for state in row.states])
    return "\n\n".join([*parts, *problems]) + "\n"


def _intro(sweep: SweepConfig, rows: Sequence[Row]) -> str:
    finished = sum(row.finished for row in rows)
    total = sum(len(row.states) for row in rows)
    seeds = ", ".join(map(str, sweep.seeds))
    choose = sweep.report.choose
    chosen = f" Each method has its setting with the smallest {columns_of([choose.by])[0].heading}." if choose else ""
    return (
        f"{finished} of {total} runs finished.{chosen} Mean ± sample standard deviation over seeds ({seeds}), or the "
        f"value itself for a single finished run. Task {sweep.task.name}, base {sweep.base.name}."
    )


def _means(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    over = sweep.report.choose.over if sweep.report.choose else ()
    grid = [key.rpartition(".")[2] for key in sweep.grid if key not in over]
    axes = [*(["variant"] if sweep.variants else []), *grid]
    chosen = ["chosen"] if sweep.report.choose else []
    header = [*(axes or ["setting"]), *chosen, "runs", *(column.heading for column in columns)]
    body = []
    for row in rows:
        runs = f"{row.finished}" if row.finished == len(row.states) else f"{row.finished} of {len(row.states)}"
        labels = row.setting.labels or ("base",)
        settings = [row.chosen] if chosen else []
        body.append([*labels, *settings, runs, *(str(Spread.of(row.values(column))) for column in columns)])
    return markdown_table(header, body)


def _comparisons(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    pairs = pairs_of(rows, sweep.report)
    if sweep.report.compare is not None:
        wanted = {column.name for column in columns_of(sweep.report.compare)}
        columns = [column for column in columns if column.name in wanted]
    if not pairs or not columns:
        return []
    body = [
        [pair.row.setting.name, pair.baseline.setting.name, *(str(paired(pair, column)) for column in columns)]
        for pair in pairs
    ]
    explained = (
        "Setting minus baseline within each seed: mean ± standard deviation, × ratio of the means, and the number of "
        "seeds finished by both in which the setting is lower or higher."
    )
    table = markdown_table(["setting", "baseline", *(column.heading for column in columns)], body)
    return ["## Paired differences", explained, table]


_WORDS = {
    "changed": "finished with other settings than the sweep's, and left out",
    "failed": "failed",
    "unfinished": "begun, but not finished",
    "missing": "not there",
}


def _problems(states: Sequence[RunState]) -> list[str]:
    """List the runs that are missing from the tables, by kind; [] if there are none."""
    lines = []
    for status, words in _WORDS.items():
        names = [state.run.name + _detail(state) for state in states if state.status == status]
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            lines.append(f"- {len(names)} {words}: {', '.join(names[:10])}{more}")
    return ["## Missing runs", "\n".join(lines)] if lines else []


def _detail(state: RunState) -> str:
    return f" ({'; '.join(state.changes[:3])})" if state.status == "changed" else ""


def _write_text(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
