"""Parameters in a few flat buckets, so that mixing is a few long, contiguous passes.

`FlatParameters` turns parameters into views of the buckets. `StagedParameters` leaves parameters of which this process
has a shard where they are, and copies the shards into the buckets and back.

Each parameter keeps its shape and its strides (channels_last, transposed, sliced, 0-dim, empty). Parameters that share
their memory keep sharing it and are stored, sent and counted once. All others have storages of their own, over parts of
the bucket's memory: safetensors, Accelerate and `torch.save` take tensors of one storage for tied weights, and drop
them or save the whole storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack

from dsgdac_accel.core.parameter_guard import extent
from dsgdac_accel.shards import is_sharded, local_of

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
    """The address of the first element of each view."""


class FlatParameters:
    """The parameters of one worker, moved into one bucket per dtype and device.

    Args:
        parameters: parameters that can be mixed exactly, see `refuse_unmixable`.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.buckets = _buckets_of(self.parameters)
        for bucket in self.buckets:
            for parameter, target in zip(bucket.parameters, bucket.targets, strict=True):
                parameter.data = target

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

    def read_in(self) -> None:
        """Do nothing: the parameters are the buckets."""

    def write_back(self) -> None:
        """Do nothing: the parameters are the buckets."""

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
                    memory = (view.data_ptr(), view.shape, view.stride())
                    parameter.data = copies.setdefault(memory, view.clone(memory_format=torch.preserve_format))
        self.parameters, self.buckets = [], []


class StagedParameters:
    """The parameters of one worker of which this process has a shard, and buckets with a copy of the shards.

    FSDP2 pads shards and gathers them from memory of its own, so they stay there. `bring_back` copies them into the
    buckets, and `write_back` copies the buckets into the shards. Methods as in `FlatParameters`.

    Args:
        parameters: as for `FlatParameters`.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.buckets = _buckets_of(self.parameters)
        self._in_buckets = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self._views = [view for bucket in self.buckets for view in bucket.views]
        self._kinds = list(map(_kind, self._views))

    def moved(self) -> list[tuple[Parameter, Tensor]]:
        return []

    def read_in(self) -> None:
        """Copy the shards into the buckets."""
        self.bring_back()

    @torch.no_grad()
    def bring_back(self) -> list[tuple[Parameter, Tensor]]:
        views, shards, misfits = self._fitting()
        if views:
            torch._foreach_copy_(views, shards)
        return misfits

    def repoint(self) -> None:
        """Do nothing: `write_back` gives every shard its value."""

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the buckets into the shards."""
        views, shards, _ = self._fitting()
        if views:
            torch._foreach_copy_(shards, views)

    def _fitting(self) -> tuple[list[Tensor], list[Tensor], list[tuple[Parameter, Tensor]]]:
        """Return views of the buckets and the shard of each, and what `bring_back` returns: shards converted since."""
        shards = list(map(local_of, self._in_buckets))
        if list(map(_kind, shards)) == self._kinds:
            return self._views, shards, []
        fits = [_kind(shard) == kind for shard, kind in zip(shards, self._kinds, strict=True)]
        misfits = zip(self._in_buckets, self._views, fits, strict=True)
        return (
            list(itertools.compress(self._views, fits)),
            list(itertools.compress(shards, fits)),
            [(parameter, view) for parameter, view, fit in misfits if not fit],
        )

    def release(self) -> None:
        self.parameters, self.buckets = [], []
        self._in_buckets, self._views, self._kinds = [], [], []


Layout = FlatParameters | StagedParameters


def laid_out(parameters: Sequence[Parameter]) -> Layout:
    """Return the parameters of one worker in buckets."""
    layout = StagedParameters if any(map(is_sharded, parameters)) else FlatParameters
    return layout(parameters)


@contextmanager
def changing_alike(misfits: Sequence[tuple[Parameter, Tensor]], name_of: Callable[[Parameter], str]) -> Iterator[None]:
    """Let converted parameters change inside the context by as much as the views that they left.

    Args:
        misfits: what `bring_back` returns.
        name_of: what to call a parameter in error messages.

    Raises:
        RuntimeError: one has another shape now.
    """
    before = [view.clone() for _, view in misfits]
    yield
    for (parameter, view), old in zip(misfits, before, strict=True):
        local = local_of(parameter)
        if local.shape != view.shape:
            raise RuntimeError(
                f"{name_of(parameter)} became {tuple(local.shape)} after {tuple(view.shape)} between two steps; "
                f"give the resized parameter to the optimizer as a new one, on all workers."
            )
        local.data.add_((view - old).to(local))


def _buckets_of(parameters: Sequence[Parameter]) -> list[Bucket]:
    """Return one bucket for each dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(map(_bucket_of, alike.values()))


def _bucket_of(parameters: list[Parameter]) -> Bucket:
    """Return a bucket with the values of parameters, of one dtype and device, which stay as they are."""
    locals_ = [local_of(parameter) for parameter in parameters]
    step = ALIGNMENT // locals_[0].element_size()
    offsets, total = [], 0
    offset_of: dict[tuple, int] = {}  # of memory that has one already: a second parameter there shares it
    for tensor in locals_:
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in offset_of:
            offsets.append(offset_of[memory])
            continue
        offsets.append(total)
        offset_of[memory] = total
        total += -(-extent(tensor) // step) * step
    bucket = Bucket(torch.zeros(total, dtype=locals_[0].dtype, device=locals_[0].device), parameters)
    targets: dict[tuple, Tensor] = {}  # parameters that share their memory share its storage
    with torch.no_grad():
        for tensor, offset in zip(locals_, offsets, strict=True):
            view = bucket.data.as_strided(tensor.shape, tensor.stride(), offset)
            view.copy_(tensor)
            bucket.views.append(view)
            bucket.addresses.append(view.data_ptr())
            memory = view.storage_offset(), *_kind(view)
            target = targets.get(memory)
            if target is None:
                target = targets[memory] = with_own_storage(view)
            bucket.targets.append(target)
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
