"""How far the workers are apart, and their average in place of a worker's own parameters for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import FlatParameters
from dsgdac_accel.distributed.group import WorkerGroup


@dataclass(frozen=True)
class Consensus:
    """How far the workers are apart: Delta has the rows x_i - x_bar, each distinct value counted once."""

    radius: float
    """mean_i ||x_i - x_bar||."""
    frobenius: float
    """||Delta||_F = sqrt(sum_i ||x_i - x_bar||^2)."""
    step: int
    """Mixes done when it was measured."""


class KnowsAverage:
    """Mixed into `Mixer`: reductions of the size of the model over all workers."""

    group: WorkerGroup
    num_workers: int
    per_process: int
    comm_dtype: str
    step: int
    flats: list[FlatParameters]
    exchange: Any
    last_consensus: Consensus | None
    _arrived: bool
    _borrowed: bool
    _backup: list[list[Tensor]]
    drain: Callable[[], None]
    settle_arrivals: Callable[[], None]
    _follow_changes: Callable[[], None]
    _refuse_while_borrowed: Callable[[], None]

    @torch.no_grad()
    def measure_consensus(self) -> Consensus:
        """Exact consensus error by a reduction of the size of the model. Collective.

        Uses no memory of its own between `apply` and `start`, where parameters are exchanged as they are; otherwise,
        for a moment, a copy of them.
        """
        if self.num_workers == 1:
            return self._consensus_from([0.0])
        self._refuse_while_borrowed()
        self.drain()
        squared = [0.0] * self.per_process
        for number, scratch in enumerate(self._room()[0]):
            xs = [flat.buffers[number].data for flat in self.flats]
            mean = xs[0].clone() if self._arrived else scratch.copy_(xs[0])
            self.group.all_reduce_mean_(mean, f"measuring the consensus radius at step {self.step}", others=xs[1:])
            for here, x in enumerate(xs):
                squared[here] += _squared_distance(mean, x)
        return self._consensus_from(squared)

    def _consensus_from(self, squared_distances: list[float]) -> Consensus:
        shares = self.group.all_gather_object(squared_distances, f"measuring the consensus radius at step {self.step}")
        squares = [square for share in shares for square in share]
        radius = sum(square**0.5 for square in squares) / len(squares)
        measured = self.last_consensus = Consensus(radius, sum(squares) ** 0.5, self.step)
        return measured

    @torch.no_grad()
    def swap_in_average(self) -> None:
        """Overwrite the parameters by their mean over the workers, and keep the workers' own until `restore`.

        In the receive buffers, where parameters are exchanged as they are; else in a copy. Collective. `restore` must
        follow, also after an exception.
        """
        if self._borrowed:
            return
        if self.num_workers == 1:
            self._follow_changes()
            self._backup = [[buffer.data.clone() for buffer in self.flats[0].buffers]]
            self._borrowed = True
            return
        self.settle_arrivals()
        self.group.barrier(f"averaging the workers at step {self.step}")
        self.group.require_equal(self.step, "number of optimizer steps")
        self.drain()
        self._arrived = False  # the receive buffers become the backup: the exchange is posted again afterwards
        self._follow_changes()
        self._backup = self._room()
        for flat, backup in zip(self.flats, self._backup, strict=True):
            for buffer, kept in zip(flat.buffers, backup, strict=True):
                kept.copy_(buffer.data)
        self._borrowed = True
        squared = [0.0] * self.per_process
        for number, buffer in enumerate(self.flats[0].buffers):
            own = [backup[number] for backup in self._backup]
            self.group.all_reduce_mean_(buffer.data, f"averaging the workers at step {self.step}", others=own[1:])
            for here, kept in enumerate(own):
                squared[here] += _squared_distance(buffer.data, kept)
                if here > 0:
                    self.flats[here].buffers[number].data.copy_(buffer.data)
        self._consensus_from(squared)

    def _room(self) -> list[list[Tensor]]:
        """Tensors like the flat buffers of each worker here: receive buffers, where they are like that."""
        if self.comm_dtype == "full":
            return [slots[0] for slots in self.exchange.slots]
        return [[torch.empty_like(buffer.data) for buffer in flat.buffers] for flat in self.flats]

    @torch.no_grad()
    def consensus_errors(self) -> list[dict[int, Tensor]]:
        """x_i - x_bar of each worker of this process, while the average is swapped in.

        Returns:
            For each worker, by `id` of the parameter of this process's FIRST worker, a tensor of its shape.

        Raises RuntimeError outside of `swap_in_average` and `restore`.
        """
        if not self._borrowed:
            raise RuntimeError(
                "consensus errors are differences to the average: ask inside `with deployed_model(...)`."
            )
        errors: list[dict[int, Tensor]] = []
        for backup in self._backup:
            of_worker: dict[int, Tensor] = {}
            for buffer, kept in zip(self.flats[0].buffers, backup, strict=True):
                for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
                    own = kept.as_strided(view.shape, view.stride(), view.storage_offset())
                    of_worker[id(parameter)] = own - view
            errors.append(of_worker)
        return errors

    @torch.no_grad()
    def restore(self) -> None:
        """Give the workers of this process their own parameters back, every byte."""
        if not self._borrowed:
            return
        self._borrowed = False
        for flat, backup in zip(self.flats, self._backup, strict=True):
            flat.repoint()
            for buffer, kept in zip(flat.buffers, backup, strict=True):
                buffer.data.copy_(kept)
        self._backup = []

    @property
    def borrowed(self) -> bool:
        """Whether the parameters hold the average of the workers at the moment."""
        return self._borrowed


def _squared_distance(a: Tensor, b: Tensor, chunk: int = 2**22) -> float:
    """||a - b||^2 of flat tensors without a temporary of their size."""
    parts = zip(a.split(chunk), b.split(chunk), strict=True)
    return sum(float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in parts)
