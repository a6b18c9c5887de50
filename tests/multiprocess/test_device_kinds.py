"""Devices, faked on gloo workers: tensors that NCCL would refuse, shared GPUs, and another default device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, WorkerGroup
from dsgdac_accel.core import mixer, slots
from dsgdac_accel.distributed import group as group_module
from dsgdac_accel.distributed.process_groups import ProcessGroups
from tests.multiprocess.small_model import FAST, flat, inputs
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess
CPU = torch.device("cpu")


# ---- where processes may train


def share_a_gpu(rank: int, failing: bool) -> str:
    group_module.identity_of = lambda device: "PCI 0000:3b:00" if failing else f"PCI 0000:3b:0{rank}"
    connect, connected = ProcessGroups.connect, []
    ProcessGroups.connect = lambda groups: (connected.append(groups.exchange), connect(groups))
    try:
        WorkerGroup(CPU, 20)
    except ValueError as error:
        assert not connected, "groups for parameters were made before the check"
        return str(error)
    return "no error"


def test_processes_on_one_gpu_are_refused_on_all_before_groups_are_made():
    for message in run_workers(share_a_gpu, 3, True):
        assert "workers 0 and 1 have the same one (PCI 0000:3b:00)" in message
        assert "CUDA_VISIBLE_DEVICES" in message
        assert "--num_processes" in message
    assert run_workers(share_a_gpu, 2, False) == ["no error"] * 2


def gossip_on(rank: int, kind: str) -> None:
    WorkerGroup(torch.device(kind), 20)


def test_several_processes_on_other_accelerators_are_refused():
    for worker in try_workers(gossip_on, 2, "xpu"):
        assert "the device 'xpu' does not work with 2 processes" in worker.error
        assert "workers_per_process=" in worker.error


# ---- tensors of the host in a run on GPUs


class WithHostTensors(nn.Module):
    """Weights that count as on a GPU, beside those that a script keeps on the host."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.trained = nn.Linear(4, 1).double()
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.target = nn.Linear(4, 2).requires_grad_(False)  # a script updates it by itself
        self.register_buffer("table", torch.full((5,), rank + 1, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x)


def train_as_on_gpus(rank: int) -> dict:
    """Train where the group for parameters refuses tensors of the host, which all are here; the mixing runs on gloo."""
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=0, constant=0.5, **FAST))
    group = accelerator.group
    group.device = torch.device("cuda:0")
    gloo, nccl = group.process_groups.reduction, "NCCL, which knows no tensors of the host"
    group.process_groups.reduction = nccl
    model = WithHostTensors(rank)
    slots.is_on = lambda device, expected: True  # the trained ones
    mixer.follow = lambda last, device: None  # there are no streams here
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # What follows on the device itself is not what this test is about.
    group.device, group.process_groups.reduction = CPU, gloo
    for step in range(2):
        accelerator.backward(model(inputs(rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    group.device, group.process_groups.reduction = torch.device("cuda:0"), nccl
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.target.weight.fill_(rank)
        model.table.fill_(10 * rank + 7)
    own = flat(model)
    with accelerator.deployed_model(model) as deployed:
        found = {"target": deployed.target.weight.clone(), "table": deployed.table.clone(), "x": flat(deployed)}
    assert torch.equal(flat(model), own)
    largest = group.all_reduce_max_(torch.tensor([float(rank)]), "a test")
    return {**found, "own": own, "start": start, "largest": float(largest), "radius": accelerator.measure_consensus()}


def test_tensors_of_the_host_do_not_reach_the_group_of_the_gpus():
    results = run_workers(train_as_on_gpus, 2)
    for result in results:
        assert result["start"]["table"].tolist() == [1] * 5
        assert torch.equal(result["start"]["frozen.weight"], results[0]["start"]["frozen.weight"])
        assert result["target"].unique().tolist() == [0.5]
        assert result["table"].tolist() == [7] * 5
        torch.testing.assert_close(result["x"], (results[0]["own"] + results[1]["own"]) / 2)
        assert result["largest"] == 1.0
        assert result["radius"]["gossip/radius"] > 0


# ---- another default device


def train_with_default(rank: int, device: str, options: dict, folder: str) -> dict:
    torch.set_default_device(device)
    local = options.get("workers_per_process", 1)
    config = GossipConfig(**{"log_every": 2, **FAST, **options})
    accelerator = GossipAccelerator(gossip=config)
    torch.manual_seed(0)
    with CPU:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
        batches = [torch.cat([inputs(2 * rank + n, step) for n in range(2 * local)]).float() for step in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def steps(numbers: range) -> None:
        for step in numbers:
            loss = model(batches[step]).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    steps(range(4))
    accelerator.save_state(folder)
    steps(range(4, 6))
    before = flat(model)
    accelerator.load_state(folder)
    steps(range(4, 6))
    assert torch.equal(before, flat(model)), "it resumed elsewhere"
    with accelerator.deployed_model(model, calibrate=batches) as deployed:
        average = [value.clone() for value in deployed.state_dict().values()]
    steps(range(6, 8))
    metrics = accelerator.measure_consensus()
    accelerator.deploy(model)
    timed = ("gossip/wait_seconds", "gossip/bytes_sent")
    return {
        "average": average,
        "end": [value.clone() for value in accelerator.unwrap_model(model).state_dict().values()],
        "metrics": {name: value for name, value in metrics.items() if name not in timed},
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"workers_per_process": 2, "topology": "complete"}, marks=pytest.mark.slow),
        pytest.param({"comm_dtype": "int8", "order": "mix_first"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_default_device_changes_nothing(options, tmp_path: Path):
    usual = run_workers(train_with_default, 2, "cpu", options, str(tmp_path / "usual"))
    other = run_workers(train_with_default, 2, "meta", options, str(tmp_path / "other"))
    for one, another in zip(usual, other, strict=True):
        assert one["metrics"] == another["metrics"]
        for part in ("average", "end"):
            assert all(map(torch.equal, one[part], another[part]))
