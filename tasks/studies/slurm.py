"""Batch scripts for Slurm: an array with a task per run, and on every node of a task one launcher."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.studies.config import LaunchConfig
from tasks.studies.plan import PlannedRun
from tasks.studies.state import EXIT_STATUS, LOG

_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{count}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --output={output}
# {count} runs, a line of {runs} each: its folder and its command. Options of sbatch win over those above, such as
# `sbatch --partition=gpu --time=12:00:00 --array=1-{count}%4 {script}`. A task that is started again resumes its run
# from the newest checkpoint. The folders of code, data and runs must be the same on all nodes.
set -uo pipefail
export PATH={programs}:"$PATH" MASTER_ADDR MASTER_PORT COMMAND
line=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {runs})
if [ -z "$line" ]; then
    echo "error: there is no run $SLURM_ARRAY_TASK_ID in" {runs}". Use --array=1-{count}." >&2
    exit 1
fi
folder=${{line%%$'\t'*}}
COMMAND=${{line#*$'\t'}}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))  # array tasks that share a node have different ids
mkdir -p "$folder"
rm -f "$folder/{exit_status}"
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID; export NODE_RANK; eval "$COMMAND"' > "$folder/{log}" 2>&1
status=$?
echo "$status" > "$folder/{exit_status}"
exit "$status"
"""


def write_batch_scripts(runs: Sequence[PlannedRun], folder: Path, name: str) -> list[Path]:
    """Write a batch script for each number of nodes, processes and GPUs among the runs, and return the scripts.

    Beside a script is the list of its runs.

    Args:
        runs: the runs.
        folder: where to write; created if needed.
        name: name of the jobs and the beginning of the files' names.
    """
    by_launch: dict[LaunchConfig, list[PlannedRun]] = {}
    for run in runs:
        by_launch.setdefault(run.launch, []).append(run)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    scripts = []
    for launch, members in by_launch.items():
        stem = f"{name}_{_described(launch)}" if len(by_launch) > 1 else name
        listed, script = folder / f"{stem}.runs", folder / f"{stem}.sbatch"
        listed.write_text("".join(f"{run.folder}\t{run.shell_line()}\n" for run in members), encoding="utf-8")
        text = _SCRIPT.format(
            name=stem,
            count=len(members),
            nodes=launch.nodes,
            cpus=(launch.processes or 1) * (launch.threads or 1),
            gpus=f"#SBATCH --gpus-per-node={launch.gpus}\n" if launch.gpus else "",
            output=folder / f"{stem}_%a.out",
            runs=shlex.quote(str(listed)),
            script=script.name,
            programs=shlex.quote(str(Path(sys.executable).parent)),
            exit_status=EXIT_STATUS,
            log=LOG,
        )
        script.write_text(text, encoding="utf-8")
        scripts.append(script)
    return scripts


def _described(launch: LaunchConfig) -> str:
    return f"{launch.nodes}x{launch.processes or 1}"
