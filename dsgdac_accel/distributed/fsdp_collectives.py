"""The collectives of FSDP2 inside a worker, on gloo, with errors that name a lost process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.distributed.row import Row

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older torch
_reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GuardedCollective:
    """A collective of FSDP2 that names a lost process; for `set_custom_all_gather` and `set_custom_reduce_scatter`.

    Args:
        row: the processes of the worker.
        collective: a function of torch.distributed with the arguments output, input and those of the call.
        what: names it in errors.
    """

    def __init__(self, row: Row, collective: Callable[..., Any], what: str) -> None:
        self.row = row
        self.collective = collective
        self.what = what

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the collective on a group of the row. Raises WorkerLostError if a process of it is lost."""
        call = partial(self.collective, output_tensor, input_tensor, *args, group=group, **kwargs)
        row = self.row.group
        if row.closed:  # the model may outlive its training
            return call()
        return row.guarded(call, self.what, peer=1 - row.rank if row.size == 2 else None)


def name_losses(modules: Iterable[Any], row: Row) -> None:
    """Let the collectives of FSDP2 modules raise `WorkerLostError` for a lost process of the worker.

    On gloo only, where the host waits for them.
    """
    if row.size == 1 or row.group.device.type != "cpu":
        return
    for module in modules:
        if hasattr(module, "set_custom_reduce_scatter"):  # newer torch
            module.set_custom_all_gather(GuardedCollective(row, _gather, "gathering the parameters of a worker"))
            module.set_custom_reduce_scatter(GuardedCollective(row, _reduce, "reducing the gradient of a worker"))
