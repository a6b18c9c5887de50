"""The optimizers of bitsandbytes and torchao: resumed bit by bit, and with another number of workers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.held import held
from tests.workers import run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS, SAVED = 6, 3


class Run:
    """A model with two parameters that are large enough (4,096 values) for quantized states, and with small ones."""

    def __init__(self, package: str, name: str, dtype: torch.dtype) -> None:
        config = GossipConfig(power=1.0, timeout=120, on_other_worker_count="deployed")
        self.accelerator = GossipAccelerator(gossip=config)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)
        if package == "bitsandbytes":  # as the Trainer does for embeddings
            manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
            manager.register_module_override(model[2], "weight", {"optim_bits": 32})
        optimizer = getattr(importlib.import_module(f"{package}.optim"), name)(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
            self.accelerator.backward(self.model(x.to(self.model[0].weight.dtype)).float().square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([held(self.accelerator, p).detach().flatten() for p in self.model.parameters()])


def train(rank: int, folder: Path, *setting: Any) -> tuple:
    run = Run(*setting)
    run.train(rank, 0, SAVED)
    run.accelerator.save_state(folder)
    run.train(rank, SAVED, STEPS)
    if setting[0] == "bitsandbytes":
        states = run.optimizer.state[run.model[2].weight]
        assert states["state1"].dtype == torch.float32, "the override holds for the master, too"
    states = next(iter(run.optimizer.state.values()))
    return run.weights(), {type(value).__name__ for value in states.values()}


def resume(rank: int, folder: Path, *setting: Any) -> tuple:
    run = Run(*setting)
    run.accelerator.load_state(folder)
    started = run.weights()
    run.train(rank, SAVED, STEPS)
    return started, run.weights()


@pytest.mark.parametrize(
    ("package", "name", "kind", "dtype"),
    [
        ("bitsandbytes", "AdamW8bit", "Tensor", torch.bfloat16),
        ("bitsandbytes", "Lion8bit", "Tensor", torch.float32),
        ("torchao", "AdamW8bit", "OptimState8bit", torch.bfloat16),
        ("torchao", "AdamW4bit", "OptimState4bit", torch.float32),
    ],
)
def test_quantized_states_are_resumed(tmp_path, package, name, kind, dtype):
    pytest.importorskip(f"{package}.optim")
    setting = tmp_path / "c", package, name, dtype
    whole = run_workers(train, 2, *setting, timeout=280)
    resumed = run_workers(resume, 2, *setting, timeout=280)
    for (weights, kinds), (_, found) in zip(whole, resumed, strict=True):
        assert kind in kinds
        assert torch.equal(weights, found)
    assert not torch.equal(whole[0][0], whole[1][0])
    others = run_workers(resume, 3, *setting, timeout=280)
    for started, ended in others:
        torch.testing.assert_close(started, (resumed[0][0] + resumed[1][0]) / 2, rtol=0, atol=1e-7)
        assert bool(torch.isfinite(ended).all())
        assert not torch.equal(started, ended)
