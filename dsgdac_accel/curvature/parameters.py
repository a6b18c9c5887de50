"""The trainable parameters of a model as one flat vector, and the workers' consensus errors in that form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.tensor_bytes import is_plain
from dsgdac_accel.wrappers import eager_name, unwrapped

State = Mapping[str, Any]
"""Values by name: a `state_dict()`, or the parameters in a checkpoint."""

_SHOWN = 3  # differences named in an error


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, in the order of the flat vector, tied parameters once.

    Parameters that the loss does not use are included; their derivatives are zero.

    Raises:
        ValueError: there are none, or they are in low precision, sharded or on several devices.
    """
    inner = unwrapped(model)
    trainable = {eager_name(name): p for name, p in inner.named_parameters() if p.requires_grad}
    if not any(parameter.numel() for parameter in trainable.values()):
        some = any(parameter.numel() for parameter in inner.parameters())
        problem = "all parameters of the model are frozen. Unfreeze some." if some else "the model has none."
        raise ValueError(f"curvature needs a trainable parameter; {problem}")
    for name, parameter in trainable.items():
        if not is_plain(parameter):
            raise ValueError(
                f"curvature needs ordinary parameters; {name} is a {type(parameter.data).__name__}. Load the saved "
                f"average into an ordinary model."
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"curvature needs float32 or float64 parameters; {name} is {parameter.dtype}. Convert a copy with "
                f"`model.float()`."
            )
    devices = {parameter.device for parameter in trainable.values()}
    if len(devices) > 1:
        raise ValueError(f"curvature needs all parameters on one device; got {sorted(map(str, devices))}.")
    return trainable


def vector_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of the flat vector: float64 if any parameter is, else float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32


def unflatten(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` (d,) in the shapes of the parameters."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


@torch.no_grad()
def flatten(model: nn.Module, values: State | None = None) -> Tensor:
    """Copy the trainable parameters of a model to one vector (d,).

    Args:
        model: determines which values are taken, in which order.
        values: values by name to take instead, such as a state dictionary. A tied parameter may have any of its names.

    Raises:
        ValueError: the values are of another model, or nothing is trainable.

    >>> net = nn.Linear(2, 1)
    >>> flatten(net, {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
    tensor([1., 2., 3.])
    """
    trainable = trainable_parameters(model)
    found: Iterable[Tensor] = trainable.values() if values is None else _values_of(model, trainable, values)
    first, dtype = next(iter(trainable.values())), vector_dtype(trainable.values())
    return torch.cat([value.detach().to(first.device, dtype).reshape(-1) for value in found])


def _values_of(model: nn.Module, trainable: Mapping[str, nn.Parameter], values: State) -> list[Tensor]:
    inner = unwrapped(model)
    named = {eager_name(name): value for name, value in values.items()}
    known = set(map(eager_name, inner.state_dict(keep_vars=True)))
    by_parameter: dict[int, Tensor] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        known.add(eager_name(name))
        if eager_name(name) in named:
            by_parameter.setdefault(id(parameter), named[eager_name(name)])
    missing = [name for name, parameter in trainable.items() if id(parameter) not in by_parameter]
    found = {name: by_parameter[id(parameter)] for name, parameter in trainable.items() if name not in missing}
    differences = [f"without {name}" for name in missing]
    differences += [f"with {name}" for name in sorted(named.keys() - known)]
    differences += [
        f"{name}: {tuple(value.shape)} instead of {tuple(trainable[name].shape)}"
        for name, value in found.items()
        if value.shape != trainable[name].shape
    ]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ValueError(
            f"the values are of another model ({'; '.join(differences[:_SHOWN])}{more}). Build the model that they "
            f"were saved from."
        )
    return list(found.values())


@torch.no_grad()
def set_parameters(model: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector (d,) to the trainable parameters of a model, in place."""
    parameters = list(trainable_parameters(model).values())
    dim = sum(parameter.numel() for parameter in parameters)
    if flat.shape != (dim,):
        raise ValueError(f"expected a vector of shape ({dim},) for this model; got {tuple(flat.shape)}.")
    for parameter, value in zip(parameters, unflatten(flat, parameters), strict=True):
        parameter.copy_(value)


@torch.no_grad()
def consensus_errors(workers: Sequence[State], model: nn.Module) -> tuple[list[Tensor], Tensor]:
    """Compute the consensus errors delta_i = x_i - mean_j x_j of all workers, from a checkpoint for example.

    Args:
        workers: values of each worker by name; see `dsgdac_accel.checkpoint.worker_parameters`. In a live run,
            `accelerator.consensus_errors` gives the errors of the workers of its process.
        model: determines which parameters are taken, in which order. Its values do not matter.

    Returns:
        The errors, each (d,), and the mean, (d,).

    Raises:
        ValueError: there are no workers, or one is of another model; names it and the first differences.

    >>> workers = [{"weight": torch.tensor([[1.0]])}, {"weight": torch.tensor([[3.0]])}]
    >>> errors, mean = consensus_errors(workers, nn.Linear(1, 1, bias=False))
    >>> errors, mean
    ([tensor([-1.]), tensor([1.])], tensor([2.]))
    """
    if not workers:
        raise ValueError("consensus errors need at least one worker; got none.")
    flats = []
    for number, state in enumerate(workers):
        try:
            flats.append(flatten(model, state))
        except ValueError as error:
            raise ValueError(f"worker {number}: {error}") from error
    total = torch.zeros_like(flats[0], dtype=torch.float64)
    for flat in flats:
        total += flat
    mean = total / len(flats)
    # The difference is taken in float64, because errors may be far smaller than the weights.
    return [(flat - mean).to(flat.dtype) for flat in flats], mean.to(flats[0].dtype)
