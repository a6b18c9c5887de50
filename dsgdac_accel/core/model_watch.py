"""Notices parameters that a script replaced in a model, and that the optimizer does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from dsgdac_accel.distributed.shards import gathering_modules, reshard


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
