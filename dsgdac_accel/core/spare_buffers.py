"""The receive buffers between two exchanges: a backup of the parameters, or scratch memory for a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import Buckets, Use


class SpareBuffers:
    """Lends the receive buffers while no exchange needs them, or new memory where they are smaller than the buckets.

    Args:
        buckets: owns them.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.backup: list[list[Tensor]] = []
        """[local worker] its own parameters between `back_up` and `restore`, a tensor for each bucket."""

    @contextmanager
    def scratch(self, number: int) -> Iterator[Tensor]:
        """Yield a tensor like a bucket of the first worker: a receive buffer if these are free, or new memory."""
        buckets = self.buckets
        if buckets.use is not Use.FREE or not buckets.like_buckets:
            yield torch.empty_like(buckets.values(0)[number])
            return
        buckets.claim(Use.SCRATCH)
        try:
            yield buckets.received[0][0][number]
        finally:
            buckets.claim(Use.FREE)

    @torch.inference_mode(False)
    @torch.no_grad()
    def back_up(self) -> None:
        """Keep the workers' own parameters in `backup`."""
        buckets = self.buckets
        buckets.claim(Use.BACKUP)
        self.backup = [
            slots[0] if buckets.like_buckets and slots else list(map(torch.empty_like, buckets.values(worker)))
            for worker, slots in enumerate(buckets.received)
        ]
        for worker, kept in enumerate(self.backup):
            for own, x in zip(kept, buckets.values(worker), strict=True):
                own.copy_(x)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the workers their own parameters back, every byte; does nothing without a backup."""
        if self.buckets.use is not Use.BACKUP:
            return
        for flat, kept in zip(self.buckets.flats, self.backup, strict=True):
            flat.repoint()
            for bucket, own in zip(flat.buckets, kept, strict=True):
                bucket.data.copy_(own)
        self.buckets.write_back()
        self.backup = []
        self.buckets.claim(Use.FREE)
