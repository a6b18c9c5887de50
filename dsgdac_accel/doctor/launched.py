"""An examination in a launch of its own: worker 0 reports, all processes end with one status, and nobody hangs.

A worker that fails before or during the examination (its data is missing, it ran out of memory) leaves the others in a
collective. So each has a thread that watches for failures of others, and a failure ends all of them at once, with its
reason in the report.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from dsgdac_accel.distributed.failure_detection import WorkerLostError
from dsgdac_accel.doctor.meeting import SilentWorkersError, join, launched, lost, open_store
from dsgdac_accel.doctor.report import Finding, Report, named_workers

GRACE_SECONDS = 3.0
"""How long the others wait for worker 0 to speak; launchers end all processes of a machine when one fails."""
at_end: list[Callable[[], None]] = []
"""What to clean up when the examination is over, however it ends."""

_OWN_WORDS = 0.5  # seconds in which others may say that they failed, too
_LAST_WORDS = 12.0  # seconds after SIGTERM, in which the others find out who is lost; SIGKILL follows after 30
_LAST_LOOK = 1.0  # seconds in which they see that all is said


def run_examination(examine: Callable[[Report], None], say: Callable[[Report], None], timeout: float) -> int:
    """Examine in all processes of the launch, let one of them say the result, and end them.

    Args:
        examine: fills the report; collective.
        say: prints a report; called in one process, worker 0 unless that is lost.
        timeout: seconds after which a silent worker is named.

    Returns:
        The exit status, of a process that was launched alone. One of several ends here.

    Raises:
        ValueError: from `examine`, in a process that was launched alone; launch variables that make no sense.
    """
    rank, size = launched()
    report = Report()
    if size == 1:
        try:
            examine(report)
        finally:
            _clean_up()
        say(report)
        return report.exit_status
    speaking = _Speaking(rank, size, report, say)
    try:
        store = open_store(rank, size, timeout)
        speaking.watch(open_store(rank, size, timeout, keeps=False))
        join(store, rank, size, timeout)
        examine(report)
    except (SilentWorkersError, WorkerLostError) as error:
        report.add([lost(error)])
    except Exception as error:
        if not isinstance(error, (ValueError, OSError, RuntimeError)):
            import traceback

            traceback.print_exc()
        speaking.fail(" ".join(f"{error}".split()) or type(error).__name__)
    speaking.finish()


class _Speaking:
    """Which process prints the report, once, and how all of them end."""

    def __init__(self, rank: int, size: int, report: Report, say: Callable[[Report], None]) -> None:
        self.rank, self.size = rank, size
        self.report = report
        self.say = say
        self._store: Any = None
        self._lock = threading.Lock()

    def watch(self, store: Any) -> None:
        """Look for failures of other processes from now on, by a connection of its own. Call it in the main thread.

        A launcher's SIGTERM, which follows the death of any worker, then leaves time to say who died.
        """
        self._store = store
        self._signals, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._wakes = wakes  # kept, or it would be closed
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno())  # the main thread may be in a collective and see no signal
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        deadline = math.inf
        while True:
            readable, _, _ = select.select([self._signals], [], [], 0.2)
            if readable and signal.SIGTERM in self._signals.recv(64):
                deadline = min(deadline, time.monotonic() + _LAST_WORDS)
            try:
                if time.monotonic() > deadline:
                    self.report.add([Finding("error", "ended", "the launcher ended the processes (SIGTERM)")])
                    self.finish()
                if self._failures() or self._store.check(["done"]):
                    self.finish()
            except RuntimeError:
                return  # the store is gone; the main thread notices by itself

    def fail(self, message: str) -> None:
        """Tell the others that this process failed, and why."""
        own = Finding("error", "failed", f"worker {self.rank}: {message}", "", (self.rank,))
        if self._store is None:
            self.report.add([own])
            return
        self._store.set(f"failed/{self.rank}", message)

    def _failures(self) -> dict[int, str]:
        return {
            rank: self._store.get(f"failed/{rank}").decode()
            for rank in range(self.size)
            if self._store.check([f"failed/{rank}"])
        }

    def finish(self) -> NoReturn:
        """Let one process speak, and end this one."""
        with self._lock:  # the watching thread may be here already; then it ends the process
            self._finish()

    def _finish(self) -> NoReturn:
        try:
            if self._store is not None and self._failures():
                time.sleep(_OWN_WORDS)
            failures = {} if self._store is None else self._failures()
            for message in dict.fromkeys(failures.values()):
                ranks = tuple(rank for rank, said in failures.items() if said == message)
                self.report.add([Finding("error", "failed", f"{named_workers(ranks)}: {message}", "", ranks)])
            if self.rank != 0:
                self._wait_for_worker_0()
            status = self._speak() if self._may_speak() else self._status()
        except RuntimeError:  # the store is gone
            status = 1
        _clean_up()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by returning: the teardown of a process group that lost a worker aborts now and then.
        os._exit(status)

    def _speak(self) -> int:
        status = self.report.exit_status
        try:
            self.say(self.report)
        except OSError as error:
            print(f"error: the report cannot be written: {error}", file=sys.stderr)
            status = 2
        sys.stdout.flush()
        if self._store is not None:
            self._store.set("done", str(status))
            self._let_others_read()
        return status

    def _let_others_read(self) -> None:
        """Where worker 0 serves the store, it ends after those that are still there."""
        if self.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        deadline = time.monotonic() + _LAST_LOOK
        others = [f"left/{rank}" for rank in range(1, self.size)]
        while not all(self._store.check([other]) for other in others) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _wait_for_worker_0(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS + _OWN_WORDS
        while self._store is not None and not self._store.check(["done"]) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _may_speak(self) -> bool:
        if self._store is None:
            return True
        if self._store.check(["done"]):
            return False
        return self._store.compare_set("speaker", "", str(self.rank)).decode() == str(self.rank)

    def _status(self) -> int:
        if self._store is None or not self._store.check(["done"]):
            return 1
        said = int(self._store.get("done"))
        self._store.set(f"left/{self.rank}", "")
        return max(said, self.report.exit_status)


def _clean_up() -> None:
    while at_end:
        at_end.pop()()
