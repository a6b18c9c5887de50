"""Fixed batches of the training data, made when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class TrainingBatches(Sequence[Any]):
    """Batches of rows of the training data in an order drawn by a seed, the same on all processes.

    A batch is made each time it is read, so any number of them takes the memory of one.

    Args:
        total: number of rows of the training data.
        size: rows per batch; a single smaller batch if there are not as many rows.
        count: number of batches, of whole ones only and at most as many as there are. None takes all rows, and the last
            batch may be smaller.
        seed: seed of the order.
        make: called as `make(number, rows)` with the rows (size,) int64 of batch `number`; returns the same batch each
            time.

    >>> [rows.tolist() for rows in TrainingBatches(5, 2, None, 0, lambda number, rows: rows)]
    [[4, 0], [1, 3], [2]]
    """

    def __init__(self, total: int, size: int, count: int | None, seed: int, make: Callable[[int, Tensor], Any]) -> None:
        self.total = total
        self.size = min(size, total)
        self.make = make
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")
        self.order = order if count is None else order[: min(count, total // self.size) * self.size]

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]  # raises IndexError beyond the end
        return self.make(number, self.order[number * self.size : (number + 1) * self.size])

    @property
    def sizes(self) -> list[int]:
        """Rows in each batch."""
        return [min(self.size, len(self.order) - start) for start in range(0, len(self.order), self.size)]
