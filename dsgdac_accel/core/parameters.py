"""Lists and names of parameters, and which of them can be mixed exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

from dsgdac_accel.distributed.shards import is_sharded, local_of

MIXED_DTYPES = (torch.float32, torch.float64)
LOAD_IN_FLOAT32 = (
    "Load the model with from_pretrained(..., dtype=torch.float32) and compute in low precision, with bf16=True "
    "(Trainer) or mixed_precision='bf16' (Accelerate)."
)


def as_parameter_list(parameters: object) -> list[Parameter]:
    """Return every distinct parameter in a single one, an iterable of them, or optimizer-style parameter groups.

    >>> weight = Parameter(torch.ones(2))
    >>> len(as_parameter_list(weight)), len(as_parameter_list([{"params": [weight, weight]}]))
    (1, 1)
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(
            f"expected parameters, an iterable of them, or parameter groups; got {type(parameters).__name__}."
        )
    found: dict[int, Parameter] = {}
    for item in parameters:
        if isinstance(item, Tensor):
            found.setdefault(id(item), item)  # type: ignore[arg-type]
        elif isinstance(item, Mapping) and "params" in item:
            inner = item["params"]
            if not (isinstance(inner, list) and set(map(type, inner)) <= {Parameter, Tensor}):
                inner = as_parameter_list(inner)
            found.update(zip(map(id, inner), inner, strict=True))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
            found.setdefault(id(item[1]), item[1])  # type: ignore[arg-type]  # ("name", parameter)
        else:
            raise TypeError(f"expected a parameter or a parameter group; got {type(item).__name__}.")
    return list(found.values())


def extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory, gaps included.

    >>> extent(torch.zeros(3, 4).T), extent(torch.zeros(10)[::2]), extent(torch.tensor(1.0)), extent(torch.zeros(0, 3))
    (12, 9, 1, 0)
    """
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_of(tensor: Tensor) -> tuple:
    """Return what is equal for tensors that are the same memory, seen in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


# ---- what can be mixed exactly


def name_of(parameter: Parameter, names: Mapping[int, str]) -> str:
    """Return the parameter's name from `names` (by `id`), or its shape if it has none."""
    if id(parameter) in names:
        return names[id(parameter)]
    lazy = isinstance(parameter, UninitializedParameter)  # its shape cannot be read
    return "a parameter" if lazy else f"a parameter of shape {tuple(parameter.shape)}"


def refuse_unmixable(
    parameters: Sequence[Parameter], names: Mapping[int, str], by_masters: Collection[torch.dtype] = ()
) -> None:
    """Raise ValueError, with the parameter's name, unless every parameter can be mixed exactly.

    Low precision, complex, expanded, overlapping, uninitialized and sharded parameters cannot.

    Args:
        parameters: those to mix.
        names: what to call them, by `id`.
        by_masters: dtypes of parameters that are mixed by float32 masters.
    """
    for parameter in parameters:
        _refuse_kind(parameter, name_of(parameter, names), by_masters)
    _refuse_overlap(parameters, names)


def _refuse_kind(parameter: Parameter, name: str, by_masters: Collection[torch.dtype]) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"{name} of a lazy module has no values yet; run one batch through the model before `prepare`."
        )
    if type(local_of(parameter).data) is not Tensor:
        raise ValueError(
            f"{name} is a {type(local_of(parameter).data).__name__}; trained parameters must be ordinary tensors. "
            f"Switch quantization off."
        )
    if is_sharded(parameter) and parameter.dtype not in MIXED_DTYPES:
        raise ValueError(
            f"{name} is {parameter.dtype} and sharded; shards must be float32 or float64. Load the model in float32, "
            f"and compute in bf16: fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
        )
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load the model before `prepare`.")
    if parameter.dtype in (torch.float16, torch.bfloat16) and parameter.dtype not in by_masters:
        raise ValueError(
            f"{name} is {parameter.dtype}: small consensus updates would be rounded away. Train it by "
            f"`GossipAccelerator` or `GossipCallback`, which mix a float32 master of it, or: {LOAD_IN_FLOAT32}"
        )
    if parameter.dtype not in (*MIXED_DTYPES, *by_masters) or parameter.layout != torch.strided:
        raise ValueError(
            f"{name} is {parameter.dtype} ({parameter.layout}); trainable parameters must be dense float32 or float64, "
            f"or bfloat16 or float16 with a float32 master. Freeze it (`requires_grad_(False)`), or: {LOAD_IN_FLOAT32}"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(f"{name} is expanded: several of its elements share one value in memory. Store a `.clone()`.")


def _refuse_overlap(parameters: Sequence[Parameter], names: Mapping[int, str]) -> None:
    """Refuse parameters that share only part of their memory; interleaved slices of one tensor are fine."""
    by_storage: dict[tuple, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.numel() and not is_sharded(parameter):  # FSDP2 gives each shard memory of its own
            memory = parameter.untyped_storage().data_ptr(), parameter.dtype, parameter.device
            by_storage.setdefault(memory, []).append(parameter)
    for sharers in by_storage.values():
        distinct = list({(p.storage_offset(), tuple(p.shape), p.stride()): p for p in sharers}.values())
        if len(distinct) == 1:
            continue
        owner_at = torch.full(
            (max(p.storage_offset() + extent(p) for p in distinct),), -1, dtype=torch.int32, device="cpu"
        )
        for number, parameter in enumerate(distinct):
            mine = owner_at.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
            if (mine >= 0).any():
                other = distinct[int(mine.max())]
                raise ValueError(
                    f"{name_of(parameter, names)} and {name_of(other, names)} share part of their memory. Tie whole "
                    f"parameters (the same Parameter under two names), or store a `.clone()` of one."
                )
            mine.fill_(number)
