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
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica
from dsgdac_accel.wrappers import eager_name, unwrapped

State = Mapping[str, Any]
"""Names and values: a `state_dict()`, or the "parameters" of a checkpoint."""

_SHOWN = 3  # differences named in an error


@dataclass(frozen=True)
class ParameterLayout:
    """Where each trainable parameter lies in the flat vector: in the order of `named_parameters`, tied ones once.

    Frozen parameters are left out; parameters that the loss does not use are in, with a gradient and rows of zeros.
    """

    names: tuple[str, ...]
    """Of each parameter, its first name, without what `torch.compile` puts in."""
    aliases: tuple[tuple[str, ...], ...]
    """All names of each parameter; tied ones have several."""
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    """Of the flat vector: float64 if any parameter is, else float32."""
    device: torch.device
    known: frozenset[str]
    """All names that a state dictionary of the model can have."""

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """Layout of `model`, which may be compiled or in DDP.

        Raises ValueError: nothing is trainable, or in low precision, or on several devices.
        """
        inner = unwrapped(model)
        trainable = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        if not any(parameter.numel() for parameter in trainable.values()):
            some = any(parameter.numel() for parameter in inner.parameters())
            problem = "all of the model's are frozen. Unfreeze some." if some else "the model has none, or empty ones."
            raise ValueError(f"curvature needs a trainable parameter; {problem}")
        for name, parameter in trainable.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"curvature needs float32 or float64 parameters; {name} is {parameter.dtype}. Convert a copy with "
                    f"`model.float()`."
                )
        devices = {parameter.device for parameter in trainable.values()}
        if len(devices) > 1:
            raise ValueError(f"curvature needs all parameters on one device; got {sorted(map(str, devices))}.")
        names_of: dict[int, list[str]] = {id(parameter): [] for parameter in trainable.values()}
        every = list(inner.named_parameters(remove_duplicate=False))
        for name, parameter in every:
            if id(parameter) in names_of:
                names_of[id(parameter)].append(eager_name(name))
        wide = any(parameter.dtype == torch.float64 for parameter in trainable.values())
        return cls(
            names=tuple(eager_name(name) for name in trainable),
            aliases=tuple(tuple(names_of[id(parameter)]) for parameter in trainable.values()),
            shapes=tuple(parameter.shape for parameter in trainable.values()),
            dtype=torch.float64 if wide else torch.float32,
            device=devices.pop(),
            known=frozenset(map(eager_name, [*inner.state_dict(), *(name for name, _ in every)])),
        )

    @property
    def dim(self) -> int:
        """d, the number of trainable values."""
        return sum(math.prod(shape) for shape in self.shapes)

    @torch.no_grad()
    def flatten(self, values: State | Iterable[Tensor]) -> Tensor:
        """The flat vector (d,), a copy, of values by name or in the order of the parameters.

        Raises ValueError for values of another model, naming the first differences.
        """
        found = self._by_name(values) if isinstance(values, Mapping) else list(values)
        if len(found) != len(self.names):
            raise ValueError(f"expected {len(self.names)} tensors, one for each trainable parameter; got {len(found)}.")
        wrong = [
            f"{name}: {tuple(value.shape)} instead of {tuple(shape)}"
            for name, value, shape in zip(self.names, found, self.shapes, strict=True)
            if value.shape != shape
        ]
        if wrong:
            raise ValueError(f"the values are of another model ({_first(wrong)}).")
        return torch.cat([value.detach().to(self.device, self.dtype).reshape(-1) for value in found])

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` (d,) by name, in the shapes of the parameters."""
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


def flatten(model: nn.Module, values: State | Iterable[Tensor] | None = None) -> Tensor:
    """The trainable parameters of `model`, or `values` in their place, as one vector (d,): a copy.

    Args:
        model: decides which values, in which order.
        values: a state dictionary, other values by name, or tensors in the order of the trainable parameters.

    >>> net = nn.Linear(2, 1)
    >>> flatten(net, {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
    tensor([1., 2., 3.])
    """
    if values is None:
        values = [parameter for parameter in unwrapped(model).parameters() if parameter.requires_grad]
    return ParameterLayout.of(model).flatten(values)


@torch.no_grad()
def set_parameters(model: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector (d,) into the trainable parameters of `model`, in place."""
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
    """Consensus errors delta_i = x_i - mean of x, each (d,), and that mean (d,). Collective where a group is given.

    Args:
        workers: this process's workers, as models or as state dictionaries, from files for example. `VirtualWorkers`
            stand for all of their replicas.
        model: decides which parameters, in which order; its values do not count.
        group: the processes that hold further workers; None if all workers are in `workers`.

    Raises:
        ValueError: there are no workers, or one is of another model; the error names it and the first differences.

    >>> workers = [{"weight": torch.tensor([[1.0]])}, {"weight": torch.tensor([[3.0]])}]
    >>> errors, mean = consensus_errors(workers, nn.Linear(1, 1, bias=False))
    >>> errors, mean
    ([tensor([-1.]), tensor([1.])], tensor([2.]))
    """
    layout = ParameterLayout.of(first_replica(unwrapped(model)))
    flats: list[Tensor] = []
    single: list[nn.Module | State] = []
    for worker in workers:
        inner = unwrapped(worker) if isinstance(worker, nn.Module) else worker
        single.extend(inner.replicas if isinstance(inner, VirtualWorkers) else [inner])

    def add_all(total: Tensor) -> None:
        for number, worker in enumerate(single):
            try:
                state = dict(unwrapped(worker).named_parameters()) if isinstance(worker, nn.Module) else worker
                flats.append(layout.flatten(state))
            except ValueError as error:
                raise ValueError(f"worker {number} of this process: {error}") from error
            total[:-1].add_(flats[-1])
        total[-1] = len(flats)

    total = summed(add_all, layout.dim + 1, layout.device, group, "averaging the workers' parameters")
    if total[-1] < 1:
        raise ValueError("consensus errors need at least one worker; got none.")
    mean = total[:-1] / total[-1]
    # Subtracted in float64: errors may be far smaller than the weights.
    return [(flat - mean).to(layout.dtype) for flat in flats], mean.to(layout.dtype)


def _first(things: Sequence[str]) -> str:
    more = f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return "; ".join(things[:_SHOWN]) + more
