"""Training data that stays with its worker: every worker shuffles its own fixed shard in each epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class FixedShards(Sampler[list[int]]):
    """Batch sampler whose batches hold equally many rows of each worker's shard, in the order of the workers.

    The rows are dealt once, by the seed, into one shard per worker; sizes differ by one at most. In each epoch every
    worker takes rows of its own shard in a new order; rows that do not fill a batch are left out, different ones in
    each epoch. All processes make the same batches, and each takes the part of its own workers.

    Args:
        rows: number of training rows.
        batch_size: rows of a micro-batch over all workers, a multiple of `workers`.
        batches: micro-batches per epoch.
        workers: number of all workers.
        seed: seed of the shards and of their order.

    >>> shards = FixedShards(rows=8, batch_size=4, batches=2, workers=2, seed=0)
    >>> first = [set(batch[:2]) for batch in shards]
    >>> shards.set_epoch(1)
    >>> first[0] | first[1] == set().union(*(batch[:2] for batch in shards))
    True
    """

    def __init__(self, rows: int, batch_size: int, batches: int, workers: int, seed: int) -> None:
        self.batch_size, self.batches, self.workers, self.seed = batch_size, batches, workers, seed
        self.drop_last = True
        self.epoch = 0
        self._shards = np.array_split(np.random.default_rng([seed]).permutation(rows), workers)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self.seed, 1 + self.epoch])
        own = self.batch_size // self.workers
        orders = [random.permutation(shard)[: self.batches * own] for shard in self._shards]
        for batch in np.stack(orders).reshape(self.workers, self.batches, own).swapaxes(0, 1):
            yield batch.flatten().tolist()
