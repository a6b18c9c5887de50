"""Stopping on a signal or a request: any worker may get it, and all of them stop after the same optimizer step.

A training loop calls `should_stop` once after every optimizer step. Call that a boundary, and count boundaries; all
workers have equally many. No message is sent for them. In each process a thread looks for a request in the rendezvous
store a few times a second, and writes one there when its own process got a signal. When it sees a request, it notes, at
one moment, how many boundaries p_i its training has passed, publishes that number, and holds training at the next
boundary until the numbers of all workers are known. All then stop at boundary

    S = 1 + max_i p_i.

Why they all do: each p_i is published once, and the store keeps the first S that any worker computes. Worker i is held
at boundary p_i + 1, which is at most S, until it knows S. So nobody is past S by then, and all continue to S and stop.

Why nobody waits forever: numbers are published by the threads, even while training waits in an exchange for a worker
that is held. A worker that leaves publishes its number too. It had as many boundaries as all others have, so S lies
beyond the last one, and the run ends by itself. A worker that was killed publishes nothing: the others end by an error
that names it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from dsgdac_accel.distributed.failure_detection import Failure
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.signals import STOP_SIGNALS, SignalReceiver

EXIT_STOPPED = 75
"""Exit status of a worker that a signal stopped, with a complete checkpoint to resume from (EX_TEMPFAIL)."""

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 20.0  # threads answer within a second or so; launchers kill 30 s after they asked
_JOIN_SECONDS = 3.0  # the store may be gone with the process that kept it


class StoppedBySignal(SystemExit):
    """A signal stopped the run, and its checkpoint is complete. Ends the process with status 75 unless it is caught."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopOnSignals:
    """Stops all workers of a group after the same step when any one of them gets a signal or calls `request`."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._agreement: StopAgreement | None = None

    @contextmanager
    def listening(self, signals: Iterable[int] | None = STOP_SIGNALS) -> Iterator[None]:
        """Inside, a signal to any one worker, or `request` on it, makes `should_stop` True on all of them, after the
        same step. Collective.

        Signals are noted by a `SignalReceiver`. Its handlers stay after SystemExit at an agreed stop: launchers signal
        the other workers as soon as the first one has ended, and those should end by themselves.

        Raises like `SignalReceiver`, and RuntimeError inside another such context.
        """
        if self._agreement is not None:
            raise RuntimeError(
                "`stop_on_signals` or `stop_on_request` is entered already; once is enough for all of training."
            )
        receiver = SignalReceiver(signals)
        # Unique to this run: stores outlive runs, and one process may run several.
        word = self.group.all_gather_object(uuid.uuid4().hex, "listening for signals")[0]
        receiver.open()
        agreement = self._agreement = StopAgreement(self.group, receiver, word)
        ends_here = False
        try:
            yield
        except SystemExit:
            ends_here = agreement.reached
            raise
        finally:
            self._agreement = None
            agreement.close()
            if not ends_here:
                receiver.close()

    def request(self, reason: str) -> None:
        """Ask all workers to stop, like a signal to this one. Sends nothing, does not wait, and works in any thread.

        Raises RuntimeError outside of `listening`, and ValueError for an empty reason.
        """
        if not isinstance(reason, str) or not reason:
            raise ValueError(f"the reason of a stop must be a word or a few, such as 'preemption'; got {reason!r}.")
        if self._agreement is None:
            raise RuntimeError(
                "`request_stop` needs workers that listen. Train inside `stop_on_request` (or `stop_on_signals`), with "
                "the Trainer by GossipCallback(stop_on_request=True)."
            )
        self._agreement.receiver.request(reason)

    def should_stop(self) -> bool:
        """Whether a signal stops the run at this step; the same answer on all workers. False outside of `listening`.

        Call it after every optimizer step, equally often on all workers. It sends nothing unless a signal came. Then it
        waits, for less than a second, until all workers know where they stop.

        Raises WorkerLostError if a worker that had to agree is gone.
        """
        return self._agreement is not None and self._agreement.should_stop()

    @property
    def reason(self) -> str | None:
        """The signal or request that stops the run, as in "SIGTERM to worker 1"; None if nothing does."""
        return None if self._agreement is None else self._agreement.reason


class StopAgreement:
    """One worker's part in stopping at the same boundary as all others; see the module.

    `receiver` is open. `word` is unique to this run, and the same on all workers.
    """

    def __init__(self, group: WorkerGroup, receiver: SignalReceiver, word: str) -> None:
        self.group = group
        self.receiver = receiver
        self.reason: str | None = None
        self._prefix = f"dsgdac_accel/stop/{word}"
        self._news = threading.Condition()
        self._passed = 0
        self._held = False  # at the next boundary, until S is known
        self._stop_at: int | None = None
        self._lost: Failure | None = None  # of a worker that does not answer
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        if group.size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store
            with suppress(AttributeError, NotImplementedError, RuntimeError):
                self._store = store.clone()  # a connection of its own, since others may wait in theirs
            self._thread = threading.Thread(target=self._listen, name="dsgdac-signals", daemon=True)
            self._thread.start()

    @property
    def reached(self) -> bool:
        """Whether training is at the boundary where all stop."""
        return self._stop_at is not None and self._passed >= self._stop_at

    def should_stop(self) -> bool:
        """Pass a boundary, unless it is the one where all stop."""
        if self._thread is None and self._stop_at is None and self.receiver.reason is not None:
            self.reason, self._stop_at = self.receiver.reason, self._passed + 1
        with self._news:
            while self._held:
                self._news.wait()
            if self._lost is None:
                self._passed += 1
                return self.reached
        raise self.group.detector.worker_lost(self._lost)

    def close(self) -> None:
        """Leave: workers that are about to agree need not wait for this one."""
        self._leaving.set()
        if self._thread is not None:
            self.receiver.wake()
            self._thread.join(_JOIN_SECONDS)

    # ---- in the thread that listens

    def _listen(self) -> None:
        try:
            request = self._request()
            self._publish()
            if request is not None:
                self.reason = request
                self._decide()
        except Exception as error:
            # The store is gone with the process that kept it. Training continues, or ends by errors of its own.
            self._release()
            if not self._leaving.is_set():
                self.receiver.deaf = True
                if self.receiver.first is not None:
                    os.kill(os.getpid(), self.receiver.first)  # nobody can agree, so it takes its usual effect now
                if not isinstance(error, RuntimeError | OSError):
                    raise  # a mistake of ours

    def _request(self) -> str | None:
        """Wait for a signal to any worker, or its request; None if this one leaves before."""
        key = f"{self._prefix}/request"
        while True:
            mine = self.receiver.reason
            if mine is not None:  # the first of several requests counts
                link = "of" if self.receiver.first is None else "to"
                self._store.compare_set(key, "", f"{mine} {link} {self.group.members.me}")
            if self._store.check([key]):
                return self._store.get(key).decode()
            if self._leaving.is_set():
                return None
            self.receiver.wait(_POLL_SECONDS)

    def _publish(self) -> None:
        with self._news:
            passed, self._held = self._passed, True
        self._store.set(f"{self._prefix}/passed/{self.group.rank}", str(passed))

    def _decide(self) -> None:
        """Wait for the numbers of all workers, and let training continue to boundary S."""
        passed: dict[int, int] = {}
        waited_for = list(range(self.group.size))
        deadline = time.monotonic() + min(_ANSWER_SECONDS, self.group.timeout)
        while waited_for and not self._leaving.is_set():
            for worker in list(waited_for):
                # Before looking: what a dead worker has not written by then it never will.
                dead = self.group.detector.reports.is_alive(worker) is False
                late = time.monotonic() > deadline
                if self._store.check([f"{self._prefix}/passed/{worker}"]):
                    passed[worker] = int(self._store.get(f"{self._prefix}/passed/{worker}"))
                    waited_for.remove(worker)
                elif dead or late:
                    how = "connection lost: the process is gone" if dead else "timed out: no answer to a signal"
                    what = f"agreeing on where to stop at step {self.group.steps_taken}"
                    return self._release(lost=Failure(what, how, worker))
            if waited_for:
                self.receiver.wait(_POLL_SECONDS / 5)
        if self._leaving.is_set():
            return self._release()
        mine = str(1 + max(passed.values()))
        return self._release(stop_at=int(self._store.compare_set(f"{self._prefix}/stop_at", "", mine)))

    def _release(self, stop_at: int | None = None, lost: Failure | None = None) -> None:
        """Let training continue to where it stops."""
        with self._news:
            self._stop_at, self._lost, self._held = stop_at, lost, False
            self._news.notify_all()
