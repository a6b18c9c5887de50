"""`GossipCallback`: one callback makes an unmodified Hugging Face Trainer decentralized.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[GossipCallback(GossipConfig(...))])

The callback turns the Trainer's Accelerator into a `GossipAccelerator`, which does everything that gossip needs, and
wraps the few methods of the Trainer that evaluate, save, log and resume, so that they see the deployed model.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.calibration import Forward, calibrated_layers
from dsgdac_accel.compatibility import (
    refuse_unsupported_trainer,
    shards_workers,
    warn_of_single_worker,
)
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.features import Setup
from dsgdac_accel.metrics import PREFIX, ConsensusLogger, consensus_metrics
from dsgdac_accel.schedule import planned_lrs
from dsgdac_accel.trainer.checkpoints import TrainerCheckpoints
from dsgdac_accel.trainer.deployment import TrainerDeployment
from dsgdac_accel.trainer.sharding import ShardsInTrainer, is_renamed
from dsgdac_accel.trainer.stopping import SignalStop
from dsgdac_accel.virtual_workers import VirtualWorkers, split_by_worker

Original = Callable[..., Any]
"""A method of the Trainer as it was before the callback replaced it."""

_WITH_TRAINING_LOSS = ("lr", "gamma", "radius", "neighbor_disagreement", "wait_seconds")
_WITH_EVALUATION = ("gamma", "radius")
"""The consensus metrics logged with training losses, and with evaluations and the end of training."""


class _TrialEnded(Exception):
    """The hyperparameter search on worker 0 has ended this trial."""


class GossipCallback(TrainerCallback):
    """Trains with DSGD-AC (or with DAdam-AC under the Trainer's usual Adam) instead of averaging gradients.

    Every worker keeps its own weights. The Trainer evaluates, predicts with, saves, compares and pushes the deployed
    model, the average of the workers. While training is under way, call `evaluate`, `predict`, `save_model` and `train`
    on all workers. After `train()` the model IS the average, on every worker. During training other callbacks see this
    worker's own `model`. Callbacks that stop training, evaluate or save must decide so at the same step on all workers,
    and not by each worker's own clock or loss.

    Attaching sets `average_tokens_across_devices=False` in the Trainer's arguments, and applies the GossipConfig's
    `timeout` to the Trainer's own collectives.

    With `TrainingArguments(parallelism_config=...)` a worker is several processes, which shard its model:
    `dp_replicate_size` is the number of workers. On CPUs, and for a model that was sharded by `fully_shard` before,
    pass `device_mesh` instead.

    Args:
        config: topology, gamma schedule and policies. Default: `GossipConfig()`, the paper's settings.
        calibrate: source of the average's BatchNorm statistics. True: a pass over the training data, sharded over the
            workers. False: the workers' running statistics, pooled. Otherwise batches that can be read repeatedly (a
            DataLoader of this worker's part, a list). Not read for models without BatchNorm.
        calibration_forward: called as `calibration_forward(model, batch)` in that pass. Default: `model(**batch)`.
        stop_on_signals: True: SIGTERM or SIGUSR1 to any worker makes all of them save a checkpoint after the same step
            and end `train()` with SystemExit(75) (`StoppedBySignal`), so that no code after it takes the run for
            complete. `train(resume_from_checkpoint="auto")` continues from there. After the last step of an epoch the
            Trainer evaluates first; after the last step of the run, training ends as usual.
        stop_on_request: True: `request_stop()` on any worker does the same, also where signals cannot be handled, as in
            the thread of a Ray worker.
        device_mesh: the processes as workers that shard their model, as for `GossipAccelerator`. The model must be
            sharded over its dimensions when the Trainer is constructed.

    Raises (when the Trainer is constructed):
        ValueError: workers cannot gossip with this launch, model or these training arguments. The message has the way
            out.
    """

    def __init__(
        self,
        config: GossipConfig | None = None,
        *,
        calibrate: bool | Iterable[Any] = True,
        calibration_forward: Forward | None = None,
        stop_on_signals: bool = False,
        stop_on_request: bool = False,
        device_mesh: DeviceMesh | None = None,
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
        for name, value in (("stop_on_signals", stop_on_signals), ("stop_on_request", stop_on_request)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False; got {value!r}.")
        self.stop_on_signals = stop_on_signals
        self.stop_on_request = stop_on_request
        self.device_mesh = device_mesh
        self.checkpoints: TrainerCheckpoints
        self.deployment: TrainerDeployment
        self._stop: SignalStop
        self._trainer: Trainer | None = None
        self._training = False
        self._has_trained = False
        self._planned_lrs: list[float] | None = None
        self._reports = False
        """Whether a metric is being reported to a hyperparameter search."""

    # ---- taking over a Trainer

    def on_init_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Take over the Trainer at the end of its construction."""
        self.attach(_trainer_under_construction(control))

    def attach(self, trainer: Trainer) -> None:
        """Take over an existing Trainer; call this instead of `trainer.add_callback(...)`. Collective.

        Raises:
            ValueError: as for the class; also if the Trainer has already trained without gossip.
        """
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, GossipCallback) and callback is not self for callback in callbacks):
            raise ValueError("this Trainer has two GossipCallbacks and would mix twice per step. Keep one of them.")
        if self._trainer is trainer:
            return
        if self._training:
            raise ValueError("this GossipCallback is training another Trainer now. Make one for each Trainer.")
        model, sharded = cast(nn.Module, trainer.model), shards_workers(trainer, self.device_mesh)
        setup = Setup(
            config=self.config,
            sharded=sharded,
            accelerator=trainer.accelerator,
            trainer=trainer,
            callback=self,
            calibrates=self.calibrate is not False and bool(calibrated_layers(model)),
            renamed=sharded and trainer.args.load_best_model_at_end and is_renamed(model),
        )
        refuse_unsupported_trainer(trainer, setup)
        trainer.accelerator.free_memory()  # an earlier `evaluate` may have prepared the model
        self._adopt_accelerator(trainer)
        self._trainer, self._has_trained = trainer, False
        self.checkpoints = TrainerCheckpoints(trainer)
        self._begin_run()
        # First of all callbacks: at the end of training, reporting integrations must find the deployed model.
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        # With it the Trainer divides this worker's loss by all workers' tokens and relies on DDP to undo that.
        trainer.args.average_tokens_across_devices = False
        if self._accelerator.num_workers == 1:
            warn_of_single_worker(self._group)
        if sharded:
            for name, stand_in in inspect.getmembers(ShardsInTrainer(trainer), inspect.ismethod):
                if name != "__init__":
                    self._wrap(name, stand_in)
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
        self._wrap("_load_from_checkpoint", self._load_from_checkpoint)
        self._wrap("_load_optimizer_and_scheduler", self._load_optimizer_and_scheduler)
        self._wrap("_load_best_model", self._load_best_model)
        self._wrap("hyperparameter_search", self._search)
        self._wrap("_report_to_hp_search", self._report_to_search)
        self._wrap("log", self._log)

    def _begin_run(self) -> None:
        """Reset the state of one `train()`."""
        self.deployment = TrainerDeployment(self.trainer, self.calibrate, self.calibration_forward)
        self._stop = SignalStop(self.trainer)
        self._planned_lrs = None

    @property
    def trainer(self) -> Trainer:
        """The Trainer that this callback belongs to."""
        if self._trainer is None:
            raise ValueError(
                "GossipCallback came too late: the Trainer has already prepared its model for averaging gradients. "
                "Pass it to the constructor, Trainer(..., callbacks=[GossipCallback(...)]), or call "
                "GossipCallback(...).attach(trainer) instead of trainer.add_callback(...)."
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
        """The GossipSteps of the training under way; empty before and after training."""
        return self._accelerator.gossip_steps

    @property
    def _group(self) -> WorkerGroup:
        return self._accelerator.group

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of this one Trainer by `around(original, *args, **kwargs)`."""
        trainer = self.trainer
        original = getattr(trainer, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._trainer is trainer:
                return around(original, *args, **kwargs)
            if name == "train":
                raise ValueError(
                    "the GossipCallback of this Trainer has been given to another Trainer. Make one for each Trainer."
                )
            return original(*args, **kwargs)  # not in training, so its model is the same on all workers

        setattr(trainer, name, wrapped)

    def _adopt_accelerator(self, trainer: Trainer) -> None:
        adopted = GossipAccelerator.adopt(trainer.accelerator, self.config, self.device_mesh)
        # The Trainer gathers losses and predictions on the default process group.
        adopted.group.process_groups.limit_default_group()
        # It has kept the method of the class that the accelerator had.
        options = getattr(trainer.gather_function, "keywords", {})
        trainer.gather_function = functools.partial(adopted.gather_for_metrics, **options)

    def _create_accelerator(self, original: Original) -> None:
        """Adopt the new Accelerator that a hyperparameter search creates for each trial."""
        original()
        self._adopt_accelerator(self.trainer)

    def _search(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Refuse what ends a search by worker 0's clock."""
        if kwargs.get("timeout") is not None and self._group.everyone.size > 1:
            raise ValueError(
                f"hyperparameter_search ends by the clock of worker 0 alone; got timeout={kwargs['timeout']!r}. Leave "
                f"it out, and limit n_trials."
            )
        return original(*args, **kwargs)

    def _report_to_search(self, original: Original, *args: Any, **kwargs: Any) -> None:
        """Let all workers end a trial that the search, which runs on worker 0 alone, prunes."""
        if self.trainer.hp_search_backend is None:
            return original(*args, **kwargs)
        error: Exception | None = None
        self._reports = True
        try:
            original(*args, **kwargs)
        except Exception as pruned:
            error = pruned
        self._reports = False
        name = self._group.everyone.first(error and type(error).__name__, "agreeing on the end of a trial")
        if name is not None:
            self.deployment.deploy()
            raise error or _TrialEnded(name)
        return None

    # ---- training

    def _train(self, original: Original, resume_from_checkpoint: Any = None, *args: Any, **kw: Any) -> Any:
        if self not in self.trainer.callback_handler.callbacks:
            raise ValueError(
                "GossipCallback was removed from this Trainer, but its Accelerator still gossips. Build a new Trainer "
                "without it, or add the callback again."
            )
        self._begin_run()
        resume_from_checkpoint = self.checkpoints.choose(resume_from_checkpoint)
        self._training = self._has_trained = True
        if self._accelerator.training.has_prepared(self._model):
            vars(self._model)["_is_accelerate_prepared"] = True  # so that its forward is not wrapped a second time
        try:
            with self.checkpoints.exact_skipping(), self._stop:
                return self._group.everyone.guarded(lambda: original(resume_from_checkpoint, *args, **kw), "training")
        except _TrialEnded:
            return None  # the search goes on to the next trial, as on worker 0
        finally:
            self._training = False
            # A later Trainer without gossip would take the model for one that is wrapped in DDP already.
            vars(self._model).pop("_is_accelerate_prepared", None)

    def _wrap_model(self, original: Original, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare the `VirtualWorkers` of an earlier `train()` again: the Trainer takes them for wrapped already."""
        if isinstance(model, VirtualWorkers) and not self._accelerator.training.models:
            self._accelerator.prepare_model(model)
        return original(model, *args, **kwargs)

    def _create_scheduler(self, original: Original, num_training_steps: int, *args: Any, **kw: Any) -> Any:
        """Compute the lr of every step while the scheduler is fresh, before a checkpoint is loaded into it."""
        scheduler = original(num_training_steps, *args, **kw)
        self._planned_lrs = planned_lrs(self.trainer.lr_scheduler, self.config.total_steps or num_training_steps)
        return scheduler

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Plan gamma, and restore every worker's own state where training resumes."""
        wrapper = self.trainer.model_wrapped
        if isinstance(getattr(wrapper, "_orig_mod", wrapper), DistributedDataParallel) or not self._steps:
            raise ValueError(
                "the Trainer wrapped its model in DistributedDataParallel, which averages gradients: its Accelerator "
                "or its `_wrap_model` was replaced. Leave both to GossipCallback."
            )
        for step in self._steps:
            step.schedule.plan_lrs(self._planned_lrs)
            if args.logging_strategy == "steps" and self.config.log_every:
                # Measured inside the step, the radius needs no memory of its own.
                step.config = replace(step.config, log_every=state.logging_steps)
        self.checkpoints.restore(state)
        if self.stop_on_signals or self.stop_on_request:
            self._stop.listen(signals=self.stop_on_signals)

    def _load_from_checkpoint(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Keep the dtypes of the model: PEFT loads adapters in float32, even if they are trained in bf16."""
        dtypes = {name: parameter.dtype for name, parameter in self._model.named_parameters()}
        result = original(*args, **kwargs)
        for name, parameter in self._model.named_parameters():
            if parameter.dtype is not dtypes.get(name, parameter.dtype):
                parameter.data = parameter.data.to(dtypes[name])
        return result

    def _load_optimizer_and_scheduler(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Skip worker 0's optimizer if the checkpoint has every worker's own."""
        return None if self.checkpoints.has_worker_states else original(*args, **kwargs)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the epoch of the samplers, also in a run that resumes. A worker that ends an epoch alone is noticed."""
        self._stop.on_epoch_begin()
        self._group.everyone.barrier(f"beginning an epoch after step {state.global_step}")
        self.checkpoints.begin_pass(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the random streams after the skipped batches of a resumed epoch, which have drawn from them."""
        self.checkpoints.restore_random_state()

    def _count_items(self, original: Original, batches: list, *args: Any, **kwargs: Any) -> Any:
        """Count the tokens of each worker of this process, shape (workers,), if the model divides its loss by them."""
        trainer, count = self.trainer, self._accelerator.workers_per_process
        trains = not self.deployment.active and bool(self._steps)  # otherwise an evaluation, of one model
        model_computes_loss = (
            trainer.compute_loss_func is None
            and trainer.label_smoother is None
            and type(trainer).compute_loss is Trainer.compute_loss
        )
        splits = count > 1 and trains and model_computes_loss
        if not splits or not all(isinstance(batch, Mapping) for batch in batches):
            return original(batches, *args, **kwargs)
        labels = [{key: batch[key] for key in ("labels", "shift_labels") if key in batch} for batch in batches]
        by_worker = split_by_worker(filter(None, labels), count)
        counts = [original(mine, *args, **kwargs) for mine in by_worker]
        if any(mine is None for mine in counts):
            return None
        return torch.stack([torch.as_tensor(mine, device=getattr(mine, "device", "cpu")) for mine in counts])

    def request_stop(self, reason: str = "a request") -> None:
        """Ask all workers to save and to stop after the same step; see `GossipAccelerator.request_stop`."""
        self._accelerator.request_stop(reason)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop with a checkpoint where all workers agreed to after a signal."""
        self._stop.on_step_end(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Stop in mid-epoch before the Trainer evaluates."""
        self._stop.on_epoch_end(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the average of the workers in the model, unless the best checkpoint has replaced it already."""
        if not self._reports:  # a search that prunes calls this on worker 0 alone
            self.deployment.deploy()

    def _load_best_model(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        self.deployment.deploy()  # collective: worker 0 has written the checkpoint before any worker reads it
        return original(*args, **kwargs)

    # ---- evaluating and saving

    def _evaluate(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        if not self._has_trained and next(self._model.parameters()).device.type == self._group.device.type:
            self._accelerator.make_equal([self._model])  # later, `prepare` has made the workers equal
        with self.deployment.deployed():
            return self._group.everyone.guarded(lambda: original(*args, **kwargs), "evaluation")

    def _evaluation_loop(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Give all workers worker 0's metrics, so that they agree on the best model and on an early stop."""
        with self.deployment.deployed():
            output = original(*args, **kwargs)
        metrics = self._group.everyone.all_gather_object(output.metrics, "agreeing on metrics")
        return output._replace(metrics=metrics[0])

    def _save_model(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        with self.deployment.deployed():
            return original(*args, **kwargs)

    def _save_checkpoint(self, original: Original, model: nn.Module, trial: Any, *args: Any, **kw: Any) -> Any:
        """Save every worker's own state before the Trainer's part, which ends by deleting older checkpoints."""
        if not self.trainer.args.save_only_model:
            self.checkpoints.save(trial)
        result = original(model, trial, *args, **kw)
        self._stop.checkpoint_saved(self.trainer.state.global_step)
        return result

    # ---- logging

    def _log(self, original: Original, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Add the consensus metrics to what the Trainer logs in training, for all its trackers."""
        if not self._steps:
            return original(logs, *args, **kwargs)
        # Only in the Trainer's own record, which all workers log: measuring is collective.
        if "loss" in logs and self.trainer.control.should_log and self.config.log_every and not self.deployment.active:
            self._accelerator.measure_consensus(again=False)
        metrics = self._logged_metrics(_WITH_TRAINING_LOSS if "loss" in logs else _WITH_EVALUATION)
        consensus = ConsensusLogger(lambda: metrics, [lambda values, step: original(values, *args, **kwargs)])
        merged = consensus.log(logs, self.trainer.state.global_step)
        # The caller's dictionary gets what the Trainer adds (the epoch), but not the consensus metrics.
        logs.update({name: value for name, value in merged.items() if name not in metrics})
        return None

    def _logged_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return a few metrics, because a record is one line on the console. The radius only if it is this step's."""
        metrics = consensus_metrics(self._steps)
        chosen = {f"{PREFIX}{name}": metrics[f"{PREFIX}{name}"] for name in names if f"{PREFIX}{name}" in metrics}
        if metrics.get(f"{PREFIX}radius_step") != self._steps[0].mixer.step:
            chosen.pop(f"{PREFIX}radius", None)
        if metrics[f"{PREFIX}nonfinite_steps"]:
            chosen[f"{PREFIX}nonfinite_steps"] = metrics[f"{PREFIX}nonfinite_steps"]
        return chosen


def _trainer_under_construction(control: TrainerControl) -> Trainer:
    """Find the Trainer whose constructor is running: no event passes it, but its frame is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and getattr(candidate, "control", None) is control:
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError("on_init_end was not called by a Trainer. Call GossipCallback(...).attach(trainer) instead.")


def _check_calibration(calibrate: Any, forward: Any) -> None:
    batches = not isinstance(calibrate, bool | str) and isinstance(calibrate, Iterable)
    if not isinstance(calibrate, bool) and (not batches or isinstance(calibrate, Iterator)):
        raise TypeError(
            f"calibrate must be True, False or batches that can be read more than once, such as a DataLoader; got "
            f"{type(calibrate).__name__}. Pass a DataLoader or a list."
        )
    if forward is not None and not callable(forward):
        raise TypeError(
            f"calibration_forward must be a function of a model and a batch; got {type(forward).__name__}. "
            f"Pass calibration_forward=lambda model, batch: ..."
        )
