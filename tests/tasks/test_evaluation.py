"""Figures of the deployed model: over real tokens, the same for any number of workers, files line by line."""

import math

import pytest
import torch
import torch.nn.functional as F

from dsgdac_accel import WorkerGroup
from tasks.translation.config import DecodingConfig, ModelConfig
from tasks.translation.data import EvaluationPairs
from tasks.translation.evaluation import Evaluator, write_translations
from tasks.translation.model import build_model
from tasks.translation.tokenizer import encode, encode_sources, load_tokenizer, train_tokenizer
from tests.workers import run_workers

SOURCES = ["One two.", "", "A much longer line of words, and then some more of them.", "Four", "Five five five."]
REFERENCES = ["Eins zwei.", "Nichts", "Kurz.", "Eine Zeile\nin zweien", "F\u00fcnf\u2028f\u00fcnf."]


def parts(folder, batch_tokens=60):
    torch.manual_seed(0)
    file = folder / "tokenizer.json"
    if not file.exists():
        train_tokenizer(SOURCES + REFERENCES, 300).save(str(file))
    tokenizer = load_tokenizer(file)
    model = build_model(ModelConfig(size="tiny"), len(tokenizer), 0, 1, positions=16).eval()
    pairs = EvaluationPairs(
        "test", SOURCES, REFERENCES, encode_sources(tokenizer, SOURCES), encode(tokenizer, REFERENCES)
    )
    group = WorkerGroup(torch.device("cpu"), timeout=30)
    decoding = DecodingConfig(beams=2, extra_length=5, batch_tokens=batch_tokens)
    return Evaluator(tokenizer, group, decoding, 0.1, "de"), model, pairs


def test_losses_are_means_over_all_real_tokens(tmp_path):
    evaluator, model, pairs = parts(tmp_path)
    found = evaluator.losses(model, pairs.source_ids, pairs.target_ids)  # lets the model read all positions, too
    sums, tokens = torch.zeros(2, dtype=torch.float64), 0
    for source, target in zip(pairs.source_ids, pairs.target_ids, strict=True):
        labels = torch.tensor([target])
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([source]),
                decoder_input_ids=labels.roll(1, 1).index_fill(1, torch.tensor([0]), 0),
            ).logits[0]
        for number, smoothing in enumerate((0.1, 0.0)):
            sums[number] += F.cross_entropy(logits, labels[0], label_smoothing=smoothing, reduction="sum")
        tokens += len(target)
    assert found["loss"] == pytest.approx(float(sums[0]) / tokens, rel=1e-5)
    assert found["nll"] == pytest.approx(float(sums[1]) / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))


def evaluate_on_a_worker(rank, folder):
    evaluator, model, pairs = parts(folder)
    found = evaluator.translations(model, pairs)
    return evaluator.losses(model, pairs.source_ids, pairs.target_ids), found, evaluator.scores(found.texts, pairs)


@pytest.mark.multiprocess
def test_any_number_of_workers_finds_the_same_figures_to_the_bit(tmp_path):
    parts(tmp_path)  # makes the vocabulary
    (alone,) = run_workers(evaluate_on_a_worker, 1, tmp_path)
    assert run_workers(evaluate_on_a_worker, 3, tmp_path) == [alone] * 3
    assert alone[2]["sentences"] == len(SOURCES)
    assert alone[1].texts[1] == ""


def test_sources_references_and_hypotheses_stand_side_by_side_whatever_is_in_them(tmp_path):
    _, _, pairs = parts(tmp_path)
    write_translations(tmp_path, pairs, [f"h{row}" for row in range(5)])
    files = {kind: (tmp_path / f"test.{kind}.txt").read_bytes().decode() for kind in ("sources", "references")}
    assert files["sources"].split("\n") == [*SOURCES, ""]
    assert files["references"].split("\n") == [text.replace("\n", " ") for text in REFERENCES] + [""]
    assert (tmp_path / "test.hypotheses.txt").read_text() == "h0\nh1\nh2\nh3\nh4\n"
