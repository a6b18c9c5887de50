"""Curvature over the entire training set: batches, crops and flips, the printed cost, and any number of workers."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from dsgdac_accel import WorkerGroup
from tasks.common import diagnostics
from tasks.common.config import ConfigError
from tasks.common.diagnostics import CurvatureConfig, Measurable, choose_threads, refuse_batches_of_one
from tasks.images.augment import CropAndFlip, ModelInputs
from tasks.images.config import DataConfig
from tasks.images.curvature import curvature_batches, image_loss
from tasks.images.data import load_image_data
from tasks.images.models import build_image_model
from tasks.translation.config import TranslationConfig
from tests.workers import run_workers

pytestmark = [pytest.mark.task, pytest.mark.filterwarnings("ignore:largest eigenvalue")]
AUGMENTED = CurvatureConfig(batches=None, batch_size=12, augment=True, iterations=6, probes=2, noise_batches=2)


def digits(config, total=53, seed=1, padding=1, flip=True):
    data = load_image_data(DataConfig(train_limit=total, test_limit=10))
    inputs = ModelInputs(data.mean, data.std, torch.device("cpu"), CropAndFlip(padding, flip))
    return curvature_batches(data, config, seed, inputs)


def test_a_batch_has_the_same_crops_and_flips_at_every_reading_and_on_every_worker():
    batches, others = digits(AUGMENTED), digits(AUGMENTED)
    assert batches.sizes == [12, 12, 12, 12, 5]
    first = [images for images, _ in batches]
    torch.rand(7)  # moves the stream of training
    for number in (3, 0, 4, 1, 2):
        assert torch.equal(others[number][0], first[number])
    plain = [images for images, _ in digits(replace(AUGMENTED, augment=False))]
    assert not any(torch.equal(one, other) for one, other in zip(first, plain, strict=True))
    assert not torch.equal(digits(AUGMENTED, seed=2)[0][0], first[0])
    flipped = digits(AUGMENTED, padding=0)
    mirrored = [
        torch.equal(image, original.flip(-1))
        for (images, _), originals in zip(flipped, plain, strict=True)
        for image, original in zip(images, originals, strict=True)
        if torch.equal(image, original) or torch.equal(image, original.flip(-1))
    ]
    assert len(mirrored) == 53
    assert 10 < sum(mirrored) < 43
    assert mirrored[:12] != mirrored[12:24], "each batch has flips of its own"
    with pytest.raises(IndexError):
        _ = batches[5]


def test_the_cost_is_printed_once_before_the_measurement(capsys):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for config, words in (
        (
            AUGMENTED,
            "curvature: 5 batches of 12 (53 of 53 training samples, augmented) x 10 Hessian products, about 0:00",
        ),
        (
            replace(AUGMENTED, batches=7, augment=False),
            "curvature: 4 batches of 12 (48 of 53 training samples; curvature.batches asks for 7, but there",
        ),
    ):
        config.measure(net, image_loss, digits(config), [])
        assert capsys.readouterr().out.startswith(words)


def test_a_last_batch_of_one_sample_is_refused_for_batch_norm_before_training():
    norm = nn.Sequential(nn.BatchNorm1d(3))
    whole = CurvatureConfig(batches=None)
    with pytest.raises(ConfigError, match=r"leave a last one of 1 of the 65 training samples.*curvature.batches: 2"):
        refuse_batches_of_one(whole, norm, 65)
    refuse_batches_of_one(whole, norm, 66)
    refuse_batches_of_one(CurvatureConfig(), norm, 65)
    refuse_batches_of_one(whole, nn.Linear(2, 2), 65)


def test_pairs_of_sentences_have_no_augmentation():
    with pytest.raises(ValueError, match=r"curvature.augment must be false for translation.*Leave it out"):
        TranslationConfig(curvature=AUGMENTED)


class SlowWith:
    """A product that takes longer with a number of threads."""

    dim, dtype = 1, torch.float32

    def __init__(self, threads):
        self.threads = threads

    def __call__(self, v):
        time.sleep(0.05 * (torch.get_num_threads() == self.threads))


@pytest.mark.parametrize(("slow", "asked", "chosen"), [(2, None, 1), (1, None, 2), (2, "2", 2)])
def test_the_faster_number_of_threads_is_chosen_unless_the_user_does(slow, asked, chosen, monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr(diagnostics, "HessianOperator", lambda *arguments, **options: SlowWith(slow))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    try:
        torch.set_num_threads(2)
        choose_threads(Measurable(nn.Linear(1, 1), print, image_loss, [None]), shown=True)
        assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)
    assert (f"{chosen} CPU thread" in capsys.readouterr().out) == (asked is None)


def measured(rank, launched):
    torch.manual_seed(0)
    net = build_image_model("mlp", 10, 1, (8, 8))
    group = WorkerGroup(torch.device("cpu"), 30) if launched else None
    return [AUGMENTED.measure(net, image_loss, digits(AUGMENTED), [], group=group).as_dict() for _ in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_measures_the_same_augmented_training_set(workers):
    expected, _ = measured(0, False)
    for first, second in run_workers(measured, workers, True):
        assert repr(first) == repr(second), "the second measurement has other bits"
        for name in ("lambda_1", "trace", "B", "A_grad", "A_grad_raw"):
            assert first[name] == pytest.approx(expected[name], rel=1e-6), name
