"""How far apart the workers are, and their average in place of their own parameters for a while.

Each function here is a reduction of the size of the model over all workers, and so collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import Buckets
from dsgdac_accel.distributed.group import WorkerGroup


@dataclass(frozen=True)
class Consensus:
    """How far apart the workers are: Delta has the rows x_i - x_bar, each distinct value counted once."""

    radius: float
    """mean_i ||x_i - x_bar||."""
    frobenius: float
    """||Delta||_F = sqrt(sum_i ||x_i - x_bar||^2)."""
    step: int
    """Optimizer steps done when it was measured."""


@torch.no_grad()
def measure_consensus(buckets: Buckets, group: WorkerGroup, step: int) -> Consensus:
    """Measure the exact consensus error.

    The mean is formed in the receive buffers if they are free, or else in new memory of the size of a bucket.
    """
    if group.size == len(buckets.flats) == 1:
        return Consensus(0.0, 0.0, step)
    squared = [0.0] * len(buckets.flats)
    for number, (first, *others) in enumerate(zip(*map(buckets.values, range(len(buckets.flats))), strict=True)):
        with buckets.scratch(number) as mean:
            mean.copy_(first)
            group.all_reduce_mean_(mean, f"measuring the consensus radius at step {step}", others=others)
            for worker, x in enumerate((first, *others)):
                squared[worker] += _squared_distance(mean, x)
    return _consensus_of(squared, group, step)


@torch.no_grad()
def swap_in_average(buckets: Buckets, group: WorkerGroup, step: int) -> Consensus:
    """Overwrite the parameters by their mean over the workers until `Buckets.restore`; also measures the consensus."""
    buckets.back_up()
    squared = [0.0] * len(buckets.flats)
    for number, mean in enumerate(buckets.values(0)):
        own = [kept[number] for kept in buckets.backup]
        group.all_reduce_mean_(mean, f"averaging the workers at step {step}", others=own[1:])
        for worker, x in enumerate(own):
            squared[worker] += _squared_distance(mean, x)
            if worker > 0:
                buckets.values(worker)[number].copy_(mean)
    return _consensus_of(squared, group, step)


@torch.no_grad()
def consensus_errors(buckets: Buckets) -> list[dict[int, Tensor]]:
    """Return x_i - x_bar of each local worker while the average is swapped in; no communication.

    Returns:
        For each worker, by `id` of the parameter of the FIRST local worker, a tensor of its shape.
    """
    errors: list[dict[int, Tensor]] = []
    for kept in buckets.backup:
        of_worker: dict[int, Tensor] = {}
        for bucket, own in zip(buckets.flats[0].buckets, kept, strict=True):
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                of_worker[id(parameter)] = own.as_strided(view.shape, view.stride(), view.storage_offset()) - view
        errors.append(of_worker)
    return errors


def _consensus_of(squared_distances: list[float], group: WorkerGroup, step: int) -> Consensus:
    shares = group.all_gather_object(squared_distances, f"measuring the consensus radius at step {step}")
    squares = [square for share in shares for square in share]
    return Consensus(sum(square**0.5 for square in squares) / len(squares), sum(squares) ** 0.5, step)


def _squared_distance(a: Tensor, b: Tensor, chunk: int = 2**22) -> float:
    """Return ||a - b||^2 of flat tensors without a temporary of their size."""
    parts = zip(a.split(chunk), b.split(chunk), strict=True)
    return sum(float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in parts)
