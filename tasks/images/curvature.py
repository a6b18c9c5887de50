"""The loss and the batches on which the curvature of an image model is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgdac_accel.devices import default_device
from tasks.common.config import load_config
from tasks.common.diagnostics import CurvatureConfig, Measurable
from tasks.common.training_batches import TrainingBatches
from tasks.images.augment import CropAndFlip, ModelInputs
from tasks.images.config import CifarConfig
from tasks.images.data import ImageData, load_configured_data
from tasks.images.models import build_image_model
from tasks.images.saving import load_image_model


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch (inputs, labels), shape ()."""
    return F.cross_entropy(model(batch[0]), batch[1])


def curvature_batches(data: ImageData, curvature: CurvatureConfig, seed: int, inputs: ModelInputs) -> TrainingBatches:
    """Batches of training images as model inputs, with their labels, on the CPU.

    They are cropped and flipped if `curvature.augment`, by a random stream of each batch. It depends on `seed` and the
    number of the batch alone, so every process makes the same images at every reading.
    """
    on_cpu = replace(inputs, device=torch.device("cpu"))

    def make(number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = data.train_images[rows], data.train_labels[rows]
        if inputs.augment is None or not curvature.augment:
            return on_cpu.plain(images), labels
        stream = int(numpy.random.SeedSequence([seed, number]).generate_state(1, numpy.uint64)[0] >> 1)
        augment = replace(inputs.augment, generator=torch.Generator().manual_seed(stream))
        return replace(on_cpu, augment=augment).augmented(images), labels

    return curvature.training_batches(len(data.train_images), seed, make)


def to_measure(settings: Path, curvature: CurvatureConfig) -> tuple[Measurable, int]:
    """The model, loss and batches of a finished run, given its config.yaml, and its seed."""
    config = load_config(CifarConfig, settings)
    data = load_configured_data(config)
    device = default_device()
    model = build_image_model(config.model, data.num_classes, data.in_channels, data.image_size, config.dropout)
    model.to(device)
    augment = CropAndFlip(config.crop_padding, config.flip)
    inputs = ModelInputs(data.mean, data.std, device, augment, config.channels_last)
    batches = curvature_batches(data, curvature, config.seed, inputs)

    def load_deployed(folder: Path) -> None:
        model.load_state_dict(load_image_model(folder)[0].state_dict())

    averages_steps = config.weight_average.kind != "none"
    return Measurable(model, load_deployed, image_loss, batches, averages_steps), config.seed
