"""A model whose computation is a sleep, so that two cores can emulate many workers with accelerators of their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 12
_GRADIENT = 1e-5


class SleepingModel(nn.Module):
    """Up to 12 layers of about equal size, whose forward and backward take no processor time.

    Forward sleeps a third of `seconds`, backward the rest, spread over the layers, so that gradients become ready one
    after the other as in a real network. Gradients are constant, and the loss is the sum of the input. If a sleep takes
    too long, because the timer is coarse or the processor busy with another worker, the next one is shorter.

    Args:
        parameters: number of parameters, at least 1.
        seconds: time of forward and backward together.
    """

    def __init__(self, parameters: int, seconds: float) -> None:
        super().__init__()
        layers = min(LAYERS, parameters)
        sizes = [parameters // layers + (layer < parameters % layers) for layer in range(layers)]
        self.layers = nn.ParameterList(nn.Parameter(0.02 * torch.randn(size)) for size in sizes)
        self.forward_seconds, self.backward_seconds = seconds / 3 / layers, 2 * seconds / 3 / layers
        self.clock = _Clock()

    def forward(self, x: Tensor) -> Tensor:
        """Map x of any shape, which has to require a gradient, to shape ()."""
        for layer in self.layers:
            x = _Sleep.apply(x, layer, self.clock, self.forward_seconds, self.backward_seconds)
        return x.sum()


class _Clock:
    """Stretches computations to given times, and makes up for earlier ones that took too long."""

    def __init__(self) -> None:
        self.late = 0.0
        """Seconds that computations took too long so far."""

    @contextlib.contextmanager
    def computing(self, seconds: float) -> Iterator[None]:
        """Sleep at the end of the context, so that it takes `seconds` less the delay of earlier ones."""
        began = time.perf_counter()
        yield
        due = seconds - self.late
        time.sleep(max(0.0, began + due - time.perf_counter()))
        self.late = time.perf_counter() - began - due


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Tensor, clock: _Clock, forward_seconds: float, backward_seconds: float
    ) -> Tensor:
        ctx.size, ctx.clock, ctx.seconds = layer.shape, clock, backward_seconds
        with clock.computing(forward_seconds):
            return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        with ctx.clock.computing(ctx.seconds):
            gradient = gradients[0].new_full(ctx.size, _GRADIENT)
        return gradients[0], gradient, None, None, None
