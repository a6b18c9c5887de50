"""Translations do not depend on batches or workers, and are never cut without a word."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM

from dsgdac_accel import GossipAccelerator, WorkerGroup
from tasks.common.precision import full_precision
from tasks.translation.config import DecodingConfig, ModelConfig
from tasks.translation.decoding import length_batches, translate
from tasks.translation.grammar import Sampler
from tasks.translation.model import build_model, save_translator
from tasks.translation.tokenizer import encode, load_tokenizer, train_tokenizer
from tests.workers import run_workers

SAMPLER = Sampler(2602)
PAIRS = [SAMPLER.pair() for _ in range(300)]
LINES = [SAMPLER.pair()[0] for _ in range(12)]
SOURCES = [*LINES, "", "Go!", " ".join(LINES[:3]), "no\u2028break"]


def a_translator(folder, steps=60):
    """A tiny model after a few steps on real pairs: enough to make sentences that end, too little to be sure of any."""
    train_tokenizer((text for pair in PAIRS for text in pair), 400).save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    torch.manual_seed(0)
    model = build_model(ModelConfig(size="tiny", dropout=0.0), len(tokenizer), 0, 1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    batch = tokenizer([english for english, _ in PAIRS[:64]], padding=True, return_tensors="pt")
    labels = tokenizer([german for _, german in PAIRS[:64]], padding=True, return_tensors="pt")["input_ids"]
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
    assert alone.texts[len(LINES)] == "", "an empty line stays empty"
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


def test_a_pre_norm_model_finds_with_its_cache_what_it_finds_without():
    torch.manual_seed(0)
    model = build_model(ModelConfig(size="tiny", norm="pre", dropout=0.0), 40, 0, 1).eval()
    options = {"input_ids": torch.randint(2, 40, (3, 6)), "num_beams": 2, "max_new_tokens": 12}
    cached, whole = (model.generate(**options, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, whole)


class Letters:
    """Stands in for a tokenizer whose tokens 2, 3, ... are the letters a, b, ..."""

    pad_token_id, eos_token_id = 0, 1

    def batch_decode(self, rows, **_):
        return ["".join(chr(95 + token) for token in row if token > 1) for row in rows]


def test_a_wide_beam_finds_the_best_of_all_hypotheses_by_the_length_penalty():
    torch.manual_seed(3)
    model = build_model(ModelConfig(size="tiny", dropout=0.0), 5, 0, 1, positions=16).double().eval()
    torch.nn.init.normal_(model.model.shared.weight, std=0.6)  # sure enough of its tokens that the penalty decides
    source, longest = [2, 4, 1], 4  # tokens of a hypothesis, its end included
    totals = {}
    with torch.no_grad():
        for words in (w for length in range(longest) for w in itertools.product((2, 3, 4), repeat=length)):
            batch = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[0, *words]])}
            chosen = torch.tensor([[*words, 1]])
            totals[words] = float(model(**batch).logits[0].log_softmax(1).gather(1, chosen.T).sum())
    divisors = {"power": lambda length: length, "gnmt": lambda length: (5 + length) / 6}
    best = []
    for exponent, (kind, divisor) in itertools.product((0.6, 2.0), divisors.items()):
        best.append(max(totals, key=lambda w: totals[w] / divisor(len(w) + 1) ** exponent))
        decoding = DecodingConfig(
            beams=len(totals), length_penalty=exponent, length_penalty_kind=kind, extra_length=longest - len(source)
        )
        assert translate(model, Letters(), [source], decoding).texts == Letters().batch_decode(best[-1:])
    assert best[0] != best[1] != best[3], "the kind and the exponent have to matter in this test"


def test_the_length_penalty_of_gnmt_must_reach_the_search(translator, monkeypatch):
    model, tokenizer = translator
    monkeypatch.setattr(type(model), "generate", lambda self, **_: torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match=r"length_penalty_kind: gnmt does not reach the search .* Use power\."):
        translate(model, tokenizer, encode(tokenizer, LINES[:1]), DecodingConfig(length_penalty_kind="gnmt"))


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
    long = " ".join(LINES * 15)
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
