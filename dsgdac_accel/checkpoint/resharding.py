"""One worker's state, put together from the files of its ranks: every rank reads the parts that it needs.

A rank that finds all its parts in the file of its own place reads no other one. So a run on the same mesh resumes from
one file per rank, and every other number of ranks, or none beside the first, reads the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dsgdac_accel.checkpoint.local_shards import Box, KeyPath, LocalShard, box_of, local_shard, mapped, template
from dsgdac_accel.checkpoint.serialization import LOAD_ANOTHER, CheckpointError, named
from dsgdac_accel.distributed.shards import is_sharded

Saved = Tensor | LocalShard
"""A tensor in a file: whole, or the part that one rank held."""


@dataclass(frozen=True)
class Targets:
    """Where the tensors of a state go to in this rank, which decides the parts that it needs of them."""

    own: Mapping[KeyPath, Tensor] = field(default_factory=dict)
    """The tensors to load into. One at ("optimizers", 0, "state", 3) places all states of that parameter."""
    place: int = 0
    """Number of this rank within its worker."""
    ranks: int = 1
    """Ranks of each worker."""

    @cached_property
    def meshes(self) -> Mapping[tuple[str, ...], Any]:
        """Device meshes for everything else, by the names of their dimensions."""
        meshes: list[Any] = [tensor.device_mesh for tensor in self.own.values() if is_sharded(tensor)]  # type: ignore[attr-defined]
        return {tuple(mesh.mesh_dim_names or ()): mesh for mesh in meshes}

    @cached_property
    def parameters(self) -> Mapping[int, KeyPath]:
        """The paths of parameters outside the states of optimizers, by the id of the tensor in `own`."""
        return {id(tensor): path for path, tensor in self.own.items() if path[0] in ("models", "loose")}

    def order(self, files: int) -> list[int]:
        """Return the ranks of a saved worker in the order in which to read their files: the likeliest first.

        Args:
            files: number of ranks of a saved worker.

        >>> Targets(place=2, ranks=4).order(2)
        [1, 0]
        >>> Targets(place=1, ranks=2).order(4)
        [2, 3, 0, 1]
        """
        likeliest = self.place * files // self.ranks
        return [*range(likeliest, files), *range(likeliest)]

    def like(self, path: KeyPath, saved: Saved) -> Tensor | None:
        """Return the DTensor whose part of the saved tensor is needed; None if all of it is, as a plain tensor."""
        for length in range(len(path), 0, -1):
            mine = self.own.get(path[:length])
            if mine is not None and tuple(mine.shape) == tuple(saved.shape):
                return mine if is_sharded(mine) else None
        return template(saved, self.meshes) if isinstance(saved, LocalShard) else None


def put_together(files: Sequence[Callable[[], Any]], targets: Targets, sharded: bool) -> Any:
    """Return a worker's state for this rank. Reads no more files than it needs. No communication.

    Args:
        files: each returns what one of the worker's ranks saved. Everything that is no part of a larger tensor is taken
            from the first one.
        targets: the tensors to load into.
        sharded: whether the saved worker was. States of its optimizers that were ordinary tensors, though the parameter
            was none, then stay as they are.

    Returns:
        The state. A tensor for a DTensor is a `LocalShard`, and every other one an ordinary tensor.

    Raises:
        CheckpointError: parts are missing or overlap, or quantized values would have to be cut.
    """
    state: Any = None
    needed: dict[KeyPath, _Needed] = {}
    for number, read in enumerate(files):
        tree = read()
        if number == 0:
            state = tree
            needed = {
                path: _Needed(path, saved, targets.like(path, saved)) for path, saved in _parts(tree, targets, sharded)
            }
        for path, saved in leaves(tree):
            if path in needed:
                needed[path].add(local_shard(saved) if is_sharded(saved) else saved)
        if all(part.is_complete for part in needed.values()):
            break
    missing = [part for part in needed.values() if not part.is_complete]
    if missing:
        raise CheckpointError(f"parts of {missing[0].name} are in none of the files of its worker. {LOAD_ANOTHER}")
    found = {path: part.result() for path, part in needed.items()}
    return mapped(state, lambda path, leaf: found.get(path, leaf))


def _parts(tree: Any, targets: Targets, sharded: bool) -> Iterable[tuple[KeyPath, Any]]:
    """Yield the tensors that are a part of a larger one, or of which this rank needs a part."""
    whole = {path for path, saved in leaves(tree) if not (isinstance(saved, LocalShard) or is_sharded(saved))}
    for path, saved in leaves(tree):
        if is_sharded(saved):
            continue  # a common tensor that the model has already
        # A count of steps may have the shape of its parameter by chance. A single shard may be a whole parameter.
        stays = path[:1] == ("optimizers",) and (
            path[-1] == "step" or (sharded and targets.parameters.get(id(targets.own.get(path[:4]))) not in whole)
        )
        if isinstance(saved, LocalShard) or not (stays or targets.like(path, saved) is None):
            yield path, saved


class _Needed:
    """The part of a tensor that this rank needs, filled from one file after another."""

    def __init__(self, path: KeyPath, saved: Saved, like: Tensor | None) -> None:
        self.name = named(path)
        self.like = like
        self.saved = saved
        self.box = Box.whole(tuple(saved.shape)) if like is None else box_of(like)
        self.values: Any = None
        self.filled = 0
        self.seen: list[Box] = []

    @property
    def is_complete(self) -> bool:
        return self.values is not None and self.filled == self.box.volume

    def add(self, saved: Saved) -> None:
        shape = tuple(saved.shape)
        shard = saved if isinstance(saved, LocalShard) else LocalShard(saved, shape, (0,) * len(shape))
        if shard.shape != tuple(self.saved.shape):
            raise CheckpointError(f"{self.name} has several shapes in the files of one worker. {LOAD_ANOTHER}")
        if shard.box in self.seen or self.is_complete:  # ranks may hold the same part
            return
        if shard.box == self.box and not self.filled:
            self.values, self.filled = shard.values, self.box.volume
            return
        if any(shard.box.overlap(other).volume for other in self.seen):
            raise CheckpointError(f"parts of {self.name} overlap in the files of one worker. {LOAD_ANOTHER}")
        if is_traceable_wrapper_subclass(shard.values):
            raise CheckpointError(
                f"{self.name} is quantized in blocks, and this run cuts it in another way than the saved one. Launch "
                f"the mesh of the saved run."
            )
        if self.values is None:
            self.values = torch.empty(self.box.sizes, dtype=shard.dtype, device="cpu")
        if self.values.dtype != shard.dtype:
            raise CheckpointError(f"{self.name} has several dtypes in the files of one worker. {LOAD_ANOTHER}")
        common = self.box.overlap(shard.box)
        self.values[common.within(self.box)] = shard.values[common.within(shard.box)]
        self.filled += common.volume
        self.seen.append(shard.box)

    def result(self) -> Any:
        if self.like is None:
            return self.values
        return LocalShard(self.values, tuple(self.like.shape), self.box.offsets, like=self.like)


def leaves(tree: Any, kinds: Any = Tensor | LocalShard, path: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    """Yield the leaves of a tree of state that are of some kinds, by default the tensors, with their paths."""
    if isinstance(tree, kinds):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, kinds, (*path, key))
