"""Both tasks, killed and started again by the same command, leave the same results as an unbroken run."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dsgdac_accel import GossipConfig, WorkerGroup
from dsgdac_accel.checkpoint import CheckpointError, load_worker, newest_checkpoint, read_manifest, save_checkpoint
from dsgdac_accel.config import config_to_dict
from tasks.common.checkpoints import checkpoint_to_resume, step_of_own
from tasks.common.config import ConfigError
from tasks.images.config import CifarConfig
from tasks.translation.grammar import grammar_splits
from tests.launching import ROOT, finish, forked, start, summary

pytestmark = [pytest.mark.task, pytest.mark.timeout(200)]

KILLER = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from tasks.common import checkpoints
really = checkpoints.Checkpoints.save_if_due
def save_if_due(self, step):
    really(self, step)
    if step == int(os.environ["KILL_AT"]) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints.Checkpoints.save_if_due = save_if_due
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""
TIMES = ("gossip/wait_seconds", "train/tokens_per_second")

IMAGES = """
gossip: {log_every: 3, start_epoch: 1, timeout: 30}
data: {train_limit: 200}
model: wrn-10-1
dropout: 0.3
num_train_epochs: 3
global_batch_size: 40
gradient_accumulation_steps: 2
warmup_epochs: 0.4
crop_padding: 1
logging_steps: 2
dataloader_num_workers: 1
eval_every: 2
"""  # 5 steps an epoch

SMALL_IMAGES = """
gossip: {log_every: 3, start_epoch: 1, timeout: 30}
data: {train_limit: 200}
model: mlp
num_train_epochs: 2
global_batch_size: 40
warmup_epochs: 0.4
crop_padding: 1
logging_steps: 2
"""  # 5 steps an epoch

TEXT = """
gossip: {log_every: 3, start_step: 2, timeout: 30}
data: {path: text, vocab_size: 400, cache_dir: cache}
model: {size: tiny, dropout: 0.2}
decoding: {beams: 2}
num_train_epochs: 2
batch_tokens: 700
learning_rate: 5e-3
warmup_steps: 3
logging_steps: 3
weight_average: {kind: lawa, last: 2, every: 4}
max_grad_norm: 1.0
"""


def write_pairs(folder):
    folder.mkdir()
    for split, count in {"train": 160, "validation": 4, "test": 4}.items():
        for language, lines in zip(("en", "de"), zip(*grammar_splits()[split][:count], strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("\n".join(lines), encoding="utf-8")


def launch(work, script, *arguments, kill_at=None):
    settings = ["--config", "settings.yaml", "--report_to", "[]", *arguments]
    program = [str(ROOT / "tasks" / script)]
    if kill_at is not None:
        (work / "killer.py").write_text(KILLER, encoding="utf-8")
        program = ["killer.py", *program]
    variables = {} if kill_at is None else {"KILL_AT": str(kill_at)}
    return finish(start([*forked(2), *program, *settings], work, **variables), timeout=120)


def logged(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_same_run(one, other, workers):
    assert logged(other) == logged(one)
    measured = [key for key in summary(one) if key != "data_share" and not key.endswith("seconds")]
    assert [summary(other)[key] for key in measured] == [summary(one)[key] for key in measured]
    for file in (one / "deployed").glob("*.safetensors"):
        assert_same_tensors(load_file(file), load_file(other / "deployed" / file.name))
    ends = [newest_checkpoint(folder / "checkpoints") for folder in (one, other)]
    assert [read_manifest(end).step for end in ends] == [summary(one)["steps"]] * 2
    for rank in range(workers):
        last, same = (load_worker(end, rank) for end in ends)
        assert_same_tensors(last["models"][0]["parameters"], same["models"][0]["parameters"])
        assert torch.equal(last["random"]["torch"], same["random"]["torch"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "settings", "algorithm", "kill_at", "resumed_at"),
    [
        ("cifar.py", IMAGES, "dsgd_ac", 8, (3, 6)),  # in the middle of the second of 3 epochs
        ("wmt14.py", TEXT, "dadam_ac", 7, (3, 6)),
    ],
)
def test_a_killed_run_started_again_is_the_unbroken_one(tmp_path, script, settings, algorithm, kill_at, resumed_at):
    (tmp_path / "settings.yaml").write_text(settings, encoding="utf-8")
    write_pairs(tmp_path / "text")
    common = [script, "--algorithm", algorithm]
    whole = ["--output_dir", "unbroken", "--save_steps", "1000"]
    status, out, err = launch(tmp_path, *common, *whole)
    assert status == 0, f"{out}\n{err}"
    broken = [*common, "--output_dir", "broken", "--save_steps", "3"]
    status, _, _ = launch(tmp_path, *broken, kill_at=kill_at)
    assert status != 0
    assert not (tmp_path / "broken" / "summary.json").exists()
    status, out, err = launch(tmp_path, *broken)
    assert status == 0, f"{out}\n{err}"
    (step,) = re.findall(r"resumed at step (\d+)", out)
    assert int(step) in resumed_at  # the newest one may have been incomplete, since it is written in the background
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "broken"
    assert_same_run(unbroken, resumed, workers=2)
    assert len(list((resumed / "checkpoints").iterdir())) == 2


# ---- which checkpoint


def accelerator(workers=1):
    return SimpleNamespace(is_main_process=True, num_processes=workers, group=WorkerGroup(torch.device("cpu")))


def config(folder, **settings):
    return CifarConfig(output_dir=folder, **settings)


def saved(folder, step, **settings):
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    facts = {"task": "cifar", "config": config_to_dict(config(folder, **settings))}
    save_checkpoint(checkpoint, {}, WorkerGroup(torch.device("cpu")), step=step, facts=facts)
    return checkpoint


def test_auto_resumes_from_the_newest_complete_checkpoint_also_in_a_folder_that_was_moved(tmp_path, caplog):
    assert checkpoint_to_resume(config(tmp_path), accelerator(), "cifar") is None
    newest = [saved(tmp_path, step) for step in (9, 200, 1000)][-1]
    (newest / "workers" / "00000.safetensors").unlink()
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "checkpoints").rename(folder / "checkpoints")
    other = config(folder, logging_steps=3, eval_every=7, report_to=(), save_steps=5, gossip=GossipConfig(timeout=9))
    found = checkpoint_to_resume(other, accelerator(), "cifar")
    (skipped,) = caplog.messages
    assert re.fullmatch(r"skipped .*/step-00001000/workers/00000.*No such file.* Using .*/step-00000200\.", skipped)
    assert found == folder / "checkpoints" / "step-00000200"
    assert step_of_own(found, other) == 200
    elsewhere = config(tmp_path / "elsewhere", resume_from_checkpoint=found)
    assert checkpoint_to_resume(elsewhere, accelerator(), "cifar") == found
    assert step_of_own(found, elsewhere) is None


@pytest.mark.parametrize(
    ("settings", "workers", "task", "message"),
    [
        (
            {"learning_rate": 0.2, "momentum": 0.8},
            1,
            "cifar",
            r"learning_rate \(now 0.2, was 0.1\); momentum \(now 0.8, was 0.9\)",
        ),
        ({"gossip": GossipConfig(power=2)}, 1, "cifar", r"gossip.power \(now 2.0, was 3.0\)"),
        ({}, 2, "cifar", "state of 1 workers, and 2 were launched"),
        ({}, 1, "wmt14", "is a checkpoint of cifar, not of wmt14"),
        (
            {"resume_from_checkpoint": "never"},
            1,
            "cifar",
            "resume_from_checkpoint: never would start another run where .* up to step 5",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, settings, workers, task, message):
    saved(tmp_path, 5)
    with pytest.raises(ConfigError, match=message):
        checkpoint_to_resume(config(tmp_path, **settings), accelerator(workers), task, any_count=True)


def test_another_number_of_workers_resumes_if_the_configuration_says_so(tmp_path):
    newest = saved(tmp_path, 5)
    settings = config(tmp_path, gossip=GossipConfig(on_other_worker_count="deployed"))
    assert checkpoint_to_resume(settings, accelerator(2), "cifar", any_count=True) == newest
    with pytest.raises(ConfigError, match="state of 1 workers"):
        checkpoint_to_resume(settings, accelerator(2), "cifar")


def test_a_run_does_not_mix_with_the_checkpoints_of_another(tmp_path):
    saved(tmp_path / "own", 5)
    other = saved(tmp_path / "other", 3)
    with pytest.raises(ConfigError, match="would start another run"):
        checkpoint_to_resume(config(tmp_path / "own", resume_from_checkpoint=other), accelerator(), "cifar")
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint_to_resume(
            config(tmp_path / "new", resume_from_checkpoint=tmp_path / "nowhere"), accelerator(), "cifar"
        )
