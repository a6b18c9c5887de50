"""The mixing core and GossipAccelerator, on real gloo workers, against the simulation of Algorithm 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgdac_accel import AdaptiveConsensus, GossipAccelerator, GossipConfig, build_topology
from dsgdac_accel.core import exchange
from dsgdac_accel.simulation import Simulation
from tests.selection import slow_except
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

STEPS = 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(4, 3, generator=generator, dtype=torch.float64)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-2)
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-2)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 5, 1.0) * (1 - t / (STEPS + 5)))


def loss_of(model: nn.Module, worker: int, step: int) -> torch.Tensor:
    x, y = batch(worker, step)
    return (model(x) - y).square().mean()


def train(rank: int, topology: str, optimizer_name: str, options: dict) -> dict:
    if optimizer_name == "adam":
        exchange._FEW_BYTES = -1  # small as the model is, it is sent by another thread
    accelerator = GossipAccelerator(
        gossip=GossipConfig(topology=topology, power=2.0, start_step=6, timeout=30, **options)
    )
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model)
    scheduler = make_scheduler(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    gammas = []
    for step in range(STEPS):
        accelerator.backward(loss_of(model, rank, step))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        gammas.append(accelerator.gossip_steps[0].gamma)
    radius = accelerator.measure_consensus()["gossip/radius"]
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    with accelerator.deployed_model(model):
        mean = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    restored = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"x": own, "gammas": gammas, "radius": radius, "mean": mean, "restored": torch.equal(own, restored)}


def simulate(
    num_workers: int, topology: str, optimizer_name: str, order: str = "local_first", mix_every: int = 1
) -> tuple[Simulation, list[float]]:
    models = [make_model() for _ in range(num_workers)]
    optimizers = [make_optimizer(optimizer_name, model) for model in models]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    schedule = AdaptiveConsensus(power=2.0, start_step=6)
    simulation = Simulation(models, optimizers, build_topology(topology, num_workers), schedule, order, mix_every)
    for step in range(STEPS):
        for worker, model in enumerate(models):
            model.zero_grad()
            loss_of(model, worker, step).backward()
        simulation.step()
        for scheduler in schedulers:
            scheduler.step()
    return simulation, [[p.detach() for p in model.parameters()] for model in models]


ALLOWED = {
    "one_peer_ring": [2, 3, 4, 5],
    "one_peer_exponential": [2, 4],
    "complete": [2, 3, 4, 5],
    "ring": [2, 3, 4, 5],
    "exponential": [3, 4, 5],
    "grid": [3, 4, 5],
    "base_graph": [2, 3, 4, 5],
}
CASES = [(t, n, o, {}) for t, counts in ALLOWED.items() for n in counts for o in ("sgd", "adam")]
CASES += [
    ("one_peer_ring", 4, "sgd", options)
    for options in ({"order": "mix_first"}, {"overlap": False}, {"log_every": 3}, {"mix_every": 3})
]
CASES += [("complete", 3, "adam", {"mix_every": 2}), ("one_peer_ring", 5, "sgd", {"mix_every": 2, "overlap": False})]
# Every topology, option and number of workers once. tests/unit/test_parity.py has the full product in one process.
FAST = [
    ("one_peer_ring", 4, "adam", {}),
    ("one_peer_ring", 5, "sgd", {}),
    ("one_peer_exponential", 4, "sgd", {}),
    ("complete", 3, "adam", {}),
    ("complete", 2, "sgd", {}),
    ("ring", 4, "sgd", {}),
    ("exponential", 5, "adam", {}),
    ("grid", 4, "adam", {}),
    ("base_graph", 3, "sgd", {}),
    *CASES[-6:],
]


@pytest.mark.parametrize(("topology", "num_workers", "optimizer", "options"), slow_except(FAST, CASES))
def test_workers_follow_algorithm_1(topology, num_workers, optimizer, options):
    shared = {name: value for name, value in options.items() if name in ("order", "mix_every")}
    simulation, expected = simulate(num_workers, topology, optimizer, **shared)
    results = run_workers(train, num_workers, topology, optimizer, options)
    assert min(results[0]["gammas"]) < 0.2 < max(results[0]["gammas"]) == 1.0, "gamma has to change in this test"
    x = torch.stack([torch.cat([p.flatten() for p in parameters]) for parameters in expected])
    assert (x - x.mean(0)).norm() > 1e-2, "the workers have to differ in this test"
    for result, mine in zip(results, x, strict=True):
        torch.testing.assert_close(result["x"], mine, rtol=0, atol=1e-6)
        torch.testing.assert_close(result["mean"], x.mean(0), rtol=0, atol=1e-12)
        assert result["restored"]
        assert result["radius"] == pytest.approx(simulation.radius(), abs=1e-9)
