"""Part 2, cost: waits of the host, and exchanges beside computation, on two or more GPUs."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn

from dsgdac_accel import Mixer, build_topology
from tasks.gpu.bench import Bench, HostWaits
from tasks.gpu.check import Check, Finding, check
from tasks.gpu.host_cost import WAITS, WARM_UP


@check("2", seconds=60, cuda_only=WAITS)
def an_exchanging_step_does_not_wait_for_the_gpu(bench: Bench) -> Finding:
    """Suspicion: a step with an exchange makes the host wait for the GPU, in one of the formats of messages."""
    waits: dict[str, HostWaits] = {}
    for comm_dtype in ("full", "bf16", "int8"):
        accelerator = bench.accelerator(topology="ring", comm_dtype=comm_dtype)
        parameter = nn.Parameter(torch.zeros(2**20, device=bench.device))
        optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1, fused=True))
        waits[comm_dtype] = HostWaits()
        for step in range(WARM_UP + 5):
            parameter.grad = torch.full_like(parameter, float(bench.rank))
            with waits[comm_dtype].watching(bench) if step >= WARM_UP else contextlib.nullcontext():
                optimizer.step()
    ok = all(bench.everywhere(not any(each.reads or each.blocked for each in waits.values())))
    figure = ", ".join(f"{name}: {each}" for name, each in waits.items())
    return Finding(ok, f"{figure} (limits: 0 and free)", {name: each.reads for name, each in waits.items()})


def _pairs(bench: Bench, elements: int) -> tuple[Mixer, torch.Tensor]:
    values = nn.Parameter(torch.zeros(elements, device=bench.device))
    return Mixer(values, build_topology("one_peer_ring", bench.size), bench.group), values.detach()


@check("2", seconds=60, cuda_only="its aim is that of GPUs; `dsgdac doctor` measures links between CPUs")
def exchange_is_as_fast_as_one_message(bench: Bench) -> Finding:
    """Suspicion: an exchange is slower than one plain send and receive of the same bytes."""
    bench.require_memory(8)
    mixer, values = _pairs(bench, 2**28)
    received, peer = torch.empty_like(values), bench.rank ^ 1

    def exchange() -> None:
        mixer.start_exchange()
        mixer.discard_exchange()

    def plain() -> None:
        messages = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, values, peer)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    times = []
    for way in (exchange, plain):
        way()
        bench.meet()
        times.append(max(bench.everywhere(bench.seconds(way, repeats=10))))
    mixer.release()
    took, best = times
    figure = f"{values.nbytes / took / 1e9:.0f} of {values.nbytes / best / 1e9:.0f} GB/s (limit 0.9 of it)"
    return Finding(best > 0.9 * took, figure, {"seconds": took, "plain_seconds": best})


@check("2", seconds=60, cuda_only="NCCL's waiting kernels hold processors of the GPU")
def a_waiting_exchange_leaves_the_gpu_alone(bench: Bench) -> Finding:
    """Suspicion: an exchange that waits for a late neighbor slows computation by 5 % or more."""
    bench.require_memory(4)
    mixer, _ = _pairs(bench, 2**26)
    factors = torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16)

    def work() -> object:
        return factors @ factors

    work()
    alone = bench.seconds(work, repeats=40)
    bench.meet()
    time.sleep(bench.rank % 2)
    mixer.start_exchange()
    beside = bench.seconds(work, repeats=40)
    mixer.discard_exchange()
    mixer.release()
    slower = max(bench.everywhere(beside / alone if bench.rank % 2 == 0 else 1.0))
    return Finding(slower < 1.05, f"{slower:.3f} of the time without (limit 1.05)", {"ratio": slower})


CHECKS: tuple[Check, ...] = (
    an_exchanging_step_does_not_wait_for_the_gpu,
    exchange_is_as_fast_as_one_message,
    a_waiting_exchange_leaves_the_gpu_alone,
)
