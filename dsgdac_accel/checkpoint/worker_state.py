"""The state of one worker as trees of tensors and plain values, and putting it back in place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.core.buckets import as_parameter_list

_SHOWN = 3  # differences named in an error
_OF_REPLICA = re.compile(r"replicas\.(\d+)\.(.+)")  # what VirtualWorkers puts before the names of a model

# ---- models


def model_state(model: nn.Module) -> dict[str, Any]:
    """All parameters, tied ones once, all buffers, also those that `state_dict` leaves out, and extra states, by name.

    The tensors are the model's own. Names are those of the model without `torch.compile` and DDP.
    """
    inner = bare(model)
    caches = _cache_names(inner)
    buffers = dict(inner.named_buffers())
    return {
        "parameters": _named(dict(inner.named_parameters())),
        "buffers": _named({name: buffer for name, buffer in buffers.items() if name not in caches}),
        "caches": _named({name: buffer for name, buffer in buffers.items() if name in caches}),
        "extra": _named({name: module.get_extra_state() for name, module in _with_extra_state(inner).items()}),
    }


@torch.no_grad()
def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy what `model_state` gave into the model, in place: nothing is re-pointed, and tied tensors stay tied.

    Buffers that `state_dict` leaves out may be there on one side only, as caches that grow during training are.

    Raises CheckpointError for the state of another model, naming the first differences; then nothing was changed.
    """
    require_same_model(model, state)
    inner = bare(model)
    own = model_state(inner)
    for part in ("parameters", "buffers"):
        for name, tensor in own[part].items():
            _once(tensor, tensor).copy_(_once(state[part][name], tensor))
    modules = {eager(name): module for name, module in inner.named_modules()}
    for name, saved in state["caches"].items():
        buffer = own["caches"].get(name)
        if buffer is None:
            continue
        if _layout(buffer) == _layout(saved):
            _once(buffer, buffer).copy_(_once(saved, buffer))
        else:
            owner, _, short = name.rpartition(".")
            modules[owner]._buffers[short] = saved.to(buffer.device)
    for name, module in _with_extra_state(inner).items():
        module.set_extra_state(state["extra"][eager(name)])


def bare(model: nn.Module) -> nn.Module:
    """The model without DDP and `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model


def eager(name: str) -> str:
    """Without what `torch.compile` of a part of the model puts into names."""
    return name.replace("_orig_mod.", "")


def _named(values: dict[str, Any]) -> dict[str, Any]:
    return {eager(name): value for name, value in values.items()}


def _cache_names(model: nn.Module) -> set[str]:
    return {
        f"{prefix}{'.' if prefix else ''}{name}"
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def require_same_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `state` is of a model with the same names, shapes and dtypes."""
    own = model_state(model)
    differences = []
    for part in ("parameters", "buffers", "extra"):
        mine, saved = own[part], state.get(part, {})
        kind = {"parameters": "parameter", "buffers": "buffer", "extra": "extra state of"}[part]
        differences += [f"{kind} {name!r} is not in the checkpoint" for name in mine if name not in saved]
        differences += [f"{kind} {name!r} is not in the model" for name in saved if name not in mine]
        if part != "extra":
            differences += [
                f"{kind} {name!r} is {_layout(saved[name])} in the checkpoint and {_layout(tensor)} in the model"
                for name, tensor in mine.items()
                if name in saved and _layout(saved[name]) != _layout(tensor)
            ]
    if differences:
        more = len(differences) - _SHOWN
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(differences[:_SHOWN])}"
            f"{f'; and {more} more differences' if more > 0 else ''}. Build the model as it was when saved."
        )


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """The first entry only, along dimensions of which `like` repeats one: torch writes to no place of memory twice."""
    for dimension, stride in enumerate(like.stride()):
        if stride == 0 and like.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def by_replica(named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Values by name, one dictionary for each replica of `VirtualWorkers`, or a single one of any other model.

    >>> [list(mine) for mine in by_replica({"replicas.0.weight": torch.ones(1), "replicas.1.weight": torch.ones(1)})]
    [['weight'], ['weight']]
    """
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in named.items():
        match = _OF_REPLICA.fullmatch(name)
        if match is None:
            return [dict(named)]
        found.setdefault(int(match[1]), {})[match[2]] = value
    return [found[number] for number in sorted(found)]


# ---- parameters that are in no model


def loose_parameters(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[list[Tensor]]:
    """The parameters of each optimizer that belong to none of the models."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    return [
        [parameter for parameter in as_parameter_list(optimizer.param_groups) if id(parameter) not in known]
        for optimizer in optimizers
    ]


@torch.no_grad()
def load_loose_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Any], saved: Sequence[Sequence[Tensor]]
) -> None:
    """Copy what `loose_parameters` gave into the same parameters, in place."""
    for mine, theirs in zip(loose_parameters(models, optimizers), saved, strict=True):
        if [_layout(parameter) for parameter in mine] != [_layout(parameter) for parameter in theirs]:
            raise CheckpointError(
                "the checkpoint is of another optimizer: its parameters outside of models have other shapes. Build it "
                "as it was when saved."
            )
        for parameter, value in zip(mine, theirs, strict=True):
            parameter.copy_(value)


# ---- gradients, inside an accumulation window


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, by name."""
    return _named({name: p.grad for name, p in bare(model).named_parameters() if p.grad is not None})


def load_gradients(model: nn.Module, state: Mapping[str, Tensor] | None) -> None:
    """Give parameters the gradients of `gradients_of`, and none to the others."""
    for name, parameter in bare(model).named_parameters():
        gradient = None if state is None else state.get(eager(name))
        if gradient is None:
            parameter.grad = None
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
