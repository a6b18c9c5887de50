"""A watchdog for devices that wait for a lost worker, while the host goes on or hangs without a timeout."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dsgdac_accel.devices import pinned

Reached = Callable[[], bool]
"""Whether the device has come to a place in its queue."""
PATIENCE = 2
"""How many times the timeout the host waits for a device that waits for no worker: it may compute for so long."""

_GRACE = 5.0  # seconds after the timeout in which the host may notice by itself, which ends in an exception
_PAUSES = 50e-6, 1e-3  # shortest and longest seconds between two looks at the device
_SHARE = 1 / 64  # of the time waited so far: waits of 10 ms ended 0.2 ms late, with doubling pauses 1 ms
_FLAGS = 4096  # places at a time, more than a device queues


@dataclass(eq=False)
class Pending:
    """A communication that the device may still wait for. Names as in `WorkerGroup.guarded`."""

    what: str
    peer: int | None = None
    works: list[Any] | None = None
    """None while it is being posted."""
    since: float | None = field(default_factory=time.monotonic)
    """When the host began to post it, or the device to wait for it, by `time.monotonic`; None in between."""
    begun: Reached | None = None
    """Whether the device has come to the wait; None before the host has queued it."""
    ended: Reached | None = None
    """Whether it has left it."""

    def is_done(self) -> bool:
        """Whether the device has completed it. Asks the device, so only the training thread may call this."""
        return self.works is not None and all(work.is_completed() for work in self.works)

    def is_overdue(self, seconds: float) -> bool:
        """Whether it has been waited for longer than this. Asks the memory of the host alone."""
        if self.since is None and self.begun is not None and self.begun():
            self.since = time.monotonic()
        since = self.since  # read once: the training thread may reset it meanwhile
        return since is not None and time.monotonic() > since + seconds and not (self.ended and self.ended())

    def error(self) -> dist.DistBackendError:
        """The error that a transport with a timeout would raise."""
        waited = 0.0 if self.since is None else time.monotonic() - self.since
        return dist.DistBackendError(f"timed out: the device has waited for {waited:.0f} s")


class HostFlags:
    """Places in the queue of a CUDA device that any thread sees reached in the memory of the host.

    A thread that asked CUDA could wait for a lock, which a main thread that hangs in a synchronization may hold.

    Args:
        device: with the queue.
    """

    @torch.inference_mode(False)
    def __init__(self, device: torch.device) -> None:
        self._flags = pinned((_FLAGS,), torch.uint8)
        self._seen = self._flags.numpy()
        self._one = torch.ones(1, dtype=torch.uint8, device=device)
        self._places = itertools.cycle(range(_FLAGS))

    def mark(self) -> Reached:
        """Mark the present end of the queue of the current stream."""
        place = next(self._places)
        self._seen[place] = 0
        self._flags[place : place + 1].copy_(self._one, non_blocking=True)
        return lambda: bool(self._seen[place] == 1)


class Watchdog:
    """Lists the communications in flight. A thread ends the process some seconds after one of them is overdue.

    By then the host hangs in a call that nothing can interrupt, such as `loss.item()`. Otherwise it has noticed the
    loss in `wait_until`, and its group has stopped the watchdog. The message names the lost worker, and tells where
    the host hangs.

    Args:
        mark: marks the present end of the device's queue.
    """

    def __init__(self, mark: Callable[[], Reached]) -> None:
        self._mark = mark
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

    @contextlib.contextmanager
    def waiting(self, work: Any) -> Iterator[None]:
        """Mark where the device waits for this work. Inside, the host queues that wait; works are taken in turn."""
        found = (pending for pending in self._pending if any(work is posted for posted in pending.works or ()))
        pending = next(found, None)
        if pending is not None and pending.begun is None:
            pending.begun = self._mark()
        yield
        if pending is not None and pending.works and work is pending.works[-1]:
            pending.ended = self._mark()

    def overdue(self, seconds: float) -> Pending | None:
        """Return the first communication that has been waited for longer than this. Any thread may ask."""
        return next((pending for pending in list(self._pending) if pending.is_overdue(seconds)), None)

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self.seconds / 4)):
            overdue = self.overdue(self.seconds + _GRACE)
            if overdue is not None and self._name_loss is not None:
                message = self._name_loss(overdue)
                if not self._stopped.is_set():
                    _end_process(message)


def wait_until(is_ready: Callable[[], bool], watchdogs: Sequence[Watchdog]) -> tuple[Watchdog, Pending] | None:
    """Wait for the device. If it hangs, return the overdue communication, which may be that of another group.

    A device that computes is waited for longer: it may hang in communication of which the library does not know.
    """
    if not watchdogs:
        return None
    waiting, began, (least, most) = Pending("waiting for the device", works=[]), time.monotonic(), _PAUSES
    while True:
        for watchdog in watchdogs:
            overdue = watchdog.overdue(watchdog.seconds)
            if overdue is not None:
                return watchdog, overdue
        if is_ready():
            return None
        waited = time.monotonic() - began
        if waited > PATIENCE * max(watchdog.seconds for watchdog in watchdogs):
            return watchdogs[0], waiting
        time.sleep(min(max(least, waited * _SHARE), most))


def _end_process(message: str) -> NoReturn:
    """End this process, whose main thread hangs, before NCCL aborts it with a message that names nobody."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(f"{message} This process hangs here and is ended:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(1)
