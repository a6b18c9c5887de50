"""A device mesh in which each worker is a row of processes, and gossip runs along the columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from dsgdac_accel.distributed.lines import Line
from dsgdac_accel.distributed.transport import NCCL_LATER
from dsgdac_accel.shards import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GOSSIP = "dp_replicate"
"""The mesh dimension along which workers gossip."""
SHARDS = "dp_shard"
"""The mesh dimension over which a worker shards its model, and its batch."""
TENSOR = "tp"
"""The mesh dimension over which a worker splits its layers (tensor parallelism). Its processes read the same batch."""


class WorkerMesh:
    """The processes of a device mesh as workers.

    Args:
        mesh: with the dimension `dp_replicate` (the workers), and inside a worker `dp_shard`, `tp` or both.

    Raises:
        TypeError: it is no DeviceMesh.
        ValueError: a dimension is missing or has no place in a worker, or the mesh does not have all processes.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        _refuse(mesh)
        self.device_mesh = mesh
        names = list(mesh.mesh_dim_names or ())
        present = [name for name in (GOSSIP, SHARDS, TENSOR) if name in names]
        sizes = [mesh.size(names.index(name)) if name in names else 1 for name in (GOSSIP, SHARDS, TENSOR)]
        cube = mesh.mesh.permute([names.index(name) for name in present]).reshape(sizes)  # [worker, shard, tp]
        workers, self._shards, self.tensor_size = sizes
        self.rows: list[list[int]] = cube.reshape(workers, -1).tolist()
        """The launched ranks of each worker."""
        self.columns: list[list[int]] = cube.reshape(workers, -1).T.tolist()
        for line in [*self.rows, *self.columns]:
            if line != sorted(line):  # torch's groups have ascending ranks, and FSDP2 places shards in that order
                raise ValueError(
                    f"the ranks of device_mesh must ascend along each dimension; got {line}. Make the mesh by "
                    f"init_device_mesh."
                )
        me = dist.get_rank()
        self.everyone = Line.through(me, [sorted(cube.flatten().tolist())], "rank")
        self.column = Line.through(me, self.columns, "worker")
        self.row = Line.through(me, self.rows, "rank")
        self.tensor = Line.through(me, cube.reshape(-1, self.tensor_size).tolist(), "rank")
        """The processes that split the layers, and read the same batch."""
        self._shard_of = {rank: place // self.tensor_size for place, rank in enumerate(self.row.ranks)}
        self._inner = [mesh[name] for name in present[1:]]
        self._holders: dict[tuple, set[int]] = {}
        _refuse_scattered(self.tensor.parallel)
        self.inside = {name: mesh[name].size() for name in names if name != GOSSIP}
        """Sizes of the dimensions of the mesh inside a worker, by name."""

    def limit(self, timeout: float) -> None:
        """Let collectives inside a worker give up after `timeout` seconds; by default they wait for half an hour.

        With NCCL that is later than the library's own waits, which name the lost process.
        """
        later = NCCL_LATER if self.device_mesh.device_type == "cuda" else timedelta()
        for dimension in self._inner:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout) + later, dimension.get_group())

    def is_sharded(self, parameter: Tensor) -> bool:
        """Return whether a parameter is sharded over the whole `dp_shard`, each of its elements once."""
        if not is_sharded(parameter):
            return self._shards == 1
        holders = self.holders(parameter)
        per_shard = len(holders) / self._shards
        return {self._shard_of.get(rank) for rank in holders} == set(range(self._shards)) and per_shard in (
            1,
            self.tensor_size,
        )

    def require_sharded(self, parameter: Tensor, name: str) -> None:
        """Raise ValueError unless the worker holds a trained parameter sharded over `dp_shard`, each element once.

        Only then is the worker's gradient of it the mean over `dp_shard`. Over `tp` it may be sharded or copied.
        """
        if self.is_sharded(parameter):
            return
        own = self.row.ranks
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
                f"Shard over mesh['{SHARDS}'] or mesh['{TENSOR}'], without '{GOSSIP}'."
            )
        way = f"fully_shard(model, mesh=mesh['{SHARDS}'])" if self._shards > 1 else f"mesh['{TENSOR}'] in the plan"
        raise ValueError(
            f"{name} is placed as {sharded.placements} on {len(ranks)} of the {len(own)} processes of a worker. "
            f"Shard it over whole dimensions of the mesh: {way}."
        )

    def is_copied(self, parameter: Tensor) -> bool:
        """Return whether all processes along `tp` hold the same elements of a parameter."""
        if self.tensor_size == 1:
            return False
        return not is_sharded(parameter) or not set(self.tensor.ranks) <= self.holders(parameter)

    def holders(self, sharded: Any) -> set[int]:
        """Return the launched ranks that together hold each element of a DTensor once, this process among them.

        There are none if its mesh has processes of several workers.
        """
        mesh, placements = sharded.device_mesh, sharded.placements
        if (mesh, placements) not in self._holders and not set(mesh.mesh.flatten().tolist()) <= set(self.row.ranks):
            self._holders[mesh, placements] = set()
        if (mesh, placements) not in self._holders:
            places = zip(mesh.get_coordinate(), placements, strict=True)
            index = tuple(place if placement.is_replicate() else slice(None) for place, placement in places)
            self._holders[mesh, placements] = set(mesh.mesh[index].flatten().tolist())
        return self._holders[mesh, placements]

    def require_parallelized(self, models: Iterable[nn.Module]) -> None:
        """Raise ValueError if the mesh has `tp`, but no parameter of the models is sharded over it."""
        if self.tensor_size > 1 and all(self.is_copied(p) for model in models for p in model.parameters()):
            raise ValueError(
                f"the mesh has '{TENSOR}' of size {self.tensor_size}, but no parameter is sharded over it. Call "
                f"parallelize_module(model, mesh['{TENSOR}'], plan) before the optimizer is made, or leave '{TENSOR}' "
                f"out of the mesh."
            )


def _refuse(mesh: Any) -> None:
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            f"device_mesh must be a DeviceMesh; got {type(mesh).__name__}. Write init_device_mesh('cpu', (workers, "
            f"shards), mesh_dim_names=('{GOSSIP}', '{SHARDS}'))."
        )
    names = tuple(mesh.mesh_dim_names or ())
    inner = {*names} - {GOSSIP}
    if GOSSIP not in names or not inner or not inner <= {SHARDS, TENSOR}:
        raise ValueError(
            f"device_mesh must have the dimensions '{GOSSIP}' (the workers), and '{SHARDS}' (the shards of each), "
            f"'{TENSOR}' (tensor parallelism) or both; got {names or 'no names'}. Write mesh_dim_names=('{GOSSIP}', "
            f"'{SHARDS}'); pipeline and context parallelism are not supported."
        )
    if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(
            f"device_mesh has {mesh.mesh.numel()} processes, but {dist.get_world_size()} were launched. Make it of all."
        )
    if mesh.device_type != "cpu" and mesh.device_type != "cuda":
        raise ValueError(f"device_mesh must be of 'cpu' or 'cuda'; got {mesh.device_type!r}.")


def _refuse_scattered(groups: Iterable[Sequence[int]]) -> None:
    """Refuse `tp` groups whose ranks do not follow each other: loaders deal a batch to each run of `tp` ranks."""
    for ranks in groups:
        if list(ranks) != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % len(ranks):
            raise ValueError(
                f"the ranks along '{TENSOR}' must follow each other; got {ranks}. Put '{TENSOR}' last in "
                f"mesh_dim_names."
            )
