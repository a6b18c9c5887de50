"""The two examples for the Hugging Face Trainer, launched as their users launch them: results, files, equal workers."""

import math
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageClassification, AutoModelForSeq2SeqLM, AutoTokenizer

from tasks.trainer_images import load_splits
from tasks.translation.grammar import grammar_splits
from tests.launching import ROOT, finish, forked, start, torchrun

pytestmark = [pytest.mark.task, pytest.mark.timeout(640)]

WATCH = """
import os, runpy, sys
import torch, transformers

say = transformers.Trainer.log_metrics

def log_metrics(trainer, split, metrics):
    say(trainer, split, metrics)
    seen = {"model": trainer.model.state_dict(), "metrics": metrics, "best": trainer.state.best_metric,
            "processes": trainer.accelerator.num_processes, "history": trainer.state.log_history}
    torch.save(seen, f"worker{os.environ.get('RANK', 0)}.pt")

transformers.Trainer.log_metrics = log_metrics
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the example as it is, and keeps what each worker has when it says its results."""


def begin(launcher, cwd, example, *arguments):
    """Start an example in `cwd`, whose results go to `run`."""
    (cwd / "watch.py").write_text(WATCH, encoding="utf-8")
    script = str(ROOT / "tasks" / f"{example}.py")
    return start([*launcher, "watch.py", script, "--output_dir", "run", *arguments], cwd)


def end(process, cwd):
    """The folder, what the example printed, and what each worker had in the end."""
    status, out, err = finish(process, timeout=300)
    assert status == 0, f"{out}\n{err}"
    return cwd, out, [torch.load(file, weights_only=True) for file in sorted(cwd.glob("worker*.pt"))]


def printed(out, name):
    (value,) = re.findall(rf"^ *{name} += +([\d.]+)$", out, re.MULTILINE)
    return float(value)


def assert_equal_workers(workers, number):
    assert [worker["processes"] for worker in workers] == [number] * number
    for worker in workers[1:]:
        torch.testing.assert_close(worker["model"], workers[0]["model"], rtol=0, atol=0)


def radii(worker):
    return [entry["gossip/radius"] for entry in worker["history"] if "gossip/radius" in entry]


FEW_SENTENCES = """
import runpy, sys
from tasks.translation import grammar
splits = {name: pairs[:count] for (name, pairs), count in zip(grammar.grammar_splits().items(), (640, 8, 8))}
grammar.grammar_splits = lambda: splits
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def translate_few(launcher, folder, *arguments):
    """The example of translation with few sentences; .ci/run has it learn from all of them."""
    (folder / "few_sentences.py").write_text(FEW_SENTENCES, encoding="utf-8")
    return end(begin([*launcher, "few_sentences.py"], folder, "trainer_translation", *arguments), folder)


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    return translate_few(forked(2), tmp_path_factory.mktemp("translation"), "--num_train_epochs", "4")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return end(begin(forked(2), folder, "trainer_images", "--num_train_epochs", "3"), folder)


def test_images_are_learned_and_all_workers_end_with_the_deployed_model(images):
    _, out, workers = images
    assert printed(out, "test_accuracy") > 0.95
    assert_equal_workers(workers, 2)
    assert min(radii(workers[0])) > 1e-3, "the workers kept apart while they trained"


@pytest.mark.slow
def test_torchrun_starts_the_same_training(images, tmp_path):
    _, _, (worker, _) = end(begin(torchrun(2), tmp_path, "trainer_images", "--num_train_epochs", "3"), tmp_path)
    torch.testing.assert_close(worker["model"], images[2][0]["model"], rtol=0, atol=0)


def test_the_best_deployed_model_is_what_is_saved(images):
    folder, out, workers = images
    model = AutoModelForImageClassification.from_pretrained(folder / "run" / "deployed").eval()
    torch.testing.assert_close(model.state_dict(), workers[0]["model"], rtol=0, atol=0)
    _, validation, test = load_splits()
    for rows, accuracy in ((test, workers[0]["metrics"]["test_accuracy"]), (validation, workers[0]["best"])):
        with torch.no_grad():
            right = model(rows["pixel_values"][:]).logits.argmax(-1) == rows["labels"][:]
        assert float(right.double().mean()) == pytest.approx(accuracy, abs=1e-9)
    assert printed(out, "test_accuracy") == pytest.approx(workers[0]["metrics"]["test_accuracy"], abs=1e-4)


def test_consensus_metrics_stand_in_tensorboard(images):
    folder, _, workers = images
    (file,) = (folder / "run").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    logged = {event.step: event.value for event in events.Scalars("train/gossip/radius")}
    assert len(logged) == 3
    assert max(logged.values()) == pytest.approx(max(radii(workers[0])), rel=1e-5)


@pytest.mark.slow
def test_translation_is_learned_and_all_workers_end_with_the_deployed_model(translation):
    folder, out, workers = translation
    assert printed(out, "test_loss") < 0.8 * math.log(1000), "it has learned something about the 1,000 words"
    assert_equal_workers(workers, 2)
    assert max(radii(workers[0])) > 1e-3
    assert out.count("reference: ") == 3
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "run" / "deployed").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "deployed")
    sources = [source for source, _ in grammar_splits()["test"][:3]]
    found = model.generate(**tokenizer(sources, padding=True, return_tensors="pt"))
    for source, text in zip(sources, tokenizer.batch_decode(found, skip_special_tokens=True), strict=True):
        assert f"  {source}\n    -> {text}\n" in out


@pytest.mark.slow
def test_a_saved_model_is_fine_tuned_by_one_process_alone(translation, tmp_path):
    trained, before, _ = translation
    model = ["--model", str(trained / "run" / "deployed"), "--num_train_epochs", "2"]
    folder, out, workers = translate_few(forked(), tmp_path, *model)
    assert printed(out, "test_loss") < 0.9 * printed(before, "test_loss")
    assert_equal_workers(workers, 1)
    assert (folder / "run" / "deployed" / "model.safetensors").is_file()
