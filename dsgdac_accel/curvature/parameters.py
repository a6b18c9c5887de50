"""The trainable parameters of a model as one flat vector, and the workers' consensus errors in that form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.curvature.collective import summed
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.tensor_bytes import is_plain
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica
from dsgdac_accel.wrappers import eager_name, unwrapped

State = Mapping[str, Any]
"""Values by name: a `state_dict()`, or the parameters in a checkpoint."""

_SHOWN = 3  # differences named in an error


@dataclass(frozen=True)
class ParameterLayout:
    """Position of each trainable parameter in the flat vector: the order of `named_parameters`, tied parameters once.

    Frozen parameters are left out. Parameters that the loss does not use are included; their derivatives are zero.
    """

    names: tuple[str, ...]
    """First name of each parameter, without the parts that `torch.compile` adds."""
    aliases: tuple[tuple[str, ...], ...]
    """All names of each parameter; tied parameters have several."""
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    """Dtype of the flat vector: float64 if any parameter is, else float32."""
    device: torch.device
    known: frozenset[str]
    """All names that a state dictionary of the model can have."""

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """Return the layout of a model, which may be compiled or in DDP.

        Raises:
            ValueError: the model has no trainable parameters, or they are in low precision or on several devices.
        """
        inner = unwrapped(model)
        trainable = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        _require_measurable(inner, trainable)
        every = list(inner.named_parameters(remove_duplicate=False))
        names_of: dict[int, list[str]] = {id(parameter): [] for parameter in trainable.values()}
        for name, parameter in every:
            if id(parameter) in names_of:
                names_of[id(parameter)].append(eager_name(name))
        wide = any(parameter.dtype == torch.float64 for parameter in trainable.values())
        return cls(
            names=tuple(eager_name(name) for name in trainable),
            aliases=tuple(tuple(names_of[id(parameter)]) for parameter in trainable.values()),
            shapes=tuple(parameter.shape for parameter in trainable.values()),
            dtype=torch.float64 if wide else torch.float32,
            device=next(iter(trainable.values())).device,
            known=frozenset(map(eager_name, [*inner.state_dict(keep_vars=True), *(name for name, _ in every)])),
        )

    @property
    def dim(self) -> int:
        """Number d of trainable values."""
        return sum(math.prod(shape) for shape in self.shapes)

    @torch.no_grad()
    def flatten(self, values: State | Iterable[Tensor]) -> Tensor:
        """Copy values to a flat vector (d,).

        Args:
            values: values by name, or tensors in the order of the parameters.

        Raises:
            ValueError: the values are of another model; names the first differences.
        """
        found = self._by_name(values) if isinstance(values, Mapping) else list(values)
        if len(found) != len(self.names):
            raise ValueError(f"expected {len(self.names)} tensors, one per trainable parameter; got {len(found)}.")
        wrong = [
            f"{name}: {tuple(value.shape)} instead of {tuple(shape)}"
            for name, value, shape in zip(self.names, found, self.shapes, strict=True)
            if value.shape != shape
        ]
        if wrong:
            raise ValueError(f"the values are of another model ({_first(wrong)}).")
        return torch.cat([value.detach().to(self.device, self.dtype).reshape(-1) for value in found])

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of `flat` (d,) by name, in the shapes of the parameters."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def _by_name(self, values: State) -> list[Tensor]:
        named = {eager_name(name): value for name, value in values.items()}
        missing = [names[0] for names in self.aliases if not any(name in named for name in names)]
        unknown = sorted(named.keys() - self.known)
        if missing or unknown:
            parts = [f"without {_first(missing)}"] if missing else []
            parts += [f"with {_first(unknown)}"] if unknown else []
            raise ValueError(
                f"the values are of another model ({', '.join(parts)}). Build the model that they were saved from."
            )
        return [next(named[name] for name in names if name in named) for names in self.aliases]


def _require_measurable(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> None:
    if not any(parameter.numel() for parameter in trainable.values()):
        some = any(parameter.numel() for parameter in model.parameters())
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


def flatten(model: nn.Module, values: State | Iterable[Tensor] | None = None) -> Tensor:
    """Copy the trainable parameters of a model to one vector (d,).

    Args:
        model: determines which values are taken, in which order.
        values: values to take instead: a state dictionary, other values by name, or tensors in the order of the
            trainable parameters.

    Raises:
        ValueError: the values are of another model, or nothing is trainable.

    >>> net = nn.Linear(2, 1)
    >>> flatten(net, {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
    tensor([1., 2., 3.])
    """
    if values is None:
        values = [parameter for parameter in unwrapped(model).parameters() if parameter.requires_grad]
    return ParameterLayout.of(model).flatten(values)


@torch.no_grad()
def set_parameters(model: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector (d,) to the trainable parameters of a model, in place."""
    layout = ParameterLayout.of(model)
    if flat.shape != (layout.dim,):
        raise ValueError(f"expected a vector of shape ({layout.dim},) for this model; got {tuple(flat.shape)}.")
    own = {eager_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}
    for name, value in layout.unflatten(flat).items():
        own[name].copy_(value)


@torch.no_grad()
def consensus_errors(
    workers: Sequence[nn.Module | State], model: nn.Module, group: WorkerGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """Compute the consensus errors delta_i = x_i - mean_j x_j of the workers. Collective if a group is given.

    Args:
        workers: workers of this process, as models or as values by name (from a checkpoint, for example).
            `VirtualWorkers` count as all of their replicas.
        model: determines which parameters are taken, in which order. Its values do not matter.
        group: the processes that hold further workers; None if `workers` has all of them.

    Returns:
        The errors of the workers of this process, each (d,), and the mean of all workers, (d,).

    Raises:
        ValueError: there are no workers, or one is of another model; names it and the first differences.

    >>> workers = [{"weight": torch.tensor([[1.0]])}, {"weight": torch.tensor([[3.0]])}]
    >>> errors, mean = consensus_errors(workers, nn.Linear(1, 1, bias=False))
    >>> errors, mean
    ([tensor([-1.]), tensor([1.])], tensor([2.]))
    """
    layout = ParameterLayout.of(first_replica(unwrapped(model)))
    flats: list[Tensor] = []

    def add_workers(total: Tensor) -> None:
        for number, state in enumerate(_states(workers)):
            try:
                flats.append(layout.flatten(state))
            except ValueError as error:
                raise ValueError(f"worker {number} of this process: {error}") from error
            total[:-1].add_(flats[-1])
        total[-1].fill_(len(flats))

    total = summed(add_workers, layout.dim + 1, layout.device, group, "averaging the workers' parameters")
    if total[-1] < 1:
        raise ValueError("consensus errors need at least one worker; got none.")
    mean = total[:-1] / total[-1]
    # The difference is taken in float64, because errors may be far smaller than the weights.
    return [(flat - mean).to(layout.dtype) for flat in flats], mean.to(layout.dtype)


def _states(workers: Sequence[nn.Module | State]) -> list[State]:
    """Return the parameters of each worker by name."""
    states: list[State] = []
    for worker in workers:
        if isinstance(worker, nn.Module):
            inner = unwrapped(worker)
            models = inner.replicas if isinstance(inner, VirtualWorkers) else [inner]
            states.extend(dict(unwrapped(model).named_parameters()) for model in models)
        else:
            states.append(worker)
    return states


def _first(things: Sequence[str]) -> str:
    more = f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return "; ".join(things[:_SHOWN]) + more
