"""Runs on several machines, tried with two launchers on this one: batch scripts of Slurm, and printed lines."""

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
[ "$1" = --kill-on-bad-exit=1 ] || exit 99
shift
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node "$@" & started="$started $!"
done
status=0
for process in $started; do wait "$process" || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[0-1]" ] && printf '127.0.0.1\\nelsewhere\\n'
"""


@pytest.fixture
def submit(tmp_path):
    """Run a task of a script's array as Slurm does, and return its exit status."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(script, number, nodes=1):
        subprocess.run(["bash", "-n", script], check=True)
        assert f"#SBATCH --nodes={nodes}\n" in Path(script).read_text()
        variables = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_JOB_ID": str(free_port() - 20000),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(nodes),
        }
        return subprocess.run(["bash", script], env=os.environ | variables, timeout=240).returncode

    return run


def scripts(capsys, file, folder):
    """The batch scripts that `--slurm` writes, by the words that it prints."""
    assert main(["sweep", str(file), "--slurm", str(folder)]) == 0
    return [line.removeprefix("sbatch ") for line in capsys.readouterr().out.splitlines()]


def summaries(file):
    return {run.setting.name: json.loads((run.folder / "summary.json").read_text()) for run in plan(file)}


def test_an_array_runs_the_runs_and_a_failed_one_does_not_hide(tmp_path, capfd, submit):
    variants = {"good": {"word": "it's; a $trap"}, "bad": {"behavior": "fail"}}
    file = write_sweep(tmp_path, variants=variants, report={"columns": ["test_loss"]})
    (script,) = scripts(capfd, file, tmp_path / "slurm")
    assert "#SBATCH --array=1-2\n" in Path(script).read_text()
    assert "--gpus" not in Path(script).read_text()
    assert [submit(script, number) for number in (1, 2)] == [0, 1]
    assert [submit(script, number) for number in (3, 0)] == [1, 1]  # there is no such run
    assert "error: there is no run 3 in" in capfd.readouterr().err
    good, bad = plan(file)
    assert [state_of(run).status for run in (good, bad)] == ["finished", "failed"]
    assert "the data are not there" in (bad.folder / "log.txt").read_text()
    assert main(["report", str(file), "--no-figures"]) == 0
    assert "| bad     | 0 of 1, 1 failed | failed    |" in capfd.readouterr().out
    write_record(bad)  # a sweep starts it again
    assert state_of(bad).status == "unfinished"


def test_runs_on_other_machines_have_scripts_of_their_own(tmp_path, capsys):
    launch = {"kind": "torchrun", "processes": 8, "gpus": 8, "threads": 3}
    grid = {"nodes": {"1": {}, "2": {"launch.nodes": 2}}, "gossip.power": [0, 1]}
    written = scripts(capsys, write_sweep(tmp_path, launch=launch, grid=grid), tmp_path)
    assert [Path(script).name for script in written] == ["sweep_1x8.sbatch", "sweep_2x8.sbatch"]
    for script, nodes in zip(written, (1, 2), strict=True):
        lines = Path(script).read_text().splitlines()
        asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
        assert asked >= {f"nodes={nodes}", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=24", "array=1-2"}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(500)
def test_an_array_trains_over_two_nodes_as_two_processes_on_one_do(tmp_path, capsys, submit):
    file = real_sweep(tmp_path, launch={"kind": "torchrun", "threads": 1}, settings=TINY, grid={"nodes": NODES})
    one, two = scripts(capsys, file, tmp_path / "slurm")
    assert submit(one, 1) == 0
    assert submit(two, 1, nodes=2) == 0
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
