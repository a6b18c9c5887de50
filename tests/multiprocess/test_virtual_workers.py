"""Several workers in each of several processes: what each of them has for itself, and resuming."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

PER_WORKER = 4


def samples(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(PER_WORKER, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(PER_WORKER, 3, generator=generator, dtype=torch.float64)


def make_random_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.4), nn.Linear(7, 3)).double()


def train_with_dropout(rank: int, per_process: int, folder: str | None, stop_at: int | None) -> list[torch.Tensor]:
    torch.manual_seed(11)
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=30, power=1, workers_per_process=per_process))
    model = make_random_model()
    torch.manual_seed(11)  # the seed of the run, independent of what building the model has drawn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    if folder is not None and stop_at is None:
        accelerator.load_state(folder)
        first = accelerator.gossip_steps[0].mixer.step
    for step in range(first, 8):
        if step == stop_at:
            accelerator.save_state(folder)
            break
        workers = range(rank * per_process, (rank + 1) * per_process)
        x, y = (torch.cat(parts) for parts in zip(*(samples(worker, step) for worker in workers), strict=True))
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    replicas = model.replicas if per_process > 1 else [model]
    return [torch.cat([t.detach().double().flatten() for t in (*r.parameters(), *r.buffers())]) for r in replicas]


def test_dropout_equals_that_of_separate_processes():
    alone = [own for result in run_workers(train_with_dropout, 4, 1, None, None) for own in result]
    for processes in (1, 2):
        split = run_workers(train_with_dropout, processes, 4 // processes, None, None)
        mine = torch.stack([own for result in split for own in result])
        torch.testing.assert_close(mine, torch.stack(alone), rtol=0, atol=1e-12)


def test_a_resumed_run_equals_the_unbroken_one(tmp_path):
    folder = str(tmp_path / "checkpoint")
    unbroken = run_workers(train_with_dropout, 2, 2, None, None)
    run_workers(train_with_dropout, 2, 2, folder, 3)
    resumed = run_workers(train_with_dropout, 2, 2, folder, None)
    for mine, expected in zip(resumed, unbroken, strict=True):
        assert all(map(torch.equal, mine, expected))
    for processes, per_process in ((1, 4), (4, 1)):
        outcomes = try_workers(train_with_dropout, processes, per_process, folder, None)
        for outcome in outcomes:
            words = "was saved by 2 process(es) of 2 worker(s) each, and this run has"
            assert words in outcome.error
            assert f"{processes} of {per_process}" in outcome.error
