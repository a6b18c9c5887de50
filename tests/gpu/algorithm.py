"""A small training in float64, whose steps the tests of this folder take one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel import GossipAccelerator
from tests.gpu.machine import Here

STEPS = 12
SCHEDULE: Mapping[str, Any] = {"power": 2.0, "start_step": 3}
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **kind: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05, **kind),
    "adam": lambda parameters, **kind: torch.optim.Adam(parameters, lr=0.02, **kind),
}


def make_model() -> nn.Module:
    """The same model at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_scheduler(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """A warm-up and a decay, so that gamma changes."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1.0) * (1 - step / 25))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a worker, on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(1000 * worker + step)
    x, y = (torch.randn(4, width, generator=generator, dtype=torch.float64, device="cpu") for width in (5, 3))
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean square error, shape ()."""
    return (model(x) - y).square().mean()


@dataclass
class Training:
    """The small training, prepared by an accelerator."""

    here: Here
    accelerator: GossipAccelerator
    model: Any
    optimizer: Any
    scheduler: Any

    @classmethod
    def prepared(cls, here: Here, optimizer: str, **settings: Any) -> Training:
        """Prepare it with a fused optimizer. Collective."""
        accelerator = here.accelerator(**{**SCHEDULE, **settings})
        model = make_model()
        made = OPTIMIZERS[optimizer](model.parameters(), fused=True)
        return cls(here, accelerator, *accelerator.prepare(model, made, make_scheduler(made)))

    @property
    def skipped(self) -> int:
        """Local updates that were skipped so far."""
        return self.accelerator.gossip_steps[0].guard.skipped

    def step(self, step: int, nonfinite: Collection[int] = ()) -> None:
        """Take one step; `nonfinite` are the local workers whose gradients become NaN."""
        local = self.accelerator.workers_per_process
        mine = range(self.here.rank * local, (self.here.rank + 1) * local)
        x, y = (torch.cat(parts).to(self.here.device) for parts in zip(*(batch(w, step) for w in mine), strict=True))
        self.accelerator.backward(loss_of(self.model, x, y))
        for worker in nonfinite:
            self._parameters(worker)[0].grad.fill_(math.nan)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def run(self, delays: float = 0.0, nonfinite: Mapping[int, Collection[int]] | None = None) -> Training:
        """Take `STEPS` steps, each after a random delay of this worker of up to `delays` seconds."""
        for step in range(STEPS):
            if delays:
                self.here.delay(31 * self.here.rank + step, delays)
            self.step(step, (nonfinite or {}).get(step, ()))
        return self

    def parameters(self) -> Tensor:
        """Parameters of the workers of this process, (local workers, D) float64 on the CPU."""
        local = self.accelerator.workers_per_process
        return torch.stack([torch.cat([p.detach().cpu().flatten() for p in self._parameters(w)]) for w in range(local)])

    def _parameters(self, worker: int) -> list[Any]:
        return list(getattr(self.model, "replicas", [self.model])[worker].parameters())
