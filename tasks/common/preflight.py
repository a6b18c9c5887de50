"""Examination of a task's run for `dsgdac doctor --config FILE`: built as in training, but not trained."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dsgdac_accel import WorkerGroup
from dsgdac_accel.checkpoint import CheckpointError, read_manifest
from dsgdac_accel.doctor import Finding, Report, examine
from dsgdac_accel.doctor.comparison import compare_settings
from tasks.common.checkpoints import checkpoint_to_resume
from tasks.common.config import ConfigError, parse_config
from tasks.common.known_tasks import config_class_of, script_for

_RUNS = {"cifar.py": ("tasks.images.run", "ImageRun"), "wmt14.py": ("tasks.translation.run", "TranslationRun")}


def examination_of(file: Path, words: Sequence[str], timeout: float) -> Callable[[], Report]:
    """Return the function that examines a run. Nothing is communicated before it is called.

    Args:
        file: configuration of the run, which tells the task.
        words: command line of the task.
        timeout: seconds after which a worker that does not answer is reported as lost.

    Raises:
        ConfigError: the settings are invalid.
    """
    script = script_for(file)
    if script.name not in _RUNS:
        raise ConfigError(
            f"{file}: runs of {', '.join(_RUNS)} can be examined; this is one of {script.name}. Start it."
        )
    module, name = _RUNS[script.name]
    task = importlib.import_module(module)
    config_class: Any = config_class_of(script)
    config = parse_config(config_class, words, prog="dsgdac doctor")
    run_class = getattr(task, name)
    return lambda: _examine_run(task, run_class, config, timeout)


def _examine_run(task: Any, run_class: Any, config: Any, timeout: float) -> Report:
    group = WorkerGroup(torch.device("cpu"), timeout)
    # Workers with different settings would fail, or wait for each other, while they build the run.
    wrong = [finding for finding in compare_settings(group, config) if finding.level == "error"]
    if wrong:
        return Report([*wrong, Finding("ok", "run", "not built until the errors above are fixed")])
    # Not in the run's own folder: a run that starts there deletes the logs of the one before.
    folder = tempfile.mkdtemp(prefix="dsgdac-doctor-") if group.rank == 0 else ""
    try:
        stand_in = Path(group.all_gather_object(folder, "creating a folder")[0])
        quiet = {
            "output_dir": stand_in,
            "report_to": (),
            "resume_from_checkpoint": "never",
            "gossip": replace(config.gossip, timeout=timeout),
        }
        run = run_class(replace(config, **quiet))
        report = examine(run.accelerator, run.model, run.loader, settings=config, timeout=timeout)
        report.findings[:0] = [Finding("ok", "run", run.described()), *_check_folder(task, config, run, group)]
        return report
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _check_folder(task: Any, config: Any, run: Any, group: WorkerGroup) -> list[Finding]:
    """Check whether the run may write into its folder, and where it would resume. Collective; changes nothing there."""
    locked = group.rank == 0 and _is_locked(config.output_dir)
    if group.all_gather_object(locked, "looking at the folder")[0]:
        message = f"another run is writing into {config.output_dir}"
        return [Finding("error", "output folder", message, "Wait until it ends, or choose another output_dir")]
    try:
        found = checkpoint_to_resume(
            config, run.accelerator, task.TASK, task.MAY_CHANGE, any_count=task.TASK == "cifar"
        )
    except (ConfigError, CheckpointError) as error:
        return [Finding("error", "resume", str(error))]
    if found is not None:
        return [Finding("ok", "resume", f"the run would resume at step {read_manifest(found).step}, {found}")]
    if group.all_gather_object((config.output_dir / "metrics.jsonl").exists(), "looking at the folder")[0]:
        message = f"{config.output_dir} holds another run, whose logs and models this run would replace"
        return [Finding("warning", "output folder", message, "Choose another output_dir to keep them")]
    return []


def _is_locked(folder: Path) -> bool:
    file = folder / ".lock"
    if not file.exists():
        return False
    try:
        FileLock(file, blocking=False).acquire().lock.release()
    except Timeout:
        return True
    except OSError:  # no permission; the run itself reports a folder that it cannot write
        return False
    return False
