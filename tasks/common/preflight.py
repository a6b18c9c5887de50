"""Examination of a task's run for `dsgdac doctor --config FILE`: built as in training, but not trained."""

from __future__ import annotations

import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsgdac_accel import WorkerGroup
from dsgdac_accel.doctor import Finding, compare_settings, errors_of, examine
from dsgdac_accel.virtual_workers import first_replica
from tasks.common.config import ConfigError, parse_config
from tasks.common.known_tasks import TASKS, task_for


def examination_of(file: Path, words: Sequence[str], timeout: float) -> Callable[[], list[Finding]]:
    """Return the function that examines a run. Nothing is communicated before it is called.

    Args:
        file: configuration of the run, which tells the task.
        words: command line of the task.
        timeout: seconds after which a worker that does not answer is reported as lost.

    Raises:
        ConfigError: the settings are invalid.
    """
    task = task_for(file)
    if task.run is None:
        able = ", ".join(other.script for other in TASKS if other.run)
        raise ConfigError(f"{file}: runs of {able} can be examined; this is one of {task.script}. Start it.")
    run_class = pkgutil.resolve_name(task.run)
    config: Any = parse_config(pkgutil.resolve_name(task.config), words, prog="dsgdac doctor")
    return lambda: _examine_run(run_class, config, timeout)


def _examine_run(run_class: Any, config: Any, timeout: float) -> list[Finding]:
    group = WorkerGroup(torch.device("cpu"), timeout)
    # Workers with different settings would fail, or wait for each other, while they build the run.
    wrong = errors_of(compare_settings(group, config))
    if wrong:
        return [*wrong, Finding("ok", "run", "not built until the errors above are fixed")]
    # Not in the run's own folder: a run that starts there deletes the logs of the one before.
    folder = tempfile.mkdtemp(prefix="dsgdac-doctor-") if group.rank == 0 else ""
    try:
        quiet = {
            "output_dir": Path(group.all_gather_object(folder, "creating a folder")[0]),
            "report_to": (),
            "resume_from_checkpoint": "never",
            "gossip": replace(config.gossip, timeout=timeout),
        }
        run = run_class(replace(config, **quiet))
        trained = sum(p.numel() for p in first_replica(run.model).parameters() if p.requires_grad)
        findings = examine(run.accelerator, trained, settings=config, timeout=timeout)
        return [Finding("ok", "run", run.described()), *findings]
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
