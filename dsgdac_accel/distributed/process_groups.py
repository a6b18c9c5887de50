"""The process groups of the library, separate from the user's so that their collectives never interleave."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.transport import Gloo, Transport, limit_group, transport_for


class ProcessGroups:
    """Creates and limits the process groups of one `WorkerGroup`; touches nothing but torch.distributed.

    Arguments as in `WorkerGroup`.
    """

    def __init__(self, device: torch.device, timeout: float, members: Members) -> None:
        self._lines = members.lines
        self._limit = timedelta(seconds=timeout)
        self.world: Any = dist.group.WORLD if dist.is_initialized() else None
        """The default process group, for which these were made."""
        self.transport = transport_for(device, self.world is not None and dist.get_world_size() > 1)
        """The transport of parameters."""
        self.control: Any = None
        """The group for objects and barriers; gloo."""
        self.exchange: Any = None
        """The group for the exchange with neighbors."""
        self.reduction: Any = None
        """The group for reductions and broadcasts of tensors: with gloo `control`, with NCCL `exchange`, which saves a
        communicator of the GPU."""
        self._checked = False
        self._subgroups: dict[tuple[int, ...], Any] = {}

    def connect_control(self) -> None:
        """Create the group for objects and barriers, which needs no device. Collective, before `connect`."""
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks before each collective that all workers have made equally
        # many calls. On gloo it also counts messages, whose numbers differ between workers.
        self._checked = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self.control = self._new(Gloo())
        if self.transport.backend == "gloo":
            self.reduction = self.control

    def connect(self) -> None:
        """Create the groups for tensors. Collective."""
        self.exchange = self._new(self.transport)
        if self.reduction is None:
            self.reduction = self.exchange

    def _new(self, transport: Transport, ranks: Sequence[int] | None = None) -> Any:
        """Return a process group of `ranks`, by default of all members. Collective over ALL processes of the run.

        Every process must create every group, in the same order, so all parallel lines get such a group.
        """
        own = None
        for line in self._lines:
            launched = list(line) if ranks is None else [line[rank] for rank in ranks]
            handle = transport.new_group(launched, self._limit)
            if dist.get_rank() in launched or len(self._lines) == 1:
                own = handle
        return own

    def barrier(self, seconds: float) -> None:
        """Wait until every worker is here. The error names the workers that did not come within `seconds`."""
        if self._checked:
            dist.barrier(group=self.control)  # torch finds out by itself who is missing; a monitored one has messages
        else:
            dist.monitored_barrier(group=self.control, timeout=timedelta(seconds=seconds), wait_all_ranks=True)

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Return the group of the members with these ranks. Collective over ALL workers at the first call for them."""
        if len(ranks) == dist.get_world_size(self.exchange) and not self._checked:
            return self.exchange
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._new(self.transport, ranks)
        return self._subgroups[ranks]

    def release(self) -> None:
        """Forget the groups, so that torch ends their threads when it destroys them.

        Threads that are left when the interpreter ends abort the process if they still hold a tensor.
        """
        self.world = self.control = self.exchange = self.reduction = None
        self._subgroups.clear()

    def limit_default_group(self) -> None:
        """Let collectives on the default process group, such as Accelerate's, give up after `timeout` too."""
        if self.world is not None:
            limit_group(self.world, self.transport.backend, self._limit)
