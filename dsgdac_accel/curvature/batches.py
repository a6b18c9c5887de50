"""A list of batches that must not change, because every product must be of the same Hessian."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor


class FixedBatches:
    """A list of batches that detects changes by its length and a checksum of each batch.

    Args:
        batches: list or tuple of tensors, tuples or mappings.

    Raises:
        TypeError: not a list. A loader or generator may give other batches the second time, or none.
        ValueError: the list is empty.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        if not isinstance(batches, Sequence) or isinstance(batches, str | bytes):
            raise TypeError(
                f"batches must be a list, because each product reads all of them; got {type(batches).__name__}. "
                f"Pass list(...) of it, or its first few batches."
            )
        if not batches:
            raise ValueError("curvature needs at least one batch; got an empty list. Pass batches of training data.")
        self.batches = batches
        self.checksums = [checksum(batch) for batch in batches]

    def __len__(self) -> int:
        return len(self.checksums)

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Raise RuntimeError if the length of the list or the content of one of the batches `numbers` changed."""
        if len(self.batches) != len(self):
            raise RuntimeError(
                f"the list of batches changed between products: {len(self)} batches, now {len(self.batches)}. Make a "
                f"new HessianOperator for the new list."
            )
        for number in numbers:
            if checksum(self.batches[number]) != self.checksums[number]:
                raise RuntimeError(
                    f"batch {number} changed between products. Pass copies of batches that are overwritten, or make a "
                    f"new HessianOperator."
                )


def checksum(value: Any, start: int = 0) -> int:
    """Return the CRC-32 of all tensors, arrays and plain values in nested tuples, lists and mappings.

    >>> batch = {"x": torch.ones(3), "name": "first"}
    >>> before = checksum(batch)
    >>> batch["x"].data[1] = 2.0  # not noticed by the tensor's version counter
    >>> checksum(batch) == before
    False
    """
    if isinstance(value, Tensor):
        memory = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return zlib.crc32(memory, zlib.crc32(repr((tuple(value.shape), value.dtype)).encode(), start))
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        memory = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data
        return zlib.crc32(memory, zlib.crc32(repr((value.shape, value.dtype.str)).encode(), start))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            start = checksum(inner, zlib.crc32(repr(key).encode(), start))
        return start
    if isinstance(value, list | tuple):
        for inner in value:
            start = checksum(inner, start)
        return zlib.crc32(str(len(value)).encode(), start)
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return zlib.crc32(repr(value).encode(), start)
    return zlib.crc32(type(value).__qualname__.encode(), start)  # the content of other objects is not compared
