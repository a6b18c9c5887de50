"""The processes of one worker, each with a shard of the model, and the reductions by which they decide together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsgdac_accel.distributed.shards import is_sharded, local_of
from dsgdac_accel.distributed.worker_mesh import WorkerMesh

T = TypeVar("T")


class Row:
    """The processes of this worker. A worker that is one process is a row of one, where every method is local.

    Every method that communicates is collective in the row, and gives all its processes the same bits.

    Args:
        group: the `WorkerGroup` of the processes; None for a worker that is one process.
        mesh: the mesh that they lie in.
    """

    def __init__(self, group: Any = None, mesh: WorkerMesh | None = None) -> None:
        self.group = group
        self.mesh = mesh

    @property
    def rank(self) -> int:
        """Rank of this process inside its worker."""
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        """Number of processes of this worker."""
        return 1 if self.group is None else self.group.size

    def mean(self, values: Tensor, what: str) -> Tensor:
        """Return the means of `values`, of any shape, over the row. `what` names the collective in errors.

        `values` may be on the CPU where a process has no elements: they travel from the device of the row, since all of
        its processes must take the same process group.
        """
        if self.size == 1:
            return values
        flat = values.to(self.group.device, copy=True).reshape(-1)
        return self.group.all_reduce_mean_(flat, what).view(values.shape)

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Return the sums of `values` over the row, like `mean`."""
        return values if self.size == 1 else self.mean(values, what).mul_(self.size)

    def max(self, values: Tensor, what: str) -> Tensor:
        """Return the maxima of `values`, of any shape, over the row, like `sum`. They may lose NaN."""
        if self.size == 1:
            return values
        return self.group.all_reduce_max_(values.to(self.group.device, copy=True), what)

    def norm(self, tensors: Iterable[Tensor], what: str) -> float:
        """Return the Euclidean norm of the worker's tensors, dense or sparse. This process has its shards of them."""
        own = math.hypot(*(float(local_of(tensor).to_dense().double().norm()) for tensor in tensors))
        return math.sqrt(float(self.sum(torch.tensor([own**2], dtype=torch.float64, device="cpu"), what)))

    def any(self, flag: bool, what: str) -> bool:
        """Return whether `flag` is True on some process of the row."""
        if self.size == 1:
            return flag
        return bool(self.group.all_reduce_max_(torch.tensor(float(flag), device="cpu"), what))

    def first(self, value: T | None, what: str) -> T | None:
        """Return the value of the first process of the row that has one, a small picklable object, or None."""
        return value if self.size == 1 else self.group.first(value, what)

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

    def is_own(self, parameter: Tensor) -> bool:
        """Return whether a parameter belongs to this process, and is not gathered by FSDP for a while."""
        return self.mesh is None or self.mesh.is_sharded(parameter)
