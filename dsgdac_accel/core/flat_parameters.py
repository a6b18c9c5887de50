"""Parameters as views of a few flat buckets, so that mixing is a few long, contiguous passes.

Each parameter keeps its shape and its strides (channels_last, transposed, sliced, 0-dim, empty). Parameters that share
their memory keep sharing it and are stored, sent and counted once. All others have storages of their own, over parts of
the bucket's memory: safetensors, Accelerate and `torch.save` take tensors of one storage for tied weights, and drop
them or save the whole storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack

from dsgdac_accel.core.parameter_guard import extent

ALIGNMENT = 128  # bytes: whole cache lines and the widest vector loads


@dataclass
class Bucket:
    """One contiguous buffer and the parameters that live in it."""

    data: Tensor
    """(D,) all values, zero in the gaps between parameters."""
    parameters: list[Parameter] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    """The view of `data` behind each parameter, in the same order."""
    targets: list[Tensor] = field(default_factory=list)
    """The same memory with a storage of its own, which the parameter points to."""
    addresses: list[int] = field(default_factory=list)
    """Where each view begins in memory."""


class FlatParameters:
    """The parameters of one worker, moved into one bucket per dtype and device.

    Args:
        parameters: parameters that can be mixed exactly, see `refuse_unmixable`.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        alike: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        for parameter in self.parameters:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.buckets = [_adopt(group) for group in alike.values()]

    def moved(self) -> list[tuple[Parameter, Tensor]]:
        """Return parameters that were re-pointed to other memory, each with the view that it left.

        `.to()`, `load_state_dict(assign=True)` and `parameter.data = ...` do that.
        """
        return [
            (parameter, view)
            for bucket in self.buckets
            if list(map(Tensor.data_ptr, bucket.parameters)) != bucket.addresses  # one comparison for all of them
            for parameter, view, address in zip(bucket.parameters, bucket.views, bucket.addresses, strict=True)
            if parameter.data_ptr() != address
        ]

    @torch.no_grad()
    def bring_back(self) -> list[tuple[Parameter, Tensor]]:
        """Copy re-pointed values into the buckets and point the parameters there again.

        Returns those that no longer fit (another shape, dtype, device or other strides), each with its old view.
        """
        misfits = []
        for parameter, view in self.moved():
            if _kind(parameter) == _kind(view):
                view.copy_(parameter)
                self._point_back(parameter)
            else:
                misfits.append((parameter, view))
        return misfits

    def repoint(self) -> None:
        """Point every parameter at its view again; values that it has elsewhere are dropped."""
        for parameter, _ in self.moved():
            self._point_back(parameter)

    def _point_back(self, parameter: Parameter) -> None:
        parameter.data = next(
            target
            for bucket in self.buckets
            for mine, target in zip(bucket.parameters, bucket.targets, strict=True)
            if mine is parameter
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter memory of its own again, with its values and strides; tied memory stays tied."""
        copies: dict[tuple, Tensor] = {}
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.data_ptr() == view.data_ptr():
                    place = (view.data_ptr(), view.shape, view.stride())
                    parameter.data = copies.setdefault(place, view.clone(memory_format=torch.preserve_format))
        self.parameters, self.buckets = [], []


def _adopt(parameters: list[Parameter]) -> Bucket:
    step = ALIGNMENT // parameters[0].element_size()
    places, total = [], 0
    place_of: dict[tuple, int] = {}  # memory that is adopted already: a second parameter there shares the place
    for parameter in parameters:
        memory = (parameter.data_ptr(), tuple(parameter.shape), parameter.stride())
        if parameter.numel() and memory in place_of:
            places.append(place_of[memory])
            continue
        places.append(total)
        place_of[memory] = total
        total += -(-extent(parameter) // step) * step
    bucket = Bucket(torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device), parameters)
    with torch.no_grad():
        for parameter, place in zip(parameters, places, strict=True):
            view = bucket.data.as_strided(parameter.shape, parameter.stride(), place)
            view.copy_(parameter)
            bucket.views.append(view)
            bucket.addresses.append(view.data_ptr())
        # All values are copied before the first parameter moves: sharers still read their old memory above.
        targets: dict[tuple, Tensor] = {}  # parameters that share their memory share its storage
        for parameter, view in zip(parameters, bucket.views, strict=True):
            memory = view.storage_offset(), *_kind(view)
            target = targets.get(memory)
            if target is None:
                target = targets[memory] = with_own_storage(view)
            bucket.targets.append(target)
            parameter.data = target
    return bucket


def with_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the same memory as `view`, whose storage begins and ends with it.

    >>> bucket = torch.zeros(100)
    >>> inner = with_own_storage(bucket[10:22].view(4, 3))
    >>> inner.untyped_storage().nbytes(), inner.data_ptr() == bucket[10:].data_ptr()
    (48, True)
    """
    memory = view.as_strided((extent(view),), (1,))
    return from_dlpack(to_dlpack(memory)).as_strided(view.shape, view.stride(), 0)


def _kind(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
