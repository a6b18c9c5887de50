"""The loss of an optimizer step whose batch is split over workers and micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.common.algorithms import SYNCHRONOUS
from tasks.common.output_dir import AnyAccelerator
from tasks.translation.batches import TokenBatches
from tasks.translation.config import TranslationConfig
from tasks.translation.loss import smoothed_loss


class StepLoss:
    """The loss to backpropagate for a micro-batch, so that a step descends a mean over its real target tokens.

    For gossip that is the mean over each worker's own micro-batches; for the synchronous baseline, whose gradients DDP
    averages, the mean over the micro-batches of all workers. Either way the step does not depend on how its tokens are
    split over micro-batches.

    Args:
        config: settings of the run.
        accelerator: accelerator of the run.
        batches: plan of the batches, the same on all workers.
    """

    def __init__(self, config: TranslationConfig, accelerator: AnyAccelerator, batches: TokenBatches) -> None:
        self.smoothing = config.label_smoothing
        self.accumulation_steps = config.gradient_accumulation_steps
        self.synchronous = config.algorithm in SYNCHRONOUS
        self.accelerator = accelerator
        self.batches = batches

    def begin_epoch(self) -> None:
        """Read the plan of the epoch that was set in the batches."""
        _, self.target_tokens = self.batches.epoch_tokens()
        self._scales = self._token_scales()
        self._pairs = self.local(self.batches.epoch_pairs())

    def local(self, of_workers: NDArray) -> NDArray:
        """Select this process's workers: (..., workers of the launch) to (..., local workers)."""
        count = self.accelerator.workers_per_process
        first = count * self.accelerator.group.rank
        return of_workers[..., first : first + count]

    def _token_scales(self) -> NDArray:
        """Factors that turn sums over tokens into the means of the class docstring: (steps, local workers)."""
        factor = self.accumulation_steps  # Accelerate's backward divides by it
        if self.synchronous:
            scales = factor * self.accelerator.num_processes / self.target_tokens.sum(axis=(1, 2))
            return np.repeat(scales[:, None], self.accelerator.workers_per_process, axis=1)
        return factor / self.local(self.target_tokens).sum(axis=1)

    def __call__(
        self, model: nn.Module, batch: dict[str, Tensor], labels: Tensor, step: int, micro_step: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses of a micro-batch.

        Args:
            model: the prepared model.
            batch: inputs of the model.
            labels: (B, T).
            step: optimizer step in the epoch, from 0.
            micro_step: micro-batch in the step, from 0.

        Returns:
            The loss to backpropagate, shape (), and the loss summed over the tokens, shape ().
        """
        pairs = self._pairs[step, micro_step].tolist()
        sums = self._sums(model, batch, labels, pairs)
        weights = self._scales[step]
        if not self.synchronous:
            # VirtualWorkers expects a mean over the batch, in which each worker has the weight of its share.
            weights = weights * np.asarray(pairs) / sum(pairs)
        loss = (sums * torch.as_tensor(weights, dtype=sums.dtype, device=sums.device)).sum()
        return loss, sums.detach().sum()

    def _sums(self, model: nn.Module, batch: dict[str, Tensor], labels: Tensor, pairs: list[int]) -> Tensor:
        """Loss of each local worker, summed over its tokens: (local workers,). `pairs` counts their sentences."""
        if len(pairs) == 1:
            return smoothed_loss(model(**batch).logits, labels, self.smoothing)[None]
        virtual: Any = getattr(model, "module", model)  # inside DDP
        with virtual.cut_at(pairs):
            logits = model(**batch).logits
        parts = zip(logits.split(pairs), labels.split(pairs), strict=True)
        return torch.stack([smoothed_loss(own_logits, own_labels, self.smoothing) for own_logits, own_labels in parts])
