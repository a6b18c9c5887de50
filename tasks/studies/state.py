"""The state of a run, read from its folder, so that it does not matter who started it."""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dsgdac_accel.checkpoint.serialization import write_whole
from tasks.common.known_tasks import base_values
from tasks.common.plotting import Records, json_object, read_metrics
from tasks.studies.plan import PlannedRun

RECORD = "sweep.json"
"""The sweep's own record in a run's folder: how the run was started, and how it ended."""

LOG = "log.txt"
"""Output of the run."""

EXIT_STATUS = "exit_status"
"""Exit status of a run that a batch script has started, in its folder."""

_REASON = re.compile(r"(error|[A-Z]\w*(Error|Exception)): \S")
"""An error of a task, or the last line of a traceback."""

Status = Literal["finished", "changed", "failed", "unfinished", "missing"]

_NOT_SET = "not set"


@dataclass(frozen=True)
class RunState:
    """A run as its folder shows it.

    finished: it has a summary, and the settings that the sweep asks for.
    changed: it has a summary, but other settings; `changes` lists them.
    failed: the sweep saw it end with an error.
    unfinished: it is under way or was interrupted.
    missing: nothing is there.
    """

    run: PlannedRun
    status: Status
    changes: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    """Summary of a finished run."""

    @cached_property
    def records(self) -> Records:
        """The logged records; [] if there are none or they belong to other settings."""
        if self.status in ("changed", "missing") or not (self.run.folder / "metrics.jsonl").is_file():
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the last line of a run under way may be truncated
            return read_metrics(self.run.folder / "metrics.jsonl")


def state_of(run: PlannedRun) -> RunState:
    """Read the state of a run from its folder."""
    record = read_record(run.folder)
    summary = json_object(run.folder / "summary.json")
    changes = tuple(_changes(run, record))
    if summary:
        return RunState(run, "changed", changes) if changes else RunState(run, "finished", (), summary)
    if exit_status(run) not in (None, 0):
        return RunState(run, "failed", changes)
    begun = bool(record) or (run.folder / "config.yaml").is_file()
    if begun and changes:
        return RunState(run, "missing", changes)  # the files belong to other settings
    return RunState(run, "unfinished" if begun else "missing")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the sweep's record in the folder of a run; {} if there is none."""
    return json_object(folder / RECORD)


def exit_status(run: PlannedRun) -> int | None:
    """Return the exit status of the last start of a run, by a sweep or by a batch script; None if it is not known."""
    status = read_record(run.folder).get("status")
    try:
        return int((run.folder / EXIT_STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not started by a batch script, or under way
        return status if isinstance(status, int) else None


def last_words(log: Path) -> str:
    """Return the reason why a run failed, by its output: the last line with an error, or else its last line.

    "" if it has no output. Launchers write a summary of their own after the error.
    """
    try:
        text = log.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if _REASON.match(line)]
    return (reasons or lines or [""])[-1]


def write_record(run: PlannedRun, status: int | None = None, seconds: float | None = None) -> None:
    """Record how a run is started and, once it has ended, its exit status and duration."""
    values = {
        "settings": run.expected,
        "launch": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(run.launch).items()},
        "command": run.shell_line(),
        "status": status,
        "seconds": seconds,
    }
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / EXIT_STATUS).unlink(missing_ok=True)
    write_whole(run.folder / RECORD, [(json.dumps(values, indent=2) + "\n").encode()])


def _changes(run: PlannedRun, record: dict[str, Any]) -> list[str]:
    """Return the settings in which a run and the sweep differ, as `key: old -> new`."""
    if record:
        old, new = record.get("settings", {}), run.expected
        keys = [key for key in (new | old) if not _is_place(key)]
        changes = [
            _change(key, old.get(key, _NOT_SET), new.get(key, _NOT_SET))
            for key in keys
            if _differ(old.get(key), new.get(key))
        ]
        # The number of threads changes the speed only.
        before = {"nodes": 1, "processes": None} | record.get("launch", {})
        now = asdict(run.launch)
        return changes + [
            _change(f"launch.{key}", before[key], now[key]) for key in ("nodes", "processes") if before[key] != now[key]
        ]
    # Started by hand or by a job array: the run's own configuration has its settings.
    resolved = run.folder / "config.yaml"
    if not resolved.is_file():
        return []
    old = base_values(resolved)
    return [
        _change(key, old.get(key, _NOT_SET), value)
        for key, value in run.expected.items()
        if not _is_place(key) and _differ(old.get(key), value) and not _same_path(old.get(key), value)
    ]


def _same_path(resolved: Any, written: Any) -> bool:
    """Return whether an absolute path may be the resolved form of a relative one. Only the file names are compared."""
    both_text = isinstance(resolved, str) and isinstance(written, str)
    return both_text and os.path.isabs(resolved) and os.path.basename(resolved) == os.path.basename(written)


def _is_place(key: str) -> bool:
    """Return whether a key is a location, which may differ between machines."""
    return key.rpartition(".")[2] in ("path", "cache_dir")


def _differ(old: Any, new: Any) -> bool:
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return len(old) != len(new) or any(_differ(*pair) for pair in zip(old, new, strict=True))
    return old != new


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key}: {old} -> {new}"
