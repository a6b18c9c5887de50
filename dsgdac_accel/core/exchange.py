"""Sending the flat buffers of one round and receiving those of the neighbours, in the background.

A process may hold several workers: what they need of each other is in its memory and is not exchanged here.
A pair, or any sparse round, is point-to-point. A round that averages whole groups of three or more is an all-reduce
on each group. Which of the two, and with whom, follows from the step alone, so all workers agree without asking.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.core.buckets import FlatParameters
from dsgdac_accel.core.update import Update, form_updates
from dsgdac_accel.distributed.fork_lock import no_fork
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.topology import Topology

CHUNK_BYTES = 64 * 2**20  # few large messages: measured fastest on gloo, and far below every transport's limit
_FEW_BYTES = 2**19
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

    `sent[k]` are the buffers of the k-th worker of this process. Only what other processes hold is sent and received:
    `slots[k]` are buffers shaped like those of worker k, one set for each of its neighbours elsewhere (in order of
    worker), at least one. Of an averaging group that spans processes, the first set of its first member here then holds
    the SUM over the group. `sent` must not change between `post` and `wait`.
    """

    def __init__(self, group: WorkerGroup, topology: Topology, sent: Sequence[Sequence[Tensor]]) -> None:
        self.group = group
        self.sent = [list(buffers) for buffers in sent]
        self.per_process = len(self.sent)
        self.topology = topology
        self.workers = range(group.rank * self.per_process, (group.rank + 1) * self.per_process)
        self.plans = [[self._plan(step, worker) for worker in self.workers] for step in range(topology.period)]
        self.slots = [self._new_slots(worker) for worker in range(self.per_process)]
        self.waited_seconds = 0.0
        self.bytes_sent = 0
        self._in_flight: Future[list[tuple[Any, int | None]]] | None = None
        self._works: list[tuple[Any, int | None]] = []
        """What is waited for, each with the rank of its peer."""
        self._step = 0
        self._name = ""
        if group.size > 1 and any(plan.averaging_group for plans in self.plans for plan in plans):
            for step in range(topology.period):  # collective: every worker creates every subgroup, in the same order
                for members in topology.averaging_groups(step) or ():
                    if len(members) > 2 and len(self._processes(members)) > 1:
                        group.subgroup(self._processes(members))
        self._channel = group.new_channel()

    def _plan(self, step: int, worker: int) -> RoundPlan:
        return plan_round(self.topology, step, worker)

    def _messages_like(self, worker: int) -> list[Tensor]:
        """Buffers for what a worker here gets from, or sends to, one other."""
        return [tensor.new_zeros(tensor.shape) for tensor in self.sent[worker]]

    def _outgoing_to(self, here: int, receiver: int) -> list[Tensor]:
        """What a worker here sends to another one in this round."""
        return self.sent[here]

    def _new_slots(self, worker: int) -> list[list[Tensor]]:
        plans = [plans[worker] for plans in self.plans]
        elsewhere = [len(self.elsewhere(plan.weights)) for plan in plans if plan.averaging_group is None]
        count = max([1, *elsewhere]) if self.topology.num_workers > 1 else 0
        return [self._messages_like(worker) for _ in range(count)]

    def _processes(self, members: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({member // self.per_process for member in members}))

    def elsewhere(self, workers: Iterable[int]) -> list[int]:
        """Those of `workers` that live in other processes."""
        return [worker for worker in workers if worker not in self.workers]

    def spans_processes(self, members: Iterable[int]) -> bool:
        """Whether an averaging group has members in several processes, so that its sum is made here."""
        return len(self._processes(members)) > 1

    @property
    def received(self) -> list[list[Tensor]]:
        """All receive buffers, whichever worker of this process they are for."""
        return [slot for slots in self.slots for slot in slots]

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers beside the parameters."""
        return sum(_bytes(tensor) for slot in self.received for tensor in slot)

    def state_dict(self) -> dict[str, Any]:
        """What the next rounds depend on, beside the step: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on from what `state_dict` gave; whether it is of buffers like these."""
        return True

    def updates(self, flats: Sequence[FlatParameters], step: int) -> list[Update]:
        """What the workers here add, from what arrived in the exchange of `step`; see `form_updates`."""
        return form_updates(self, flats, step)

    @property
    def in_flight(self) -> bool:
        """Whether something is posted that nobody has waited for."""
        return self._in_flight is not None

    def plan(self, step: int, worker: int = 0) -> RoundPlan:
        """The part of this process's `worker` in the round of `step`."""
        return self.plans[step % len(self.plans)][worker]

    def post(self, step: int, name: str | None = None) -> None:
        """Start sending and receiving for the round of `step`, called `name` in errors; returns at once."""
        assert self._in_flight is None, "one exchange at a time"
        self._step = step
        self._name = name or f"the exchange of step {step}"
        self.bytes_sent = self._bytes_to_send()
        if self.group.poster is not None and not self._may_post_here():
            self._in_flight = self.group.last_posted = self.group.poster.submit(self._post_apart)
        else:
            self._in_flight = Future()
            try:
                self._in_flight.set_result(self._post())
            except RuntimeError as error:  # comes to light in `wait`, as one of the other thread does
                self._in_flight.set_exception(error)

    def _post_apart(self) -> list[tuple[Any, int | None]]:
        """In the thread that posts. What it holds in the end is held elsewhere, too, and survives it in a child."""
        with no_fork:
            self._works = self._post()
        return self._works

    def _may_post_here(self) -> bool:
        """Whether to hand it to another thread takes longer, and everything before it is on its way."""
        last = self.group.last_posted
        return self.bytes_sent <= _FEW_BYTES and (last is None or last.done())

    def _post(self) -> list[tuple[Any, int | None]]:
        return [*self._average(), *self._send_and_receive()]

    def wait(self) -> None:
        """Wait for the posted exchange; afterwards the slots are filled and `sent` may change.

        Raises WorkerLostError or WorkersChangedError as `WorkerGroup.guarded`; what arrived is not to be used then.
        """
        assert self._in_flight is not None, "nothing was posted"
        pending, self._in_flight = self._in_flight, None
        started = time.perf_counter()
        deadline = started + self.group.timeout
        what = self._name
        plans = self.plans[self._step % len(self.plans)]
        peers = self._processes(self.elsewhere({worker for plan in plans for worker in plan.weights}))
        only_peer = peers[0] if len(peers) == 1 else None
        try:
            self._works = self.group.guarded(pending.result, what, only_peer)
            while self._works:
                peer = self._works[0][1]
                self.group.guarded(lambda: self._wait_for_first(deadline), what, peer)
                del self._works[0]
        finally:
            self.waited_seconds = time.perf_counter() - started

    def abandon(self) -> None:
        """Give up what is in flight: a worker was lost, and the connections are about to end."""
        pending, self._in_flight = self._in_flight, None
        if pending is not None:
            with contextlib.suppress(RuntimeError):
                self._works = pending.result()  # the thread that posts must have left the connections alone
        self._works.clear()  # each holds the connections open

    def release(self) -> None:
        """Free the receive buffers; nothing can be posted afterwards."""
        assert self._in_flight is None, "an exchange is in flight"
        self.sent, self.slots = [], []

    def _wait_for_first(self, deadline: float) -> None:
        work = self._works[0][0]
        if self.group.backend == "nccl":
            work.wait()  # orders the streams, the host goes on; NCCL's watchdog keeps the timeout
        else:
            work.wait(timedelta(seconds=max(0.001, deadline - time.perf_counter())))

    def _average(self) -> list[tuple[Any, int | None]]:
        works: list[tuple[Any, int | None]] = []
        for members in self._spanning_groups():
            handle = self.group.subgroup(self._processes(members))
            mine = [worker - self.workers.start for worker in members if worker in self.workers]
            for number, total in enumerate(self.slots[mine[0]][0]):
                total.copy_(self.sent[mine[0]][number])
                for worker in mine[1:]:
                    total.add_(self.sent[worker][number])
                works.append((dist.all_reduce(total, group=handle, async_op=True), None))
        return works

    def _send_and_receive(self) -> list[tuple[Any, int | None]]:
        handle = self.group.exchange_group
        receives, sends = [], []
        places: Counter[tuple[int, int]] = Counter()  # how many messages go between two processes so far
        # A worker that is a step off must not be taken for one in step, nor one optimizer's parameters for another's.
        base = (self._channel % _CHANNELS * _STEPS + self._step % _STEPS) * _MAX_CHUNKS
        for sender, receiver, slot in self._messages():
            source, target = sender // self.per_process, receiver // self.per_process
            outgoing = source == self.group.rank
            tag = base + places[source, target]
            buffers = self._outgoing_to(slot[0], receiver) if outgoing else self.slots[slot[0]][slot[1]]
            for buffer in buffers:
                for chunk in _chunks(buffer):
                    if outgoing:
                        sends.append((dist.isend, chunk, target, tag))
                    else:
                        receives.append((dist.irecv, chunk, source, tag))
                    tag += 1
            places[source, target] = tag - base
        # Receives first: posted the other way round, 40 MB waited 147 ms on gloo.
        calls = receives + sends
        if not calls:
            return []
        if self.group.backend == "nccl":
            # Unbatched point-to-point would create a communicator per pair.
            operations = [dist.P2POp(call, chunk, peer, handle, tag) for call, chunk, peer, tag in calls]
            return [(work, None) for work in dist.batch_isend_irecv(operations)]
        return [(call(chunk, peer, group=handle, tag=tag), peer) for call, chunk, peer, tag in calls]

    def _spanning_groups(self) -> list[tuple[int, ...]]:
        """The averaging groups of the round that have members here and in other processes, in order."""
        plans = self.plans[self._step % len(self.plans)]
        groups = {plan.averaging_group for plan in plans if plan.averaging_group is not None}
        return sorted(members for members in groups if self.spans_processes(members))

    def _bytes_to_send(self) -> int:
        messages = sum(sender in self.workers for sender, _, _ in self._messages())
        if messages and not self._spanning_groups():
            return messages * sum(_bytes(tensor) for tensor in self.slots[0][0])
        size = sum(_bytes(tensor) for tensor in self.sent[0])
        # An all-reduce by ring sends 2 (m - 1) / m of its input (once to reduce, once to spread).
        counts = [len(self._processes(members)) for members in self._spanning_groups()]
        return messages * size + sum(round(2 * (count - 1) / count * size) for count in counts)

    def _messages(self) -> list[tuple[int, int, tuple[int, int]]]:
        """(sender, receiver, slot) of what this process sends and receives, in an order that both sides know."""
        messages = []
        for row, (worker, plan) in enumerate(zip(self.workers, self.plans[self._step % len(self.plans)], strict=True)):
            if plan.averaging_group:
                continue
            messages += [(sender, worker, (row, k)) for k, sender in enumerate(self.elsewhere(plan.weights))]
            messages += [(worker, receiver, (row, 0)) for receiver in self.elsewhere(plan.recipients)]
        return sorted(messages)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Cut a flat buffer into messages of at most `CHUNK_BYTES`; an empty one sends nothing."""
    return tensor.split(max(1, CHUNK_BYTES // tensor.element_size())) if tensor.numel() else ()
