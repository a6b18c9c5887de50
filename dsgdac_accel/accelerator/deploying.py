"""The average of the workers in place of a model: for a while, for good, and in files."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dsgdac_accel.accelerator.holding import HoldsWorkers
from dsgdac_accel.calibration import Forward
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.loaders import preserved_loaders
from dsgdac_accel.deployed_model import cloned, deployed_model, require_one_model
from dsgdac_accel.virtual_workers import replicas_of, values_of


class DeploysAverage(HoldsWorkers, Accelerator):
    """The part of `GossipAccelerator` that evaluates and saves the average of the workers."""

    gossip_steps: list[GossipStep]
    _deployed: int
    """How many `deployed_model` contexts are open."""

    def _is_training(self) -> bool:
        return not self._deployed and torch.is_grad_enabled()

    @contextmanager
    def deployed_model(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> Iterator[nn.Module]:
        """Inside, `model` is the average of the workers in eval mode; on exit training goes on as if nothing had been.

        Collective. See `deployed_model.deployed_model` for `calibrate`, a loader of training data from which
        BatchNorm statistics are measured. All prepared models are averaged; `model` is put into eval mode with its
        buffers deployed. Contexts nest, for another model or another calibration.

        Raises ValueError where no optimizer was prepared and the workers differ.
        """
        references = list(self.gradient_state.dataloader_references)
        mixers = [] if self._deployed else [step.mixer for step in self.gossip_steps]
        frozen = [layer for step in self.gossip_steps for layer in step.watch.frozen]
        model = self._holder(model)
        if not (self.gossip_steps or self._deployed) and self.group.size > 1:
            require_one_model(model, self.group)
        self._deployed += 1
        try:
            with (
                preserved_loaders(self._dataloaders),
                deployed_model(
                    model,
                    mixers,
                    self.group,
                    calibrate=calibrate,
                    calibration_forward=calibration_forward,
                    frozen=frozen,
                ) as deployed,
            ):
                yield deployed
        finally:
            self._deployed -= 1
            # A pass inside that was broken off must not look like the active one.
            self.gradient_state.dataloader_references = references

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Inside, passes over prepared loaders are not those of training: never cut short, and not counted."""
        self._deployed += 1
        try:
            yield
        finally:
            self._deployed -= 1

    def deploy(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> None:
        """End the gossip: `model` is the average of the workers from now on, in ordinary memory. Collective.

        Arguments as of `deployed_model`. To train on, prepare model and optimizer again.
        """

        def take() -> list[torch.Tensor]:
            with self.deployed_model(model, calibrate, calibration_forward) as deployed:
                return [tensor.detach().clone() for tensor in values_of(deployed)]

        average = self.group.retry_after_loss(take)
        self._end_gossip()
        with torch.no_grad():
            for replica in replicas_of(self._holder(model)):
                for tensor, value in zip(values_of(replica), average, strict=True):
                    tensor.copy_(value)

    def _end_gossip(self) -> None:
        for step in self.gossip_steps:
            step.mixer.release()
        self.gossip_steps.clear()

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the deployed model, as `Accelerator.save_model` does for the model. Collective.

        BatchNorm statistics are pooled; for calibrated ones call it inside `with deployed_model(model, calibrate=...)`.
        """
        save = super().save_model

        def save_average() -> None:
            with self.deployed_model(model) as deployed:
                save(deployed, save_directory, *args, **kwargs)
            self.group.barrier("saving the model")

        self.group.retry_after_loss(save_average)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dictionary: inside `with deployed_model(model)` of the average, outside of this worker alone.

        Tensors are copies, because parameters are views of one buffer, which savers would take for tied weights.
        """
        if not self._deployed and self.num_workers > 1:
            warnings.warn(
                "get_state_dict outside `with accelerator.deployed_model(model)` gives this worker's weights, "
                "not the average of the workers that is meant to be deployed.",
                stacklevel=2,
            )
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)  # the keys of the eager model
        return cloned(super().get_state_dict(model, unwrap=False))
