"""A script with an accelerator, a Trainer, and workers that FSDP2 shards: on CUDA as on the CPU, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from dsgdac_accel import GossipAccelerator, GossipCallback, GossipConfig
from dsgdac_accel.devices import default_device
from tests.multiprocess.scenarios import Scenario, World
from tests.multiprocess.scenarios import train as train_scenario
from tests.multiprocess.trainer_model import Model, Rows, arguments
from tests.sham_cuda.comparing import differences, run_both


def held(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


# ---- an accelerator


def script(rank: int, folder: Path) -> dict[str, Any]:
    accelerator = GossipAccelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, gossip=GossipConfig(power=2.0, log_every=2, timeout=30)
    )
    set_seed(0)
    # No convolution: torch takes another kernel for it, which rounds differently.
    model = nn.Sequential(nn.Linear(36, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    data = torch.randn(48, 36, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    loader = DataLoader(data, 4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for _ in range(2):
        for x in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 2.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    own = held(model.state_dict())
    with accelerator.deployed_model(model, calibrate=loader) as deployed:
        average = held(deployed.state_dict())
        outputs = accelerator.gather_for_metrics(deployed(data.to(accelerator.device)))
    accelerator.save_model(model, folder / accelerator.device.type)
    return {
        "device": accelerator.device.type,
        "losses": losses,
        "norms": norms,
        "own": own,
        "average": average,
        "outputs": outputs,
        "radius": accelerator.measure_consensus()["gossip/radius"],
    }


def test_a_script_in_bf16_computes_what_it_computes_on_the_cpu(sham, tmp_path):
    for on_cuda, on_cpu in zip(*run_both(sham, script, 2, tmp_path), strict=True):
        assert not differences(on_cuda, on_cpu)
        assert min(on_cpu["norms"]) < 2.0 < max(on_cpu["norms"])
    saved = [load_file(tmp_path / kind / "model.safetensors") for kind in ("cuda", "cpu")]
    assert not differences(*saved)
    assert saved[0].keys() == on_cuda["average"].keys()


# ---- a Trainer


def train(rank: int, folder: Path, resume: bool = False) -> dict[str, Any]:
    device = default_device().type
    set_seed(0)
    model = Model(dropout=0.5, batch_norm=True)
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = Trainer(
        model,
        arguments(
            str(folder / device), use_cpu=device == "cpu", max_steps=6, logging_strategy="steps", logging_steps=1,
            max_grad_norm=0.5, gradient_accumulation_steps=2, **every,
        ),
        train_dataset=Rows(40),
        eval_dataset=Rows(16, seed=1),
        optimizers=(torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), None),
        callbacks=[GossipCallback(GossipConfig(power=2.0, timeout=30))],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / device / "checkpoint-4") if resume else None)
    timed = ("_runtime", "_per_second", "wait_seconds")
    return {
        "device": trainer.args.device.type,
        "log": [
            {name: value for name, value in entry.items() if not name.endswith(timed)}
            for entry in trainer.state.log_history
        ],
        "deployed": held(model.state_dict()),
    }


def test_a_trainer_computes_what_it_computes_on_the_cpu_and_resumes(sham, tmp_path):
    on_cuda, on_cpu = run_both(sham, train, 2, tmp_path)
    resumed = sham.run(train, 2, tmp_path, True)
    for ours, theirs, again in zip(on_cuda, on_cpu, resumed, strict=True):
        assert not differences(ours, theirs)
        assert not differences(again["deployed"], ours["deployed"])
        assert not differences(again["log"][-4:-1], ours["log"][-4:-1])  # the last has a mean over the resumed steps
    for checkpoint in ("checkpoint-2", "checkpoint-6"):
        files = [load_file(tmp_path / kind / checkpoint / "model.safetensors") for kind in ("cuda", "cpu")]
        assert not differences(*files)


# ---- FSDP2


def train_with_shards(rank: int, optimizer: str) -> dict[str, Any]:
    found = train_scenario(rank, World(4, shards=2), Scenario(optimizer=optimizer))
    return {"device": default_device().type, "x": found["x"]}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sharded_workers_train_as_on_the_cpu(optimizer, sham):
    for on_cuda, on_cpu in zip(*run_both(sham, train_with_shards, 4, optimizer), strict=True):
        assert not differences(on_cuda, on_cpu)
