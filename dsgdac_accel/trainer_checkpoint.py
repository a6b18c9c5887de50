"""Every worker's own state beside what the Trainer saves, in the same checkpoint folders, and the way back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.checkpoint import CheckpointError, is_complete
from dsgdac_accel.data_order import order_state, set_order_state
from dsgdac_accel.equal_steps import EqualSteps
from dsgdac_accel.loaders import set_shared_epoch
from dsgdac_accel.manifest import MANIFEST
from dsgdac_accel.randomness import random_state
from dsgdac_accel.resuming import inner_loader


class TrainerCheckpoints:
    """Saves and restores what the Trainer does not: each worker's weights, moments, random streams and position.

    Args:
        trainer: whose accelerator gossips.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # by type its model and optimizer may be None, in training they are not
        self._resuming: Path | None = None
        self._order: Any = None
        """Where the samplers of the training data stood when the running pass began."""
        self._loaded_order: Any = None

    @property
    def _accelerator(self) -> GossipAccelerator:
        return self.trainer.accelerator

    # ---- saving

    def save(self, trial: Any) -> None:
        """Write this worker's state into the checkpoint folder that the Trainer is about to fill. Collective."""
        trainer, accelerator = self.trainer, self._accelerator
        folder = Path(trainer._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        with self._as_prepared():
            accelerator.save_state(folder)
        if accelerator.is_main_process:
            # Of an earlier run in the same folder: the checkpoint is whole only when the Trainer has written it anew.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)

    @contextmanager
    def _as_prepared(self) -> Iterator[None]:
        """With the scheduler that the Trainer steps, and, of the loaders whose batches it counts, the order."""
        accelerator = self._accelerator
        kept = accelerator._dataloaders, accelerator._schedulers, accelerator._custom_objects
        accelerator._dataloaders, accelerator._schedulers = [], [self.trainer.lr_scheduler]
        accelerator._custom_objects = [self]
        try:
            yield
        finally:
            accelerator._dataloaders, accelerator._schedulers, accelerator._custom_objects = kept

    # ---- the order of the training data

    @property
    def _loader(self) -> Any:
        return inner_loader(self.trainer.callback_handler.train_dataloader)

    def begin_pass(self, state: TrainerState) -> None:
        """Tell samplers which epoch begins, and where they stood when it began in the run that is resumed."""
        if self._loaded_order is not None:
            set_order_state(self._loader, self._loaded_order, lenient=True)
            self._loaded_order = None
        set_shared_epoch(self._loader, math.floor((state.epoch or 0.0) + 1e-6))
        self._order = order_state(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The order of the pass that is to go on: the running one, or at its end the next."""
        return {"order": self._order if self.in_mid_epoch(self.trainer.state) else order_state(self._loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it for the pass that begins next."""
        self._loaded_order = state["order"]

    # ---- resuming

    def choose(self, resume: Any) -> Any:
        """What `Trainer.train(resume_from_checkpoint=...)` is to resume from.

        For True the newest whole checkpoint; for "auto", too, but nothing where there is none.
        """
        self._resuming = self._loaded_order = None
        if not resume:
            return resume
        chosen = {True: self._newest, "auto": self._newest_whole}.get(resume, lambda: resume)()
        chosen = self._accelerator.group.gather(chosen and str(chosen), "choosing a checkpoint")[0]
        if chosen is None:
            return None if resume == "auto" else resume  # the Trainer says that there is none
        self._resuming = Path(chosen)
        return chosen

    def _newest(self) -> Path | None:
        """The newest checkpoint that is whole, or, where none is, the last: reading it says why it is not."""
        folder = Path(self.trainer.args.output_dir)
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        return self._newest_whole() or (Path(last) if last else None)

    def _newest_whole(self) -> Path | None:
        """The newest checkpoint that is whole: a run killed while saving leaves one that is not."""
        folder = Path(self.trainer.args.output_dir)
        if not folder.is_dir():
            return None
        found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
        for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
            if is_complete(path) and _is_json(path / TRAINER_STATE_NAME):
                return path
        return None

    @property
    def holds_workers(self) -> bool:
        """Whether the checkpoint to resume from has the states of workers, optimizer and schedule included."""
        return self._resuming is not None and (self._resuming / MANIFEST).exists()

    def restore(self, state: TrainerState) -> dict[str, Any] | None:
        """Give this worker its own state back, if the Trainer resumes; returns that of its random streams. Collective.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model or number of workers.
        """
        if self._resuming is None:
            return None
        accelerator = self._accelerator
        if self.in_mid_epoch(state) and isinstance(self.trainer.callback_handler.train_dataloader, EqualSteps):
            raise ValueError(
                "the workers' training data differ in length, and then only a checkpoint from the end of an epoch can "
                "be resumed exactly. Use save_strategy='epoch', or ignore_data_skip=True to begin a new pass."
            )
        if not self.holds_workers:
            self._start_from_one_model(state)
            return None
        with self._as_prepared():
            accelerator.load_state(self._resuming)
        return random_state()

    def _start_from_one_model(self, state: TrainerState) -> None:
        """From a checkpoint of a Trainer without gossip, whose model and optimizer the Trainer has loaded already."""
        accelerator = self._accelerator
        if accelerator.gossip_config.on_other_worker_count == "refuse":
            raise CheckpointError(
                f"{self._resuming} holds no states of workers ({MANIFEST}): it was saved with save_only_model=True, by "
                f"a Trainer without gossip, or not to the end. To start all workers from its model, set "
                f"on_other_worker_count='deployed' in GossipConfig."
            )
        for step in accelerator.gossip_steps:
            step.mixer.load_state_dict({"step": state.global_step, "workers": accelerator.num_workers})

    def in_mid_epoch(self, state: TrainerState) -> bool:
        """Whether the run resumes in the middle of an epoch, whose first batches the Trainer skips."""
        return not self.trainer.args.ignore_data_skip and abs(state.epoch - round(state.epoch)) > 1e-6


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
