"""Every worker's own state beside what the Trainer saves, in the same checkpoint folders, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.checkpoint import (
    is_complete,
    load_checkpoint,
    load_model_state,
    model_state,
    save_checkpoint,
)
from dsgdac_accel.loaders import EqualSteps
from dsgdac_accel.randomness import random_state


class TrainerCheckpoints:
    """Saves and restores what the Trainer does not: each worker's weights, moments, random streams and position.

    Args:
        trainer: whose accelerator gossips.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # by type its model and optimizer may be None, in training they are not
        self._resuming: Path | None = None

    @property
    def _accelerator(self) -> GossipAccelerator:
        return self.trainer.accelerator

    # ---- saving

    def save(self, trial: Any) -> None:
        """Write this worker's state into the checkpoint folder that the Trainer is about to fill. Collective."""
        trainer, accelerator = self.trainer, self._accelerator
        folder = Path(trainer._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        if accelerator.is_main_process:
            # Of an earlier run in the same folder: the checkpoint is complete only when the Trainer writes it anew.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        scaler = accelerator.scaler
        state = {
            "model": model_state(trainer.model),
            "optimizer": trainer.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "gossip": [step.state_dict() for step in accelerator.gossip_steps],
            "random": random_state(),
        }
        save_checkpoint(folder, state, accelerator.group, step=trainer.state.global_step, facts=self._facts())

    def _facts(self) -> dict[str, Any]:
        steps = self._accelerator.gossip_steps
        return {"topology": steps[0].mixer.topology.name}

    # ---- resuming

    def choose(self, resume: Any) -> Any:
        """What `Trainer.train(resume_from_checkpoint=...)` is to resume from: for True, the newest whole checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none holds the states of the workers.
        """
        self._resuming = None
        if not resume:
            return resume
        chosen = self._newest() if resume is True else resume
        chosen = self._accelerator.group.gather(chosen and str(chosen), "choosing a checkpoint")[0]
        if chosen is None:
            return resume  # the Trainer says that there is none
        self._resuming = Path(chosen)
        return chosen

    def _newest(self) -> Path | None:
        """The newest checkpoint that is whole: a run killed while saving leaves one that is not."""
        folder = Path(self.trainer.args.output_dir)
        if not folder.is_dir():
            return None
        found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
        for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
            if is_complete(path) and _is_json(path / TRAINER_STATE_NAME):
                return path
        last = get_last_checkpoint(str(folder))
        return Path(last) if last else None  # not whole, and reading it says why

    def restore(self, state: TrainerState) -> dict[str, Any] | None:
        """Give this worker its own state back, if the Trainer resumes; returns that of its random streams. Collective.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model or number of workers.
        """
        if self._resuming is None:
            return None
        trainer, accelerator = self.trainer, self._accelerator
        if self.in_mid_epoch(state) and isinstance(trainer.callback_handler.train_dataloader, EqualSteps):
            raise ValueError(
                "the workers' training data differ in length, and then only a checkpoint from the end of an epoch can "
                "be resumed exactly. Use save_strategy='epoch', or ignore_data_skip=True to begin a new pass."
            )
        saved = load_checkpoint(self._resuming, accelerator.group)
        load_model_state(trainer.model, saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        if accelerator.scaler is not None and saved["scaler"] is not None:
            accelerator.scaler.load_state_dict(saved["scaler"])
        for step, its_state in zip(accelerator.gossip_steps, saved["gossip"], strict=True):
            step.load_state_dict(its_state)
        return saved["random"]

    def in_mid_epoch(self, state: TrainerState) -> bool:
        """Whether the run resumes in the middle of an epoch, whose first batches the Trainer skips."""
        return not self.trainer.args.ignore_data_skip and abs(state.epoch - round(state.epoch)) > 1e-6


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
