"""Sums over the processes of a run, in which a failure of one is the same clear error on all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsgdac_accel.distributed.group import WorkerGroup


def size_of(group: WorkerGroup | None) -> int:
    """Number of processes; without a group this one is alone."""
    return 1 if group is None else group.size


def rank_of(group: WorkerGroup | None) -> int:
    """Number of this process."""
    return 0 if group is None else group.rank


@torch.inference_mode(False)  # the caller's may be on, and what is made in it cannot be added to outside
def summed(
    contribute: Callable[[Tensor], None], length: int, device: torch.device, group: WorkerGroup | None, what: str
) -> Tensor:
    """Sum over the processes of what `contribute` adds in place to a float64 vector of zeros, (length,). Collective.

    The same bits on all processes. An error in one of them is raised there, and on all others by the number of that
    worker: who fails still takes part in the sum, with a flag in an element of its own, so nobody waits in vain.

    Args:
        contribute: this process's share; may raise.
        length: elements of the vector.
        device: where it lives.
        group: the processes; None for this one alone.
        what: names the sum in errors.
    """
    total = torch.zeros(length + 1, dtype=torch.float64, device=device)
    if group is None or group.size == 1:
        contribute(total[:-1])
        return total[:-1]
    failure: Exception | None = None
    try:
        contribute(total[:-1])
    except Exception as error:
        failure = error
        total.zero_()
        total[-1] = 1
        group.report(f"worker {group.rank} failed in {what}: {error}")
    group.all_reduce_mean_(total, what)
    if total[-1] > 0:
        _raise_everywhere(failure, group, what)
    return total[:-1].mul_(group.size)


def _raise_everywhere(mine: Exception | None, group: WorkerGroup, what: str) -> None:
    failures = group.all_gather_object(
        None if mine is None else (isinstance(mine, ValueError | TypeError), str(mine)),
        f"telling of a failure in {what}",
    )
    if mine is not None:
        raise mine
    rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    kind = ValueError if failure[0] else RuntimeError
    raise kind(f"worker {rank} failed in {what}: {failure[1]}")
