"""Sweeps: many runs of one task, described in a file, launched, skipped when finished, and put into tables and figures.

A sweep knows a task by its command line and by the files that a run leaves; it imports none of it.
"""

from tasks.studies.config import LaunchConfig, ReportConfig, SweepConfig, load_sweep
from tasks.studies.plan import PlannedRun, Setting, planned_runs, settings_of
from tasks.studies.report import write_report
from tasks.studies.runner import run_sweep

__all__ = [
    "LaunchConfig",
    "PlannedRun",
    "ReportConfig",
    "Setting",
    "SweepConfig",
    "load_sweep",
    "planned_runs",
    "run_sweep",
    "settings_of",
    "write_report",
]
