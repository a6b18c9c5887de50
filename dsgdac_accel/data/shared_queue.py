"""One queue of batches for workers of unequal speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dsgdac_accel.checks import check_integer


class SharedQueue:
    """A batch sampler without an end: whoever is ready takes the next batch of an order that all workers share.

    So each row is read once in a pass over the data, however fast the workers are. Rows beyond the last full batch of a
    pass are left out of it.

    Args:
        rows: number of samples, at least `batch_size`.
        batch_size: of every batch.
        next_number: returns 0, 1, 2, ..., each number to one worker only.
        seed: of the order, which is another one in each pass.

    Raises:
        ValueError: a number is out of range.

    >>> numbers = iter(range(10))
    >>> one, other = (iter(SharedQueue(5, 2, numbers.__next__)) for _ in range(2))
    >>> len({*next(one), *next(other)}), len({*next(other), *next(other)})
    (4, 4)
    """

    def __init__(self, rows: int, batch_size: int, next_number: Callable[[], int], seed: int = 0) -> None:
        self.batch_size = check_integer("batch_size", batch_size, minimum=1)
        self.rows = check_integer("rows", rows, minimum=batch_size, advice="Use smaller batches.")
        self.seed = check_integer("seed", seed, minimum=0)
        self.next_number = next_number

    def __iter__(self) -> Iterator[list[int]]:
        known, order = -1, torch.empty(0, device="cpu")
        while True:
            pass_, batch = divmod(self.next_number(), self.rows // self.batch_size)
            if pass_ != known:
                known = pass_
                generator = torch.Generator("cpu").manual_seed(self.seed + pass_)
                order = torch.randperm(self.rows, generator=generator, device="cpu")
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()
