"""Sending fewer bytes: rounded differences to a reference that both workers of a pair hold, bit for bit the same.

Two neighbors are close together and move little between two exchanges, so worker i sends q_i = Q(s_i - r), worker j
sends q_j = Q(s_j - r), and both step along the same two rounded numbers,

    x_i += gamma W_ij (q_j - q_i),        x_j += gamma W_ij (q_i - q_j).

The steps are opposite whatever Q does, so the mean of the workers is kept; and the error is relative to the small
difference, not to x, so the distance between the workers is right, too. Rounding x itself would do neither. After each
exchange both set r <- r + q_i / 2 + q_j / 2, about the middle between them, so that references cost no message. The
next message carries the difference to r, and so the rounding error of this one. See `formats` for Q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.core.copies import Copies
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.formats import FORMATS, Format, mixes_dtypes
from dsgdac_accel.core.rounds import Outgoing
from dsgdac_accel.core.update import Update
from dsgdac_accel.topology import RoundPlan

_PIECE = 2**17  # elements worked on at a time on a CPU: the working space stays in the cache
_PIECE_ELSEWHERE = 2**22  # on other devices, to bound the working space


@dataclass
class Edge:
    """The values that a worker and one neighbor have exchanged for one buffer (D,)."""

    weight: float
    """The neighbor's share of the weight of the round."""
    reference: Tensor
    """(D,) in bf16, or like the buffer if the format is coarse; bit for bit the same on both sides."""
    mine: Tensor
    """The message sent: q_i."""
    theirs: Tensor
    """The message received: q_j."""


class Rounding:
    """Writes and reads the messages about one buffer, a piece at a time, in working space that is kept.

    New memory for each temporary would cost more than the arithmetic: the kernel fills fresh pages with zeros.

    Args:
        number_format: how values are rounded.
        like: the buffer (D,).
    """

    def __init__(self, number_format: Format, like: Tensor) -> None:
        self.format = number_format
        self.size = len(like)
        piece = min(self.size, _PIECE if like.device.type == "cpu" else _PIECE_ELSEWHERE)
        self.space = torch.empty((3, piece), dtype=like.dtype, device=like.device)

    def _pieces(self) -> Iterator[tuple[int, slice, list[Tensor]]]:
        """Yield where each piece begins, its elements, and working space of its length."""
        length = max(1, self.space.shape[1])
        for begin in range(0, self.size, length):
            end = min(self.size, begin + length)
            yield begin, slice(begin, end), [row[: end - begin] for row in self.space]

    def encode(self, x: Tensor, reference: Tensor, message: Tensor) -> None:
        """message <- Q(x - reference)."""
        for begin, part, (values, spare, _) in self._pieces():
            near = reference[part] if _goes_with(reference, x) else values.copy_(reference[part])
            torch.sub(x[part], near, out=values)
            self.format.write(message, begin, values, spare)

    def advance(self, edges: Sequence[Edge], out: Tensor, adds: bool = False) -> Tensor:
        """Form a difference and advance the references, r <- r + (q_i + q_j) / 2; both in one pass.

        Sums commute and halves are exact, so both sides get the same bits, even where operations are fused.

        Args:
            edges: to the neighbors of the round in other processes.
            out: (D,), gets sum_j w_j (q_j - q_i).
            adds: whether `out` holds the difference to the neighbors in this process, to which that is added.

        Returns:
            The squared norm of `out`, shape (), in float64; not finite where a message is not.
        """
        squares = []
        for begin, part, (own, other, spare) in self._pieces():
            total = out[part]
            for number, edge in enumerate(edges):
                self.format.read(edge.mine, begin, own)
                self.format.read(edge.theirs, begin, other)
                first = number == 0 and not adds
                difference = torch.sub(other, own, out=total if first else spare)
                if not first:
                    total.add_(difference, alpha=edge.weight)
                elif edge.weight != 1.0:
                    total.mul_(edge.weight)
                reference = edge.reference[part]
                other.add_(own)
                if _goes_with(reference, other):
                    reference.add_(other, alpha=0.5)
                else:
                    reference.copy_(spare.copy_(reference).add_(other, alpha=0.5))
            squares.append(torch.dot(total, total))
        return torch.stack(squares).double().sum() if squares else self.space.new_zeros((), dtype=torch.float64)


def _goes_with(reference: Tensor, values: Tensor) -> bool:
    """Return whether an operation takes tensors of both dtypes without a conversion."""
    return reference.dtype == values.dtype or mixes_dtypes(values.device)


# ---- the exchange


class Compressor:
    """Sends each neighbor in another process Q(x - r), with the reference r of that pair. Owns messages and references.

    Whole groups are averaged by messages between all pairs, too. Memory, in copies of float32 parameters: half a copy
    for each neighbor that a worker ever has in another process, or a whole one where the format is coarse, and for each
    neighbor of a single round twice the size of a message. With a one-peer ring and the send buffer that is 3 copies
    for bf16, 2.5 for int8, 3.3 for int4 and 3.1 for int2, and at most 1.5 MiB of working space for each buffer (3 in
    float64).

    Args:
        name: of a format in `formats`.
        exchange: sends the messages; must not use all-reduces.
        copies: what is encoded, and the receive buffers that messages arrive in.
    """

    def __init__(self, name: str, exchange: Exchange, copies: Copies) -> None:
        self.format = FORMATS[name]
        self.exchange = exchange
        self.rounds = exchange.rounds
        self.copies = copies
        self.outgoing: list[list[list[Tensor]]] = []
        """[local worker][k] the messages to its k-th neighbor of a round in another process."""
        self.references: list[dict[int, list[Tensor]]] = []
        """[local worker][neighbor in another process], one for each buffer; the same on both sides."""
        self.rounding: list[Rounding] = []
        self._started = False
        """Whether the references have begun; the same on all workers."""
        self._saved: Mapping[str, Any] | None = None
        """Loaded references that do not fit the present layout: the run that saved them had thawed other parameters."""

    @torch.inference_mode(False)
    def reserve(self) -> None:
        """Make messages and references for the present layout of the copies.

        References are started anew by the next `start`.
        """
        rounds, copies = self.rounds, self.copies
        self.outgoing = [[list(map(torch.zeros_like, slot)) for slot in slots] for slots in copies.received]
        self.references = [
            {
                neighbor: list(map(self._empty_reference, copies.sent[local].buffers))
                for neighbor in sorted({p for plans in rounds.plans for p in rounds.elsewhere(plans[local].weights)})
            }
            for local in range(rounds.local_workers)
        ]
        self.rounding = [Rounding(self.format, s) for s in copies.sent[0].buffers]
        self._started = False
        if self._saved is not None:
            self._take_over(self._saved)

    def _empty_reference(self, s: Tensor) -> Tensor:
        return torch.zeros_like(s, dtype=torch.bfloat16 if self.format.is_fine else None)

    @torch.no_grad()
    def start(self) -> None:
        """Let all references begin at the copy s of worker 0, unless they have begun. Collective.

        From 0, the first messages would be about s, not about a difference: their rounding would part the workers.
        """
        if self._started:
            return
        references, group = self.references, self.exchange.group
        firsts = [self._empty_reference(s).copy_(s) for s in self.copies.sent[0].buffers]
        for first in firsts:
            group.broadcast_(first, "starting compressed exchanges")
        for neighbors in references:
            for buffers in neighbors.values():
                for reference, first in zip(buffers, firsts, strict=True):
                    reference.copy_(first)
        self._started = True

    # ---- one round

    def messages(self, round_: int) -> tuple[Outgoing, Callable[[], None]]:
        """Return the messages of a round, and a function that rounds s into them; see `Exchange.post`."""

        def outgoing(local: int, receiver: int | None) -> list[Tensor]:
            assert receiver is not None, "rounded differences are not summed"
            return self.outgoing[local][self._neighbors(round_, local).index(receiver)]

        def encode() -> None:
            for local, sent in enumerate(self.copies.sent):
                for neighbor, messages in zip(self._neighbors(round_, local), self.outgoing[local], strict=False):
                    for number, reference in enumerate(self.references[local][neighbor]):
                        self.rounding[number].encode(sent.buffers[number], reference, messages[number])

        return outgoing, encode

    def form_updates(self, gamma: float, round_: int) -> list[Update]:
        """Form the updates of the local workers that take part, and advance the references of the round's pairs.

        The difference takes the place of s, which was encoded.
        """
        self._saved = None  # from now on the references move
        plans = {local: self.rounds.plan(round_, local) for local in range(self.rounds.local_workers)}
        plans = {local: plan for local, plan in plans.items() if plan.weights}
        near = {local: self._near(local, plan) for local, plan in plans.items()}
        updates: list[Update] = []
        for local, plan in plans.items():
            out = self.copies.sent[local].buffers
            for total, mine in zip(out, near[local], strict=False):
                total.copy_(mine)
            squares = [
                rounding.advance(self._edges(round_, local, number), out[number], bool(near[local]))
                for number, rounding in enumerate(self.rounding)
            ]
            updates.append(Update(gamma * sum(plan.weights.values()), out, squares, local=local, formed_by=local))
        return updates

    def _neighbors(self, round_: int, local: int) -> list[int]:
        return self.rounds.elsewhere(self.rounds.plan(round_, local).weights)

    def _edges(self, round_: int, local: int, number: int) -> list[Edge]:
        weights = self.rounds.plan(round_, local).weights
        return [
            Edge(
                weights[neighbor] / sum(weights.values()),
                self.references[local][neighbor][number],
                self.outgoing[local][k][number],
                self.copies.received[local][k][number],
            )
            for k, neighbor in enumerate(self._neighbors(round_, local))
        ]

    def _near(self, local: int, plan: RoundPlan) -> list[Tensor]:
        """Return sum_j W_ij (s_j - s_i) / sum_j W_ij over the neighbors in this process, which are not rounded.

        An empty list if there are none.
        """
        here = {neighbor: weight for neighbor, weight in plan.weights.items() if neighbor in self.rounds.workers}
        if not here:
            return []
        sums = []
        for number, own in enumerate(self.copies.sent[local].buffers):
            total = torch.zeros_like(own)
            for neighbor, weight in here.items():
                theirs = self.copies.sent[neighbor - self.rounds.workers.start].buffers[number]
                total.add_(theirs - own, alpha=weight / sum(plan.weights.values()))
            sums.append(total)
        return sums

    # ---- state and memory

    def state_dict(self) -> dict[str, Any]:
        """Return the references, if they have begun, with the topology and buffer sizes that they fit."""
        if not self._started:
            return {}
        return {"references": [dict(neighbors) for neighbors in self.references], "references_of": self._layout()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved references, now or when the parameters fit; until then, start anew."""
        self._saved, self._started = None, False
        if "references_of" in state:
            self._take_over(state)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if state["references_of"] != self._layout():
            self._saved = state
            return
        for references, saved in zip(self.references, state["references"], strict=True):
            for neighbor, buffers in references.items():
                for reference, values in zip(buffers, saved[neighbor], strict=True):
                    reference.copy_(values)
        self._saved, self._started = None, True

    def _layout(self) -> list[Any]:
        """Return topology and buffer sizes, which saved references must fit. They are equal on all workers."""
        return [self.rounds.topology.fingerprint, [len(s) for s in self.copies.sent[0].buffers]]

    def release(self) -> None:
        """Free messages and references."""
        self.outgoing, self.references, self.rounding = [], [], []
