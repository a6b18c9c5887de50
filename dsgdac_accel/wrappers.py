"""Models and parameter names without the wrappers of DDP and `torch.compile`."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside any nesting of DDP and `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model


def eager_name(name: str) -> str:
    """Return a parameter's name without the parts that `torch.compile` of a submodule adds.

    >>> eager_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return name.replace("_orig_mod.", "")
