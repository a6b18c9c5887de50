"""Tensors that are equal on all workers, such as a frozen base: recognized by their digests, stored once at most."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.checkpoint.errors import on_all
from dsgdac_accel.checkpoint.local_shards import Box, KeyPath, box_of
from dsgdac_accel.checkpoint.resharding import leaves
from dsgdac_accel.checkpoint.serialization import LOAD_ANOTHER, CheckpointError, Reference
from dsgdac_accel.checkpoint.worker_state import in_first_replica
from dsgdac_accel.distributed.processes import Processes
from dsgdac_accel.distributed.shards import local_of
from dsgdac_accel.tensor_bytes import begin_digest, digest, finish_digests, is_plain

MIN_BYTES = 1024
"""Smaller tensors stay with each worker: a reference to them would take as much."""

PARTS = ("parameters", "buffers", "caches")
"""Parts of `worker_state.model_state` that hold tensors."""


def tensors_of(models: Mapping[int, Mapping[str, Any]]) -> dict[KeyPath, Tensor]:
    """Return parameters, buffers and caches in the states of models, by their paths in the state of a worker."""
    parts = {index: {part: model[part] for part in PARTS} for index, model in models.items()}
    return dict(leaves({"models": parts}))


def untrained_digests(models: Mapping[int, Mapping[str, Any]]) -> dict[KeyPath, str]:
    """Return the digests of those of `tensors_of` that may be common: those without a gradient.

    They are read anew each time. A version counter does not show writes through `.data`, which is how target networks
    are updated.

    Raises:
        CheckpointError: a tensor has no digest, see `tensor_bytes.digest`.
    """
    begun = {}
    tensors = tensors_of(models)
    for path, tensor in tensors.items():
        large = tensor.numel() * tensor.element_size() >= MIN_BYTES
        if not tensor.requires_grad and (large or not is_plain(local_of(tensor))):
            try:
                begun[path] = begin_digest(local_of(tensor))
            except ValueError as error:
                raise CheckpointError(f"{path[-1]}: {error}") from error
    found = dict(zip(begun, finish_digests(list(begun.values())), strict=True))
    return {path: _with_part(digested, tensors[path]) for path, digested in found.items()}


def take_common(
    models: dict[int, Any], group: Processes, elsewhere: Mapping[KeyPath, str], shards: int = 0
) -> dict[str, Tensor]:
    """Put references in the places of the tensors that are equal on all workers in the states of models. Collective.

    Of workers that are several processes, those with the same shards are compared, and a tensor is common if all are
    equal.

    Args:
        models: the states by the models' index. Changed in place.
        group, shards: as in `writer.save_checkpoint`.
        elsewhere: digests of tensors that whoever loads the checkpoint gets from somewhere else. They are not stored
            as long as they have this digest. Quantized weights, whose state cannot be saved, are never stored.

    Returns:
        The tensors that the checkpoint has to store, by digest.

    Raises:
        CheckpointError: on all workers, if tensors cannot be compared, or quantized weights differ.
    """
    tensors, ranks = tensors_of(models), max(1, shards)
    digests = on_all(group, lambda: untrained_digests(models), "cannot be saved")
    mine = {path: (found, is_plain(local_of(tensors[path]))) for path, found in digests.items()}
    everyone = group.all_gather_object(mine, "comparing the frozen tensors for a checkpoint")
    equal = set()
    for path, (_, plain) in everyone[0].items():
        # Small shards are in no list.
        if all(path in other and other[path] == everyone[rank % ranks][path] for rank, other in enumerate(everyone)):
            equal.add(path)
        elif not plain:
            raise CheckpointError(
                f"{path[-1]} is quantized and differs between the workers, and its quantization state cannot be "
                f"saved. Load the same base with the same quantization on all workers."
            )

    stored: dict[str, Tensor] = {}
    for path, (found, plain) in mine.items():
        if path not in equal:
            continue
        _, model, part, name = path
        # Whoever loads a model loads its first replica, of which the others become copies.
        sources = (path, ("models", model, part, in_first_replica(name)))
        unchanged = all(source in mine and elsewhere.get(source) == mine[source][0] for source in sources)
        keep = plain and not unchanged
        models[model][part][name] = Reference(found, *_layout(tensors[path]), keep)
        if keep:
            stored.setdefault(found, tensors[path])
    return stored


def put_common(
    state: Any,
    folder: Path | str,
    read: Callable[[], Mapping[str, Tensor]],
    own: Mapping[KeyPath, Tensor],
    same_split: bool,
) -> None:
    """Put the common tensors of a checkpoint in the places of the references in a state, in place.

    Args:
        state: of one process, as its file holds it.
        folder: the checkpoint, for messages.
        read: returns the stored ones by digest. Not called if `own` has them all.
        own: the tensors to load into by their paths in the state, which are put where they have the same value. If
            there are none, tensors that the checkpoint does not hold are left out.
        same_split: whether `own` are the same parts of tensors as those in the state.

    Raises:
        CheckpointError: a tensor that the checkpoint does not hold has another value in `own`, or is another part.
    """
    stored: Mapping[str, Tensor] | None = None
    changed = []
    for path, reference in list(leaves(state, Reference)):
        *outer, name = path
        siblings = functools.reduce(operator.getitem, outer, state)
        mine = own.get(path) if same_split else None
        alike = mine is not None and _layout(mine) == (reference.dtype, reference.shape)
        if mine is not None and alike and _with_part(digest(local_of(mine)), mine) == reference.digest:
            siblings[name] = mine
        elif reference.stored:
            stored = read() if stored is None else stored
            if reference.digest not in stored:
                raise CheckpointError(
                    f"{folder} is damaged: its common tensors are not those of its models. {LOAD_ANOTHER}"
                )
            siblings[name] = stored[reference.digest]
        elif not own:
            del siblings[name]
        elif not same_split:
            raise CheckpointError(
                f"{folder} leaves frozen weights to the base model and the Trainer's own file, and a model that is "
                f"split in another way cannot be compared with them. Launch as many ranks per worker as the saved run "
                f"had."
            )
        elif alike:
            changed.append(name)
        else:  # `require_same_model` names it
            siblings[name] = torch.empty(reference.shape, dtype=getattr(torch, reference.dtype), device="meta")
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
