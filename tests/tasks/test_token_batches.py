"""Batches by tokens: within the budget, disjoint, as many for every worker and epoch, alike in length."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dsgdac_accel import GossipConfig
from tasks.common.algorithms import make_accelerator
from tasks.translation.batches import IGNORED, Collate, TokenBatches, TokenizedPairs
from tasks.translation.tokenizer import encode, load_tokenizer, train_tokenizer
from tests.tasks.test_image_data import real_data
from tests.workers import run_workers

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=200)


def epoch_of(batches, epoch):
    batches.set_epoch(epoch)
    return list(batches)


def padded_size(batches, rows):
    return len(rows) * int(batches.source_lengths[rows].max() + batches.target_lengths[rows].max())


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(60, 200), st.integers(0, 5))
def test_every_plan_keeps_its_promises(lengths, workers, accumulation, budget, seed):
    source, target = np.array(lengths).T
    total = budget * workers * accumulation
    if TokenBatches(source, target, budget, 1).steps_per_epoch < workers * accumulation:
        with pytest.raises(ValueError, match="Use a smaller batch_tokens, or more data"):
            TokenBatches(source, target, total, workers, accumulation, seed)
        return
    batches = TokenBatches(source, target, total, workers, accumulation, seed)
    for epoch in range(3):
        plan = epoch_of(batches, epoch)
        rows = [row for batch in plan for row in batch]
        assert len(plan) == len(batches) == batches.steps_per_epoch * workers * accumulation
        assert len(set(rows)) == len(rows), "no row twice in an epoch"
        assert all(batch and padded_size(batches, batch) <= budget for batch in plan)
        assert epoch_of(batches, epoch) == plan, "an epoch can be repeated"
        source_tokens, target_tokens = batches.epoch_tokens()
        assert source_tokens.shape == (batches.steps_per_epoch, accumulation, workers)
        assert source_tokens.flatten().tolist() == [int(source[batch].sum()) for batch in plan]
        assert target_tokens.flatten().tolist() == [int(target[batch].sum()) for batch in plan]


def test_epochs_differ_in_order_and_in_company_and_repeat_from_the_seed():
    lengths = np.full(400, 5)
    batches, again, other = (TokenBatches(lengths, lengths, 100, 2, seed=seed) for seed in (3, 3, 4))
    first, second = epoch_of(batches, 0), epoch_of(batches, 1)
    assert first != second
    assert {frozenset(batch) for batch in first}.isdisjoint({frozenset(batch) for batch in second})
    assert epoch_of(again, 0) == first
    assert epoch_of(other, 0) != first


def test_what_one_epoch_leaves_out_comes_in_another():
    lengths = np.full(11, 12)  # one batch each
    batches = TokenBatches(lengths, lengths, 24 * 4, workers=4)
    left_out = [set(range(11)) - {row for batch in epoch_of(batches, epoch) for row in batch} for epoch in range(40)]
    assert all(left_out)
    assert not set.intersection(*left_out)


def test_the_padding_share_is_that_of_all_batches_of_an_epoch():
    random = np.random.default_rng(0)
    source, target = random.integers(1, 60, 3000), random.integers(1, 60, 3000)
    batches = TokenBatches(source, target, 2000, workers=1)
    padded = sum(padded_size(batches, rows) for rows in batches)
    assert batches.padding == pytest.approx(1 - (source.sum() + target.sum()) / padded)
    assert 0 < batches.padding < 0.2


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(60, 200), st.integers(0, 5))
def test_random_batches_have_the_budget_on_average_and_new_company_in_every_epoch(
    lengths, workers, accumulation, budget, seed
):
    source, target = np.array(lengths).T
    plan = {"workers": workers, "accumulation_steps": accumulation, "seed": seed, "group_by_length": False}
    steps = int((source + target).sum()) // budget // (workers * accumulation)
    if steps == 0:
        with pytest.raises(ValueError, match="Use a smaller batch_tokens, or more data"):
            TokenBatches(source, target, budget * workers * accumulation, **plan)
        return
    batches = TokenBatches(source, target, budget * workers * accumulation, **plan)
    for epoch in range(3):
        found = epoch_of(batches, epoch)
        rows = [row for batch in found for row in batch]
        assert len(found) == len(batches) == steps * workers * accumulation
        assert len(set(rows)) == len(rows)
        tokens = [int((source + target)[batch].sum()) for batch in found]
        for batch, own in zip(found, tokens, strict=True):
            assert abs(own - budget) < int((source + target).max())
            assert batch
        assert (batches.epoch_tokens()[0] + batches.epoch_tokens()[1]).flatten().tolist() == tokens
        assert batches.epoch_pairs().flatten().tolist() == [len(batch) for batch in found]
        assert epoch_of(batches, epoch) == found


def test_random_batches_mix_lengths_and_are_drawn_anew():
    random = np.random.default_rng(0)
    source, target = random.integers(1, 60, 3000), random.integers(1, 60, 3000)
    batches = TokenBatches(source, target, 2000, workers=1, group_by_length=False)
    first, second = epoch_of(batches, 0), epoch_of(batches, 1)
    assert np.mean([np.ptp(source[rows]) for rows in first]) > 40
    assert {frozenset(rows) for rows in first}.isdisjoint({frozenset(rows) for rows in second})
    tokens = [(source + target)[rows].sum() for rows in first]
    assert np.mean(tokens) == pytest.approx(2000, rel=0.01)
    padded = [padded_size(batches, rows) for rows in first]
    assert batches.padding == pytest.approx(1 - sum(tokens) / sum(padded), abs=0.02)


def test_a_budget_smaller_than_the_longest_pair_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"100 tokens over 2 workers x 1 .* are 50 .* pair 1 has 60.*max_length"):
        TokenBatches([5, 30], [5, 30], 100, workers=2)


def test_too_little_data_for_one_step_is_refused():
    with pytest.raises(ValueError, match=r"needs 8 micro-batches \(4 workers x 2 .*the 2 training pairs fill only 1"):
        TokenBatches([3, 3], [3, 3], 800, workers=4, accumulation_steps=2)
    with pytest.raises(ValueError, match="at least one pair"):
        TokenBatches([], [], 800, workers=1)


def rows_of_a_worker(rank, accumulation):
    from accelerate.utils import DataLoaderConfiguration

    data = TokenizedPairs(
        Dataset.from_list([{"source_ids": [i, 1], "target_ids": [i] * (i % 5) + [1]} for i in range(100)])
    )
    lengths = [[len(ids) for ids in data.rows[name]] for name in ("source_ids", "target_ids")]
    batches = TokenBatches(*lengths, tokens=90, workers=3, accumulation_steps=accumulation)
    accelerator = make_accelerator(
        "dadam",
        GossipConfig(timeout=30),
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=False, even_batches=False),
    )
    loader = accelerator.prepare(DataLoader(data, batch_sampler=batches, collate_fn=Collate(pad=0, start=0)))
    epochs = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        tokens = batches.epoch_tokens()[1][:, :, rank].flatten().tolist()
        read = list(loader)
        assert [int((batch["labels"] != IGNORED).sum()) for batch in read] == tokens
        epochs.append([batch["input_ids"][:, 0].tolist() for batch in read])
    return epochs


@pytest.mark.multiprocess
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate_deals_out_disjoint_shards_of_equal_length(accumulation):
    shards = run_workers(rows_of_a_worker, 3, accumulation)
    for epoch in range(2):
        batches = [shard[epoch] for shard in shards]
        assert len({len(mine) for mine in batches}) == 1
        assert len(batches[0]) % accumulation == 0
        rows = [row for mine in batches for batch in mine for row in batch]
        assert len(rows) == len(set(rows)) > 50
    assert shards[0][0] != shards[0][1]


def test_a_batch_is_padded_on_the_right_and_the_decoder_reads_its_labels_shifted():
    data = TokenizedPairs(
        Dataset.from_list([{"source_ids": [5, 6, 1], "target_ids": [7, 1]}, {"source_ids": [8, 1], "target_ids": [1]}])
    )
    batch = Collate(pad=0, start=3)(data.__getitems__([1, 0]))
    assert batch["input_ids"].tolist() == [[8, 1, 0], [5, 6, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[1, IGNORED], [7, 1]]
    assert batch["decoder_input_ids"].tolist() == [[3, 1], [3, 7]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.fixture(scope="module")
def multi30k_lengths(tmp_path_factory):
    """Lengths of the sources and of the targets of Multi30k."""
    rows = pq.read_table(real_data("multi30k") / "train.parquet").column("translation").combine_chunks()
    texts = [rows.field(language).to_pylist() for language in ("en", "de")]
    file = tmp_path_factory.mktemp("multi30k") / "bpe.json"
    train_tokenizer((text for side in texts for text in side), 8000).save(str(file))
    tokenizer = load_tokenizer(file)
    return [[len(ids) for ids in encode(tokenizer, side)] for side in texts]


@pytest.mark.data
@pytest.mark.parametrize(("tokens", "workers"), [(6_000, 2), (50_000, 8), (25_000, 2)])
def test_padding_stays_below_a_tenth_on_multi30k(multi30k_lengths, tokens, workers):
    assert TokenBatches(*multi30k_lengths, tokens=tokens, workers=workers).padding < 0.1
