"""The models, loose parameters and gradients of one worker as trees of tensors, and back, in place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.checkpoint.local_shards import LocalShard
from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.core.parameters import as_parameter_list
from dsgdac_accel.distributed.shards import local_of
from dsgdac_accel.tensor_bytes import as_bytes, is_plain, narrowed
from dsgdac_accel.wrappers import eager_name, unwrapped

_SHOWN = 3  # differences named in an error
_OF_REPLICA = re.compile(r"replicas\.(\d+)\.(.+)")  # names of VirtualWorkers

# ---- models


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return parameters, buffers and extra states by name: tied parameters once, non-persistent buffers included.

    The tensors are the model's own. Names are those of the model without `torch.compile` and DDP.
    """
    inner = unwrapped(model)
    caches = _cache_names(inner)
    buffers = dict(inner.named_buffers())
    return {
        "parameters": _by_eager_name(dict(inner.named_parameters())),
        "buffers": _by_eager_name({name: buffer for name, buffer in buffers.items() if name not in caches}),
        "caches": _by_eager_name({name: buffer for name, buffer in buffers.items() if name in caches}),
        "extra": _by_eager_name({name: module.get_extra_state() for name, module in _with_extra_state(inner).items()}),
    }


@torch.no_grad()
def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy the values of `model_state` into the model's own tensors, so that tied tensors and views stay so.

    Non-persistent buffers, such as caches that grow during training, may be missing on either side or differ in shape.

    Raises:
        CheckpointError: the state is of another model; names the first differences, and nothing was changed.
    """
    require_same_model(model, state)
    inner = unwrapped(model)
    own = model_state(inner)
    for part in ("parameters", "buffers"):
        for name, tensor in own[part].items():
            if state[part][name] is not tensor:  # a common tensor that the model has already
                _copy_values(tensor, state[part][name])
    modules = {eager_name(name): module for name, module in inner.named_modules()}
    for name, saved in state["caches"].items():
        buffer = own["caches"].get(name)
        if buffer is None or buffer is saved:
            continue
        if _layout(buffer) == _layout(saved):
            _copy_values(buffer, saved)
        else:
            owner, _, short = name.rpartition(".")
            modules[owner]._buffers[short] = saved.to(buffer.device)
    for name, module in _with_extra_state(inner).items():
        module.set_extra_state(state["extra"][eager_name(name)])


def require_same_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `state` is of a model with the same names, shapes and dtypes."""
    own = model_state(model)
    differences = []
    for part, kind in (("parameters", "parameter"), ("buffers", "buffer"), ("extra", "extra state of")):
        mine, saved = own[part], state.get(part, {})
        differences += [f"{kind} {name!r} is not in the checkpoint" for name in mine if name not in saved]
        differences += [f"{kind} {name!r} is not in the model" for name in saved if name not in mine]
        if part != "extra":
            differences += [
                f"{kind} {name!r} is {_layout(saved[name])} in the checkpoint and {_layout(tensor)} in the model"
                for name, tensor in mine.items()
                if name in saved and _layout(saved[name]) != _layout(tensor)
            ]
            differences += [
                f"{kind} {name!r} is quantized in the model, and has other values in the checkpoint"
                for name, tensor in mine.items()
                if name in saved and not (is_plain(local_of(tensor)) or _is_same(saved[name], tensor))
            ]
    if differences:
        more = len(differences) - _SHOWN
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(differences[:_SHOWN])}"
            f"{f'; and {more} more differences' if more > 0 else ''}. Build the model as it was when saved."
        )


def by_replica(named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split values by name into one dictionary per replica of `VirtualWorkers`; other models have a single one.

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


def in_first_replica(name: str) -> str:
    """Return the name of the same value in the first replica of `VirtualWorkers`.

    >>> in_first_replica("replicas.3.weight"), in_first_replica("weight")
    ('replicas.0.weight', 'weight')
    """
    match = _OF_REPLICA.fullmatch(name)
    return name if match is None else f"replicas.0.{match[2]}"


def _by_eager_name(values: dict[str, Any]) -> dict[str, Any]:
    return {eager_name(name): value for name, value in values.items()}


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


def _copy_values(own: Tensor, saved: Tensor | LocalShard) -> None:
    """Copy saved values into a tensor; of a DTensor into this rank's part of it."""
    if isinstance(saved, LocalShard):
        local_of(own).copy_(saved.values)
    else:
        narrowed(own, own).copy_(narrowed(saved, own))


def _is_same(saved: Tensor, quantized: Tensor) -> bool:
    """Return whether a quantized weight need not be loaded: its quantization state could not be."""
    if saved is quantized:
        return True
    whole = type(quantized.data) is Tensor and _layout(saved) == _layout(quantized)
    return whole and torch.equal(as_bytes(saved).cpu(), as_bytes(quantized).cpu())


def _layout(tensor: Tensor | LocalShard) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ---- parameters outside models


def loose_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Any], masters: Mapping[int, Tensor]
) -> list[list[Tensor]]:
    """Return of each optimizer the parameters that belong to none of the models, and masters.

    Args:
        models: the models.
        optimizers: the optimizers.
        masters: float32 masters, by the `id` of their parameters.
    """
    known = {id(parameter) for model in models for parameter in model.parameters()}
    listed = [as_parameter_list(optimizer.param_groups) for optimizer in optimizers]
    return [[masters.get(id(p), p) for p in mine if id(p) in masters or id(p) not in known] for mine in listed]


@torch.no_grad()
def load_loose_parameters(loose: Sequence[Sequence[Tensor]], saved: Sequence[Sequence[Tensor]]) -> None:
    """Copy saved values into `loose_parameters`, in place.

    Raises:
        CheckpointError: the shapes or dtypes differ.
    """
    for mine, theirs in zip(loose, saved, strict=True):
        if [_layout(parameter) for parameter in mine] != [_layout(parameter) for parameter in theirs]:
            raise CheckpointError(
                "the checkpoint is of another optimizer: its parameters outside of models, or the float32 masters of "
                "bf16 and fp16 parameters, have other shapes. Build it, and freeze parameters, as when it was saved."
            )
        for parameter, value in zip(mine, theirs, strict=True):
            _copy_values(parameter, value)


# ---- gradients, inside an accumulation window


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the existing gradients by parameter name."""
    return _by_eager_name({name: p.grad for name, p in unwrapped(model).named_parameters() if p.grad is not None})


def load_gradients(model: nn.Module, state: Mapping[str, Tensor] | None) -> None:
    """Set the gradients of `gradients_of`, and None for all other parameters."""
    for name, parameter in unwrapped(model).named_parameters():
        gradient = None if state is None else state.get(eager_name(name))
        if gradient is None:
            parameter.grad = None
        else:
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype)
            _copy_values(parameter.grad, gradient)
