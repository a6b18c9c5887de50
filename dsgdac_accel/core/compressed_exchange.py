"""The exchange of a round in fewer bytes; see `compression` for what is sent and why the mean is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import FlatParameters
from dsgdac_accel.core.compression import Codec, Edge, Rounding
from dsgdac_accel.core.exchange import Exchange, RoundPlan
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.topology import Topology

Place = tuple[int, Tensor]
"""The number of a flat buffer, and a view of it."""


class CompressedExchange(Exchange):
    """Sends each neighbour in another process Q(x - r) with the reference r of that pair.

    Whole groups are averaged by messages between their pairs, too. Memory, in copies of float32 parameters: half a copy
    for each neighbour that a worker ever has in another process, and for each of a single round twice that of a
    message. With a one-peer ring and bf16 that is 2 copies, with int8 1.5; and at most 2 MiB of working space for each
    flat buffer (4 in float64).

    Args:
        codec: how values are rounded.
        group, topology, sent: as of `Exchange`.

    Raises:
        ValueError: a round is directed, or parameters are not in float32 or float64.
    """

    def __init__(self, group: WorkerGroup, topology: Topology, sent: Sequence[Sequence[Tensor]], codec: Codec) -> None:
        self.codec = codec
        for step in range(topology.period):
            if not torch.equal(topology.matrix(step), topology.matrix(step).T):
                raise ValueError(
                    f"comm_dtype={codec.name!r} needs symmetric rounds, in which neighbours take opposite steps; round "
                    f"{step} of topology {topology.name!r} is directed. Use comm_dtype='full'."
                )
        for buffer in (buffer for buffers in sent for buffer in buffers):
            if buffer.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"comm_dtype={codec.name!r} is for parameters in float32 or float64; some are in {buffer.dtype}. "
                    f"Use comm_dtype='full', which sends them as they are."
                )
        super().__init__(group, topology, sent)
        self.outgoing = [[self._messages_like(worker) for _ in slots] for worker, slots in enumerate(self.slots)]
        """Messages to the neighbours of a round elsewhere, in order of worker, as `slots` are from them."""
        self.references: list[dict[int, list[Tensor]]] = [{} for _ in self.workers]
        """Of each worker here, by its neighbour elsewhere. They start from 0, the same on both sides.

        After a loss they start anew, since the survivors may have left out different rounds: the first message of a
        pair is then the rounded x itself.
        """
        for here, references in enumerate(self.references):
            peers = {peer for plans in self.plans for peer in self.elsewhere(plans[here].weights)}
            for peer in sorted(peers):
                references[peer] = [torch.zeros_like(buffer, dtype=torch.bfloat16) for buffer in self.sent[here]]
        self.rounding = [Rounding(codec, buffer) for buffer in self.sent[0]]

    def _plan(self, step: int, worker: int) -> RoundPlan:
        return replace(super()._plan(step, worker), averaging_group=None)

    def _messages_like(self, worker: int) -> list[Tensor]:
        return [self.codec.payload(buffer) for buffer in self.sent[worker]]

    def _outgoing_to(self, here: int, receiver: int) -> list[Tensor]:
        return self.outgoing[here][self._peers(self._step, here).index(receiver)]

    def _peers(self, step: int, here: int) -> list[int]:
        return self.elsewhere(self.plan(step, here).weights)

    def _post(self) -> list[tuple[Any, int | None]]:
        for here in range(self.per_process):
            for peer, messages in zip(self._peers(self._step, here), self.outgoing[here], strict=False):
                references = self.references[here][peer]
                for number, rounding in enumerate(self.rounding):
                    rounding.encode(self.sent[here][number], references[number], messages[number])
        return super()._post()

    def _may_post_here(self) -> bool:
        return False  # to round takes longer than to send

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers: messages in both directions and references."""
        tensors = [tensor for sets in (*self.outgoing, *self.slots) for messages in sets for tensor in messages]
        tensors += [tensor for peers in self.references for buffers in peers.values() for tensor in buffers]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The references."""
        return {"references": [dict(peers) for peers in self.references]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over saved references if they are of the same pairs and sizes; else begin anew, on both sides alike."""
        saved = state.get("references")
        fits = saved is not None and _sizes(saved) == _sizes(self.references)
        for here, references in enumerate(self.references):
            for peer, buffers in references.items():
                for number, buffer in enumerate(buffers):
                    if saved is not None and fits:
                        buffer.copy_(saved[here][peer][number])
                    else:
                        buffer.zero_()
        return fits or saved is None

    def continue_from(self, old: CompressedExchange, kept: Sequence[Sequence[tuple[Place, Place]]]) -> None:
        """Take over the references of parameters that were in the buffers of `old`, too.

        Args:
            old: the exchange before the layout changed, between the same workers.
            kept: for each worker here the places of such parameters, old and new, alike on all workers.
        """
        for here, places in enumerate(kept):
            for peer, buffers in self.references[here].items():
                for (before, old_view), (now, view) in places:
                    _at(buffers[now], view).copy_(_at(old.references[here][peer][before], old_view))

    def release(self) -> None:
        """Free all buffers; nothing can be posted afterwards."""
        super().release()
        self.outgoing, self.references, self.rounding = [], [], []

    # ---- what arrived

    def updates(self, flats: Sequence[FlatParameters], step: int) -> list[Update]:
        """As of `Exchange`; then the references of the pairs that met move on."""
        formed: list[Update] = []
        for here in range(self.per_process):
            plan = self.plan(step, here)
            if plan.weights:
                edges = [self._edges(step, here, number) for number in range(len(self.sent[here]))]
                near = self._near(flats, here, plan) if len(self._peers(step, here)) < len(plan.weights) else []
                formed.append(CompressedUpdate(here, near, plan.total_weight, edges, self.rounding))
        return formed

    def _edges(self, step: int, here: int, number: int) -> list[Edge]:
        """What the worker here has exchanged with its neighbours elsewhere about one of its buffers."""
        plan = self.plan(step, here)
        return [
            Edge(
                plan.weights[peer] / plan.total_weight,
                self.references[here][peer][number],
                self.outgoing[here][k][number],
                self.slots[here][k][number],
            )
            for k, peer in enumerate(self._peers(step, here))
        ]

    def _near(self, flats: Sequence[FlatParameters], here: int, plan: RoundPlan) -> list[Tensor]:
        """sum_j W_ij (x_j - x_i) / (1 - W_ii) over the neighbours in this process, which nobody rounds."""
        sums = []
        for number, buffer in enumerate(flats[here].buffers):
            total = torch.zeros_like(buffer.data)
            for worker, weight in plan.weights.items():
                if worker in self.workers:
                    x = flats[worker - self.workers.start].buffers[number].data
                    total.add_(x - buffer.data, alpha=weight / plan.total_weight)
            sums.append(total)
        return sums


def _sizes(references: Sequence[Mapping[int, Sequence[Tensor]]]) -> list[dict[int, list[int]]]:
    return [{peer: [len(buffer) for buffer in buffers] for peer, buffers in peers.items()} for peers in references]


def _at(buffer: Tensor, view: Tensor) -> Tensor:
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


class CompressedUpdate(Update):
    """An update whose difference is in the messages; `difference` is only that to neighbours in this process.

    To form it is to move the references of its pairs on.
    """

    def __init__(
        self, worker: int, near: list[Tensor], scale: float, edges: list[list[Edge]], rounding: list[Rounding]
    ) -> None:
        super().__init__(worker, near, scale)
        self.edges = edges
        """By buffer."""
        self.rounding = rounding
        squares = [self._square_of(number) for number in range(len(edges))]
        self.square = torch.stack(squares).sum() if squares else None  # not finite where a message is not

    def _square_of(self, number: int) -> Tensor:
        near = self.difference[number] if self.difference else None
        if self.edges[number]:
            return self.rounding[number].meet(self.edges[number], near)
        assert near is not None, "whoever does not sit the round out has a neighbour"
        return torch.linalg.vector_norm(near).double().square()

    def __bool__(self) -> bool:
        return bool(self.edges)

    def add_to(self, number: int, x: Tensor) -> None:
        """x += scale * difference, for the flat buffer with this number."""
        if self.difference:
            super().add_to(number, x)
        for edge in self.edges[number]:
            self.rounding[number].add_difference(x, edge, self.scale * edge.weight, self.left_out)

    def dense(self, number: int) -> Tensor:
        """The difference as one tensor."""
        rounding = self.rounding[number]
        total = rounding.space.new_zeros(rounding.size)
        if self.difference:
            total.add_(self.difference[number])
        for edge in self.edges[number]:
            rounding.add_difference(total, edge, edge.weight)
        return total
