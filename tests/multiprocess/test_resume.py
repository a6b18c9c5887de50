"""Resuming equals never having stopped: `save_state` and `load_state` with every worker's own state, bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """How a run is set up."""

    optimizer: str = "sgd"
    samples: int = 24
    batch_size: int = 2
    loader_workers: int = 0
    accumulation: int = 1
    start_step: int = 5
    data: str = "map"
    topology: str = "one_peer_ring"


class Noisy(Dataset):
    """Samples augmented at random, from torch's and Python's streams of the process that reads them."""

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
    """A user's script: prepares, trains, notes everything that must repeat."""

    def __init__(self, rank: int, case: Case) -> None:
        set_seed(0)
        self.accelerator = GossipAccelerator(
            gossip=GossipConfig(
                topology=case.topology, power=2, start_step=case.start_step, total_steps=60, log_every=3, timeout=30
            ),
            gradient_accumulation_steps=case.accumulation,
        )
        model = make_model()
        optimizer = OPTIMIZERS[case.optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay)
        loader = self.make_loader(rank, case)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.batches_per_epoch = case.samples // (case.batch_size * self.accelerator.num_processes)
        self.notes: list[tuple] = []

    @staticmethod
    def make_loader(rank: int, case: Case) -> DataLoader:
        data = Stream(case.samples) if case.data == "stream" else Noisy(case.samples)
        return DataLoader(
            data, case.batch_size, shuffle=case.data != "stream", num_workers=case.loader_workers, drop_last=True
        )

    def run(self, save_after: dict[int, str] | None = None, resume: str | None = None, **saving: Any) -> None:
        """All epochs; folders to save into by the number of batches taken in all."""
        first, taken = 0, 0
        if resume is not None:
            self.accelerator.load_state(resume)
            first, taken = self.position()
        for epoch in range(first, EPOCHS):
            self.model.train()
            for batch in self.accelerator.resumed_batches(self.loader):
                self.take(batch, epoch)
                taken += 1
                if taken in (save_after or {}):
                    self.accelerator.save_state(save_after[taken], **saving)

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
        step = self.accelerator.gossip_steps[0]
        figures = {k: v for k, v in step.metrics().items() if k != "wait_seconds"}
        self.notes.append((epoch, batch["index"].tolist(), loss.item(), step.mixer.step, tuple(figures.items())))

    def end(self) -> dict[str, Any]:
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
        (2, Case(), (1, 3, 8, 13)),  # 6 batches an epoch; adaptive consensus begins with step 5
        (3, Case(optimizer="adam", samples=30, topology="base_graph", start_step=2), (4, 5, 7)),  # 5 an epoch
        (2, Case(loader_workers=2, accumulation=2, optimizer="adam", start_step=2), (2, 3, 10)),  # 3: inside a window
        (2, Case(data="stream"), (2, 7)),
        (1, Case(samples=12), (4, 6)),
    ],
    ids=["sgd", "adam of 3", "accumulation and loader workers", "dispatched stream", "alone"],
)
def test_a_resumed_run_is_the_unbroken_one(workers, case, places, tmp_path):
    folders = {place: str(tmp_path / str(place)) for place in places}
    unbroken = run_workers(train, workers, case, None, None)
    saving = run_workers(train, workers, case, folders, None)
    for one, other in zip(unbroken, saving, strict=True):
        same(one, other)
    for place, folder in folders.items():
        resumed = run_workers(train, workers, case, None, folder)
        for one, other in zip(unbroken, resumed, strict=True):
            assert len(other["notes"]) == len(one["notes"]) - place
            same(one, other, last=len(other["notes"]))
