"""Tensors of which this process holds a shard: torch's DTensors, which FSDP2 makes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DIMENSIONS = ("dp_replicate", "dp_shard", "dp_shard_cp")
"""Dimensions that a mesh may have: workers and shards, which Accelerate calls by the last name for FSDP2."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # seconds to import, and without it there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process, in the tensor's own memory; an ordinary tensor as it is."""
    sharded: Any = tensor
    return sharded._local_tensor if is_sharded(tensor) else tensor


def local_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield the name of each parameter of a model, the parameter, and its values in this process, see `local_of`."""
    for name, parameter in model.named_parameters():
        yield name, parameter, local_of(parameter)


def has_shards(model: nn.Module) -> bool:
    """Return whether a parameter of the model is a DTensor."""
    return any(map(is_sharded, model.parameters()))


def refuse_other_splits(model: nn.Module) -> None:
    """Raise ValueError if a model is split in another way than by FSDP2 over the shards of a worker."""
    for module in model.modules():
        planned = getattr(module, "_tp_size", None)  # by tp_plan= of Transformers
        refuse_other_dimensions({"tp": planned if isinstance(planned, int) else 1}, "the model")
    by_fsdp = {id(parameter) for module in gathering_modules([model]) for parameter in _sharded_by(module)}
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and id(parameter) not in by_fsdp:  # those of FSDP2 are compared with the workers' mesh
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            refuse_other_dimensions(dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)), name)


def refuse_other_dimensions(sizes: Mapping[str, int], what: str) -> None:
    """Raise ValueError if processes split a worker over another dimension than FSDP2's shards.

    Args:
        sizes: number of processes along each dimension, by its name.
        what: what has the dimensions, for the message.
    """
    for name, size in sizes.items():
        if size > 1 and name not in _DIMENSIONS:
            raise ValueError(
                f"{what} splits a worker over {size} processes by '{name}', and only FSDP2 ('dp_shard') may split one. "
                f"Use device_mesh= with fully_shard, or ParallelismConfig(dp_replicate_size=workers, "
                f"dp_shard_size=shards), as in docs/sharded.md."
            )


def gathering_modules(models: Iterable[nn.Module]) -> list[Any]:
    """Return the modules to which `fully_shard` of FSDP2 was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for model in models for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(modules: Iterable[Any]) -> None:
    """Let FSDP2 drop the whole parameters that `gathering_modules` gathered, so that changes of shards are noticed.

    After a forward pass without a backward pass, FSDP2 keeps those of the root module, and the next forward pass would
    compute with them. Where nothing is gathered, this costs little.
    """
    for module in modules:
        module.reshard()


def gather_for(model: Any, method: str) -> None:
    """Let FSDP2 gather the parameters of the root module for a method of the model as for `forward`, if it has both."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(model, method):
        fsdp.register_fsdp_forward_method(model, method)  # does nothing to a model that is not sharded


def has_unreduced_gradients(modules: Iterable[Any]) -> bool:
    """Return whether FSDP2 holds gradients that are not summed over the shards yet.

    They are on no parameter of the model; `set_requires_gradient_sync(False)` keeps them until a later backward pass.
    """
    states = [module._get_fsdp_state() for module in modules]
    groups = [group for state in states for group in _parameter_groups(state)]
    return any(
        gradient is not None
        for group in groups
        for parameter in group.fsdp_params
        for gradient in (
            getattr(parameter, "unsharded_accumulated_grad", None),
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
    )


def _sharded_by(module: Any) -> list[nn.Parameter]:
    """Return the shards that FSDP2 made for the parameters of a module."""
    groups = _parameter_groups(module._get_fsdp_state())
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def _parameter_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.13
    return [group for group in (several or [state._fsdp_param_group]) if group is not None]


def whole_of(tensor: Tensor) -> Tensor:
    """Return a tensor with all its shards. Collective over the mesh of a DTensor."""
    whole: Any = tensor
    return whole.full_tensor() if is_sharded(tensor) else tensor
