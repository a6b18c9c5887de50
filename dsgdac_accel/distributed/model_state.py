"""State dictionaries with whole tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.shards import gathering_modules, reshard, whole_of


def own_state(model: nn.Module, group: WorkerGroup) -> dict[str, Any]:
    """Return the state dictionary of a model, `cloned`; if workers are several processes, as `gathered_state` does."""
    return cloned(model.state_dict()) if group.row.mesh is None else gathered_state(model, group)


def cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dictionary with copied tensors. Names that share a whole tensor (tied weights) share the copy."""
    copies: dict[tuple, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return copies.setdefault(place, own) if tensor.numel() else own

    return {name: copy_of(value) if isinstance(value, Tensor) else value for name, value in state.items()}


@torch.no_grad()
def gathered_state(model: nn.Module, group: WorkerGroup) -> dict[str, Any]:
    """Return the state dictionary of a sharded model with whole tensors, on the CPU, on one process.

    The processes of worker 0 gather it, one tensor at a time, and the first of them returns it. All others return an
    empty dictionary. Names of tied parameters share a tensor.

    Raises:
        WorkerLostError: not all processes of worker 0 called it within the timeout.
    """
    if group.rank > 0:
        return {}
    keeps = group.row.rank == 0
    wholes: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in wholes:
            gathered = whole_of(value.detach())  # collective: every process of the worker gathers every parameter
            wholes[id(value)] = gathered.to("cpu", copy=True) if keeps else gathered.new_empty(0)
        return wholes.get(id(value), value)

    reshard(gathering_modules([model]))
    found = group.everyone.guarded(
        lambda: {name: whole(value) for name, value in model.state_dict(keep_vars=True).items()},
        "gathering the whole model",
    )
    return found if keeps else {}
