"""What happens to a `WorkerGroup` when a worker is lost: an error that names it, or going on without it.

Going on. Whoever finds a worker lost lets go of all its connections, which wakes up the survivors that wait for it in
turn, and all of them meet in the store (see `survivors`). There they learn who is left and how far the furthest is:

- Collectives are completed in two stages, the communication itself and a barrier. Nobody passes the barrier of a
  collective before all have entered it with their result in hand. So if any survivor has passed, those that were
  interrupted in the barrier are done, too; if none has, all do it again.
- A section, such as an evaluation, is left by an error and done again as a whole, since work was shared out in it.
- Steps are not redone: in rounds up to that of the furthest worker everybody keeps to itself, see `Mixer.regroup`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from dsgdac_accel.distributed.failure_reports import FailureReports
from dsgdac_accel.elastic.membership import Agreement, SignsOfLife, Standing, WatchedStore, agree

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnLoss = Literal["stop", "continue"]

_TRANSPORT_ERRORS = re.compile(
    r"timed? ?out|connection|read error|write error|broken pipe|socket|monitoredBarrier|nccl|gloo/transport",
    re.IGNORECASE,
)
_SURELY_TRANSPORT = re.compile(r"gloo/|monitoredBarrier|NCCL")
_CONNECT_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""For survivors that have found each other in the store to connect, try by try while no other is lost.

gloo takes five times as long where a worker dies in the milliseconds that connecting takes; on a very busy machine it
may need longer than the first of these.
"""


_AVERAGING = "averaging the workers"
_ON_ALL_WORKERS = (
    "Enter `deployed_model` and call `save_model` and evaluation on all workers, not under `is_main_process`. "
)


class WorkerLostError(RuntimeError):
    """Another worker did not answer: it was killed, raised an error, hangs, or ran out of data."""


class WorkersChangedError(RuntimeError):
    """A worker was lost during shared work, and the survivors have reconnected. All of them get this error.

    Do the same work once more, with the remaining workers.
    """


class HandlesLosses:
    """Mixed into `WorkerGroup`, which makes the connections."""

    timeout: float
    on_loss: OnLoss
    rank: int
    size: int
    numbers: list[int]
    lost: list[int]
    steps_taken: int
    _control: Any
    _reports: FailureReports
    _when_changed: list[Callable[[], None]]
    _living_owners: Callable[[], dict[int, Any]]
    _connect: Callable[[], None]
    _disconnect: Callable[[], None]
    _connect_patience: float | None
    _meeting: Any
    _connect_timeout: Callable[[], timedelta]
    limit_groups: Callable[[], None]
    require_open: Callable[[], None]

    def _begin_without_losses(self) -> None:
        self._collectives = self._sections = self._inside = self._generation = 0
        self._furthest = Standing({})
        self._apart = False

    def together(self, communicate: Callable[[], T], what: str, strict: bool = False) -> T:
        """A collective of all workers; where the run is to go on, done again by the survivors if one was lost.

        With `strict`, others' code runs in it, whose errors may sound like the transport's.
        """
        if self.on_loss == "stop" or self._apart:
            return self.guarded(communicate, what, strict=strict)
        while self.size > 1:
            results: list[T] = []
            try:
                results.append(self.guarded(communicate, what, strict=strict))
                self.guarded(lambda: dist.barrier(group=self._control), what)
                self._collectives += 1
                return results[0]
            except WorkersChangedError as change:
                done = self._collectives < self._furthest.collectives  # some have passed the barrier, so all were in it
                self._collectives += done
                self.raise_inside_section(change)
                if done:
                    return results[0]
        return communicate()

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """Inside, work is shared out: a lost worker ends it on all survivors with WorkersChangedError. They nest."""
        self._inside += 1
        try:
            yield
            if self._inside == 1:
                self._sections += 1
        finally:
            self._inside -= 1

    def redone(self, work: Callable[[], T]) -> T:
        """The result of a section, begun anew as often as workers are lost in it."""
        while True:
            try:
                with self.section():
                    return work()
            except WorkersChangedError as change:
                if self._inside:
                    raise
                logger.info("begun anew: %s", change)

    def complete_exchange(self, wait: Callable[[], None]) -> bool:
        """Wait for a posted exchange; False if workers were lost in it, and this round is dropped.

        Raises WorkersChangedError inside a section, which then starts over.
        """
        try:
            wait()
            return True
        except WorkersChangedError as change:
            self.raise_inside_section(change)
            return False

    def raise_inside_section(self, change: WorkersChangedError) -> None:
        """Raise unless no section is open here that is open everywhere: others may have left it just now."""
        if self._inside and self._furthest.sections <= self._sections:
            raise change

    # ---- failures

    def guarded(self, communicate: Callable[[], T], what: str, peer: int | None = None, strict: bool = False) -> T:
        """Run `communicate`; turn the transport's error into one that names the lost worker and what was going on.

        Args:
            communicate: posts or waits for something that needs other workers.
            what: names it in the error, with the step.
            peer: rank of the only other worker involved, where there is but one.
            strict: others' code runs in it, whose own timeouts and connections are none of ours.

        Raises:
            WorkerLostError: a worker was lost, and the run ends.
            WorkersChangedError: a worker was lost, and the survivors have met anew.
        """
        self.require_open()
        try:
            return communicate()
        except RuntimeError as error:
            own = type(error).__module__.startswith("dsgdac_accel")  # said already, closer to where it happened
            pattern = _SURELY_TRANSPORT if strict else _TRANSPORT_ERRORS
            if own or not (isinstance(error, dist.DistError) or pattern.search(str(error))):
                raise  # a mistake of ours or of the caller, not a lost worker
            where = what if re.search(r"step \d", what) else f"{what} at step {self.steps_taken}"
            cause = _short_cause(error)
            if self.on_loss == "stop" or self._apart:
                raise self._lost(where, cause, peer) from error
            _forget_frames(error)  # they hold on to connections that the other survivors must see closed
        raise self._go_on(where, cause, peer)

    def _lost(self, what: str, cause: str, peer: int | None) -> WorkerLostError:
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", cause)
        silent = _means_silence(cause)
        if named:
            blamed = [self.numbers[int(rank)] for rank in re.findall(r"[0-9]+", named[1])]
        elif peer is not None:
            blamed = [self.numbers[peer]]
        else:
            gone, late = ([], []) if self._reports.first() else self._reports.missing()
            blamed = sorted(gone + late if silent else gone)
        who = _named(blamed) if blamed else "a worker"
        if not (named or peer is not None or blamed) and late:
            who = f"{_named(late)}, which {'do' if len(late) > 1 else 'does'} not answer,"
        if any(self._reports.lives(number) is False for number in blamed):
            silent = False  # it has ended, however that came to light
        lost = "were lost" if len(blamed) > 1 else "was lost"
        happened = f"did not answer within {self.timeout:g} s" if silent else lost
        me = self.numbers[self.rank]
        mine = f"{who} {happened} in {what}, as worker {me} saw it"
        first = self.report(mine)
        news = "" if first == mine else f" First report of this run: {first}."
        if peer is not None and not first.endswith(f"as worker {self.numbers[peer]} saw it"):
            # The peer may itself have waited in vain for another worker: then that one is to blame.
            reported = self._reports.of(self.numbers[peer])
            news += f" Worker {self.numbers[peer]} reports: {reported}." if reported else ""
        advice = _ON_ALL_WORKERS if what.startswith(_AVERAGING) else ""
        return WorkerLostError(
            f"worker {me}: {who} {happened} in {what}.{news} Look at that worker's own output for its error. "
            f"{advice}If it only was slow (a long evaluation, a long save), raise `timeout`; if it ran out of data, "
            f"pass its loader through `prepare` or `equal_steps`; if it left out an `optimizer.step()`, let it take "
            f"every step, since each one mixes. ({cause})"
        )

    def report(self, message: str) -> str:
        """Tell the other workers why this run ends; returns the first message that any worker wrote."""
        return self._reports.write(message)

    @property
    def local_rank(self) -> int:
        """Place of this process among those on its machine."""
        machines = [self._reports.processes[number][0] for number in self.numbers[: self.rank + 1]]
        return machines.count(machines[-1]) - 1

    def lives(self, number: int) -> bool | None:
        """Whether the process of the worker with this number is there; None for one on another machine."""
        return self._reports.lives(number)

    # ---- going on without lost workers

    def _go_on(self, what: str, cause: str, peer: int | None) -> WorkersChangedError:
        """Meet the other survivors and connect to them. All that was under way here is given up."""
        owners = self._living_owners()
        me = self.numbers[self.rank]
        accused = [] if peer is None else [self.numbers[peer]]
        if accused and not _means_silence(cause) and self._reports.lives(accused[0]):
            accused = []  # its connection broke, and it may only be late to notice
        before = list(self.numbers)
        self._apart = True
        try:
            with SignsOfLife(self._reports.store, me) as signs:
                tries = 0
                while True:
                    self._generation += 1
                    for owner in owners.values():
                        owner.abandon()
                    self._disconnect()
                    standing = Standing(
                        {key: owner.step for key, owner in owners.items()}, self._collectives, self._sections
                    )
                    agreed = self._agree(me, standing, accused, f"{what}: {cause}", signs)
                    tries = tries if len(agreed.members) == self.size else 0
                    trouble = self._trouble_reconnecting(agreed, owners, signs, _CONNECT_SECONDS[tries])
                    if not trouble:
                        break
                    accused, tries = [], tries + 1
                    if tries == len(_CONNECT_SECONDS):
                        raise WorkerLostError(
                            f"worker {me}: a worker was lost in {what}, and the {self.size} survivors are there, but "
                            f"could not connect to each other in {tries} tries ({trouble})."
                        )
        finally:
            self._apart = False
        lost = [number for number in before if number not in self.numbers]
        self.lost += lost
        self._reports.dismiss(lost)
        who = f"worker {', '.join(map(str, lost))} was lost" if lost else "a connection was lost"
        left = f"{self.size} of {len(before)} workers go on: {', '.join(map(str, self.numbers))}"
        message = f"{who} in {what} ({cause}); {left}"
        if self.rank == 0:
            logger.warning("%s", message)
        for callback in self._when_changed:
            callback()
        return WorkersChangedError(f"{message}. Do the same again.")

    def _agree(self, me: int, standing: Standing, accused: Sequence[int], what: str, signs: SignsOfLife) -> Agreement:
        reports = self._reports
        prefix = f"dsgdac_accel/survivors/{self._generation}"
        try:
            agreed = agree(
                reports.store, prefix, me, self.numbers, standing, reports.lives, self.timeout, accused, signs.shown_by
            )
        except (RuntimeError, OSError) as error:
            raise WorkerLostError(
                f"worker {me}: a worker was lost in {what}, and the survivors cannot meet, for the rendezvous store is "
                f"gone, too ({_short_cause(error)}). It lives in worker 0 or in its launcher; `dsgdac launch` keeps it "
                f"out of the workers."
            ) from error
        if agreed is None:
            raise WorkerLostError(
                f"worker {me}: the others go on without this worker, which did not answer them in time. It has "
                f"noticed in {what}."
            )
        return agreed

    def _trouble_reconnecting(
        self, agreed: Agreement, owners: dict[int, Any], signs: SignsOfLife, patience: float
    ) -> str:
        """Why not all survivors are connected now; empty if they are. Mostly, another one was lost meanwhile."""
        self.numbers = list(agreed.members)
        self.rank, self.size = self.numbers.index(self._reports.number), len(self.numbers)
        self._furthest = agreed.furthest
        store, prefix = self._reports.store, f"dsgdac_accel/generation/{self._generation}"
        members, began, failed = agreed.members, time.monotonic(), f"{prefix}/failed"

        def in_vain() -> str:
            gone = [number for number in members if self._reports.lives(number) is False]
            if gone or not self._apart:  # connected, nobody shows signs any more
                return f"worker {gone[0]} was lost" if gone else ""
            if store.check([failed]):
                return "another worker could not connect"
            silent = [number for number in members if signs.missed_since(began, number)]
            return f"worker {silent[0]} does not answer" if silent else ""

        self._connect_patience = patience
        try:
            # Kept, for torch holds on to its C++ part only, and later groups meet in it, too.
            self._meeting = WatchedStore(store, prefix, in_vain, self.timeout)
            dist.init_process_group(
                "gloo", store=self._meeting, rank=self.rank, world_size=self.size, timeout=self._connect_timeout()
            )
            if self.size > 1:
                self._connect()
            for key, owner in owners.items():
                owner.regroup(agreed.furthest.steps.get(key, owner.step))
            self.limit_groups()
            if self.size > 1:
                dist.barrier(group=self._control)
        except RuntimeError as error:
            trouble = _short_cause(error) or type(error).__name__
            _forget_frames(error)
            with contextlib.suppress(RuntimeError, OSError):
                store.set(failed, "")
            return trouble
        finally:
            self._connect_patience = None
        return ""


def _named(numbers: Sequence[int]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _means_silence(cause: str) -> bool:
    return "timed out" in cause.lower() or "failed to pass" in cause


def _forget_frames(error: BaseException) -> None:
    """Clear the variables of all calls that an error came through."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _short_cause(error: BaseException) -> str:
    """The transport's first sentence, without the place in its source."""
    return re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". This is typically")[0]
