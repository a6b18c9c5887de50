"""Several workers in each of several processes: whatever the split, they follow the simulation of Algorithm 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgdac_accel import AdaptiveConsensus, GossipAccelerator, GossipConfig, build_topology
from dsgdac_accel.simulation import Simulation
from tests.selection import slow_except
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS = 12
PER_WORKER = 4
CLIP = 0.5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()


def samples(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(PER_WORKER, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(PER_WORKER, 3, generator=generator, dtype=torch.float64)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    decayed, other = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 5e-2}, {"params": other, "weight_decay": 0.0}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.Adam(groups, lr=0.02)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 4, 1.0) * (1 - t / (STEPS + 3)))


def train(rank: int, per_process: int, topology: str, optimizer_name: str, options: dict) -> dict:
    gossip = GossipConfig(
        topology=topology, power=2.0, start_step=4, timeout=30, workers_per_process=per_process, **options
    )
    accelerator = GossipAccelerator(gossip=gossip, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model)
    scheduler = make_scheduler(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    workers = range(rank * per_process, (rank + 1) * per_process)
    gammas = []
    for step in range(2 * STEPS):
        with accelerator.accumulate(model):
            x, y = (torch.cat(parts) for parts in zip(*(samples(worker, step) for worker in workers), strict=True))
            accelerator.backward((model(x) - y).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gammas.append(accelerator.gossip_steps[0].gamma)
    radius = accelerator.measure_consensus()["gossip/radius"]
    replicas = model.replicas if per_process > 1 else [model]
    own = [torch.cat([t.detach().double().flatten() for t in (*r.parameters(), *r.buffers())]) for r in replicas]
    with accelerator.deployed_model(model) as deployed:
        mean = torch.cat([p.detach().flatten() for p in deployed.parameters()]).clone()
        errors = [torch.cat([e.flatten() for e in mine.values()]) for mine in accelerator.consensus_errors(model)]
    again = [torch.cat([t.detach().double().flatten() for t in (*r.parameters(), *r.buffers())]) for r in replicas]
    assert all(map(torch.equal, own, again)), "evaluating must leave no trace"
    sent = accelerator.gossip_steps[0].metrics()["bytes_sent"]
    return {"own": own, "gammas": gammas, "radius": radius, "mean": mean, "errors": errors, "sent": sent}


def simulate(num_workers: int, topology: str, optimizer_name: str, options: dict) -> tuple[Simulation, list[nn.Module]]:
    shared = {name: value for name, value in options.items() if name in ("order", "mix_every")}
    models = [make_model() for _ in range(num_workers)]
    optimizers = [make_optimizer(optimizer_name, model) for model in models]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    schedule = AdaptiveConsensus(power=2.0, start_step=4)
    simulation = Simulation(models, optimizers, build_topology(topology, num_workers), schedule, **shared)
    for step in range(0, 2 * STEPS, 2):
        for worker, model in enumerate(models):
            model.zero_grad()
            for micro_step in (step, step + 1):
                x, y = samples(worker, micro_step)
                ((model(x) - y).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        simulation.step()
        for scheduler in schedulers:
            scheduler.step()
    return simulation, models


SPLITS = [
    (processes, workers // processes)
    for workers in (3, 4, 8, 16)
    for processes in (1, 2, 3, 4)
    if workers % processes == 0 and workers > processes
]
TOPOLOGIES = ("one_peer_ring", "complete", "ring", "base_graph")
CASES = [
    (*split, topology, "sgd" if (index + shift) % 2 else "adam", {})
    for index, split in enumerate(SPLITS)
    for shift, topology in enumerate(TOPOLOGIES)
    if shift < 2 or (index + shift) % 2  # every split with two topologies at least, every topology with many splits
]
CASES += [
    (2, 4, "one_peer_exponential", "adam", {}),
    (1, 8, "exponential", "sgd", {"order": "mix_first"}),
    (2, 4, "one_peer_ring", "sgd", {"order": "mix_first"}),
    (2, 3, "grid", "sgd", {"overlap": False}),
    (3, 2, "base_graph", "sgd", {"log_every": 3}),
]
FAST = [CASES[-5], *CASES[-3:]]


@pytest.mark.parametrize(("processes", "per_process", "topology", "optimizer", "options"), slow_except(FAST, CASES))
def test_every_split_follows_algorithm_1(processes, per_process, topology, optimizer, options):
    simulated = simulate(processes * per_process, topology, optimizer, options)
    assert_follows(*simulated, run_workers(train, processes, per_process, topology, optimizer, options))


def assert_follows(simulation: Simulation, expected: list[nn.Module], results: list[dict]) -> None:
    assert min(results[0]["gammas"]) < 0.3 < max(results[0]["gammas"]) == 1.0, "gamma has to change in this test"
    own = torch.stack([own for result in results for own in result["own"]])
    x = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in expected])
    buffers = torch.stack([torch.cat([b.double().flatten() for b in model.buffers()]) for model in expected])
    assert (x - x.mean(0)).norm() > 1e-2, "the workers have to differ in this test"
    torch.testing.assert_close(own, torch.cat([x, buffers], 1), rtol=0, atol=1e-6)
    errors = torch.stack([error for result in results for error in result["errors"]])
    torch.testing.assert_close(errors, x - x.mean(0), rtol=0, atol=1e-6)
    for result in results:
        torch.testing.assert_close(result["mean"], x.mean(0), rtol=0, atol=1e-6)
        assert result["radius"] == pytest.approx(simulation.radius(), abs=1e-9)


# ---- what each worker has for itself


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
