"""`dsgdac sweep` and `dsgdac report`."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The other modules import torch and pandas. They are imported where they are used, so that `dsgdac --help` is fast.
if TYPE_CHECKING:
    from tasks.studies.config import SweepConfig
    from tasks.studies.plan import PlannedRun


def add_commands(commands: Any) -> None:
    """Add the parsers of both commands."""
    sweep = commands.add_parser(
        "sweep",
        help="launch the runs of a sweep",
        description="Launch the unfinished runs of a sweep file, each with its output in log.txt of its own folder. "
        "Started again, it continues where it stopped.",
        epilog="examples:\n  dsgdac sweep configs/sweeps/digits_study.yaml --jobs 2\n"
        "  dsgdac sweep configs/sweeps/digits_study.yaml --only 'dsgd_ac/*' --only sgd/seed_0\n"
        "  dsgdac sweep configs/paper/table_cifar.yaml --smoke --jobs 2\n"
        "  dsgdac sweep configs/paper/table_time.yaml --slurm runs/slurm",
    )
    sweep.add_argument("sweep", metavar="SWEEP", type=Path, help="sweep file")
    sweep.add_argument("--jobs", metavar="K", type=_positive, default=1, help="runs at a time (default: 1)")
    sweep.add_argument(
        "--only", metavar="PATTERN", action="append", help="only runs with this name, * for any text; may be repeated"
    )
    sweep.add_argument(
        "--print-commands",
        action="store_true",
        help="print a shell line per run, and start nothing. A run on several machines has one line for all of them, "
        "which reads NODE_RANK (0, 1, ..), MASTER_ADDR and MASTER_PORT",
    )
    sweep.add_argument(
        "--slurm",
        metavar="FOLDER",
        type=Path,
        help="submit the runs that are not finished to Slurm, by submitit, whose files go into FOLDER",
    )
    sweep.add_argument(
        "--slurm-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a parameter of submitit's SlurmExecutor, such as partition=gpu, time=720 (minutes) or "
        "array_parallelism=4; may be repeated",
    )
    sweep.add_argument("--list", action="store_true", help="print each run and its state, and start nothing")
    sweep.add_argument(
        "--rerun-changed",
        action="store_true",
        help="run again what finished with other settings, and keep its folder under another name",
    )
    _add_settings(sweep)
    sweep.set_defaults(run=_sweep)
    report = commands.add_parser(
        "report",
        help="tables and figures of a sweep",
        description="Print the tables of a sweep, and write report.md, report.csv and the figures into its folder. An "
        "unfinished sweep is reported as far as it is finished.",
        epilog="example:\n  dsgdac report configs/sweeps/digits_study.yaml",
    )
    report.add_argument("sweep", metavar="SWEEP", type=Path, help="sweep file")
    report.add_argument("--output", metavar="FOLDER", type=Path, help="where to write (default: the sweep's folder)")
    report.add_argument("--no-figures", action="store_true", help="tables only")
    _add_settings(report)
    report.set_defaults(run=_report)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="small runs by the rules in the section smoke of the file, in a folder of their own",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a key of the task for all runs, such as data.path=FOLDER; may be repeated. Give a report the same ones, "
        "except for paths",
    )


def _sweep(options: argparse.Namespace) -> int:
    from tasks.studies.config import naming
    from tasks.studies.preflight import require_startable, require_valid
    from tasks.studies.runner import failure_report, run_sweep
    from tasks.studies.slurm import submit
    from tasks.studies.state import state_of

    sweep, runs = _planned(options)
    runs = _selected(runs, options.only)
    if options.list:
        return _list(sweep, runs)
    naming(options.sweep, lambda: require_valid(sweep, runs))
    if options.print_commands:
        print("\n".join(run.shell_line() for run in runs))
        return 0
    if options.slurm is not None:
        left = [run for run in runs if state_of(run).status != "finished"]
        name = options.sweep.stem + "_smoke" * options.smoke
        jobs = submit(left, options.slurm, name, _pairs(options.slurm_option, "--slurm-option"))
        lines = [f"{job}  {run}" for run, job in jobs.items()]
        print("\n".join(lines) or f"all {len(runs)} runs are finished")
        return 0
    naming(options.sweep, lambda: require_startable(sweep, runs))
    try:
        result = run_sweep(runs, options.jobs, options.rerun_changed, say=lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("interrupted: the runs under way were stopped; the same command continues", file=sys.stderr)
        return 130
    if result.failed:
        print(f"\n{failure_report(result)}", file=sys.stderr)
        print(f"\n{len(result.failed)} of {len(runs)} runs failed.", file=sys.stderr)
        return 1
    words = " --smoke" * options.smoke + "".join(f" --set {shlex.quote(setting)}" for setting in options.set)
    print(f"all {len(runs)} runs are finished; tables and figures: dsgdac report {options.sweep}{words}")
    return 0


def _list(sweep: SweepConfig, runs: Sequence[PlannedRun]) -> int:
    from tasks.studies.state import state_of

    for fact in filter(None, (sweep.source, sweep.hardware)):
        print(f"# {fact}")
    if sweep.gpu_hours is not None:
        print(f"# about {sweep.gpu_hours:g} GPU hours for all runs")
    for run in runs:
        state = state_of(run)
        print(f"{state.status:10}  {run.name}" + (f"  {'; '.join(state.changes)}" if state.changes else ""))
    return 0


def _report(options: argparse.Namespace) -> int:
    from tasks.studies.report import write_report

    sweep, runs = _planned(options)
    report = write_report(
        sweep, runs, options.output or sweep.output_dir, figures=not options.no_figures, small=options.smoke
    )
    print(report.text)
    for file in report.files:
        print(f"wrote {file}", file=sys.stderr)
    return 1 if report.missing == len(runs) else 0


def _planned(options: argparse.Namespace) -> tuple[SweepConfig, list[PlannedRun]]:
    from tasks.studies.config import load_sweep, naming
    from tasks.studies.plan import planned_runs
    from tasks.studies.preflight import require_valid
    from tasks.studies.smoke import small

    whole = load_sweep(options.sweep)
    sweep = naming(options.sweep, lambda: small(whole)) if options.smoke else whole
    rules, folder = (sweep.smoke if options.smoke else None), options.sweep.absolute().parent
    runs = naming(options.sweep, lambda: planned_runs(sweep, folder, _extra(options.set), rules))
    if options.set:  # a misspelt key would select runs that nobody has started
        naming(options.sweep, lambda: require_valid(sweep, runs))
    return sweep, runs


def _extra(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of --set. Paths with ./ or ../ start from the working directory, as on a task's command line."""
    from tasks.studies.plan import flat_overrides

    return flat_overrides(_pairs(words, "--set"), "--set", Path.cwd())


def _pairs(words: Sequence[str], option: str) -> dict[str, Any]:
    """Return the values of KEY=VALUE words; text with commas is a list."""
    from tasks.common.strict_yaml import plain_value

    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals) or key in values:
            raise ValueError(f"{option} must be KEY=VALUE, each key once; got {word!r}.")
        values[key] = [plain_value(item.strip()) for item in text.split(",")] if "," in text else plain_value(text)
    return values


def _selected(runs: list[PlannedRun], patterns: Sequence[str] | None) -> list[PlannedRun]:
    if not patterns:
        return runs
    for pattern in patterns:
        if not any(_matches(run, pattern) for run in runs):
            raise ValueError(f"--only {pattern} selects no run. Runs are called {runs[0].name}, .. {runs[-1].name}.")
    return [run for run in runs if any(_matches(run, pattern) for pattern in patterns)]


def _matches(run: PlannedRun, pattern: str) -> bool:
    """Match the name of the run or its setting, or one of the labels."""
    names = (run.name, run.setting.name, run.setting.folder, *run.setting.labels)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1; got {text!r}")
    return number
