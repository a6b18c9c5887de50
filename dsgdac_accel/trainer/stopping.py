"""Stopping a Trainer: a checkpoint after the same step on all workers, then `StoppedBySignal`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Literal, NoReturn

from transformers import Trainer, TrainerControl, TrainerState

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.distributed.stopping import StoppedBySignal


class SignalStop:
    """Context of one `train()`, which it stops where all workers agree to stop.

    Args:
        trainer: a Trainer with a GossipAccelerator.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self._when: Literal["not", "now", "after evaluation"] = "not"
        self._saved_at: int | None = None
        self._listening = ExitStack()

    @property
    def _accelerator(self) -> GossipAccelerator:
        return self.trainer.accelerator

    def __enter__(self) -> SignalStop:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._listening.__exit__(*error)  # sees StoppedBySignal

    def listen(self, signals: bool) -> None:
        """Note requests until the context ends, and `signals` too.

        A Trainer that starts again with a smaller batch calls this again.
        """
        self._listening.close()
        accelerator = self._accelerator
        self._listening.enter_context(accelerator.stop_on_signals() if signals else accelerator.stop_on_request())

    def checkpoint_saved(self, step: int) -> None:
        """Note that the Trainer has saved a checkpoint of this optimizer step."""
        self._saved_at = step

    def on_step_end(self, state: TrainerState, control: TrainerControl) -> None:
        """Decide whether training stops at this step."""
        if not self._accelerator.should_stop() or self._when != "not":
            return
        control.should_save = True
        if state.global_step >= state.max_steps:
            return  # training ends here anyway
        # At the end of an epoch let the Trainer evaluate first: the resumed run would not.
        ends_epoch = abs((state.epoch or 0) - round(state.epoch or 0)) < 1e-6
        self._when = "after evaluation" if ends_epoch else "now"
        control.should_training_stop = not ends_epoch

    def on_epoch_end(self, control: TrainerControl) -> None:
        """Stop before the Trainer evaluates in mid-epoch; at the end of an epoch let it evaluate and save first."""
        if self._when == "now":
            self._stop()
        if self._when == "after evaluation":
            control.should_save = True
            self._saved_at = None  # a checkpoint from before the evaluation does not know of it

    def on_epoch_begin(self) -> None:
        """Stop after the evaluation at the end of the previous epoch."""
        if self._when != "not":
            self._stop()

    def _stop(self) -> NoReturn:
        trainer, state = self.trainer, self.trainer.state
        if self._saved_at != state.global_step:  # save_strategy="best" saves only the best model
            trainer._save_checkpoint(trainer.model, trial=None)
        # Launchers end the other workers as soon as the first one is gone.
        self._accelerator.group.everyone.barrier("stopping the run")
        message = (
            f"stopped by {self._accelerator.stop_reason} at step {state.global_step} of {state.max_steps}; checkpoint "
            f'in {trainer.args.output_dir}; train(resume_from_checkpoint="auto") continues from it'
        )
        if trainer.is_world_process_zero():
            print(message, file=sys.stderr, flush=True)
        raise StoppedBySignal(message)
