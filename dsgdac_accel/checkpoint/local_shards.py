"""The part of a DTensor that one rank holds, as a file keeps it, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.distributed.shards import is_sharded, local_of

KeyPath = tuple[Any, ...]
"""The keys that lead to a value in a tree of state."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements.

        >>> Box((2, 0), (3, 4)).volume
        12
        """
        return torch.Size(self.sizes).numel()

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index behind this part, by dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Box:
        """Return the part that is in both; without elements if there is none.

        >>> Box((0,), (4,)).overlap(Box((3,), (4,)))
        Box(offsets=(3,), sizes=(1,))
        """
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this part in a tensor that holds `outer`."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass
class LocalShard:
    """The part of a DTensor that a rank holds."""

    values: Tensor
    """The local tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Place of the first local element in the whole tensor."""
    dims: tuple[str, ...] = ()
    """Names of the dimensions of the mesh."""
    placements: tuple[str, ...] = ()
    """For each of them: "replicate" or "shard DIM"."""
    like: Any = None
    """The DTensor whose mesh and placements `tensor` takes."""

    def __post_init__(self) -> None:
        ranks = {len(self.shape), len(self.offsets), len(self.values.shape)}
        starts, ends = self.box.offsets, self.box.ends
        if len(ranks) > 1 or min(starts, default=0) < 0 or any(e > n for e, n in zip(ends, self.shape, strict=True)):
            raise ValueError(f"a shard at {self.offsets} does not fit into a tensor of shape {self.shape}")

    @property
    def box(self) -> Box:
        """The part of the whole tensor that `values` are."""
        return Box(tuple(self.offsets), tuple(self.values.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    def tensor(self) -> Tensor:
        """Return the DTensor of which `values` are this rank's part. No communication."""
        like = self.like
        return _from_local(self.values, like.device_mesh, like.placements, like.shape, like.stride())


def local_shard(tensor: Any) -> LocalShard:
    """Return what this rank holds of a DTensor. Its values share memory with the DTensor.

    Raises:
        ValueError: its values are sums that are not reduced yet (`Partial`), or no rectangular part of it.
    """
    placements = tuple(map(_described, tensor.placements))
    values, box = local_of(tensor).detach(), box_of(tensor)
    if tuple(values.shape) != box.sizes:
        raise ValueError(f"the local part has shape {list(values.shape)}, and {list(box.sizes)} was expected")
    dims = tuple(tensor.device_mesh.mesh_dim_names or ())
    return LocalShard(values, tuple(tensor.shape), box.offsets, dims, placements, tensor)


def box_of(like: Any) -> Box:
    """Return the part of a tensor that this rank holds: all of an ordinary one."""
    if not is_sharded(like):
        return Box.whole(tuple(like.shape))
    (chunk,) = like.__create_chunk_list__()  # torch's protocol for checkpoints
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


@torch.no_grad()
def fill_(tensor: Tensor, whole: Tensor) -> None:
    """Copy the values of a whole tensor into one of the same shape; of a DTensor into what this rank holds."""
    local_of(tensor).copy_(whole[box_of(tensor).within(Box.whole(tuple(whole.shape)))])


def placed(state: Any) -> Any:
    """Return a tree of state with DTensors in place of every `LocalShard`, as `mapped`. No communication."""
    return mapped(state, lambda path, leaf: leaf.tensor() if isinstance(leaf, LocalShard) else leaf)


def mapped(tree: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """Return a tree of state with `change(path, leaf)` for every leaf. Dictionaries and lists are changed in place."""
    if isinstance(tree, dict) or type(tree) is list:
        for key in tree if isinstance(tree, dict) else range(len(tree)):  # a new Counter would count pairs
            tree[key] = mapped(tree[key], change, (*path, key))
        return tree
    if type(tree) is tuple:
        return tuple(mapped(value, change, (*path, number)) for number, value in enumerate(tree))
    return change(path, tree)


def template(saved: LocalShard, meshes: Mapping[tuple[str, ...], Any]) -> Tensor | None:
    """Return a DTensor without values that is placed as the saved one was; None without such a mesh."""
    mesh = meshes.get(saved.dims)
    if mesh is None:
        return None
    whole = torch.empty(saved.shape, device="meta")
    return _from_local(whole, mesh, tuple(map(_placement, saved.placements)), whole.shape, whole.stride())


def _from_local(values: Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    kind = sys.modules["torch.distributed.tensor"].DTensor
    return kind.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)


def _described(placement: Any) -> str:
    if placement.is_shard():
        return f"shard {placement.dim}"
    if placement.is_replicate():
        return "replicate"
    raise ValueError(f"its placement is {placement}: the ranks hold terms of a sum that is not formed yet")


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard  # a mesh is there, so it is imported already

    kind, *numbers = text.split()
    kinds: dict[str, Any] = {"replicate": Replicate, "shard": Shard}
    return kinds[kind](*map(int, numbers))
