"""Splitting a batch of any structure among several workers of a process, and joining their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

TOKENS_KEY = "num_items_in_batch"
"""Argument by which Transformers models receive the number of tokens to divide a summed loss by."""


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the length of the first dimension of the first tensor among a model's arguments.

    >>> batch_size((), {"scale": 2.0, "images": torch.zeros(6, 3)})
    6
    """
    for leaf in pytree.tree_leaves((list(args), dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ValueError(
        "a batch is split along the first dimension of its tensors, and the model's arguments contain no tensor "
        "with a dimension. Pass the batch as tensors, which may be inside lists, tuples or mappings."
    )


def even_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of `parts` parts of `total` samples; the first ones are larger by one if it does not divide.

    >>> even_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [total // parts + (number < total % parts) for number in range(parts)]


def cut(args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sequence[int]) -> list[tuple[tuple, dict[str, Any]]]:
    """Split a model's arguments into those of each worker.

    Tensors with as many rows as the batch are split along the first dimension, and everything else goes to all workers.
    `num_items_in_batch`, by which Transformers models divide their loss, becomes each worker's own: its entry of a
    vector with one entry per worker, or its share of a number, in proportion to its samples.

    Args:
        args, kwargs: the model's arguments.
        sizes: samples of each worker; they add up to the batch.

    Returns:
        The (args, kwargs) of each worker.

    Raises:
        ValueError: the batch is ragged (lists of texts or of tensors that differ in shape, packed sequences) and has no
            first dimension to split.
    """
    total = sum(sizes)
    _refuse_ragged((list(args), dict(kwargs)))
    counts = kwargs.get(TOKENS_KEY)
    leaves, structure = pytree.tree_flatten((list(args), dict(kwargs)))
    pieces = [
        leaf.split(list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == total else None
        for leaf in leaves
    ]
    parts = []
    for number, size in enumerate(sizes):
        mine = [leaf if piece is None else piece[number] for leaf, piece in zip(leaves, pieces, strict=True)]
        part_args, part_kwargs = pytree.tree_unflatten(mine, structure)
        if counts is not None:
            own = isinstance(counts, Tensor) and counts.dim() > 0
            part_kwargs[TOKENS_KEY] = counts[number] if own else counts * (size / total)
        parts.append((tuple(part_args), part_kwargs))
    return parts


def _refuse_ragged(values: Any) -> None:
    if isinstance(values, PackedSequence):
        what = "a PackedSequence"
    elif isinstance(values, Mapping):
        for value in values.values():
            _refuse_ragged(value)
        return
    elif isinstance(values, list | tuple):
        tensors = [value for value in values if isinstance(value, Tensor)]
        if isinstance(values, list) and len(values) > 1 and all(isinstance(value, str) for value in values):
            what = f"a list of {len(values)} texts"
        elif isinstance(values, list) and len(values) == len(tensors) > 1 and len({t.shape for t in tensors}) > 1:
            what = f"a list of {len(values)} tensors that differ in shape"
        else:
            for value in values:
                _refuse_ragged(value)
            return
    else:
        return
    raise ValueError(
        f"a batch is split along the first dimension of its tensors, and the model got {what}. Pad the batch to "
        f"tensors (batch, ...), or launch one process per worker (workers_per_process=1)."
    )


def join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of all workers into one.

    Tensors are concatenated along the first dimension, floating-point tensors of shape () averaged with weights
    `sizes`. Other values stay if all workers returned the same, and become a tuple otherwise.

    >>> join([(torch.tensor([1.0]), torch.tensor(1.0)), (torch.tensor([2.0, 3.0]), torch.tensor(4.0))], [1, 2])
    (tensor([1., 2., 3.]), tensor(3.))
    """
    if len(outputs) == 1:
        return outputs[0]
    flattened = [pytree.tree_flatten(output) for output in outputs]
    structure = flattened[0][1]
    if any(other != structure for _, other in flattened[1:]):
        raise ValueError(
            "the workers of this process returned outputs of different structures, which cannot be joined. Return "
            "the same kind of output from the model for every batch."
        )
    joined = [_join_leaves(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in flattened), strict=True)]
    return pytree.tree_unflatten(joined, structure)


def _join_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor) and first.dim() > 0:
        if any(leaf.shape[1:] != first.shape[1:] for leaf in leaves):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"the outputs of the workers of this process differ in more than their number of samples: {shapes}. "
                f"Return tensors (batch, ...) of one shape from the model, such as padded ones."
            )
        return torch.cat(list(leaves))
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        total = sum(sizes)
        return torch.stack([leaf * (size / total) for leaf, size in zip(leaves, sizes, strict=True)]).sum(0)
    if isinstance(first, Tensor):
        return first if all(torch.equal(leaf, first) for leaf in leaves) else torch.stack(list(leaves))
    same = all(leaf is first or (type(leaf) is type(first) and leaf == first) for leaf in leaves)
    return first if same else tuple(leaves)


class _ScaledGradient(torch.autograd.Function):
    """The identity, with its gradient multiplied by a number."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, scale: float) -> Tensor:
        context.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.scale, None


def requires_grad(values: Any) -> bool:
    """Return whether any tensor of a structure requires a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(values))


def with_scaled_gradient(output: Any, scale: float) -> Any:
    """Return the same output, with gradients through its tensors multiplied by `scale`."""
    if scale == 1.0:
        return output

    def scaled(leaf: Any) -> Any:
        return _ScaledGradient.apply(leaf, scale) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

    return scaled(output) if isinstance(output, Tensor) else pytree.tree_map(scaled, output)
