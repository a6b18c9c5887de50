"""Number formats of messages: how a worker writes down the differences of its parameters to a reference.

Every format rounds. The reference advances by what the messages say, so the next message carries what was rounded away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256  # elements that share a scale: 1.6 % more bytes in int8
_LARGEST = 127


class Format(ABC):
    """A way to round a buffer (D,) into a message, Q, and to read it again."""

    name: str
    bits: float
    """Size of a message, per parameter of a large buffer."""
    is_fine = True
    """Whether Q rounds so finely that a reference may be rounded to bf16. The error of that is part of the difference
    that Q rounds, so it must be small beside the difference, or Q must be fine."""

    @abstractmethod
    def message(self, like: Tensor) -> Tensor:
        """Return an empty message about a buffer: (bytes,), or (D,) in a dtype."""

    @abstractmethod
    def write(self, message: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        """message <- Q(values), from element `begin` on, a multiple of 256; overwrites `values` and `spare`.

        If a value is not finite, `read` returns some value that is not finite.
        """

    @abstractmethod
    def read(self, message: Tensor, begin: int, out: Tensor) -> None:
        """out <- q, from element `begin` on."""


class Bf16(Format):
    """Q rounds to bf16: 2 bytes a value, 8 bits of precision."""

    name = "bf16"
    bits = 16.0

    def message(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=torch.bfloat16, device=like.device)

    def write(self, message: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        message[begin : begin + len(values)].copy_(values)

    def read(self, message: Tensor, begin: int, out: Tensor) -> None:
        out.copy_(message[begin : begin + len(out)])


@dataclass(frozen=True)
class CodeBlocks:
    """Layout of a message as bytes: the codes of blocks of 256 values each, then the scales of the blocks in fp32."""

    code_bytes: int
    """Bytes of the codes of a block."""

    @property
    def bits(self) -> float:
        """Bits per value, scales included."""
        return 8 * (self.code_bytes + 4) / _BLOCK

    def message(self, like: Tensor) -> Tensor:
        """Return an empty message; the last block is padded."""
        blocks = -(-like.numel() // _BLOCK)
        return torch.zeros(blocks * (self.code_bytes + 4), dtype=torch.uint8, device=like.device)

    def parts(self, message: Tensor, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the codes (blocks, code_bytes) and the scales (blocks,) of `count` values."""
        total = len(message) // (self.code_bytes + 4)
        rows = slice(begin // _BLOCK, -(-(begin + count) // _BLOCK))
        codes = message[: total * self.code_bytes].view(total, self.code_bytes)
        return codes[rows], message[total * self.code_bytes :].view(torch.float32)[rows]


class Int8(Format):
    """Q rounds to 255 levels between the largest values of each block of 256, which has a scale in fp32."""

    name = "int8"
    blocks = CodeBlocks(_BLOCK)
    bits = blocks.bits

    def message(self, like: Tensor) -> Tensor:
        return self.blocks.message(like)

    def write(self, message: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        codes, scales = self.blocks.parts(message, begin, len(values))
        values, spare = _padded(values, spare)
        blocks = values.view(-1, _BLOCK)
        # A value that is not finite shows in the scale; its level is some number.
        if mixes_dtypes(values.device):
            largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
        else:
            largest = torch.amax(torch.abs(values, out=spare).view(-1, _BLOCK), dim=1)
        torch.div(largest, _LARGEST, out=scales)
        blocks.mul_(_inverse(scales.to(values.dtype))[:, None]).round_()
        codes.view(torch.int8).copy_(blocks)

    def read(self, message: Tensor, begin: int, out: Tensor) -> None:
        codes, scales = self.blocks.parts(message, begin, len(out))
        levels, whole = codes.view(torch.int8), _whole(out, codes.numel())
        if mixes_dtypes(out.device):
            torch.mul(levels, scales.to(out.dtype)[:, None], out=whole.view(-1, _BLOCK))
        else:
            whole.view(-1, _BLOCK).copy_(levels).mul_(scales[:, None])
        if whole is not out:
            out.copy_(whole[: len(out)])


class FewBits(Format):
    """Q rounds to 2^b - 1 levels s L, L = -m .. m, that are equally spaced around 0, and packs them into bytes.

    L is d rounded to steps of max |d| / reach of its block of 256. The scale s is then the one with

        <q, d> = |d|^2,        s = |d|^2 / <L, d>

    so that, for any Gaussian differences, workers come together as fast as without rounding (Bussgang 1952; Vargaftik
    et al. 2022, EDEN). It is at most 1.5 times the scale <L, d> / |L|^2 of the least error, which bounds the error by
    |d|: |q - d|^2 <= |d|^2 - 0.75 <L, d>^2 / |L|^2.

    Args:
        bits: b, 2 or 4.
        reach: the largest value in steps. Beyond m, it is cut off, and the values around it are rounded more finely.
    """

    is_fine = False

    def __init__(self, bits: int, reach: float) -> None:
        self.name = f"int{bits}"
        self.width, self.reach = bits, reach
        self.largest = 2 ** (bits - 1) - 1
        self.per_byte = 8 // bits
        self.blocks = CodeBlocks(_BLOCK // self.per_byte)
        self.bits = self.blocks.bits

    def message(self, like: Tensor) -> Tensor:
        return self.blocks.message(like)

    def write(self, message: Tensor, begin: int, values: Tensor, spare: Tensor) -> None:
        codes, scales = self.blocks.parts(message, begin, len(values))
        values, spare = _padded(values, spare)
        d, levels = values.view(-1, _BLOCK), spare.view(-1, _BLOCK)
        step = torch.abs(d, out=levels).amax(1).div_(self.reach)
        d.mul_(_inverse(step)[:, None])  # now in units of the step, so that no square is too large or too small
        d_d = torch.linalg.vector_norm(d, dim=1).square_()
        torch.round(d, out=levels).clamp_(-self.largest, self.largest)
        l_l = torch.linalg.vector_norm(levels, dim=1).square_()
        self._pack(levels, codes.view(torch.int8))
        l_d = d.mul_(levels).sum(1).clamp_min_(1.0)  # it is at least 1, but for a block of zeros
        torch.mul(step, torch.minimum(d_d / l_d, 1.5 * l_d / l_l), out=scales)

    def _pack(self, levels: Tensor, codes: Tensor) -> None:
        """Write each quarter, or half, of a block into the same bits of its bytes, as L + m.

        Sums of int8 wrap around as those of bytes do, and floats become int8 in a third of the time.
        """
        parts = levels.to(torch.int8).view(len(levels), self.per_byte, -1)
        codes.copy_(parts[:, 0])
        for k in range(self.per_byte):
            if k:
                codes.add_(parts[:, k], alpha=2 ** (k * self.width))
            codes.add_(self.largest * 2 ** (k * self.width))

    def read(self, message: Tensor, begin: int, out: Tensor) -> None:
        codes, scales = self.blocks.parts(message, begin, len(out))
        whole = _whole(out, len(codes) * _BLOCK)
        shifts = torch.arange(0, 8, self.width, dtype=torch.uint8, device=out.device)[:, None]
        parts = codes[:, None].bitwise_right_shift(shifts).bitwise_and_(2**self.width - 1)
        whole.view(parts.shape).copy_(parts.view(torch.int8).sub_(self.largest))
        whole.view(-1, _BLOCK).mul_(scales[:, None])
        if whole is not out:
            out.copy_(whole[: len(out)])


FORMATS: dict[str, Format] = {
    number_format.name: number_format for number_format in (Bf16(), Int8(), FewBits(4, reach=7), FewBits(2, reach=2))
}


def mixes_dtypes(device: torch.device) -> bool:
    """Return whether operations take tensors of two dtypes at once, which saves passes over memory.

    On a CPU, converting first is a quarter faster: the piece stays in the cache.
    """
    return device.type != "cpu"


def _inverse(steps: Tensor) -> Tensor:
    """Return 1 / steps, and 0 where the whole block is 0, or too near to it."""
    return steps.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0)


def _padded(values: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Return values that fill whole blocks, and as much working space."""
    if len(values) % _BLOCK == 0:
        return values, spare
    values = F.pad(values, (0, -len(values) % _BLOCK))
    return values, torch.empty_like(values)


def _whole(out: Tensor, count: int) -> Tensor:
    """Return `out`, or `count` elements in its place if it does not fill its last block."""
    return out if len(out) == count else out.new_empty(count)
