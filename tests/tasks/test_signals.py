"""Both tasks, stopped by a signal to one worker and started again, leave the same results as an unbroken run."""

import re
import time

import pytest
from test_task_resume import IMAGES, SMALL_IMAGES, TEXT, assert_same_run, write_pairs

from dsgdac_accel import EXIT_STOPPED
from dsgdac_accel.checkpoint import newest_checkpoint, read_manifest
from tests.launching import ROOT, finish, forked, start, summary, torchrun

pytestmark = [pytest.mark.task, pytest.mark.timeout(200)]

SIGNALLED = f"""
import os, runpy, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tasks.common import checkpoints
really = checkpoints.Checkpoints.save_if_due
def save_if_due(self, step):
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if os.environ["RANK"] == os.environ["TO"] and step == int(os.environ["AT"]):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
        if step >= int(os.environ["AT"]):
            time.sleep(0.2)  # so that some steps remain when all workers know of it
    really(self, step)
checkpoints.Checkpoints.save_if_due = save_if_due
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


def begin(work, launcher, script, *arguments, **signalled):
    program = [str(ROOT / "tasks" / script)]
    if signalled:
        (work / "signalled.py").write_text(SIGNALLED, encoding="utf-8")
        program = ["signalled.py", *program]
    settings = ["--config", "settings.yaml", "--report_to", "[]", *arguments]
    return start([*launcher, *program, *settings], work, **{key: str(value) for key, value in signalled.items()})


def whole(process):
    status, out, err = finish(process, timeout=120)
    assert status == 0, f"{out}\n{err}"
    return out, err


def ends_of_all(script):
    """Return the exit status of each forked worker, which `finish` does not wait for, and their output."""
    deadline = time.monotonic() + 60
    for process in script.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    statuses = [process.exitcode for process in script.processes]
    _, out, err = finish(script, timeout=10)
    return statuses, out + err


@pytest.mark.parametrize(
    ("script", "settings", "algorithm", "workers", "signalled"),
    [
        ("cifar.py", SMALL_IMAGES, "dsgd_ac", 2, {"TO": 1, "AT": 3, "SIGNAL": "SIGUSR1"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("wmt14.py", TEXT, "dadam_ac", 3, {"TO": 1, "AT": 3, "SIGNAL": "SIGUSR1"}),
                ("cifar.py", IMAGES, "sgd", 2, {"TO": 0, "AT": 7, "SIGNAL": "SIGTERM"}),  # a loader process each
            )
        ),
    ],
)
def test_a_stopped_run_started_again_is_the_unbroken_one(tmp_path, script, settings, algorithm, workers, signalled):
    (tmp_path / "settings.yaml").write_text(settings, encoding="utf-8")
    write_pairs(tmp_path / "text")
    common = [forked(workers), script, "--algorithm", algorithm]
    whole(begin(tmp_path, *common, "--output_dir", "unbroken", "--save_steps", "1000"))
    stopping = begin(tmp_path, *common, "--output_dir", "stopped", **signalled)  # saves only where it stops
    statuses, told = ends_of_all(stopping)
    assert statuses == [EXIT_STOPPED] * workers, told
    asked = f"stopped by {signalled['SIGNAL']} to worker {signalled['TO']}"
    (found,) = re.findall(
        rf"^{asked} at step (\d+) of \d+; checkpoint (.*); .* resume_from_checkpoint: auto$", told, re.MULTILINE
    )
    step, checkpoint = int(found[0]), newest_checkpoint(tmp_path / "stopped" / "checkpoints")
    assert signalled["AT"] <= step < summary(tmp_path / "unbroken")["steps"]
    assert read_manifest(checkpoint).step == step
    assert str(checkpoint).endswith(found[1])
    assert not (tmp_path / "stopped" / "summary.json").exists()
    out, _ = whole(begin(tmp_path, *common, "--output_dir", "stopped", "--save_steps", "1000"))
    assert f"resumed at step {step}" in out
    assert_same_run(tmp_path / "unbroken", tmp_path / "stopped", workers)


@pytest.mark.slow
def test_a_launcher_that_may_restart_resumes_by_itself(tmp_path):
    (tmp_path / "settings.yaml").write_text(IMAGES, encoding="utf-8")
    common = ["cifar.py", "--algorithm", "dsgd_ac", "--save_steps", "1000", "--output_dir"]
    whole(begin(tmp_path, forked(2), *common, "unbroken"))
    launcher = [*torchrun(2), "--max-restarts", "1"]
    out, err = whole(begin(tmp_path, launcher, *common, "stopped", TO=1, AT=4, SIGNAL="SIGUSR1"))
    (step,) = re.findall(r"^stopped by SIGUSR1 to worker 1 at step (\d+)", err, re.MULTILINE)
    assert f"resumed at step {step}" in out
    assert_same_run(tmp_path / "unbroken", tmp_path / "stopped", 2)
