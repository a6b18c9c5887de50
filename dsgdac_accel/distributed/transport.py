"""The two transports, gloo and NCCL: how groups are made, how messages are posted, and who waits for them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.devices import event, using
from dsgdac_accel.distributed.poster import run_within
from dsgdac_accel.distributed.watchdog import PATIENCE, HostFlags, Reached, Watchdog

T = TypeVar("T")

Message = tuple[Tensor, int, int]
"""A tensor, the process that it comes from or goes to, and its tag."""
Works = list[tuple[Any, int | None]]
"""The works to wait for, each with the only process that it depends on, if there is only one."""

_GLOO_BYTES = 64 * 2**20  # few large messages: measured fastest on gloo
_NCCL_OPERATIONS = 128  # 256 of them in a group were planned differently on different ranks, and hung (pytorch#174288)
_NCCL_CTAS = 8  # an exchange that waits for its peer keeps them from computing
_NCCL_LATER = timedelta(seconds=60)


def limit_group(handle: Any, backend: str, limit: timedelta) -> None:
    """Let collectives on a process group of others, such as Accelerate's or FSDP2's, give up after `limit`.

    On NCCL that is later than the library's own waits, which name the lost worker.
    """
    dist.distributed_c10d._set_pg_timeout(limit if backend == "gloo" else nccl_limit(limit), handle)


def nccl_limit(limit: timedelta) -> timedelta:
    """Return the timeout of NCCL's own watchdog, for waits of the library that end after `limit`.

    It counts from the host's call, and aborts the process without naming anybody. So it comes after the device may have
    computed for `limit`, and waited for `limit`.
    """
    return PATIENCE * limit + _NCCL_LATER


class Gloo:
    """The host waits for messages, and tags tell them apart. All pairs connect when a group is made."""

    backend = "gloo"
    host_waits = True
    """Whether the host waits, so that posts belong into a thread. Else two workers connect at their first message."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(lambda: lambda: True)
        """Communications that the device waits for without the host; none with gloo."""

    def new_group(self, ranks: Sequence[int], limit: timedelta) -> Any:
        """Make a process group. Collective over all workers; each operation in it gives up after `limit`."""
        return _typed(lambda: dist.new_group(list(ranks), backend="gloo", timeout=limit))

    def within(self, seconds: float, connect: Callable[[], T]) -> T:
        """Return `connect()`, which connects workers. Raises DistBackendError if that takes too long."""
        return connect()  # gloo keeps the timeout of the group by itself

    def pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut a flat tensor into messages; an empty one sends nothing."""
        return tensor.split(max(1, _GLOO_BYTES // tensor.element_size())) if tensor.numel() else ()

    def run(self, collective: Callable[..., Any], what: str) -> None:
        """Run a collective of torch; later operations may use its result. `what` as in `WorkerGroup.guarded`."""
        collective()

    def post(self, post: Callable[[], Works], what: str, peer: int | None) -> Works:
        """Return `post()`, a communication. `what` and `peer` as in `WorkerGroup.guarded`."""
        return post()

    def send_and_receive(
        self, handle: Any, receives: Sequence[Message], sends: Sequence[Message], busiest: Callable[[], int]
    ) -> Works:
        """Post messages in a process group.

        Args:
            handle: the group.
            receives: from each process in the order in which it sends them.
            sends: to each process in that order.
            busiest: returns the number of messages of the process that has the most of them, the same on all.
        """
        # Receives first: posted the other way round, 40 MB waited 147 ms.
        works: Works = [(dist.irecv(x, group=handle, tag=tag, group_src=peer), peer) for x, peer, tag in receives]
        return works + [(dist.isend(x, group=handle, tag=tag, group_dst=peer), peer) for x, peer, tag in sends]

    def wait(self, work: Any, seconds: float) -> None:
        """Let later operations use the received tensors. Raises DistBackendError after `seconds`."""
        _typed(lambda: work.wait(timedelta(seconds=max(0.001, seconds))))

    def synchronize(self) -> None:
        """Wait on the host until everything has arrived that `wait` was called for."""

    def stopwatch(self) -> HostStopwatch:
        """Return a stopwatch for `wait`."""
        return HostStopwatch()


def _typed(call: Callable[[], T]) -> T:
    """Return `call()`. Raises DistBackendError if gloo fails in it."""
    try:
        return call()
    except RuntimeError as error:  # gloo says "Wait timeout" and "Operation timed out!" without a type or a place
        raise dist.DistBackendError(str(error)) from error


class Nccl:
    """The device waits for messages, in the order of the calls; tags are ignored. Methods as in `Gloo`.

    Calls return at once, and the host hangs later, wherever it needs a result; only the first message between two
    workers blocks it. Calls belong to the current stream, so they are made in the caller's thread.

    Args:
        device: of the parameters, with an index.
    """

    backend = "nccl"
    host_waits = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.watchdog = Watchdog(self.mark)
        self._flags: HostFlags | None = None

    def new_group(self, ranks: Sequence[int], limit: timedelta) -> Any:
        """Raises ValueError if the group cannot send and receive at the same time."""
        handle = dist.new_group(
            list(ranks),
            backend=self.backend,
            timeout=nccl_limit(limit),
            pg_options=self.options(nccl_limit(limit)),
            device_id=self.device,
        )
        if dist.get_rank() in ranks:
            if not self.coalesces(handle):
                raise ValueError(
                    f"sends and receives must form one NCCL group, which torch {torch.__version__} cannot do with "
                    f"TORCH_DISTRIBUTED_DEBUG=DETAIL. Use INFO or OFF, or a newer torch."
                )
            self.mark()  # the first one takes memory, for which CUDA may wait for communication in flight
            # Point-to-point as a communicator's very first call is undefined where some rank has nothing to send.
            dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
        return handle

    def options(self, limit: timedelta) -> Any:
        """The communicator's stream and size: an exchange should neither wait for the computation nor slow it down."""
        nccl = getattr(dist, "ProcessGroupNCCL", None)
        if nccl is None:
            raise ValueError(
                f"gossip between processes on CUDA needs NCCL, which torch {torch.__version__} was built without. "
                f"Install another build of torch, or train on CPU."
            )
        options = nccl.Options(is_high_priority_stream=True)
        if hasattr(options, "config"):
            options.config.max_ctas = _NCCL_CTAS  # the environment's NCCL_MAX_CTAS goes before it
        options._timeout = limit
        return options

    def coalesces(self, handle: Any) -> bool:
        """Whether `dist.batch_isend_irecv` makes one NCCL group of its operations in this process group."""
        return type(handle) is dist.ProcessGroup and bool(handle._get_backend(self.device).supports_coalescing)

    def within(self, seconds: float, connect: Callable[[], T]) -> T:
        """NCCL blocks here without a timeout, and its watchdog does not know yet, so a thread of its own does it."""

        def connect_here() -> T:
            with using(self.device):
                return connect()

        return run_within(seconds, connect_here)

    def pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        return (tensor,) if tensor.numel() else ()

    def run(self, collective: Callable[..., Any], what: str) -> None:
        for work in self.watchdog.post(lambda: [collective(async_op=True)], what, None):
            with self.watchdog.waiting(work):
                work.wait()

    def post(self, post: Callable[[], Works], what: str, peer: int | None) -> Works:
        return [(work, peer) for work in self.watchdog.post(lambda: [work for work, _ in post()], what, peer)]

    def send_and_receive(
        self, handle: Any, receives: Sequence[Message], sends: Sequence[Message], busiest: Callable[[], int]
    ) -> Works:
        """Unbatched messages would make a communicator for each pair."""
        operations = [(dist.irecv, message) for message in receives] + [(dist.isend, message) for message in sends]
        if not operations:
            return []
        split = busiest() > _NCCL_OPERATIONS
        rank, size = dist.get_rank(handle), dist.get_world_size(handle)
        groups: defaultdict[tuple[int, int], list[dist.P2POp]] = defaultdict(list)
        count: Counter[tuple[Any, int]] = Counter()
        for call, (tensor, peer, tag) in operations:
            # Both sides of a message put it into the same group, in an order that all share, or groups wait in circles:
            # by the distance of the two ranks, of which each has at most four kinds of messages.
            distance = min((peer - rank) % size, (rank - peer) % size) if split else 0
            part = count[call, peer] // (_NCCL_OPERATIONS // 4) if split else 0
            count[call, peer] += 1
            groups[distance, part].append(dist.P2POp(call, tensor, group=handle, tag=tag, group_peer=peer))
        return [(work, None) for key in sorted(groups) for work in dist.batch_isend_irecv(groups[key])]

    def wait(self, work: Any, seconds: float) -> None:
        with self.watchdog.waiting(work):
            work.wait()  # orders the streams; with a timeout it would hold the host

    def synchronize(self) -> None:
        self.event().synchronize()

    def stopwatch(self) -> DeviceStopwatch:
        return DeviceStopwatch(self.event)

    def event(self) -> Any:
        """Return an event at the present end of the device's queue."""
        return event(self.device, timed=True)

    def mark(self) -> Reached:
        """Mark the present end of the device's queue, for every thread."""
        if self._flags is None:
            self._flags = HostFlags(self.device)
        return self._flags.mark()


Transport = Gloo | Nccl


def transport_for(device: torch.device, distributed: bool) -> Transport:
    """The transport of parameters on this device; one process needs none."""
    return Nccl(device) if distributed and device.type == "cuda" else Gloo()


class HostStopwatch:
    """Measures how long the host waits."""

    seconds = 0.0
    """Duration of the latest wait that is known."""

    def start(self) -> None:
        """Begin to wait."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End the wait."""
        self.seconds = time.perf_counter() - self._began


class DeviceStopwatch:
    """Measures how long the device waits. Methods as in `HostStopwatch`; a wait is known when the next one has begun.

    Args:
        event: marks the present end of the device's queue, with a time.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._seconds = 0.0
        self._began: Any = None
        self._unread: deque[tuple[Any, Any]] = deque()

    def start(self) -> None:
        self._began = self._event()

    def stop(self) -> None:
        self._unread.append((self._began, self._event()))

    @property
    def seconds(self) -> float:
        """Duration of the latest wait but one, or of an earlier one if the device is behind. Reading does not wait."""
        # The latest is left to the next reading even if it is over: whoever reads after each wait misses none.
        while len(self._unread) > 1 and self._unread[0][1].query():
            began, ended = self._unread.popleft()
            self._seconds = began.elapsed_time(ended) / 1e3
        return self._seconds
