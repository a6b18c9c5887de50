"""A task's run as `dsgdac doctor --config FILE` examines it: built as in training, and not trained."""

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

from dsgdac_accel import GossipAccelerator, WorkerGroup
from dsgdac_accel.checkpoint import CheckpointError, read_manifest
from dsgdac_accel.config import ConfigError, parse_config
from dsgdac_accel.doctor import Finding, Report, examine
from dsgdac_accel.doctor.checks import wrong_run
from dsgdac_accel.doctor.facts import collect_facts
from dsgdac_accel.doctor.launched import at_end
from tasks.common.checkpoints import checkpoint_to_resume
from tasks.studies.plan import base_values

_TASKS = {"cifar": ("ImageRun", "CifarConfig"), "wmt14": ("TranslationRun", "TranslationConfig")}


def examination_of(file: Path, words: Sequence[str], timeout: float) -> Callable[[Report], None]:
    """What examines the run that `words` describe. Nothing is communicated before it is called.

    Args:
        file: its configuration, which tells the task.
        words: the command line of the task.
        timeout: seconds after which a worker that does not answer is named.

    Raises ConfigError for settings that cannot be.
    """
    # Only the translation task counts its batches in tokens.
    task = importlib.import_module("tasks.wmt14" if "batch_tokens" in base_values(file) else "tasks.cifar")
    run_class, config_class = (getattr(task, name) for name in _TASKS[task.TASK])
    config = parse_config(config_class, words, prog="dsgdac doctor")
    return lambda report: _examine_run(task, run_class, config, timeout, report)


def _examine_run(task: Any, run_class: Any, config: Any, timeout: float, report: Report) -> None:
    # Workers that were given other settings would fail, or wait for each other, while they build the run.
    group = WorkerGroup(torch.device("cpu"), timeout)
    facts = group.all_gather_object(collect_facts(group.rank, group.device, settings=config), "comparing the settings")
    wrong = [finding for finding in wrong_run(facts) if finding.level == "error"]
    if wrong:
        report.add([*wrong, Finding("ok", "run", "not built before the errors above are mended")])
        return
    # The run's own folder is left alone: a run that begins there deletes the logs of the one before.
    own = tempfile.mkdtemp(prefix="dsgdac-doctor-") if group.rank == 0 else None
    if own is not None:
        at_end.append(lambda: shutil.rmtree(own, ignore_errors=True))
    stand_in = group.all_gather_object(own, "making a folder")[0]
    assert stand_in is not None
    quiet = {
        "report_to": (),
        "resume_from_checkpoint": "never",
        "gossip": replace(config.gossip, timeout=timeout, on_worker_loss="stop"),
    }  # fmt: skip
    run = run_class(replace(config, output_dir=Path(stand_in), **quiet))
    if isinstance(run.accelerator, GossipAccelerator):  # the run's own patience is what is judged
        policies = {"timeout": config.gossip.timeout, "on_worker_loss": config.gossip.on_worker_loss}
        run.accelerator.gossip_config = replace(run.accelerator.gossip_config, **policies)
    report.add([Finding("ok", "run", run.described()), *_check_folder(task, config, run, group)])
    examine(
        run.accelerator,
        run.model,
        run.loader,
        settings=config,
        output_dir=config.output_dir,
        timeout=timeout,
        report=report,
    )


def _check_folder(task: Any, config: Any, run: Any, group: WorkerGroup) -> list[Finding]:
    """Whether the run may write into its folder, and what it would go on from. Collective; changes nothing there."""
    busy = group.all_gather_object(
        _is_locked(config.output_dir) if group.rank == 0 else False, "looking at the folder"
    )[0]
    if busy:
        text = f"another run is writing into {config.output_dir}"
        return [Finding("error", "output folder", text, "Wait for its end, or choose another output_dir")]
    try:
        found = checkpoint_to_resume(
            config, run.accelerator, task.TASK, task.MAY_CHANGE, any_count=task.TASK == "cifar"
        )
    except (ConfigError, CheckpointError) as error:
        return [Finding("error", "resume", str(error))]
    if found is not None:
        return [Finding("ok", "resume", f"the run would go on from step {read_manifest(found).step}, {found}")]
    if group.all_gather_object((config.output_dir / "metrics.jsonl").exists(), "looking at the folder")[0]:
        text = f"{config.output_dir} holds another run, whose logs and models this one replaces"
        return [Finding("warning", "output folder", text, "Choose another output_dir to keep them")]
    return []


def _is_locked(folder: Path) -> bool:
    file = folder / ".lock"
    if not file.exists():
        return False
    try:
        FileLock(file, blocking=False).acquire().lock.release()
    except Timeout:
        return True
    except OSError:  # of another user: whether it can be written is said elsewhere
        return False
    return False
