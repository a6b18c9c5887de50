"""Right results of workers whose model is split: part 1 in a mesh of one process, part 2 in meshes of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dsgdac_accel import GossipAccelerator, GossipConfig
from tasks.gpu.algorithm import OPTIMIZERS, SCHEDULE, Training, difference_found, make_model, make_scheduler, simulated
from tasks.gpu.bench import TIMEOUT, Bench
from tasks.gpu.check import Check, Finding, check


@check("1", seconds=60)
def a_sharded_worker_trains_like_a_whole_one(bench: Bench) -> Finding:
    """Suspicion: on a GPU, fused Adam does not take DTensors, or FSDP2 computes with parameters of an earlier step.

    One process is a worker: nothing is sent between shards or workers here.
    """
    worst = 0.0
    with _process_group():
        for optimizer in OPTIMIZERS:
            training = _prepared(bench, optimizer).run()
            state = training.accelerator.get_state_dict(training.model)
            training.accelerator.free_memory()
            found = torch.cat([values.double().flatten() for values in state.values()])
            worst = max(worst, float((found - simulated(1, "one_peer_ring", optimizer)[0]).abs().max()))
    return difference_found(bench, worst)


@check("2", seconds=60)
def sharded_workers_follow_algorithm_1(bench: Bench) -> Finding:
    """Suspicion: the communicators of FSDP2 and of the exchange deadlock, or a shard meets another one's neighbor."""
    size, worst = bench.group.size, 0.0
    for shards in (1, 2):
        workers = size // shards
        for optimizer in OPTIMIZERS:
            training = _prepared(bench, optimizer, workers, shards).run(delays=0.02)
            parts = [parameter.full_tensor() for parameter in training.model.parameters()]
            found = torch.cat([part.detach().double().cpu().flatten() for part in parts])
            training.accelerator.free_memory()
            expected = simulated(workers, "one_peer_ring", optimizer, shards=shards)[bench.rank // shards]
            worst = max(worst, *bench.everywhere(float((found - expected).abs().max())))
    return difference_found(bench, worst)


def _prepared(bench: Bench, optimizer: str, workers: int = 1, shards: int = 1) -> Training:
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh(bench.device.type, (workers, shards, 1), mesh_dim_names=names)
    config = GossipConfig(**SCHEDULE, log_every=0, timeout=TIMEOUT)
    accelerator = GossipAccelerator(cpu=not bench.cuda, device_mesh=mesh, gossip=config)
    model = make_model().to(bench.device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in filter(_has_parameters, model.children()):
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    made = OPTIMIZERS[optimizer](model.parameters(), fused=optimizer != "sgd")  # fused SGD takes no DTensors
    return Training(bench, accelerator, *accelerator.prepare(model, made, make_scheduler(made)))


def _has_parameters(module: nn.Module) -> bool:
    """Return whether there is something to shard."""
    return next(module.parameters(), None) is not None


@contextmanager
def _process_group() -> Iterator[None]:
    """Inside, there is a default process group, of this process if it was not launched in one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


CHECKS: tuple[Check, ...] = (a_sharded_worker_trains_like_a_whole_one, sharded_workers_follow_algorithm_1)
