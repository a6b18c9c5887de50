"""The process groups of the library, separate from the user's so that their collectives never interleave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class ProcessGroups:
    """Creates, limits and closes the process groups of one `WorkerGroup`; touches nothing but torch.distributed.

    Args:
        device: where the parameters live; decides the backend (gloo on CPU, NCCL on CUDA).
        timeout: seconds after which a collective gives up on a silent worker.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.device = device
        self.timeout = timeout
        launched = dist.is_available() and dist.is_initialized()
        self.backend = "nccl" if launched and dist.get_world_size() > 1 and device.type == "cuda" else "gloo"
        self.world: Any = dist.group.WORLD if launched else None
        """The default process group, for which these were made."""
        self.control: Any = None
        """For objects and barriers; gloo."""
        self.exchange: Any = None
        """For parameters on their way to neighbors."""
        self.reduction: Any = None
        """For reductions and broadcasts of tensors."""
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._connect_seconds: float | None = None  # while connecting, where other than `timeout`
        self._short_lived: list[Any] = []  # groups that still have the timeout of connecting

    def connect(self) -> None:
        """Create the groups. Collective: `new_group` is, so every worker creates every group in the same order."""
        self.world = dist.group.WORLD
        self.control = self.new("gloo")
        self.exchange = self.new(self.backend)
        self.reduction = self.control if self.backend == "gloo" else self.new(self.backend)

    def disconnect(self) -> None:
        """Close every connection, so that a worker that waits for this one gets an error at once."""
        self.world = self.control = self.exchange = self.reduction = None
        self._subgroups.clear()
        self._short_lived.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch also counts a default group that failed to connect, and would then search under another name.
        dist.distributed_c10d._world.group_count = 0

    def new(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """A process group of `ranks`, by default of all workers. Collective over ALL workers."""
        options: dict[str, Any] = (
            {"device_id": self.device} if backend == "nccl" and self.device.index is not None else {}
        )
        members = list(range(dist.get_world_size()) if ranks is None else ranks)
        handle = dist.new_group(members, backend=backend, timeout=self.connect_timeout, **options)
        if dist.get_rank() in members:
            if backend == "nccl":
                # Point-to-point as a communicator's very first call is undefined where some rank has nothing to send.
                dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
            if self._connect_seconds is not None:
                self._short_lived.append(handle)
        return handle

    def subgroup(self, members: tuple[int, ...]) -> Any:
        """The group of `members`. Collective over ALL workers at the first call for these members."""
        if len(members) == dist.get_world_size():
            return self.exchange
        if members not in self._subgroups:
            self._subgroups[members] = self.new(self.backend, members)
        return self._subgroups[members]

    # ---- timeouts

    @contextmanager
    def connecting_within(self, seconds: float) -> Iterator[None]:
        """Inside, groups are created with this timeout if it is shorter; see `limit_all`."""
        self._connect_seconds = seconds
        try:
            yield
        finally:
            self._connect_seconds = None

    @property
    def connect_timeout(self) -> timedelta:
        """How long connecting may take."""
        return timedelta(seconds=min(self.timeout, self._connect_seconds or self.timeout))

    def limit_default_group(self) -> None:
        """Make collectives on the default process group, such as Accelerate's, give up after `timeout` too."""
        self._limit(dist.group.WORLD)

    def limit_all(self) -> None:
        """Give groups that were created inside `connecting_within` their normal timeout."""
        self.limit_default_group()
        for handle in self._short_lived:
            self._limit(handle)
        self._short_lived.clear()

    def _limit(self, handle: Any) -> None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout), handle)
