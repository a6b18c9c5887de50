"""Layers whose computation is a sleep: a worker on an accelerator of its own, as far as the network can tell."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 12
_GRADIENT = 1e-5


class SleepingModel(nn.Module):
    """`parameters` numbers in up to 12 layers of about one size, whose forward and backward take no processor time.

    Forward sleeps a third of `seconds`, backward the rest, each spread over the layers, so that gradients become ready
    one after the other as in a real network. They are constant, and the loss is the sum of the input.

    Args:
        parameters: how many, at least 1.
        seconds: of forward and backward together.
    """

    def __init__(self, parameters: int, seconds: float) -> None:
        super().__init__()
        layers = min(LAYERS, parameters)
        sizes = [parameters // layers + (layer < parameters % layers) for layer in range(layers)]
        self.layers = nn.ParameterList(nn.Parameter(0.02 * torch.randn(size)) for size in sizes)
        self.forward_seconds, self.backward_seconds = seconds / 3 / layers, 2 * seconds / 3 / layers

    def forward(self, x: Tensor) -> Tensor:
        """Shape () from x of any shape, which needs to require a gradient."""
        for layer in self.layers:
            x = _Sleep.apply(x, layer, self.forward_seconds, self.backward_seconds)
        return x.sum()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.size, ctx.seconds = layer.shape, backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], gradients[0].new_full(ctx.size, _GRADIENT), None, None
