"""The average of the workers in a Trainer's model: during evaluations and saves, and for good after training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.calibration import Forward, StatisticsCache, calibrated_layers
from dsgdac_accel.data.equal_steps import known_length

logger = logging.getLogger(__name__)


class TrainerDeployment:
    """Deploys the model of a Trainer during one `train()`.

    Args:
        trainer: a Trainer with a GossipAccelerator.
        calibrate: as for `GossipCallback`.
        calibration_forward: as for `GossipCallback`.
    """

    def __init__(self, trainer: Trainer, calibrate: bool | Iterable[Any], calibration_forward: Forward | None) -> None:
        self.trainer: Any = trainer  # Any: its model is typed as optional
        self.calibrate = calibrate
        self.calibration_forward = calibration_forward
        self.active = False
        """Whether the model holds the average at the moment."""
        self._statistics = StatisticsCache()
        self._warned_of_pooling = False

    @property
    def _accelerator(self) -> GossipAccelerator:
        return self.trainer.accelerator

    @property
    def _step(self) -> int:
        return self._accelerator.gossip_steps[0].mixer.step

    @contextmanager
    def deployed(self) -> Iterator[None]:
        """Inside, the Trainer's model is the average of the workers. Contexts nest."""
        if self.active or not self._accelerator.gossip_steps:  # before and after training the workers are equal
            with self._accelerator.not_training():
                yield
            return
        loaders = self._accelerator._dataloaders
        before = len(loaders)
        self.active = True
        try:
            with self._accelerator.deployed_model(
                self.trainer.model, self._calibration_data(), self.calibration_forward
            ):
                self._statistics.apply(self.trainer.model, self._step)
                yield
        finally:
            self.active = False
            del loaders[before:]  # the Trainer prepares new loaders for each evaluation, which would pile up

    def deploy(self) -> None:
        """End the gossip and leave the average in the model. Does nothing the second time."""
        if self._accelerator.gossip_steps:
            step = self._step  # `deploy` ends the GossipStep
            self._accelerator.deploy(self.trainer.model, self._calibration_data(), self.calibration_forward)
            self._statistics.apply(self.trainer.model, step)

    def _calibration_data(self) -> Iterable[Any] | None:
        """Return the data to calibrate on; None to pool, or where this step's statistics are known already."""
        if self.calibrate is False or self._statistics.has(self._step):
            return None
        if self.calibrate is not True:
            return self.calibrate
        loader = self.trainer.callback_handler.train_dataloader
        if loader is not None and known_length(loader) is not None:
            return loader
        if not self._warned_of_pooling and calibrated_layers(self.trainer.model):
            self._warned_of_pooling = True
            logger.warning(
                "the training data has no length, so the deployed model's BatchNorm statistics are pooled from the "
                "workers' running statistics. For exact ones pass GossipCallback(calibrate=<DataLoader>)."
            )
        return None
