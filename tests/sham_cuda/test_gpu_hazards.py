"""What goes wrong on GPUs alone: a wrong current device, threads on another one, mistakes before NCCL connects."""

from __future__ import annotations

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dsgdac_accel import Gossip, GossipAccelerator, GossipConfig, WorkerGroup
from dsgdac_accel.distributed.process_groups import ProcessGroups
from dsgdac_accel.distributed.transport import Nccl
from dsgdac_accel.distributed.watchdog import HostFlags
from tests.kernel_launches import KernelLaunches

FAST = {"timeout": 20.0, "log_every": 0}


def deep_model(layers: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, watch: Any = None) -> None:
    x = torch.ones(2, 4, device=next(model.parameters()).device, dtype=next(model.parameters()).dtype)
    model(x).square().mean().backward()
    with watch or contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad()


# ---- communicators


def connect_shards(rank: int) -> tuple[int, list[str]]:
    """Train workers of two processes.

    Returns how many communicators this process has then, and what a broadcast to all does before it sends.
    """
    torch.cuda.set_device(0)
    os.environ["LOCAL_RANK"] = "0"  # each process sees one GPU
    events, new_group = [], Nccl.new_group

    def noted(nccl: Nccl, ranks: Any, limit: Any) -> Any:
        events.extend(["connected"] * (rank in ranks))
        return new_group(nccl, ranks, limit)

    Nccl.new_group = noted
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    accelerator = GossipAccelerator(device_mesh=mesh, gossip=GossipConfig(overlap=False, **FAST))
    model = deep_model(2).to("cuda")
    fully_shard(model, mesh=mesh["dp_shard"])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, optimizer)
    accelerator.measure_consensus()
    in_training = len(events)
    exchange = Mock(drain=lambda: events.append("drained"))  # a mixer, as its group sees it
    accelerator.group.register(exchange)
    values = torch.full((3,), float(rank), device="cuda")
    accelerator.group.everyone.broadcast_(values, "a test")
    assert values.tolist() == [0.0] * 3
    return in_training, events[in_training:]


def test_a_process_of_a_sharded_worker_connects_to_all_when_it_must_and_nothing_is_in_flight(sham):
    assert sham.run(connect_shards, 4) == [(2, ["drained", "connected"])] * 4


# ---- mistakes


def plain(device: str) -> None:
    model = deep_model(1).to(device)
    Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), GossipConfig(**FAST))


def make_mistake(rank: int, mistake: str) -> tuple[str, bool]:
    connected = []
    ProcessGroups.connect = lambda groups: connected.append(groups)
    try:
        if mistake == "another current device":  # on worker 1 alone
            torch.cuda.set_device(0)
            plain(f"cuda:{rank}")
        elif mistake == "another current device, accelerator":
            Accelerator()  # makes that of its rank the current one
            torch.cuda.set_device(0)
            GossipAccelerator(gossip=GossipConfig(**FAST))
        elif mistake == "one GPU for two":
            torch.cuda.get_device_properties = lambda device: SimpleNamespace(pci_bus_id=0x3B)
            GossipAccelerator(gossip=GossipConfig(**FAST))
        else:
            torch.cuda.set_device(rank)
            if rank == 1:
                os.environ[mistake] = "1"
            plain(f"cuda:{rank}")
    except ValueError as error:
        return str(error), bool(connected)
    return "no error", bool(connected)


NAMES = {
    "another current device": ("worker 1", "cuda:0", "cuda:1", "torch.cuda.set_device(1)"),
    "another current device, accelerator": ("worker 1", "cuda:0", "cuda:1", "torch.cuda.set_device(1)"),
    "one GPU for two": ("workers 0 and 1", "3b", "CUDA_VISIBLE_DEVICES"),
    "TORCH_NCCL_BLOCKING_WAIT": ("worker 1", "TORCH_NCCL_BLOCKING_WAIT", "'1'"),
    "NCCL_BLOCKING_WAIT": ("worker 1", "NCCL_BLOCKING_WAIT", "'1'"),
}


@pytest.mark.parametrize("mistake", NAMES)
def test_a_mistake_is_told_to_all_before_nccl_connects(sham, mistake):
    for message, connected in sham.run(make_mistake, 2, mistake):
        for name in NAMES[mistake]:
            assert name in message
        assert not connected


def test_one_process_needs_the_right_current_device_too(sham):
    """Its random states are those of the current device."""
    ((device, message),) = sham.run(alone, 1)
    assert device == "cuda:0"
    assert "torch.cuda.set_device(1)" in message


def alone(rank: int) -> tuple[str, str]:
    with pytest.raises(ValueError, match="current CUDA device") as caught:
        plain("cuda:1")
    return str(WorkerGroup(torch.device("cuda")).device), str(caught.value)


# ---- threads


def train_on_the_second_gpu(rank: int, folder: str) -> dict[str, set]:
    current: dict[str, set] = {}

    def noted(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def replaced(*args: object, **options: object) -> object:
            thread = threading.current_thread().name
            current.setdefault(thread, set()).add(torch.cuda.current_device() - rank)
            return call(*args, **options)

        setattr(owner, name, replaced)

    for name in ("query", "synchronize"):
        noted(torch.cuda.Event, name)
    noted(dist, "all_reduce")
    noted(dist, "batch_isend_irecv")
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    model = deep_model(2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(model, optimizer)
    accelerator.save_state(folder, wait=False)
    accelerator.end_training()
    return current


def test_threads_use_the_device_of_the_model(sham, tmp_path):
    for current in sham.run(train_on_the_second_gpu, 2, str(tmp_path)):
        assert {"MainThread", "dsgdac-connect", "dsgdac-checkpoint"} <= set(current)
        assert set().union(*current.values()) == {0}


def flag(rank: int) -> list[list[bool]]:
    flags, seen = HostFlags(torch.device("cuda:0")), []
    for _ in range(2 * 4096 // 3):  # places are used again
        reached = [flags.mark() for _ in range(3)]
        before = [place() for place in reached]
        event = torch.cuda.Event()
        event.record()
        event.query()
        seen.append([any(before), all(place() for place in reached)])
    return seen


def test_places_in_the_queue_are_seen_without_asking_once_the_device_is_there(sham):
    (seen,) = sham.run(flag, 1)
    assert [list(found) for found in set(map(tuple, seen))] == [[False, True]]


# ---- masters


def launches_with_masters(rank: int) -> list[int]:
    found = []
    for layers in (4, 8):
        model = deep_model(layers, torch.bfloat16).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        Gossip(model, optimizer, GossipConfig(**FAST))
        step(model, optimizer)
        launches = KernelLaunches()
        step(model, optimizer, launches)
        found.append(len(launches.launches))
    return found


def test_masters_cost_no_launch_for_each_parameter(sham):
    few, many = sham.run(launches_with_masters, 2)[0]
    assert many == few


# ---- parameters stay where the script has put them


def places(rank: int) -> dict[str, bool]:
    """Return after what the parameters are still where they were before the library knew of them."""
    torch.cuda.set_device(rank)
    model = deep_model(3).to(f"cuda:{rank}")
    trained, late = list(model[0].parameters()), list(model[1].parameters())
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([*trained, *model[2].parameters()], lr=0.1)

    def now() -> list[tuple[int, int]]:
        return [(p.data_ptr(), p.untyped_storage()._cdata) for p in model.parameters()]

    before, found = now(), {}
    gossip = Gossip(model, optimizer, GossipConfig(**FAST))
    found["prepare"] = now() == before
    step(model, optimizer)
    found["step"] = now() == before
    model[2].requires_grad_(True)
    step(model, optimizer)
    found["unfreezing"] = now() == before
    optimizer.add_param_group({"params": late})
    step(model, optimizer)
    found["adding"] = now() == before
    with gossip.deployed_model():
        found["deploying"] = now() == before
    found["training on"] = now() == before
    return found


def test_parameters_never_move(sham):
    """CUDA graphs replay on the memory that was captured. `record_stream` and CUDA IPC know what torch allocated."""
    for found in sham.run(places, 2):
        assert all(found.values()), found
