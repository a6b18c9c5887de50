"""The loss and the batches on which the curvature of an image model is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgdac_accel.devices import default_device
from tasks.common.config import load_config
from tasks.common.diagnostics import CurvatureConfig, Measurable
from tasks.images.augment import ModelInputs
from tasks.images.config import CifarConfig
from tasks.images.data import ImageData, load_configured_data
from tasks.images.models import build_image_model
from tasks.images.saving import load_image_model


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch (inputs, labels), shape ()."""
    return F.cross_entropy(model(batch[0]), batch[1])


def curvature_batches(
    data: ImageData, rows: Sequence[Sequence[int]], inputs: ModelInputs
) -> list[tuple[Tensor, Tensor]]:
    """Training images of these rows as model inputs, neither cropped nor flipped, with their labels."""
    batches = []
    for row in (torch.tensor(numbers, device="cpu") for numbers in rows):
        images = inputs.plain(data.train_images[row])
        batches.append((images, data.train_labels[row].to(images.device)))
    return batches


def to_measure(settings: Path, curvature: CurvatureConfig) -> tuple[Measurable, int]:
    """The model, loss and batches of a finished run, given its config.yaml, and its seed."""
    config = load_config(CifarConfig, settings)
    data = load_configured_data(config)
    device = default_device()
    model = build_image_model(config.model, data.num_classes, data.in_channels, data.image_size, config.dropout)
    model.to(device)
    rows = curvature.rows(len(data.train_images), config.seed)
    batches = curvature_batches(data, rows, ModelInputs(data.mean, data.std, device))

    def load_deployed(folder: Path) -> None:
        model.load_state_dict(load_image_model(folder)[0].state_dict())

    averages_steps = config.weight_average.kind != "none"
    return Measurable(model, load_deployed, image_loss, batches, averages_steps), config.seed
