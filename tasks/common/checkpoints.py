"""Checkpoints in the output folder of a run: which one to resume from, when to save, how many to keep."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dsgdac_accel import StoppedBySignal
from dsgdac_accel.checkpoint import CheckpointError, newest_checkpoint, prune_checkpoints, read_manifest
from dsgdac_accel.config import config_to_dict
from tasks.common.config import ConfigError
from tasks.common.output_dir import AnyAccelerator, flat_config

PATTERN = "step-*"

_MAY_CHANGE = (
    "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit", "logging_steps",
    "eval_every", "report_to", "dataloader_num_workers",
    "gossip.log_every", "gossip.timeout", "gossip.on_other_worker_count", "curvature.",
)  # fmt: skip
"""Keys of all tasks that control where and how often something is written or read, not what is trained."""


def checkpoint_to_resume(
    config: Any, accelerator: AnyAccelerator, task: str, may_change: Collection[str] = (), any_count: bool = False
) -> Path | None:
    """Return the checkpoint that `config.resume_from_checkpoint` selects, or None for a new run. Collective.

    Args:
        config: the run's, with `resume_from_checkpoint` and `output_dir`.
        accelerator: the run's.
        task: name of the task, as in the manifest.
        may_change: keys, and sections ending in ".", that a resumed run may change, besides those of all tasks.
        any_count: whether the task can resume with another number of workers, where the configuration allows it.

    Raises:
        ConfigError: on all workers: the checkpoint is of another run, or a new run would mix with an old one.
        CheckpointError: on all workers: `resume_from_checkpoint` does not point to a complete checkpoint.
    """
    found: Path | None = None
    problem: Exception | None = None
    if accelerator.is_main_process:
        try:
            found = _find(config)
            if found is not None:
                _require_same_run(found, config, task, (*_MAY_CHANGE, *may_change))
                saved, launched = read_manifest(found).workers, accelerator.num_processes
                may_differ = any_count and config.gossip.on_other_worker_count == "deployed"
                if saved != launched and not may_differ:
                    raise ConfigError(
                        f"resume_from_checkpoint: {found} holds the state of {saved} workers, and {launched} were "
                        f"launched. Launch {saved}, or choose another output_dir for a new run."
                    )
        except (ConfigError, CheckpointError) as error:
            problem = error
    found, problem = accelerator.group.all_gather_object((found, problem), "looking for a checkpoint")[0]
    if problem is not None:
        raise problem
    return found


def _find(config: Any) -> Path | None:
    own = config.output_dir / "checkpoints"
    newest = newest_checkpoint(own, PATTERN)
    if config.resume_from_checkpoint == "auto":
        return newest
    if config.resume_from_checkpoint != "never":
        read_manifest(config.resume_from_checkpoint)  # raises if there is none
    if newest is not None and (
        config.resume_from_checkpoint == "never" or not _is_own(config.resume_from_checkpoint, config)
    ):
        raise ConfigError(
            f"resume_from_checkpoint: {config.resume_from_checkpoint} would start another run where {own} "
            f"holds the checkpoints of one, up to step {read_manifest(newest).step}. Choose another output_dir, delete "
            f"them, or resume that run with resume_from_checkpoint: auto."
        )
    return None if config.resume_from_checkpoint == "never" else config.resume_from_checkpoint


def step_of_own(checkpoint: Path | None, config: Any) -> int | None:
    """Return the step of a checkpoint in `output_dir`; None for one from elsewhere."""
    return read_manifest(checkpoint).step if checkpoint is not None and _is_own(checkpoint, config) else None


def _is_own(checkpoint: Path, config: Any) -> bool:
    return checkpoint.resolve().parent == (config.output_dir / "checkpoints").resolve()


def _require_same_run(folder: Path, config: Any, task: str, may_change: Collection[str]) -> None:
    manifest = read_manifest(folder)
    if manifest.facts.get("task") != task:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is a checkpoint of {manifest.facts.get('task')}, not of {task}."
        )
    of_run = manifest.facts.get("config")
    if not isinstance(of_run, dict):
        raise ConfigError(
            f"resume_from_checkpoint: the manifest of {folder} holds no configuration. Choose another checkpoint."
        )
    saved, mine = flat_config(of_run), flat_config(config_to_dict(config))
    free = tuple(key for key in may_change if key.endswith("."))
    other = [
        f"{key} (now {mine.get(key)}, was {saved.get(key)})"
        for key in dict.fromkeys((*saved, *mine))
        if saved.get(key) != mine.get(key) and key not in may_change and not key.startswith(free)
    ]
    if other:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is of a run with other settings: {'; '.join(other)}. Set them back, or "
            f"choose another output_dir for a new run."
        )


class Checkpoints:
    """Saves checkpoints into `output_dir/checkpoints` in the background, and keeps the newest few.

    Args:
        config: the run's, with `output_dir`, `save_steps` and `save_total_limit`.
        accelerator: the run's.
        task: name of the task, for the manifest.
        total_steps: steps of the run. The last step is saved, too, since the evaluation after it may take long.
    """

    def __init__(self, config: Any, accelerator: AnyAccelerator, task: str, total_steps: int) -> None:
        self.config = config
        self.accelerator = accelerator
        self.total_steps = total_steps
        self.folder = config.output_dir / "checkpoints"
        self.facts = {"task": task, "config": config_to_dict(config)}

    def save_if_due(self, step: int) -> None:
        """Save the state of all workers after every `save_steps` steps and after the last. Collective.

        Call it after every step. If a signal stops the run, it saves the state of this step.

        Raises:
            StoppedBySignal: on all workers, after a signal, once the checkpoint is complete.
        """
        stop = self.accelerator.should_stop()
        every = self.config.save_steps
        due = every is not None and (step % every == 0 or step == self.total_steps)
        if not (due or stop):
            return
        self.finish()
        folder = self.folder / f"step-{step:08d}"
        self.accelerator.save_state(folder, wait=False, facts=self.facts)
        if not stop:
            return
        self.finish()
        self.accelerator.group.barrier("stopping the run")  # launchers end the other workers after the first exit
        reason = self.accelerator.stop_reason
        self.accelerator.end_training()
        resume = self.config.resume_from_checkpoint
        instead = "" if resume == "auto" else f" in place of resume_from_checkpoint: {resume}"
        raise StoppedBySignal(
            f"stopped by {reason} at step {step} of {self.total_steps}; checkpoint {folder}; the same command resumes "
            f"it with resume_from_checkpoint: auto{instead}"
        )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, then delete those beyond `save_total_limit`. Collective."""
        saved = self.accelerator.finish_saving()
        if saved is not None and self.accelerator.is_main_process:
            prune_checkpoints(self.folder, self.config.save_total_limit, PATTERN, saved=saved)
