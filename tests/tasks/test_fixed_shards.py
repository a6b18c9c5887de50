"""Shards that stay with their workers, and validation images that are in no other split."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.common.config import ConfigError, parse_config
from tasks.images.config import CifarConfig, DataConfig
from tasks.images.data import load_image_data
from tasks.images.fixed_shards import FixedShards
from tasks.images.run import ImageRun
from tests.workers import run_workers

WORKERS, EPOCHS = 4, 3


def rows_by_worker(rank, folder, local_workers, data):
    """Rows of the training data that each local worker takes, by epoch and micro-batch."""
    config = CifarConfig(
        data=data, model="mlp", num_train_epochs=EPOCHS, global_batch_size=48, gradient_accumulation_steps=2,
        warmup_epochs=0.0, crop_padding=0, flip=False, report_to=(), output_dir=Path(folder),
    )  # fmt: skip
    run = ImageRun(replace(config, gossip=replace(config.gossip, workers_per_process=local_workers, timeout=30)))
    numbers = {tuple(image.flatten().tolist()): row for row, image in enumerate(run.data.train_images)}
    seen = [[] for _ in range(local_workers)]

    def backward(batch):
        assert len(batch["images"]) == 24 // WORKERS * local_workers
        for worker, part in enumerate(batch["images"].chunk(local_workers)):
            seen[worker].append([numbers[tuple(image.flatten().tolist())] for image in part])
        return torch.zeros(()), 1.0

    run.backward = backward
    run.evaluate = lambda done, measure_curvature: None
    run.train()
    return seen


DATA = DataConfig(train_limit=203, shards="fixed")


@pytest.mark.multiprocess
def test_every_worker_reads_its_own_shard_in_every_epoch_in_a_new_order(tmp_path):
    (alone,) = run_workers(rows_by_worker, 1, str(tmp_path), 4, DATA)
    shards = [{row for batch in worker for row in batch} for worker in alone]
    assert sum(map(len, shards)) == len(set().union(*shards))  # disjoint
    assert all(48 < len(shard) <= 51 for shard in shards)  # 50 or 51 rows, and more of them than the 48 of an epoch
    for worker in alone:
        epochs = [[row for batch in worker[8 * epoch :][:8] for row in batch] for epoch in range(EPOCHS)]
        assert [len(set(epoch)) for epoch in epochs] == [48] * EPOCHS
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_read_the_shards_of_their_workers_and_reshuffled_data_have_none(tmp_path):
    (alone,) = run_workers(rows_by_worker, 1, str(tmp_path / "1"), 4, DATA)
    split = run_workers(rows_by_worker, 2, str(tmp_path / "2"), 2, DATA)
    assert [worker for process in split for worker in process] == alone
    (reshuffled,) = run_workers(rows_by_worker, 1, str(tmp_path / "3"), 4, replace(DATA, shards="reshuffled"))
    assert all(len({row for batch in worker for row in batch}) > 80 for worker in reshuffled)


def test_the_seed_deals_the_shards():
    def first(seed):
        return next(iter(FixedShards(rows=40, batch_size=8, batches=5, workers=2, seed=seed)))

    assert first(1) == first(1) != first(2)


def test_validation_images_are_of_the_test_split_alone_and_even_over_the_classes():
    whole = load_image_data(DataConfig(test_fraction=0.4435))
    data = load_image_data(DataConfig(test_fraction=0.4435, validation_limit=300))
    assert torch.equal(data.train_images, whole.train_images)
    assert (len(data.test_labels), len(data.validation_labels)) == (497, 300)
    together = torch.cat([data.test_images, data.validation_images]).flatten(1)
    order, of_whole = (sorted(map(tuple, images.tolist())) for images in (together, whole.test_images.flatten(1)))
    assert order == of_whole
    counts = data.validation_labels.bincount(minlength=10) * 797 / 300 - whole.test_labels.bincount(minlength=10)
    assert counts.abs().max() < 3
    assert len(whole.validation_labels) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.validation_limit", "0"], "data.*validation_limit must be an integer >= 1"),
        (["--data.shards", "fix"], "fixed"),
        (["--decoupled_weight_decay", "true"], "decoupled_weight_decay is for adam, dadam and dadam_ac.*dsgd_ac"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(CifarConfig, words)


def test_validation_images_must_leave_test_images():
    with pytest.raises(ValueError, match=r"must be below the 360 images of the test split; got 360"):
        load_image_data(DataConfig(validation_limit=360))
