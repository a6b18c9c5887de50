"""Two GPUs or more: processes that exchange by NCCL, each with a GPU of its own, against the simulation."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dsgdac_accel import Mixer, WorkerGroup, build_topology
from tests.gpu.algorithm import Training
from tests.gpu.machine import TIMEOUT, Here, follow, launch, on_devices, try_launch, workers_on
from tests.multiprocess.scenarios import Scenario, World, require_equal

pytestmark = pytest.mark.multiprocess


def mixed(topology: Any, start: torch.Tensor, steps: int, change: torch.Tensor | float = 0.0) -> torch.Tensor:
    """v <- W v + change, so many times, in float64."""
    for step in range(steps):
        start = topology.matrix(step).double() @ start + change
    return start


# ---- the algorithm


@pytest.mark.parametrize(
    "scenario",
    [Scenario(), Scenario("complete", "fused"), Scenario("ring", "fused_sgd", overlap="no"), Scenario("ring", "fused")],
    ids=str,
)
@on_devices(2)
def test_processes_follow_algorithm_1(device, scenario):
    world = World(workers_on(device))
    require_equal(world, scenario, launch(follow, device, world, scenario, workers=world.processes), device=device)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@on_devices(2, slow_on_cpu=True)
def test_sharded_workers_follow_algorithm_1(device, optimizer, shards):
    """The communicators of FSDP2 and of the exchange do not deadlock, and each shard meets its own neighbors."""
    world = World(4 if device == "cpu" else workers_on(device), shards)
    scenario = Scenario(optimizer=optimizer)
    require_equal(world, scenario, launch(follow, device, world, scenario, workers=world.processes), device=device)


# ---- the exchange


def exchange_with_a_late_neighbor(here: Here, late: float) -> tuple[float, float]:
    values = nn.Parameter(torch.full((1024,), float(here.rank), device=here.device))
    group = WorkerGroup(here.device, TIMEOUT)
    mixer = Mixer(values, build_topology("ring", here.size), group)
    group.barrier("meeting")
    time.sleep(late * (here.rank == 1))
    started = time.perf_counter()
    mixer.start_exchange()
    took = time.perf_counter() - started
    mixer.add(mixer.consensus_update(1.0))
    (value,) = values.detach().unique().tolist()
    return took, value


@on_devices(2)
def test_the_first_exchange_does_not_block(device):
    """The first message over an edge connects two GPUs, which blocks until the neighbor is there."""
    workers, late = workers_on(device), 3.0 if device == "cuda" else 1.0
    results = launch(exchange_with_a_late_neighbor, device, late, workers=workers)
    assert max(took for took, _ in results) < late / 2
    expected = mixed(build_topology("ring", workers), torch.arange(workers).double(), 1)
    assert [value for _, value in results] == pytest.approx(expected.tolist(), abs=1e-6)


def mix_beside_collectives(here: Here, comm_dtype: str) -> float:
    """Mix one large parameter, without training, while the script reduces tensors of its own; return the difference.

    Each worker starts at a ramp plus its rank r and subtracts 0.1 r in each step. The ramp is the same for all and
    stays, so that v <- W v - 0.1 r tells every value; without it int8 would have nothing to round.
    """
    elements = 2**26 if here.cuda else 2**20
    accelerator = here.accelerator(topology="ring", power=0.0, comm_dtype=comm_dtype)
    parameter = nn.Parameter(torch.zeros(elements, device=here.device))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1, fused=True))
    ramp = torch.linspace(0.0, 1.0, elements, device=here.device)
    parameter.data.copy_(ramp + here.rank)
    for step in range(10):
        parameter.grad = torch.full_like(parameter, float(here.rank))
        here.delay(7 * here.rank + step, 0.05)
        optimizer.step()
        dist.all_reduce(torch.ones(2**18, device=here.device))
    accelerator.gossip_steps[0].mixer.drain()
    ranks = torch.arange(here.size).double()
    expected = mixed(build_topology("ring", here.size), ranks, 10, -0.1 * ranks)
    return float((parameter.detach() - ramp - expected[here.rank]).abs().max())


@pytest.mark.parametrize(("comm_dtype", "limit"), [("full", 1e-5), ("bf16", 2e-3), ("int8", 2e-3)])
@on_devices(2)
def test_exchanges_beside_collectives_of_the_script_mix_right(device, comm_dtype, limit):
    differences = launch(mix_beside_collectives, device, comm_dtype, workers=workers_on(device))
    assert max(differences) <= limit


def wait_for_a_late_peer(here: Here) -> float:
    training = Training.prepared(here, "sgd", topology="ring")
    waits = []
    for step in range(6):
        time.sleep(0.2 * (here.rank == 1))
        training.step(step)
        here.synchronize()
        waits.append(training.accelerator.gossip_steps[0].metrics()["wait_seconds"])
    return max(waits[2:])


@on_devices(2)
def test_a_late_peer_shows_in_wait_seconds(device):
    """On a GPU only streams wait, not the host."""
    assert launch(wait_for_a_late_peer, device, workers=workers_on(device))[0] > 0.1


# ---- what NCCL does not know, or does not tell


def prepare_with_a_cpu_buffer(here: Here) -> list[float]:
    accelerator = here.accelerator(topology="ring")
    model = nn.Linear(4, 4).to(here.device)
    model.register_buffer("table", torch.full((3,), float(here.rank), device="cpu"))
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), device_placement=[False, False])
    return model.get_buffer("table").tolist()


@on_devices(2)
def test_a_buffer_on_the_cpu_does_not_reach_nccl(device):
    workers = workers_on(device)
    assert launch(prepare_with_a_cpu_buffer, device, workers=workers) == [[0.0] * 3] * workers


def train_while_debugging(here: Here, world: World) -> dict[str, Any]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return follow(here, world, Scenario("ring"))


@on_devices(2)
def test_detail_debugging_does_not_deadlock(device):
    """torch 2.10 and older take NCCL's groups apart then, and receives that are posted first hang: refused."""
    world = World(workers_on(device))
    outcomes = try_launch(train_while_debugging, device, world, workers=world.processes)
    if all(outcome.error is None for outcome in outcomes):
        require_equal(world, Scenario("ring"), [outcome.value for outcome in outcomes], device=device)
    else:
        for outcome in outcomes:
            assert "ValueError" in outcome.error
            assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in outcome.error


def step_two_optimizers(here: Here) -> list[float]:
    accelerator = here.accelerator(topology="ring", power=0.0)
    starts = (here.rank, 100.0 + here.rank)
    parameters = [nn.Parameter(torch.zeros(4096, device=here.device)) for _ in starts]
    optimizers = [accelerator.prepare(torch.optim.SGD([parameter], lr=0.1)) for parameter in parameters]
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.data.fill_(start)
        parameter.grad = torch.zeros_like(parameter)
    for step in range(4):  # the first step waits for the neighbor's first exchange, so it has one order
        for optimizer in optimizers if here.rank % 2 == 0 or step == 0 else optimizers[::-1]:
            optimizer.step()
        here.synchronize()
    return [float(parameter.detach().mean()) for parameter in parameters]


@on_devices(2)
def test_optimizers_in_another_order_are_refused_or_mixed_right(device):
    """NCCL ignores tags, so it would mix the parameters of one with the other's."""
    workers = workers_on(device)
    expected = mixed(build_topology("ring", workers), torch.arange(workers).double(), 4)
    for outcome in try_launch(step_two_optimizers, device, workers=workers):
        if outcome.error is None:
            own = float(expected[outcome.rank])
            assert outcome.value == pytest.approx([own, 100.0 + own], abs=1e-3)
        else:
            assert "RuntimeError" in outcome.error or "WorkerLostError" in outcome.error
