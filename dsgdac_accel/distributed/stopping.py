"""Stopping on a signal: any worker may get it, and all of them stop after the same optimizer step.

A loop asks `should_stop` once after every optimizer step. Call that a boundary and count them; all workers have equally
many. No message is sent for it. In each process a thread looks for a request in the rendezvous store a few times a
second, and writes one there when its own process got a signal. When it sees one, it notes, at one moment, how many
boundaries p_i its training has passed, publishes that number, and holds training at the next boundary until the numbers
of all workers are known. All then stop at boundary

    S = 1 + max_i p_i.

Why they all do. Each p_i is published once, and the store keeps the first S that anybody computes. Worker i is held at
boundary p_i + 1, which is at most S, until it knows S: nobody is past S by then, and all go on to S and stop there.
Nobody waits for ever: numbers are published whatever the training threads do, also those that wait in an exchange for a
worker that is held. A worker that leaves publishes its number, too: it had as many boundaries as all others have, so S
lies beyond the last one, and the run ends by itself. A worker that was killed publishes nothing: the others end by an
error that names it, or, where they are to go on without lost workers, stop without it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.signals import STOP_SIGNALS, SignalReceiver
from dsgdac_accel.elastic.launch import STOPPED

EXIT_STOPPED = STOPPED
"""Exit status of a run that a signal stopped and that can be gone on with (EX_TEMPFAIL of sysexits.h)."""

_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 20.0  # threads answer within a second or so; launchers kill 30 s after they asked
_GRACE_SECONDS = 15.0  # after a loss: enough for the roll call and reports that the error is made of
_STORE_PATIENCE = 3.0  # seconds: the store may be gone with the process that kept it


class StoppedBySignal(SystemExit):
    """A signal stopped the run, its checkpoint is complete: ends the process with status 75 unless it is caught."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopsOnSignals:
    """Mixed into an Accelerator that has a `group` of workers: a signal to one of them stops all at one step."""

    group: WorkerGroup
    _agreement: StopAgreement | None = None

    @contextmanager
    def stop_on_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> Iterator[None]:
        """Inside, a signal to any one worker makes `should_stop` True on all of them, after the same step. Collective.

        Without it a signal ends the process as ever. Handlers that were set for these signals do not hear of them
        inside; on exit they are back, but for an exit by SystemExit at an agreed stop: launchers send signals to the
        other workers as soon as the first one has ended, and those shall end by themselves. The third signal of a kind
        is not waited for.

            with accelerator.stop_on_signals():
                for batch in loader:
                    ...
                    optimizer.step()
                    if accelerator.should_stop():
                        accelerator.save_state(folder)
                        raise SystemExit(EXIT_STOPPED)

        Args:
            signals: which ones; by default SIGTERM and SIGUSR1.

        Raises:
            ValueError, TypeError: not in the main thread, or signals that cannot be caught.
            RuntimeError: inside of itself.
        """
        if self._agreement is not None:
            raise RuntimeError("`stop_on_signals` is entered already; once is enough for all of training.")
        receiver = SignalReceiver(signals)
        # A word that this run alone knows: stores outlive runs, and one process may run several.
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

    def should_stop(self) -> bool:
        """Whether a signal stops the run here; the same answer on all workers. False outside of `stop_on_signals`.

        To be called after every optimizer step, equally often by all workers. It talks to nobody, unless a signal came:
        then it waits, for less than a second, until all workers know where they stop.

        Raises WorkerLostError if a worker that was to agree is gone.
        """
        return self._agreement is not None and self._agreement.should_stop()

    @property
    def stop_reason(self) -> str | None:
        """Which signal to which worker stops the run, in words; None if none does."""
        return None if self._agreement is None else self._agreement.reason


class StopAgreement:
    """What one worker does to stop where all others do; see the module.

    Args:
        group: the workers.
        receiver: of this process's signals, open.
        word: unique to this run, and the same on all workers.
    """

    def __init__(self, group: WorkerGroup, receiver: SignalReceiver, word: str) -> None:
        self.group = group
        self.receiver = receiver
        self.reason: str | None = None
        self._prefix = f"dsgdac_accel/stop/{word}"
        self._workers, self._me = list(group.numbers), group.numbers[group.rank]
        self._news = threading.Condition()
        self._passed = 0
        self._held = False  # at the next boundary, until something is known
        self._stop_at: int | None = None
        self._lost: tuple[int, str] | None = None  # a worker that does not answer, and how that shows
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        if group.size > 1:
            self._store = _own_client(dist.distributed_c10d._get_default_store())
            self._thread = threading.Thread(target=self._listen, name="dsgdac-signals", daemon=True)
            self._thread.start()

    # ---- training

    @property
    def reached(self) -> bool:
        """Whether training is at the boundary where all stop."""
        return self._stop_at is not None and self._passed >= self._stop_at

    def should_stop(self) -> bool:
        """Pass a boundary, unless it is the one where all stop; see `StopsOnSignals.should_stop`."""
        if self._thread is None and self._stop_at is None and self.receiver.first is not None:
            self.reason, self._stop_at = self.receiver.first.name, self._passed + 1
        with self._news:
            while self._held:
                self._news.wait()
            if self._lost is None:
                self._passed += 1
                return self.reached
        worker, how = self._lost

        def tell() -> None:
            raise RuntimeError(how)

        self.group.guarded(tell, "agreeing on where to stop", peer=worker)
        raise AssertionError("`guarded` raises")

    def close(self) -> None:
        """Leave: others that are about to agree need not wait for this worker."""
        self._leaving.set()
        if self._thread is not None:
            self.receiver.wake()
            self._thread.join(_STORE_PATIENCE)

    # ---- the thread that listens

    def _listen(self) -> None:
        try:
            request = self._request()
            self._publish()
            if request is not None:
                self.reason = request
                self._decide()
        except Exception as error:
            # The store is gone with the process that kept it. Training goes on, or ends by errors of its own.
            self._give_up()
            if not (self._leaving.is_set() or isinstance(error, RuntimeError | OSError)):
                raise  # a mistake of ours
        if self._lost is not None:
            self._end_if_stuck()

    def _request(self) -> str | None:
        """Wait for a signal to any worker; None if this one leaves before."""
        key = f"{self._prefix}/request"
        while True:
            mine = self.receiver.first
            if mine is not None:  # the first of several requests counts
                self._store.compare_set(key, "", f"{mine.name} to worker {self._me}")
            if self._store.check([key]):
                return self._store.get(key).decode()
            if self._leaving.is_set():
                return None
            self.receiver.wait(_POLL_SECONDS)

    def _publish(self) -> None:
        with self._news:
            passed, self._held = self._passed, True
        self._store.set(f"{self._prefix}/passed/{self._me}", str(passed))

    def _decide(self) -> None:
        """Wait for the numbers of all workers, and let training go on to where all stop."""
        passed: dict[int, int] = {}
        waited_for = list(self._workers)
        deadline = time.monotonic() + min(_ANSWER_SECONDS, self.group.timeout)
        while waited_for and not self._leaving.is_set():
            for worker in list(waited_for):
                # Before looking: what a dead worker has not written by then it never will.
                dead, late = self._is_dead(worker), time.monotonic() > deadline
                if self._store.check([f"{self._prefix}/passed/{worker}"]):
                    passed[worker] = int(self._store.get(f"{self._prefix}/passed/{worker}"))
                elif not (dead or late):
                    continue
                elif self.group.on_loss == "stop":
                    how = "connection lost: the process is gone" if dead else "timed out: no answer to a signal"
                    return self._release(lost=(worker, how))
                waited_for.remove(worker)
            if waited_for:
                self.receiver.wait(_POLL_SECONDS / 5)
        if self._leaving.is_set():
            return self._release()
        mine = str(1 + max(passed.values()))
        return self._release(stop_at=int(self._store.compare_set(f"{self._prefix}/stop_at", "", mine)))

    def _is_dead(self, worker: int) -> bool:
        return worker not in self.group.numbers or self.group.lives(worker) is False

    def _release(self, stop_at: int | None = None, lost: tuple[int, str] | None = None) -> None:
        """Let training go on to where it stops."""
        with self._news:
            self._stop_at, self._lost, self._held = stop_at, lost, False
            self._news.notify_all()

    def _give_up(self) -> None:
        self._release()
        if self._leaving.is_set():
            return
        self.receiver.deaf = True
        if self.receiver.first is not None:
            os.kill(os.getpid(), self.receiver.first)  # what it was meant to do, it does now

    def _end_if_stuck(self) -> None:
        """End a process that got a signal, and whose training waits where no error comes, for a worker that is lost.

        Such as a GPU that waits for one that is gone. Without a handler the signal would have ended it at once.
        """
        assert self._lost is not None
        since: float | None = None
        while not self._leaving.is_set():
            if self.receiver.first is not None:
                since = time.monotonic() if since is None else since
                if time.monotonic() - since > _GRACE_SECONDS:
                    worker, how = self._lost
                    _say(
                        f"error: worker {self._me} got {self.receiver.first.name}, and worker {worker} was lost "
                        f"({how}). No error came up in {_GRACE_SECONDS:g} s, so it ends here."
                    )
                    os._exit(1)
            self.receiver.wait(1.0)


def _own_client(store: Any) -> Any:
    """The same store by a connection of its own: others may wait in theirs."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
