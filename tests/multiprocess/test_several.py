"""Several optimizers, several trainings, and ways to call `prepare`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.multiprocess.small_model import FAST, inputs, make_model
from tests.selection import slow_except
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

# ---- several optimizers, several trainings


def two_optimizers(rank: int, topology: str, sizes: tuple[int, int]) -> list[float]:
    """Two models, each with an optimizer of its own: their exchanges overlap and must not be confused."""
    accelerator = GossipAccelerator(gossip=GossipConfig(topology=topology, power=0, log_every=0, **FAST))
    models = [nn.Linear(size, 1, bias=False) for size in sizes]
    *models, first, second = accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.0) for m in models))
    with torch.no_grad():
        for number, model in enumerate(models):
            model.weight.fill_(100.0 * number + rank)
    for _ in range(20):
        first.step()
        second.step()
    return [float(model.weight.detach().max() - 100 * number) for number, model in enumerate(models)]


@pytest.mark.parametrize(
    ("topology", "sizes"),
    slow_except(
        [("one_peer_ring", (2_000_000, 8)), ("complete", (1000, 1000))],
        [(t, sizes) for sizes in ((2_000_000, 8), (1000, 1000)) for t in ("one_peer_ring", "complete", "ring")],
    ),
)
def test_exchanges_of_several_optimizers_are_kept_apart(topology, sizes):
    for values in run_workers(two_optimizers, 3, topology, sizes):
        assert values == pytest.approx([1.0, 1.0], abs=0.05)


def train_twice(rank: int) -> tuple[float, int]:
    """Return a weight at the end, and how many process groups both trainings have left."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=0, **FAST))
    before = len(groups)
    for size in (50_000, 30):
        model = nn.Linear(size, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        with torch.no_grad():
            model.weight.fill_(float(rank))
        for _ in range(5):
            optimizer.step()
        value = float(model.weight.detach()[0, 0])
        model, optimizer = accelerator.free_memory(model, optimizer)
    return value, len(groups) - before


def test_a_second_training_after_free_memory():
    assert run_workers(train_twice, 2) == [(0.5, 0), (0.5, 0)]


def plan_ahead(rank: int, pattern: str) -> list[float]:
    accelerator = GossipAccelerator(gossip=GossipConfig(power=1, total_steps=8, **FAST))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def warm_up(of):
        return torch.optim.lr_scheduler.LambdaLR(of, lambda step: min(1.0, (step + 1) / 4))

    if pattern == "together":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, warm_up(optimizer))
    elif pattern == "scheduler first":
        scheduler = accelerator.prepare(warm_up(optimizer))
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(warm_up(optimizer.optimizer if pattern == "inner" else optimizer))
    gammas = []
    for step in range(6):
        accelerator.backward(model(inputs(rank, step)).sum())
        optimizer.step()
        scheduler.step()
        gammas.append(accelerator.gossip_steps[0].gamma)
    return gammas


@pytest.mark.parametrize("pattern", ["together", "scheduler first", "wrapped", "inner"])
def test_gamma_does_not_depend_on_how_prepare_was_called(pattern):
    for gammas in run_workers(plan_ahead, 2, pattern):
        assert gammas == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def all_frozen(rank: int) -> float:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    model = make_model().requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.step()
    with accelerator.deployed_model(model) as deployed:
        return float(deployed(inputs(0, 0)).sum())


def test_a_model_with_nothing_to_train_runs():
    results = run_workers(all_frozen, 2)
    assert results[0] == results[1]


def test_alone_a_model_that_was_converted_keeps_its_values_over_an_evaluation():
    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.float()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    with accelerator.deployed_model(model):
        model[0].weight.data.fill_(0.0)
    assert model[0].weight.dtype == torch.float32
    assert float(model[0].weight.detach().mean()) == 2.0
    optimizer.step()


def skip_a_step(rank: int) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", log_every=0, timeout=3))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        accelerator.backward(model(inputs(rank, step)).sum())
        if not (rank == 1 and step == 2):
            optimizer.step()
    with accelerator.deployed_model(model):
        pass


def test_a_worker_that_leaves_out_a_step_is_found_out():
    outcomes = try_workers(skip_a_step, 2)
    assert all(outcome.exit_code == 1 for outcome in outcomes)
    told = " ".join(outcome.error for outcome in outcomes)
    ways = ("left out an `optimizer.step()`", "same number of optimizer steps", "wait for each other")
    assert any(way in told for way in ways), told


def different_places(rank: int) -> str:
    from dsgdac_accel import WorkerGroup

    group = WorkerGroup(torch.device("cpu"), timeout=20)
    with pytest.raises(RuntimeError, match="different collectives") as caught:
        group.all_gather_object(rank, "saving" if rank else "evaluating")
    return str(caught.value)


def test_workers_that_communicate_about_different_things_are_told_so():
    for message in run_workers(different_places, 2):
        assert "worker 0 in evaluating, worker 1 in saving" in message


def train_after_the_end(rank: int) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    accelerator.end_training()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_training_after_end_training_is_refused():
    assert all("training has ended" in message for message in run_workers(train_after_the_end, 2))
