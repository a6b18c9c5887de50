"""Mixed precision: whether a device has it, and evaluation in float32 of a model that trains under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def check_precision(mixed_precision: str) -> None:
    """Raise ValueError for fp16 without a GPU."""
    if mixed_precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("mixed_precision: fp16 needs a GPU, and there is none here. Use bf16 or no.")


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
