"""Passes over flat parameters that are as few as torch allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

_PIECE = 2**17  # elements for each thread: they stay in its cache
_MOST_FUSED = 2**30  # elements: torch's fused kernels count in 32 bits
CHECKSUM_BYTES = 2**16  # of a difference for each sum of its bits; divides every piece but the last


def add_scaled(x: Tensor, values: Tensor, scale: float, skip: Tensor | None = None) -> None:
    """x += scale * values, all (D,), unless `skip`, shape (), is 1: decided on the device, in one pass."""
    if skip is None:
        x.add_(values, alpha=scale)
        return
    # A step of SGD, whose fused kernel can skip like that; a product with 0 would let NaN through.
    for part, added in zip(x.split(_MOST_FUSED), values.split(_MOST_FUSED), strict=True):
        sgd(
            [part],
            [added],
            [None],
            fused=True,
            found_inf=skip,
            lr=scale,
            maximize=True,
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
        )


def subtract(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    factor: float = 1,
    others: Sequence[Tensor] = (),
    ratios: Sequence[float] = (),
    checksums: list[Tensor] | None = None,
) -> list[Tensor]:
    """out <- a + sum_k ratio_k other_k - factor * b, all (D,); return the squared norms of its pieces.

    Each piece is measured while it is in the cache. Likewise append its checksums to `checksums`, if it is given.
    """
    on_cpu = out.device.type == "cpu"  # elsewhere nothing stays in the cache, and `dot` would read the difference twice
    size = _PIECE * torch.get_num_threads() if on_cpu else max(1, len(out))
    squares = []
    for theirs, mine, difference, *more in zip(*(x.split(size) for x in (a, b, out, *others)), strict=True):
        for other, ratio in zip(more, ratios, strict=True):
            theirs = torch.add(theirs, other, alpha=ratio, out=difference)
        torch.sub(theirs, mine, alpha=factor, out=difference)
        squares.append(torch.dot(difference, difference) if on_cpu else torch.linalg.vector_norm(difference).square())
        if checksums is not None:
            checksums += _checksums(difference.view(torch.int64))
    return squares


def _checksums(words: Tensor) -> list[Tensor]:
    """Return checksums of int64 words, modulo 2^64, over `CHECKSUM_BYTES` each but for the last."""
    row = CHECKSUM_BYTES // 8
    if len(words) % row == 0:
        return [words.view(-1, row).sum(1)]
    whole = len(words) // row * row
    return [words[:whole].view(-1, row).sum(1), words[whole:].sum(0, keepdim=True)]
