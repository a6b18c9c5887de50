"""The exchange of a round in fewer bytes; see `compression` for what is sent and why the mean is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.compression import Codec, advance, difference
from dsgdac_accel.exchange import Exchange, RoundPlan
from dsgdac_accel.flat import FlatParameters
from dsgdac_accel.group import WorkerGroup
from dsgdac_accel.topology import Topology
from dsgdac_accel.updates import Update


class CompressedExchange(Exchange):
    """Sends each neighbour in another process Q(x - r) with the reference r of that pair.

    Whole groups are averaged by messages between their pairs, too. Memory, in copies of float32 parameters: half a copy
    for each neighbour that a worker ever has in another process, and for each of a single round twice that of a
    message. With a one-peer ring and bf16 that is 2 copies, with int8 1.5.

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
        """Of each worker here, by its neighbour elsewhere. They start from 0, the same on both sides."""
        for here, references in enumerate(self.references):
            peers = {peer for plans in self.plans for peer in self.elsewhere(plans[here].weights)}
            for peer in sorted(peers):
                references[peer] = [torch.zeros_like(buffer, dtype=torch.bfloat16) for buffer in self.sent[here]]

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
                for x, reference, message in zip(self.sent[here], self.references[here][peer], messages, strict=True):
                    self.codec.encode(x, reference, message)
        return super()._post()

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers: messages in both directions and references."""
        tensors = [tensor for sets in (*self.outgoing, *self.slots) for messages in sets for tensor in messages]
        tensors += [tensor for peers in self.references for buffers in peers.values() for tensor in buffers]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The references."""
        return {"references": [dict(peers) for peers in self.references]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved references, if they are of the same pairs; others begin anew, on both sides alike."""
        saved = state.get("references")
        if saved is None or [set(peers) for peers in saved] != [set(peers) for peers in self.references]:
            return
        for mine, theirs in zip(self.references, saved, strict=True):
            for peer, buffers in mine.items():
                for buffer, value in zip(buffers, theirs[peer], strict=True):
                    buffer.copy_(value)

    def release(self) -> None:
        """Free all buffers; nothing can be posted afterwards."""
        super().release()
        self.outgoing, self.references = [], []

    # ---- what arrived

    def updates(self, flats: Sequence[FlatParameters], step: int) -> list[Update]:
        """As of `Exchange`; then the references of the pairs that met move on."""
        formed: list[Update] = []
        for here, worker in enumerate(self.workers):
            plan, peers = self.plan(step, here), self._peers(step, here)
            if not plan.weights:
                continue
            edges = [
                Edge(plan.weights[peer] / plan.total_weight, self.outgoing[here][k], self.slots[here][k])
                for k, peer in enumerate(peers)
            ]
            near = self._near(flats, here, plan) if len(peers) < len(plan.weights) else []
            formed.append(CompressedUpdate(here, near, plan.total_weight, edges, self.codec, self.sent[here]))
            for peer, edge in zip(peers, edges, strict=True):
                lower, higher = (edge.mine, edge.theirs) if worker < peer else (edge.theirs, edge.mine)
                for reference, first, second in zip(self.references[here][peer], lower, higher, strict=True):
                    advance(self.codec, reference, first, second)
        return formed

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


@dataclass
class Edge:
    """The two messages of a pair, by buffer, and the neighbour's share of the round's weight."""

    weight: float
    mine: list[Tensor]
    theirs: list[Tensor]


@dataclass
class CompressedUpdate(Update):
    """An update whose difference is still in the messages; `difference` is that to neighbours in this process."""

    edges: list[Edge]
    codec: Codec
    sent: list[Tensor]

    def __bool__(self) -> bool:
        return bool(self.sent)

    def norm(self) -> Tensor:
        """Euclidean norm of the whole difference, shape (); not finite where a message is not."""
        squares = [
            torch.linalg.vector_norm(part, dtype=torch.float64).square()
            for number in range(len(self.sent))
            for part in self._parts(number)
        ]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def add_to(self, number: int, x: Tensor) -> None:
        """x += scale * difference, for the flat buffer with this number."""
        if self.difference:
            x.add_(self.difference[number], alpha=self.scale)
        for edge in self.edges:
            self.codec.add(x, edge.theirs[number], self.scale * edge.weight)
            self.codec.add(x, edge.mine[number], -self.scale * edge.weight)

    def dense(self, number: int) -> Tensor:
        """The difference as one tensor."""
        parts = list(self._parts(number))
        return torch.cat(parts).to(self.sent[number].dtype) if parts else torch.zeros_like(self.sent[number])

    def _parts(self, number: int) -> list[Tensor]:
        size = len(self.sent[number])
        streams = [(e.weight, difference(self.codec, e.mine[number], e.theirs[number], size)) for e in self.edges]
        if not streams:
            return [self.difference[number]]
        parts = []
        begin = 0
        for several in zip(*(stream for _, stream in streams), strict=True):
            total = sum(weight * part for (weight, _), part in zip(streams, several, strict=True))
            if self.difference:
                total = total + self.difference[number][begin : begin + len(several[0])]
            begin += len(several[0])
            parts.append(total)
        return parts
