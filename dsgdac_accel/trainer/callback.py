"""`GossipCallback`: one callback makes an unmodified Hugging Face Trainer decentralized.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[GossipCallback(GossipConfig(...))])

Everything that gossip needs is in `GossipAccelerator`. The callback turns the Trainer's own Accelerator into one, and
wraps the few methods of the Trainer that evaluate, save, log and resume, so that they see the deployed model.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.calibration import Forward
from dsgdac_accel.compatibility import refuse_unsupported_trainer
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.batch_parts import batch_size, cut, even_sizes
from dsgdac_accel.deployed_model import separate_state
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.stopping import StoppedBySignal
from dsgdac_accel.metrics import PREFIX, ConsensusLogger, consensus_metrics
from dsgdac_accel.randomness import set_random_state
from dsgdac_accel.schedule import planned_lrs
from dsgdac_accel.trainer.checkpoints import TrainerCheckpoints
from dsgdac_accel.trainer.deployed import TrainerDeployment
from dsgdac_accel.virtual_workers import VirtualWorkers

logger = logging.getLogger(__name__)

_IN_TRAINING = ("lr", "gamma", "radius", "neighbor_disagreement", "wait_seconds")
_ELSEWHERE = ("gamma", "radius")
"""The consensus metrics beside training losses, and beside evaluations and the end of training."""


class GossipCallback(TrainerCallback):
    """Trains by DSGD-AC, or DAdam-AC with the Trainer's usual Adam, in place of averaging gradients.

    Every worker keeps its own weights. What the Trainer evaluates, predicts with, saves, compares and pushes is always
    the deployed model, the average of the workers; `evaluate`, `predict`, `save_model` and `train` must therefore be
    called on all workers while training is under way. After `train()` the model IS the average, on every worker. The
    `model` that other callbacks are given in training is this worker's own. Callbacks that stop training, evaluate or
    save must decide so at the same step on all workers, so not by each worker's own clock or loss.

    Attaching switches `average_tokens_across_devices` off in the Trainer's arguments, and lets its own collectives give
    up after the GossipConfig's `timeout`.

    Args:
        config: topology, gamma schedule and policies. Default: the paper's.
        calibrate: where BatchNorm statistics of the average come from. True: a pass over the training data, shared out
            over the workers; False: the workers' own, pooled; or batches that can be read again and again (a DataLoader
            of this worker's part, a list). Models without BatchNorm never read it.
        calibration_forward: called as `calibration_forward(model, batch)` there; default `model(**batch)`.
        stop_on_signals: SIGTERM or SIGUSR1 to any one worker then makes all of them save a checkpoint after the same
            step, and `train()` ends with SystemExit(75) (`StoppedBySignal`) on all, so that nothing that follows it
            takes the run for complete. `train(resume_from_checkpoint="auto")` goes on from there. After the last step
            of an epoch the Trainer evaluates first. In the last step of all, training just ends.

    Raises (when the Trainer is built):
        ValueError: a launch, a model or training arguments under which workers cannot gossip, with the way out.
    """

    def __init__(
        self,
        config: GossipConfig | None = None,
        *,
        calibrate: bool | Iterable[Any] = True,
        calibration_forward: Forward | None = None,
        stop_on_signals: bool = False,
    ) -> None:
        self.config = GossipConfig() if config is None else config
        if not isinstance(self.config, GossipConfig):
            raise TypeError(
                f"GossipCallback takes a GossipConfig; got {type(config).__name__}. "
                f"Write GossipCallback(GossipConfig(...))."
            )
        _check_calibration(calibrate, calibration_forward)
        self.calibrate = calibrate
        self.calibration_forward = calibration_forward
        if not isinstance(stop_on_signals, bool):
            raise TypeError(f"stop_on_signals must be True or False; got {stop_on_signals!r}.")
        self.stop_on_signals = stop_on_signals
        self._trainer: Trainer | None = None
        self._training = False
        self._forget_run()

    def _forget_run(self) -> None:
        """Nothing of an earlier `train()` is left."""
        self._rates: list[float] | None = None
        if self._trainer is not None:
            self.deployment = TrainerDeployment(self._trainer, self.calibrate, self.calibration_forward)
        self._gradients_checked = False
        self._random: dict[str, Any] | None = None
        self._stops: Literal["never", "here", "at the end of the epoch"] = "never"
        self._saved_at: int | None = None

    # ---- taking over a Trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called at the end of the Trainer's construction, the only moment at which a callback can meet its Trainer."""
        self.attach(_trainer_under_construction(control))

    def attach(self, trainer: Trainer) -> None:
        """Take over a Trainer that exists already, in place of `trainer.add_callback(...)`. Collective.

        Raises:
            ValueError: see the class; also when the Trainer has already trained in the usual way.
        """
        callbacks = trainer.callback_handler.callbacks
        others = [callback for callback in callbacks if isinstance(callback, GossipCallback) and callback is not self]
        if others:
            raise ValueError("this Trainer has two GossipCallbacks, and would mix twice a step; keep one of them.")
        if self._trainer is trainer:
            return
        if self.config.on_worker_loss == "continue":
            raise ValueError(
                "on_worker_loss='continue' is not for the Trainer, whose own collectives do not outlive a lost worker. "
                "Use 'stop' and resume from a checkpoint, or train with GossipAccelerator."
            )
        if self._training:
            raise ValueError("this GossipCallback is training another Trainer now; make one for each Trainer.")
        refuse_unsupported_trainer(trainer)
        if self.stop_on_signals and trainer.args.save_only_model:
            raise ValueError(
                "stop_on_signals=True stops with a checkpoint to go on from, and save_only_model=True leaves out of "
                "checkpoints what that needs. Set save_only_model=False, or stop_on_signals=False."
            )
        self._trainer = trainer
        self._forget_run()
        # First of all callbacks: those of reporting integrations must find the deployed model when training ends.
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        if trainer.args.average_tokens_across_devices:
            # It scales this worker's gradient by the tokens of the others, and counts on DDP to divide again.
            trainer.args.average_tokens_across_devices = False
        trainer.accelerator.free_memory()  # an `evaluate` before may have prepared the model
        self._adopt_accelerator()
        if self._accelerator.num_workers == 1:
            logger.warning(
                "1 worker: there is nobody to gossip with, and the Trainer trains as ever. Start several with torchrun "
                "--nproc_per_node N, or accelerate launch --multi_gpu --num_processes N (the flag is for CPUs, too)."
            )
        self.checkpoints = TrainerCheckpoints(trainer)
        self._wrap("create_accelerator_and_postprocess", self._create_accelerator)
        self._wrap("create_scheduler", self._create_scheduler)
        self._wrap("_get_num_items_in_batch", self._count_items)
        self._wrap("_wrap_model", self._wrap_model)
        self._wrap("train", self._train)
        self._wrap("evaluate", self._evaluate)
        self._wrap("predict", self._evaluate)
        self._wrap("evaluation_loop", self._evaluation_loop)
        self._wrap("save_model", self._save_model)
        self._wrap("_save_checkpoint", self._save_checkpoint)
        self._wrap("_load_optimizer_and_scheduler", self._load_optimizer_and_scheduler)
        self._wrap("_load_best_model", self._load_best_model)
        self._wrap("log", self._log)
        if next(self._model.parameters()).device.type == self._group.device.type:
            self._accelerator.make_equal([self._model])  # for an `evaluate` before training; `prepare` does it again

    @property
    def trainer(self) -> Trainer:
        """The Trainer that this callback belongs to."""
        if self._trainer is None:
            raise ValueError(
                "GossipCallback came too late: Trainer has already prepared its model for averaging gradients. Give it "
                "to the constructor, Trainer(..., callbacks=[GossipCallback(...)]), or call "
                "GossipCallback(...).attach(trainer) in place of trainer.add_callback(...)."
            )
        return self._trainer

    @property
    def _accelerator(self) -> GossipAccelerator:
        return cast(GossipAccelerator, self.trainer.accelerator)

    @property
    def _model(self) -> nn.Module:
        return cast(nn.Module, self.trainer.model)

    @property
    def _steps(self) -> list[GossipStep]:
        """The gossip under way; empty before training and after it."""
        return self._accelerator.gossip_steps

    @property
    def _group(self) -> WorkerGroup:
        return self._accelerator.group

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Let `around(original, *args, **kwargs)` stand for a method of this one Trainer."""
        trainer = self.trainer
        original = getattr(trainer, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._trainer is trainer:
                return around(original, *args, **kwargs)
            if name == "train":
                raise ValueError(
                    "the GossipCallback of this Trainer has been given to another one since; make one for each Trainer."
                )
            return original(*args, **kwargs)  # it has trained, or never will: its model is the same on all workers

        setattr(trainer, name, wrapped)

    def _adopt_accelerator(self) -> None:
        GossipAccelerator.adopt(self.trainer.accelerator, self.config)
        # Trainer's own collectives (gathered losses and predictions) are on the default group.
        self._group.limit_default_group()

    def _create_accelerator(self, original: Callable[[], None]) -> None:
        """A hyperparameter search makes a new Accelerator for each trial."""
        original()
        self._adopt_accelerator()

    # ---- training

    def _train(self, original: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kw: Any) -> Any:
        if self not in self.trainer.callback_handler.callbacks:
            raise ValueError(
                "GossipCallback was removed from this Trainer, whose Accelerator gossips for good. Build a new Trainer "
                "without it, or add the callback again."
            )
        self._forget_run()
        resume_from_checkpoint = self.checkpoints.choose(resume_from_checkpoint)
        self._training = True
        if any(self._accelerator._holder(self._model) is model for model in self._accelerator._models):
            vars(self._model)["_is_accelerate_prepared"] = True  # or its forward would be wrapped once more
        try:
            with self.checkpoints.exact_skipping(), ExitStack() as self._listening:
                return self._group.guarded(
                    lambda: original(resume_from_checkpoint, *args, **kw), "training", strict=True
                )
        finally:
            self._training = False
            # A Trainer without gossip that comes after this one would take the model for wrapped in DDP already.
            vars(self._model).pop("_is_accelerate_prepared", None)

    def _wrap_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Show a later `train()` the workers of this process, which the Trainer takes for wrapped and leaves alone."""
        if isinstance(model, VirtualWorkers) and not self._accelerator._models:
            self._accelerator.prepare_model(model)
        return original(model, *args, **kwargs)

    def _create_scheduler(self, original: Callable[..., Any], num_training_steps: int, *args: Any, **kw: Any) -> Any:
        """Look ahead while the scheduler is fresh: before a checkpoint is loaded into it."""
        scheduler = original(num_training_steps, *args, **kw)
        self._rates = planned_lrs(self.trainer.lr_scheduler, self.config.total_steps or num_training_steps)
        return scheduler

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plan gamma, and give every worker its own state back where training resumes."""
        wrapper = self.trainer.model_wrapped
        if isinstance(getattr(wrapper, "_orig_mod", wrapper), DistributedDataParallel) or not self._steps:
            raise ValueError(
                "the Trainer wrapped its model in DistributedDataParallel, which averages gradients: something has "
                "replaced its Accelerator or its `_wrap_model`. Leave both to GossipCallback."
            )
        for step in self._steps:
            step.plan_lrs(self._rates)
            if args.logging_strategy == "steps" and self.config.log_every:
                # Inside the step, the radius of these steps costs no memory of its own.
                step.config = replace(step.config, log_every=state.logging_steps)
        self._random = self.checkpoints.restore(state)
        if self.stop_on_signals:
            self._listening.close()  # the Trainer begins again where a batch did not fit into memory
            self._listening.enter_context(self._accelerator.stop_on_signals())

    def _load_optimizer_and_scheduler(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leave out worker 0's optimizer where every worker's own is there."""
        return None if self.checkpoints.holds_workers else original(*args, **kwargs)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell samplers which epoch begins, also in a run that resumes."""
        if self._stops != "never":
            self._stop(state)
        self._return_to_random_state(keep=self.checkpoints.begin_pass(state))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """In mid-epoch, the batches skipped on resuming have drawn from the random streams: put them back."""
        self._return_to_random_state()

    def _return_to_random_state(self, keep: bool = False) -> None:
        if self._random is not None:
            set_random_state(self._random)
            self._random = self._random if keep else None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """At the first step, make sure that gradients are this worker's own."""
        if not self._gradients_checked:
            self._gradients_checked = True
            norms = self._group.all_gather_object(_gradient_norm(self._model), "comparing the first gradients")
            if len(norms) > 1 and 0 < norms[0] < math.inf and len(set(norms)) == 1:
                logger.warning(
                    "the first gradients are the same on all workers: either something averages them, such as a hook "
                    "of your own, or all workers read the same batches. Gossip needs neither."
                )

    def _count_items(self, original: Callable[..., Any], batches: list, *args: Any, **kwargs: Any) -> Any:
        """Where the model divides its loss by a number of tokens: those of each worker of this process, (workers,)."""
        trainer, count = self.trainer, self._accelerator.workers_per_process
        if self.deployment.inside or not self._steps:  # an evaluation, of one model
            return original(batches, *args, **kwargs)
        of_model = trainer.compute_loss_func is None and trainer.label_smoother is None
        own_loss = type(trainer).compute_loss is not Trainer.compute_loss
        if count == 1 or not of_model or own_loss or not all(isinstance(batch, Mapping) for batch in batches):
            return original(batches, *args, **kwargs)
        labels = [{key: batch[key] for key in ("labels", "shift_labels") if key in batch} for batch in batches]
        parts = [cut((), mine, even_sizes(batch_size((), mine), count)) for mine in labels if mine]
        counts = [original([part[worker][1] for part in parts], *args, **kwargs) for worker in range(count)]
        return None if any(mine is None for mine in counts) else torch.stack([torch.as_tensor(mine) for mine in counts])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Where a signal asks for it, stop with a checkpoint, after the same step on all workers."""
        if not (self._accelerator.should_stop() and self._stops == "never"):
            return
        control.should_save = True
        if state.global_step >= state.max_steps:
            return  # training is at its end
        # The evaluation at the end of an epoch would be missing from the run that goes on.
        at_end = abs((state.epoch or 0) - round(state.epoch or 0)) < 1e-6
        self._stops = "at the end of the epoch" if at_end else "here"
        control.should_training_stop = not at_end

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """In the middle of an epoch stop before the Trainer evaluates; at the end let it evaluate and save first."""
        if self._stops == "here":
            self._stop(state)
        if self._stops != "never":
            control.should_save = True
            self._saved_at = None  # what was saved before the evaluation does not know of it

    def _stop(self, state: TrainerState) -> NoReturn:
        trainer: Any = self.trainer
        if self._saved_at != state.global_step:  # save_strategy="best" does not save what is not
            trainer._save_checkpoint(trainer.model, trial=None)
        self._group.barrier("stopping the run")  # launchers end the others when the first one is gone
        message = (
            f"stopped by {self._accelerator.stop_reason} at step {state.global_step} of {state.max_steps}; checkpoint "
            f'in {trainer.args.output_dir}; train(resume_from_checkpoint="auto") goes on from it'
        )
        if trainer.is_world_process_zero():
            print(message, file=sys.stderr, flush=True)
        raise StoppedBySignal(message)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the average of the workers in the model, unless the best checkpoint has replaced it already."""
        self.deployment.deploy_for_good()

    def _load_best_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.deployment.deploy_for_good()  # all workers meet here, so worker 0 has written what is read now
        return original(*args, **kwargs)

    # ---- evaluating, saving and logging

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.deployment.deployed():
            return self._group.guarded(lambda: original(*args, **kwargs), "evaluation", strict=True)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Also give all workers worker 0's metrics: the best model and an early stop are decided alike everywhere."""
        with self.deployment.deployed():
            output = original(*args, **kwargs)
        return output._replace(metrics=self._group.all_gather_object(output.metrics, "agreeing on metrics")[0])

    def _save_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.deployment.deployed(), separate_state(self._model):
            return original(*args, **kwargs)

    def _save_checkpoint(
        self, original: Callable[..., Any], model: nn.Module, trial: Any, *args: Any, **kw: Any
    ) -> Any:
        """Every worker's own state first, then what the Trainer writes, which ends with deleting older checkpoints."""
        if not self.trainer.args.save_only_model:
            self.checkpoints.save(trial)
        result = original(model, trial, *args, **kw)
        self._saved_at = self.trainer.state.global_step
        return result

    def _log(self, original: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Put the consensus metrics beside whatever the Trainer logs in training, for all its trackers."""
        if not self._steps:
            return original(logs, *args, **kwargs)
        # The Trainer's own record, which all workers write; anybody may log something on one worker alone.
        if "loss" in logs and self.trainer.control.should_log and self.config.log_every and not self.deployment.inside:
            self._accelerator.measure_consensus(again=False)
        metrics = self._logged_metrics(_IN_TRAINING if "loss" in logs else _ELSEWHERE)
        merged = ConsensusLogger(lambda: metrics, [lambda values, step: original(values, *args, **kwargs)]).log(
            logs, self.trainer.state.global_step
        )
        logs.update({name: value for name, value in merged.items() if name not in metrics})  # Trainer adds its epoch
        return None

    def _logged_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Few, since every record is one line on the console; the radius only while it is this step's."""
        metrics = consensus_metrics(self._steps)
        chosen = {f"{PREFIX}{name}": metrics[f"{PREFIX}{name}"] for name in names if f"{PREFIX}{name}" in metrics}
        if metrics.get(f"{PREFIX}radius_step") != self._steps[0].mixer.step:
            chosen.pop(f"{PREFIX}radius", None)
        if metrics[f"{PREFIX}nonfinite_steps"]:
            chosen[f"{PREFIX}nonfinite_steps"] = metrics[f"{PREFIX}nonfinite_steps"]
        return chosen


def _trainer_under_construction(control: TrainerControl) -> Trainer:
    """The Trainer whose constructor is calling its callbacks: no event hands it over, but its frame is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and getattr(candidate, "control", None) is control:
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError("on_init_end was not called by a Trainer; call GossipCallback(...).attach(trainer) instead.")


def _gradient_norm(model: nn.Module) -> float:
    norms = [float(p.grad.to_dense().double().norm()) for p in model.parameters() if p.grad is not None]
    return math.hypot(*norms)


def _check_calibration(calibrate: Any, forward: Any) -> None:
    batches = not isinstance(calibrate, bool | str) and isinstance(calibrate, Iterable)
    if not isinstance(calibrate, bool) and (not batches or isinstance(calibrate, Iterator)):
        raise TypeError(
            f"calibrate must be True, False or batches that can be read more than once, such as a DataLoader; got a "
            f"{type(calibrate).__name__}."
        )
    if forward is not None and not callable(forward):
        raise TypeError(
            f"calibration_forward must be a function of a model and a batch; got a {type(forward).__name__}."
        )
