"""Both tasks with several workers per process, and the curvature that they measure, in training and afterwards."""

import json

import pytest
from filelock import FileLock

from tasks.common.diagnostics import CurvatureConfig
from tests.launching import ROOT, error_lines, finish, forked, records, start, summary
from tests.tasks.test_task_resume import write_pairs

pytestmark = [pytest.mark.task, pytest.mark.timeout(200)]

CURVATURE = "curvature: {every: 1, batches: 4, batch_size: 16, iterations: 8, probes: 3, noise_batches: 2}"

IMAGES = f"""
gossip: {{log_every: 3, start_epoch: 1, timeout: 60}}
data: {{train_limit: 192}}
model: mlp
num_train_epochs: 2
global_batch_size: 64
gradient_accumulation_steps: 2
learning_rate: 0.1
warmup_epochs: 0.4
crop_padding: 0
flip: false
logging_steps: 1
report_to: []
{CURVATURE}
"""

TEXT = f"""
gossip: {{log_every: 3, start_step: 2, timeout: 60}}
data: {{path: text, vocab_size: 400, cache_dir: cache}}
model: {{size: tiny, dropout: 0.0}}
decoding: {{beams: 1}}
num_train_epochs: 1
batch_tokens: 1400
gradient_accumulation_steps: 2
learning_rate: 5e-3
warmup_steps: 3
logging_steps: 1
max_grad_norm: 1.0
report_to: []
{CURVATURE}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("virtual")
    (folder / "images.yaml").write_text(IMAGES, encoding="utf-8")
    (folder / "text.yaml").write_text(TEXT, encoding="utf-8")
    write_pairs(folder / "text")
    return folder


def run(work, script, settings, processes, per_process, algorithm, *arguments):
    output = f"{script}_{algorithm.replace(' ', '')}_{processes}"
    command = [
        *forked(processes), str(ROOT / "tasks" / script), "--config", settings, "--algorithm", *algorithm.split(),
        "--gossip.workers_per_process", str(per_process), "--output_dir", output, *arguments,
    ]  # fmt: skip
    status, out, err = finish(start(command, work), timeout=120)
    assert status == 0, f"{out}\n{err}"
    return work / output


@pytest.mark.parametrize(
    ("script", "settings", "algorithm"),
    [
        ("cifar.py", "images.yaml", "dsgd_ac"),
        pytest.param("cifar.py", "images.yaml", "sgd", marks=pytest.mark.slow),
        pytest.param("cifar.py", "images.yaml", "sam", marks=pytest.mark.slow),
        pytest.param("cifar.py", "images.yaml", "sam --sam_per_worker true", marks=pytest.mark.slow),
        pytest.param("wmt14.py", "text.yaml", "dadam_ac", marks=pytest.mark.slow),
        pytest.param("wmt14.py", "text.yaml", "adam", marks=pytest.mark.slow),
    ],
)
def test_any_split_of_the_workers_is_the_same_run(work, script, settings, algorithm):
    saved = ["--save_steps", "1000"] if algorithm in ("dsgd_ac", "dadam_ac") else []
    alone = run(work, script, settings, 4, 1, algorithm)
    split = run(work, script, settings, 2, 2, algorithm, *saved)
    expected, found = records(alone, "train/loss"), records(split, "train/loss")
    assert len(expected) >= 4
    assert found == pytest.approx(expected, rel=1e-4)
    one, other = summary(alone), summary(split)
    assert one["workers"] == other["workers"] == 4
    for key in ("train_loss", "test_loss", "radius"):
        assert other[key] == pytest.approx(one[key], rel=1e-3), key
    for key in ("lambda_1", "trace", "Q", "penalty"):
        assert other["curvature"][key] == pytest.approx(one["curvature"][key], rel=1e-2, abs=1e-6), key
    if saved:
        assert one["curvature"]["Q"] != 0
        assert_measured_again(work, script, split, other["curvature"])
    else:
        assert other["curvature"]["Q"] == 0
        assert other["curvature"]["A"] is None


def assert_measured_again(work, script, folder, in_training):
    """`curvature RUN` of two processes finds in the checkpoint what was measured at the end of training."""
    same = [f"--curvature.{word}" for word in ("batches=4", "batch_size=16", "iterations=8", "probes=3")]
    command = [*forked(2), str(ROOT / "tasks" / script), "curvature", folder.name, *same, "--curvature.noise_batches=2"]
    status, out, err = finish(start(command, work))
    assert status == 0, f"{out}\n{err}"
    measured = json.loads((folder / "curvature.json").read_text(encoding="utf-8"))
    assert "4 workers at step" in measured["source"]
    assert "4 workers at step" in out
    for key, value in in_training.items():
        if key == "lambda_min" or key.endswith("_residual"):
            continue  # after so few iterations, rounding decides how near these are
        assert measured[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key
    assert records(folder, "curvature/lambda_1")[summary(folder)["steps"]] == in_training["lambda_1"]


def test_a_run_without_workers_on_disk_has_the_curvature_of_its_deployed_model(work):
    folder = run(work, "cifar.py", "images.yaml", 1, 2, "dsgd", "--num_train_epochs", "1", "--curvature.every", "null")
    assert "curvature" not in summary(folder)
    script = str(ROOT / "tasks" / "cifar.py")
    small = ["--curvature.probes=0", "--curvature.noise_batches=0"]
    status, out, err = finish(start([*forked(), script, "curvature", folder.name, *small], work))
    assert status == 0, f"{out}\n{err}"
    assert "there is no Q and no A" in out
    measured = json.loads((folder / "curvature.json").read_text(encoding="utf-8"))
    assert measured["lambda_1"] > 0
    assert [measured[name] for name in ("Q", "A", "penalty")] == [None] * 3
    for arguments, words in (
        (["nowhere"], "nowhere has no config.yaml"),
        ([folder.name, "--curvature.batch=3"], "unknown key curvature.batch. Did you mean"),
        ([folder.name, "--checkpoint", "text"], "text"),
    ):
        status, _, err = finish(start([*forked(), script, "curvature", *arguments], work))
        assert status == 2
        assert words in error_lines(err)[0]


def test_two_runs_do_not_write_into_one_folder(work):
    (work / "taken").mkdir()
    command = [*forked(), str(ROOT / "tasks" / "cifar.py"), "--config", "images.yaml", "--output_dir", "taken"]
    with FileLock(work / "taken" / ".lock"):
        status, _, err = finish(start(command, work))
    assert status == 2
    assert "another run is writing into it" in error_lines(err)[0]


def rows_of(config, seed):
    return [rows.tolist() for rows in config.training_batches(50, seed, lambda number, rows: rows)]


def test_batches_to_measure_on_are_whole_and_drawn_by_the_seed():
    config = CurvatureConfig(batches=3, batch_size=4)
    rows = rows_of(config, seed=1)
    assert [len(row) for row in rows] == [4, 4, 4]
    assert len({row for batch in rows for row in batch}) == 12
    assert rows == rows_of(config, seed=1) != rows_of(config, seed=2)
    everything = rows_of(CurvatureConfig(batches=None, batch_size=4), seed=1)
    assert [len(row) for row in everything] == [4] * 12 + [2]
    assert sorted(row for batch in everything for row in batch) == list(range(50))
    assert everything[:3] == rows, "a few batches are the first ones of all"
    assert rows_of(CurvatureConfig(batch_size=64), seed=1)[0] != sorted(range(50))
    assert not CurvatureConfig().due(0, last=True)
    due = CurvatureConfig(every=2)
    assert [due.due(epoch, last=epoch == 4) for epoch in range(5)] == [False, True, False, True, True]
    with pytest.raises(ValueError, match="every must be an integer >= 1; got 0"):
        CurvatureConfig(every=0)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"batches must be an integer >= 1; got .*Use null for the entire"):
            CurvatureConfig(batches=wrong)
