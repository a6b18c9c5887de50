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

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 2**20  # elements at a time: bounds temporaries to a few MiB, and they stay in the cache
_BLOCK = 256  # elements that share a scale: 1.6 % more bytes
_LARGEST = 127


class Bf16:
    """Q rounds to bf16: 2 bytes a value, 8 bits of precision."""

    name = "bf16"

    def payload(self, like: Tensor) -> Tensor:
        """An empty message for a flat buffer."""
        return torch.zeros(like.shape, dtype=torch.bfloat16, device=like.device)

    def encode(self, x: Tensor, reference: Tensor, payload: Tensor) -> None:
        """payload <- Q(x - reference)."""
        torch.sub(x, reference, out=payload)

    def chunks(self, payload: Tensor, size: int) -> Iterator[Tensor]:
        """The values of a message, `_CHUNK` at a time; `size` is that of the flat buffer."""
        yield from payload.split(_CHUNK)

    def add(self, x: Tensor, payload: Tensor, alpha: float) -> None:
        """x += alpha q."""
        x.add_(payload, alpha=alpha)


class Int8:
    """Q rounds to 255 levels between the largest values of each block of 256, which has a scale in fp32."""

    name = "int8"

    def payload(self, like: Tensor) -> Tensor:
        """An empty message for a flat buffer: the values as int8, padded to whole blocks, then the scales, as bytes."""
        blocks = -(-like.numel() // _BLOCK)
        return torch.zeros(blocks * (_BLOCK + 4), dtype=torch.uint8, device=like.device)

    def encode(self, x: Tensor, reference: Tensor, payload: Tensor) -> None:
        """payload <- Q(x - reference)."""
        values, scales = self._parts(payload)
        for number, (mine, near) in enumerate(zip(x.split(_CHUNK), reference.split(_CHUNK), strict=True)):
            difference = torch.sub(mine, near).float()
            blocks = F.pad(difference, (0, -len(difference) % _BLOCK)).view(-1, _BLOCK)
            scale = blocks.abs().amax(dim=1).div_(_LARGEST)
            first = number * (_CHUNK // _BLOCK)
            scales[first : first + len(scale)] = scale
            levels = blocks.div_(torch.where(scale > 0, scale, 1.0)[:, None]).round_()
            # What is not finite shows in the scale; as a level it must only be a number.
            values[first : first + len(scale)] = levels.nan_to_num_(0.0, 0.0, 0.0)

    def chunks(self, payload: Tensor, size: int) -> Iterator[Tensor]:
        """As of `Bf16`."""
        values, scales = self._parts(payload)
        for begin in range(0, size, _CHUNK):
            rows = slice(begin // _BLOCK, (begin + _CHUNK) // _BLOCK)
            yield values[rows].float().mul_(scales[rows, None]).view(-1)[: size - begin]

    def add(self, x: Tensor, payload: Tensor, alpha: float) -> None:
        """x += alpha q."""
        for part, values in zip(x.split(_CHUNK), self.chunks(payload, len(x)), strict=True):
            part.add_(values, alpha=alpha)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Values (blocks, 256) and scales (blocks,) in a message."""
        blocks = len(payload) // (_BLOCK + 4)
        return payload[: blocks * _BLOCK].view(torch.int8).view(blocks, _BLOCK), payload[blocks * _BLOCK :].view(
            torch.float32
        )


Codec = Bf16 | Int8

CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8}


def advance(codec: Codec, reference: Tensor, lower: Tensor, higher: Tensor) -> None:
    """r <- r + q_i / 2 + q_j / 2 from the messages of the worker with the lower number and of the other.

    The order is the same on both sides, and halves are exact, so the bits are the same whatever fuses operations.
    """
    sizes = len(reference)
    parts = zip(reference.split(_CHUNK), codec.chunks(lower, sizes), codec.chunks(higher, sizes), strict=True)
    for part, first, second in parts:
        part.add_(first.to(part.dtype), alpha=0.5).add_(second.to(part.dtype), alpha=0.5)


def difference(codec: Codec, mine: Tensor, theirs: Tensor, size: int) -> Iterator[Tensor]:
    """q_j - q_i in float32, `_CHUNK` elements at a time."""
    for own, other in zip(codec.chunks(mine, size), codec.chunks(theirs, size), strict=True):
        yield other.float() - own.float()
