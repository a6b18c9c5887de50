"""Translations do not depend on batches or workers, and are never cut without a word."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM

from dsgdac_accel import GossipAccelerator, WorkerGroup
from tasks.common.precision import full_precision
from tasks.translation.config import DecodingConfig, ModelConfig
from tasks.translation.decoding import length_batches, translate
from tasks.translation.grammar import grammar_splits
from tasks.translation.model import build_model, save_translator
from tasks.translation.tokenizer import encode, load_tokenizer, train_tokenizer
from tests.workers import run_workers

LINES = [english for english, _ in grammar_splits()["test"][:30]]
SOURCES = [*LINES, "", "Go!", " ".join(LINES[:3]), "no\u2028break"]


def a_translator(folder, steps=60):
    """A tiny model after a few steps on real pairs: enough to make sentences that end, too little to be sure of any."""
    pairs = grammar_splits()["train"][:300]
    train_tokenizer((text for pair in pairs for text in pair), 400).save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    torch.manual_seed(0)
    model = build_model(ModelConfig(size="tiny", dropout=0.0), len(tokenizer), 0, 1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    batch = tokenizer([english for english, _ in pairs[:64]], padding=True, return_tensors="pt")
    labels = tokenizer([german for _, german in pairs[:64]], padding=True, return_tensors="pt")["input_ids"]
    labels[labels == 0] = -100
    for _ in range(steps):
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return a_translator(tmp_path_factory.mktemp("translator"))


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_length_batches_hold_every_row_once_within_the_budget(sizes, budget):
    batches = length_batches(sizes, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) * max(sizes[row] for row in batch) <= budget or len(batch) == 1


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_text_is_the_same_in_batches_of_any_size(translator, beams):
    model, tokenizer = translator
    ids = encode(tokenizer, SOURCES)
    alone, few, all_at_once = (
        translate(model, tokenizer, ids, DecodingConfig(beams=beams, batch_tokens=tokens)) for tokens in (1, 300, 9000)
    )
    assert alone == few == all_at_once
    assert len(alone.texts) == len(SOURCES)
    assert alone.texts[30] == "", "an empty line stays empty"
    assert len(set(alone.texts)) > 3, "the test needs sentences that differ"


@pytest.mark.parametrize("beams", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_what_transformers_own_search_finds_for_each_sentence_alone(translator, beams):
    model, tokenizer = translator
    found = translate(model, tokenizer, encode(tokenizer, LINES), DecodingConfig(beams=beams))
    for line, text in zip(LINES, found.texts, strict=True):
        ids = tokenizer([line], return_tensors="pt")["input_ids"]
        options = {"length_penalty": 0.6} if beams > 1 else {}
        output = model.generate(
            input_ids=ids, num_beams=beams, max_new_tokens=ids.shape[1] + 50, do_sample=False, **options
        )
        theirs = tokenizer.decode(output[0], skip_special_tokens=True)
        cut = tokenizer.eos_token_id not in output[0]  # at our limit the last token is the end of the sentence
        assert theirs.startswith(text) if cut else theirs == text


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_sentence_ends_at_its_own_limit_and_is_counted(translator, beams):
    model, tokenizer = translator
    ids = encode(tokenizer, SOURCES)
    together, alone = (
        translate(model, tokenizer, ids, DecodingConfig(beams=beams, extra_length=1, batch_tokens=tokens))
        for tokens in (9000, 1)
    )
    assert together == alone, "the limit of a longer neighbor does not count"
    free = translate(model, tokenizer, ids, DecodingConfig(beams=beams, extra_length=200))
    assert free.at_limit < together.at_limit < len(SOURCES)
    assert together.texts != free.texts


def test_a_source_longer_than_the_models_positions_is_translated_whole(translator):
    model, tokenizer = translator
    long = " ".join(LINES * 6)
    ids = encode(tokenizer, [long])
    assert len(ids[0]) > 1024
    found = translate(model, tokenizer, ids, DecodingConfig(beams=1))
    assert model.config.max_position_embeddings > len(ids[0])
    assert len(found.texts) == 1


def translate_on_a_worker(rank, folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    group = WorkerGroup(torch.device("cpu"), timeout=30)
    return translate(model, tokenizer, encode(tokenizer, SOURCES), DecodingConfig(batch_tokens=300), group)


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_workers_finds_the_same_text_in_the_same_order(tmp_path, translator, num_workers):
    model, tokenizer = translator
    save_translator(model, model.state_dict(), tokenizer, DecodingConfig(), tmp_path)
    expected = translate(model, tokenizer, encode(tokenizer, SOURCES), DecodingConfig(batch_tokens=300))
    assert run_workers(translate_on_a_worker, num_workers, tmp_path) == [expected] * num_workers


def test_more_workers_than_batches_is_fine(translator):
    model, tokenizer = translator
    ids = encode(tokenizer, LINES[:2])
    assert translate(model, tokenizer, [], DecodingConfig()).texts == []
    assert len(translate(model, tokenizer, ids, DecodingConfig()).texts) == 2


def logits_with_and_without_autocast(rank):
    torch.manual_seed(0)
    model = build_model(ModelConfig(size="tiny"), 50, 0, 1).eval()
    ids = torch.randint(2, 50, (2, 5))
    batch = {"input_ids": ids, "decoder_input_ids": ids}
    with torch.no_grad():
        exact = model(**batch).logits
        prepared = GossipAccelerator(mixed_precision="bf16").prepare(model)
        rounded = prepared(**batch).logits
        with full_precision(prepared):
            lifted = prepared(**batch).logits
        return exact, rounded, lifted, prepared(**batch).logits


@pytest.mark.multiprocess  # a process of its own: Accelerate's precision is one per process
def test_autocast_is_lifted_for_the_search_and_comes_back():
    ((exact, rounded, lifted, again),) = run_workers(logits_with_and_without_autocast, 1)
    assert not torch.equal(rounded, exact)
    assert torch.equal(lifted, exact)
    assert torch.equal(again, rounded)
