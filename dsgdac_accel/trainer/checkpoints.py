"""Checkpoints of a Trainer: every worker's own state beside what the Trainer saves, and resuming from it."""

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
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.checkpoint import CheckpointError, is_complete
from dsgdac_accel.checkpoint.local_shards import KeyPath
from dsgdac_accel.checkpoint.manifest import MANIFEST
from dsgdac_accel.data.dataloader_state import order_state, set_order_state
from dsgdac_accel.data.equal_steps import inner_loader, known_length
from dsgdac_accel.data.loaders import set_shared_epoch
from dsgdac_accel.randomness import random_state, set_random_state

logger = logging.getLogger(__name__)

_SAVING_METHODS = ("save_model", "_save", "_load_from_checkpoint")


class TrainerCheckpoints:
    """Saves and restores what the Trainer does not: each worker's weights, moments, random streams and data position.

    Args:
        trainer: a Trainer with a GossipAccelerator.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # Any: its model and optimizer are typed as optional
        self._resuming: Path | None = None
        """The checkpoint that `train()` resumes from."""
        self._order: Any = None
        """State of the training data's samplers at the beginning of the current pass."""
        self._pass = -1
        """Number of the current pass over the training data, counted from 0."""
        self._began_at = 0
        """Optimizer step at which the current pass began."""
        self._loaded: dict[str, Any] | None = None
        """The checkpoint's data position, until the pass that it describes begins."""
        self._random_state: dict[str, Any] | None = None
        """Random streams to restore once the skipped batches of a resumed pass have been read."""
        self._base: dict[KeyPath, str] | None = None
        """Digests of the frozen tensors that are there again when a run resumes; None before the first `train()`."""

    @property
    def _accelerator(self) -> GossipAccelerator:
        return self.trainer.accelerator

    # ---- saving

    def save(self, trial: Any) -> None:
        """Write the workers' states into the checkpoint folder that the Trainer is about to fill. Collective."""
        trainer, accelerator = self.trainer, self._accelerator
        folder = Path(trainer._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        # The Trainer saves the average next, which measures the radius and drops the exchange: a resumed run has both.
        accelerator.training.measure_consensus(again=False)
        with self._as_prepared():
            accelerator.checkpoints.save(folder, elsewhere=self._base)
        if accelerator.is_main_process:
            # An earlier run may have left this file. The checkpoint is complete once the Trainer has written it anew.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)

    @contextmanager
    def _as_prepared(self) -> Iterator[None]:
        """Inside, the accelerator saves the Trainer's scheduler, and the data order instead of loader positions."""
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
        """Set the samplers' epoch, and in a resumed run their state from when the pass began, and the random streams.

        If the pass continues in its middle, the Trainer skips its first batches next.
        """
        loaded, self._loaded = self._loaded, None
        goes_on = self._pass < 0 and self._resuming is not None and self.in_mid_epoch(state)
        steps = state.global_step if goes_on else 0  # the Trainer's assumption, if the checkpoint has no position
        self._pass += 1
        if loaded is not None:
            set_order_state(self._loader, loaded["order"], lenient=True)
            if goes_on:
                self._pass, steps = loaded.get("pass", self._pass), loaded.get("steps", steps)
        self._began_at = state.global_step - steps
        set_shared_epoch(self._loader, math.floor((state.epoch or 0.0) + 1e-6))
        self._order = order_state(self._loader)
        self.restore_random_state(again=goes_on)

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the current pass (at its end, the next one), its number, and its optimizer steps."""
        state = self.trainer.state
        order = self._order if self.in_mid_epoch(state) else order_state(self._loader)
        return {"order": order, "pass": self._pass, "steps": state.global_step - self._began_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state for the pass that begins next."""
        self._loaded = state

    @contextmanager
    def exact_skipping(self) -> Iterator[None]:
        """Inside, a Trainer that resumes in the middle of a pass skips exactly the batches that were taken.

        The Trainer calls Accelerate's `skip_first_batches`, which does not know `EqualSteps` and skips too few batches
        where worker 0 reads the batches of all workers. The context replaces it.
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
        """Return the rest of a pass of which, by the Trainer's count, each worker took `count` batches."""
        inner = inner_loader(loader)
        if known_length(loader) is None:  # the Trainer then counts all steps of the run as those of one pass
            steps = self.trainer.state.global_step - self._began_at
            count = steps * self.trainer.args.gradient_accumulation_steps
            if self._pass > 0 and hasattr(inner.dataset, "set_epoch"):
                logger.warning(
                    "this run resumes in pass %d over training data without a length, but the Trainer calls set_epoch "
                    "as in pass 1 of a new run, so the data may come in another order. Give the dataset a length "
                    "(__len__) to resume exactly.",
                    self._pass + 1,
                )
        return self._accelerator.skip_first_batches(loader, count)

    # ---- resuming

    def choose(self, resume: Any) -> Any:
        """Return the checkpoint for `Trainer.train(resume_from_checkpoint=...)`, the same on all workers. Collective.

        Args:
            resume: what the user passed. True and "auto" choose the newest complete checkpoint; with "auto" it is no
                error that there is none. Anything else is returned as it is.
        """
        self._resuming = self._loaded = self._random_state = None
        self._pass = -1
        if not resume:
            return resume
        chosen = self._newest(even_incomplete=resume is True) if resume in (True, "auto") else resume
        chosen = self._accelerator.group.everyone.all_gather_object(chosen and str(chosen), "choosing a checkpoint")[0]
        if chosen is None:
            return None if resume == "auto" else resume  # the Trainer raises
        self._resuming = Path(chosen)
        return chosen

    def _newest(self, even_incomplete: bool) -> Path | None:
        """Return the newest complete checkpoint: a run that is killed while saving leaves an incomplete one.

        If all are damaged or of another version, return the newest of these, and with `even_incomplete` the newest of
        all: reading it raises the reason.
        """
        folder, prefix = Path(self.trainer.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-"
        numbers = [path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*") if path.is_dir()]
        found = [folder / f"{prefix}{number}" for number in sorted(filter(str.isdigit, numbers), key=int, reverse=True)]
        complete = (path for path in found if is_complete(path) and _is_json(path / TRAINER_STATE_NAME))
        damaged = (path for path in found if (path / MANIFEST).exists() and not is_complete(path))
        return next(complete, None) or next(damaged, None) or next(iter(found if even_incomplete else ()), None)

    @property
    def has_worker_states(self) -> bool:
        """Whether the checkpoint to resume from has every worker's state, optimizer and schedule included."""
        return self._resuming is not None and (self._resuming / MANIFEST).exists()

    def restore(self, state: TrainerState) -> None:
        """Restore this worker's own state if the Trainer resumes, and note which base the run has. Collective.

        Raises:
            CheckpointError: the checkpoint is damaged, or from another model or number of workers.
        """
        found, known = self._loaded_by_the_trainer(), self._base  # before a checkpoint changes the model
        # What an earlier `train()` has changed, nobody else can load.
        self._base = found if known is None else {place: d for place, d in found.items() if known.get(place) == d}
        if self._resuming is None:
            return
        accelerator = self._accelerator
        if not self.has_worker_states:  # the Trainer has loaded its model and schedule
            if accelerator.gossip_config.on_other_worker_count == "refuse":
                raise CheckpointError(
                    f"{self._resuming} holds no states of workers ({MANIFEST}): it was saved with "
                    f"save_only_model=True, by a Trainer without gossip, or incompletely. To start all workers from "
                    f"its model, set on_other_worker_count='deployed' in GossipConfig."
                )
            for step in accelerator.gossip_steps:
                step.mixer.start_at(state.global_step)
            return
        with self._as_prepared():
            accelerator.load_state(self._resuming)
        self._random_state = random_state()

    def restore_random_state(self, again: bool = False) -> None:
        """Restore the random streams of the checkpoint, if they were not; `again`: the next call does so, too."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = self._random_state if again else None

    def _loaded_by_the_trainer(self) -> dict[KeyPath, str]:
        """Return the digests of the frozen tensors that workers' states need not hold.

        The Trainer's own file holds them, or PEFT leaves them to the base model. A Trainer that saves its model in
        another way may lose some.
        """
        trainer, kind = self.trainer, type(self.trainer)
        own_way = any(getattr(kind, name) is not getattr(Trainer, name) for name in _SAVING_METHODS)
        if trainer.args.save_only_model or (own_way and not hasattr(trainer.model, "peft_config")):
            return {}
        dropped = tuple(getattr(trainer.model, "_keys_to_ignore_on_save", None) or ())
        return {
            path: digest
            for path, digest in self._accelerator.checkpoints.frozen_digests().items()
            if path[2] != "caches" and not path[-1].endswith(dropped)
        }

    def in_mid_epoch(self, state: TrainerState) -> bool:
        """Return whether training is in the middle of an epoch, whose first batches the Trainer skips on resuming."""
        return not self.trainer.args.ignore_data_skip and abs(state.epoch - round(state.epoch)) > 1e-6


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
