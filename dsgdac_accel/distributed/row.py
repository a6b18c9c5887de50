"""The processes of one worker, each with a shard of the model: what a whole worker decides is decided here first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.distributed.worker_mesh import WorkerMesh
from dsgdac_accel.shards import is_sharded


class Row:
    """The processes of this worker. A worker that is one process is a row of one, where every method is local.

    Every method is collective in the row, and gives all its processes the same bits.

    Args:
        ranks: the `WorkerGroup` of the processes; None for a worker that is one process.
        mesh: the mesh that they lie in.
    """

    def __init__(self, ranks: Any = None, mesh: WorkerMesh | None = None) -> None:
        self.ranks = ranks
        self.mesh = mesh

    @property
    def rank(self) -> int:
        """Place of this process in its worker."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def size(self) -> int:
        """Number of processes of this worker."""
        return 1 if self.ranks is None else self.ranks.size

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Return the sums of `values`, of any shape, over the row. `what` names the collective in errors."""
        if self.ranks is None or self.size == 1:
            return values
        flat = values.reshape(-1).clone()
        return self.ranks.all_reduce_mean_(flat, what).mul_(self.size).view(values.shape)

    def max(self, values: Tensor, what: str) -> Tensor:
        """Return the maxima of `values`, of any shape, over the row."""
        return values if self.ranks is None else self.ranks.all_reduce_max_(values.clone(), what)

    def any(self, flag: bool, what: str) -> bool:
        """Return whether `flag` is True on some process of the row."""
        if self.size == 1:
            return flag
        return bool(self.max(torch.tensor(float(flag), device="cpu"), what))

    def require_own(self, parameter: Tensor, name: str) -> None:
        """Raise ValueError unless this worker holds a trained parameter by itself, whole or in shards."""
        if self.mesh is not None:
            self.mesh.require_sharded(parameter, name)
        elif is_sharded(parameter):
            raise ValueError(
                f"{name} is a DTensor, a shard of a parameter. Tell which processes are a worker: "
                f"GossipAccelerator(device_mesh=init_device_mesh('cpu', (workers, shards), "
                f"mesh_dim_names=('dp_replicate', 'dp_shard')))."
            )

    def close(self) -> None:
        """Refuse further use."""
        if self.ranks is not None:
            self.ranks.close()
