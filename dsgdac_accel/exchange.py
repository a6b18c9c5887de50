"""Sending the flat buffers of one round and receiving those of the neighbours, in the background.

A pair, or any sparse round, is point-to-point. A round that averages whole groups of three or more is an all-reduce
on each group. Which of the two, and with whom, follows from the step alone, so all workers agree without asking.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.group import WorkerGroup
from dsgdac_accel.topology import Topology

CHUNK_BYTES = 64 * 2**20  # few large messages: measured fastest on gloo, and far below every transport's limit
_CHANNELS, _STEPS, _MAX_CHUNKS = 2**7, 2**12, 2**12  # how many get tags of their own; 31 bits in all


@dataclass(frozen=True)
class RoundPlan:
    """What one worker does in one round."""

    weights: dict[int, float]
    """W_ij of every neighbour j that sends to us."""
    recipients: tuple[int, ...]
    """The neighbours that we send to."""
    averaging_group: tuple[int, ...] | None = None
    """Set where the round averages a group of three or more uniformly: then an all-reduce does it."""

    @property
    def total_weight(self) -> float:
        """1 - W_ii: how far a full step (gamma = 1) moves towards the neighbours."""
        return sum(self.weights.values())


def plan_round(topology: Topology, step: int, worker: int) -> RoundPlan:
    """The part of `worker` in the round of `step`.

    >>> from dsgdac_accel.topology import build_topology
    >>> plan_round(build_topology("one_peer_ring", 4), 0, 1)
    RoundPlan(weights={0: 0.5}, recipients=(0,), averaging_group=None)
    """
    groups = topology.averaging_groups(step) or ()
    mine = next((tuple(group) for group in groups if worker in group and len(group) > 2), None)
    return RoundPlan(topology.neighbors(step, worker), tuple(topology.recipients(step, worker)), mine)


class Exchange:
    """Posts the exchange of `sent` for a step and waits for it.

    `received[k]` are the buffers of the k-th neighbour (in order of rank), shaped like `sent`; of an averaging group
    there is one, which then holds the SUM over the group. `sent` must not change between `post` and `wait`.
    """

    def __init__(self, group: WorkerGroup, topology: Topology, sent: Sequence[Tensor]) -> None:
        self.group = group
        self.sent = list(sent)
        self.plans = [plan_round(topology, step, group.rank) for step in range(topology.period)]
        slots = max([1] + [len(plan.weights) for plan in self.plans if plan.averaging_group is None])
        slots = slots if group.size > 1 else 0
        self.received = [[tensor.new_zeros(tensor.shape) for tensor in self.sent] for _ in range(slots)]
        self.waited_seconds = 0.0
        self.bytes_sent = 0
        self._in_flight: Future[list[tuple[Any, int | None]]] | None = None
        self._step = 0
        for step in range(topology.period):  # collective: every worker creates every subgroup, in the same order
            for members in topology.averaging_groups(step) or ():
                if len(members) > 2:
                    group.subgroup(tuple(members))
        self._channel = group.new_channel()

    @property
    def in_flight(self) -> bool:
        """Whether something is posted that nobody has waited for."""
        return self._in_flight is not None

    def plan(self, step: int) -> RoundPlan:
        """This worker's part in the round of `step`."""
        return self.plans[step % len(self.plans)]

    def post(self, step: int) -> None:
        """Start sending and receiving for `step`; returns at once."""
        assert self._in_flight is None, "one exchange at a time"
        self._step = step
        plan = self.plan(step)
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.sent)
        # An all-reduce by ring sends 2 (m - 1) / m of its input (each worker once to reduce, once to spread).
        members = len(plan.averaging_group or ())
        self.bytes_sent = round(2 * (members - 1) / members * size) if members else size * len(plan.recipients)
        work = self._average if plan.averaging_group else self._send_and_receive
        if self.group.poster is not None:
            self._in_flight = self.group.poster.submit(work, plan)
        else:
            self._in_flight = Future()
            self._in_flight.set_result(work(plan))

    def wait(self) -> RoundPlan:
        """Wait for the posted exchange; afterwards `received` is filled and `sent` may change."""
        assert self._in_flight is not None, "nothing was posted"
        pending, self._in_flight = self._in_flight, None
        started = time.perf_counter()
        deadline = started + self.group.timeout
        what = f"the exchange of step {self._step}"
        plan = self.plan(self._step)
        only_peer = next(iter(plan.weights)) if len(plan.weights) == 1 else None
        for work, peer in self.group.guarded(pending.result, what, only_peer):
            self.group.guarded(lambda work=work: self._wait_for(work, deadline), what, peer)  # type: ignore[misc]
        self.waited_seconds = time.perf_counter() - started
        return plan

    def release(self) -> None:
        """Free the receive buffers; nothing can be posted afterwards."""
        assert self._in_flight is None, "an exchange is in flight"
        self.sent, self.received = [], []

    def _wait_for(self, work: Any, deadline: float) -> None:
        if self.group.backend == "nccl":
            work.wait()  # orders the streams, the host goes on; NCCL's watchdog keeps the timeout
        else:
            work.wait(timedelta(seconds=max(0.001, deadline - time.perf_counter())))

    def _average(self, plan: RoundPlan) -> list[tuple[Any, int | None]]:
        handle = self.group.subgroup(plan.averaging_group)  # type: ignore[arg-type]
        works: list[tuple[Any, int | None]] = []
        for tensor, total in zip(self.sent, self.received[0], strict=True):
            total.copy_(tensor)
            works.append((dist.all_reduce(total, group=handle, async_op=True), None))
        return works

    def _send_and_receive(self, plan: RoundPlan) -> list[tuple[Any, int | None]]:
        handle = self.group.exchange_group
        receives, sends = [], []
        # A worker that is a step off must not be taken for one in step, nor one optimizer's parameters for another's.
        tag = (self._channel % _CHANNELS * _STEPS + self._step % _STEPS) * _MAX_CHUNKS
        for number, tensor in enumerate(self.sent):
            chunks = list(_chunks(tensor))
            for peer, slot in zip(plan.weights, self.received, strict=False):
                for offset, chunk in enumerate(_chunks(slot[number])):
                    receives.append((dist.irecv, chunk, peer, tag + offset))
            for peer in plan.recipients:
                sends += [(dist.isend, chunk, peer, tag + offset) for offset, chunk in enumerate(chunks)]
            tag += len(chunks)
        # Receives first: posted the other way round, 40 MB waited 147 ms on gloo.
        calls = receives + sends
        if not calls:
            return []
        if self.group.backend == "nccl":
            # Unbatched point-to-point would create a communicator per pair.
            operations = [dist.P2POp(call, chunk, peer, handle, tag) for call, chunk, peer, tag in calls]
            return [(work, None) for work in dist.batch_isend_irecv(operations)]
        return [(call(chunk, peer, group=handle, tag=tag), peer) for call, chunk, peer, tag in calls]


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Cut a flat buffer into messages of at most `CHUNK_BYTES`; an empty one sends nothing."""
    return tensor.split(max(1, CHUNK_BYTES // tensor.element_size())) if tensor.numel() else ()
