"""The workers that train together: their process groups and their collectives.

Everything the library says to other workers goes through a `WorkerGroup`. The groups are its own, so a user's
collectives never interleave with ours, and every wait ends within `timeout`; see `losses`.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.distributed.failure_detection import HandlesLosses, OnLoss
from dsgdac_accel.distributed.failure_reports import FailureReports, this_machine

T = TypeVar("T")

_MEAN_CHUNK = 2**22  # elements summed at a time, which bounds the float64 copy to 32 MiB


class WorkerGroup(HandlesLosses):
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
        self._connect_patience: float | None = None  # in seconds, where another than `timeout`
        self._impatient: list[Any] = []
        self._begin_without_losses()
        self._world: Any = dist.group.WORLD if launched else None
        self.poster: ThreadPoolExecutor | None = None
        self.last_posted: Future[Any] | None = None
        """What was last given to the poster, by whichever exchange."""
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
        self._apart = True  # who is lost before all have met ends the run
        self.guarded(self._connect, "connecting the workers")
        processes = self.all_gather_object((this_machine(), os.getpid()), "meeting the workers")
        self._apart = False
        self._reports = FailureReports(self.rank, dict(enumerate(processes)))
        self._reports.all_met()

    def _connect(self) -> None:
        # Every rank creates every group, in the same order: new_group is itself collective.
        self._control = self.new_group("gloo")
        self.exchange_group = self.new_group(self.backend)
        self._reduction = self._control if self.backend == "gloo" else self.new_group(self.backend)
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._world = dist.group.WORLD

    def _disconnect(self) -> None:
        """Let go of every connection, so that whoever waits for this worker is woken up by an error."""
        self._control = self.exchange_group = self._reduction = self._world = None
        self._subgroups = {}
        self._impatient.clear()
        self.last_posted = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch counts a default group that failed to connect, too, and would look for the others under another name.
        dist.distributed_c10d._world.group_count = 0

    def new_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """A process group of these ranks, by default of all, that ends with a loss. Collective over ALL workers."""
        options: dict[str, Any] = (
            {"device_id": self.device} if backend == "nccl" and self.device.index is not None else {}
        )
        members = list(range(self.size)) if ranks is None else list(ranks)
        handle = dist.new_group(members, backend=backend, timeout=self._connect_timeout(), **options)
        if backend == "nccl" and self.rank in members:
            # Point-to-point as a communicator's very first call is undefined where some rank has nothing to send.
            dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
        if self._connect_patience is not None and self.rank in members:
            self._impatient.append(handle)
        return handle

    def _connect_timeout(self) -> timedelta:
        return timedelta(seconds=min(self.timeout, self._connect_patience or self.timeout))

    def new_channel(self) -> int:
        """A number that tells the messages of one user of the group from those of another, alike on all workers."""
        return next(self._channels)

    def subgroup(self, members: tuple[int, ...]) -> Any:
        """Handle of the group of `members`; collective over ALL workers at its first call for these members."""
        if len(members) == self.size:
            return self.exchange_group
        if members not in self._subgroups:
            self._subgroups[members] = self.new_group(self.backend, members)
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
            self._limit(dist.group.WORLD)

    def limit_groups(self) -> None:
        """Let groups that were made with the patience of connecting give up on a silent worker after `timeout`, too."""
        self.limit_default_group()
        for handle in self._impatient:
            self._limit(handle)
        self._impatient.clear()

    def _limit(self, handle: Any) -> None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout), handle)

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

    def barrier(self, what: str) -> None:
        """Wait until every worker is here; otherwise the error names those that are missing."""
        if self.size > 1:
            self.together(
                lambda: dist.monitored_barrier(
                    group=self._control, timeout=timedelta(seconds=self.timeout), wait_all_ranks=True
                ),
                what,
            )

    def all_reduce_mean_(self, tensor: Tensor, what: str, others: Sequence[Tensor] = ()) -> Tensor:
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

            part.copy_(self.together(mean, what))
        return tensor

    def all_reduce_max_(self, tensor: Tensor, what: str) -> Tensor:
        """Replace `tensor` by its maximum over the workers."""
        if self.size > 1:
            self._silence()

            def largest() -> Tensor:
                found = tensor.clone()
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._reduction)
                return found

            tensor.copy_(self.together(largest, what))
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

            values = self.together(first, what)
            if self.rank != 0:
                tensor.detach().copy_(values)
        return tensor

    def all_gather_object(self, value: T, what: str) -> list[T]:
        """The small picklable `value` of every worker, in order of rank, on every worker."""
        if self.size == 1:
            return [value]

        def everyone() -> list[Any]:
            answers: list[Any] = [None] * self.size
            dist.all_gather_object(answers, (what, value), group=self._control)
            return answers

        answers = self.together(everyone, what)
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
        values = self.all_gather_object(value, f"comparing the {what} of all workers")
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"all workers must have the same {what}; worker {self.numbers[0]} has {_short(values[0])} and "
                    f"worker {self.numbers[rank]} has {_short(other)}.{advice and ' '}{advice}"
                )


def _short(value: object, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
