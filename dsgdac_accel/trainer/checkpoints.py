"""Every worker's own state beside what the Trainer saves, in the same checkpoint folders, and the way back."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.checkpoint import CheckpointError, is_complete
from dsgdac_accel.checkpoint.manifest import MANIFEST
from dsgdac_accel.data.dataloader_state import order_state, set_order_state
from dsgdac_accel.data.equal_steps import inner_loader, known_length
from dsgdac_accel.data.loaders import set_shared_epoch
from dsgdac_accel.randomness import random_state

logger = logging.getLogger(__name__)


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
        self._pass = -1
        """The number of the running pass over the training data, counted from 0."""
        self._began_at = 0
        """The optimizer step at which it began."""
        self._loaded: dict[str, Any] | None = None
        """What a checkpoint says about the pass that is to go on, until it begins."""

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

    def begin_pass(self, state: TrainerState) -> bool:
        """Tell samplers which epoch begins, and where they stood when it began in the run that is resumed.

        Returns whether the pass goes on in its middle, so that the Trainer leaves out its first batches.
        """
        loaded, self._loaded = self._loaded, None
        goes_on = self._pass < 0 and self._resuming is not None and self.in_mid_epoch(state)
        steps = state.global_step if goes_on else 0  # without a word in the checkpoint, what the Trainer takes it for
        self._pass += 1
        if loaded is not None:
            set_order_state(self._loader, loaded["order"], lenient=True)
            if goes_on:
                self._pass, steps = loaded.get("pass", self._pass), loaded.get("steps", steps)
        self._began_at = state.global_step - steps
        set_shared_epoch(self._loader, math.floor((state.epoch or 0.0) + 1e-6))
        self._order = order_state(self._loader)
        return goes_on

    def state_dict(self) -> dict[str, Any]:
        """The order of the pass that is to go on, the running one or at its end the next, and how far it is."""
        state = self.trainer.state
        order = self._order if self.in_mid_epoch(state) else order_state(self._loader)
        return {"order": order, "pass": self._pass, "steps": state.global_step - self._began_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it for the pass that begins next."""
        self._loaded = state

    @contextmanager
    def exact_skipping(self) -> Iterator[None]:
        """Inside, a Trainer that resumes in the middle of a pass leaves out what was taken of it, of any loader.

        The Trainer calls a function of Accelerate for this, which knows nothing of equal steps, and leaves out too
        little where worker 0 reads the batches of all.
        """
        original = transformers.trainer.skip_first_batches

        def skip(loader: Any, count: int) -> Any:
            mine = loader is self.trainer.callback_handler.train_dataloader
            return self._rest_of(loader, count) if mine else original(loader, count)

        transformers.trainer.skip_first_batches = skip
        try:
            yield
        finally:
            transformers.trainer.skip_first_batches = original

    def _rest_of(self, loader: Any, count: int) -> Any:
        """What is left of a pass, of which the Trainer says that `count` batches of each worker were taken."""
        inner = inner_loader(loader)
        if known_length(loader) is None:  # the Trainer takes all steps of the run for those of one pass
            steps = self.trainer.state.global_step - self._began_at
            count = steps * self.trainer.args.gradient_accumulation_steps
            if self._pass > 0 and hasattr(inner.dataset, "set_epoch"):
                logger.warning(
                    "this run goes on in pass %d over training data without a length, and the Trainer calls set_epoch "
                    "as in pass 1 of a new run: what the data order by it comes in another order. Give the data set a "
                    "length (__len__) to go on exactly.",
                    self._pass + 1,
                )
        return self._accelerator.skip_first_batches(loader, count)

    # ---- resuming

    def choose(self, resume: Any) -> Any:
        """What `Trainer.train(resume_from_checkpoint=...)` is to resume from.

        For True the newest whole checkpoint; for "auto", too, but nothing where there is none.
        """
        self._resuming = self._loaded = None
        self._pass = -1
        if not resume:
            return resume
        chosen = {True: self._newest, "auto": self._newest_whole}.get(resume, lambda: resume)()
        chosen = self._accelerator.group.all_gather_object(chosen and str(chosen), "choosing a checkpoint")[0]
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
