"""`save_state` and `load_state` with every worker's own state: a resumed run equals an unbroken one bit by bit."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import dsgdac_accel.checkpoint.serialization
from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checkpoint import CheckpointError, WorkerCountError, is_complete, load_worker, newest_checkpoint
from dsgdac_accel.data.dataloader_state import DataPosition
from tasks.common.algorithms import make_accelerator
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess


@dataclass(frozen=True)
class Case:
    """Settings of a run."""

    algorithm: str = "dsgd_ac"
    optimizer: str = "sgd"
    scaled: bool = False
    """With a gradient scaler whose scale grows, as fp16 has on a GPU."""
    samples: int = 24
    batch_size: int = 2
    loader_workers: int = 0
    accumulation: int = 1
    start_step: int | None = 5
    start_epoch: int | None = None
    data: str = "map"
    topology: str = "one_peer_ring"
    epochs: int = 3
    even_batches: bool = True
    dispatch: bool = False
    """Worker 0 reads for all workers."""
    skip: str = "resumed_batches"
    """How to skip the batches taken before."""


class Noisy(Dataset):
    """Samples with random noise from torch's and Python's streams of the process that reads them."""

    def __init__(self, size):
        self.inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(6) + 0.1 * random.random()
        return {"index": index, "input": self.inputs[index] + noise}


class Stream(IterableDataset):
    """The same as a stream, in a fixed order."""

    def __init__(self, size):
        self.rows = Noisy(size)

    def __iter__(self):
        for index in range(len(self.rows)):
            yield self.rows[index]


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}


def warm_up_and_decay(step):
    return (step + 1) / 4 if step < 4 else (4 / (step + 1)) ** 0.5


class Training:
    """A user's script that prepares, trains, and records everything that must repeat."""

    def __init__(self, rank: int, case: Case, **accelerate: Any) -> None:
        set_seed(0)
        self.case = case
        gossip = GossipConfig(
            topology=case.topology,
            power=2,
            start_step=case.start_step,
            start_epoch=case.start_epoch,
            total_steps=60,
            log_every=3,
            timeout=30,
        )
        self.accelerator = make_accelerator(
            case.algorithm,
            gossip,
            60,
            gradient_accumulation_steps=case.accumulation,
            dataloader_config=DataLoaderConfiguration(
                even_batches=case.even_batches, dispatch_batches=case.dispatch or None
            ),
            **accelerate,
        )
        if case.scaled:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
        model = make_model()
        optimizer = OPTIMIZERS[case.optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay)
        loader = self.make_loader(case)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.batches_per_epoch = case.samples // (
            case.batch_size * self.accelerator.num_processes
        )  # the smallest share
        self.notes: list[tuple] = []

    @staticmethod
    def make_loader(case: Case) -> DataLoader:
        data = Stream(case.samples) if case.data == "stream" else Noisy(case.samples)
        return DataLoader(data, case.batch_size, shuffle=case.data != "stream", num_workers=case.loader_workers)

    def run(self, save_after: dict[Any, str] | None = None, resume: str | None = None, **saving: Any) -> None:
        """Train all epochs; `save_after` maps a number of batches taken, or "epoch N", to a folder."""
        first, taken = 0, 0
        save_after = save_after or {}
        if resume is not None:
            self.accelerator.load_state(resume)
            first, taken = self.position()
        for epoch in range(first, self.case.epochs):
            self.model.train()
            for batch in self.batches():
                self.take(batch, epoch)
                taken += 1
                if taken in save_after:
                    self.accelerator.save_state(save_after[taken], **saving)
            if f"epoch {epoch}" in save_after:
                self.accelerator.save_state(save_after[f"epoch {epoch}"], **saving)

    def batches(self) -> Any:
        if self.case.skip == "skip_first_batches":
            taken = self.accelerator.data_position(self.loader).batches
            return self.accelerator.skip_first_batches(self.loader, taken) if taken else self.loader
        return self.accelerator.resumed_batches(self.loader)

    def position(self) -> tuple[int, int]:
        position = self.accelerator.data_position(self.loader)
        return position.epoch, position.epoch * self.batches_per_epoch + position.batches

    def take(self, batch: dict[str, torch.Tensor], epoch: int) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch["input"]).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.accelerator.group.steps_taken += self.case.algorithm == "sgd"  # gossip counts its own steps
        step = self.accelerator.group.steps_taken
        figures = {k: v for gossip in self.accelerator.gossip_steps for k, v in gossip.metrics().items()}
        figures.pop("wait_seconds", None)
        figures["scale"] = self.accelerator.scaler.get_scale() if self.case.scaled else 1.0
        self.notes.append((epoch, batch["index"].tolist(), loss.item(), step, tuple(figures.items())))

    def end(self) -> dict[str, Any]:
        if self.case.algorithm != "sgd":  # stock Accelerate would end the process group of the test
            self.accelerator.end_training()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        states = [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        return {
            "notes": self.notes,
            "tensors": [t.detach().clone() for t in (*tensors, *states)],
            "draws": (torch.rand(()).item(), random.random()),
        }


def train(rank: int, case: Case, save_after: dict[int, str] | None, resume: str | None) -> dict[str, Any]:
    training = Training(rank, case)
    training.run(save_after, resume)
    return training.end()


def same(one: dict[str, Any], other: dict[str, Any], last: int | None = None) -> None:
    count = len(one["notes"]) if last is None else last
    assert count
    assert one["notes"][-count:] == other["notes"][-count:]
    assert one["draws"] == other["draws"]
    assert all(torch.equal(a, b) for a, b in zip(one["tensors"], other["tensors"], strict=True))


@pytest.mark.parametrize(
    ("workers", "case", "places"),
    [
        # 6 batches an epoch; adaptive consensus begins with step 5
        pytest.param(2, Case(), (3, 8, "epoch 1"), marks=pytest.mark.slow),
        pytest.param(
            3,
            Case(optimizer="adam", scaled=True, samples=30, topology="base_graph", start_step=2),
            (1, 5),
            marks=pytest.mark.slow,
        ),  # 5 an epoch: 5 is its end
        (2, Case(loader_workers=2, accumulation=2, optimizer="adam", start_step=2, epochs=2), (3,)),  # inside a window
        (2, Case(data="stream", epochs=2, start_step=None, start_epoch=1), (4,)),
        pytest.param(2, Case(dispatch=True, epochs=2), (4,), marks=pytest.mark.slow),
        (2, Case(samples=30, batch_size=6, even_batches=False, skip="skip_first_batches"), (2, 3)),  # 3 batches and 2
        (1, Case(samples=12), (4,)),
        pytest.param(3, Case(algorithm="sgd", samples=30), (4,), marks=pytest.mark.slow),
    ],
    ids=[
        "sgd",
        "adam of 3",
        "accumulation and loader workers",
        "dispatched stream",
        "dispatched",
        "uneven",
        "alone",
        "synchronous",
    ],
)
def test_a_resumed_run_is_the_unbroken_one(workers, case, places, tmp_path):
    folders = {place: str(tmp_path / str(place)) for place in places}
    unbroken = run_workers(train, workers, case, None, None)
    saving = run_workers(train, workers, case, folders, None)
    for one, other in zip(unbroken, saving, strict=True):
        same(one, other)
    for place, folder in folders.items():
        resumed = run_workers(train, workers, case, None, folder)
        before = place if isinstance(place, int) else len(unbroken[0]["notes"]) * 2 // 3
        for one, other in zip(unbroken, resumed, strict=True):
            assert len(other["notes"]) == len(one["notes"]) - before
            same(one, other, last=len(other["notes"]))


# ---- in the background, with automatic names, hooks and registered objects


class Counter:
    """A user's object with a state of its own."""

    def __init__(self, rank: int) -> None:
        self.values = {"rank": rank, "seen": []}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def train_with_everything(rank: int, project: str, resume: bool) -> dict[str, Any]:
    configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2)
    training = Training(rank, Case(epochs=2), project_config=configuration)
    counter, hooked = Counter(rank), []
    training.accelerator.register_for_checkpointing(counter)
    training.accelerator.register_save_state_pre_hook(lambda models, weights, folder: hooked.append(len(weights)))
    training.accelerator.register_load_state_pre_hook(lambda models, folder: hooked.append(folder[-12:]))
    loaded = training.accelerator.load_state("auto")
    assert loaded == (Path(project) / "checkpoints" / "checkpoint_2" if resume else None)
    for epoch in range(training.position()[0], 2):
        training.model.train()
        for batch in training.batches():
            training.take(batch, epoch)
            counter.values["seen"] += batch["index"].tolist()
            if len(counter.values["seen"]) in (4, 8, 14, 18):
                training.accelerator.save_state(wait=False)
    training.accelerator.finish_saving()
    return training.end() | {"counter": counter.values, "hooked": hooked}


def test_saving_in_the_background_with_automatic_names(tmp_path):
    unbroken = run_workers(train_with_everything, 2, str(tmp_path), False)
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"]
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint_3" / "workers")  # the newest is not complete any more
    resumed = run_workers(train_with_everything, 2, str(tmp_path), True)
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == [
        "checkpoint_2",
        "checkpoint_3",
        "checkpoint_4",
    ]  # 3 is damaged, which deletes nothing
    for rank, (one, other) in enumerate(zip(unbroken, resumed, strict=True)):
        same(one, other, last=12 - 7)
        assert one["counter"] == other["counter"]
        assert one["counter"]["rank"] == rank
        assert one["hooked"] == [1, 1, 1, 1]
        assert other["hooked"] == ["checkpoint_2", 1]


# ---- another number of workers


def begin(rank: int, folder: str) -> dict[str, Any]:
    training = Training(rank, Case(epochs=1, optimizer="adam"))
    training.run({3: folder})
    return training.end()


def resume_with_others(rank: int, folder: str) -> dict[str, Any]:
    training = Training(rank, Case(optimizer="adam"))
    with pytest.raises(WorkerCountError, match="3 workers, but 2 were launched"):
        training.accelerator.load_state(folder)
    training.accelerator.load_state(folder, on_other_worker_count="deployed")
    position = training.accelerator.data_position(training.loader)
    weights = [parameter.detach().clone() for parameter in training.model.parameters()]
    radius = training.accelerator.measure_consensus()["gossip/radius"]
    draw = torch.rand(()).item()
    for batch in training.batches():
        training.take(batch, 0)
    return training.end() | {"position": position, "weights": weights, "radius": radius, "draw": draw}


def test_another_number_of_workers_starts_from_the_average(tmp_path):
    folder = str(tmp_path / "c")
    run_workers(begin, 3, folder)
    saved = [load_worker(folder, rank) for rank in range(3)]
    names = list(saved[0]["models"][0]["parameters"])
    results = run_workers(resume_with_others, 2, folder)
    for result in results:
        for name, weight in zip(names, result["weights"], strict=True):
            mean = torch.stack([state["models"][0]["parameters"][name].double() for state in saved]).mean(0)
            assert torch.equal(weight, mean.float())
        assert result["radius"] == 0
        assert result["position"] == DataPosition(epoch=0, batches=4)  # 3 batches of 3 workers make 9: 4 for each of 2
        assert [note[3] for note in result["notes"]] == [4, 5]  # steps continue with the rest of 6 batches
    assert results[0]["draw"] != results[1]["draw"]
    assert not set(results[0]["notes"][0][1]) & set(results[1]["notes"][0][1])


# ---- what is refused


def refusals(rank: int, folder: str) -> None:
    training = Training(rank, Case())
    accelerator, model = training.accelerator, training.model
    with accelerator.deployed_model(model), pytest.raises(RuntimeError, match="save_state inside"):
        accelerator.save_state(folder)
    with pytest.raises(ValueError, match="needs output_dir"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match="does not exist"):
        accelerator.load_state(folder)
    accelerator.save_state(folder)
    with pytest.raises(ValueError, match="'refuse' or 'deployed'"):
        accelerator.load_state(folder, on_other_worker_count="average")
    accelerator.register_for_checkpointing(Counter(rank))
    with pytest.raises(CheckpointError, match="holds 0 registered objects, and 1 are prepared"):
        accelerator.load_state(folder)
    if rank == 1:
        accelerator._custom_objects[0].values = {"function": print}
    with pytest.raises(
        CheckpointError, match=r"Worker 1: .*\['registered'\]\[0\]\['function'\] is a builtins\.builtin"
    ):
        accelerator.save_state(folder)
    with pytest.raises(TypeError, match="passed through `prepare`"):
        accelerator.data_position([])


def test_what_cannot_be_saved_or_loaded_says_so_on_all_workers(tmp_path):
    run_workers(refusals, 2, str(tmp_path / "c"))


def another_model(rank: int, folder: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20))
    model = nn.Linear(6, 3)
    data = DataLoader(Noisy(8), 2, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
    with pytest.raises(CheckpointError, match="of another model: parameter 'weight' is not in the checkpoint"):
        accelerator.load_state(folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run_workers(begin, 2, str(tmp_path / "c"))
    run_workers(another_model, 2, str(tmp_path / "c"))


def another_optimizer(rank: int, folder: str) -> None:
    def prepared(kind: type[torch.optim.Optimizer]) -> GossipAccelerator:
        accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20))
        model = nn.Linear(6, 3)
        accelerator.prepare(model, kind(model.parameters(), lr=0.1))
        return accelerator

    prepared(torch.optim.Adam).save_state(folder)
    with pytest.raises(CheckpointError, match="holds the state of Adam for optimizer 0, and SGD is prepared"):
        prepared(torch.optim.SGD).load_state(folder)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    run_workers(another_optimizer, 2, str(tmp_path / "c"))


# ---- failures while saving


def full_disk(rank: int, folder: str, wait: bool) -> str:
    """Fill the disk of worker 1 at the second checkpoint."""
    training = Training(rank, Case())
    training.accelerator.save_state(f"{folder}/1")
    really = os.fsync

    def fsync(handle: int) -> None:
        if rank == 1 and "/2/" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        really(handle)

    dsgdac_accel.checkpoint.serialization.os.fsync = fsync
    with pytest.raises(CheckpointError) as caught:
        save_and_finish(training, f"{folder}/2", wait)
    save_and_finish(training, f"{folder}/3", wait)
    return str(caught.value)


def save_and_finish(training: Training, folder: str, wait: bool) -> None:
    training.accelerator.save_state(folder, wait=wait)
    training.accelerator.finish_saving()


@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_full_disk_on_one_worker_is_the_same_error_on_all(tmp_path, wait):
    errors = run_workers(full_disk, 3, str(tmp_path), wait)
    assert set(errors) == {errors[0]}
    assert re.search(r"Worker 1: .*00001\.safetensors: No space left on device\. Free space", errors[0])
    assert sorted(folder.name for folder in tmp_path.iterdir() if is_complete(folder)) == ["1", "3"]
    assert not (tmp_path / "2").exists()


def killed_while_saving(rank: int, folder: str, wait: bool) -> None:
    training = Training(rank, Case())
    batches = itertools.chain.from_iterable(training.batches() for _ in itertools.count())
    training.take(next(batches), 0)
    training.accelerator.save_state(f"{folder}/1")
    training.take(next(batches), 0)
    if rank == 1:
        dsgdac_accel.checkpoint.serialization.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    training.accelerator.save_state(f"{folder}/2", wait=wait)
    while True:
        training.take(next(batches), 0)


@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_worker_killed_while_saving_is_named_and_the_older_checkpoint_stays(tmp_path, wait):
    outcomes = try_workers(killed_while_saving, 2, str(tmp_path), wait)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].exit_code == 1
    assert "WorkerLostError: worker 0: worker 1 was lost" in outcomes[0].error
    assert newest_checkpoint(tmp_path) == tmp_path / "1"
    run_workers(train, 2, Case(), None, str(tmp_path / "1"))
