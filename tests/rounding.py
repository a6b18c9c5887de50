"""Oracles: the number formats of messages by their definitions, block by block, and gossip that sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def blocks_of(d: Tensor, size: int) -> Tensor:
    return pad(d, (0, -len(d) % size)).view(-1, size)


def bf16(d: Tensor) -> Tensor:
    return d.bfloat16().to(d.dtype)


def int8(d: Tensor) -> Tensor:
    """255 levels up to the largest value of each block."""
    parts = blocks_of(d, 256)
    scales = (parts.abs().amax(1, keepdim=True) / 127).float().double()
    return (scales * torch.where(scales > 0, parts / scales, 0.0).round()).flatten()[: len(d)]


def few_bits(bits: int, reach: float) -> Callable[[Tensor], Tensor]:
    """s L, with <s L, d> = |d|^2 where that is not far from the scale of the least error."""

    def rounded(d: Tensor) -> Tensor:
        blocks = []
        for part in blocks_of(d, 256):
            step, largest = part.abs().max() / reach, 2 ** (bits - 1) - 1
            levels = (part / step).round().clamp(-largest, largest) if step > 0 else torch.zeros_like(part)
            along = (levels @ part).item()
            scale = min(part @ part / along, 1.5 * along / (levels @ levels)) if along else torch.zeros(())
            blocks.append(scale.float().double() * levels)
        return torch.cat(blocks)[: len(d)]

    return rounded


DEFINITIONS = {"bf16": bf16, "int8": int8, "int4": few_bits(4, 7), "int2": few_bits(2, 2)}
COARSE = ("int4", "int2")


class Replay:
    """Stands in for `simulation.consensus_update`, for workers in processes of their own that send `comm_dtype`.

    Parameters are float64, and padded to whole rows of 128 bytes as in a bucket.
    """

    def __init__(self, comm_dtype: str) -> None:
        self.rounded = DEFINITIONS[comm_dtype]
        self.keep = (lambda r: r) if comm_dtype in COARSE else bf16
        self.references: dict[tuple[int, int], Tensor] = {}
        self.start: Tensor | None = None

    def __call__(self, x_N: Sequence[Sequence[Tensor]], mixing_NN: Tensor, gamma: float) -> list[list[Tensor]]:
        flat_ND = torch.stack([torch.cat([pad(x.flatten(), (0, -x.numel() % 16)) for x in x_i]) for x_i in x_N])
        u_ND = torch.zeros_like(flat_ND)
        for i, j in mixing_NN.triu(1).nonzero().tolist():
            self.start = self.keep(flat_ND[0]) if self.start is None else self.start
            r = self.references.get((i, j), self.start)
            q_i, q_j = self.rounded(flat_ND[i] - r), self.rounded(flat_ND[j] - r)
            self.references[i, j] = self.keep(r + (q_i + q_j) / 2)
            u_ND[i] += gamma * mixing_NN[i, j] * (q_j - q_i)
            u_ND[j] += gamma * mixing_NN[i, j] * (q_i - q_j)
        sizes = [x.numel() + -x.numel() % 16 for x in x_N[0]]
        return [
            [part[: x.numel()].view(x.shape) for part, x in zip(u_D.split(sizes), x_N[0], strict=True)] for u_D in u_ND
        ]
