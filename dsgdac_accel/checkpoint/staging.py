"""Tensors of a GPU on their way to the memory of the host, so that training need not wait until they are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.devices import event, pinned, using
from dsgdac_accel.tensor_bytes import as_bytes

MOST_PINNED_BYTES = 2**33
"""Page-locked memory for one checkpoint, which torch rounds up to a power of two and keeps for the next one."""

_ALIGNMENT = 64  # bytes


@dataclass
class Staged:
    """Tensors in the memory of the host; their values are there after `wait`."""

    tensors: dict[str, Tensor]
    _arrived: list[tuple[torch.device, Any]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all values have arrived. A thread sleeps in it."""
        for device, arrived in self._arrived:
            with using(device):
                arrived.synchronize()


def staged(tensors: Mapping[str, Tensor]) -> Staged:
    """Begin to copy those of contiguous `tensors` that are on a GPU into the memory of the host.

    They travel in the queue of the current stream, into one page-locked buffer. What is queued later, such as the next
    step, may change them. A tensor that does not fit into the rest of `MOST_PINNED_BYTES` is waited for, as are those
    of other accelerators, and all if the system refuses page-locked memory. Tensors of the CPU stay what they are.
    """
    places, total = {}, 0
    for name, tensor in tensors.items():
        end = total + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if _is_on_gpu(tensor) and tensor.nbytes and end <= MOST_PINNED_BYTES:
            places[name], total = total, end
    buffer = _page_locked(total)
    if buffer is None:
        buffer, places = torch.empty(0, dtype=torch.uint8, device="cpu"), {}
    copies = {
        name: _started_copy(tensor, buffer[places[name] :]) if name in places else tensor.to("cpu")
        for name, tensor in tensors.items()
    }
    return Staged(copies, [(device, event(device)) for device in {tensors[name].device for name in places}])


def _page_locked(nbytes: int) -> Tensor | None:
    """Return memory that a GPU copies into by itself; None if the system refuses as much of it."""
    try:
        return pinned((nbytes,), torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
    except RuntimeError:
        return None


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _started_copy(tensor: Tensor, room: Tensor) -> Tensor:
    target = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    as_bytes(target).copy_(as_bytes(tensor), non_blocking=True)
    return target
