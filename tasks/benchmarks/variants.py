"""Variants of a training step: the same model, batch and optimizer kernel with different communication."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel import WorkerGroup
from dsgdac_accel.core.model_watch import ModelWatch
from dsgdac_accel.core.step import GossipStep
from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.models import Workload, build_workload
from tasks.benchmarks.names import VariantName
from tasks.benchmarks.sharding import mesh_of, shard_model
from tasks.benchmarks.traffic import Traffic

DECENT_DP = "0.2.3"
"""Version of decent-dp to compare with."""


@dataclass
class Variant:
    """One way to take a step."""

    workload: Workload
    step: Callable[[], None]
    state: Callable[[], Iterator[Tensor]]
    """Yields the tensors of its optimizer's state."""
    fill_gradients: Callable[[], None] = lambda: None
    """Computes gradients without a step, to measure memory."""
    settle: Callable[[], None] = lambda: None
    """Waits for communication in flight, so that it does not affect the next variant."""
    waited: Callable[[], float | None] = lambda: None
    """Seconds that the last step waited for other workers; None if unknown."""
    bytes_sent: Callable[[], float] = lambda: 0.0
    """Bytes that this process sent to other workers for its last step, without headers of the network."""


class LeftOut(Exception):
    """A variant cannot be measured here; the message says why."""


def build_variant(text: str, config: BenchmarkConfig, group: WorkerGroup) -> Variant:
    """Build a new model, optimizer and step function. Collective.

    Raises LeftOut for a variant that needs what is missing here, ValueError for an impossible one.
    """
    name = VariantName.parse(text)
    workload = build_workload(
        config.model,
        batch_size=config.batch_size,
        image_size=config.image_size,
        device=group.device,
        seed=group.everyone.rank,
    )
    for parameter in workload.model.parameters():
        group.everyone.broadcast_(parameter, "starting the benchmark")
    if config.shards > 1:
        shard_model(workload.model, mesh_of(group.device.type, config.shards), replicated=name.kind == "hsdp")
    if name.kind == "decent_dp":
        return _decent_dp(name, workload, config, group)
    if name.kind == "gossip":
        return _gossip(name, workload, config, group)
    return _synchronous(name, workload, config, group)


def all_reduced_bytes(workers: int, size: float) -> float:
    """Bytes that each worker sends to sum `size` bytes over all by a ring, the least possible.

    >>> all_reduced_bytes(4, 4e6)
    6000000.0
    """
    return 2 * (workers - 1) * size / workers


def make_optimizer(parameters: Any, kernel: str) -> torch.optim.Optimizer:
    """SGD as in the image task, with a small learning rate."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4, **{kernel: True})


def _tensors_of(*optimizers: torch.optim.Optimizer) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _synchronous(name: VariantName, workload: Workload, config: BenchmarkConfig, group: WorkerGroup) -> Variant:
    model: nn.Module = workload.model
    bytes_sent = 0.0
    if name.kind == "ddp" and group.size > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        size = 4.0 * sum(parameter.numel() for parameter in model.parameters())
        if "bf16" in name.options:
            wrapped.register_comm_hook(None, average_in_bf16)
            size /= 2
        bytes_sent = all_reduced_bytes(group.size, size)
        model = wrapped
    if name.kind == "hsdp":
        size = 4.0 * sum(parameter.numel() for parameter in model.parameters()) / config.shards
        bytes_sent = all_reduced_bytes(group.size, size)
    optimizer = make_optimizer(workload.model.parameters(), config.kernel)

    def step() -> None:
        workload.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    variant = Variant(
        workload,
        step,
        lambda: _tensors_of(optimizer),
        fill_gradients=lambda: workload.loss(model).backward(),
        bytes_sent=lambda: bytes_sent,
    )
    return _beside_traffic(variant, optimizer, config, group) if "bytes" in name.options else variant


def _beside_traffic(
    variant: Variant, optimizer: torch.optim.Optimizer, config: BenchmarkConfig, group: WorkerGroup
) -> Variant:
    """Exchange as many bytes as gossip behind each step, from one optimizer step to the next."""
    if group.size == 1:
        raise LeftOut("it needs several workers")
    traffic = Traffic(variant.workload.model.parameters(), config.gossip, group)
    optimizer.register_step_pre_hook(lambda *_: traffic.wait())
    optimizer.register_step_post_hook(lambda *_: traffic.post())
    return replace(
        variant,
        settle=traffic.wait,
        waited=lambda: traffic.waited_seconds,
        bytes_sent=lambda: traffic.bytes_sent,
    )


def average_in_bf16(state, bucket):  # without annotations, since DDP refuses string annotations
    """Communication hook of DDP that averages gradients in bf16; torch's own hook refuses gloo."""
    gradients = bucket.buffer()
    rounded = gradients.div(dist.get_world_size()).to(torch.bfloat16)
    work = dist.all_reduce(rounded, async_op=True)
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def _gossip(name: VariantName, workload: Workload, config: BenchmarkConfig, group: WorkerGroup) -> Variant:
    optimizer = make_optimizer(workload.model.parameters(), config.kernel)
    settings = name.settings(config.gossip)
    watch = ModelWatch([workload.model]) if config.shards > 1 else None  # drops the parameters that FSDP2 gathered
    gossip = GossipStep(optimizer, group, settings, watch)

    def step() -> None:
        workload.loss(workload.model).backward()
        gossip.step()
        optimizer.zero_grad()

    return Variant(
        workload,
        step,
        lambda: _tensors_of(optimizer),
        fill_gradients=lambda: workload.loss(workload.model).backward(),
        settle=gossip.mixer.drain,
        waited=lambda: gossip.mixer.metrics()["wait_seconds"],
        bytes_sent=lambda: gossip.mixer.metrics()["bytes_sent"],
    )


def _decent_dp(name: VariantName, workload: Workload, config: BenchmarkConfig, group: WorkerGroup) -> Variant:
    topology = name.topology or "ring"
    wrapper = _decent_dp_class()
    if group.size == 1:
        raise LeftOut("it needs several workers")
    if topology == "ring" and group.size % 2:
        raise LeftOut(f"its ring needs an even number of workers, not {group.size}")
    if topology == "one-peer-exp" and group.size & (group.size - 1):
        raise LeftOut(f"its one-peer-exp needs a power of two of workers, not {group.size}")
    model = wrapper(
        workload.model,
        lambda named: make_optimizer([parameter for _, parameter in named], config.kernel),
        topology=topology,
        bucket_size_in_mb=2**20,  # one bucket, its best setting here
        _local_world_size=1,
    )
    size = 4.0 * sum(parameter.numel() for parameter in workload.model.parameters())
    bytes_sent = all_reduced_bytes(group.size if topology == "complete" else 2, size)

    def step() -> None:
        workload.loss(model).backward()  # steps the optimizer and mixes, too

    def settle() -> None:
        for work in model._comm_ops:
            if work is not None:
                work.wait()

    return Variant(workload, step, lambda: _tensors_of(*model._optims), settle=settle, bytes_sent=lambda: bytes_sent)


def _decent_dp_class() -> Any:
    advice = f"To compare with it: pip install decent-dp=={DECENT_DP}"
    try:
        module = importlib.import_module("decent_dp.ddp")
        importlib.import_module("loguru").logger.disable("decent_dp")
    except ImportError as error:
        raise LeftOut(f"it is not installed ({error}). {advice}") from None
    found = importlib.metadata.version("decent-dp")
    if found != DECENT_DP:
        logging.getLogger(__name__).warning("decent-dp is version %s; results are known for %s", found, DECENT_DP)
    return module.DecentralizedDataParallel


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
