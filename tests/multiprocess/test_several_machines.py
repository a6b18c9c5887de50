"""Runs on several machines, tried with two launchers on this one: jobs of Slurm, and printed lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsgdac_accel.cli import main
from tasks.studies.state import state_of, write_record
from tests.launching import free_port
from tests.unit.test_sweep import plan, real_sweep, write_sweep

TINY = {
    "num_train_epochs": 2,
    "warmup_epochs": 1,
    "global_batch_size": 100,
    "crop_padding": 0,
    "flip": False,
    "report_to": [],
}
NODES = {"one machine": {"launch.processes": 2}, "two machines": {"launch.nodes": 2, "launch.processes": 1}}

SRUN = """#!/bin/bash
# A stand-in for Slurm's srun, which starts its command on every node: here all on this machine.
[ "$1 $6" = "--unbuffered --kill-on-bad-exit=1" ] || exit 99
shift 6
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" & started="$started $!"
done
status=0
for process in $started; do wait "$process" || status=$?; done
exit $status
"""
SBATCH = """#!/bin/bash
echo "Submitted batch job $((100 + $(ls "${1%/*}" | grep -c submission.sh)))"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Let the stand-ins for Slurm's programs be found first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "sbatch": SBATCH}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    programs = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(programs))
    return tmp_path / "slurm"


def submitted(capsys, file, folder, *options):
    """The jobs' ids by run, as `--slurm` prints them."""
    assert main(["sweep", str(file), "--slurm", str(folder), *options]) == 0
    return {line.split()[1]: line.split()[0] for line in capsys.readouterr().out.splitlines()}


def script_of(folder, job):
    return folder / f"{job.partition('_')[0]}_submission.sh"


def execute(folder, job, nodes=1):
    """Run a job as Slurm does, and return its exit status."""
    array, _, task = job.partition("_")
    variables = {
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "127.0.0.1,elsewhere",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes),
    }
    variables |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task} if task else {"SLURM_JOB_ID": array}
    return subprocess.run(["bash", script_of(folder, job)], env=os.environ | variables, timeout=240).returncode


def summaries(file):
    return {run.setting.name: json.loads((run.folder / "summary.json").read_text()) for run in plan(file)}


def test_an_array_runs_the_runs_and_a_failed_one_does_not_hide(tmp_path, capfd, slurm):
    variants = {"good": {"word": "it's; a $trap"}, "bad": {"behavior": "fail"}}
    file = write_sweep(tmp_path, variants=variants, report={"columns": ["test_loss"]})
    jobs = submitted(capfd, file, slurm)
    assert [execute(slurm, job) for job in jobs.values()] == [0, 1]
    good, bad = plan(file)
    assert list(jobs) == [good.name, bad.name]
    assert [state_of(run).status for run in (good, bad)] == ["finished", "failed"]
    assert "the data are not there" in (bad.folder / "log.txt").read_text()
    capfd.readouterr()
    assert main(["report", str(file), "--no-figures"]) == 0
    assert "| bad     | 0 of 1, 1 failed | failed    |" in capfd.readouterr().out
    assert list(submitted(capfd, file, slurm)) == [bad.name]
    write_record(bad)  # a sweep starts it again
    assert state_of(bad).status == "unfinished"


def test_runs_on_other_machines_are_jobs_of_their_own(tmp_path, capsys, slurm):
    launch = {"kind": "torchrun", "processes": 8, "gpus": 8, "threads": 3}
    grid = {"nodes": {"1": {}, "2": {"launch.nodes": 2}}, "gossip.power": [0, 1]}
    file = write_sweep(tmp_path, launch=launch, grid=grid)
    jobs = submitted(capsys, file, slurm, "--slurm-option", "partition=gpu", "--slurm-option", "time=30")
    scripts = list(dict.fromkeys(script_of(slurm, job) for job in jobs.values()))
    for script, nodes in zip(scripts, (1, 2), strict=True):
        asked = {
            line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")
        }
        assert asked >= {f"nodes={nodes}", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=24"}
        assert asked >= {"partition=gpu", "time=30", "array=0-1%2"}


def test_slurm_that_is_not_there_and_an_option_that_it_does_not_have_are_refused(tmp_path, capsys, slurm, monkeypatch):
    file = write_sweep(tmp_path)
    assert main(["sweep", str(file), "--slurm", str(slurm), "--slurm-option", "partitoin=gpu"]) == 2
    assert "partitoin" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main(["sweep", str(file), "--slurm", str(slurm)]) == 2
    assert "--print-commands" in capsys.readouterr().err
    assert not list(slurm.glob("*.sh"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(500)
def test_a_job_trains_over_two_nodes_as_two_processes_on_one_do(tmp_path, capsys, slurm):
    file = real_sweep(tmp_path, launch={"kind": "torchrun", "threads": 1}, settings=TINY, grid={"nodes": NODES})
    one, two = submitted(capsys, file, slurm).values()
    assert execute(slurm, one) == 0
    assert execute(slurm, two, nodes=2) == 0
    found = summaries(file)
    assert found["two machines"]["workers"] == 2
    for key in ("test_loss", "radius", "worker_train_loss"):
        assert found["two machines"][key] == found["one machine"][key]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(500)
def test_two_launchers_train_by_the_line_that_is_printed(tmp_path):
    file = real_sweep(tmp_path, launch={"kind": "accelerate", "threads": 1}, settings=TINY, grid={"nodes": NODES})
    one, two = plan(file)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shared = os.environ | {"PATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    subprocess.run(["sh", "-c", one.shell_line()], check=True, env=os.environ | {"PATH": path}, timeout=240)
    line = two.shell_line()
    launchers = [subprocess.Popen(["sh", "-c", line], env=shared | {"NODE_RANK": str(rank)}) for rank in (0, 1)]
    try:
        assert [launcher.wait(timeout=240) for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.kill()
    found = summaries(file)
    assert found["two machines"]["workers"] == 2
    assert found["two machines"]["test_loss"] == found["one machine"]["test_loss"]
