"""Asynchronous averaging on real gloo workers of unequal speed, against a replay of the recorded events."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from dsgdac_accel import AdaptiveConsensus, GossipAccelerator, GossipConfig, WorkerGroup
from dsgdac_accel.core.asynchronous.shared_values import SharedValues
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.shared_queue import SharedQueue
from dsgdac_accel.simulation import AsynchronousSimulation
from tests.multiprocess.small_model import flat, inputs, make_model
from tests.workers import Launch, run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS, PAUSES = 30, (10, 20, 30)


def lr_at(step: int) -> float:
    return 0.1 * min((step + 1) / 5, 1.0) * (1 - step / (STEPS + 5))


def pause(rng: random.Random, rank: int, seconds: float) -> None:
    """Worker 1 takes four times as long as the others, and all stall now and then."""
    time.sleep(seconds * rng.uniform(0.5, 1.5) * (4 if rank == 1 else 1) + (5 * seconds if rng.random() < 0.03 else 0))


def prolong_exchanges(shared: SharedValues) -> None:
    """Wait between copy and averaging, so that whatever does not wait for an exchange overlaps it."""
    take = shared.take

    def take_and_wait(*arguments):
        taken = take(*arguments)
        time.sleep(0.002)
        return taken

    shared.take = take_and_wait


def train(rank: int, seed: int, seconds: float) -> dict:
    config = GossipConfig(asynchronous=True, power=2.0, start_step=6, total_steps=STEPS, timeout=30)
    accelerator = GossipAccelerator(gossip=config)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(step) / 0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    mixer = accelerator.gossip_steps[0].mixer
    mixer.shared.history = []
    prolong_exchanges(mixer.shared)
    rng = random.Random(100 * seed + rank)
    queue, batches = iter(accelerator.shared_queue(11, batch_size=2)), []
    means, gammas = [], []
    for end in PAUSES:
        while accelerator.progress < end:
            accelerator.backward(model(inputs(rank, mixer.step)).square().mean())
            pause(rng, rank, seconds)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            gammas.append(accelerator.gossip_steps[0].gamma)
            batches.append(next(queue))
        with accelerator.deployed_model(model):
            means.append(flat(model).clone())
            pause(rng, rank, seconds)  # the others go on meanwhile, and ask worker 1
    return {
        "x": flat(model), "means": means, "gammas": gammas, "history": mixer.shared.history,
        "steps": mixer.step, "progress": accelerator.progress, "batches": batches,
    }  # fmt: skip


@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_workers_follow_a_replay_of_their_events(num_workers):
    results = run_workers(train, num_workers, 0, 0.008)
    models = [make_model() for _ in results]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2) for m in models]
    planned = [lr_at(step) for step in range(STEPS)]
    schedules = [AdaptiveConsensus(power=2.0, start_step=6, planned_lrs=planned) for _ in models]
    workers = AsynchronousSimulation(models, optimizers, schedules, lr_at)

    def fill_gradients(worker: int) -> None:
        models[worker].zero_grad()
        models[worker](inputs(worker, workers.steps_N[worker])).square().mean().backward()

    workers.replay([result["history"] for result in results], fill_gradients)
    x = torch.stack([flat(model) for model in models])
    assert (x - x.mean(0)).norm() > 1e-2, "the workers have to differ in this test"
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["x"], x[rank], rtol=0, atol=1e-9)
        torch.testing.assert_close(result["means"][-1], x.mean(0), rtol=0, atol=1e-9)
        assert result["progress"] == pytest.approx(workers.furthest_N[rank], abs=1e-9)
        assert result["gammas"][-1] < 0.2
    for rank, result in enumerate(results):
        exchanges = [event for event in result["history"] if event[0] in ("take", "apply")]
        for first, second in zip(exchanges[::2], exchanges[1::2], strict=True):
            assert (first[0], second[0], *first[1:]) == ("take", "apply", *second[1:]), "averaging may not be stale"
        neighbors = {(rank - 1) % num_workers, (rank + 1) % num_workers}
        assert {asker for _, asker, _ in exchanges} == ({rank} if rank % 2 == 0 else neighbors)
    steps = [result["steps"] for result in results]
    batches = itertools.islice(SharedQueue(11, 2, itertools.count().__next__), sum(steps))
    assert sorted(batches) == sorted(batch for result in results for batch in result["batches"])
    assert sum(steps) == pytest.approx(sum(workers.progress_N) + sum(workers.pending_progress_N), abs=1e-9)
    assert max(steps) > 1.3 * min(steps), steps


def save_and_load(rank: int, folder: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(asynchronous=True, timeout=60))
    rng = random.Random(rank)

    def prepared() -> tuple:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))

    def train_to(end: int) -> None:
        while accelerator.progress < end:
            accelerator.backward(model(inputs(rank, 0)).square().mean())
            optimizer.step()
            scheduler.step()
            pause(rng, rank, 0.002)

    model, optimizer, scheduler = prepared()
    train_to(12 if rank == 0 else 6)  # the workers resume at learning rates of their own
    saved = accelerator.save_state(folder)
    with accelerator.deployed_model(model):
        mean = flat(model).clone()
    before = accelerator.progress, scheduler.scheduler.last_epoch, flat(model).clone()
    assert before[1] == int(before[0])
    train_to(16)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(accelerator)
    accelerator.free_memory()

    model, optimizer, scheduler = prepared()
    accelerator.load_state(saved)
    assert (accelerator.progress, scheduler.scheduler.last_epoch) == before[:2]
    assert torch.equal(flat(model), before[2])
    with accelerator.deployed_model(model):
        torch.testing.assert_close(flat(model), mean, rtol=0, atol=1e-15)
    train_to(16)
    accelerator.end_training()
    accelerator.free_memory()


@pytest.mark.slow
def test_a_checkpoint_continues_with_the_same_mean_and_progress(tmp_path):
    run_workers(save_and_load, 4, str(tmp_path / "checkpoint"))


def train_with_smaller_batches(rank: int, rows: list[int], data: Tensor) -> tuple[list[Tensor], Tensor]:
    """As docs/asynchronous.md shows it, with a loss whose gradient is the mean of the samples."""
    accelerator = GossipAccelerator(gossip=GossipConfig(constant=0.5, timeout=60))
    shares = [count / sum(rows) for count in rows]
    own = random_split(TensorDataset(data), shares, torch.Generator().manual_seed(0))[rank]
    loader = accelerator.equal_steps(DataLoader(own, batch_size=rows[rank], shuffle=True, drop_last=True))
    model = nn.Linear(4, 1, bias=False).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with torch.no_grad():
        model.weight.zero_()
    seen = []
    for (x,) in loader:
        accelerator.backward(model(x).mean() * len(rows) * rows[rank] / sum(rows))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(x)
    with accelerator.deployed_model(model):
        return seen, flat(model).clone()


@pytest.mark.slow
def test_every_sample_counts_the_same_with_smaller_batches_of_a_slow_worker():
    rows = [6, 3]
    data = torch.randn(10 * sum(rows), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = run_workers(train_with_smaller_batches, 2, rows, data)
    x = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    batches = list(zip(*(seen for seen, _ in results), strict=True))
    assert len(batches) == 10
    for batch in batches:
        x.grad = torch.cat(batch).mean(0)
        optimizer.step()
    for _, mean in results:
        torch.testing.assert_close(mean, x.detach(), rtol=0, atol=1e-14)


def keep_mean(rank: int, seed: int) -> float:
    group = WorkerGroup(torch.device("cpu"), 60)
    rng, generator = random.Random(1000 * seed + rank), torch.Generator().manual_seed(1000 * seed + rank)
    parameters = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in (20_000, 3)]
    step = GossipStep(torch.optim.SGD(parameters, lr=1.0), group, GossipConfig(asynchronous=True, constant=0.6))
    prolong_exchanges(step.mixer.shared)
    expected = torch.cat([x.detach() for x in parameters])
    drift = 0.0
    for _ in range(3):
        for _ in range(rng.randint(5, 60) * (1 + rank % 3)):
            time.sleep(0.004 * rng.random() + (0.3 if rng.random() < 0.005 else 0.0))
            for x in parameters:
                x.grad = 1e-3 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
            expected -= torch.cat([x.grad for x in parameters])
            step.step()
        step.mixer.prepare_average()
        off = torch.cat([x.detach() for x in parameters]) - expected
        drift = max(drift, float(group.all_reduce_mean_(off, "comparing means").norm() / expected.norm()))
    counted = group.all_gather_object(
        (step.mixer.step, step.mixer.state_dict()["averaged_progress"]), "comparing steps"
    )
    assert sum(own for own, _ in counted) == pytest.approx(sum(progress for _, progress in counted), abs=1e-9)
    step.mixer.release()
    return drift


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_mean_is_kept_under_stress(seed):
    assert max(run_workers(keep_mean, 6, seed, timeout=200)) < 1e-14


def long_run(rank: int, timeout: float, pause: float) -> Iterator[tuple[GossipAccelerator, nn.Module]]:
    """Train for longer than any test waits, with a pause after each step."""
    accelerator = GossipAccelerator(gossip=GossipConfig(asynchronous=True, timeout=timeout))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while accelerator.progress < 5000:
        accelerator.backward(model(inputs(rank, 0)).square().mean())
        optimizer.step()
        time.sleep(pause)
        yield accelerator, model


def diverge(rank: int) -> None:
    for accelerator, model in long_run(rank, timeout=30, pause=0.002):
        if rank == 1 and accelerator.progress > 3:
            with torch.no_grad():
                model[0].weight[0, 0] = float("inf")


@pytest.mark.slow
def test_parameters_that_are_not_finite_end_the_run_by_name():
    for outcome in try_workers(diverge, 2, timeout=60):
        assert "NonFiniteError: the parameters of worker 1 are not finite" in outcome.error


TIMEOUT = 2.0


def lose_a_worker(rank: int, faulty: int, how: str) -> None:
    for accelerator, _ in long_run(rank, TIMEOUT, pause=0.01):
        if rank == faulty and accelerator.progress > 5:
            if how == "raises":
                raise ValueError("a bug in the user's loop")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # its threads still answer


@pytest.mark.parametrize(
    ("faulty", "how"),
    [
        (1, "killed"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "raises"), (1, "silent"), (2, "silent")]),
    ],
)
def test_a_lost_worker_ends_the_run_everywhere(faulty, how):
    launch = Launch(lose_a_worker, 4, faulty, how, timeout=60)
    for outcome in launch.outcomes(hanging=faulty if how == "silent" else None):
        if outcome.rank != faulty:
            assert outcome.exit_code == 1, f"worker {outcome.rank} did not stop: {outcome.error}"
            assert "WorkerLostError" in outcome.error
            assert f"worker {faulty}" in outcome.error.partition("WorkerLostError")[2]
            assert outcome.seconds < TIMEOUT + 15
