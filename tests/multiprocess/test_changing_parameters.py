"""Parameters that join, leave and thaw in mid-run: equal starts, and what pairs of workers refer to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from dsgdac_accel import GossipAccelerator, GossipConfig, NonFiniteError, WorkerGroup
from dsgdac_accel.core.step import GossipStep
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess


def take_step(gossip: GossipStep) -> None:
    for group in gossip.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    gossip.step()


def replace_head_again_and_again(rank: int) -> list[bool]:
    """Nothing keeps the old heads, so that new parameters get their addresses, on one worker or on both."""
    accelerator = GossipAccelerator(gossip=GossipConfig(log_every=0, constant=0.0, timeout=30))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    groups, equal = optimizer.optimizer.param_groups, []
    groups[0]["params"] = groups[0]["params"][:2]
    for _ in range(30):
        model[1] = nn.Linear(3, 2)  # of other values on each worker
        groups[1:] = []
        optimizer.optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.0})
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        heads = [torch.empty(2, 3) for _ in range(2)]
        dist.all_gather(heads, model[1].weight.detach().contiguous())
        equal.append(torch.equal(*heads))
    return equal


def test_parameters_that_join_start_equal_whatever_was_there_before_them():
    for equal in run_workers(replace_head_again_and_again, 2):
        assert equal == [True] * 30


def thaw(rank: int, comm_dtype: str) -> tuple[list[float], bool]:
    """Radii of 24 steps; after 12 of them ten parameters thaw."""
    group = WorkerGroup(torch.device("cpu"), 30)
    torch.manual_seed(0)
    x, late = Parameter(torch.randn(5000)), Parameter(torch.randn(10), requires_grad=False)
    config = GossipConfig(comm_dtype=comm_dtype, log_every=0, power=0)
    gossip = GossipStep(torch.optim.SGD([late, x], lr=0.1), group, config)
    noise, radii = torch.Generator().manual_seed(rank), []
    for step in range(24):
        late.requires_grad_(step >= 12)
        x.grad = 0.01 * torch.randn(5000, generator=noise)
        take_step(gossip)
        radii.append(gossip.average.measure().radius)
    if comm_dtype == "full":
        return radii, True
    gossip.mixer.drain()
    reference = [float(part.double().sum()) for part in gossip.mixer.compressor.references[0][1 - rank]]
    return radii, all(values == reference for values in group.all_gather_object(reference, "comparing references"))


@pytest.mark.parametrize("comm_dtype", ["bf16", "int8"])
def test_what_pairs_refer_to_stays_near_where_parameters_thaw(comm_dtype):
    exact = run_workers(thaw, 2, "full")[0][0]
    for radii, same in run_workers(thaw, 2, comm_dtype):
        assert radii == pytest.approx(exact, rel=0.05)  # begun at 0, int8 would be off by 270 %
        assert same


def thaw_and_resume(rank: int, folder, comm_dtype: str) -> list[bool]:
    """Thawed after epoch 0, saved after epoch 1; a resumed run thaws what it needs after loading."""

    def run(first: int) -> list[torch.Tensor]:
        config = GossipConfig(log_every=0, power=1, timeout=30, comm_dtype=comm_dtype)
        accelerator = GossipAccelerator(gossip=config)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2))
        model[0].requires_grad_(False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if first:
            accelerator.load_state(folder)
        for epoch in range(first, 4):
            model[0].requires_grad_(epoch >= 1)
            for step in range(3):
                generator = torch.Generator().manual_seed(100 * epoch + 10 * step + rank)
                accelerator.backward(model(torch.randn(4, 30, generator=generator)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if not first and epoch == 1:
                accelerator.save_state(folder)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        accelerator.free_memory()
        return values

    return [torch.equal(a, b) for a, b in zip(run(0), run(2), strict=True)]


@pytest.mark.parametrize("comm_dtype", ["full", "bf16", "int8"])
def test_a_run_whose_parameters_thawed_resumes_exactly(tmp_path, comm_dtype):
    for equal in run_workers(thaw_and_resume, 2, tmp_path / "saved", comm_dtype):
        assert all(equal)


def thaw_alone(rank: int) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=30))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].weight.requires_grad_(rank == 1)
    with pytest.raises(RuntimeError) as caught, accelerator.deployed_model(model):
        pass
    return str(caught.value)


def test_what_one_worker_thaws_alone_is_named_before_an_average():
    for error in run_workers(thaw_alone, 2):
        assert error.startswith("worker 1 added, unfroze or put in place of others 0.weight, before step 0")


def watch_traffic(rank: int, comm_dtype: str) -> list[tuple[float, float]]:
    group = WorkerGroup(torch.device("cpu"), 30)
    optimizer = torch.optim.SGD([Parameter(torch.ones(1000))], lr=0.1)
    gossip = GossipStep(optimizer, group, GossipConfig(mix_every=3, log_every=0, comm_dtype=comm_dtype))
    seen = []
    for _ in range(9):
        take_step(gossip)
        metrics = gossip.metrics()
        seen.append((metrics["bytes_sent"], metrics["wait_seconds"]))
    gossip.mixer.drain()
    return seen


def test_steps_without_an_exchange_send_nothing_and_wait_for_nothing():
    for seen in run_workers(watch_traffic, 2, "full"):
        # The exchange that step 2 (of 0, 1, 2) mixes is sent at the end of step 1, and so on.
        assert [sent for sent, _ in seen] == [0.0, 4096.0 + 4 * 8, 0.0] * 3, "parameters, and a header of four words"
        assert [waited > 0 for _, waited in seen] == [False, False, True] * 3


def come_too_far_apart(rank: int, comm_dtype: str) -> str:
    group = WorkerGroup(torch.device("cpu"), 30)
    optimizer = torch.optim.SGD([Parameter(torch.ones(300))], lr=0.1)
    gossip = GossipStep(optimizer, group, GossipConfig(comm_dtype=comm_dtype, log_every=0, overlap=False))
    take_step(gossip)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0][0] = 1e20 if rank == 0 else 1.0
    try:
        take_step(gossip)
    except NonFiniteError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("comm_dtype", ["full", "bf16", "int8", pytest.param("int2", marks=pytest.mark.slow)])
def test_finite_parameters_that_are_too_far_apart_are_not_called_non_finite(comm_dtype):
    for rank, message in enumerate(run_workers(come_too_far_apart, 2, comm_dtype)):
        assert f"worker {rank} and its neighbors are too far apart at step 1" in message
        assert "not finite" not in message
