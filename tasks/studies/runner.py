"""Launches the runs of a sweep, a few at a time, and reports how they ended."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tasks.common.config import ConfigError
from tasks.studies.plan import PlannedRun
from tasks.studies.state import LOG, RunState, read_record, state_of, write_record

GRACE_SECONDS = 40.0
"""Time for an interrupted run to end by itself; torchrun gives its own workers 30 seconds."""

TAIL_LINES = 15
"""Number of lines shown from the end of a failed run's log."""

# A sweep may itself run in a launched process, whose rank and rendezvous are not those of its runs.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip

Say = Callable[[str], None]


@dataclass
class SweepResult:
    """How the runs of a sweep ended."""

    finished: list[PlannedRun] = field(default_factory=list)
    skipped: list[PlannedRun] = field(default_factory=list)
    """Runs that were finished before."""
    failed: list[tuple[PlannedRun, int]] = field(default_factory=list)
    """Failed runs with their exit status; that of a signal is negative."""


def run_sweep(runs: Sequence[PlannedRun], jobs: int = 1, rerun_changed: bool = False, say: Say = print) -> SweepResult:
    """Launch every run that is not finished. A failed run does not stop the others.

    Args:
        runs: the runs in order.
        jobs: number of runs at a time.
        rerun_changed: run again what finished with other settings, and keep its folder under another name.
        say: receives the progress, one line at a time.

    Raises:
        ConfigError: before anything starts, if a finished run has other settings than the sweep asks for now.
        KeyboardInterrupt: after the runs under way and all processes that they started have ended.
    """
    states = [state_of(run) for run in runs]
    changed = [state for state in states if state.status == "changed"]
    if changed and not rerun_changed:
        raise ConfigError(_changed_message(changed))
    for state in changed:
        say(f"{state.run.name}: settings changed; the earlier run is now in {_move_aside(state.run.folder).name}")
    result = SweepResult(skipped=[state.run for state in states if state.status == "finished"])
    pending = [state.run for state in states if state.status != "finished"]
    if result.skipped:
        say(f"{len(result.skipped)} of {len(runs)} runs are finished already")
    _Launches(pending, jobs, say).run_all(result)
    return result


def failure_report(result: SweepResult) -> str:
    """Return the failed runs by name, each with the end of its log; "" if there are none."""
    blocks = [
        f"{run.name} failed ({_status_in_words(status)}); the end of {run.folder / LOG}:\n{_tail(run.folder / LOG)}"
        for run, status in result.failed
    ]
    return "\n\n".join(blocks)


class _Launches:
    """The runs of one call, their child processes, and the clock."""

    def __init__(self, runs: Sequence[PlannedRun], jobs: int, say: Say) -> None:
        self._runs, self._jobs, self._say = list(runs), jobs, say
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._begin = time.monotonic()
        self._done = 0

    def run_all(self, result: SweepResult) -> None:
        with _termination_as_interrupt(), ThreadPoolExecutor(self._jobs) as pool:
            waiting = iter(self._runs)
            under_way: dict[Future[int], PlannedRun] = {}
            try:
                while True:
                    while len(under_way) < self._jobs and (run := next(waiting, None)) is not None:
                        under_way[pool.submit(self._launch, run)] = run
                    if not under_way:
                        return
                    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                        self._note(under_way.pop(future), future.result(), result)
            except BaseException:
                self._stop()
                raise

    def _launch(self, run: PlannedRun) -> int:
        """Start a run, wait for it, and return its exit status."""
        write_record(run)
        began = time.monotonic()
        variables = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
        if run.launch.threads:
            variables["OMP_NUM_THREADS"] = str(run.launch.threads)
        with open(run.folder / LOG, "wb") as log:
            with self._lock:
                if self._stopping:
                    return -signal.SIGINT
                # In its own session: it can be ended with all its children, and Ctrl-C does not reach it directly.
                child = subprocess.Popen(
                    run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=variables,
                    start_new_session=True,
                )  # fmt: skip
                self._children.add(child)
            status = child.wait()
        with self._lock:
            self._children.discard(child)
            interrupted = self._stopping
        if status == 0 and state_of(run).status != "finished":
            status = 1
            with open(run.folder / LOG, "ab") as log:
                log.write(b"\nthe run ended without an error, but has not written summary.json with these settings\n")
        write_record(run, None if interrupted else status, round(time.monotonic() - began, 3))
        return status

    def _note(self, run: PlannedRun, status: int, result: SweepResult) -> None:
        self._done += 1
        seconds = read_record(run.folder)["seconds"]
        if status == 0:
            result.finished.append(run)
            end = "finished"
        else:
            result.failed.append((run, status))
            end = f"FAILED ({_status_in_words(status)})"
        failed = f"; {len(result.failed)} failed" if result.failed else ""
        self._say(
            f"[{self._done}/{len(self._runs)}] {run.name} {end} in {duration(seconds)}{failed}{self._remaining()}"
        )

    def _remaining(self) -> str:
        left = len(self._runs) - self._done
        if not left:
            return ""
        return f"; about {duration((time.monotonic() - self._begin) / self._done * left)} left"

    def _stop(self) -> None:
        """End the runs under way and all processes that they started: SIGINT first, SIGKILL after the grace time.

        A sweep that was started in the background ignores SIGINT, and its runs inherit that. They get SIGTERM.
        """
        interrupt = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
        with self._lock:
            self._stopping = True
            children = list(self._children)
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            for child in children:
                _signal_session(child, interrupt)
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when interrupted again, or when a launcher has ended before its workers
            for child in children:
                _signal_session(child, signal.SIGKILL)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, which a cluster sends at the time limit, raise KeyboardInterrupt like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _signal_session(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has ended


def _changed_message(changed: Sequence[RunState]) -> str:
    first = changed[0]
    more = f" and {len(first.changes) - 1} more" if len(first.changes) > 1 else ""
    others = f" (and {len(changed) - 1} other runs)" if len(changed) > 1 else ""
    return (
        f"{first.run.name}{others} finished with other settings than the sweep asks for now: {first.changes[0]}{more}. "
        "Undo the change, use another output_dir, or pass --rerun-changed, which keeps the earlier folder beside the "
        "new one."
    )


def _move_aside(folder: Path) -> Path:
    number = 1
    while (target := folder.with_name(f"{folder.name}.earlier_{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def _status_in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"


def _tail(log: Path) -> str:
    try:
        text = log.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return "  (no log)"
    # Progress bars overwrite their line: keep the last text of each.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join(f"  {line}" for line in [line for line in lines if line.strip()][-TAIL_LINES:]) or "  (empty)"


def duration(seconds: float) -> str:
    """Format seconds in a suitable unit.

    >>> [duration(seconds) for seconds in (3.21, 75, 4000, 200000)]
    ['3.2 s', '75 s', '67 min', '2.3 days']
    """
    if not math.isfinite(seconds) or seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if unit != "h" else f"{seconds / size:.1f} h"
    return f"{seconds / 86400:.1f} days"
