"""Checkpoints on CUDA: written through pinned memory, resumed bit by bit, and equal to those of the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checkpoint import load_worker
from dsgdac_accel.checkpoint.staging import Staged
from tests.sham_cuda.comparing import differences, run_both

WORKERS, STEPS, SAVED = 2, 9, 4


def train(
    rank: int, folder: Path, dtype: torch.dtype, comm_dtype: str, resume: bool = False, waits: bool = True
) -> dict[str, Any]:
    """Train, with a checkpoint that is waited for after `SAVED` steps and one in the background after the next.

    Without `waits`, they are written before the event of their copies to the host.
    """
    if not waits:
        Staged.wait = lambda staged: None
    accelerator = GossipAccelerator(gossip=GossipConfig(power=2.0, log_every=2, comm_dtype=comm_dtype, timeout=30))
    folder = folder / accelerator.device.type
    set_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Dropout(0.5), nn.Linear(300, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    first = 0
    if resume:
        accelerator.load_state(folder / "background")
        first = accelerator.gossip_steps[0].steps_taken
    for step in range(first, STEPS):
        x = torch.randn(8, 6, generator=torch.Generator("cpu").manual_seed(100 * rank + step), device="cpu")
        accelerator.backward(model(x.to(accelerator.device, dtype)).float().square().mean())
        if rank == 1 and step == 1:
            next(iter(model.parameters())).grad.fill_(math.nan)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step + 1 in (SAVED, SAVED + 1) and not resume:
            accelerator.save_state(folder / ("waited" if step + 1 == SAVED else "background"), wait=step + 1 == SAVED)
    accelerator.finish_saving()
    state = accelerator.gossip_steps[0].state_dict()
    return {
        "device": accelerator.device.type,
        "distance": state["mixer"].pop("disagreement"),
        "first": first,
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict()["state"],
        "gossip": state,
        "draw": torch.rand(3, device=accelerator.device),
    }


def saved(folder: Path, rank: int) -> Any:
    """Return all that a worker saved, but the random stream of CUDA and the distance that is rounded differently."""
    state = load_worker(folder, rank)
    state["random"].pop("cuda", None)
    state["gossip"][0]["mixer"].pop("disagreement")
    return state


KINDS = [(torch.float32, "int8"), pytest.param(torch.bfloat16, "full", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("dtype", "comm_dtype"), KINDS)
def test_a_checkpoint_of_cuda_is_that_of_the_cpu_and_resumes(dtype, comm_dtype, sham, tmp_path):
    on_cuda, on_cpu = run_both(sham, train, WORKERS, tmp_path, dtype, comm_dtype)
    resumed = sham.run(train, WORKERS, tmp_path, dtype, comm_dtype, True)
    for rank, (ours, again, theirs) in enumerate(zip(on_cuda, resumed, on_cpu, strict=True)):
        assert (again.pop("device"), again.pop("first")) == ("cuda", SAVED + 1)
        assert ours.pop("first") == theirs.pop("first") == 0
        assert not differences(again, ours)
        assert ours.pop("distance") == pytest.approx(theirs.pop("distance"), rel=1e-6)
        assert not differences(ours, theirs)
        for name in ("waited", "background"):
            assert not differences(saved(tmp_path / "cuda" / name, rank), saved(tmp_path / "cpu" / name, rank))


def test_without_its_event_a_checkpoint_is_garbage(sham, tmp_path):
    right = sham.run(train, WORKERS, tmp_path / "right", torch.float32, "int8")
    wrong = sham.run(train, WORKERS, tmp_path / "wrong", torch.float32, "int8", False, False)
    assert not differences(wrong, right)  # training never reads what was staged
    for rank in range(WORKERS):
        for name in ("waited", "background"):
            one, other = (saved(tmp_path / kind / "cuda" / name, rank) for kind in ("right", "wrong"))
            assert differences(one["models"], other["models"])
