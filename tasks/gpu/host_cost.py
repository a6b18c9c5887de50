"""Part 1, cost: waits of the host, kernels, and bytes per second on one GPU."""

from __future__ import annotations

import contextlib
import tempfile
import time
from typing import Any

import torch
from torch import nn

from dsgdac_accel import GossipConfig
from dsgdac_accel.calibration import calibrate_batch_norm
from tasks.benchmarks.mixing import MixingBenchmarkConfig, measure
from tasks.gpu.bench import Bench, HostWaits, NotHere
from tasks.gpu.check import Check, Finding, check

WAITS = "the host waits for nothing there"
WARM_UP = 3
"""Steps before waits are counted: the first ones compare settings and allocate."""


@check("1", seconds=40, cuda_only=WAITS)
def a_step_does_not_wait_for_the_gpu(bench: Bench) -> Finding:
    """Suspicion: the host waits for the GPU in a step, so that it cannot queue ahead.

    Optimizers that cannot skip on the device what is not finite, and several workers in a process, need one look.
    """
    waits: dict[str, HostWaits] = {}
    for name, workers, fused in (("fused", 1, True), ("default", 1, None), ("8 workers", 8, True)):
        accelerator = bench.accelerator(workers_per_process=workers)
        model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused))
        inputs = torch.randn(64, 64, device=bench.device)
        waits[name] = HostWaits()
        for step in range(WARM_UP + 5):
            accelerator.backward(model(inputs).square().mean())
            with waits[name].watching(bench) if step >= WARM_UP else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
    ok = not waits["fused"].reads and not waits["fused"].blocked and all(each.reads <= 1 for each in waits.values())
    figure = ", ".join(f"{name}: {each}" for name, each in waits.items())
    return Finding(ok, f"{figure} (limits: 0 and free; else 1)", {name: each.reads for name, each in waits.items()})


def _convolutions(width: int = 512, depth: int = 8) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


def _prepared(bench: Bench, workers: int) -> tuple[Any, Any]:
    accelerator = bench.accelerator(workers_per_process=workers)
    model = _convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    return accelerator, accelerator.prepare(model, optimizer)[0]


_BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}  # Accelerate keeps one precision per process, so this needs its own


@check(
    "1",
    seconds=90,
    environment=_BF16,
    cuda_only="its aims are those of a GPU; `tasks/benchmark.py mixing` measures a CPU",
)
def mixing_is_cheap(bench: Bench) -> Finding:
    """Suspicion: mixing eight WRN-28-10 takes 2 % of a step or more, or moves fewer bytes than 0.8 of a plain copy."""
    bench.require_memory(16)
    case = "wrn-28-10 sgd 32"
    gossip = GossipConfig(log_every=0, workers_per_process=8)
    config = MixingBenchmarkConfig(cases=(case,), mixed_precision="bf16", steps=12, passes=30, gossip=gossip)
    found = measure(config, case, bench.device)
    share, of_copy = found.share[1], found.of_copy[1]
    ok = share <= config.most_of_step and of_copy >= config.least_of_copy
    values = {"share": share, "of_copy": of_copy, "step_seconds": found.step_seconds}
    figure = f"{100 * share:.2f} % of a step of {1e3 * found.step_seconds:.0f} ms (limit 2 %), "
    figure += f"{of_copy:.2f} of the {found.copy_bytes_per_second / 1e9:.0f} GB/s of a copy (limit 0.8)"
    return Finding(ok, figure, values)


@check("1", seconds=40, cuda_only="it counts copies between GPU and host")
def a_mix_copies_one_flag_to_the_host(bench: Bench) -> Finding:
    """Suspicion: mixing copies more to the host than one flag, or something to the GPU, or makes the host wait."""
    accelerator = _prepared(bench, 8)[0]
    mixer, repeats = accelerator.gossip_steps[0].mixer, 10
    mixer.add(mixer.consensus_update(0.5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            mixer.add(mixer.consensus_update(0.5))
        bench.synchronize()
    waits = HostWaits()
    with waits.watching(bench):
        mixer.add(mixer.consensus_update(0.5))
    events = [event for event in profile.key_averages() if event.device_type is torch.autograd.DeviceType.CUDA]
    if not events:
        raise NotHere("the profiler sees nothing of the GPU here; CUPTI may need more rights")
    on_device = {event.key: event.count / repeats for event in events}
    copies = {key: count for key, count in on_device.items() if key.startswith("Memcpy")}
    to_host = sum(count for key, count in copies.items() if "DtoH" in key)
    to_device = sum(count for key, count in copies.items() if "HtoD" in key)
    launches = sum(on_device.values()) - sum(copies.values())
    ok = to_host <= 1 and to_device == 0 and not waits.blocked
    figure = f"{to_host:g} copies to the host (limit 1), {to_device:g} to the GPU (limit 0), "
    figure += f"host {'BLOCKED' if waits.blocked else 'free'}, "
    figure += f"{launches:g} kernels for 8 workers"
    return Finding(ok, figure, {"to_host": to_host, "to_device": to_device, "kernels": launches})


@check("1", seconds=40, cuda_only=WAITS)
def radius_and_calibration_wait_rarely(bench: Bench) -> Finding:
    """Suspicion: measuring the radius waits per piece of each worker, calibrating BatchNorm per layer and batch."""
    accelerator, model = _prepared(bench, 8)
    batches = [torch.randn(16, 3, 16, 16, device=bench.device) for _ in range(4)]
    radius, calibration = HostWaits(), HostWaits()
    with radius.watching(bench):
        accelerator.measure_consensus()
    with calibration.watching(bench):
        calibrate_batch_norm(model.replicas[0], batches, bench.group)
    figure = f"radius of 8 workers: {radius.reads} reads (limit 1); "
    figure += f"8 layers on 4 batches: {calibration.reads} (limit 8)"
    values = {"radius": radius.reads, "calibration": calibration.reads}
    return Finding(radius.reads <= 1 and calibration.reads <= 8, figure, values)


@check("1", seconds=60, cuda_only="nothing is copied from a GPU")
def background_checkpoint_copies_fast(bench: Bench) -> Finding:
    """Suspicion: training stands still while a background checkpoint copies to pageable memory, tensor by tensor."""
    bench.require_memory(4)
    elements = 2**27
    accelerator = bench.accelerator()
    parameter = nn.Parameter(torch.zeros(elements, device=bench.device))
    accelerator.prepare(torch.optim.SGD([parameter], lr=0.1))
    pinned = torch.empty(elements, device="cpu", pin_memory=True)
    best = bench.seconds(lambda: pinned.copy_(parameter.detach(), non_blocking=True), repeats=3)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        accelerator.save_state(f"{folder}/state", wait=False)
        took = time.perf_counter() - started
        accelerator.finish_saving()
    limit = 2 * best + 0.1  # besides the copy, a manifest and small states
    size = parameter.nbytes / 1e9
    figure = f"{1e3 * took:.0f} ms for {size:.2f} GB (limit {1e3 * limit:.0f} ms), "
    figure += f"a pinned copy moves {size / best:.0f} GB/s"
    return Finding(took <= limit, figure, {"seconds": took, "pinned_seconds": best})


CHECKS: tuple[Check, ...] = (
    a_step_does_not_wait_for_the_gpu,
    mixing_is_cheap,
    a_mix_copies_one_flag_to_the_host,
    radius_and_calibration_wait_rarely,
    background_checkpoint_copies_fast,
)
