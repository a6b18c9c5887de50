"""Oracles: the number formats of messages by their definitions, block by block, and gossip that sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

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
    """Stands in for `simulation.consensus_update`, for workers that send `comm_dtype`.

    Parameters of one dtype are a bucket, in which each is padded to whole rows of 128 bytes. Each shard has its own.

    Args:
        comm_dtype: a key of `DEFINITIONS`.
        shards: processes of a worker.
        local_workers: workers of a process, which do not round what they send each other.
    """

    def __init__(self, comm_dtype: str, shards: int = 1, local_workers: int = 1) -> None:
        self.rounded = DEFINITIONS.get(comm_dtype)
        self.keep = (lambda r: r) if comm_dtype in COARSE else bf16
        self.shards, self.local_workers = shards, local_workers
        self.references: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, x_N: Sequence[Sequence[Tensor]], mixing_NN: Tensor, gamma: float) -> list[list[Tensor]]:
        u_N = [[torch.zeros_like(x) for x in x_i] for x_i in x_N]
        for dtype, shard in product(dict.fromkeys(x.dtype for x in x_N[0]), range(self.shards)):
            buckets_N, into_N = ([self._bucket(t_i, dtype, shard) for t_i in t_N] for t_N in (x_N, u_N))
            row = 128 // dtype.itemsize
            flat_ND = torch.stack(
                [torch.cat([pad(x.flatten(), (0, -x.numel() % row)) for x in x_i]) for x_i in buckets_N]
            )
            u_ND = self._mix(flat_ND, mixing_NN, gamma, dtype, shard)
            for u_D, into_i in zip(u_ND, into_N, strict=True):
                for part, into in zip(u_D.split([-(-u.numel() // row) * row for u in into_i]), into_i, strict=True):
                    into.copy_(part[: into.numel()].view(into.shape))
        return u_N

    def _bucket(self, tensors: Sequence[Tensor], dtype: torch.dtype, shard: int) -> list[Tensor]:
        chunks = [x.chunk(self.shards) for x in tensors if x.dtype == dtype]
        return [parts[shard] if shard < len(parts) else parts[0][:0] for parts in chunks]

    def _mix(self, x_ND: Tensor, mixing_NN: Tensor, gamma: float, *bucket: Any) -> Tensor:
        u_ND = torch.zeros_like(x_ND)
        for i, j in mixing_NN.triu(1).nonzero().tolist():
            q_i, q_j = x_ND[i], x_ND[j]
            start = self.references.setdefault(bucket, self.keep(x_ND[0]))
            if i // self.local_workers != j // self.local_workers:
                r = self.references.get((i, j, *bucket), start)
                q_i, q_j = self.rounded(x_ND[i] - r), self.rounded(x_ND[j] - r)
                self.references[i, j, *bucket] = self.keep(r + (q_i + q_j) / 2)
            u_ND[i] += gamma * mixing_NN[i, j] * (q_j - q_i)
            u_ND[j] += gamma * mixing_NN[i, j] * (q_i - q_j)
        return u_ND
