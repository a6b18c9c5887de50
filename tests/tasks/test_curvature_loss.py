"""The loss on which a translation model's curvature is measured."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tasks.translation.batches import IGNORED
from tasks.translation.curvature import translation_loss


def test_it_is_a_mean_over_the_real_target_tokens():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, IGNORED], [4, IGNORED, IGNORED]])
    found = translation_loss(0.0)(lambda **_: SimpleNamespace(logits=logits), {"labels": labels})
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(found, expected)
