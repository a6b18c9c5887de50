"""Sums over the processes of a run. An error on one process is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsgdac_accel.distributed.group import WorkerGroup


@torch.inference_mode(False)  # tensors made in the caller's inference mode could not be added to outside of it
def summed(
    contribute: Callable[[Tensor], None], length: int, device: torch.device, group: WorkerGroup | None, what: str
) -> Tensor:
    """Sum a float64 vector over the processes, with the same bits on all of them. Collective.

    A process that fails still takes part in the sum and sets a flag in an extra element, so no process waits in vain.

    Args:
        contribute: adds the share of this process to a vector of zeros, in place; may raise.
        length: number of elements.
        device: device of the vector.
        group: the processes; None for this one alone.
        what: name of the sum in errors.

    Returns:
        The sum, shape (length,), float64.

    Raises:
        ValueError, RuntimeError: another process failed; the error names it. On the failing process, its own error.
    """
    total = torch.zeros(length + 1, dtype=torch.float64, device=device)
    if group is None or group.size == 1:
        contribute(total[:-1])
        return total[:-1]
    mine: Exception | None = None
    try:
        contribute(total[:-1])
    except Exception as error:
        mine = error
        total.zero_()
        total[-1].fill_(1)  # an assignment would copy a tensor of the host
        group.report(f"worker {group.rank} failed in {what}: {error}")
    group.all_reduce_mean_(total, what)
    if total[-1] == 0:
        return total[:-1].mul_(group.size)
    told = None if mine is None else (isinstance(mine, ValueError | TypeError), str(mine))
    failures = group.all_gather_object(told, f"sharing an error in {what}")
    if mine is not None:
        raise mine
    rank, (of_value, message) = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    raise (ValueError if of_value else RuntimeError)(f"worker {rank} failed in {what}: {message}")
