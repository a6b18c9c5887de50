"""Results of an evaluation that were gathered from all processes, once for each batch that was read."""

from __future__ import annotations

from typing import Any

from accelerate.utils.operations import recursively_apply
from torch import Tensor

from dsgdac_accel.distributed.group import WorkerGroup


def of_readers(gathered: Any, group: WorkerGroup) -> Any:
    """Return what the first rank of each reader gave, from tensors with the results of all ranks in a row.

    Args:
        gathered: a tensor (ranks * n, ...), or a tree of them.
        group: all ranks; `same_data` of them in a row have read the same batch.
    """
    if group.same_data == 1:
        return gathered

    def first_of_each(results: Tensor) -> Tensor:
        by_rank = results.reshape(group.size, -1, *results.shape[1:])
        return by_rank[:: group.same_data].reshape(-1, *results.shape[1:])

    return recursively_apply(first_of_each, gathered)


def is_all_tensors(data: Any) -> bool:
    """Return whether `gather_for_metrics` takes data for tensors, and not for Python objects."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
