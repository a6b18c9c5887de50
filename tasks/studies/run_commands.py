"""`dsgdac show`, `dsgdac plot` and `dsgdac curvature`: look at finished runs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FIRST_KEYS = ("algorithm", "workers", "topology", "model", "epochs", "steps", "seed")
"""Keys that a summary begins with, if it has them."""


def add_commands(commands: Any) -> None:
    """Add the parsers of the three commands."""
    show = commands.add_parser(
        "show",
        help="the summary of runs",
        description="Print the summary of one run, or of several side by side.",
        epilog="example:\n  dsgdac show runs/digits",
    )
    _add_runs(show)
    show.set_defaults(run=_show)
    plot = commands.add_parser(
        "plot",
        help="plot one run, or several side by side",
        description="Plot the metrics of a run as PNG files into its folder, or compare several runs in one file.",
        epilog="examples:\n  dsgdac plot runs/digits\n  dsgdac plot runs/dsgd runs/dsgd_ac --output compare.png",
    )
    _add_runs(plot)
    plot.add_argument("--output", metavar="FILE", type=Path, help="file of the comparison (default: comparison.png)")
    plot.set_defaults(run=_plot)
    curvature = commands.add_parser(
        "curvature",
        help="curvature of a run's checkpoint or model",
        description="Measure eigenvalues, Q, A and B of a run with the task that wrote it. Arguments after RUN go to "
        "the task; `-- --help` shows its own.",
        epilog="example:\n  dsgdac curvature runs/digits",
    )
    curvature.add_argument("run_folder", metavar="RUN", type=Path, help="output folder of a run")
    curvature.add_argument("--task", metavar="PATH", type=Path, help="script of the task, if it is not cifar or wmt14")
    curvature.set_defaults(run=_curvature, takes_rest=True)


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a finished run.

    Raises:
        FileNotFoundError: the run is not finished, or the folder is not that of a run; the message says which.
        ValueError: the file is damaged.
    """
    file = folder / "summary.json"
    if not file.is_file():
        begun = (folder / "config.yaml").is_file()
        problem = "the run is not finished" if begun else "it is not the output folder of a run"
        raise FileNotFoundError(f"{folder} has no summary.json: {problem}.")
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}.") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{file} is damaged: it must hold an object; got {type(summary).__name__}.")
    return summary


def find_task(folder: Path) -> Path:
    """Return the script of the task that wrote a run.

    Raises FileNotFoundError if the folder is not that of a run.
    """
    from tasks.common.known_tasks import script_for

    config = folder / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} has no config.yaml: it is not the output folder of a run.")
    return script_for(config)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="output folder of a run")


def _show(options: argparse.Namespace) -> int:
    from tasks.common.known_tasks import flat_values

    summaries = [flat_values(read_summary(folder)) for folder in options.runs]
    known = list(dict.fromkeys(key for summary in summaries for key in summary))
    keys = [*(key for key in FIRST_KEYS if key in known), *(key for key in known if key not in FIRST_KEYS)]
    rows = [[key, *(_shown(summary.get(key)) for summary in summaries)] for key in keys]
    if len(summaries) > 1:
        rows.insert(0, ["", *map(str, options.runs)])
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _plot(options: argparse.Namespace) -> int:
    from tasks.common.plotting import compare_runs, plot_run

    if len(options.runs) == 1 and options.output is None:
        written = plot_run(options.runs[0])
        if not written:
            raise ValueError(f"{options.runs[0]} has not logged anything to plot yet.")
    else:
        written = [compare_runs(options.runs, options.output or Path("comparison.png"))]
    for file in written:
        print(file)
    return 0


def _curvature(options: argparse.Namespace) -> int:
    if options.task is not None and not options.task.is_file():
        raise FileNotFoundError(f"--task must be the script of a task; {options.task} does not exist.")
    task = options.task or find_task(options.run_folder)
    rest = [word for word in options.rest if word != "--"]
    return subprocess.run([sys.executable, str(task), "curvature", str(options.run_folder), *rest]).returncode
