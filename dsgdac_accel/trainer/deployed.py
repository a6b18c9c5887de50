"""The average of the workers in place of a Trainer's model: to evaluate and save it, and in the end for good."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import Trainer

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.calibration import Forward, calibrated_layers
from dsgdac_accel.data.equal_steps import known_length

logger = logging.getLogger(__name__)


class TrainerDeployment:
    """Deploys the model of a Trainer, again and again in one training.

    Args:
        trainer: whose accelerator gossips.
        calibrate: as of `GossipCallback`.
        calibration_forward: as of `GossipCallback`.
    """

    def __init__(self, trainer: Trainer, calibrate: bool | Iterable[Any], calibration_forward: Forward | None) -> None:
        self.trainer = trainer
        self.calibrate = calibrate
        self.calibration_forward = calibration_forward
        self.inside = False
        """Whether the model is the average for the time being."""
        self._statistics: tuple[int, list[Tensor]] | None = None
        """BatchNorm statistics of the average, and the step that they are of."""
        self._warned_of_pooling = False

    @property
    def _accelerator(self) -> GossipAccelerator:
        return cast(GossipAccelerator, self.trainer.accelerator)

    @property
    def _model(self) -> nn.Module:
        return cast(nn.Module, self.trainer.model)

    @property
    def _step(self) -> int:
        return self._accelerator.gossip_steps[0].mixer.step

    @contextmanager
    def deployed(self) -> Iterator[None]:
        """Inside, the Trainer's model is the average of the workers, in training or out of it."""
        if self.inside or not self._accelerator.gossip_steps:  # before and after training the workers are equal
            with self._accelerator.not_training():
                yield
            return
        model, loaders = self._model, self._accelerator._dataloaders
        before = len(loaders)
        self.inside = True
        try:
            with self._accelerator.deployed_model(model, self._calibration_data(), self.calibration_forward):
                self._reuse_statistics(model, self._step)
                yield
        finally:
            self.inside = False
            del loaders[before:]  # the Trainer prepares new ones for each evaluation, and they would pile up

    def deploy_for_good(self) -> None:
        """Leave the average in the model, unless that was done already."""
        if self._accelerator.gossip_steps:
            model = self._model
            data, step = self._calibration_data(), self._step
            self._accelerator.deploy(model, data, self.calibration_forward)
            self._reuse_statistics(model, step)

    def _calibration_data(self) -> Iterable[Any] | None:
        """What to calibrate on now; None where nothing is to be read, or this step's statistics are known."""
        if self.calibrate is False or self._known_statistics(self._step):
            return None
        if self.calibrate is not True:
            return self.calibrate
        loader = self.trainer.callback_handler.train_dataloader
        if loader is not None and known_length(loader) is not None:
            return loader
        if not self._warned_of_pooling and calibrated_layers(self._model):
            self._warned_of_pooling = True
            logger.warning(
                "the training data has no length, so BatchNorm statistics of the deployed model are pooled from the "
                "workers' own. For exact ones pass GossipCallback(calibrate=<DataLoader>)."
            )
        return None

    def _known_statistics(self, step: int) -> list[Tensor] | None:
        return self._statistics[1] if self._statistics is not None and self._statistics[0] == step else None

    def _reuse_statistics(self, model: nn.Module, step: int) -> None:
        """Evaluating and saving at one step calibrates once: keep the statistics found, or put those kept in place."""
        layers = calibrated_layers(model)
        now = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var) if tensor is not None]
        known = self._known_statistics(step)
        if known is None:
            self._statistics = step, [tensor.detach().clone() for tensor in now]
            return
        for tensor, value in zip(now, known, strict=True):
            tensor.copy_(value)
