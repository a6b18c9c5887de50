"""A device mesh in which each worker is a row of processes, and gossip runs along the columns."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.devices import BACKENDS
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.shards import is_sharded, refuse_other_dimensions
from dsgdac_accel.distributed.transport import limit_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GOSSIP = "dp_replicate"
"""The mesh dimension along which workers gossip."""
SHARDS = "dp_shard"
"""The mesh dimension over which a worker shards its model, and its batch."""


class WorkerMesh:
    """The processes of a device mesh as workers.

    Args:
        mesh: with the dimensions `dp_replicate` (the workers) and `dp_shard` (the shards of each).

    Raises:
        TypeError: it is no DeviceMesh.
        ValueError: a dimension is missing or unknown, or the mesh does not have all processes.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        _refuse(mesh)
        self.device_mesh = mesh
        ranks = mesh.mesh if mesh.mesh_dim_names == (GOSSIP, SHARDS) else mesh.mesh.T  # [worker, shard]
        self.rows: list[list[int]] = ranks.tolist()
        """The launched ranks of each worker."""
        columns: list[list[int]] = ranks.T.tolist()
        for line in [*self.rows, *columns]:
            if line != sorted(line):  # torch's groups have ascending ranks, and FSDP2 places shards in that order
                raise ValueError(
                    f"the ranks of device_mesh must ascend along each dimension; got {line}. Make the mesh by "
                    f"init_device_mesh."
                )
        me = dist.get_rank()
        self.everyone = Members.in_line(me, [sorted(ranks.flatten().tolist())], "rank")
        self.column = Members.in_line(me, columns, "worker")
        self.row = Members.in_line(me, self.rows, "rank")
        self._whole: dict[tuple, bool] = {}

    def limit(self, timeout: float) -> None:
        """Let collectives inside a worker give up after `timeout` seconds; by default they wait for half an hour."""
        backend = BACKENDS[self.device_mesh.device_type]
        limit_group(self.device_mesh[SHARDS].get_group(), backend, timedelta(seconds=timeout))

    def is_sharded(self, parameter: Any) -> bool:
        """Return whether a parameter is sharded over all processes of the worker, each of its elements once."""
        if not is_sharded(parameter):
            return len(self.row.launched) == 1
        mesh, placements = parameter.device_mesh, parameter.placements
        if (mesh, placements) not in self._whole:
            copied = len(self.row.launched) > 1 and any(placement.is_replicate() for placement in placements)
            self._whole[mesh, placements] = not copied and sorted(mesh.mesh.flatten().tolist()) == self.row.launched
        return self._whole[mesh, placements]

    def require_sharded(self, parameter: Tensor, name: str) -> None:
        """Raise ValueError unless the worker holds a trained parameter sharded over `dp_shard`, each element once.

        Only then is the worker's gradient of it the mean over `dp_shard`.
        """
        if self.is_sharded(parameter):
            return
        own = self.row.launched
        if not is_sharded(parameter):
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
        raise ValueError(
            f"{name} is placed as {sharded.placements} on {len(ranks)} of the {len(own)} processes of a worker. "
            f"Shard it over the whole dimension: fully_shard(model, mesh=mesh['{SHARDS}'])."
        )


def _refuse(mesh: Any) -> None:
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            f"device_mesh must be a DeviceMesh; got {type(mesh).__name__}. Write init_device_mesh('cpu', (workers, "
            f"shards), mesh_dim_names=('{GOSSIP}', '{SHARDS}'))."
        )
    names = tuple(mesh.mesh_dim_names or ())
    if {*names} != {GOSSIP, SHARDS}:
        refuse_other_dimensions(dict(zip(names, mesh.shape, strict=True)) if GOSSIP in names else {}, "device_mesh")
        raise ValueError(
            f"device_mesh must have the dimensions '{GOSSIP}' (the workers) and '{SHARDS}' (the shards of each), and "
            f"no other; got {names or 'no names'}. Write mesh_dim_names=('{GOSSIP}', '{SHARDS}')."
        )
    if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(
            f"device_mesh has {mesh.mesh.numel()} processes, but {dist.get_world_size()} were launched. Make it of all."
        )
    if mesh.device_type not in BACKENDS:
        raise ValueError(f"device_mesh must be of 'cpu' or 'cuda'; got {mesh.device_type!r}.")
