"""The scripts and commands of docs/engines.md and docs/checkpoints.md, word for word."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import LAUNCHER_VARIABLES, ROOT, finish, free_port, start, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(1200)]

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("engines.md", "checkpoints.md"))
PATIENCE = 500

SRUN = """#!/bin/bash
# A stand-in for srun: starts $TASKS tasks on one node, with the variables that Slurm 22.05 sets, and returns the
# largest of their exit statuses.
while [[ $1 = --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_TASKS_PER_NODE=$TASKS SLURM_STEP_NODELIST=node0
export SLURM_NTASKS=$TASKS SLURM_NODEID=0
for task in $(seq 0 $((TASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & started="$started $!"
    echo $! > "$TASK_FILES/$task"
done
largest=0
for process in $started; do
    wait "$process"; status=$?
    [ $status -gt $largest ] && largest=$status
done
exit $largest
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$TASK_FILES/asked"
"""


def file_of(name):
    """The file that a page shows under this name."""
    return re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)[1]


def result(out):
    """The line of the deployed model."""
    (line,) = re.findall(r"^\d workers: accuracy .*$", out, re.MULTILINE)
    return line


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(file_of("train.py"))
    return tmp_path


def in_this_python(**variables):
    """Variables of a process whose `python` and `torchrun` are this environment's, and which imports this checkout."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        **variables,
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What two workers of one launcher print."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "train.py").write_text(file_of("train.py"))
    status, out, err = finish(start([*torchrun(2), "train.py", "once", "5"], folder, **in_this_python()), PATIENCE)
    assert status == 0, err
    return result(out)


LINES = re.search(r"<!-- nodes -->\n```sh\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_a_launcher_on_each_of_two_nodes_trains_as_one_does(line, folder, expected):
    shared = in_this_python(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    nodes = [start(["bash", "-c", line], folder, **shared, NODE_RANK=str(rank)) for rank in (0, 1)]
    ended = [finish(node, PATIENCE) for node in nodes]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert result(ended[0][1]) == expected


# ---- Slurm


class Job:
    """A job of a fake Slurm on this machine: `srun` starts tasks, and `scontrol` notes what it was asked for."""

    def __init__(self, folder, tasks):
        self.folder = folder
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        number = (free_port() - 20000) * pow(101, -1, 12000) % 12000  # join_slurm_step() takes this port for it
        variables = in_this_python(TASKS=str(tasks), TASK_FILES=str(folder), SLURM_JOB_ID=str(number))
        self.variables = variables | {"PATH": f"{folder}{os.pathsep}{variables['PATH']}"}

    def start(self, *command):
        for file in self.folder.glob("[0-9]"):
            file.unlink()
        return start(command, self.folder, **self.variables)

    def listening_task(self, number):
        """The process of a task, once it handles SIGUSR1: training has begun."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            time.sleep(0.05)
            file = self.folder / str(number)
            process = file.read_text().strip() if file.exists() else ""
            if (
                process
                and int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())[1], 16)
                >> (signal.SIGUSR1 - 1)
                & 1
            ):
                return int(process)
        pytest.fail(f"task {number} does not train after {PATIENCE} s")


def test_the_tasks_of_plain_srun_train_together(folder, expected):
    status, out, err = finish(Job(folder, 2).start("srun", "python", "train.py", "alone", "5"), PATIENCE)
    assert (status, result(out)) == (0, expected), err


def test_a_job_that_slurm_signals_requeues_and_resumes_bit_by_bit(folder):
    script = file_of("requeue.sbatch").replace("runs/slurm 200", "run 40")
    (folder / "job").write_text(script)
    job = Job(folder, 2)
    status, whole, err = finish(job.start("srun", "python", "train.py", "whole", "40"), PATIENCE)
    assert status == 0, err
    stopped = job.start("bash", "job")
    os.kill(job.listening_task(1), signal.SIGUSR1)
    status, out, err = finish(stopped, PATIENCE)
    assert (status, "stopped by SIGUSR1 to worker 1" in out) == (75, True), err
    assert (folder / "asked").read_text() == f"requeue {job.variables['SLURM_JOB_ID']}\n"
    status, out, err = finish(job.start("bash", "job"), PATIENCE)
    assert (status, "resumed from run/checkpoints/checkpoint_" in out) == (0, True), err
    assert result(out) == result(whole)


# ---- Ray

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'ray[train]'")


def ray(folder, name, *replaced, epochs=3):
    """The metrics that a Ray script prints at its end, and all of its output."""
    script = file_of(name)
    for old, new in replaced:
        assert script.count(old) == 1
        script = script.replace(old, new)
    folder.mkdir()
    (folder / name).write_text(script)
    variables = in_this_python(
        OMP_NUM_THREADS="1",
        RAY_AUTH_MODE="disabled",
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(PATIENCE),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
        RAY_worker_register_timeout_seconds=str(PATIENCE),
    )
    inherited = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, name, str(folder), str(epochs)], cwd=folder, env=inherited | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE,
    )  # fmt: skip
    return re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE), done.stdout


INIT = ("ray.init(", 'ray.init(address="local", num_cpus=2, ')
NO_UPLOAD = "            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is where it belongs\n        )\n"
RESUME = "    reported = ray.train.get_checkpoint()\n"
FAILING = {
    "ray_accelerator.py": (
        NO_UPLOAD,
        f"""{NO_UPLOAD}
        if epoch == 1 and ray.train.get_context().get_world_rank() == 1 and reported is None:
            raise RuntimeError("this worker fails")
""",
    ),
    "ray_trainer.py": (
        RESUME,
        f"""{RESUME}
    def fail(args, state, control, **kwargs):
        if state.epoch >= 1:
            raise RuntimeError("this worker fails")

    if ray.train.get_context().get_world_rank() == 1 and reported is None:
        from transformers import TrainerCallback

        trainer.add_callback(TrainerCallback)
        trainer.callback_handler.callbacks[-1].on_epoch_begin = fail
""",
    ),
}
"""What makes worker 1 fail after a checkpoint was reported, in its first life."""


@needs_ray
@pytest.mark.parametrize("name", FAILING)
def test_ray_resumes_a_failed_run_bit_by_bit(name, folder):
    resumed, said = ray(folder / "failed", name, INIT, FAILING[name])
    assert "this worker fails" in said
    assert resumed, said
    if name == "ray_accelerator.py":  # it trains as the script for torchrun does
        status, out, err = finish(start([*torchrun(2), "train.py", "once", "3"], folder, **in_this_python()), PATIENCE)
        assert status == 0, err
        assert f"'sum': {result(out).split()[-1]}, 'workers': 2" in resumed[-1]
    else:
        whole, said = ray(folder / "whole", name, INIT)
        kept = re.compile(r"'(?:step|loss|grad_norm|gossip/radius)': [\d.]+")
        # Ray merges what was reported, so the keys come in another order after a resume.
        assert sorted(kept.findall(resumed[-1])) == sorted(kept.findall(whole[-1])), said
        assert len(kept.findall(whole[-1])) == 4


RANK = "ray.train.get_context().get_world_rank()"
SAVE = "        saved = accelerator.save_state(f\"{settings['folder']}/epoch_{epoch}\")  # on all workers, one folder\n"
ALONE = f"        saved = settings['folder']\n        if {RANK} == 0:\n            accelerator.save_state(saved)\n"
WORKER_FOLDER = f"        saved = accelerator.save_state(f\"{{settings['folder']}}/{{{RANK}}}\")\n"
SIGNALS = f"        with accelerator.stop_on_signals():\n            pass\n{SAVE}"


@needs_ray
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (ALONE, "Call `save_state` and `load_state` on all workers, not on rank 0 alone"),
        (WORKER_FOLDER, "Give all of them one folder on shared storage"),
        (SIGNALS, "Use `stop_on_request` in place of `stop_on_signals`"),
    ],
    ids=["rank 0 alone", "a folder per worker", "signals in a thread"],
)
def test_rays_usual_patterns_are_refused_with_the_way_out(lines, words, tmp_path):
    changes = (
        INIT,
        ("GossipConfig(power=3)", "GossipConfig(power=3, timeout=15)"),
        ("FailureConfig(max_failures=1)", "FailureConfig(max_failures=0)"),
        (SAVE, lines),
    )
    metrics, said = ray(tmp_path / "run", "ray_accelerator.py", *changes)
    assert not metrics
    assert words in said
