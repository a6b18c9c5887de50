"""The image task end to end, as its user starts it: launched, broken, killed, repeated."""

import re
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tasks.common.config import load_config
from tasks.images.augment import normalize
from tasks.images.config import CifarConfig, DataConfig
from tasks.images.data import load_image_data
from tasks.images.saving import load_image_model
from tests.launching import ACCELERATE, PLAIN, ROOT, error_lines, finish, forked, records, start, summary, torchrun

pytestmark = [pytest.mark.task, pytest.mark.timeout(120)]

SCRIPT = str(ROOT / "tasks" / "cifar.py")

IMAGES, BATCH = 330, 60
STEPS_PER_EPOCH = 5  # 30 images, which fill no batch, are left out of each epoch
SETTINGS = f"""
gossip:
  log_every: 4
data:
  train_limit: {IMAGES}
model: mlp
num_train_epochs: 2
global_batch_size: {BATCH}
warmup_epochs: 0.4
crop_padding: 1
flip: false
logging_steps: 1
"""


def launch(launcher, cwd, *arguments, script=SCRIPT):
    return finish(start([*launcher, script, "--config", "settings.yaml", *arguments], cwd))


def succeed(launcher, cwd, *arguments):
    status, out, err = launch(launcher, cwd, *arguments)
    assert status == 0, f"{out}\n{err}"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder that is not the repository's, with settings whose relative paths start there."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "settings.yaml").write_text(SETTINGS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def images(work):
    """Name of a folder, relative to `work`, of 24 training images: grey, with transparency, in color."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 2)):
        for name, mode, channels in (("grey", "L", ()), ("alpha", "RGBA", (4,)), ("color", "RGB", (3,))):
            folder = work / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (6, 6, *channels), dtype=np.uint8)
                Image.fromarray(pixels).convert(mode).save(folder / f"{number}.png")
    return "images"


@pytest.fixture(scope="module")
def first_run(work):
    """DSGD-AC on four workers, into a folder where an earlier run was."""
    folder = work / "first"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 999, "train/loss": 1.0}\n', encoding="utf-8")
    (folder / "bleu.png").write_text("of another run", encoding="utf-8")
    succeed(forked(4), work, "--output_dir", "first")
    return folder


@pytest.fixture(scope="module")
def same_run_evaluated_at_its_end(work, first_run):
    """From the config.yaml that the first run wrote; only the evaluation inside differs."""
    settings = ["--config", str(first_run / "config.yaml"), "--eval_every", "2", "--output_dir", "again"]
    status, out, err = finish(start([*forked(4), SCRIPT, *settings], work))
    assert status == 0, f"{out}\n{err}"
    return work / "again"


@pytest.fixture(scope="module")
def paired_runs(work):
    """SGD and DSGD whose weights stay where they start, with micro-batches that the epoch's end cuts short."""
    for algorithm in ("sgd", "dsgd"):
        still = f"--learning_rate 1e-9 --gradient_accumulation_steps 3 --report_to [] --output_dir {algorithm}"
        succeed(forked(2), work, "--algorithm", algorithm, *still.split())
    return work / "sgd", work / "dsgd"


def test_the_summary_says_what_ran(first_run):
    said = summary(first_run)
    assert (said["algorithm"], said["workers"], said["topology"], said["seed"]) == ("dsgd_ac", 4, "one_peer_ring", 0)
    assert said["steps"] == 2 * STEPS_PER_EPOCH
    assert 0 < said["gamma"] < 1
    assert said["radius"] > 0
    assert said.keys() >= {"train_loss", "test_loss", "test_accuracy", "seconds"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [ACCELERATE, torchrun(4)], ids=["launch file", "torchrun"])
def test_launchers_start_the_same_run(work, first_run, launcher, tmp_path):
    succeed(launcher, work, "--output_dir", tmp_path / "launched")
    assert records(tmp_path / "launched", "train/loss") == records(first_run, "train/loss")
    for key in ("workers", "steps", "test_loss", "radius"):
        assert summary(tmp_path / "launched")[key] == summary(first_run)[key]


def test_a_run_folder_holds_all_that_a_run_writes_and_nothing_of_an_earlier_one(first_run):
    assert list(records(first_run, "train/loss")) == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert list(records(first_run, "test/accuracy")) == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert {file.name for file in first_run.glob("*.png")} == {
        "accuracy.png", "consensus.png", "loss.png", "lr_gamma.png",
    }  # fmt: skip
    assert list(first_run.rglob("events.out.tfevents.*"))
    assert load_config(CifarConfig, first_run / "config.yaml").output_dir == first_run


def test_the_deployed_model_scores_by_itself_what_the_summary_says(first_run):
    model, card = load_image_model(first_run / "deployed")
    data = load_image_data(DataConfig())
    mean, std = torch.tensor(card["mean"]), torch.tensor(card["std"])
    with torch.no_grad():
        logits = model(normalize(data.test_images, mean, std))
    assert (logits.argmax(1) == data.test_labels).double().mean().item() == summary(first_run)["test_accuracy"]
    loss = torch.nn.functional.cross_entropy(logits, data.test_labels).item()
    assert loss == pytest.approx(summary(first_run)["test_loss"], rel=1e-5)


def test_the_written_config_repeats_the_run_to_the_bit_however_often_it_was_evaluated(
    first_run, same_run_evaluated_at_its_end
):
    runs = first_run, same_run_evaluated_at_its_end
    assert len(records(runs[1], "test/accuracy")) == 1
    for key in ("train/loss", "gossip/lr", "gossip/gamma"):
        first, second = (records(run, key) for run in runs)
        assert first == second
    measured = ("steps", "train_loss", "worker_train_loss", "test_loss", "test_accuracy", "radius", "gamma")
    assert [summary(runs[0])[key] for key in measured] == [summary(runs[1])[key] for key in measured]
    first, second = (load_file(run / "deployed" / "model.safetensors") for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


def test_algorithms_are_compared_from_the_same_weights_on_the_same_data(paired_runs):
    of_sgd, of_dsgd = (records(run, "train/loss") for run in paired_runs)
    assert of_sgd[1] == of_dsgd[1]  # to the bit: the first loss is taken before any step
    assert of_sgd == pytest.approx(of_dsgd, rel=1e-5)
    assert len({round(loss, 3) for loss in of_sgd.values()}) > STEPS_PER_EPOCH  # another order in the second epoch


def test_left_over_micro_batches_make_no_step_beyond_the_schedule(paired_runs):
    for run in paired_runs:
        rates = records(run, "gossip/lr")
        assert list(rates) == list(range(1, 2 * STEPS_PER_EPOCH + 1))
        assert rates[2] == max(rates.values())
        falling = [rates[step] for step in range(3, 2 * STEPS_PER_EPOCH + 1)]
        assert falling == sorted(falling, reverse=True)


def test_one_worker_trains_on_a_folder_of_images_of_any_mode(work, images):
    settings = ["--data.path", images, "--global_batch_size", "8", "--label_noise", "0.5", "--report_to", "[]"]
    succeed(forked(), work, *settings, "--model", "wrn-10-1", "--dropout", "0.3", "--output_dir", "alone")
    said = summary(work / "alone")
    assert (said["workers"], said["steps"], said["radius"]) == (1, 6, 0)
    assert not (work / "alone" / "tracker").exists()


# ---- what goes wrong


def test_an_output_folder_that_cannot_be_made_is_one_line_and_status_2(work):
    (work / "taken").write_text("a file", encoding="utf-8")
    status, _, err = launch(PLAIN, work, "--output_dir", "taken")
    (line,) = error_lines(err)
    assert status == 2
    assert "output_dir" in line
    assert str(work / "taken") in line


def test_a_disk_that_is_full_when_the_model_is_saved_is_one_line(work):
    (work / "small_disk.py").write_text(
        "import resource, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the model takes 40,000 bytes\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    status, _, err = launch(forked(), work, "--report_to", "[]", "--output_dir", "full", script="small_disk.py")
    (line,) = error_lines(err)
    assert status == 1
    assert f"the model cannot be written to {work / 'full' / 'deployed'}" in line
    assert "Free space, or choose another output_dir" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--curvature.batch_size", "1"], "curvature.batch_size"),
        (["--global_batch_size", "50", "--gradient_accumulation_steps", "4"], "must divide evenly"),
        (["--mixed_precision", "fp16", "--data.path", "absent"], "fp16 needs a GPU, and there is none here. Use bf16"),
        (["--report_to", "[]"], "holds a finished run. Choose another output_dir, or replace that run by --overwrite"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_a_refused_command_leaves_the_results_of_an_earlier_run(work, changes, message):
    folder = work / "finished"
    kept = [folder / name for name in ("metrics.jsonl", "summary.json", "loss.png", "deployed/model.safetensors")]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("of an earlier run", encoding="utf-8")
    status, _, err = launch(forked(), work, "--output_dir", "finished", *changes)
    (line,) = error_lines(err)
    assert status == 2
    assert message in line
    assert [file.read_text(encoding="utf-8") for file in kept] == ["of an earlier run"] * 4
    assert not (folder / "config.yaml").exists()


def test_a_topology_for_another_number_of_workers_is_one_line_for_all_of_them(work):
    status, _, err = launch(forked(3), work, "--gossip.topology", "one_peer_exponential", "--output_dir", "three")
    (line,) = error_lines(err)
    assert status != 0
    assert "power of two" in line
    assert "got 3" in line
    assert "base_graph" in line


def test_a_worker_that_alone_lacks_the_data_speaks_for_itself_and_nobody_waits(work, images):
    (work / "elsewhere").mkdir()
    # Relative paths of the command line start from the working directory, and worker 1 is in another one.
    (work / "parted.py").write_text(
        "import os, runpy, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.chdir('elsewhere')\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    settings = ["--config", str(work / "settings.yaml"), "--data.path", images, "--global_batch_size", "8"]
    status, _, err = finish(start([*forked(2), "parted.py", *settings, "--output_dir", "parted"], work))
    (line,) = error_lines(err)
    assert status != 0
    assert line.startswith("error: worker 1: data.path must exist")


@pytest.mark.parametrize("algorithm", ["dsgd_ac", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_others_in_time_by_name(work, algorithm):
    settings = ["--config", "settings.yaml", "--num_train_epochs", "10000", "--gossip.timeout", "15"]
    settings += ["--algorithm", algorithm, "--output_dir", f"killed_{algorithm}"]
    script = start([*forked(3), SCRIPT, *settings], work)
    try:
        wait_for_content(work / f"killed_{algorithm}" / "metrics.jsonl")
        script.processes[1].kill()
        for process in script.processes:  # no launcher ends the others
            process.join(15 + 30)
        statuses = [process.exitcode for process in script.processes]
    finally:
        _, _, err = finish(script, timeout=0)
    assert statuses == [1, -signal.SIGKILL, 1], err
    lines = error_lines(err)
    assert len(lines) == 2
    for line in lines:
        # DDP and barriers may let worker 2 notice only when worker 0, which keeps the store, has ended, too.
        assert re.search("(worker 1 was|workers 0, 1 were) lost", line)
        assert re.search(r"step \d+", line)


def wait_for_content(file, timeout=60):
    deadline = time.monotonic() + timeout
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < deadline, f"{file} is still empty after {timeout} s"
        time.sleep(0.1)
