"""Losses summed over real tokens, so that they can be averaged over any batch, worker or split exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.translation.batches import IGNORED


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Label-smoothed cross-entropy SUMMED over the labels (B, T) that are not `IGNORED`, shape (), in nats.

    Per token: (1 - s) (-log p_y) + s mean_v (-log p_v) over the V classes of `logits` (B, T, V); Szegedy et al. 2016.

    >>> logits = torch.zeros(1, 2, 4)
    >>> round(smoothed_loss(logits, torch.tensor([[3, IGNORED]]), smoothing=0.1).item(), 4)  # log 4
    1.3863
    """
    return F.cross_entropy(
        logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )


@torch.no_grad()
def losses_and_tokens(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[float, float, int]:
    """Sums over real tokens of the smoothed loss and of the plain negative log-likelihood, and their number."""
    smoothed = smoothed_loss(logits, labels, smoothing)
    plain = smoothed_loss(logits, labels, 0.0)
    return float(smoothed), float(plain), int((labels != IGNORED).sum())
