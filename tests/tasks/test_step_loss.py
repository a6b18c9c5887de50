"""The loss of a translation step: a mean over real target tokens, however the step is split."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dsgdac_accel.distributed.members import Members
from tasks.translation.batches import IGNORED, TokenBatches
from tasks.translation.config import TranslationConfig
from tasks.translation.step_loss import StepLoss

LENGTHS = np.array([2, 3, 4, 2, 3, 4, 5, 2, 3, 5, 4, 2])
WORKERS, ACCUMULATION, SMOOTHING, VOCABULARY = 2, 2, 0.1, 7


class Model(nn.Module):
    """Logits that depend on the position alone, so that every micro-batch has other gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(6, VOCABULARY, dtype=torch.float64))

    def forward(self, rows):
        return SimpleNamespace(logits=self.table[: rows.shape[1]].expand(len(rows), -1, -1))

    def cut_at(self, sizes):
        return nullcontext()


def labels_of(rows):
    longest = max(LENGTHS[row] for row in rows)
    labels = torch.full((len(rows), longest), IGNORED)
    for place, row in enumerate(rows):
        labels[place, : LENGTHS[row]] = torch.arange(LENGTHS[row]) * (row + 1) % VOCABULARY
    return labels


def plan(per_process):
    return TokenBatches(LENGTHS, LENGTHS, 80, WORKERS, ACCUMULATION, seed=5, per_process=per_process)


def backpropagated(algorithm, rank, per_process):
    """What a process leaves in the gradient after one step, and the summed loss that it reports."""
    group = SimpleNamespace(members=Members(rank, WORKERS // per_process), rank=rank)
    accelerator = SimpleNamespace(workers_per_process=per_process, num_processes=WORKERS // per_process, group=group)
    config = TranslationConfig(algorithm=algorithm, gradient_accumulation_steps=ACCUMULATION, label_smoothing=SMOOTHING)
    batches, model = plan(per_process), Model()
    step_loss = StepLoss(config, accelerator, batches)
    step_loss.begin_epoch()
    lists, total = list(batches), 0.0
    for micro_step in range(ACCUMULATION):
        labels = labels_of(lists[micro_step * accelerator.num_processes + rank])
        loss, summed = step_loss(model, {"rows": labels}, labels, 0, micro_step)
        (loss / ACCUMULATION).backward()  # as Accelerate divides
        total += float(summed)
    return model.table.grad, total


def mean_over(workers):
    """Gradient of the mean loss over the real tokens of these workers in the first step, and the summed loss."""
    lists = list(plan(1))
    rows = [row for w in workers for micro in range(ACCUMULATION) for row in lists[micro * WORKERS + w]]
    model, labels = Model(), labels_of(rows)
    logits = model(labels).logits
    real = labels != IGNORED
    chosen = -logits.log_softmax(-1)
    per_token = (1 - SMOOTHING) * chosen.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    summed = (per_token + SMOOTHING * chosen.mean(-1))[real].sum()
    (summed / real.sum()).backward()
    return model.table.grad, float(summed.detach())


def test_the_workers_of_these_tests_have_unequal_numbers_of_tokens_and_pairs():
    batches = plan(1)
    assert len(set(batches.epoch_tokens()[1][0].sum(axis=0).tolist())) == WORKERS
    assert len(set(batches.epoch_pairs()[0].flatten().tolist())) == WORKERS * ACCUMULATION


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_gossip_worker_descends_the_mean_over_its_own_real_tokens(rank):
    gradient, total = backpropagated("dadam_ac", rank, per_process=1)
    expected, summed = mean_over([rank])
    torch.testing.assert_close(gradient, expected)
    assert total == pytest.approx(summed)


def test_the_synchronous_average_descends_the_mean_over_the_real_tokens_of_all_workers():
    gradients = [backpropagated("adam", rank, per_process=1)[0] for rank in range(WORKERS)]
    torch.testing.assert_close(sum(gradients) / WORKERS, mean_over(range(WORKERS))[0])


def test_one_process_of_all_workers_descends_the_same_synchronous_mean():
    gradient, _ = backpropagated("adam", 0, per_process=WORKERS)
    torch.testing.assert_close(gradient, mean_over(range(WORKERS))[0])


def test_virtual_workers_are_weighted_by_their_share_of_the_batch():
    """VirtualWorkers divides a worker's gradient by that share again."""
    group = SimpleNamespace(members=Members(0, 1), rank=0)
    accelerator = SimpleNamespace(workers_per_process=WORKERS, num_processes=1, group=group)
    config = TranslationConfig(algorithm="dadam_ac", gradient_accumulation_steps=ACCUMULATION)
    batches = plan(WORKERS)
    step_loss = StepLoss(config, accelerator, batches)
    step_loss.begin_epoch()
    labels = labels_of(next(iter(batches)))
    loss, _ = step_loss(Model(), {"rows": labels}, labels, 0, 0)
    sizes = batches.epoch_pairs()[0, 0].tolist()
    own_tokens = batches.epoch_tokens()[1][0].sum(axis=0)
    sums = step_loss._sums(Model(), {"rows": labels}, labels, sizes).tolist()
    expected = sum(
        share / sum(sizes) * ACCUMULATION * total / tokens
        for share, total, tokens in zip(sizes, sums, own_tokens, strict=True)
    )
    assert float(loss.detach()) == pytest.approx(expected)
