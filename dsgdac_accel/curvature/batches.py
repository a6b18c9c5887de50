"""Batches that must not change, because every product must be of the same Hessian, and their weights in the loss."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
from torch import Tensor

from dsgdac_accel.tensor_bytes import as_bytes


class FixedBatches:
    """A list of batches that detects changes by its length and a checksum of each batch; see `HessianOperator`."""

    def __init__(self, batches: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        if not isinstance(batches, Sequence) or isinstance(batches, str | bytes):
            raise TypeError(
                f"batches must be a list, because each product reads all of them; got {type(batches).__name__}. "
                f"Pass list(...) of it, or its first few batches."
            )
        if not batches:
            raise ValueError("curvature needs at least one batch; got an empty list. Pass batches of training data.")
        self.weights = [1.0] * len(batches) if weights is None else [float(weight) for weight in weights]
        wrong = [weight for weight in self.weights if not 0 < weight < math.inf]
        if wrong or len(self.weights) != len(batches):
            raise ValueError(
                f"weights must be one finite number above 0 for each of the {len(batches)} batches; got "
                f"{wrong[0] if wrong else len(self.weights)}. Pass the number of samples in each batch, or None."
            )
        self.batches = batches
        self.checksums = [checksum(batch) for batch in batches]

    def __len__(self) -> int:
        return len(self.checksums)

    def __getitem__(self, number: int) -> Any:
        """Read batch `number`. Raises RuntimeError if its content changed."""
        batch = self.batches[number]
        if checksum(batch) != self.checksums[number]:
            raise RuntimeError(
                f"batch {number} changed between products. Pass copies of batches that are overwritten, the same "
                f"batch each time if they are made when read, or make a new HessianOperator."
            )
        return batch

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        """Raise RuntimeError if the length of the list or the content of one of the batches `numbers` changed."""
        if len(self.batches) != len(self):
            raise RuntimeError(
                f"the list of batches changed between products: {len(self)} batches, now {len(self.batches)}. Make a "
                f"new HessianOperator for the new list."
            )
        for number in numbers:
            _ = self[number]


def checksum(value: Any, start: int = 0) -> int:
    """Return the CRC-32 of all tensors, arrays and plain values in nested tuples, lists and mappings.

    It sees changes that a tensor's version counter does not, such as those through `.data`.
    """
    if isinstance(value, Tensor):
        memory = as_bytes(value.cpu()).numpy().data
        return zlib.crc32(memory, zlib.crc32(repr((tuple(value.shape), value.dtype)).encode(), start))
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(value.tobytes(), zlib.crc32(repr((value.shape, value.dtype.str)).encode(), start))
    if isinstance(value, Mapping):
        return checksum(list(value.items()), start)
    if isinstance(value, list | tuple):
        for inner in value:
            start = checksum(inner, start)
        return zlib.crc32(str(len(value)).encode(), start)
    plain = value is None or isinstance(value, str | bytes | bool | int | float)
    # the content of other objects is not compared
    return zlib.crc32((repr(value) if plain else type(value).__qualname__).encode(), start)
