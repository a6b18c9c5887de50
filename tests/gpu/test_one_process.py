"""One GPU: the workers of one process, and one worker whose model FSDP2 shards, against the simulation."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dsgdac_accel import GossipAccelerator, NonFiniteError
from dsgdac_accel.core.host_copy import HostCopy
from tests.gpu.algorithm import OPTIMIZERS, Training
from tests.gpu.machine import Here, follow, launch, on_devices
from tests.multiprocess.scenarios import Scenario, World, require_equal
from tests.workers import try_workers

pytestmark = pytest.mark.multiprocess

WORKERS = 4
CASES = [Scenario(topology, o) for topology in ("one_peer_ring", "complete", "ring") for o in ("fused_sgd", "fused")]
CASES += [Scenario("one_peer_exponential"), Scenario(optimizer="fused_sgd", nonfinite="yes")]


@pytest.mark.parametrize("scenario", CASES, ids=str)
@on_devices(1)
def test_virtual_workers_follow_algorithm_1(device, scenario):
    """Fused optimizers, several topologies, and a worker that skips its local update because its gradient is NaN."""
    world = World(1, local_workers=WORKERS)
    require_equal(world, scenario, launch(follow, device, world, scenario), device=device)


def train_a_sharded_worker(here: Here, scenario: Scenario) -> dict[str, Any]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return follow(here, World(1, shards=1), scenario)


@pytest.mark.parametrize("scenario", [Scenario(), Scenario(optimizer="fused")], ids=str)
@on_devices(1)
def test_a_sharded_worker_trains_like_a_whole_one(device, scenario):
    """Fused Adam takes DTensors, and FSDP2 computes with the parameters of this step."""
    found = launch(train_a_sharded_worker, device, scenario)
    require_equal(World(1, shards=1), scenario, found, device=device)


# ---- values that are not finite, read late by the host


def poison_parameters(here: Here) -> tuple[bool, torch.Tensor]:
    training = Training.prepared(here, "sgd", topology="one_peer_ring", workers_per_process=2).run()
    with torch.no_grad():
        next(training.model.replicas[1].parameters()).data.fill_(math.nan)
    refused = False
    try:
        for step in range(3):
            training.step(step)
    except NonFiniteError:
        refused = True
    return refused, training.parameters()


@on_devices(1)
def test_nan_parameters_stop_the_run_before_they_reach_another_worker(device):
    ((refused, parameters),) = launch(poison_parameters, device)
    assert refused
    assert parameters[0].isfinite().all()


def poison_gradients(here: Here, optimizer: str) -> tuple[list[torch.Tensor], int]:
    training = Training.prepared(here, optimizer)
    found = []
    for step in range(3):
        training.step(step, nonfinite=[0] if step == 1 else ())
        states = training.optimizer.optimizer.state.values()
        moments = [value.double().cpu().flatten() for state in states for value in state.values() if value is not None]
        found.append(torch.cat([training.parameters().flatten(), *moments]))
    return found, training.skipped


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_devices(1)
def test_nan_gradients_change_neither_parameters_nor_moments_nor_the_count_of_steps(device, optimizer):
    (((before, skipped, after), count),) = launch(poison_gradients, device, optimizer)
    assert torch.equal(before, skipped)
    assert not torch.equal(before, after)
    assert count == 1


# ---- deployed model and checkpoint


def deploy_and_resume(here: Here, folder: str) -> dict[str, torch.Tensor]:
    training = Training.prepared(here, "adam", topology="ring", workers_per_process=WORKERS).run()
    found = {"own": training.parameters()}
    with training.accelerator.deployed_model(training.model):
        found["average"] = training.parameters()
    found["restored"] = training.parameters()
    training.accelerator.save_state(folder)
    for end in ("unbroken", "resumed"):
        for step in range(3):
            training.step(step)
        found[end] = training.parameters()
        training.accelerator.load_state(folder)
    return found


@on_devices(1)
def test_deployed_model_and_checkpoint_are_exact(device, tmp_path):
    (found,) = launch(deploy_and_resume, device, str(tmp_path / "state"))
    mean = found["own"].mean(0).expand_as(found["own"])
    torch.testing.assert_close(found["average"], mean, rtol=0, atol=1e-12)
    assert torch.equal(found["own"], found["restored"])
    assert torch.equal(found["unbroken"], found["resumed"])


# ---- streams, default device, shared GPUs


def copy_late(here: Here) -> bool:
    value = torch.zeros(1, device=here.device)
    here.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if here.cuda else torch.no_grad():
        here.sleep(0.1)
        value.fill_(1.0)
        copied = HostCopy(value)
    return bool(copied.read())


@on_devices(1)
def test_late_copies_follow_side_streams(device):
    assert launch(copy_late, device) == [True]


def train_with_default_device(here: Here, folder: str) -> dict[str, Any]:
    torch.set_default_device(here.device)
    return follow(here, World(1, local_workers=WORKERS), Scenario(), functools.partial(save_and_load, folder))


def save_and_load(folder: str, accelerator: GossipAccelerator, model: nn.Module) -> bool:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    return all(map(torch.equal, before, model.parameters()))


@on_devices(1)
def test_the_default_device_may_be_the_gpu(device, tmp_path):
    """`torch.set_default_device("cuda")` breaks neither pinned copies, nor generators of the CPU, nor checkpoints."""
    found = launch(train_with_default_device, device, str(tmp_path / "state"))
    require_equal(World(1, local_workers=WORKERS), Scenario(), found, device=device)
    assert found[0]["after"]


def share_a_gpu(rank: int) -> None:
    torch.cuda.set_device(0)
    os.environ["LOCAL_RANK"] = "0"
    Here(rank, "cuda").accelerator(topology="ring")


@pytest.mark.gpu(1)
def test_two_processes_on_one_gpu_are_told_so():
    """NCCL refuses them on some workers, and would be taken for a lost worker."""
    for outcome in try_workers(share_a_gpu, 2, timeout=240.0, device="cuda"):
        assert "ValueError" in (outcome.error or "no error")
        assert "workers 0 and 1 have the same one" in outcome.error
