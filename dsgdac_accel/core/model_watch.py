"""Notices what gossip would miss: parameters that a script replaced in a model, optimizers that do more than a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.shards import gathering_modules, local_of, reshard
from dsgdac_accel.features import COMMUNICATES, COPIES_WEIGHTS


class ModelWatch:
    """Remembers where in the models each parameter and submodule is, and looks there again before every step.

    `load_state_dict(assign=True)`, `module.weight = nn.Parameter(...)` and `model.head = nn.Linear(...)` put new
    parameters into a model. The optimizer keeps the old ones, so training silently stops and the new ones are not
    mixed.

    Args:
        models: the prepared models; the list may grow later.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.frozen: list[nn.Module] = []
        """BatchNorm layers that were in eval mode at the last step of the optimizer that trains their model."""
        self.names: dict[int, str] = {}
        """Name of each parameter in its model, by `id`; others refer to this dictionary."""
        self._look()

    def _look(self) -> None:
        self._models_seen = len(self.models)
        self._sites: list[tuple[dict[str, Any], str, str, Any]] = []
        """Dictionary of a module, key in it, full name, and the parameter or submodule that was there."""
        self._gathering = gathering_modules(self.models)
        reshard(self._gathering)  # names and sites are those of the shards
        self._batch_norms: list[nn.Module] = []
        """The BatchNorm layers of the models that the optimizer trains, as long as it has `_trained` parameters."""
        self._trained = -1
        for model in self.models:
            self.names.update((id(parameter), name) for name, parameter in model.named_parameters())
            for path, module in model.named_modules():
                for slots in (module._parameters, module._modules):
                    found = [(key, value) for key, value in slots.items() if value is not None]
                    self._sites += [(slots, key, f"{path}.{key}" if path else key, value) for key, value in found]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if a parameter of `optimizer` was replaced in its model by one that it does not have."""
        if len(self.models) != self._models_seen:
            self._look()
        reshard(self._gathering)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != self._trained:
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            models = [model for model in self.models if any(id(p) in trained for p in model.parameters())]
            self._batch_norms = [layer for model in models for layer in batch_norm_layers(model)]
            self._trained = count
        self.frozen = [layer for layer in self._batch_norms if not layer.training]
        replaced = [site for site in self._sites if site[0].get(site[1]) is not site[3]]
        if not replaced:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        still_there = {id(parameter) for model in self.models for parameter in model.parameters()}
        for slots, key, name, old in replaced:
            orphans = (trained - still_there) & set(map(id, _parameters_of(old)))
            untrained = [p for p in _parameters_of(slots.get(key)) if p.requires_grad and id(p) not in trained]
            if orphans and untrained:
                raise RuntimeError(
                    f"{name} was replaced in the model (by load_state_dict(assign=True) or an assignment), but the "
                    f"optimizer still has the old parameters and would train those. Load with assign=False, or put the "
                    f"new parameters into the optimizer, on all workers."
                )
        self._look()


def _parameters_of(value: Any) -> list[Parameter]:
    """Return the parameters of a module, or the parameter itself."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [] if value is None else [value]


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Return all BatchNorm layers of a model."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


class OptimizerWatch:
    """Notices an optimizer that would undo the mix or go without it, of whatever name.

    - It, or one that it wraps, takes a step outside of `local_step`, in which nothing is mixed: the script kept the
      optimizer that it prepared, or the two halves of SAM step the inner one. Steps with lr 0 are let through.
    - Its step communicates on the default process group.
    - It is not torch's own and keeps a copy of the weights: after steps 1, 2, 4, 8, ..., a floating-point tensor in its
      state, parameter groups or attributes that is as large as the largest parameter of a group, and is within 1% of
      that parameter before or after the step, but not parallel to its gradient (after step 1: within 10%, but not of
      its gradient). So the first look after a copy was made notices it, be it the start, slow weights or a running
      average, unless it lags behind by more. The host waits for a GPU there.

    Args:
        optimizer: takes the local step.
        group: the workers.
    """

    def __init__(self, optimizer: Optimizer, group: WorkerGroup) -> None:
        self.group = group
        self._inside = False
        self._steps = 0
        self._hooks = [each.register_step_pre_hook(self._refuse_outside) for each in wrapped_optimizers(optimizer)]

    def release(self) -> None:
        """Let the optimizer step without gossip."""
        for hook in self._hooks:
            hook.remove()

    @torch.compiler.disable
    def _refuse_outside(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._inside and any(group.get("lr") != 0 for group in optimizer.param_groups):
            raise self._reported(
                RuntimeError(
                    f"{type(optimizer).__name__}.step() was called by itself, and the workers would not mix. Call "
                    f"step() of the optimizer that `prepare` returned or `Gossip` was given."
                )
            )

    @contextmanager
    def local_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Enclose the optimizer's step; raises ValueError as described for the class."""
        self._steps += 1
        looks = self._steps & (self._steps - 1) == 0
        watched = [each for each in wrapped_optimizers(optimizer) if not _is_torchs(each)] if looks else []
        before = [(parameter, _part(parameter).clone()) for parameter in _largest(optimizer)] if watched else []
        sent = _collectives()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        name = type(optimizer).__name__
        if _collectives() != sent:
            raise self._reported(ValueError(f"{name}: {COMMUNICATES}"))
        found = [
            (place, _is_copy(_part(tensor), x, parameter, first=self._steps == 1))
            for parameter, x in before
            for each in watched
            for place, tensor in _tensors(vars(each), parameter)
            if local_of(tensor).numel() == local_of(parameter).numel()
            and local_of(tensor).data_ptr() != local_of(parameter).data_ptr()
        ]
        copies = torch.stack([is_copy for _, is_copy in found]).tolist() if found else []
        if any(copies):
            raise self._reported(ValueError(f"{name}, in {found[copies.index(True)][0]!r}: {COPIES_WEIGHTS}"))

    def _reported(self, error: Exception) -> Exception:
        self.group.report(str(error))  # this may be the only process that raises it
        return error


def wrapped_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and all that it wraps, as Lookahead, SAM and combinations of several do."""
    found = [optimizer]
    for each in found:
        for value in vars(each).values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, Optimizer) and all(inner is not known for known in found):
                    found.append(inner)
    return found


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _collectives() -> int:
    """Return how many collectives the default process group has begun."""
    try:
        return torch.distributed.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # there is no process group, or its backend does not count
        return 0


def _largest(optimizer: Optimizer) -> list[Parameter]:
    """Return the largest parameter of each group that has a dense gradient."""
    trained = [
        [p for p in group["params"] if p.grad is not None and p.grad.layout == torch.strided]
        for group in optimizer.param_groups
    ]
    return [max(mine, key=lambda p: p.numel()) for mine in trained if mine]


def _part(tensor: Tensor) -> Tensor:
    """Return up to 65536 values of a tensor."""
    return local_of(tensor).detach().reshape(-1)[: 2**16]


def _is_copy(state: Tensor, before: Tensor, parameter: Parameter, first: bool) -> Tensor:
    """Return whether `state` is near a parameter, which was `before` until the step, and not like its gradient, ()."""
    tolerance, after = 0.1 if first else 0.01, _part(parameter)
    near = (torch.dist(state, before) <= tolerance * before.norm()) | (
        torch.dist(state, after) <= tolerance * after.norm()
    )
    near &= (state != state[:1]).any()  # not a step size, the same for all values
    if parameter.grad is not None:
        gradient = _part(parameter.grad)
        if first:  # a momentum is the gradient itself, or a part of it
            near &= torch.dist(state, gradient) > tolerance * gradient.norm()
        else:
            near &= (state * gradient).sum().abs() < 0.99 * state.norm() * gradient.norm()
    return near


def _tensors(values: Any, of: Parameter, name: str = "", depth: int = 5) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors in nested dictionaries and lists with the nearest key.

    Parameters, the state of others than `of`, and quantized tensors are left out.
    """
    if isinstance(values, Tensor):
        if values.is_floating_point() and type(local_of(values)) is Tensor:
            yield name, values
    elif depth and isinstance(values, Mapping | list | tuple):
        pairs = values.items() if isinstance(values, Mapping) else ((name, value) for value in values)
        for key, value in pairs:
            if key is of or not isinstance(key, Parameter):
                yield from _tensors(value, of, key if isinstance(key, str) else name, depth - 1)
