"""One GPU, and two: where the host waits for a GPU, and what it copies."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from dsgdac_accel.calibration import calibrate_batch_norm
from tests.gpu.machine import Here, HostWatch, launch, on_devices, workers_on

pytestmark = pytest.mark.multiprocess

WARM_UP = 3
"""Steps before waits are counted: the first ones compare settings and allocate."""


def watch_steps(here: Here, workers: int, fused: bool | None) -> HostWatch:
    accelerator = here.accelerator(workers_per_process=workers)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused))
    inputs, watch = torch.randn(64, 64, device=here.device), HostWatch()
    for step in range(WARM_UP + 5):
        accelerator.backward(model(inputs).square().mean())
        with watch.watching(here) if step >= WARM_UP else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    return watch


@pytest.mark.parametrize(("workers", "fused", "most"), [(1, True, 0), (1, None, 1), (8, True, 1)])
@on_devices(1)
def test_a_step_does_not_wait_for_the_gpu(device, workers, fused, most):
    """Optimizers that cannot skip on the device what is not finite, and several workers in a process, look once."""
    (watch,) = launch(watch_steps, device, workers, fused)
    assert watch.reads <= most
    assert most or not watch.blocked


def watch_exchanging_steps(here: Here, comm_dtype: str) -> HostWatch:
    accelerator = here.accelerator(topology="ring", comm_dtype=comm_dtype)
    parameter = nn.Parameter(torch.zeros(2**20, device=here.device))
    optimizer, watch = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1, fused=True)), HostWatch()
    for step in range(WARM_UP + 5):
        parameter.grad = torch.full_like(parameter, float(here.rank))
        with watch.watching(here) if step >= WARM_UP else contextlib.nullcontext():
            optimizer.step()
    return watch


@pytest.mark.parametrize("comm_dtype", ["full", "bf16", "int8"])
@on_devices(2)
def test_an_exchanging_step_does_not_wait_for_the_gpu(device, comm_dtype):
    for watch in launch(watch_exchanging_steps, device, comm_dtype, workers=workers_on(device)):
        assert watch.reads == 0
        assert not watch.blocked


def prepared_convolutions(here: Here, width: int = 512, depth: int = 8) -> tuple[Any, Any]:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))
    accelerator = here.accelerator(workers_per_process=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    return accelerator, accelerator.prepare(model, optimizer)[0]


def watch_a_mix(here: Here) -> tuple[dict[str, float], HostWatch]:
    accelerator, _ = prepared_convolutions(here, width=512 if here.cuda else 8)
    mixer, repeats = accelerator.gossip_steps[0].mixer, 10
    mixer.add(mixer.consensus_update(0.5))
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CUDA if here.cuda else activities.CPU]) as profile:
        for _ in range(repeats):
            mixer.add(mixer.consensus_update(0.5))
        here.synchronize()
    events = [event for event in profile.key_averages() if event.device_type is torch.autograd.DeviceType.CUDA]
    watch = HostWatch()
    with watch.watching(here):
        mixer.add(mixer.consensus_update(0.5))
    return {event.key: event.count / repeats for event in events}, watch


@on_devices(1)
def test_a_mix_of_eight_workers_copies_one_flag_to_the_host(device):
    ((on_device, watch),) = launch(watch_a_mix, device)
    if device == "cuda" and not on_device:
        pytest.skip("the profiler sees nothing of the GPU here; CUPTI may need more rights")
    copies = {key: count for key, count in on_device.items() if key.startswith("Memcpy")}
    assert sum(count for key, count in copies.items() if "DtoH" in key) <= 1
    assert sum(count for key, count in copies.items() if "HtoD" in key) == 0
    assert not watch.blocked


def watch_radius_and_calibration(here: Here) -> tuple[HostWatch, HostWatch]:
    accelerator, model = prepared_convolutions(here, width=512 if here.cuda else 8)
    batches = [torch.randn(16, 3, 16, 16, device=here.device) for _ in range(4)]
    radius, calibration = HostWatch(), HostWatch()
    with radius.watching(here):
        accelerator.measure_consensus()
    with calibration.watching(here):
        calibrate_batch_norm(model.replicas[0], batches, accelerator.group)
    return radius, calibration


@on_devices(1)
def test_radius_and_calibration_wait_rarely(device):
    """The radius of 8 workers waits once, not for each; 8 BatchNorm layers on 4 batches wait once a layer at most."""
    ((radius, calibration),) = launch(watch_radius_and_calibration, device)
    assert radius.reads <= 1
    assert calibration.reads <= 8
