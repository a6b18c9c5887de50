"""NCCL as a CPU can imitate it over gloo, so that the library's code for NCCL runs: what blocks, and what does not.

Tags are ignored. A wait only puts a work into the queue of the device, which events and computations then follow. The
first message between two workers blocks its caller, without a timeout, until the other one is there. Nobody hears of a
lost worker. Messages that do not form a group wait for each other, as torch posts them where it cannot form one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.distributed import process_groups
from dsgdac_accel.distributed.poster import run_within
from dsgdac_accel.distributed.transport import Gloo, Nccl
from tests.sham_cuda import cuda

_CPU = torch.device("cpu")

device_seconds = 30.0
"""A work holds what is computed after it for so long; then the device has hung."""

queue: list[FakeWork | Computation] = []
"""The works that the device waits for, in order."""
held: list[FakeWork] = []
"""Those that nothing was computed after."""
connections: list[tuple[int, int]] = []
"""Pairs (own rank, peer) that were connected in this process, in order; twice if it sends and receives."""
batches: list[int] = []
"""How many operations each NCCL group had."""
groups: list[dict[str, Any]] = []
"""The arguments of `new_group`, for NCCL."""


class FakeNccl(Nccl):
    backend = "fake"  # not refused where going on after a loss is asked for

    def within(self, seconds: float, connect: Callable[[], Any]) -> Any:
        return run_within(seconds, connect)

    def event(self) -> Any:
        return FakeEvent()

    def mark(self) -> Any:
        return FakeEvent().is_reached


class FakeEvent:
    """A place in the queue. With the sham device of `tests.sham_cuda`, copies into pinned memory arrive there."""

    def __init__(self, copied: Any = None) -> None:
        self.copied = copied
        self.before = list(queue)
        self.made = time.monotonic()

    def query(self) -> bool:
        _ask_cuda()
        return self.is_reached() and (self.copied is None or self.copied.query())

    def is_reached(self) -> bool:
        return all(work.has_run() for work in self.before)

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.01)

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.reached() - self.reached())

    def reached(self) -> float:
        assert self.query(), "the time of an event that is not reached yet"
        return max([self.made, *(work.ended for work in self.before)])


class Device(TorchDispatchMode):
    """Computes in the order of the queue. The host is the device here, so it is held where the device would be."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while held:
            held.pop(0).hold()
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            FakeEvent().synchronize()  # `loss.item()` waits for the device
        return function(*args, **(kwargs or {}))


class FakeWork:
    def __init__(self, works: Iterable[Any]) -> None:
        self.ended = 0.0
        self.hung = False
        self.after = [computed for computed in queue if isinstance(computed, Computation)]
        self.over = threading.Event()
        threading.Thread(target=self._follow, args=(works,), daemon=True).start()

    def _follow(self, works: Iterable[Any]) -> None:
        with contextlib.suppress(RuntimeError):
            for work in works:
                work.wait()
            self.ended = time.monotonic()
            self.over.set()

    def is_completed(self) -> bool:
        _ask_cuda()
        return self.has_run()

    def has_run(self) -> bool:
        return self.over.is_set() and not self.hung and all(computed.has_run() for computed in self.after)

    def wait(self) -> None:
        queue.append(self)
        held.append(self)

    def hold(self) -> None:
        self.hung = not self.over.wait(0.0 if any(work.hung for work in queue) else device_seconds)


class Computation:
    """Something that the device computes for some seconds, from now on; what is queued later comes after it."""

    hung = False

    def __init__(self, seconds: float) -> None:
        self.ended = time.monotonic() + seconds
        queue.append(self)

    def has_run(self) -> bool:
        return time.monotonic() > self.ended


def _ask_cuda() -> None:
    if threading.current_thread().name == "dsgdac-watchdog":
        time.sleep(3600)  # for a lock that a main thread holds while it hangs


def install(tells: bool = False) -> None:
    """Use it in this process, for groups of workers made from now on. With `tells`, waits are those of gloo."""
    new_group, all_reduce, broadcast, copy = dist.new_group, dist.all_reduce, dist.broadcast, HostCopy.__init__

    def fake_group(ranks: Any, backend: str, **options: Any) -> Any:
        if backend == FakeNccl.backend:
            groups.append({"ranks": ranks, **options})
        return new_group(ranks, backend="gloo", timeout=options["timeout"])

    def batch(operations: list[Any]) -> list[FakeWork]:
        batches.append(len(operations))  # an operation would keep the connections of its process group open
        _connect([(op.op is dist.isend, op.peer) for op in operations])
        if not torch_coalesces(operations[0].group):
            return [FakeWork(_in_turn(operations, peer)) for peer in {op.peer for op in operations}]
        if tells:
            return [_post(op) for op in operations]
        try:
            return [FakeWork([_post(op) for op in operations])]
        except RuntimeError:  # gloo knows by now that a peer is lost
            return [FakeWork([_Lost()])]

    def in_queue(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            work = collective(*args, async_op=True, **kwargs)
            return FakeWork([work]) if async_op else work.wait()

        return call

    def mark(self: HostCopy, values: torch.Tensor) -> None:
        copy(self, values)
        self._arrived = FakeEvent(self._arrived)

    process_groups.transport_for = lambda device, distributed: FakeNccl(device) if distributed else Gloo()
    dist.new_group, dist.batch_isend_irecv = fake_group, batch
    dist.ProcessGroupNCCL = SimpleNamespace(Options=_Options)
    dist.ProcessGroupGloo.supports_coalescing = True  # a wrapper around it then is as one of torch 2.10 around NCCL
    if not tells:
        Device().__enter__()
        dist.all_reduce, dist.broadcast = in_queue(all_reduce), in_queue(broadcast)
        HostCopy.__init__ = mark


def torch_coalesces(handle: Any) -> bool:
    """The condition of `dist.batch_isend_irecv`."""
    return type(handle) is dist.ProcessGroup and handle._get_backend(_CPU).supports_coalescing


def _in_turn(operations: list[Any], peer: int) -> Iterator[Any]:
    for op in operations:
        if op.peer == peer:
            yield _post(op)


def _post(operation: Any) -> Any:
    tensor = operation.tensor
    if tensor.is_cuda:  # the memory of the sham device is that of the CPU
        tensor = cuda.device_module().on_cpu(tensor.detach())
    return operation.op(tensor, operation.peer, operation.group)


class _Lost:
    """A message that never ends."""

    def wait(self) -> None:
        raise RuntimeError


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=0, max_ctas=0)


def _connect(ends: list[tuple[bool, int]]) -> None:
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    new = [(f"{me}>{peer}" if sends else f"{peer}>{me}", peer) for sends, peer in ends]
    new = [(edge, peer) for edge, peer in new if not store.check([f"fake_nccl/{edge}/{me}"])]
    for edge, _ in new:
        store.set(f"fake_nccl/{edge}/{me}", "")
    for edge, peer in new:
        while not store.check([f"fake_nccl/{edge}/{peer}"]):
            time.sleep(0.01)
        connections.append((me, peer))
