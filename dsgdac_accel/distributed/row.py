"""The processes of one worker, each with a shard of the model, and the reductions by which they decide together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dsgdac_accel.distributed.worker_mesh import WorkerMesh
from dsgdac_accel.shards import is_sharded, local_of

T = TypeVar("T")

_LARGEST_DIFFERENCE = 0.02
"""Largest difference of the gradients of copies, relative to their norm. Summation order and bf16 cause less."""


class Row:
    """The processes of this worker. A worker that is one process is a row of one, where every method is local.

    Every method that communicates is collective in the row, and gives all its processes the same bits.

    Args:
        group: the `WorkerGroup` of the processes; None for a worker that is one process.
        mesh: the mesh that they lie in.
        copies: the `WorkerGroup` of the processes along `tp`, which hold the same values of some parameters; None
            without tensor parallelism.
    """

    def __init__(self, group: Any = None, mesh: WorkerMesh | None = None, copies: Any = None) -> None:
        self.group = group
        self.mesh = mesh
        self.copies = copies

    @property
    def rank(self) -> int:
        """Rank of this process inside its worker."""
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        """Number of processes of this worker."""
        return 1 if self.group is None else self.group.size

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Return the sums of `values`, of any shape, over the row. `what` names the collective in errors.

        `values` may be on the CPU where a process has no elements: they travel from the device of the row, since all of
        its processes must take the same process group.
        """
        if self.group is None or self.size == 1:
            return values
        flat = values.to(self.group.device, copy=True).reshape(-1)
        return self.group.all_reduce_mean_(flat, what).mul_(self.size).view(values.shape)

    def max(self, values: Tensor, what: str) -> Tensor:
        """Return the maxima of `values`, of any shape, over the row, like `sum`. They may lose NaN."""
        if self.group is None or self.size == 1:
            return values
        return self.group.all_reduce_max_(values.to(self.group.device, copy=True), what)

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

    def require_parallelized(self, models: Iterable[nn.Module]) -> None:
        """Raise ValueError if layers of the models should be split over `tp`, but none is."""
        if self.mesh is not None:
            self.mesh.require_parallelized(models)

    def close(self) -> None:
        """Refuse further use."""
        for group in (self.group, self.copies):
            if group is not None:
                group.close()

    # ---- parameters of which all processes along `tp` have a copy

    def is_copied(self, parameter: Tensor) -> bool:
        """Return whether the processes along `tp` hold the same elements of a parameter."""
        return self.mesh is not None and self.mesh.is_copied(parameter)

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this process counts its elements of a parameter in sums over the worker: the first copy."""
        return self.copies is None or self.copies.rank == 0 or not self.is_copied(parameter)

    def equalize_(self, tensor: Tensor, parameter: Tensor, what: str) -> None:
        """Overwrite `tensor`, this process's part of a copied parameter, by the first copy."""
        if self.copies is not None and self.is_copied(parameter):
            self.copies.broadcast_(tensor, what)

    @torch.no_grad()
    def unequal_gradients(self, named: Sequence[tuple[str, Parameter]], what: str) -> str | None:
        """Return a message if copies of a parameter have different gradients, and so would part, or None.

        Collective along `tp`; only the processes of that line get the message.

        Args:
            named: trained parameters with their names.
            what: names the collective in errors.
        """
        if self.copies is None:  # there are no copies
            return None
        gradients = [(name, p.grad) for name, p in named if p.grad is not None and self.is_copied(p)]
        mine = {name: _figures(gradient) for name, gradient in gradients}
        everyone = self.copies.all_gather_object(mine, what)
        for rank, theirs in enumerate(everyone):
            for name in sorted(theirs.keys() | everyone[0].keys()):
                (norm, total), (first_norm, first_total) = theirs.get(name, (0, 0)), everyone[0].get(name, (0, 0))
                largest = _LARGEST_DIFFERENCE * max(norm, first_norm)
                if abs(norm - first_norm) > largest or abs(total - first_total) > largest:
                    who = self.copies.members
                    return (
                        f"{name} has different gradients on {who.named([0])} and {who.named([rank])}, which hold "
                        f"copies of it for tensor parallelism. Add its layer to the plan of parallelize_module, such "
                        f"as SequenceParallel() between sharded activations."
                    )
        return None


def _figures(gradient: Tensor) -> tuple[float, float]:
    """Return the norm of a gradient, and its sum. Both have errors of about eps times the norm."""
    values = local_of(gradient).double()
    return float(values.norm()), float(values.sum())
