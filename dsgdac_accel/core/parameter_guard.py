"""Noticing that a model no longer uses the parameters which its optimizer trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter

from dsgdac_accel.calibration import batch_norm_layers


class ModelWatch:
    """Remembers where in the models each parameter sits, and looks there again before every step.

    `load_state_dict(assign=True)` and `module.weight = nn.Parameter(...)` put new parameters into a model. The
    optimizer goes on with the old ones, so training silently stops, and nobody would mix the new ones.

    Args:
        models: the prepared models; a list may grow later.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.frozen: list[nn.Module] = []
        """BatchNorm layers that were in eval mode when the models last trained."""
        self._look()

    def _look(self) -> None:
        self._seen = len(self.models)
        self.names: dict[int, str] = {}
        """What each parameter is called in its model, by `id`."""
        self._sites: list[tuple[dict, str, Parameter]] = []
        self._normalising = [(model, batch_norm_layers(model)) for model in self.models]
        for model in self.models:
            self.names.update((id(parameter), name) for name, parameter in model.named_parameters())
            for module in model.modules():
                self._sites += [(module._parameters, key, p) for key, p in module._parameters.items() if p is not None]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if a parameter of `optimizer` was replaced in its model by one that it does not have."""
        if len(self.models) != self._seen:
            self._look()
        if any(model.training for model in self.models):
            training = [layer for model, layers in self._normalising if model.training for layer in layers]
            self.frozen = [layer for layer in training if not layer.training]
        replaced = [(slots, key, old) for slots, key, old in self._sites if slots.get(key) is not old]
        if not replaced:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for slots, key, old in replaced:
            new = slots.get(key)
            if id(old) in trained and new is not None and new.requires_grad and id(new) not in trained:
                raise RuntimeError(
                    f"{self.names.get(id(old), key)} was replaced in the model (by load_state_dict(assign=True) or an "
                    f"assignment), but the optimizer still has the old parameter and would train that. Load with "
                    f"assign=False, or put the new parameter into the optimizer, on all workers."
                )
        self._look()
