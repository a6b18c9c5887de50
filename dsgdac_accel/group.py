"""The workers that train together: their process groups, their collectives, and what happens when one is lost.

Everything the library says to other workers goes through a `WorkerGroup`. The groups are its own, so a user's
collectives never interleave with ours, and every wait ends within `timeout`: with an error that names the lost worker,
or, where the run is to go on, with the survivors in groups of their own.

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
import itertools
import logging
import os
import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.failures import FailureReports, this_machine
from dsgdac_accel.survivors import Agreement, Standing, WorkersChangedError, agree

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnLoss = Literal["stop", "continue"]

_TRANSPORT_ERRORS = re.compile(
    r"timed? ?out|connection|read error|write error|broken pipe|socket|monitoredBarrier|nccl|gloo/transport",
    re.IGNORECASE,
)
_SURELY_TRANSPORT = re.compile(r"gloo/|monitoredBarrier|NCCL")
_MEAN_CHUNK = 2**22  # elements summed at a time, which bounds the float64 copy to 32 MiB
_REJOIN_SECONDS = 30.0  # for survivors that have just agreed in the store to connect to each other


class WorkerLostError(RuntimeError):
    """Another worker did not answer: it was killed, raised an error, hangs, or ran out of data."""


class WorkerGroup:
    """All workers of a run, numbered 0 to `size` - 1; `rank` is this one.

    Without a process group, or with a single process, it is a group of one and every method is local.
    Construction is collective: every worker must build its groups in the same order.

    Args:
        device: where the parameters live; decides the backend (gloo on CPU, NCCL on CUDA).
        timeout: seconds after which a silent worker counts as lost.
        on_loss: what a lost worker means to the others: they "stop", or "continue" without it (gloo only). Then a loss
            gives the default process group new members, too.

    Raises:
        ValueError: gossip is not possible on `device`, or going on is not.
    """

    def __init__(self, device: torch.device, timeout: float = 600.0, on_loss: OnLoss = "stop") -> None:
        self.device = device
        self.timeout = timeout
        self.on_loss = on_loss
        launched = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if launched else 0
        self.size = dist.get_world_size() if launched else 1
        self.backend = "gloo"
        self.steps_taken = 0
        """Optimizer steps so far, for error messages; kept by the mixer."""
        self._channels = itertools.count()
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._when_changed: list[Callable[[], None]] = []
        self.closed = False
        self.numbers = list(range(self.size))
        """Of the workers that are left, by rank: their ranks before any was lost, which is what messages call them."""
        self.lost: list[int] = []
        """Numbers of the workers that were lost so far."""
        self._collectives = self._sections = self._inside = self._generation = 0
        self._furthest = Standing({})
        self._apart = False
        self._world = dist.group.WORLD if launched else None
        self.poster: ThreadPoolExecutor | None = None
        self._reports = FailureReports(0, {0: ("", 0)})
        if self.size == 1:
            return
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"gossip between processes needs CPU (gloo) or CUDA (NCCL); got device '{device}'. "
                f"Launch one process, or train on CPU or CUDA."
            )
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        if on_loss == "continue" and self.backend == "nccl":
            raise ValueError(
                "on_worker_loss='continue' is for CPU workers (gloo): with NCCL a lost one leaves kernels waiting on "
                "the GPU, and a watchdog ends the process. Use 'stop', and go on from a checkpoint."
            )
        # gloo's isend writes to the socket until it is full: 5 to 8 ms for 10 MB, better spent on a thread of its own.
        # ONE thread, so that everything is posted in the order of the calls, which is the same on all workers.
        self.poster = ThreadPoolExecutor(1, "dsgdac-post") if self.backend == "gloo" else None
        self._reports = FailureReports(self.rank, dict.fromkeys(self.numbers, ("", 0)))
        self._connect()
        processes = self.gather((this_machine(), os.getpid()), "meeting the workers")
        self._reports = FailureReports(self.rank, dict(enumerate(processes)))

    def _connect(self) -> None:
        # Every rank creates every group, in the same order: new_group is itself collective.
        self._control = self._new_group("gloo")
        self.exchange_group = self._new_group(self.backend)
        self._reduction = self._control if self.backend == "gloo" else self._new_group(self.backend)
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._world = dist.group.WORLD

    def _new_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        options: dict[str, Any] = (
            {"device_id": self.device} if backend == "nccl" and self.device.index is not None else {}
        )
        members = list(range(self.size)) if ranks is None else list(ranks)
        handle = dist.new_group(members, backend=backend, timeout=timedelta(seconds=self.timeout), **options)
        if backend == "nccl" and self.rank in members:
            # Point-to-point as a communicator's very first call is undefined where some rank has nothing to send.
            dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
        return handle

    def new_channel(self) -> int:
        """A number that tells the messages of one user of the group from those of another, alike on all workers."""
        return next(self._channels)

    def subgroup(self, members: tuple[int, ...]) -> Any:
        """Handle of the group of `members`; collective over ALL workers at its first call for these members."""
        if len(members) == self.size:
            return self.exchange_group
        if members not in self._subgroups:
            self._subgroups[members] = self._new_group(self.backend, members)
        return self._subgroups[members]

    def register(self, owner: Any) -> None:
        """Of something that mixes, call `drain()` before reductions and broadcasts, since NCCL may hang beside
        point-to-point in flight, and `abandon()` and `regroup(step)` when workers were lost."""
        self._owners[len(self._owners)] = weakref.ref(owner)

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """Call it after workers were lost, when `rank`, `size` and `numbers` are those of the survivors."""
        self._when_changed.append(callback)

    def _living_owners(self) -> dict[int, Any]:
        owners = {key: reference() for key, reference in self._owners.items()}
        return {key: owner for key, owner in owners.items() if owner is not None}

    def _silence(self) -> None:
        for owner in self._living_owners().values():
            owner.drain()

    def limit_default_group(self) -> None:
        """Let collectives of others, on the default group, give up on a silent worker after `timeout`, too."""
        if self.size > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout), dist.group.WORLD)

    def close(self) -> None:
        """Refuse further use: the process group is about to end."""
        self.closed = True

    def serves(self, device: torch.device, timeout: float) -> bool:
        """Whether this group can be used again, for another training in the same process and process group."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        return not self.closed and self._world is world and (self.device, self.timeout) == (device, timeout)

    def require_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError("training has ended (`end_training`); make a new accelerator to train on.")

    # ---- collectives: synchronous, on groups of their own, each with a name for the error message

    def meet(self, what: str) -> None:
        """Wait until every worker is here; otherwise the error names those that are missing."""
        if self.size > 1:
            self._together(
                lambda: dist.monitored_barrier(
                    group=self._control, timeout=timedelta(seconds=self.timeout), wait_all_ranks=True
                ),
                what,
            )

    def mean_(self, tensor: Tensor, what: str, others: Sequence[Tensor] = ()) -> Tensor:
        """Replace contiguous `tensor` (D,) by its mean over the workers, the same bits on all of them.

        Summed in float64, so that workers which are equal have exactly themselves as their mean.

        Args:
            tensor: this process's first worker's.
            what: names the collective in errors.
            others: those of further workers in this process, as many in every process; left as they are.
        """
        if self.size == 1 and not others:
            return tensor
        if self.size > 1:
            self._silence()
        for start in range(0, len(tensor), _MEAN_CHUNK):
            part = tensor[start : start + _MEAN_CHUNK]

            def mean(start: int = start, part: Tensor = part) -> Tensor:
                wide = part.double()
                for other in others:
                    wide.add_(other[start : start + _MEAN_CHUNK])
                if self.size > 1:
                    dist.all_reduce(wide, group=self._reduction)
                return wide.div_(self.size * (1 + len(others)))

            part.copy_(self._together(mean, what))
        return tensor

    def max_(self, tensor: Tensor, what: str) -> Tensor:
        """Replace `tensor` by its maximum over the workers."""
        if self.size > 1:
            self._silence()

            def largest() -> Tensor:
                found = tensor.clone()
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._reduction)
                return found

            tensor.copy_(self._together(largest, what))
        return tensor

    def broadcast_(self, tensor: Tensor, what: str) -> Tensor:
        """Overwrite `tensor` on every worker by worker 0's, bit by bit, whatever its dtype and strides."""
        if self.size > 1 and tensor.numel():
            self._silence()

            # As contiguous bytes: gloo sends strided tensors wrongly without an error, and knows few dtypes.
            def first() -> Tensor:
                values = tensor.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(values.reshape(-1).view(torch.uint8), 0, group=self._reduction)
                return values

            values = self._together(first, what)
            if self.rank != 0:
                tensor.detach().copy_(values)
        return tensor

    def gather(self, value: T, what: str) -> list[T]:
        """The small picklable `value` of every worker, in order of rank, on every worker."""
        if self.size == 1:
            return [value]

        def everyone() -> list[Any]:
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, (what, value), group=self._control)
            return answers

        answers = self._together(everyone, what)
        for rank, (where, _) in enumerate(answers):
            if where != answers[0][0]:
                raise RuntimeError(
                    f"the workers are at different places: worker {self.numbers[0]} in {answers[0][0]}, worker "
                    f"{self.numbers[rank]} in {where}. All of them must take every optimizer step and enter every "
                    f"`prepare` and `deployed_model`."
                )
        return [answer for _, answer in answers]

    def require_equal(self, value: T, what: str, advice: str = "") -> None:
        """Raise on every worker unless all hold the same `value`; `advice` says what to do about it."""
        values = self.gather(value, f"comparing the {what} of all workers")
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"all workers must have the same {what}; worker {self.numbers[0]} has {_short(values[0])} and "
                    f"worker {self.numbers[rank]} has {_short(other)}.{advice and ' '}{advice}"
                )

    def _together(self, communicate: Callable[[], T], what: str) -> T:
        """A collective of all workers; where the run is to go on, done again by the survivors if one was lost."""
        if self.on_loss == "stop" or self._apart:
            return self.guarded(communicate, what)
        while self.size > 1:
            results: list[T] = []
            try:
                results.append(self.guarded(communicate, what))
                self.guarded(lambda: dist.barrier(group=self._control), what)
                self._collectives += 1
                return results[0]
            except WorkersChangedError as change:
                if self._collectives < self._furthest.collectives:  # some have passed the barrier, so all were in it
                    self._collectives += 1
                    self.raise_inside_section(change)
                    return results[0]
                self.raise_inside_section(change)
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
            who = f"worker {', '.join(str(self.numbers[int(rank)]) for rank in re.findall(r'[0-9]+', named[1]))}"
        elif peer is not None:
            who = f"worker {self.numbers[peer]}"
        else:
            missing = [] if self._reports.first() else self._reports.missing(silent)
            who = f"worker {', '.join(map(str, missing))}" if missing else "a worker"
        happened = f"did not answer within {self.timeout:g} s" if silent else "was lost"
        me = self.numbers[self.rank]
        mine = f"{who} {happened} in {what}, as worker {me} saw it"
        first = self.report(mine)
        news = "" if first == mine else f" First report of this run: {first}."
        if peer is not None and not first.endswith(f"as worker {self.numbers[peer]} saw it"):
            # The peer may itself have waited in vain for another worker: then that one is to blame.
            reported = self._reports.of(self.numbers[peer])
            news += f" Worker {self.numbers[peer]} reports: {reported}." if reported else ""
        return WorkerLostError(
            f"worker {me}: {who} {happened} in {what}.{news} Look at that worker's own output for its error. "
            f"If it only was slow (a long evaluation, a long save), raise `timeout`; if it ran out of data, pass its "
            f"loader through `prepare` or `equal_steps`; if it left out an `optimizer.step()`, let it take every step, "
            f"since each one mixes. ({cause})"
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
            while True:
                self._generation += 1
                for owner in owners.values():
                    owner.abandon()
                self._disconnect()
                standing = Standing(
                    {key: owner.step for key, owner in owners.items()}, self._collectives, self._sections
                )
                agreed = self._agree(me, standing, accused, f"{what}: {cause}")
                if self._reconnected(agreed, owners):
                    break
                accused = []
        finally:
            self._apart = False
        lost = [number for number in before if number not in self.numbers]
        self.lost += lost
        who = f"worker {', '.join(map(str, lost))} was lost" if lost else "a connection was lost"
        left = f"{self.size} of {len(before)} workers go on: {', '.join(map(str, self.numbers))}"
        message = f"{who} in {what} ({cause}); {left}"
        if self.rank == 0:
            logger.warning("%s", message)
        for callback in self._when_changed:
            callback()
        return WorkersChangedError(f"{message}. Do the same again.")

    def _disconnect(self) -> None:
        self._control = self.exchange_group = self._reduction = self._world = None
        self._subgroups = {}
        if dist.is_initialized():
            dist.destroy_process_group()

    def _agree(self, me: int, standing: Standing, accused: Sequence[int], what: str) -> Agreement:
        reports = self._reports
        prefix = f"dsgdac_accel/survivors/{self._generation}"
        try:
            agreed = agree(
                reports.store, prefix, me, self.numbers, standing, reports.lives, self.timeout, accused=accused
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

    def _reconnected(self, agreed: Agreement, owners: dict[int, Any]) -> bool:
        """Whether all survivors met; if not, another one was lost meanwhile."""
        self.numbers = list(agreed.members)
        self.rank, self.size = self.numbers.index(self._reports.number), len(self.numbers)
        self._furthest = agreed.furthest
        store = dist.PrefixStore(f"dsgdac_accel/generation/{self._generation}", self._reports.store)
        patience = timedelta(seconds=min(self.timeout, _REJOIN_SECONDS))
        try:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=patience)
            self.limit_default_group()
            if self.size > 1:
                self._connect()
            for key, owner in owners.items():
                owner.regroup(agreed.furthest.steps.get(key, owner.step))
            if self.size > 1:
                dist.barrier(group=self._control)
        except RuntimeError as error:
            _forget_frames(error)
            return False
        return True


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


def _short(value: object, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
