"""A watchdog for devices that wait for a lost worker, while the host goes on or hangs without a timeout."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

_GRACE = 5.0  # seconds after the timeout in which the host may notice by itself, which ends in an exception
_PAUSES = 50e-6, 1e-3  # seconds between two looks at the device: at first, and at most


@dataclass(eq=False)
class Pending:
    """A communication that the device may still wait for. Names as in `WorkerGroup.guarded`."""

    what: str
    peer: int | None = None
    works: list[Any] | None = None
    """None while it is being posted."""
    since: float | None = field(default_factory=time.monotonic)
    """Start of the wait for it, by `time.monotonic`; None between posting and waiting."""

    def is_done(self) -> bool:
        """Whether the device has completed it."""
        return self.works is not None and all(work.is_completed() for work in self.works)

    def error(self) -> RuntimeError:
        """The error that a transport with a timeout would raise."""
        waited = 0.0 if self.since is None else time.monotonic() - self.since
        return RuntimeError(f"timed out: the device has waited for {waited:.0f} s")


def is_ready_within(seconds: float, is_ready: Callable[[], bool]) -> bool:
    """Wait until `is_ready()`, and return whether it was ready in time."""
    deadline, (pause, most) = time.monotonic() + seconds, _PAUSES
    while not is_ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, most)
    return True


class Watchdog:
    """Lists the communications in flight. A thread ends the process some seconds after one of them is overdue.

    By then the host hangs in a call that nothing can interrupt, such as `loss.item()`. Otherwise it has noticed the
    loss in `wait_until`, and its group has stopped the watchdog. The message names the lost worker, and tells where
    the host hangs.
    """

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()
        self._name_loss: Callable[[Pending], str] | None = None
        self.seconds = 0.0
        """Longest wait for a communication."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, name_loss: Callable[[Pending], str], seconds: float) -> None:
        """Watch the communications that are posted from now on.

        Args:
            name_loss: reports that a communication failed, and returns the message that names the lost worker.
            seconds: longest wait for a communication.
        """
        self._name_loss, self.seconds = name_loss, seconds

    def stop(self) -> None:
        """Leave the process to itself: it ends, or it has noticed the loss."""
        self._stopped.set()
        self._pending.clear()

    def post(self, post: Callable[[], list[Any]], what: str, peer: int | None) -> list[Any]:
        """Call `post` and remember the works that it returns until they are done."""
        while self._pending and self._pending[0].is_done():
            self._pending.popleft()
        pending = Pending(what, peer)
        if not self._stopped.is_set():
            self._pending.append(pending)
            if self._thread is None and self._name_loss is not None:
                self._thread = threading.Thread(target=self._run, name="dsgdac-watchdog", daemon=True)
                self._thread.start()
        try:
            pending.works = post()
        except BaseException:
            pending.works = []
            raise
        finally:
            pending.since = None
        return pending.works

    def waits_for(self, work: Any) -> None:
        """Note that the device begins to wait for this work."""
        for pending in self._pending:
            if pending.since is None and any(work is posted for posted in pending.works or ()):
                pending.since = time.monotonic()

    def overdue(self, seconds: float) -> Pending | None:
        """Return the first communication that has been waited for longer than this."""
        now = time.monotonic()
        # `since` is read once: the training thread may reset it meanwhile.
        late = (p for p in list(self._pending) if (since := p.since) is not None and now > since + seconds)
        return next((pending for pending in late if not pending.is_done()), None)

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self.seconds / 4)):
            overdue = self.overdue(self.seconds + _GRACE)
            if overdue is not None and self._name_loss is not None:
                message = self._name_loss(overdue)
                if not self._stopped.is_set():
                    _end_process(message)


def wait_until(is_ready: Callable[[], bool], watchdogs: Sequence[Watchdog]) -> tuple[Watchdog, Pending] | None:
    """Wait for the device. If it hangs, return the overdue communication, which may be that of another group."""
    began = Pending("waiting for the device", works=[])
    overdue: list[tuple[Watchdog, Pending]] = []

    def is_over() -> bool:
        overdue.extend((dog, late) for dog in watchdogs if (late := dog.overdue(dog.seconds)) is not None)
        return bool(overdue) or is_ready()

    if watchdogs and not is_ready_within(max(watchdog.seconds for watchdog in watchdogs), is_over):
        overdue.append((watchdogs[0], began))
    return overdue[0] if overdue else None


def _end_process(message: str) -> NoReturn:
    """End this process, whose main thread hangs, before NCCL aborts it with a message that names nobody."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(f"{message} This process hangs here and is ended:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(1)
