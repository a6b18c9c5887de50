"""Asynchronous averaging on real gloo workers of unequal speed, against a replay of the recorded events."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time

import pytest
import torch
from torch import nn

from dsgdac_accel import AdaptiveConsensus, GossipAccelerator, GossipConfig, WorkerGroup
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.simulation import AsynchronousSimulation
from tests.multiprocess.small_model import flat, inputs, make_model
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS, PAUSES = 30, (10, 20, 30)


def lr_at(step: int) -> float:
    return 0.1 * min((step + 1) / 5, 1.0) * (1 - step / (STEPS + 5))


def pause(rng: random.Random, rank: int, seconds: float) -> None:
    """Worker 1 takes four times as long as the others, and all stall now and then."""
    time.sleep(seconds * rng.uniform(0.5, 1.5) * (4 if rank == 1 else 1) + (5 * seconds if rng.random() < 0.03 else 0))


def train(rank: int, seed: int, seconds: float) -> dict:
    config = GossipConfig(asynchronous=True, power=2.0, start_step=6, total_steps=STEPS, timeout=30)
    accelerator = GossipAccelerator(gossip=config)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(step) / 0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    mixer = accelerator.gossip_steps[0].mixer
    mixer.shared.history = []
    rng = random.Random(100 * seed + rank)
    means, gammas = [], []
    for end in PAUSES:
        while accelerator.progress < end:
            accelerator.backward(model(inputs(rank, mixer.step)).square().mean())
            pause(rng, rank, seconds)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            gammas.append(accelerator.gossip_steps[0].gamma)
        with accelerator.deployed_model(model):
            means.append(flat(model).clone())
    return {
        "x": flat(model), "means": means, "gammas": gammas, "history": mixer.shared.history,
        "steps": mixer.step, "progress": accelerator.progress,
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
    steps = [result["steps"] for result in results]
    assert sum(steps) == pytest.approx(sum(workers.progress_N) + sum(workers.pending_progress_N), abs=1e-9)
    assert max(steps) > 1.3 * min(steps), steps


def save_and_load(rank: int, folder: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(asynchronous=True, timeout=60))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rng = random.Random(rank)

    def train_to(end: int) -> None:
        while accelerator.progress < end:
            accelerator.backward(model(inputs(rank, 0)).square().mean())
            optimizer.step()
            scheduler.step()
            pause(rng, rank, 0.002)

    train_to(6)
    saved = accelerator.save_state(folder)
    with accelerator.deployed_model(model):
        mean = flat(model).clone()
    before = accelerator.progress, scheduler.scheduler.last_epoch, flat(model).clone()
    assert before[1] == int(before[0])
    train_to(12)
    accelerator.load_state(saved)
    assert (accelerator.progress, scheduler.scheduler.last_epoch) == before[:2]
    assert torch.equal(flat(model), before[2])
    with accelerator.deployed_model(model):
        torch.testing.assert_close(flat(model), mean, rtol=0, atol=1e-15)
    train_to(12)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(accelerator)
    accelerator.deploy(model)
    accelerator.end_training()


@pytest.mark.slow
def test_a_checkpoint_continues_with_the_same_mean_and_progress(tmp_path):
    run_workers(save_and_load, 4, str(tmp_path / "checkpoint"))


def keep_mean(rank: int, seed: int) -> float:
    group = WorkerGroup(torch.device("cpu"), 60)
    rng, generator = random.Random(1000 * seed + rank), torch.Generator().manual_seed(1000 * seed + rank)
    parameters = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in (20_000, 3)]
    step = GossipStep(torch.optim.SGD(parameters, lr=1.0), group, GossipConfig(asynchronous=True, constant=0.6))
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
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_mean_is_kept_under_stress(seed):
    assert max(run_workers(keep_mean, 6, seed, timeout=200)) < 1e-14


TIMEOUT = 3.0


def lose_a_worker(rank: int, faulty: int, how: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(asynchronous=True, timeout=TIMEOUT))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while accelerator.progress < 5000:
        accelerator.backward(model(inputs(rank, 0)).square().mean())
        optimizer.step()
        time.sleep(0.01)
        if rank == faulty and accelerator.progress > 5:
            if how == "raises":
                raise ValueError("a bug in the user's loop")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10 * TIMEOUT)  # its threads still answer


@pytest.mark.parametrize(
    ("faulty", "how"),
    [
        (1, "killed"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "raises"), (1, "silent"), (2, "silent")]),
    ],
)
def test_a_lost_worker_ends_the_run_everywhere(faulty, how):
    outcomes = try_workers(lose_a_worker, 4, faulty, how, timeout=60)
    for outcome in outcomes:
        if outcome.rank != faulty:
            assert outcome.exit_code == 1, f"worker {outcome.rank} did not stop: {outcome.error}"
            assert "WorkerLostError" in outcome.error
            assert f"worker {faulty}" in outcome.error.partition("WorkerLostError")[2]
            assert outcome.seconds < TIMEOUT + 15
