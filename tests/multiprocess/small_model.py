"""A tiny model in float64 and inputs that differ per worker."""

from __future__ import annotations

import torch
from torch import nn

FAST = {"timeout": 20.0}


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def inputs(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


class Scaled(nn.Parameter):
    """A parameter with scales in an attribute, as those of bitsandbytes."""

    def __new__(cls, scale: float) -> Scaled:
        parameter = torch.Tensor._make_subclass(cls, torch.arange(8, dtype=torch.uint8), False)
        parameter.absmax = torch.tensor([scale])
        return parameter


class Trailing(torch.optim.SGD):
    """Keeps a running average of the weights in its state, from the second step on."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            if "steps" in own:
                own.setdefault("mean", parameter.detach().clone()).lerp_(parameter.detach(), 0.1)
            own["steps"] = 1
