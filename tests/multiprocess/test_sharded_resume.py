"""Checkpoints of sharded workers: the run resumes bit by bit, and other numbers of shards and workers read them."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checkpoint import CheckpointError, WorkerCountError, is_complete, load_worker, read_manifest
from dsgdac_accel.checkpoint.resharding import leaves
from dsgdac_accel.checkpoint.serialization import Reference, read_state
from dsgdac_accel.core.parameters import as_parameter_list
from dsgdac_accel.distributed.shards import gathering_modules, local_of, reshard, whole_of
from tests import workers as launches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SAMPLES, BATCH, SAVED_AT, STEPS = 60, 2, 11, 14


def run_workers(*args: Any) -> list[Any]:
    return launches.run_workers(*args, timeout=300)


class Rows(Dataset):
    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "row": self.rows[index] + 0.1 * torch.randn(6)}


class Net(nn.Module):
    """Uneven shards, a shard without elements, a frozen weight, dropout, and a buffer that changes."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.base = nn.Linear(width, 64)
        self.base.requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(64, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(self.drop(torch.tanh(self.base(hidden))))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


CASES: dict[str, list[tuple[int, int]]] = {
    "sgd": [(2, 3), (2, 0), (1, 4)],
    "adam": [(2, 1), (3, 2), (3, 0)],
}
"""Workers and shards of those that load what two workers of two shards save, by optimizer."""


class Training:
    """A user's script on a mesh of workers and shards; 0 shards mean without a mesh."""

    def __init__(
        self,
        workers: int,
        shards: int,
        optimizer: str,
        width: int = 7,
        accumulation: int = 1,
        project: ProjectConfiguration | None = None,
        **gossip: Any,
    ) -> None:
        set_seed(0)
        mesh = None
        if shards:
            mesh = init_device_mesh("cpu", (workers, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
        config = GossipConfig(power=1, total_steps=40, log_every=2, timeout=120, **gossip)
        self.accelerator = GossipAccelerator(
            cpu=True,
            device_mesh=mesh,
            gossip=config,
            project_config=project,
            scheduler_ticks="once",
            gradient_accumulation_steps=accumulation,
        )
        model = Net(width)
        if mesh is not None:
            for layer in (model.first, model.base, model.last):
                fully_shard(layer, mesh=mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
        made = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + 0.1 * step))
        loader = DataLoader(Rows(), BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, made, loader, scheduler
        )
        self.notes: list[Any] = []
        self.saved: dict[str, Tensor] = {}

    def run(self, save: dict[int, Path] | None = None, until: int = STEPS) -> None:
        epoch, taken = self.accelerator.data_position(self.loader).epoch, self.accelerator.gossip_steps[0].mixer.step
        while taken < until:
            for batch in self.accelerator.resumed_batches(self.loader):
                loss = self.model(batch["row"]).square().mean()
                self.accelerator.backward(loss)
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                taken += 1
                self.notes.append((epoch, taken, batch["index"].tolist(), loss.item(), float(norm)))
                if taken == SAVED_AT:
                    self.saved = self.whole()
                if save and taken in save:
                    self.accelerator.save_state(save[taken], wait=taken % 2 == 1)
                if taken == until:
                    break
            epoch += 1
        self.accelerator.finish_saving()

    def local(self) -> dict[str, Tensor]:
        """This process's part of everything that training changes."""
        reshard(gathering_modules([self.model]))
        found = {name: local_of(tensor).detach().clone() for name, tensor in self.named()}
        return found | {"random": torch.get_rng_state(), "seen": self.model.seen.clone()}

    def whole(self) -> dict[str, Tensor]:
        """The worker's parameters and optimizer states. Collective in the worker."""
        reshard(gathering_modules([self.model]))
        return {name: whole_of(tensor.detach()).clone() for name, tensor in self.named()}

    def named(self) -> list[tuple[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        states = [
            (f"{names[id(parameter)]}/{key}", value)
            for parameter in as_parameter_list(self.optimizer.param_groups)
            for key, value in self.optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        ]
        return [*self.model.named_parameters(), *states]

    @property
    def worker(self) -> int:
        return self.accelerator.group.rank


# ---- launches


def train_and_save(rank: int, folder: Path, optimizer: str) -> dict[str, Any]:
    training = Training(2, 2, optimizer)
    training.run({SAVED_AT: folder / "c", SAVED_AT + 1: folder / "background"})
    radius = training.accelerator.measure_consensus()["gossip/radius"]
    return {
        "worker": training.worker,
        "saved": training.saved,
        "end": training.local(),
        "notes": training.notes,
        "radius": radius,
        "files": sorted(f"{file.parent.name}/{file.name}" for file in (folder / "c" / "workers").rglob("*.*")),
    }


def resume(rank: int, folder: Path, optimizer: str, name: str) -> dict[str, Any]:
    training = Training(2, 2, optimizer)
    training.accelerator.load_state(folder / name)
    training.run()
    radius = training.accelerator.measure_consensus()["gossip/radius"]
    return {"end": training.local(), "notes": training.notes, "radius": radius}


def load_elsewhere(rank: int, folder: Path, optimizer: str, workers: int, shards: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    training = Training(workers, shards, optimizer)
    if workers != 2:
        before = training.whole()
        with pytest.raises(WorkerCountError, match=f"of 2 workers, but {workers} were launched"):
            training.accelerator.load_state(folder / "c")
        assert all(torch.equal(value, before[name]) for name, value in training.whole().items())
    training.accelerator.load_state(folder / "c", on_other_worker_count="deployed")
    found["worker"], found["loaded"] = training.worker, training.whole()
    found["position"] = training.accelerator.data_position(training.loader)
    found["step"], found["lr"] = training.accelerator.gossip_steps[0].mixer.step, training.scheduler.get_last_lr()
    found["random"] = torch.get_rng_state()
    training.run(until=SAVED_AT + 2)
    found["finite"] = all(value.isfinite().all() for value in training.whole().values())
    return found


def refuse(rank: int, folder: Path) -> dict[str, tuple[str, bool]]:
    found = {}
    for name, folder_of, settings in (
        ("another model", "c", {"width": 8}),
        ("another optimizer", "c", {"optimizer": "adam"}),
        ("missing", "missing", {}),
        ("altered", "altered", {}),
    ):
        training = Training(2, 2, **{"optimizer": "sgd", **settings})
        before = training.local()
        with pytest.raises(CheckpointError) as caught:
            training.accelerator.load_state(folder / folder_of)
        unchanged = all(torch.equal(value, before[key]) for key, value in training.local().items())
        found[name] = str(caught.value), unchanged
        training.accelerator.free_memory()
    training = Training(2, 2, "sgd")
    for module in gathering_modules([training.model]):
        module.set_requires_gradient_sync(False)
    training.model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(CheckpointError) as caught:
        training.accelerator.save_state(folder / "window")
    found["window"] = str(caught.value), not (folder / "window").exists()
    return found


def save_whole(rank: int, folder: Path, shards: int) -> dict[str, Any]:
    training = Training(2, shards, "adam")
    training.run({SAVED_AT: folder / "c"}, until=SAVED_AT)
    return training.saved


def load_whole(rank: int, folder: Path, workers: int) -> tuple[int, dict[str, Tensor]]:
    training = Training(workers, 2, "adam")
    training.accelerator.load_state(folder / "c", on_other_worker_count="deployed")
    return training.worker, training.whole()


def resume_in_window(rank: int, folder: Path, comm_dtype: str) -> list[Any]:
    ends: list[Any] = []
    for load in (False, True):
        training = Training(2, 2, "sgd", accumulation=2, comm_dtype=comm_dtype)
        if load:
            training.accelerator.load_state(folder / "c")
        for batch in range(5 if load else 0, 9):  # the step after the fifth batch is not taken yet
            rows = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * batch + rank))
            with training.accelerator.accumulate(training.model):
                training.accelerator.backward(training.model(rows).square().mean())
                training.optimizer.step()
                training.optimizer.zero_grad()
            if batch == 4 and not load:
                training.accelerator.save_state(folder / "c")
        ends.append(training.local())
        training.accelerator.free_memory()
    return ends


def rotate(rank: int, folder: Path) -> tuple[list[str], bool]:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    training = Training(2, 2, "sgd", project=project)
    for _ in range(3):
        training.accelerator.save_state(wait=False)
    training.accelerator.finish_saving()
    training.accelerator.wait_for_everyone()
    names = sorted(saved.name for saved in (folder / "checkpoints").iterdir() if is_complete(saved))
    before = training.local()
    with torch.no_grad():
        for parameter in training.model.parameters():
            local_of(parameter).zero_()
    training.accelerator.load_state()  # the newest
    return names, all(torch.equal(value, before[name]) for name, value in training.local().items())


# ---- tests


@pytest.mark.parametrize("optimizer", CASES)
def test_sharded_workers_resume_and_load_elsewhere(tmp_path, optimizer):
    first = run_workers(train_and_save, 4, tmp_path, optimizer)
    assert first[0]["files"] == [
        *(f"{worker:05d}/{place:03d}.safetensors" for worker in range(2) for place in range(2)),
        *(f"common/{place:03d}.safetensors" for place in range(2)),
    ]
    manifest = read_manifest(tmp_path / "c")
    assert (manifest.workers, manifest.shards, manifest.step) == (2, 2, SAVED_AT)
    references = leaves(read_state(tmp_path / "c", manifest.files[0]), Reference)
    assert {path[-1] for path, _ in references} == {"base.weight"}  # the bias is smaller than 1 KiB

    name, step = ("c", SAVED_AT) if optimizer == "sgd" else ("background", SAVED_AT + 1)
    resumed = run_workers(resume, 4, tmp_path, optimizer, name)
    for before, after in zip(first, resumed, strict=True):
        assert after["notes"] == before["notes"][step:]
        assert after["radius"] == before["radius"]
        assert after["end"].keys() == before["end"].keys()
        for key, value in before["end"].items():
            assert torch.equal(after["end"][key], value), key

    saved = {result["worker"]: result["saved"] for result in first}
    assert not torch.equal(saved[0]["first.weight"], saved[1]["first.weight"])
    for worker in range(2):
        parameters = load_worker(tmp_path / "c", worker)["models"][0]["parameters"]
        assert all(torch.equal(value, saved[worker][name]) for name, value in parameters.items())
    epoch, taken = divmod(SAVED_AT, math.ceil(SAMPLES / (BATCH * 4)))
    for workers, shards in CASES[optimizer]:
        size = workers * max(1, shards)
        loaded = run_workers(load_elsewhere, size, tmp_path, optimizer, workers, shards)
        streams = set()
        for result in loaded:
            assert result["finite"]
            assert (result["step"], result["lr"]) == (SAVED_AT, loaded[0]["lr"])
            streams.add(result["random"].numpy().tobytes())
            assert result["position"].epoch == epoch
            assert result["position"].batches == taken * 4 // size
            assert result["loaded"].keys() == saved[0].keys()
            for name, value in result["loaded"].items():
                expected = saved[result["worker"]][name] if workers == 2 else mean_of(saved, name)
                assert torch.equal(value, expected), (workers, shards, name)
        assert len(streams) == size


@pytest.mark.parametrize("shards", [0, 1])
def test_sharded_workers_load_those_of_one_process(tmp_path, shards):
    saved = dict(enumerate(run_workers(save_whole, 2, tmp_path, shards)))
    for workers in (2, 1):
        for worker, loaded in run_workers(load_whole, 2 * workers, tmp_path, workers):
            assert loaded.keys() == saved[0].keys()
            for name, value in loaded.items():
                assert torch.equal(value, saved[worker][name] if workers == 2 else mean_of(saved, name)), name


@pytest.mark.parametrize("comm_dtype", ["full", "int8"])
def test_an_accumulation_window_and_the_references_of_messages_are_resumed(tmp_path, comm_dtype):
    for whole, resumed in run_workers(resume_in_window, 4, tmp_path, comm_dtype):
        for name, value in whole.items():
            assert torch.equal(resumed[name], value), name


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    assert run_workers(rotate, 4, tmp_path) == [(["checkpoint_1", "checkpoint_2"], True)] * 4


def mean_of(saved: dict[int, dict[str, Tensor]], name: str) -> Tensor:
    return ((saved[0][name].double() + saved[1][name].double()) / 2).to(saved[0][name].dtype)


def test_what_cannot_be_loaded_or_saved_is_refused_before_anything_changes(tmp_path):
    run_workers(train_and_save, 4, tmp_path, "sgd")
    for damage in ("missing", "altered"):
        shutil.copytree(tmp_path / "c", tmp_path / damage)
        part = tmp_path / damage / "workers" / "00001" / "001.safetensors"
        if damage == "missing":
            part.unlink()
        else:
            content = part.read_bytes()
            part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert is_complete(tmp_path / damage) is (damage == "altered")
    messages = {
        "another model": "the checkpoint is of another model: parameter 'first.weight' is",
        "another optimizer": "the state of SGD for optimizer 0, and AdamW is prepared",
        "missing": "00001/001.safetensors cannot be read",
        "altered": "was altered since it was written",
        "window": "Save and load after an optimizer step",
    }
    for found in run_workers(refuse, 4, tmp_path):
        for name, message in messages.items():
            assert re.search(message, found[name][0]), found[name]
            assert found[name][1], name
