"""Sending fewer bytes: rounded differences to a reference that both workers of a pair hold, bit for bit the same.

Two neighbors are close together and move little between two exchanges, so worker i sends q_i = Q(x_i - r), worker j
sends q_j = Q(x_j - r), and both step along the same two rounded numbers,

    x_i += gamma W_ij (q_j - q_i),        x_j += gamma W_ij (q_i - q_j).

The steps are opposite whatever Q does, so the mean of the workers is kept; and the error is relative to the small
difference, not to x, so the distance between the workers is right, too. Rounding x itself would do neither. After each
exchange both set r <- r + q_i / 2 + q_j / 2, about the middle between them, so that references cost no message. A
reference is kept in bf16, for it need only be near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsgdac_accel.core.buckets import Buckets
from dsgdac_accel.core.exchange import Exchange, Outgoing
from dsgdac_accel.core.flat_parameters import FlatParameters
from dsgdac_accel.core.kernels import add_scaled
from dsgdac_accel.core.update import Update
from dsgdac_accel.topology import RoundPlan, Topology

_BLOCK = 256  # elements that share a scale: 1.6 % more bytes
_LARGEST = 127
_PIECE = 2**17  # elements worked on at a time on a CPU: the working space stays in the cache
_PIECE_ELSEWHERE = 2**22  # on other devices, to bound the working space


class Bf16:
    """Q rounds to bf16: 2 bytes a value, 8 bits of precision."""

    name = "bf16"

    def payload(self, like: Tensor) -> Tensor:
        """Return an empty message about a bucket."""
        return torch.zeros(like.shape, dtype=torch.bfloat16, device=like.device)

    def write(self, payload: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        """payload <- Q(values), from element `begin` on, a multiple of 256; overwrites `values` and `spare`."""
        payload[begin : begin + len(values)].copy_(values)

    def read(self, payload: Tensor, begin: int, out: Tensor) -> None:
        """out <- q, from element `begin` on."""
        out.copy_(payload[begin : begin + len(out)])


class Int8:
    """Q rounds to 255 levels between the largest values of each block of 256, which has a scale in fp32."""

    name = "int8"

    def payload(self, like: Tensor) -> Tensor:
        """Return an empty message about a bucket, as bytes: values as int8, padded to whole blocks, then the scales."""
        blocks = -(-like.numel() // _BLOCK)
        return torch.zeros(blocks * (_BLOCK + 4), dtype=torch.uint8, device=like.device)

    def write(self, payload: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        """Like `Bf16.write`."""
        levels, scales = self._parts(payload, begin, len(values))
        if len(values) % _BLOCK:
            values = F.pad(values, (0, -len(values) % _BLOCK))
            spare = torch.empty_like(values)
        blocks = values.view(-1, _BLOCK)
        # A value that is not finite shows in the scale; its level is some number.
        if _mixes_dtypes(values.device):
            largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        else:
            largest = torch.amax(torch.abs(values, out=spare).view(-1, _BLOCK), dim=1)
        torch.div(largest, _LARGEST, out=scales)
        steps = scales.to(values.dtype).reciprocal()
        steps.nan_to_num_(nan=torch.nan, posinf=0.0)  # the whole block is 0, or too near to it
        levels.copy_(blocks.mul_(steps[:, None]).round_())

    def read(self, payload: Tensor, begin: int, out: Tensor) -> None:
        """Like `Bf16.read`."""
        levels, scales = self._parts(payload, begin, len(out))
        whole = out if len(out) == levels.numel() else out.new_empty(levels.numel())
        if _mixes_dtypes(out.device):
            torch.mul(levels, scales.to(out.dtype)[:, None], out=whole.view(-1, _BLOCK))
        else:
            whole.view(-1, _BLOCK).copy_(levels).mul_(scales[:, None])
        if whole is not out:
            out.copy_(whole[: len(out)])

    def _parts(self, payload: Tensor, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the levels (blocks, 256) and scales (blocks,) of `count` elements in a message."""
        total = len(payload) // (_BLOCK + 4)
        rows = slice(begin // _BLOCK, -(-(begin + count) // _BLOCK))
        levels = payload[: total * _BLOCK].view(torch.int8).view(total, _BLOCK)
        return levels[rows], payload[total * _BLOCK :].view(torch.float32)[rows]


def _mixes_dtypes(device: torch.device) -> bool:
    """Return whether operations take tensors of two dtypes at once, which saves passes over memory.

    On a CPU, converting first is a quarter faster: the piece stays in the cache.
    """
    return device.type != "cpu"


Codec = Bf16 | Int8

CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8}


@dataclass
class Edge:
    """The values that a worker and one neighbor have exchanged for one bucket (D,)."""

    weight: float
    """The neighbor's share of the weight of the round."""
    reference: Tensor
    """(D,) in bf16, bit for bit the same on both sides."""
    mine: Tensor
    """The message sent: q_i."""
    theirs: Tensor
    """The message received: q_j."""


class Rounding:
    """Writes and reads the messages about one bucket, a piece at a time, in working space that is kept.

    New memory for each temporary would cost more than the arithmetic: the kernel fills fresh pages with zeros.

    Args:
        codec: how values are rounded.
        like: the bucket (D,).
    """

    def __init__(self, codec: Codec, like: Tensor) -> None:
        self.codec = codec
        self.size = len(like)
        piece = min(self.size, _PIECE if like.device.type == "cpu" else _PIECE_ELSEWHERE)
        self.space = torch.empty((4, piece), dtype=like.dtype, device=like.device)

    def _pieces(self) -> Iterator[tuple[int, slice, list[Tensor]]]:
        """Yield where each piece begins, its elements, and working space of its length."""
        length = max(1, self.space.shape[1])
        for begin in range(0, self.size, length):
            end = min(self.size, begin + length)
            yield begin, slice(begin, end), [row[: end - begin] for row in self.space]

    def encode(self, x: Tensor, reference: Tensor, message: Tensor) -> None:
        """message <- Q(x - reference)."""
        for begin, part, (values, spare, _, _) in self._pieces():
            near = reference[part] if _mixes_dtypes(x.device) else values.copy_(reference[part])
            torch.sub(x[part], near, out=values)
            self.codec.write(message, begin, values, spare)

    def advance(self, edges: Sequence[Edge], near: Tensor | None = None) -> Tensor:
        """Advance the references, r <- r + (q_i + q_j) / 2, and measure the difference; both in one pass.

        Sums commute and halves are exact, so both sides get the same bits, even where operations are fused.

        Args:
            edges: to the neighbors of the round in other processes.
            near: (D,) difference to the neighbors in this process, added to the others.

        Returns:
            |sum_j w_j (q_j - q_i) + near|^2, shape (), in float64; not finite where a message is not.
        """
        squares = []
        for begin, part, (own, other, total, spare) in self._pieces():
            for number, edge in enumerate(edges):
                self.codec.read(edge.mine, begin, own)
                self.codec.read(edge.theirs, begin, other)
                difference = torch.sub(other, own, out=spare if number else total)
                if number:
                    total.add_(difference, alpha=edge.weight)
                elif edge.weight != 1.0:
                    total.mul_(edge.weight)
                reference = edge.reference[part]
                other.add_(own)
                if _mixes_dtypes(reference.device):
                    reference.add_(other, alpha=0.5)
                else:
                    reference.copy_(spare.copy_(reference).add_(other, alpha=0.5))
            if near is not None:
                total.add_(near[part])
            squares.append(torch.dot(total, total))
        return torch.stack(squares).double().sum() if squares else self.space.new_zeros((), dtype=torch.float64)

    def add_difference(self, x: Tensor, edge: Edge, alpha: float, skip: Tensor | None = None) -> None:
        """x += alpha (q_j - q_i); see `add_scaled`."""
        for begin, part, (own, other, _, _) in self._pieces():
            self.codec.read(edge.mine, begin, own)
            self.codec.read(edge.theirs, begin, other)
            add_scaled(x[part], other.sub_(own), alpha, skip)


# ---- the exchange


class Compressor:
    """Sends each neighbor in another process Q(x - r), with the reference r of that pair. Owns messages and references.

    Whole groups are averaged by messages between all pairs, too. Memory, in copies of float32 parameters: half a copy
    for each neighbor that a worker ever has in another process, and for each neighbor of a single round twice the size
    of a message. With a one-peer ring that is 2 copies for bf16 and 1.5 for int8, and at most 2 MiB of working space
    for each bucket (4 in float64).

    Args:
        name: "bf16" or "int8".
        exchange: sends the messages; must not use all-reduces.
        buckets: the parameters, and the receive buffers that messages arrive in.
    """

    def __init__(self, name: str, exchange: Exchange, buckets: Buckets) -> None:
        self.codec = CODECS[name]()
        self.exchange = exchange
        self.rounds = exchange.rounds
        self.buckets = buckets
        self.outgoing: list[list[list[Tensor]]] = []
        """[local worker][k] the messages to its k-th neighbor of a round in another process."""
        self.references: list[dict[int, list[Tensor]]] = []
        """[local worker][neighbor in another process], one for each bucket; 0 at first, the same on both sides."""
        self.rounding: list[Rounding] = []
        self._saved: Mapping[str, Any] | None = None
        """Loaded references that do not fit the present layout: the run that saved them had thawed other parameters."""

    @torch.inference_mode(False)
    def reserve(self) -> None:
        """Make messages and references for the present buckets and topology; references start from 0.

        So they do after a loss, since survivors may have skipped different rounds: the first message of a pair is then
        the rounded x itself.
        """
        rounds, buckets = self.rounds, self.buckets
        buckets.reserve(rounds.slots, self.codec.payload)
        self.outgoing = [[list(map(torch.zeros_like, slot)) for slot in slots] for slots in buckets.received]
        self.references = [
            {
                peer: [torch.zeros_like(x, dtype=torch.bfloat16) for x in buckets.values(worker)]
                for peer in sorted({p for plans in rounds.plans for p in rounds.elsewhere(plans[worker].weights)})
            }
            for worker in range(rounds.local_workers)
        ]
        self.rounding = [Rounding(self.codec, x) for x in buckets.values(0)]

    def follow_layout(self, before: Sequence[FlatParameters]) -> None:
        """`reserve` after the parameters were laid out anew; keep what is known of those that stayed. Collective.

        Args:
            before: the parameters of each local worker in their old buckets; empty at first.
        """
        old = self.references
        self.reserve()
        if self._saved is not None:
            self._take_over_saved(self._saved)
        elif before:
            for worker, places in enumerate(self._kept_places(before)):
                for peer, references in self.references[worker].items():
                    for (old_number, old_view), (number, view) in places:
                        _at(references[number], view).copy_(_at(old[worker][peer][old_number], old_view))

    def _kept_places(self, before: Sequence[FlatParameters]) -> list[list[tuple[Place, Place]]]:
        """Return old and new place of every parameter that all workers have kept, for each local worker. Collective.

        All must agree, since a parameter may be the old one here and a new one with its values elsewhere.
        """
        kept: list[set[tuple[int, int]]] = []
        for old, new in zip(before, self.buckets.flats, strict=True):
            at = {id(parameter): index for index, parameter in enumerate(old.parameters)}
            shapes = [view.shape for _, view in places_of(old)]
            kept.append(
                {
                    (at[id(p)], index)
                    for index, p in enumerate(new.parameters)
                    if id(p) in at and shapes[at[id(p)]] == p.shape
                }
            )
        group = self.exchange.group
        everywhere = group.all_gather_object(set.intersection(*kept), "keeping the references of compressed exchanges")
        pairs = sorted(set.intersection(*everywhere))
        places = [(places_of(old), places_of(new)) for old, new in zip(before, self.buckets.flats, strict=True)]
        return [[(old[i], new[j]) for i, j in pairs] for old, new in places]

    # ---- one round

    def messages(self, round_: int) -> tuple[Outgoing, Callable[[], None]]:
        """Return the messages of a round, and a function that rounds the parameters into them; see `Exchange.post`."""
        self._saved = None  # from now on the references move

        def outgoing(worker: int, receiver: int | None) -> list[Tensor]:
            assert receiver is not None, "rounded differences are not summed"
            return self.outgoing[worker][self._peers(round_, worker).index(receiver)]

        def encode() -> None:
            for worker, x in enumerate(map(self.buckets.values, range(self.rounds.local_workers))):
                for peer, messages in zip(self._peers(round_, worker), self.outgoing[worker], strict=False):
                    for number, reference in enumerate(self.references[worker][peer]):
                        self.rounding[number].encode(x[number], reference, messages[number])

        return outgoing, encode

    def form_updates(self, gamma: float, round_: int) -> list[Update]:
        """Form the updates of the local workers that take part, and advance the references of the round's pairs."""
        updates: list[Update] = []
        for worker in range(self.rounds.local_workers):
            plan = self.rounds.plan(round_, worker)
            if plan.weights:
                edges = [self._edges(round_, worker, number) for number in range(len(self.rounding))]
                scale = gamma * sum(plan.weights.values())
                updates.append(CompressedUpdate(worker, scale, self._near(worker, plan), edges, self.rounding))
        return updates

    def _peers(self, round_: int, worker: int) -> list[int]:
        return self.rounds.elsewhere(self.rounds.plan(round_, worker).weights)

    def _edges(self, round_: int, worker: int, number: int) -> list[Edge]:
        weights = self.rounds.plan(round_, worker).weights
        return [
            Edge(
                weights[peer] / sum(weights.values()),
                self.references[worker][peer][number],
                self.outgoing[worker][k][number],
                self.buckets.received[worker][k][number],
            )
            for k, peer in enumerate(self._peers(round_, worker))
        ]

    def _near(self, worker: int, plan: RoundPlan) -> list[Tensor]:
        """Return sum_j W_ij (x_j - x_i) / sum_j W_ij over the neighbors in this process, which are not rounded.

        An empty list if there are none.
        """
        here = {peer: weight for peer, weight in plan.weights.items() if peer in self.rounds.workers}
        if not here:
            return []
        sums = []
        for number, own in enumerate(self.buckets.values(worker)):
            total = torch.zeros_like(own)
            for peer, weight in here.items():
                x_j = self.buckets.values(peer - self.rounds.workers.start)[number]
                total.add_(x_j - own, alpha=weight / sum(plan.weights.values()))
            sums.append(total)
        return sums

    # ---- state and memory

    def state_dict(self) -> dict[str, Any]:
        """Return the references."""
        return {"references": [dict(peers) for peers in self.references]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved references, now or when the parameters fit; without any, start anew on both sides alike."""
        self._saved = None
        self._take_over_saved(state)

    def _take_over_saved(self, state: Mapping[str, Any]) -> None:
        saved = state.get("references")
        fits = saved is not None and _sizes(saved) == _sizes(self.references)
        for worker, references in enumerate(self.references):
            for peer, buffers in references.items():
                for number, reference in enumerate(buffers):
                    if saved is not None and fits:
                        reference.copy_(saved[worker][peer][number])
                    else:
                        reference.zero_()
        self._saved = None if fits or saved is None else state

    def release(self) -> None:
        """Free messages and references."""
        self.outgoing, self.references, self.rounding = [], [], []


def require_symmetric_rounds(topology: Topology, comm_dtype: str) -> None:
    """Raise ValueError if a round is directed: neighbors could not take opposite steps."""
    for round_ in range(topology.period):
        if not torch.equal(topology.matrix(round_), topology.matrix(round_).T):
            raise ValueError(
                f"comm_dtype={comm_dtype!r} needs symmetric rounds, in which neighbors take opposite steps; round "
                f"{round_} of topology {topology.name!r} is directed. Use comm_dtype='full'."
            )


Place = tuple[int, Tensor]
"""The number of a bucket, and a view of it."""


def places_of(flat: FlatParameters) -> list[Place]:
    """Return the place of each parameter, in order."""
    place_of = {
        id(parameter): (number, view)
        for number, bucket in enumerate(flat.buckets)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    }
    return [place_of[id(parameter)] for parameter in flat.parameters]


def _sizes(references: Sequence[Mapping[int, Sequence[Tensor]]]) -> list[dict[int, list[int]]]:
    return [{peer: [len(buffer) for buffer in buffers] for peer, buffers in peers.items()} for peers in references]


def _at(buffer: Tensor, view: Tensor) -> Tensor:
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


class CompressedUpdate(Update):
    """An update whose difference is in the messages; `difference` is only the one to neighbors in this process.

    Constructing it advances the references of its pairs.
    """

    def __init__(
        self, worker: int, scale: float, near: list[Tensor], edges: list[list[Edge]], rounding: list[Rounding]
    ) -> None:
        super().__init__(scale, near, worker=worker)
        self.edges = edges
        """For each bucket."""
        self.rounding = rounding
        squares = [self._square_of(number) for number in range(len(edges))]
        self.square = torch.stack(squares).sum() if squares else None  # not finite if a message is not

    def _square_of(self, number: int) -> Tensor:
        near = self.difference[number] if self.difference else None
        if self.edges[number]:
            return self.rounding[number].advance(self.edges[number], near)
        assert near is not None, "a worker that takes part in a round has a neighbor"
        return torch.linalg.vector_norm(near).double().square()

    def add_to(self, number: int, x: Tensor) -> None:
        """x += scale * difference, for the bucket with this number."""
        if self.difference:
            super().add_to(number, x)
        for edge in self.edges[number]:
            self.rounding[number].add_difference(x, edge, self.scale * edge.weight, self.skip)

    def dense(self, number: int) -> Tensor:
        """Return the difference for the bucket with this number, (D,)."""
        rounding = self.rounding[number]
        total = rounding.space.new_zeros(rounding.size)
        if self.difference:
            total.add_(self.difference[number])
        for edge in self.edges[number]:
            rounding.add_difference(total, edge, edge.weight)
        return total
