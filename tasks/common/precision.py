"""Evaluation in float32 of a model that trains under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Undo the autocast that Accelerate wrapped around the model's forward, inside the context.

    bf16 and fp16 round differently in batches of other shapes, which may change the result of a search, and lose digits
    of a loss.

    Args:
        model: the module that Accelerate prepared, without DDP and without the wrapper of torch.compile.
    """
    wrapped = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if wrapped is not None:
            model.forward = wrapped
