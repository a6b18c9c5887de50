"""Losses summed over real tokens, so that they average exactly over any batch, worker or split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.translation.batches import IGNORED


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Label-smoothed cross-entropy (Szegedy et al. 2016), SUMMED over the real tokens, shape (), in nats.

    Per token: (1 - s) (-log p_y) + s mean_v (-log p_v), the mean over the V classes.

    Args:
        logits: (B, T, V).
        labels: (B, T); those that are `IGNORED` are padding and not counted.
        smoothing: s, in [0, 1).

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
    """Smoothed loss and negative log-likelihood, both summed over the real tokens, and the number of these tokens."""
    smoothed = smoothed_loss(logits, labels, smoothing)
    plain = smoothed_loss(logits, labels, 0.0)
    return float(smoothed), float(plain), int((labels != IGNORED).sum())
