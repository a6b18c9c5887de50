"""Reads values of a device, and writes numbers to it, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.devices import event, pinned
from dsgdac_accel.distributed.group import wait_for_device


class HostCopy:
    """Values on their way from their device to the host, which reads them later.

    From CUDA they travel in the queue of the current stream, into pinned memory, and the constructor returns at once.
    On the CPU they are cloned. For other accelerators the constructor waits. A thread that reads too early sleeps.
    """

    def __init__(self, values: Tensor) -> None:
        self._arrived: Any = None
        if values.is_cuda:
            self._values = pinned(values.shape, values.dtype)
            self._values.copy_(values, non_blocking=True)
            self._arrived = event(values.device)
        else:
            self._values = values.detach().to("cpu", copy=True)

    def read(self) -> Tensor:
        """Return the values, on the CPU; waits until the device has reached the point where the copy was made.

        Raises WorkerLostError if the device waits for another worker in vain; see `wait_for_device`.
        """
        if self._arrived is not None:
            wait_for_device(self._arrived.query)
            self._arrived.synchronize()
        return self._values


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as float64, (N,), on a device. Only from pinned memory does CUDA take them without a wait."""
    values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    if device.type == "cuda":
        values = pinned(values.shape, values.dtype).copy_(values)
    return values.to(device, non_blocking=True)
