"""Watchdogs for waits that never end: of a device for a lost worker, and of workers for each other."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
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
from dsgdac_accel.distributed.members import Members

Reached = Callable[[], bool]
"""Whether the device has come to a place in its queue."""
PATIENCE = 2
"""How many times the timeout the host waits for a device that waits for no worker: it may compute for so long."""

_GRACE = 5.0  # seconds after the timeout in which the host may notice by itself, which ends in an exception
_PAUSES = 50e-6, 1e-3  # shortest and longest seconds between two looks at the device
_SHARE = 1 / 64  # of the time waited so far: waits of 10 ms ended 0.2 ms late, with doubling pauses 1 ms
_FLAGS = 4096  # places at a time, more than a device queues
_LONG = 3.0  # seconds after which a process tells the others what it waits for
_LONG_OWN = 10.0  # where nothing is counted: the end of one collective may reach two processes apart
_WAITS = "dsgdac_accel/waits"  # a key in the store
_OWN = "own"
_PLACES = 8  # that are remembered of a stream
_OWN_COLLECTIVES = {"all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "monitored_barrier"}
_ALL_ALIKE = (
    "Take every step and enter every save, evaluation and collective on all workers. Share what one of them finds out "
    "(a reason to stop, a batch to skip, an error that it catches) before it acts, as by `accelerator.reduce`."
)


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


@dataclass(frozen=True)
class Wait:
    """A communication that a process waits in.

    A stream is a sequence of communications: the collectives of a group, at place 0, or the exchanges of an optimizer,
    at their rounds.
    """

    what: str
    stream: str
    place: int
    number: int
    """How often this process has entered the stream at this place, and others must have."""
    needs: Sequence[int]
    """Launched ranks of the other processes in it."""


class Waits:
    """Ends the processes of a run that wait for each other, as where one saves alone and the others take a step.

    Each counts what it has entered. After some seconds it tells the others through the store what it waits for, and its
    counts. A process is stuck if another one that it needs is stuck in something else, and has not entered as much.
    Counts only grow, so such workers wait forever, and neither a slow network nor a slow worker looks like that.
    Collectives of the script itself on all processes cannot be counted; the thread sees the training thread in them.
    """

    def __init__(self) -> None:
        self._entered: dict[str, dict[int, int]] = {}
        """How often each stream was entered, by place; the latest places."""
        self._current: Wait | None = None
        self._thread: threading.Thread | None = None
        self._seen_first: dict[tuple[int, int], int] = {}

    def start(self, store: Any, members: Members, report: Callable[[str], str]) -> None:
        """Watch this process from now on, in place of an earlier training in it.

        Args:
            store: the rendezvous store.
            members: all processes of the run.
            report: tells the others why the run ends, and returns the first report.
        """
        self._members, self._report, self._training_thread = members, report, threading.get_ident()
        self._store = store
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            self._store = store.clone()  # a connection of its own, since others may wait in theirs
        if self._thread is None or not self._thread.is_alive():  # not in a forked process
            self._thread = threading.Thread(target=self._run, name="dsgdac-waits", daemon=True)
            self._thread.start()

    def enter(self, stream: str, place: int = 0) -> None:
        """Count a communication that this process takes part in from now on."""
        places = self._entered.setdefault(stream, {})
        places[place] = places.pop(place, 0) + 1
        if len(places) > _PLACES:
            del places[next(iter(places))]

    @contextlib.contextmanager
    def waiting(self, what: str, stream: str, needs: Sequence[int]) -> Iterator[None]:
        """Inside, the process waits in the communication of a stream that it entered last, for the launched ranks."""
        place, number = next(reversed(self._entered.get(stream, {0: 0}).items()))
        before, self._current = self._current, Wait(what, stream, place, number, list(needs))
        try:
            yield
        finally:
            self._current = before

    def _run(self) -> None:
        seen, since, told, serial, beat = None, 0.0, False, 0, 0
        while True:
            time.sleep(max(1.0, self._members.size / 50))  # all of them may ask for all others
            wait = self._current or self._own_wait()
            try:
                if wait is None or wait != seen:
                    seen, since, serial = wait, time.monotonic(), serial + 1
                    if told:
                        self._tell("")
                        told = False
                elif time.monotonic() - since > (_LONG_OWN if wait.stream == _OWN else _LONG):
                    beat, told = beat + 1, True
                    entered = {stream: list(places.items()) for stream, places in self._entered.items()}
                    self._tell(json.dumps([serial, beat, vars(wait), entered]))
                    stuck = self._stuck()
                    if stuck and (self._current or self._own_wait()) == wait:
                        self._end(stuck)
            except (RuntimeError, OSError):
                pass  # the training thread has gone on meanwhile, or the store is gone with the process that kept it

    def _tell(self, status: str) -> None:
        self._store.set(f"{_WAITS}/{self._members.launched[self._members.rank]}", status)

    def _own_wait(self) -> Wait | None:
        """The collective of all processes that the script called itself, if the training thread is in one."""
        frame: Any = sys._current_frames().get(self._training_thread)
        if frame is None or frame.f_code.co_filename != dist.distributed_c10d.__file__:
            return None
        name = frame.f_code.co_name
        if name not in _OWN_COLLECTIVES or frame.f_locals.get("group") not in (None, dist.group.WORLD):
            return None
        return Wait(f"torch.distributed.{name}", _OWN, 0, id(frame), list(self._members.launched))

    def _stuck(self) -> dict[int, Wait]:
        """The processes that wait for each other, by launched rank, with this one; empty if it may go on."""
        me = self._members.launched[self._members.rank]
        found: dict[int, tuple[int, int, Wait, dict[str, Any]]] = {}
        to_ask = [me]
        while to_ask:
            rank = to_ask.pop()
            key = f"{_WAITS}/{rank}"
            status = self._store.get(key).decode() if rank not in found and self._store.check([key]) else ""
            if status:
                serial, beat, wait, entered = json.loads(status)
                found[rank] = serial, beat, Wait(**wait), entered
                to_ask += found[rank][2].needs

        def lacks(wait: Wait, other: int) -> bool:
            _, _, theirs, entered = found[other]
            if wait.stream == _OWN:
                return theirs.stream != _OWN
            places = dict(entered.get(wait.stream, ()))
            forgotten = bool(places) and wait.place < min(places)
            return not forgotten and places.get(wait.place, 0) < wait.number

        before = -1
        while len(found) != before:
            before = len(found)
            found = {
                rank: status
                for rank, status in found.items()
                if any(other in found and lacks(status[2], other) for other in status[2].needs if other != rank)
            }
        # A process that told what it waits for may have gone on since, so all must tell the same again.
        again = [
            self._seen_first.setdefault((rank, status[0]), status[1]) < status[1] for rank, status in found.items()
        ]
        return {rank: status[2] for rank, status in sorted(found.items())} if me in found and all(again) else {}

    def _end(self, stuck: dict[int, Wait]) -> None:
        names = {rank: self._members.named([self._members.launched.index(rank)]) for rank in stuck}
        listed = list(names)[:4]
        waits = ", ".join(f"{names[rank]} in {stuck[rank].what}" for rank in listed)
        more = f" and {len(stuck) - len(listed)} more" if len(stuck) > len(listed) else ""
        message = self._report(f"the workers wait for each other: {waits}{more}")
        wait = self._current
        if wait is not None and wait.stream.startswith("exchange"):
            time.sleep(_GRACE)  # the end of the others breaks its connections, which raises an error here
            if self._current is not wait:
                return
        _end_process(f"{message}. {_ALL_ALIKE}")


WAITS = Waits()
"""The waits of this process."""


def _end_process(message: str) -> NoReturn:
    """End this process, whose main thread hangs, before NCCL aborts it with a message that names nobody."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(f"{message} This process hangs here and is ended:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(1)
