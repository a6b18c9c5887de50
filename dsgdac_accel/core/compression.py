"""Sending fewer bytes: the rounded difference to a reference that both sides of a pair hold, bit for bit the same.

Two neighbours are close together and move little between two meetings, so worker i sends q_i = Q(x_i - r), worker j
sends q_j = Q(x_j - r), and both step along the same two rounded numbers,

    x_i += gamma W_ij (q_j - q_i),        x_j += gamma W_ij (q_i - q_j).

The steps are opposite whatever Q does, so the mean of the workers is kept; and the error is relative to the small
difference, not to x, so the distance between the workers is right, too. Rounding x itself would do neither. After each
meeting both set r <- r + q_i / 2 + q_j / 2, about the middle between them: a reference of the pair costs no message. It
is kept in bf16, for it need only be near.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsgdac_accel.core.update import add_scaled

_BLOCK = 256  # elements that share a scale: 1.6 % more bytes
_LARGEST = 127
_PIECE = 2**17  # elements worked on at a time: working space stays in the cache, and is bounded elsewhere
_PIECE_ELSEWHERE = 2**22


class Bf16:
    """Q rounds to bf16: 2 bytes a value, 8 bits of precision."""

    name = "bf16"

    def payload(self, like: Tensor) -> Tensor:
        """An empty message for a flat buffer."""
        return torch.zeros(like.shape, dtype=torch.bfloat16, device=like.device)

    def write(self, payload: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        """payload <- Q(values), from element `begin` on, a multiple of 256; destroys `values` and `spare`."""
        payload[begin : begin + len(values)].copy_(values)

    def read(self, payload: Tensor, begin: int, out: Tensor) -> None:
        """out <- q, from element `begin` on."""
        out.copy_(payload[begin : begin + len(out)])


class Int8:
    """Q rounds to 255 levels between the largest values of each block of 256, which has a scale in fp32."""

    name = "int8"

    def payload(self, like: Tensor) -> Tensor:
        """An empty message for a flat buffer: the values as int8, padded to whole blocks, then the scales, as bytes."""
        blocks = -(-like.numel() // _BLOCK)
        return torch.zeros(blocks * (_BLOCK + 4), dtype=torch.uint8, device=like.device)

    def write(self, payload: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        """As of `Bf16`."""
        levels, scales = self._parts(payload, begin, len(values))
        if len(values) % _BLOCK:
            values = F.pad(values, (0, -len(values) % _BLOCK))
            spare = torch.empty_like(values)
        blocks = values.view(-1, _BLOCK)
        # What is not finite shows in the scale; as a level it is some number.
        scales.copy_(torch.amax(torch.abs(values, out=spare).view(-1, _BLOCK), dim=1).div_(_LARGEST))
        steps = scales.to(values.dtype).reciprocal()
        steps.masked_fill_(torch.isinf(steps), 0.0)  # all of the block is 0, or too near to it
        levels.copy_(blocks.mul_(steps[:, None]).round_())

    def read(self, payload: Tensor, begin: int, out: Tensor) -> None:
        """As of `Bf16`."""
        levels, scales = self._parts(payload, begin, len(out))
        whole = out if len(out) == levels.numel() else out.new_empty(levels.numel())
        whole.view(-1, _BLOCK).copy_(levels).mul_(scales[:, None])
        if whole is not out:
            out.copy_(whole[: len(out)])

    def _parts(self, payload: Tensor, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """Levels (blocks, 256) and scales (blocks,) of `count` elements in a message."""
        total = len(payload) // (_BLOCK + 4)
        rows = slice(begin // _BLOCK, -(-(begin + count) // _BLOCK))
        levels = payload[: total * _BLOCK].view(torch.int8).view(total, _BLOCK)
        return levels[rows], payload[total * _BLOCK :].view(torch.float32)[rows]


Codec = Bf16 | Int8

CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8}


@dataclass
class Edge:
    """What passes between a worker and one neighbour, for one flat buffer (D,)."""

    weight: float
    """The neighbour's share of the round's weight."""
    reference: Tensor
    """(D,) in bf16, bit for bit the same on both sides."""
    mine: Tensor
    """The message sent: q_i."""
    theirs: Tensor
    """The message received: q_j."""


class Rounding:
    """Forms and reads the messages about one flat buffer, a piece at a time, in working space that is kept.

    New memory for each temporary would cost more than the arithmetic: fresh pages are filled by the kernel.

    Args:
        codec: how values are rounded.
        like: the flat buffer (D,).
    """

    def __init__(self, codec: Codec, like: Tensor) -> None:
        self.codec = codec
        self.size = len(like)
        piece = min(self.size, _PIECE if like.device.type == "cpu" else _PIECE_ELSEWHERE)
        self.space = torch.empty((4, piece), dtype=like.dtype, device=like.device)

    def _pieces(self) -> Iterator[tuple[int, slice, list[Tensor]]]:
        """Where a piece begins, its elements, and working space as long as it."""
        length = max(1, self.space.shape[1])
        for begin in range(0, self.size, length):
            end = min(self.size, begin + length)
            yield begin, slice(begin, end), [row[: end - begin] for row in self.space]

    def encode(self, x: Tensor, reference: Tensor, message: Tensor) -> None:
        """message <- Q(x - reference)."""
        for begin, part, (values, spare, _, _) in self._pieces():
            values.copy_(reference[part])
            torch.sub(x[part], values, out=values)
            self.codec.write(message, begin, values, spare)

    def meet(self, edges: Sequence[Edge], near: Tensor | None = None) -> Tensor:
        """Move the references on, r <- r + (q_i + q_j) / 2, and measure the difference; both in one pass.

        Sums commute and halves are exact, so both sides get the same bits, whatever fuses operations.

        Args:
            edges: to the neighbours that were met.
            near: (D,) of other neighbours, added to the difference.

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
                reference.copy_(spare.copy_(reference).add_(other.add_(own), alpha=0.5))
            if near is not None:
                total.add_(near[part])
            squares.append(torch.dot(total, total))
        return torch.stack(squares).double().sum() if squares else torch.zeros((), dtype=torch.float64)

    def add_difference(self, x: Tensor, edge: Edge, alpha: float, left_out: Tensor | None = None) -> None:
        """x += alpha (q_j - q_i); see `add_scaled`."""
        for begin, part, (own, other, _, _) in self._pieces():
            self.codec.read(edge.mine, begin, own)
            self.codec.read(edge.theirs, begin, other)
            add_scaled(x[part], other.sub_(own), alpha, left_out)
