"""The process groups of the library, separate from the user's so that their collectives never interleave."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsgdac_accel.distributed.transport import Gloo, nccl_limit, transport_for


class ProcessGroups:
    """Creates, limits and closes the process groups of one `WorkerGroup`; touches nothing but torch.distributed.

    Arguments as in `WorkerGroup`. Members are counted within their line.
    """

    def __init__(self, device: torch.device, timeout: float, lines: Sequence[Sequence[int]] | None = None) -> None:
        self.device = device
        self._lines = lines
        self.limit = timedelta(seconds=timeout)
        """Timeout of the groups."""
        launched = dist.is_available() and dist.is_initialized()
        self.transport = transport_for(device, launched and dist.get_world_size() > 1)
        """The transport of parameters."""
        self.world: Any = dist.group.WORLD if launched else None
        """The default process group, for which these were made."""
        self.control: Any = None
        """The group for objects and barriers; gloo."""
        self.exchange: Any = None
        """The group for the exchange with neighbors."""
        self.reduction: Any = None
        """The group for reductions and broadcasts of tensors: with gloo `control`, with NCCL `exchange`, which saves a
        communicator of the GPU."""
        self.checked = False
        """Whether torch checks before each collective that all workers have made equally many calls, as with
        `TORCH_DISTRIBUTED_DEBUG=DETAIL`. On gloo it also counts messages, whose numbers differ between workers."""
        self._subgroups: dict[tuple[int, ...], Any] = {}

    @property
    def backend(self) -> str:
        """Backend for parameters."""
        return self.transport.backend

    def connect_control(self) -> None:
        """Create the group for objects and barriers, which needs no device. Collective, before `connect`."""
        self.world = dist.group.WORLD
        self.checked = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self.control = self.new("gloo")
        if self.backend == "gloo":
            self.reduction = self.control

    def connect(self) -> None:
        """Create the groups. Collective: `new_group` is, so every worker creates every group in the same order."""
        if self.control is None:
            self.connect_control()
        self.exchange = self.new(self.backend)
        if self.backend != "gloo":
            self.reduction = self.exchange

    def new(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """A process group of `ranks`, by default of all members. Collective over ALL processes.

        All parallel lines get such a group, since every process must create every group.
        """
        lines = [range(dist.get_world_size())] if self._lines is None else self._lines
        transport = self.transport if backend == self.backend else Gloo()
        own = None
        for line in lines:
            members = list(line) if ranks is None else [line[rank] for rank in ranks]
            handle = transport.new_group(members, self.limit)
            if dist.get_rank() in members or len(lines) == 1:
                own = handle
        return own

    def barrier(self, seconds: float) -> None:
        """Wait until every worker is here. The error names the workers that did not come within `seconds`."""
        if self.checked:
            dist.barrier(group=self.control)  # torch finds out by itself who is missing; a monitored one has messages
        else:
            limit = timedelta(seconds=seconds)
            dist.monitored_barrier(group=self.control, timeout=limit, wait_all_ranks=True)

    def subgroup(self, members: tuple[int, ...]) -> Any:
        """The group of `members`. Collective over ALL workers at the first call for these members."""
        if len(members) == dist.get_world_size(self.exchange) and not self.checked:
            return self.exchange
        if members not in self._subgroups:
            self._subgroups[members] = self.new(self.backend, members)
        return self._subgroups[members]

    def limit_default_group(self) -> None:
        """Make collectives on the default process group, such as Accelerate's, give up after `timeout` too.

        With NCCL later than the library's own waits: its watchdog would abort the process before they name the lost
        worker, since an exchange that waits may have begun before, and its wait ends some seconds after `timeout`.
        """
        if self.world is not None:
            limit = self.limit if self.backend == "gloo" else nccl_limit(self.limit)
            dist.distributed_c10d._set_pg_timeout(limit, self.world)
