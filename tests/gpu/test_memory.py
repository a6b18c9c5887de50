"""One GPU, and two: buffers and messages of more than 2^31 elements, and the memory of communicators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsgdac_accel import Mixer, WorkerGroup, build_topology
from tests.gpu.machine import TIMEOUT, Here, launch, on_devices, require_memory, workers_on

pytestmark = pytest.mark.multiprocess

LENGTHS = {"cpu": 1000, "cuda": 2**31 + 100}


def count_wrong(parameter: nn.Parameter, value: float) -> int:
    return sum(int((part - value).abs().gt(1e-5).count_nonzero()) for part in parameter.detach().split(2**28))


def mix_two_workers(here: Here, length: int) -> list[int]:
    parameters = [nn.Parameter(torch.full((length,), float(worker), device=here.device)) for worker in range(2)]
    numbers = {id(parameter): worker for worker, parameter in enumerate(parameters)}
    mixer = Mixer(
        parameters,
        build_topology("one_peer_ring", 2),
        WorkerGroup(here.device, TIMEOUT),
        local_workers=2,
        worker_of=lambda parameter: numbers[id(parameter)],
    )
    mixer.add(mixer.consensus_update(0.5))  # x_0 <- 0 + 0.5 * 0.5 * (1 - 0), and x_1 the other way
    return [count_wrong(parameter, value) for parameter, value in zip(parameters, (0.25, 0.75), strict=True)]


@on_devices(1)
def test_buffers_beyond_2_31_elements(device):
    """Kernels that count in 32 bits, such as fused SGD's, would mix wrongly."""
    require_memory(device, 64)
    assert launch(mix_two_workers, device, LENGTHS[device]) == [[0, 0]]


def exchange_twice(here: Here, length: int) -> int:
    topology = build_topology("ring", here.size)
    values = nn.Parameter(torch.full((length,), float(here.rank), device=here.device))
    mixer = Mixer(values, topology, WorkerGroup(here.device, TIMEOUT))
    expected = torch.arange(here.size).double()
    for step in range(2):
        mixer.add(mixer.consensus_update(1.0))
        expected = topology.matrix(step).double() @ expected
    return count_wrong(values, float(expected[here.rank]))


@on_devices(2)
def test_messages_beyond_2_31_elements(device):
    """Many messages hang in one NCCL group (pytorch#174288). In messages of 64 MiB these would be 128 or more."""
    workers = workers_on(device)
    require_memory(device, 50, gpus=workers)
    assert launch(exchange_twice, device, LENGTHS[device], workers=workers) == [0] * workers


def measure_communicators(here: Here) -> float:
    parameter = nn.Parameter(torch.zeros(1, device=here.device))
    before = here.free_memory()
    mixer = Mixer(parameter, build_topology("ring", here.size), WorkerGroup(here.device, TIMEOUT))
    mixer.start_exchange()
    mixer.add(mixer.consensus_update(1.0))
    return (before - here.free_memory()) / 2**20


@on_devices(2)
def test_communicators_take_less_than_300_mebibytes(device):
    assert max(launch(measure_communicators, device, workers=workers_on(device))) < 300
