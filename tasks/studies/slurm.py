"""Runs of a study as jobs of Slurm, submitted by submitit: a job per run, and on each of its nodes one launcher."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from tasks.common.config import ConfigError
from tasks.studies.config import LaunchConfig
from tasks.studies.plan import PlannedRun
from tasks.studies.state import EXIT_STATUS, LOG

MINUTES = 24 * 60
"""Time limit of a job, unless the option `time` gives one."""


@dataclass(frozen=True)
class Start(submitit.helpers.Checkpointable):
    """Starts a run on one node of its job. A job that reaches its time limit is queued again, and its run resumes."""

    folder: Path
    line: str
    """The shell line of the run, which reads NODE_RANK, MASTER_ADDR and MASTER_PORT."""

    def __call__(self) -> None:
        """Run the line with its output in the log of the run. Raises RuntimeError if it fails."""
        job = submitit.JobEnvironment()
        variables = {
            "NODE_RANK": str(job.node),
            "MASTER_ADDR": job.hostnames[0],
            # Array tasks that share a node have different ids.
            "MASTER_PORT": str(20000 + int(job.raw_job_id) % 20000),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / EXIT_STATUS).unlink(missing_ok=True)
        with open(self.folder / LOG, "ab" if job.node else "wb") as log:
            # Slurm sends USR2 to all processes of a job shortly before its time limit. Only submitit acts on it.
            command = ["sh", "-c", f"trap '' USR2; {self.line}"]
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables
            ).returncode
        if status or job.node == 0:
            (self.folder / EXIT_STATUS).write_text(f"{status}\n", encoding="utf-8")
        if status:
            raise RuntimeError(f"the run ended with exit status {status}; see {self.folder / LOG}")


def submit(runs: Sequence[PlannedRun], folder: Path, name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Submit runs, as an array for each way to launch them, and return the jobs' ids by the names of the runs.

    Args:
        runs: the runs.
        folder: where submitit keeps its files; created if needed, and the same on all nodes.
        name: name of the jobs.
        options: parameters of submitit's SlurmExecutor, such as partition, time in minutes, or array_parallelism.

    Raises ConfigError if this machine has no Slurm, or for an option that submitit does not have.
    """
    by_launch: dict[LaunchConfig, list[PlannedRun]] = {}
    for run in runs:
        by_launch.setdefault(run.launch, []).append(run)
    prepared = []
    for launch, members in by_launch.items():
        try:
            executor = submitit.SlurmExecutor(folder)
        except RuntimeError:
            raise ConfigError("--slurm needs Slurm; srun was not found. Use --print-commands here.") from None
        asked = {"time": MINUTES, "job_name": name, "nodes": launch.nodes, "ntasks_per_node": 1,
                 "cpus_per_task": (launch.processes or 1) * (launch.threads or 1),
                 "srun_args": ["--kill-on-bad-exit=1"]}  # fmt: skip
        gpus = {"gpus_per_node": launch.gpus} if launch.gpus else {}
        try:
            executor.update_parameters(**asked | gpus | dict(options))
        except ValueError as error:
            raise ConfigError(f"--slurm-option: {str(error).splitlines()[0]}") from None
        prepared.append((executor, {run.name: Start(run.folder, run.shell_line()) for run in members}))
    ids: dict[str, str] = {}
    for executor, starts in prepared:
        with executor.batch():
            jobs = {name: executor.submit(start) for name, start in starts.items()}
        ids |= {name: job.job_id for name, job in jobs.items()}
    return ids
