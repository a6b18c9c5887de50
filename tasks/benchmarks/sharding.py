"""Workers of several processes, which shard the benchmark's model by FSDP2."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


@cache
def mesh_of(device_type: str, shards: int) -> DeviceMesh:
    """Return the mesh of all processes, of which each `shards` in a row are a worker. Collective at the first call."""
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(device_type, (dist.get_world_size() // shards, shards), mesh_dim_names=names)


def shard_model(model: nn.Module, mesh: DeviceMesh, *, replicated: bool) -> None:
    """Shard a model as one FSDP2 module, which gathers and reduces once a step: on the CPU nothing else overlaps.

    Args:
        model: the model.
        mesh: that of `mesh_of`.
        replicated: whether FSDP2 averages the gradients of all workers (HSDP).
    """
    fully_shard(model, mesh=mesh if replicated else mesh["dp_shard"])
