"""What runs on CUDA equals what runs on the CPU, bit by bit: training, values that are not finite, the average."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipConfig
from dsgdac_accel.devices import default_device
from dsgdac_accel.pytorch import Gossip
from dsgdac_accel.virtual_workers import VirtualWorkers
from tests.sham_cuda.comparing import differences, run_both

STEPS = 8
FAULTY = (1, (0, 4))  # a worker, and the steps in which its gradient is not finite
PROCESSES = {"one_peer_ring": 4, "ring": 3, "complete": 2, "exponential": 4, "base_graph": 3}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-2, fused=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
}
# topology, format of messages, optimizer, dtype of the model, order, mix_every, where the exchange is, workers in each
# process, gradients of worker 1. Every two values of different columns are in a row together.
TABLE = """
    one_peer_ring  full  sgd          bfloat16  mix_first    1  inside   1  finite
    one_peer_ring  bf16  sgd_foreach  float32   local_first  1  overlap  1  nan
    one_peer_ring  int8  adamw        float32   mix_first    2  inside   1  nan
    one_peer_ring  int2  sgd_foreach  float16   local_first  2  inside   2  nan
    ring           full  sgd_foreach  bfloat16  local_first  2  overlap  1  finite
    ring           bf16  sgd_foreach  float16   local_first  2  inside   1  finite
    ring           int8  adamw        float32   mix_first    1  inside   2  nan
    ring           int2  sgd          float16   mix_first    2  overlap  1  finite
    complete       full  sgd_foreach  float16   local_first  2  overlap  1  nan
    complete       bf16  adamw        float32   mix_first    2  overlap  1  finite
    complete       int8  sgd          bfloat16  local_first  2  inside   2  finite
    complete       int2  adamw        bfloat16  mix_first    1  inside   1  nan
    exponential    full  adamw        float32   local_first  2  overlap  1  finite
    exponential    bf16  sgd_foreach  bfloat16  mix_first    1  overlap  2  finite
    exponential    int8  sgd_foreach  float16   local_first  2  overlap  1  nan
    exponential    int2  sgd          float32   local_first  1  inside   1  nan
    base_graph     full  adamw        float16   mix_first    1  inside   2  nan
    base_graph     bf16  sgd          bfloat16  local_first  2  inside   1  finite
    base_graph     int8  sgd          float32   mix_first    2  inside   1  nan
    base_graph     int2  sgd_foreach  float32   mix_first    2  overlap  2  nan
"""


class Case(NamedTuple):
    topology: str
    comm_dtype: str
    optimizer: str
    dtype: str
    order: str
    mix_every: str
    overlap: str
    local_workers: str
    gradients: str


CASES = [Case(*row.split()) for row in TABLE.strip().splitlines()]


def batch(worker: int, step: int, case: Case) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * worker + step)
    return torch.randn(4, 6, generator=generator, device="cpu").to(getattr(torch, case.dtype))


def train(rank: int, cases: list[Case]) -> dict[str, Any]:
    return {"device": default_device().type} | {" ".join(case): train_one(rank, case) for case in cases}


def train_one(rank: int, case: Case) -> dict[str, Any]:
    device, local = default_device(), int(case.local_workers)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    model = model.to(device, getattr(torch, case.dtype))
    if local > 1:
        model = VirtualWorkers(model, local)
    replicas = list(getattr(model, "replicas", [model]))
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    config = GossipConfig(
        topology=case.topology, comm_dtype=case.comm_dtype, order=case.order, mix_every=int(case.mix_every),
        overlap=case.overlap == "overlap", workers_per_process=local, power=2.0, start_step=2, log_every=3, timeout=30,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, 1.0) * (1 - step / 12))
    gossip = Gossip(model, optimizer, config)
    mine = range(rank * local, (rank + 1) * local)
    gammas = []
    for step in range(STEPS):
        x = torch.cat([batch(worker, step, case) for worker in mine]).to(device)
        model(x).float().square().mean().backward()
        for worker, replica in zip(mine, replicas, strict=True):
            if case.gradients == "nan" and worker == FAULTY[0] and step in FAULTY[1]:
                next(replica.parameters()).grad[0] = math.nan
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        gammas.append(gossip.steps[0].gamma)
    metrics = gossip.measure_consensus()
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    with gossip.deployed_model():
        deployed = {name: value.detach().clone() for name, value in model.named_parameters()}
    state = gossip.state_dict()
    return {
        "parameters": own,
        "deployed": deployed,
        "restored": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict()["state"],
        "gossip": state,
        "gammas": gammas,
        "radius": metrics["gossip/radius"],
        "distance": state["steps"][0]["mixer"].pop("disagreement"),
    }


@pytest.mark.parametrize("processes", sorted(set(PROCESSES.values())))
def test_training_equals_that_on_the_cpu(processes, sham):
    cases = [case for case in CASES if PROCESSES[case.topology] == processes]
    for on_cuda, on_cpu in zip(*run_both(sham, train, processes, cases), strict=True):
        for case in on_cuda:  # a norm on CUDA, the root of a dot product on the CPU; only logs show it
            assert on_cuda[case].pop("distance") == pytest.approx(on_cpu[case].pop("distance"), rel=1e-6)
        assert not differences(on_cuda, on_cpu)


def test_every_two_settings_are_tried_together():
    columns = [sorted(set(column)) for column in zip(*CASES, strict=True)]
    for first, second in itertools.combinations(range(len(columns)), 2):
        tried = {(case[first], case[second]) for case in CASES}
        assert tried == set(itertools.product(columns[first], columns[second]))
