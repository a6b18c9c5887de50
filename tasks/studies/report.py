"""report.md, report.csv and the figures of a sweep, from the runs that are finished."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.studies.choice import chosen_rows
from tasks.studies.columns import Column, columns_of
from tasks.studies.config import SweepConfig
from tasks.studies.figures import draw_figures
from tasks.studies.plan import PlannedRun
from tasks.studies.published import Published, published
from tasks.studies.smoke import rules_in_words
from tasks.studies.state import LOG, RunState, last_words, state_of
from tasks.studies.table import (
    NO_VALUE,
    Pair,
    Paired,
    Row,
    Spread,
    markdown_table,
    paired,
    pairs_of,
    rows_of,
    write_csv,
)


@dataclass(frozen=True)
class Report:
    """The written files, and the text of report.md."""

    text: str
    files: tuple[Path, ...]
    missing: int
    """Number of runs that are not finished."""


Paper = dict[str, dict[str, Published]]
"""Published values by the names of setting and column."""


def write_report(
    sweep: SweepConfig, runs: Sequence[PlannedRun], folder: Path, figures: bool = True, small: bool = False
) -> Report:
    """Write report.md, report.csv and the figures into `folder`, which is created if needed.

    Args:
        sweep: the sweep.
        runs: its runs.
        folder: where to write.
        figures: draw the figures, each as PNG and PDF.
        small: the runs are small ones, by the rules of the sweep.

    Raises ImportError for figures without matplotlib.
    """
    columns = columns_of(sweep.report.columns)
    states = [state_of(run) for run in runs]
    rows = rows_of(states)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_figures(sweep, rows, folder) if figures else []
    text = report_text(sweep, rows, columns, small)
    links = "".join(f"\n![{file.stem}]({file.name})\n" for file in pictures if file.suffix == ".png")
    _write_text(folder / "report.md", text + links)
    write_csv(folder / "report.csv", rows, columns, _paper(sweep))
    missing = sum(state.status != "finished" for state in states)
    return Report(text, (folder / "report.md", folder / "report.csv", *pictures), missing)


def report_text(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column], small: bool = False) -> str:
    """Return the tables in Markdown: means over seeds, the paper's values, differences, and the missing runs."""
    shown = [column for column in columns if any(Spread.of(row.values(column)).count for row in rows)]
    without = [column.heading for column in columns if column not in shown]
    chosen = chosen_rows(sweep, rows)
    finished = any(row.finished for row in rows)
    parts = [f"# {sweep.title or 'Sweep'}", _intro(sweep, rows)]
    if not finished:
        parts.append(
            "No run is finished, so there are no numbers yet. `dsgdac sweep` with the same file starts the runs."
        )
    if small and sweep.smoke is not None:
        parts.append(
            "These runs are small: they show that the study works, and their numbers are none of the paper's setting. "
            f"Changed: {rules_in_words(sweep.smoke)}."
        )
    parts.append(_means(sweep, chosen, shown or columns))
    if without and shown:
        parts.append(f"Not measured by any finished run: {', '.join(without)}.")
    parts += _beside_paper(sweep, chosen, columns)
    parts += _comparisons(sweep, chosen, shown)
    problems = _problems([state for row in rows for state in row.states])
    return "\n\n".join([*parts, *problems]) + "\n"


def _intro(sweep: SweepConfig, rows: Sequence[Row]) -> str:
    finished = sum(row.finished for row in rows)
    total = sum(len(row.states) for row in rows)
    seeds = ", ".join(map(str, sweep.seeds))
    source = f"Source: {sweep.source}. " if sweep.source else ""
    choose = sweep.report.choose
    chosen = f" Each method has its setting with the smallest {columns_of([choose.by])[0].heading}." if choose else ""
    return (
        f"{source}{finished} of {total} runs finished.{chosen} Mean ± sample standard deviation over seeds ({seeds}), "
        f"or the value itself for a single finished run. Task {sweep.task.name}, base {sweep.base.name}."
    )


def _axes(sweep: SweepConfig) -> list[str]:
    """Return the headings of the labels."""
    over = sweep.report.choose.over if sweep.report.choose else ()
    grid = [key.rpartition(".")[2] for key in sweep.grid if key not in over]
    return [*(["variant"] if sweep.variants else []), *grid] or ["setting"]


def _means(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    chosen = ["chosen"] if sweep.report.choose else []
    header = [*_axes(sweep), *chosen, "runs", *(column.heading for column in columns)]
    body = []
    for row in rows:
        labels = row.setting.labels or ("base",)
        settings = [row.chosen] if chosen else []
        body.append([*labels, *settings, row.runs_in_words(), *(row.shown(column) for column in columns)])
        if row.finished:
            failed = [*labels, *settings]
            body += [[*failed, f"seed {state.run.seed}", *(["failed"] * len(columns))] for state in row.failed]
    return markdown_table(header, body)


# ---- beside the paper


def _paper(sweep: SweepConfig) -> Paper:
    return {name: {key: published(value) for key, value in values.items()} for name, values in sweep.paper.items()}


def _beside_paper(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Return a table for each column with published values, and one of the differences between settings."""
    paper = _paper(sweep)
    if not paper:
        return []
    explained = (
        "The paper's values, ours minus theirs, and whether that is within two standard deviations: at most twice the "
        "root of the sum of both squares, and half of the paper's last digit."
    )
    parts = ["## Beside the paper", explained]
    for column in columns:
        theirs = {row.setting.name: paper.get(row.setting.name, {}).get(column.name) for row in rows}
        if any(theirs.values()):
            header = [*_axes(sweep), "runs", "ours", "paper", "difference", "within 2 sd"]
            body = [
                [*(row.setting.labels or ("base",)), row.runs_in_words(), *_ours_and_theirs(row, column, value)]
                for row in rows
                if (value := theirs[row.setting.name])
            ]
            parts += [f"### {column.heading}", markdown_table(header, body)]
    return parts + _paper_pairs(sweep, rows, columns, paper)


def _ours_and_theirs(row: Row, column: Column, theirs: Published) -> list[str]:
    ours = Spread.of(row.values(column))
    if not ours.count:
        return [row.shown(column), theirs.text, NO_VALUE, NO_VALUE]
    difference = ours.mean - theirs.mean
    within = "yes" if abs(difference) <= theirs.allowed(ours.std) else "no"
    return [row.shown(column), theirs.text, f"{difference:+.3g}", within]


def _paper_pairs(sweep: SweepConfig, rows: Sequence[Row], columns: Sequence[Column], paper: Paper) -> list[str]:
    body = []
    for pair in pairs_of(rows, sweep.report):
        for column in columns:
            values = [paper.get(row.setting.name, {}).get(column.name) for row in (pair.row, pair.baseline)]
            if values[0] and values[1]:
                difference = values[0].mean - values[1].mean
                ratio = values[0].mean / values[1].mean if values[1].mean else math.nan
                names = [pair.row.setting.name, pair.baseline.setting.name, column.heading]
                body.append([*names, _our_pair(pair, column), _with_ratio(difference, ratio)])
    if not body:
        return []
    return ["### Differences and ratios", markdown_table(["setting", "baseline", "of", "ours", "paper"], body)]


def _our_pair(pair: Pair, column: Column) -> str:
    found: Paired = paired(pair, column)
    return _with_ratio(found.difference.mean, found.ratio) if found.difference.count else NO_VALUE


def _with_ratio(difference: float, ratio: float) -> str:
    """Show a difference, and the ratio if there is one: a baseline of 0 has none."""
    return f"{difference:+.3g}" + (f", × {ratio:.3f}" if math.isfinite(ratio) else "")


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
        if status == "failed":
            lines += [f"- failed: {name}" for name in names]
        elif names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            lines.append(f"- {len(names)} {words}: {', '.join(names[:10])}{more}")
    return ["## Missing runs", "\n".join(lines)] if lines else []


def _detail(state: RunState) -> str:
    if state.status == "failed":
        words = last_words(state.run.folder / LOG)
        return f" ({words[:200]})" if words else ""
    return f" ({'; '.join(state.changes[:3])})" if state.status == "changed" else ""


def _write_text(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
