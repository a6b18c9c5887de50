"""Loss and accuracy of a classifier on a whole split, shared out over the workers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgdac_accel import WorkerGroup
from tasks.common.precision import full_precision
from tasks.images.augment import ModelInputs


@torch.no_grad()
def loss_and_accuracy(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    inputs: ModelInputs,
    group: WorkerGroup,
    batch_size: int,
    what: str = "evaluating",
) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over all images, in float32; each is seen by exactly one worker. Collective.

    Args:
        model: classifier in eval mode, without the wrapper of torch.compile.
        images: uint8 images (N, C, H, W).
        labels: classes (N,).
        inputs: turns images into inputs of the model.
        group: the workers.
        batch_size: images per worker and batch.
        what: names the evaluation in errors.
    """
    loss = correct = 0.0
    mine = torch.arange(group.rank, len(images), group.size)
    with full_precision(model):
        for rows in mine.split(batch_size):
            logits = model(inputs.plain(images[rows]))
            wanted = labels[rows].to(logits.device)
            loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
            correct += float((logits.argmax(1) == wanted).sum())
    shares = group.all_gather_object((loss, correct), what)
    return sum(share[0] for share in shares) / len(images), sum(share[1] for share in shares) / len(images)
