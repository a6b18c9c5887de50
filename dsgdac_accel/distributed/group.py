"""The workers that train together, and their named collectives. Everything the library sends goes through here."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.devices import Placement, identity_of, indexed, is_on, mistake_on, refuse_misplaced, refuse_unsuitable
from dsgdac_accel.distributed.failure_detection import FailureDetector, at_step
from dsgdac_accel.distributed.failure_reports import this_kernel, this_machine
from dsgdac_accel.distributed.launcher_variables import how_to_join, launched_processes
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.poster import Poster
from dsgdac_accel.distributed.process_groups import ProcessGroups
from dsgdac_accel.distributed.row import Row
from dsgdac_accel.distributed.watchdog import WAITS, Pending, wait_until
from dsgdac_accel.distributed.worker_mesh import WorkerMesh
from dsgdac_accel.features import Setup, refuse_combinations
from dsgdac_accel.tensor_bytes import as_bytes, narrowed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

_NUMBERS = itertools.count()

_LIVE: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
"""The groups of this process."""

_FRAME_BYTES = 2**10
"""Bytes of an object that one collective gathers."""

_MEAN_CHUNK = 2**22  # elements summed at a time, which bounds the float64 copy to 32 MiB

_LAST_SECONDS = 0.1  # between the end of the script and that of the interpreter


@atexit.register
def _outlast_the_last_collective() -> None:
    """Leave gloo's threads time to drop the tensors of a collective that the script has just waited for.

    A thread that drops one while the interpreter ends aborts the process (torch 2.13). `close` ends the threads.
    """
    if any(group.size > 1 and not group.closed for group in _LIVE):
        time.sleep(_LAST_SECONDS)


def refuse_copy(self: Any) -> NoReturn:
    """Refuse to copy or pickle what holds the connections of a training, as its `__reduce__`."""
    raise TypeError(
        f"a prepared optimizer or accelerator, and what holds one, cannot be copied or pickled, since its connections "
        f"belong to this process; got {type(self).__name__}. Copy the state_dict() of the model and the optimizer, or "
        f"call save_state."
    )


class WorkerGroup:
    """All workers of a run, with ranks 0 to `size` - 1.

    If a worker is several processes, each with a shard of the model, this group is a *column*: the processes of all
    workers that have the same shard. `row` is then the processes of this worker, and `everyone` all processes of the
    run; see `of_mesh`.

    Without a process group, or with a single process, it is a group of one and every method is local. Every wait ends
    within `timeout`; a collective's name and step appear in the error.

    Construction is collective: every worker must build its groups in the same order.

    Args:
        device: where the parameters live; decides the backend (gloo on CPU, NCCL on CUDA). A single process may use
            another accelerator, see `devices`.
        timeout: seconds (> 0) after which a silent worker counts as lost.
        members: the processes of the group; by default all of the run.
        exchanges: whether the members exchange parameters. Others connect their GPUs at their first reduction, if there
            is one: a communicator takes memory of the GPU.

    Raises:
        ValueError: several processes were launched without a process group, gossip is impossible on `device`, two
            processes share a GPU, or `device` is not the current CUDA device.
        WorkerLostError: a worker did not connect.
    """

    def __init__(
        self, device: torch.device, timeout: float = 600.0, members: Members | None = None, exchanges: bool = True
    ) -> None:
        launched = dist.is_initialized()
        count, variable = launched_processes()
        if not launched and count > 1:
            first = "" if variable == "WORLD_SIZE" else f"{how_to_join(variable)} "
            raise ValueError(
                f"{count} processes were launched ({variable}), but they do not know of each other. {first}Call "
                f"torch.distributed.init_process_group(...) before Gossip(...) or WorkerGroup(...)."
            )
        processes = dist.get_world_size() if launched else 1
        refuse_combinations(Setup(processes=processes, device=device))
        refuse_unsuitable(device)
        self.device = device = indexed(device)
        self.timeout = timeout
        self.members = members or Members(dist.get_rank() if launched else 0, processes)
        self.stream = f"group {next(_NUMBERS)}"
        """Names the collectives of this group for `Waits`; the same on all workers."""
        self.row = Row()
        self._beside: tuple[WorkerGroup, ...] = ()
        """Where a worker is several processes: all processes, and those of this worker."""
        self.process_groups = ProcessGroups(device, timeout, self.members)
        self.detector = FailureDetector(self.members, timeout)
        self._steps_taken = 0
        self.closed = False
        self.poster = Poster(threaded=self.process_groups.transport.host_waits)
        self._channels = itertools.count()
        self._registered: list[weakref.ref[Any]] = []
        self._in_flight: set[Any] = set()
        _LIVE.add(self)
        placement = Placement(
            this_kernel(), socket.gethostname(), str(device), identity_of(device), mistake_on(device, processes)
        )
        if self.size > 1:
            self._connect(placement, exchanges)
        else:
            refuse_misplaced([placement])

    __reduce__ = refuse_copy

    def _connect(self, placement: Placement, exchanges: bool) -> None:
        reports = self.detector.reports
        reports.store = dist.distributed_c10d._get_default_store()
        if self.size == dist.get_world_size():
            WAITS.start(reports.store, self.members, reports.write)
        self._together("connect", self.process_groups.connect_control, "connecting the workers")
        everyone = self.all_gather_object((this_machine(), os.getpid(), placement), "connecting the workers")
        reports.processes = [(machine, process) for machine, process, _ in everyone]
        refuse_misplaced([placed for _, _, placed in everyone])  # NCCL would fail on some workers, or hang
        if exchanges:
            self._connect_tensors()
        transport = self.process_groups.transport
        name_loss = weakref.WeakMethod(self._name_loss)
        transport.watchdog.start(lambda pending: (name_loss() or str)(pending), self.timeout)
        weakref.finalize(self, transport.watchdog.stop)

    def _connect_tensors(self) -> None:
        transport, connect = self.process_groups.transport, self.process_groups.connect
        self._together("connect", lambda: transport.within(self.timeout, connect), "connecting the workers")

    # ---- workers of several processes

    @property
    def everyone(self) -> WorkerGroup:
        """All processes of the run: this group, unless a worker is several processes."""
        return self._beside[0] if self._beside else self

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far, for error messages; kept by the mixer."""
        return self._steps_taken

    @steps_taken.setter
    def steps_taken(self, steps: int) -> None:
        self._steps_taken = steps
        for other in self._beside:
            other.steps_taken = steps

    @classmethod
    def of_mesh(cls, mesh: WorkerMesh, device: torch.device, timeout: float = 600.0) -> WorkerGroup:
        """Return the column of this process. Collective over all processes. Arguments as in the constructor."""
        everyone = cls(device, timeout, mesh.everyone, exchanges=False)
        column = cls(device, timeout, mesh.column)
        row = cls(device, timeout, mesh.row)
        column.row, column._beside = Row(row, mesh), (everyone, row)
        everyone._registered = column._registered  # it may connect beside an exchange of the column
        mesh.limit(timeout)
        return column

    @classmethod
    def make(
        cls, device_mesh: DeviceMesh | None, device: torch.device, timeout: float, earlier: WorkerGroup | None = None
    ) -> WorkerGroup:
        """Return the group of all processes, or of those of this process's column in a device mesh. Collective.

        Args:
            device_mesh: as for `WorkerMesh`; None if every process is a worker.
            device: as in the constructor.
            timeout: as in the constructor.
            earlier: a group of this process, which is returned if it `serves` without a mesh.
        """
        if device_mesh is not None:
            return cls.of_mesh(WorkerMesh(device_mesh), device, timeout)
        if earlier is not None and earlier.row.mesh is None and earlier.serves(device, timeout):
            return earlier
        return cls(device, timeout)

    def refuse_combinations(self, **facts: Any) -> None:
        """Raise ValueError if these workers do not go with what else is known of the run, as of `features.Setup`."""
        refuse_combinations(Setup(sharded=self.row.size > 1, **facts))

    # ---- who is here

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.members.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.members.size

    # ---- who uses the group

    def new_channel(self) -> int:
        """A number that separates the messages of one exchange from another's; the same on all workers."""
        return next(self._channels)

    def register(self, communicator: Any) -> None:
        """Register something that communicates in the background. The group holds it weakly.

        `drain()` runs before every reduction and broadcast, also of `everyone`, since NCCL may hang beside
        point-to-point in flight.
        """
        self._registered.append(weakref.ref(communicator))

    def communicators(self) -> list[Any]:
        """Return what is registered, and still there."""
        return [found for found in (reference() for reference in self._registered) if found is not None]

    def hold(self, mixer: Any) -> None:
        """Keep a mixer alive from posting an exchange to `let_go`, even if its training is dropped meanwhile.

        When gloo receives for a buffer that is freed, the connection delivers nothing any more.
        """
        self._in_flight.add(mixer)

    def let_go(self, mixer: Any) -> None:
        """Undo `hold`: no exchange of this mixer is in flight."""
        self._in_flight.discard(mixer)

    def close(self) -> None:
        """Refuse further use, since the process group is about to end."""
        self.closed = True
        self.process_groups.transport.watchdog.stop()
        self.process_groups.release()
        for other in self._beside:
            other.close()

    def require_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError("training has ended (`end_training`); make a new accelerator to train on.")

    def serves(self, device: torch.device, timeout: float) -> bool:
        """Whether this group can be used again, for another training in the same process and process group."""
        world = dist.group.WORLD if dist.is_initialized() else None
        now = self.process_groups.world, self.device, self.timeout
        return not self.closed and now == (world, indexed(device), timeout)

    # ---- lost workers

    def guarded(self, communicate: Callable[[], T], what: str, peer: int | None = None) -> T:
        """Run `communicate`, and if it shows that another worker is lost, raise an error that names it and `what`.

        Args:
            communicate: posts or waits for something that needs other workers. Its own errors stay themselves.
            what: names it in the error; the step is added.
            peer: rank of the only other worker in it, if there is only one.

        Raises:
            WorkerLostError: a worker was lost, and the run ends.
        """
        self.require_open()
        try:
            return communicate()
        except RuntimeError as error:
            self._handle(error, what, peer)
            raise

    def _together(self, kind: str, collective: Callable[[], T], what: str) -> T:
        """Run a collective `guarded`, and as one of `Waits`. Two of different kinds wait for each other."""
        stream = f"{kind} of {self.stream}"
        WAITS.enter(stream)
        with WAITS.waiting(at_step(what, self.steps_taken), stream, self.members.launched):
            return self.guarded(collective, what)

    def _handle(self, error: RuntimeError, what: str, peer: int | None) -> None:
        """Raise the error of a lost worker, if `error` shows one."""
        failure = self.detector.failure_in(error, what, self.steps_taken, peer)
        if failure is not None:
            self.process_groups.transport.watchdog.stop()
            raise self.detector.worker_lost(failure) from error

    def _name_loss(self, pending: Pending) -> str:
        error = pending.error()
        failure = self.detector.failure_in(error, pending.what, self.steps_taken, pending.peer)
        return str(error if failure is None else self.detector.worker_lost(failure))

    def report(self, message: str) -> str:
        """Tell the other workers why this run ends. Returns the first message that any worker wrote."""
        return self.detector.reports.write(message)

    # ---- collectives: synchronous, on groups of their own, each with a name for the error message

    def barrier(self, what: str) -> None:
        """Wait until every worker is here. The error names the workers that did not come."""
        if self.size > 1:
            self._together("barrier", lambda: self.process_groups.barrier(self.timeout), what)

    def _begin(self, tensor: Tensor) -> torch.device:
        """Wait for what communicates in the background, and return the device from which a tensor travels.

        NCCL sends tensors of its own GPU only. All others, such as a CPU buffer of a model on a GPU, travel like
        objects, from the CPU.
        """
        self.require_open()
        for communicator in self.communicators() if self.size > 1 else ():
            communicator.drain()
        return tensor.device if is_on(tensor.device, self.device) else torch.device("cpu")

    def _run(self, collective: Callable[..., Any], tensor: Tensor, what: str) -> None:
        """Run a collective of torch on a tensor that is where `_begin` says."""
        groups = self.process_groups
        if not is_on(tensor.device, self.device):
            # On gloo, where the host waits.
            self._together("tensors", lambda: collective(tensor, group=groups.control), what)
            return
        if groups.reduction is None:
            self._connect_tensors()
        handle = groups.reduction
        self._together("tensors", lambda: groups.transport.run(partial(collective, tensor, group=handle), what), what)

    def all_reduce_mean_(self, tensor: Tensor, what: str, others: Sequence[Tensor] = ()) -> Tensor:
        """Replace contiguous `tensor` (D,) by its mean over the workers, the same bits on all of them.

        Summed in float64, so that equal workers get exactly their own values as the mean.

        Args:
            tensor: of this process's first worker.
            what: names the collective in errors.
            others: tensors of further workers in this process, equally many in every process; they stay unchanged.
        """
        if self.size == 1 and not others:
            return tensor
        device = self._begin(tensor)
        for start in range(0, len(tensor), _MEAN_CHUNK):
            part, *more = (each[start : start + _MEAN_CHUNK] for each in (tensor, *others))
            wide = part.to(device, torch.float64, copy=True)
            for other in more:
                wide.add_(other.to(device))
            if self.size > 1:
                self._run(dist.all_reduce, wide, what)
            part.copy_(wide.div_(self.size * (1 + len(others))))
        return tensor

    def all_reduce_max_(self, tensor: Tensor, what: str) -> Tensor:
        """Replace `tensor` by its maximum over the workers."""
        if self.size > 1:
            found = tensor.to(self._begin(tensor), copy=True)
            self._run(partial(dist.all_reduce, op=dist.ReduceOp.MAX), found, what)
            tensor.copy_(found)
        return tensor

    def broadcast_(self, tensor: Tensor, what: str) -> Tensor:
        """Overwrite `tensor` on every worker by worker 0's, bit by bit, for every dtype and stride."""
        if self.size > 1 and tensor.numel():
            device = self._begin(tensor)
            # As contiguous bytes: gloo sends strided tensors wrongly without an error, and knows few dtypes.
            octets = as_bytes(tensor).to(device, copy=True)
            self._run(partial(dist.broadcast, group_src=0), octets, what)
            if self.rank != 0:
                values = octets.view(tensor.dtype).view(tensor.shape)
                narrowed(tensor.detach(), tensor).copy_(narrowed(values, tensor))
        return tensor

    def all_gather_object(self, value: T, what: str) -> list[T]:
        """The small picklable `value` of every worker, by rank, on every worker. One collective, or two above 1 KiB.

        Raises RuntimeError if the workers are in different collectives.
        """
        if self.size == 1:
            return [value]
        content = pickle.dumps((what, value))
        answers = list(map(pickle.loads, self._together("objects", lambda: self._gather(content), what)))
        for rank, (where, _) in enumerate(answers):
            if where != answers[0][0]:
                raise RuntimeError(
                    f"the workers are in different collectives: {self.members.named([0])} in {answers[0][0]}, "
                    f"{self.members.named([rank])} in {where}. All of them must take every optimizer step and "
                    f"enter every `prepare` and `deployed_model`."
                )
        return [answer for _, answer in answers]

    def _gather(self, content: bytes) -> list[bytes]:
        """Gather `content` of every worker: its length and first bytes, and if any is longer, the rest of all.

        `dist.all_gather_object` gathers the lengths in a collective of their own, which doubles its time.
        """
        framed = len(content).to_bytes(8, "little") + content
        gathered, known, size = [b""] * self.size, 0, _FRAME_BYTES
        while known < size:
            mine = torch.frombuffer(bytearray(framed[known:size].ljust(size - known, b"\0")), dtype=torch.uint8)
            frames = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(frames, mine, group=self.process_groups.control)
            gathered = [begun + frame.numpy().tobytes() for begun, frame in zip(gathered, frames, strict=True)]
            ends = [8 + int.from_bytes(each[:8], "little") for each in gathered]
            known, size = size, max(ends)
        return [each[8:end] for each, end in zip(gathered, ends, strict=True)]

    def first(self, value: T | None, what: str) -> T | None:
        """Return the value of the first member that has one, a small picklable object, or None."""
        return next((found for found in self.all_gather_object(value, what) if found is not None), None)

    def require_equal(self, value: T, what: str, advice: str = "") -> None:
        """Raise ValueError on every worker unless all have the same `value`; `advice` says how to fix it.

        If workers are several processes, it is raised on all of them although only one shard differs.
        """
        where = f"comparing the {what} of all workers"
        values = self.all_gather_object(value, where)
        differing = next((rank for rank, other in enumerate(values) if other != values[0]), None)
        refusal = None
        if differing is not None:
            refusal = (
                f"all workers must have the same {what}; {self.members.named([0])} has {_short(values[0])} and "
                f"{self.members.named([differing])} has {_short(values[differing])}.{advice and ' '}{advice}"
            )
        refusal = self.row.first(refusal, where)
        if refusal is not None:
            raise ValueError(refusal)


def wait_for_device(is_ready: Callable[[], bool]) -> None:
    """Wait until the device of this process is ready, as long as it may wait for other workers.

    Raises like `WorkerGroup.guarded` once a communication that the device waits for is overdue. Without other workers,
    returns at once.
    """
    if is_ready():
        return
    groups = [group for group in list(_LIVE) if group.size > 1 and not group.closed]
    found = wait_until(is_ready, [group.process_groups.transport.watchdog for group in groups])
    for group in groups:
        if found is not None and found[0] is group.process_groups.transport.watchdog:
            group._handle(found[1].error(), found[1].what, found[1].peer)


def _short(value: object, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
