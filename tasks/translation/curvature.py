"""The loss and the batches on which the curvature of a translation model is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.curvature import LossFunction
from dsgdac_accel.devices import default_device
from tasks.common.config import load_config
from tasks.common.diagnostics import CurvatureConfig, Measurable
from tasks.common.training_batches import TrainingBatches
from tasks.translation.batches import IGNORED, Collate
from tasks.translation.config import TranslationConfig, refuse_augmentation
from tasks.translation.data import load_translation_data
from tasks.translation.loss import smoothed_loss
from tasks.translation.model import DEFAULT_POSITIONS, build_model, decoder_start, load_translator


def curvature_batches(pairs: Any, curvature: CurvatureConfig, seed: int, collate: Collate) -> TrainingBatches:
    """Batches of padded training pairs, on the CPU.

    Raises ValueError for `curvature.augment`.
    """
    refuse_augmentation(curvature)
    return curvature.training_batches(len(pairs), seed, lambda number, rows: collate(pairs.__getitems__(rows.tolist())))


def translation_loss(smoothing: float) -> LossFunction:
    """A function that computes the mean training loss of a batch over its real target tokens."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        total = smoothed_loss(model(**inputs, use_cache=False).logits, batch["labels"], smoothing)
        return total / (batch["labels"] != IGNORED).sum()

    return loss_fn


def to_measure(settings: Path, curvature: CurvatureConfig) -> tuple[Measurable, int]:
    """The model, loss and batches of a finished run, given its config.yaml, and its seed."""
    config = load_config(TranslationConfig, settings)
    data = load_translation_data(config.data)
    train, tokenizer = data.train, data.tokenizer
    longest = int(max(max(train.source_lengths), max(train.target_lengths)))
    # Build the model instead of loading it: a loaded one has trainable position tables.
    model = build_model(
        config.model, len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, max(DEFAULT_POSITIONS, longest)
    )
    device = default_device()
    nn.Module.to(model, device)
    collate = Collate(tokenizer.pad_token_id, decoder_start(model))
    batches = curvature_batches(train.pairs, curvature, config.seed, collate)

    def load_deployed(folder: Path) -> None:
        trained = dict(load_translator(folder)[0].named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(trained[name])

    averages_steps = config.weight_average.kind != "none"
    loss_fn = translation_loss(config.label_smoothing)
    return Measurable(model, load_deployed, loss_fn, batches, averages_steps), config.seed
