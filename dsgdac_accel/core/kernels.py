"""Passes over what is mixed that are as few as torch allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

_PIECE = 2**17  # elements for each thread: they stay in its cache


def add_scaled(
    x: list[Tensor], added: list[Tensor], scale: float, skip: Tensor | None = None, alike: bool = False
) -> None:
    """x += scale * added, tensor by tensor, unless `skip`, shape (), is 1: decided on the device.

    Args:
        x: some tensors.
        added: of the same shapes; may hold NaN if `skip` is 1.
        scale: a number.
        skip: 0 or 1 on the device; None adds without asking.
        alike: whether each pair has the same dtype, device and strides, without gaps, and at most 2^30 elements.
    """
    # Only the fused kernel goes through memory without asking for strides.
    alike = alike and (skip is None or all(own.stride() == one.stride() for own, one in zip(x, added, strict=True)))
    if not alike:
        added = [one.to(own) for own, one in zip(x, added, strict=True)]
    if skip is None:
        torch._foreach_add_(x, added, alpha=scale)
    elif alike:
        # A step of SGD, whose fused kernel can skip like that.
        sgd(
            [own.detach() for own in x],
            added,
            [None] * len(x),
            fused=True,
            found_inf=skip,
            lr=scale,
            maximize=True,
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
        )
    else:
        for own, one in zip(x, added, strict=True):  # a product with 0 would let NaN through
            own.add_(one.masked_fill(skip.to(own.device).bool(), 0.0), alpha=scale)


def subtract(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    factor: float = 1,
    others: Sequence[Tensor] = (),
    ratios: Sequence[float] = (),
) -> list[Tensor]:
    """out <- a + sum_k ratio_k other_k - factor * b, all (D,); return the squared norms of its pieces.

    Each piece is measured while it is in the cache.
    """
    on_cpu = out.device.type == "cpu"  # elsewhere nothing stays in the cache, and `dot` would read the difference twice
    size = _PIECE * torch.get_num_threads() if on_cpu else max(1, len(out))
    squares = []
    for theirs, mine, difference, *more in zip(*(x.split(size) for x in (a, b, out, *others)), strict=True):
        for other, ratio in zip(more, ratios, strict=True):
            theirs = torch.add(theirs, other, alpha=ratio, out=difference)
        torch.sub(theirs, mine, alpha=factor, out=difference)
        squares.append(torch.dot(difference, difference) if on_cpu else torch.linalg.vector_norm(difference).square())
    return squares
