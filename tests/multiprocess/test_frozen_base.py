"""A frozen base is in a checkpoint once at most, and a run that resumes from it goes on bit by bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from dsgdac_accel import GossipAccelerator, GossipCallback, GossipConfig
from dsgdac_accel.checkpoint import CheckpointError, load_worker, read_manifest
from dsgdac_accel.checkpoint.resharding import leaves
from dsgdac_accel.checkpoint.serialization import Reference, read_state
from dsgdac_accel.tensor_bytes import as_bytes
from tests.multiprocess.small_model import Scaled
from tests.multiprocess.trainer_model import Model, Rows, arguments
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess


class Adapted(nn.Module):
    """A frozen base with an adapter, a target that no gradient trains, perhaps a quantized and a tied weight."""

    _keys_to_ignore_on_save = None  # the Trainer reads it where it loads a part of a model

    def __init__(self, seed: int = 0, quantized: float | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Linear(64, 256, bias=False)
            self.base = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
            self.norm = nn.BatchNorm1d(256)
            self.target = nn.Linear(256, 64)
            self.register_buffer("table", torch.randn(1024), persistent=False)
            self.requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(256, 2), nn.Linear(2, 256))
        if quantized is not None:
            self.packed = Scaled(quantized)
            self.tied = self.embedding.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, row: Any = None) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.base(self.embedding(x)))
        hidden = self.norm(hidden + self.adapter(hidden)) + self.table[:256]
        output = hidden @ self.embedding.weight
        return {"loss": (output - x).square().mean(), "logits": output}


BASE = 4 * (64 * 256 + 2 * (256 * 256 + 256) + 256 * 64 + 64 + 1024 + 2 * 256)
"""Bytes of everything that is frozen."""
TARGET = 4 * (256 * 64 + 64)
ADAPTER = 50_000
"""At most what a worker's file takes: 5,128 bytes each of weights and two moments, random streams and plain values."""


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [as_bytes(tensor).clone() for tensor in (*model.parameters(), *model.buffers())]


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


# ---- GossipAccelerator


def prepared(model: nn.Module) -> tuple[GossipAccelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20, power=1.0))
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator, model, optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 64, generator=generator))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        # As target networks are updated: no version counter sees it, and the workers differ.
        model.target.weight.data.lerp_(model.adapter[1].weight.data.mean().expand_as(model.target.weight), 0.1)


def save_and_resume(rank: int, folder: Path) -> dict[str, Any]:
    accelerator, model, optimizer = prepared(Adapted(quantized=3.0))
    known = accelerator.checkpoints.frozen_digests()
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder / "whole")
    accelerator.save_state(folder / "whole")  # replaces it
    accelerator.save_state(folder / "background", wait=False)
    accelerator.finish_saving()
    accelerator.checkpoints.save(folder / "without", elsewhere=known)
    saved = values_of(model)
    train(accelerator, model, optimizer, range(3, 5))
    end = values_of(model)
    accelerator.free_memory()
    found: dict[str, Any] = {"refused": {}, "resumed": {}}
    for name, seed in {"whole": 1, "background": 1, "without": 0}.items():
        accelerator, model, optimizer = prepared(Adapted(seed, quantized=3.0))
        accelerator.load_state(folder / name)
        equal = all(map(torch.equal, values_of(model), saved))
        train(accelerator, model, optimizer, range(3, 5))
        found["resumed"][name] = equal and all(map(torch.equal, values_of(model), end))
        accelerator.free_memory()
    for name, other in {"without": Adapted(1, quantized=3.0), "whole": Adapted(quantized=4.0)}.items():
        accelerator, model, optimizer = prepared(other)
        before = values_of(model)
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(folder / name)
        found["refused"][name] = str(caught.value), all(map(torch.equal, values_of(model), before))
        accelerator.free_memory()
    found["target"] = model.target.weight.detach().clone()
    return found


def test_the_base_is_stored_once_or_not_at_all_and_the_run_resumes_to_the_bit(tmp_path):
    results = run_workers(save_and_resume, 2, tmp_path)
    for found in results:
        assert found["resumed"] == {"whole": True, "background": True, "without": True}
        message, unchanged = found["refused"]["without"]
        assert unchanged
        assert re.search(r"tied and \d+ more of the model differ .* Build the model from the same base", message)
        message, unchanged = found["refused"]["whole"]
        assert unchanged
        assert "packed" in message
    private = 2 * (TARGET + ADAPTER)
    for name in ("whole", "background"):
        assert BASE - TARGET < stored(tmp_path / name) < BASE - TARGET + private, name
        assert sorted(file.name.partition("-")[0] for file in (tmp_path / name / "workers").iterdir()) == [
            *(["00000", "00001", "common"] if name == "whole" else ["00000.safetensors", "00001.safetensors"]),
            *([] if name == "whole" else ["common.safetensors"]),
        ]
    # The table is no part of a state dict, so nobody else has it.
    assert stored(tmp_path / "without") < private + 2 * 4 * 1024
    first, second = (load_worker(tmp_path / "whole", rank)["models"][0] for rank in range(2))
    assert first["parameters"].keys() | {"packed"} == dict(Adapted(quantized=3.0).named_parameters()).keys()
    assert torch.equal(first["parameters"]["tied"], Adapted().embedding.weight)
    assert not torch.equal(first["parameters"]["target.weight"], second["parameters"]["target.weight"])
    file = read_manifest(tmp_path / "without").files[0]
    references = leaves(read_state(tmp_path / "without", file), Reference)
    assert {path[-1] for path, reference in references if reference.stored} <= {"table"}


def test_averages_of_another_number_of_workers_have_the_base(tmp_path):
    run_workers(save_for_others, 2, tmp_path)
    for equal, mean in run_workers(load_average, 3, tmp_path):
        assert equal
        assert mean


def save_for_others(rank: int, folder: Path) -> None:
    accelerator, model, optimizer = prepared(Adapted())
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state(folder / "c")


def load_average(rank: int, folder: Path) -> tuple[bool, bool]:
    accelerator, model, _ = prepared(Adapted(1))
    accelerator.load_state(folder / "c", on_other_worker_count="deployed")
    first, second = (load_worker(folder / "c", other)["models"][0]["parameters"] for other in range(2))
    mean = (first["target.weight"].double() + second["target.weight"].double()) / 2
    return torch.equal(model.base[1].weight, Adapted().base[1].weight), torch.equal(model.target.weight, mean.float())


# ---- the Trainer


def start_a_trainer(rank: int, folder: Path) -> dict[str, Any]:
    send, sent = torch.distributed.broadcast, []

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return send(tensor, *args, **kwargs)

    torch.distributed.broadcast = counting
    found = {}
    for name, seed in {"equal": 0, "unequal": rank, "evaluated before": rank}.items():
        sent.clear()
        trainer = Trainer(
            Model(seed=seed),
            arguments(str(folder), max_steps=1, per_device_eval_batch_size=2),
            train_dataset=Rows(12),
            eval_dataset=Rows(8),
            callbacks=[GossipCallback(GossipConfig(timeout=20))],
        )
        loss = trainer.evaluate()["eval_loss"] if name == "evaluated before" else None
        trainer.train()
        found[name] = sum(sent), loss
    return found


@pytest.mark.slow
def test_the_model_of_a_trainer_is_sent_once_and_only_if_workers_differ(tmp_path):
    results = run_workers(start_a_trainer, 2, tmp_path)
    first, data = Model(), Rows(8)
    with torch.no_grad():
        loss = first(data.x, data.y)["loss"].item()
    size = 8 * sum(parameter.numel() for parameter in first.parameters())
    for found in results:
        assert found["equal"] == (0, None)
        assert found["unequal"] == (size, None)
        assert found["evaluated before"] == (size, pytest.approx(loss, rel=1e-6)), "worker 0's model is evaluated"


class Inputs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> dict[str, Any]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(row))
        return {"x": x, "labels": x}


class AdapterOnly(Trainer):
    """Saves and loads the adapter alone, as scripts do without PEFT."""

    def _save(self, output_dir=None, state_dict=None):
        adapter = {name: value for name, value in self.model.state_dict().items() if "adapter" in name}
        super()._save(output_dir, adapter)


KINDS = {"trainer": Trainer, "virtual workers": Trainer, "own way": AdapterOnly, "like PEFT": AdapterOnly}


class Counting(TrainerCallback):
    """Changes frozen weights alike in all processes, of virtual workers those of the first."""

    def on_step_end(self, args, state, control, **kwargs):
        kwargs["model"].target.weight.data.fill_(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        kwargs["model"].norm.weight.data.fill_(2.0)


def resumed_trainer(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for kind, of in KINDS.items():
        ends = []
        for seed, resume in ((0, None), (int(kind != "like PEFT"), str(folder / kind / "checkpoint-3"))):
            model = Adapted(seed)
            gossip = GossipConfig(timeout=20, power=1.0, workers_per_process=1 + (kind == "virtual workers"))
            if kind == "like PEFT":
                model.peft_config = {}
            trainer = of(
                model,
                arguments(
                    str(folder / kind), max_steps=6, save_strategy="steps", save_steps=3, per_device_train_batch_size=4
                ),
                train_dataset=Inputs(),
                callbacks=[GossipCallback(gossip, calibrate=False), Counting()],
            )
            if kind == "like PEFT" and resume is None:
                trainer.train()  # what it changes is in no base model when the next one begins
            trainer.train(resume_from_checkpoint=resume)
            ends.append(values_of(model))
        found[kind] = all(map(torch.equal, *ends))
    return found


@pytest.mark.slow
def test_a_trainer_checkpoint_leaves_the_base_to_the_trainers_own_file(tmp_path):
    for found in run_workers(resumed_trainer, 2, tmp_path):
        assert found == dict.fromkeys(KINDS, True)
    # The target, stored once, and what is in nobody else's file or differs: the table and BatchNorm statistics.
    changed = 4 * (256 * 64 + 1024)
    expected = {"trainer": changed, "like PEFT": changed, "own way": BASE, "virtual workers": changed + 4 * 256 * 64}
    for kind, size in expected.items():
        workers = 4 if kind == "virtual workers" else 2
        assert size < stored(tmp_path / kind / "checkpoint-3" / "workers") < size + workers * ADAPTER, kind
