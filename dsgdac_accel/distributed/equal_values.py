"""Gives all workers the same tensors, and sends only those that differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.shards import is_sharded, local_of
from dsgdac_accel.tensor_bytes import begin_digest, finish_digests, is_plain


def make_equal_(named: Sequence[tuple[str, Tensor]], group: WorkerGroup) -> None:
    """Overwrite tensors on every worker by worker 0's, bit by bit. Only those that differ are sent. Collective.

    Quantized weights whose state is outside of their elements cannot be sent. They must be equal.

    Args:
        named: each tensor with its name, the same on all workers. A shard becomes what worker 0 has in its place, and
            everything else is the same on all processes.
        group: the workers.

    Raises:
        ValueError: on all workers, if names, shapes, dtypes or devices differ, or a tensor cannot be compared or sent.
    """
    _make_equal([(name, tensor) for name, tensor in named if not is_sharded(tensor)], group.everyone)
    if group.row.mesh is not None:
        _make_equal([(name, local_of(tensor)) for name, tensor in named if is_sharded(tensor)], group)


def _make_equal(named: Sequence[tuple[str, Tensor]], group: WorkerGroup) -> None:
    if group.size == 1:
        return
    layouts, begun, problem = [], [], None
    for name, tensor in named:
        try:
            layouts.append((name, tuple(tensor.shape), str(tensor.dtype), tensor.device.type))
            begun.append(begin_digest(tensor))
        except Exception as error:  # the other workers wait below
            problem = f"{name} cannot be compared with that of the other workers: {error}"
            break
    plain = [is_plain(tensor) for _, tensor in named[: len(begun)]]
    try:
        digests = list(zip(finish_digests(begun), plain, strict=True))
    except Exception as error:
        digests, problem = [], problem or f"its tensors cannot be compared with those of the other workers: {error}"
    where = "comparing the models of all workers"
    everyone = group.all_gather_object((layouts, digests, problem), where)
    refusal, differing = _refusal(everyone, group.members), []
    if refusal is None:
        found_by_tensor = list(zip(*(found for _, found, _ in everyone), strict=True))
        differing = [number for number, found in enumerate(found_by_tensor) if len(set(found)) > 1]
        fixed = [number for number in differing if not all(plain for _, plain in found_by_tensor[number])]
        if fixed:
            refusal = (
                f"{named[fixed[0]][0]} is quantized and differs between the workers, and its quantization state cannot "
                f"be sent. Load the same base with the same quantization on all workers."
            )
    refusal = group.row.first(refusal, where)  # of a sharded worker, all processes raise what one has found
    if refusal is not None:
        raise ValueError(refusal)
    for number in differing:
        name, tensor = named[number]
        group.broadcast_(tensor, f"starting from equal values of {name}")


def _refusal(everyone: Sequence[tuple[list[tuple], list, str | None]], members: Members) -> str | None:
    """Return why the tensors of the workers, given their layouts, digests and problems, cannot be compared."""
    for worker, (_, _, found) in enumerate(everyone):
        if found:
            return f"{members.named([worker])}: {found}"
    for worker, (layouts, _, _) in enumerate(everyone):
        for one, another in zip_longest(everyone[0][0], layouts, fillvalue="no more tensors"):
            if one != another:
                return (
                    f"all workers must have the same model (names, shapes, dtypes, devices); {members.named([0])} has "
                    f"{one} and {members.named([worker])} has {another}. Build the same model on all workers."
                )
    return None
