"""Continuing after a loss: the survivors reconnect, repeat what they did together, and train on.

A worker that finds another one lost closes all its connections. That wakes up the survivors that wait for it in turn,
and all of them agree in the rendezvous store on who survives and how far each is (see `membership`). Then:

- A collective has two stages, the communication itself and a barrier. No worker passes the barrier before all have
  entered it with their result in hand. So if any survivor has passed, those that were interrupted in the barrier are
  done too; if none has, all repeat the collective.
- A section, such as an evaluation, ends by WorkersChangedError and is repeated as a whole: its work was shared out.
- Steps are not repeated. Rounds up to the step of the most advanced survivor are skipped; see `Mixer.regroup`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from dsgdac_accel.distributed.failure_detection import Failure, WorkerLostError, WorkersChangedError, short_cause
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.launcher_protocol import DROPPED
from dsgdac_accel.distributed.loss_policy import OnLoss, StopOnLoss
from dsgdac_accel.elastic.collectives import repeat_collectives
from dsgdac_accel.elastic.heartbeat import Heartbeat
from dsgdac_accel.elastic.membership import Agreement, Progress, agree
from dsgdac_accel.elastic.watched_store import WatchedStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Timeout of each successive attempt to reconnect while no other worker is lost.

gloo takes five times as long where a worker dies in the milliseconds that connecting takes; on a very busy machine
connecting may need longer than the first of these.
"""


class ContinueWithSurvivors(StopOnLoss):
    """The loss policy "continue". After a loss it changes the group's members and process groups.

    Raises ValueError for a group that uses NCCL.
    """

    name: OnLoss = "continue"

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group.detector)
        if group.process_groups.backend == "nccl":
            raise ValueError(
                "on_worker_loss='continue' is for CPU workers (gloo): with NCCL, a lost worker leaves kernels waiting "
                "on the GPU, and a watchdog ends the process. Use 'stop', and resume from a checkpoint."
            )
        self.group = group
        self.generation = 0
        """Number of attempts of the workers to reconnect."""
        self._collectives = 0  # completed
        self._sections = 0  # completed
        self._open_sections = 0
        self._furthest = Progress({})  # of any survivor of the last loss
        self._reconnecting = False
        self._store: Any = None  # kept, for torch holds only its C++ part, and later groups connect through it too

    # ---- shared work

    def collective(self, run: Callable[[], T], what: str) -> T:
        """Run it in two stages; if a worker is lost, the survivors run it again unless it is complete."""
        if self._reconnecting:
            return run()
        while self.group.size > 1:
            results: list[T] = []
            try:
                results.append(run())
                self.group.guarded(lambda: dist.barrier(group=self.group.process_groups.control), what)
                self._collectives += 1
                return results[0]
            except WorkersChangedError as change:
                done = self._collectives < self._furthest.collectives  # some have passed the barrier: all were in it
                self._collectives += done
                self._raise_inside_section(change)
                if done:
                    return results[0]
        return run()

    @contextmanager
    def section(self) -> Iterator[None]:
        """Count the section as completed if nothing was raised in it. Only the outermost one counts."""
        self._open_sections += 1
        try:
            yield
            if self._open_sections == 1:
                self._sections += 1
        finally:
            self._open_sections -= 1

    def retry_after_loss(self, work: Callable[[], T]) -> T:
        while True:
            try:
                with self.section():
                    return work()
            except WorkersChangedError as change:
                if self._open_sections:
                    raise
                logger.info("starting over: %s", change)

    def complete_exchange(self, wait: Callable[[], None]) -> bool:
        try:
            wait()
            return True
        except WorkersChangedError as change:
            self._raise_inside_section(change)
            return False

    def cover_collectives(self, accelerator: Any) -> None:
        repeat_collectives(accelerator, self.group)

    def _raise_inside_section(self, change: WorkersChangedError) -> None:
        """Raise unless no section is open here that is open everywhere: another worker may just have left it."""
        if self._open_sections and self._furthest.sections <= self._sections:
            raise change

    # ---- after a loss

    def handle(self, failure: Failure, error: RuntimeError) -> NoReturn:
        """Reconnect the survivors, and raise WorkersChangedError."""
        if self._reconnecting:
            super().handle(failure, error)
        _forget_frames(error)  # their variables keep connections open that the other survivors must see closed
        raise self._recover(failure) from None

    def _recover(self, failure: Failure) -> WorkersChangedError:
        """Agree with the other survivors, and connect to them. Everything under way here is given up."""
        group, members, reports = self.group, self.group.members, self.detector.reports
        before = list(members.original_ranks)
        accused = [] if failure.peer is None else [failure.peer]
        if accused and not failure.is_silence and reports.is_alive(accused[0]):
            accused = []  # its connection broke, and it may only be late to notice
        mixers = group.registered()
        self._reconnecting = True
        try:
            with Heartbeat(reports.store, members.original_rank) as heartbeat:
                attempts = 0
                while True:
                    self.generation += 1
                    for mixer in mixers.values():
                        mixer.abandon()
                    group.process_groups.disconnect()
                    group.poster.forget()
                    agreed = self._agree(failure, mixers, accused, heartbeat)
                    attempts = attempts if len(agreed.members) == group.size else 0
                    trouble = self._reconnect(agreed, mixers, heartbeat, _CONNECT_SECONDS[attempts])
                    if not trouble:
                        break
                    accused, attempts = [], attempts + 1
                    if attempts == len(_CONNECT_SECONDS):
                        raise WorkerLostError(
                            f"worker {members.original_rank}: a worker was lost in {failure.what}, and the "
                            f"{group.size} survivors could not connect to each other in {attempts} attempts "
                            f"({trouble}). Resume from a checkpoint."
                        )
        finally:
            self._reconnecting = False
        lost = [worker for worker in before if worker not in members.original_ranks]
        reports.tell_launcher(*(f"{DROPPED}/{worker}" for worker in lost))
        who = f"worker {', '.join(map(str, lost))} was lost" if lost else "a connection was lost"
        survivors = f"{group.size} of {len(before)} workers continue: {', '.join(map(str, members.original_ranks))}"
        message = f"{who} in {failure.what} ({failure.cause}); {survivors}"
        if group.rank == 0:
            logger.warning("%s", message)
        group.workers_changed()
        return WorkersChangedError(f"{message}. Do the same work once more.")

    def _agree(self, failure: Failure, mixers: dict[int, Any], accused: list[int], heartbeat: Heartbeat) -> Agreement:
        members, reports = self.group.members, self.detector.reports
        me = members.original_rank
        progress = Progress({number: mixer.step for number, mixer in mixers.items()}, self._collectives, self._sections)
        try:
            prefix, timeout = f"dsgdac_accel/survivors/{self.generation}", self.group.timeout
            agreed = agree(reports, prefix, members.original_ranks, progress, timeout, accused, heartbeat.seen_from)
        except (RuntimeError, OSError) as error:
            raise WorkerLostError(
                f"worker {me}: a worker was lost in {failure.what} ({failure.cause}), and the rendezvous store is gone "
                f"too ({short_cause(error)}), which the survivors need. It lives in worker 0 or in its launcher; start "
                f"the workers with `dsgdac launch`, which keeps it outside of the workers."
            ) from error
        if agreed is None:
            raise WorkerLostError(
                f"worker {me}: the others continue without this worker, which did not answer them in time. It noticed "
                f"in {failure.what} ({failure.cause}); raise `timeout` if it was only slow."
            )
        return agreed

    def _reconnect(self, agreed: Agreement, mixers: dict[int, Any], heartbeat: Heartbeat, seconds: float) -> str:
        """Connect the survivors. Returns why it failed, mostly since another one was lost; empty if it did not."""
        group, groups, reports = self.group, self.group.process_groups, self.detector.reports
        group.members.original_ranks = list(agreed.members)
        self._furthest = agreed.furthest
        prefix, began = f"dsgdac_accel/generation/{self.generation}", time.monotonic()
        failed = f"{prefix}/failed"

        def in_vain() -> str:
            gone = [worker for worker in agreed.members if reports.is_alive(worker) is False]
            if gone:
                return f"worker {gone[0]} was lost"
            if not self._reconnecting:  # once connected, nobody beats any more
                return ""
            if reports.store.check([failed]):
                return "another worker could not connect"
            silent = [worker for worker in agreed.members if heartbeat.missed_since(began, worker)]
            return f"worker {silent[0]} does not answer" if silent else ""

        try:
            groups.limit = timedelta(seconds=min(seconds, group.timeout))
            self._store = WatchedStore(reports.store, prefix, in_vain, group.timeout)
            dist.init_process_group(
                "gloo", store=self._store, rank=group.rank, world_size=group.size, timeout=groups.limit
            )
            if group.size > 1:
                groups.connect()
            for number, mixer in mixers.items():
                mixer.regroup(agreed.furthest.steps.get(number, mixer.step))
            groups.limit_all(timedelta(seconds=group.timeout))
            if group.size > 1:
                dist.barrier(group=groups.control)
        except RuntimeError as error:
            trouble = short_cause(error) or type(error).__name__
            _forget_frames(error)
            with suppress(RuntimeError, OSError):
                reports.store.set(failed, "")
            return trouble
        return ""


def _forget_frames(error: BaseException) -> None:
    """Clear the variables of all calls that an error came through."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
