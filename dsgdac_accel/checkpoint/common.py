"""Tensors that are equal on all workers, such as a frozen base: recognized by their digests, stored once at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsgdac_accel.checkpoint.errors import on_all
from dsgdac_accel.checkpoint.local_shards import Box, box_of
from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.checkpoint.worker_state import in_first_replica
from dsgdac_accel.distributed.processes import Processes
from dsgdac_accel.distributed.shards import local_of
from dsgdac_accel.tensor_bytes import begin_digest, digest, finish_digests, is_plain

MIN_BYTES = 1024
"""Smaller tensors stay with each worker: their line in the manifest would take as much."""

PARTS = ("parameters", "buffers", "caches")
"""Parts of `worker_state.model_state` that hold tensors."""


class Place(NamedTuple):
    """Where a tensor is in the state of a worker: `state["models"][model][part][name]`."""

    model: int
    part: str
    name: str


@dataclass(frozen=True)
class CommonTensor:
    """A tensor of a checkpoint that was equal on all workers, as the manifest describes it."""

    model: int
    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """As of `tensor_bytes.digest`; of a DTensor, with the part of it that was digested."""
    stored: bool
    """Whether the checkpoint holds it, under its digest. Otherwise the model to load into must have it already."""
    shard: int = 0
    """The rank of each worker that has it: every rank has its own part of a DTensor."""

    @property
    def place(self) -> Place:
        return Place(self.model, self.part, self.name)


@dataclass(frozen=True)
class Common:
    """The common tensors of a checkpoint that is being saved."""

    listed: tuple[CommonTensor, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Those to store, by digest. Sharded workers store equal ones under each name, by longer keys."""
    names: Mapping[tuple, tuple] = field(default_factory=dict)
    """Their paths in a worker's state by their paths in `tensors`, which other programs find in the file."""


def tensors_by_place(models: Mapping[int, Mapping[str, Any]]) -> dict[Place, Tensor]:
    """Return all tensors in the states of models, parameters, buffers and caches."""
    return {
        Place(index, part, name): tensor
        for index, model in models.items()
        for part in PARTS
        for name, tensor in model[part].items()
    }


def untrained_digests(models: Mapping[int, Mapping[str, Any]]) -> dict[Place, str]:
    """Return the digests of the tensors in the states of models that may be common: those without a gradient.

    They are read anew each time. A version counter does not show writes through `.data`, which is how target networks
    are updated.

    Raises:
        CheckpointError: a tensor has no digest, see `tensor_bytes.digest`.
    """
    begun = {}
    tensors = tensors_by_place(models)
    for place, tensor in tensors.items():
        large = tensor.numel() * tensor.element_size() >= MIN_BYTES
        if not tensor.requires_grad and (large or not is_plain(local_of(tensor))):
            try:
                begun[place] = begin_digest(local_of(tensor))
            except ValueError as error:
                raise CheckpointError(f"{place.name}: {error}") from error
    found = dict(zip(begun, finish_digests(list(begun.values())), strict=True))
    return {place: _with_part(digested, tensors[place]) for place, digested in found.items()}


def take_common(models: dict[int, Any], group: Processes, elsewhere: Mapping[Place, str], shards: int = 0) -> Common:
    """Take the tensors that are equal on all workers out of the states of models. Collective.

    Of workers that are several processes, those with the same shards are compared, and a tensor is taken if all are
    equal.

    Args:
        models: the states by the models' index. Changed in place.
        group, shards: as in `writer.save_checkpoint`.
        elsewhere: digests of tensors that whoever loads the checkpoint gets from somewhere else. They are not stored
            as long as they have this digest. Quantized weights, whose state cannot be saved, are never stored.

    Raises:
        CheckpointError: on all workers, if tensors cannot be compared, or quantized weights differ.
    """
    tensors, ranks = tensors_by_place(models), max(1, shards)
    digests = on_all(group, lambda: untrained_digests(models), "cannot be saved")
    mine = {place: (found, is_plain(local_of(tensors[place]))) for place, found in digests.items()}
    everyone = group.all_gather_object(mine, "comparing the frozen tensors for a checkpoint")
    equal = set()
    for place, (_, plain) in everyone[0].items():
        # Small shards are in no list.
        if all(place in other and other[place] == everyone[rank % ranks][place] for rank, other in enumerate(everyone)):
            equal.add(place)
        elif not plain:
            raise CheckpointError(
                f"{place.name} is quantized and differs between the workers, and its quantization state cannot be "
                f"saved. Load the same base with the same quantization on all workers."
            )

    listed = []
    stored: dict[str, Tensor] = {}
    names: dict[tuple, tuple] = {}
    for place, (found, plain) in mine.items():
        if place not in equal:
            continue
        tensor = models[place.model][place.part].pop(place.name)
        # Whoever loads a model loads its first replica, of which the others become copies.
        source = place._replace(name=in_first_replica(place.name))
        unchanged = all(part in mine and elsewhere.get(part) == mine[part][0] for part in (place, source))
        keep = plain and not unchanged
        listed.append(CommonTensor(*place, *_layout(tensor), found, keep))
        if keep and (found not in stored or shards):
            key = found if found not in stored else f"{found} for {place}"
            stored[key], names[(key,)] = tensor, ("models", *place)
    return Common(tuple(listed), stored, names)


def put_common(
    models: dict[int, Any],
    listed: Iterable[CommonTensor],
    read: Callable[[], Mapping[str, Tensor]],
    own: Mapping[Place, Tensor] | None = None,
) -> None:
    """Put the common tensors of a checkpoint back into the states of models, which are changed in place.

    Args:
        models: the states by the models' index.
        listed: the common tensors of the checkpoint.
        read: returns the stored ones by digest. Not called if `own` has them all.
        own: the tensors of the models to load into, which are put where they have the same value. With None, tensors
            that the checkpoint does not hold are left out.

    Raises:
        CheckpointError: a tensor that the checkpoint does not hold has another value in `own`.
    """
    stored: Mapping[str, Tensor] | None = None
    changed = []
    for common in listed:
        mine = None if own is None else own.get(common.place)
        alike = mine is not None and _layout(mine) == (common.dtype, common.shape)
        if mine is not None and alike and _with_part(digest(local_of(mine)), mine) == common.digest:
            value = mine
        elif common.stored:
            stored = read() if stored is None else stored
            value = stored[common.digest]
        elif own is None:
            continue
        elif alike:
            changed.append(common.name)
            continue
        else:  # `require_same_model` names it
            value = torch.empty(common.shape, dtype=getattr(torch, common.dtype), device="meta")
        models[common.model][common.part][common.name] = value
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CheckpointError(
            f"{changed[0]}{more} of the model differ from those of the saved run, and the checkpoint does not hold "
            f"them: it leaves frozen weights to the base model and the Trainer's own file. Build the model from the "
            f"same base (files, revision, dtype, quantization)."
        )


def _with_part(digested: str, tensor: Tensor) -> str:
    """Return a digest together with the part of the tensor that it is of: parts of two tensors may be equal."""
    box = box_of(tensor)
    if box == Box.whole(tuple(tensor.shape)):
        return digested
    return f"{digested} of {list(tensor.shape)} at {list(box.offsets)}"


def _layout(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
