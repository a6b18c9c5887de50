"""An Accelerator whose process holds one or several workers: which parameter is whose, and what follows from that."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from dsgdac_accel.core.gradients import any_sparse, clip_grad_norm_
from dsgdac_accel.core.parameter_guard import as_parameter_list
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica


class HoldsWorkers:
    """Mixed into `GossipAccelerator`: the workers of this process, `GossipConfig.workers_per_process` many."""

    group: WorkerGroup
    workers_per_process: int
    """Workers of this process, as of every other."""
    gossip_steps: list[Any]
    _models: list[nn.Module]
    _places: dict[int, tuple[weakref.ref[Parameter], tuple[int, int]]]
    """By `id` of a parameter: itself, which worker of this process it belongs to, and its place among that worker's."""

    @property
    def num_workers(self) -> int:
        """Workers of the whole run: as many in every process as `workers_per_process` says."""
        return self.group.size * self.workers_per_process

    @property
    def _virtual_models(self) -> list[VirtualWorkers]:
        return [model for model in self._models if isinstance(model, VirtualWorkers)]

    # ---- whose a parameter is

    def _place_of(self, parameter: Parameter) -> tuple[int, int] | None:
        """Which worker of this process a parameter belongs to, and where in its model; None if to none."""
        found = self._places.get(id(parameter))
        if found is None or found[0]() is not parameter:  # a new one may have the `id` of one that is gone
            virtual = self._virtual_models
            self._places = {
                id(own): (weakref.ref(own), (worker, place))
                for worker in range(self.workers_per_process)
                for place, own in enumerate(p for model in virtual for p in model.replicas[worker].parameters())
            }
            found = self._places.get(id(parameter))
        return None if found is None else found[1]

    def _worker_of(self, parameter: Parameter) -> int:
        place = self._place_of(parameter)
        if place is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is in no prepared model, and of "
                f"{self.workers_per_process} workers in this process each needs its own. Make it part of "
                f"the model, prepare the model before or together with its optimizer, or set workers_per_process=1."
            )
        return place[0]

    def _holder(self, model: nn.Module) -> nn.Module:
        """The `VirtualWorkers` of which `model` is the first replica, if there are any; otherwise itself."""
        holders = [
            held for held in self._virtual_models if any(model is own for own in (held, self.unwrap_model(held)))
        ]
        return holders[0] if holders else model

    def consensus_errors(self, model: nn.Module) -> list[dict[str, torch.Tensor]]:
        """x_i - x_bar of each worker of this process by parameter name, inside `with deployed_model(model)` only.

        In the order of the model. Tied parameters once; parameters that are not trained are left out, since they are
        equal on all workers.
        """
        inner = self.unwrap_model(self._holder(model), keep_torch_compile=False)
        found: list[dict[int, torch.Tensor]] = [{} for _ in range(self.workers_per_process)]
        for step in self.gossip_steps:
            for mine, errors in zip(found, step.mixer.consensus_errors(), strict=True):
                mine.update(errors)
        named = list(inner.named_parameters())  # the model's order, whatever the optimizer's
        return [{name: mine[id(p)] for name, p in named if id(p) in mine} for mine in found]

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.unwrap_model`; of `VirtualWorkers`, the model that was given to `prepare`."""
        return super().unwrap_model(first_replica(model), *args, **kwargs)  # type: ignore[misc]

    # ---- gradients

    def clip_grad_norm_(self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip this worker's own gradient as `Accelerator.clip_grad_norm_`, also where some of it is sparse.

        Of several workers in this process each is clipped by itself, and the mean of their norms is returned.
        """
        parameters = as_parameter_list(parameters)
        if self.workers_per_process == 1 and not any_sparse(parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]
        self.unscale_gradients()  # type: ignore[attr-defined]
        norms = [clip_grad_norm_(mine, max_norm, norm_type) for mine in self._each_workers(parameters)]
        return norms[0] if len(norms) == 1 else torch.stack(norms).mean()

    def clip_grad_value_(self, parameters: Iterable[Parameter], clip_value: float) -> None:
        """As `Accelerator.clip_grad_value_`, for all workers of this process."""
        mine = [p for own in self._each_workers(as_parameter_list(parameters)) for p in own]
        super().clip_grad_value_(mine, clip_value)  # type: ignore[misc]

    def _each_workers(self, parameters: list[Parameter]) -> list[list[Parameter]]:
        """The given parameters, and those in the same places of the other workers' models, worker by worker."""
        places = {id(parameter): self._place_of(parameter) for parameter in parameters}
        wanted = {place[1] for place in places.values() if place is not None}
        virtual = self._virtual_models
        if not wanted:
            return [parameters]
        split = [
            [p for place, p in enumerate(p for model in virtual for p in model.by_worker()[worker]) if place in wanted]
            for worker in range(self.workers_per_process)
        ]
        split[0] += [parameter for parameter in parameters if places[id(parameter)] is None]
        return split
