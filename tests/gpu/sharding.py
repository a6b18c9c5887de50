"""The small training of workers whose model FSDP2 shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.gpu.algorithm import OPTIMIZERS, SCHEDULE, Training, make_model, make_scheduler
from tests.gpu.machine import TIMEOUT, Here


def prepared_with_shards(here: Here, optimizer: str, shards: int) -> Training:
    """Prepare it with workers of so many processes. Collective over all processes."""
    shape, names = (here.size // shards, shards), ("dp_replicate", "dp_shard")
    mesh = init_device_mesh(here.device.type, shape, mesh_dim_names=names)
    config = GossipConfig(**SCHEDULE, log_every=0, timeout=TIMEOUT)
    accelerator = GossipAccelerator(cpu=not here.cuda, device_mesh=mesh, gossip=config)
    model = make_model().to(here.device)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    made = OPTIMIZERS[optimizer](model.parameters(), fused=optimizer != "sgd")  # fused SGD takes no DTensors
    return Training(here, accelerator, *accelerator.prepare(model, made, make_scheduler(made)))


def whole_parameters(training: Training) -> Tensor:
    """All parameters of this worker, (D,) float64 on the CPU; then free the training. Collective over the worker."""
    parts = [parameter.full_tensor() for parameter in training.model.parameters()]
    found = torch.cat([part.detach().double().cpu().flatten() for part in parts])
    training.accelerator.free_memory()
    return found
