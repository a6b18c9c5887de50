"""A device mesh in which each worker is a row of processes, and gossip runs along the columns."""

from __future__ import annotations

import math
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.distributed.lines import Line
from dsgdac_accel.shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GOSSIP = "dp_replicate"
"""The mesh dimension along which workers gossip."""
SHARDS = "dp_shard"
"""The mesh dimension over which a worker shards its model, and its batch."""


class WorkerMesh:
    """The processes of a device mesh as workers.

    Args:
        mesh: with the dimensions `dp_replicate` (the workers) and `dp_shard` (the shards of each worker).

    Raises:
        TypeError: it is no DeviceMesh.
        ValueError: a dimension is missing or has no place in a worker, or the mesh does not have all processes.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        _refuse(mesh)
        names = list(mesh.mesh_dim_names or ())
        place = names.index(GOSSIP)
        table = mesh.mesh.movedim(place, 0).reshape(mesh.mesh.shape[place], -1)
        self.rows: list[list[int]] = table.tolist()
        """The launched ranks of each worker."""
        self.columns: list[list[int]] = table.T.tolist()
        me = dist.get_rank()
        self.everyone = Line.through(me, [sorted(chain.from_iterable(self.rows))], "rank")
        self.column = Line.through(me, self.columns, "worker")
        self.row = Line.through(me, self.rows, "rank")
        self._shards = mesh[SHARDS]
        self.inside = {name: mesh[name].size() for name in names if name != GOSSIP}
        """Sizes of the dimensions of the mesh inside a worker, by name."""

    def limit(self, timeout: float) -> None:
        """Let FSDP's collectives give up after `timeout` seconds; by default they wait for half an hour."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), self._shards.get_group())

    def require_sharded(self, parameter: Tensor, name: str) -> None:
        """Raise ValueError unless the processes of the worker hold a trained parameter in shards, each element once.

        Only then is the worker's gradient of it the mean over its processes.
        """
        own = self.row.ranks
        if not is_sharded(parameter):
            if len(own) == 1:
                return
            raise ValueError(
                f"{name} is trained but not sharded, so the processes of a worker would train it apart. Call "
                f"fully_shard(model, mesh=mesh['{SHARDS}']) on the whole model before the optimizer is made."
            )
        sharded: Any = parameter
        ranks = sharded.device_mesh.mesh.flatten().tolist()
        if not set(ranks) <= set(own):
            raise ValueError(
                f"{name} is sharded over a mesh with several workers, over which FSDP would average the gradients. "
                f"Shard over mesh['{SHARDS}'], without '{GOSSIP}'."
            )
        sizes = [
            size
            for size, placement in zip(sharded.device_mesh.shape, sharded.placements, strict=True)
            if placement.is_shard()
        ]
        if math.prod(sizes) != len(own):
            raise ValueError(
                f"{name} is placed as {sharded.placements} on {len(ranks)} of the {len(own)} processes of a worker. "
                f"Shard it over all of them: fully_shard(model, mesh=mesh['{SHARDS}'])."
            )


def _refuse(mesh: Any) -> None:
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            f"device_mesh must be a DeviceMesh; got {type(mesh).__name__}. Write init_device_mesh('cpu', (workers, "
            f"shards), mesh_dim_names=('{GOSSIP}', '{SHARDS}'))."
        )
    names = tuple(mesh.mesh_dim_names or ())
    if set(names) != {GOSSIP, SHARDS}:
        raise ValueError(
            f"device_mesh must have the dimensions '{GOSSIP}' (the workers) and '{SHARDS}' (the shards of each); got "
            f"{names or 'no names'}. Write mesh_dim_names=('{GOSSIP}', '{SHARDS}'); pipeline, context and tensor "
            f"parallelism are not supported."
        )
    if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(
            f"device_mesh has {mesh.mesh.numel()} processes, but {dist.get_world_size()} were launched. Make it of all."
        )
    if mesh.device_type != "cpu" and mesh.device_type != "cuda":
        raise ValueError(f"device_mesh must be of 'cpu' or 'cuda'; got {mesh.device_type!r}.")
