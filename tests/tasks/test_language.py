"""The language task: its texts, its configurations, and a model that is trained and then fine-tuned by gossip."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsgdac_accel import GossipConfig
from tasks.common.config import ConfigError, parse_config
from tasks.common.known_tasks import script_for
from tasks.common.preflight import examination_of
from tasks.language import training
from tasks.language.config import LanguageConfig
from tasks.language.data import END, sections, sequences, train_tokenizer
from tasks.translation.grammar import grammar_splits

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs" / "language").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_loads_and_belongs_to_the_language_task(file):
    config = parse_config(LanguageConfig, ["--config", str(file)])
    assert config.output_dir == file.parents[2] / "runs" / "language" / file.stem
    assert config.global_batch_size % config.gossip.workers_per_process == 0
    assert script_for(file).name == "trainer_language.py"
    with pytest.raises(ConfigError, match=r"one of trainer_language\.py"):
        examination_of(file, [], 5.0)


def test_the_reference_of_python_is_a_text_that_sequences_restore():
    found = sections("python")
    assert sum(map(len, found)) > 300_000
    tokenizer = train_tokenizer(found[:3], vocab_size=300)
    rows = sequences(found[:3], tokenizer, block_size=16)
    text = tokenizer.decode([token for row in rows["input_ids"] for token in row])
    assert END.join(found[:3]).startswith(text)
    assert rows["labels"] == rows["input_ids"]


@pytest.mark.slow
def test_a_fine_tuned_model_is_the_average_and_better_on_its_text(tmp_path, monkeypatch):
    english, german = zip(*grammar_splits()["train"][:400], strict=True)
    texts = {"numpy": list(english), "python": list(german)}
    monkeypatch.setattr(training, "sections", texts.__getitem__)
    shared = {"block_size": 16, "num_train_epochs": 2, "learning_rate": 3e-3}
    base = LanguageConfig(algorithm="adam", text="numpy", output_dir=tmp_path / "base", **shared)
    tuning = LanguageConfig(
        gossip=GossipConfig(workers_per_process=2), model=tmp_path / "base" / "deployed",
        output_dir=tmp_path / "tuned", **shared,
    )  # fmt: skip
    for config in (base, tuning):
        training.train_language_model(config, training.build_trainer(config))
    trained, tuned = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("base", "tuned"))
    assert (trained["radius"], trained["workers"], tuned["workers"]) == (0, 1, 2)
    assert tuned["radius"] > 1e-3
    assert 0 < tuned["gamma"] < 0.1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned" / "deployed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / "deployed").eval()
    _, held_out = training.split(texts["python"], seed=0)
    rows = torch.tensor(sequences(held_out, tokenizer, 16)["input_ids"])
    with torch.no_grad():
        assert float(model(input_ids=rows, labels=rows).loss) == pytest.approx(tuned["test_loss"], rel=1e-3)
    untuned = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "deployed").eval()
    with torch.no_grad():
        assert float(untuned(input_ids=rows, labels=rows).loss) > tuned["test_loss"] + 0.5


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Train it first"):
        training.build_trainer(LanguageConfig(model=tmp_path, output_dir=tmp_path / "run"))
    with pytest.raises(ValueError, match="multiple of the number of workers"):
        training.build_trainer(LanguageConfig(gossip=GossipConfig(workers_per_process=3), output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
