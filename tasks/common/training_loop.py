"""The training loop of all tasks: optimizer steps, records, checkpoints, and evaluations every few epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from dsgdac_accel import NonFiniteError
from dsgdac_accel.calibration import Forward
from tasks.common.checkpoints import Checkpoints
from tasks.common.config import ConfigError
from tasks.common.output_dir import AnyAccelerator, OutputDir
from tasks.common.progress import Clock
from tasks.common.weight_average import WeightAverage


class Prepared(NamedTuple):
    """The results of `accelerator.prepare`."""

    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any


class Task(Protocol):
    """The parts that differ between tasks. Every worker calls each method equally often, so all may use collectives."""

    def begin_epoch(self) -> None:
        """Runs before the first batch of an epoch, and of the rest of an epoch after a resume."""

    def backward(self, batch: Any) -> tuple[Tensor, float]:
        """Compute the gradients of one micro-batch, clipped if the task clips.

        Returns its loss summed over what it is a mean of, shape (), and the number of those: (mean, 1) or, for a mean
        over tokens, their (sum, count). Of this process alone.
        """

    def after_step(self) -> None:
        """Runs after every optimizer step, before its record and checkpoint."""

    def record_values(self) -> tuple[dict[str, float], dict[str, str]]:
        """Values to log with the training loss of the last steps, and figures for the progress bar."""

    def end_epoch(self) -> None:
        """Runs after the last batch of an epoch."""

    def evaluate(self, done: bool, measure_curvature: bool) -> None:
        """Evaluate the deployed model; `done` says that training is over."""


class TrainingLoss:
    """The training loss of the workers: since the last record, in this epoch, and its mean over the last epoch.

    The sums stay on the device, so that no step waits for them.

    Args:
        accelerator: accelerator of the run.
    """

    def __init__(self, accelerator: AnyAccelerator) -> None:
        self.accelerator = accelerator
        zero = torch.zeros((), device=accelerator.device)
        self.sums: dict[str, tuple[Tensor, float]] = {"since_record": (zero, 0.0), "in_epoch": (zero, 0.0)}
        """Sum of the losses, shape (), and of their weights, of this process's workers."""
        self.last_epoch = math.nan
        """Mean over the last epoch and all workers."""

    def add(self, loss: Tensor, weight: float) -> None:
        """Add the loss of a micro-batch."""
        self.sums = {name: (total + loss.detach(), sum_ + weight) for name, (total, sum_) in self.sums.items()}

    def record(self, step: int) -> float:
        """Return the mean since the last record. Collective."""
        return self._mean("since_record", step)

    def end_epoch(self, step: int) -> None:
        """Note the mean over this epoch as that of the last one. Collective."""
        if self.sums["in_epoch"][1]:  # 0: a run resumed after the last step
            self.last_epoch = self._mean("in_epoch", step)

    def _mean(self, name: str, step: int) -> float:
        """Return the mean loss of all workers and begin anew. Collective."""
        total, weight = self.sums[name]
        shares = self.accelerator.group.all_gather_object((float(total), weight), f"logging step {step}")
        mean = math.fsum(total for total, _ in shares) / math.fsum(weight for _, weight in shares)
        if not (self.accelerator.gossip_steps or math.isfinite(mean)):  # gossip has a policy of its own
            raise NonFiniteError(
                f"the training loss is {mean} at step {step} on all workers. Lower the learning rate, lengthen the "
                f"warm-up, or clip the gradients."
            )
        self.sums[name] = torch.zeros_like(total), 0.0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the losses."""
        return {**self.sums, "worker_loss": self.last_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved losses."""
        self.sums = {name: (state[name][0].to(self.accelerator.device), state[name][1]) for name in self.sums}
        self.last_epoch = state["worker_loss"]


class TrainingLoop:
    """Trains a task from the step where a checkpoint left off to the last one.

    It owns the position of the run (`epoch`, `step`), its losses and its clock. Registered for checkpointing, it saves
    and restores them.

    The recorded training loss is the mean over `logging_steps` steps, across epochs, so that all points are equally
    smooth; steps after the last complete window are not recorded, except in a run that has no complete one.

    Args:
        name: name of the task, noted in checkpoints.
        config: settings of the run.
        accelerator: accelerator of the run.
        prepared: model, optimizer, loader and scheduler of the run.
        output: output folder of the run, which holds its log.
        steps_per_epoch: optimizer steps in a complete epoch.
        total_steps: optimizer steps of the run; the last epoch may be incomplete.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        accelerator: AnyAccelerator,
        prepared: Prepared,
        output: OutputDir,
        steps_per_epoch: int,
        total_steps: int,
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.prepared = prepared
        self.output = output
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = total_steps
        self.epoch = self.step = 0
        self.lr = 0.0
        """Learning rate of the last step."""
        self.loss = TrainingLoss(accelerator)
        self.clock = Clock()
        self.log_bytes: int | None = None
        """Length of the log when the loaded checkpoint was saved."""
        self.checkpoints = Checkpoints(config, accelerator, name, total_steps)
        self.weight_average = WeightAverage(
            config.weight_average, prepared.model, accelerator, steps_per_epoch, total_steps
        )
        self._bar: Any = None
        accelerator.register_for_checkpointing(self)
        if config.weight_average.kind != "none":
            accelerator.register_for_checkpointing(self.weight_average)

    def run(self, task: Task) -> None:
        """Train to the last step and wait for the last checkpoint. Collective."""
        hidden = None if self.accelerator.is_main_process else True
        self._bar = tqdm(initial=self.step, total=self.total_steps, disable=hidden, unit="step")
        while True:  # a resumed run may have no step left in its last epoch
            with self.clock.training():
                self._train_epoch(task)
            self.loss.end_epoch(self.step)
            task.end_epoch()
            done = self.step == self.total_steps
            measure_curvature = self.config.curvature.due(self.epoch, done)
            if done or measure_curvature or (self.epoch + 1) % self.config.eval_every == 0:
                task.evaluate(done, measure_curvature)
            if done:
                break
            self.epoch += 1
        self._bar.close()
        self.checkpoints.finish()

    def _train_epoch(self, task: Task) -> None:
        model, optimizer, _, scheduler = self.prepared
        model.train()
        task.begin_epoch()
        for batch in self.clock.batches(self._rest_of_epoch()):
            with self.accelerator.accumulate(model):
                loss, weight = task.backward(batch)
                self.lr = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.loss.add(loss, weight)
            if not self.accelerator.sync_gradients:
                continue
            self.step += 1
            self.accelerator.group.steps_taken = self.step  # error messages name it; gossip counts its own steps
            self._bar.update()
            self.weight_average.after_step(self.step)
            task.after_step()
            every = self.config.logging_steps
            if self.step % every == 0 or self.step == self.total_steps < every:
                self._record(*task.record_values())
            self.checkpoints.save_if_due(self.step)
            # A complete epoch has to exhaust its loader, which counts epochs there.
            if self.step == self.total_steps and not self.epoch_is_complete:
                break

    def _rest_of_epoch(self) -> Iterable[Any]:
        """Return the batches of this epoch that training has not taken yet."""
        loader = self.prepared.loader
        if self.step == self.total_steps or self.accelerator.data_position(loader).epoch > self.epoch:
            return ()
        # The data sets of the tasks draw no random numbers, so batches already taken need not be read again.
        return self.accelerator.resumed_batches(loader, replay=False)

    @contextmanager
    def deployed_model(
        self, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> Iterator[nn.Module]:
        """Yield the average of the workers, or its average over steps (`config.weight_average`). Collective.

        Arguments as for `GossipAccelerator.deployed_model`.
        """
        model, deployed_model = self.prepared.model, self.accelerator.deployed_model
        if not self.weight_average.count:
            with deployed_model(model, calibrate, calibration_forward) as deployed:
                yield deployed
            return
        with (
            deployed_model(model) as deployed,
            self.weight_average.swapped_in(deployed),
            deployed_model(model, calibrate, calibration_forward) as calibrated,
        ):
            yield calibrated

    @property
    def epoch_is_complete(self) -> bool:
        """Whether the last step was the last one of an epoch."""
        return self.step % self.steps_per_epoch == 0

    # ---- records

    def log(self, values: dict[str, float]) -> None:
        """Log these values with the epoch, the number of workers and the learning rate."""
        always = {"epoch": self.epoch, "workers": self.accelerator.num_workers, "gossip/lr": self.lr}
        self.accelerator.log({**values, **always}, step=self.step)

    def _record(self, values: dict[str, float], figures: dict[str, str]) -> None:
        """Log the mean training loss since the last record and further values; show the loss and figures in the bar."""
        loss = self.loss.record(self.step)
        self.log({"train/loss": loss, **values})
        shown = {"loss": f"{loss:.3f}", "lr": f"{self.lr:.3g}"}
        for step in self.accelerator.gossip_steps:
            radius = step.metrics().get("radius", math.nan)
            shown |= {"gamma": f"{step.gamma:.3f}", "radius": f"{radius:.3f}"}
        self._bar.set_postfix(shown | figures)

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json that all tasks share."""
        steps = self.accelerator.gossip_steps
        train_seconds, train_cpu_seconds = self.clock.train_seconds
        return {
            "algorithm": self.config.algorithm,
            "workers": self.accelerator.num_workers,
            "topology": steps[0].mixer.topology.name if steps else "all-reduce",
            "epochs": self.epoch + 1,
            "steps": self.step,
            "worker_train_loss": self.loss.last_epoch,
            "radius": self.radius(),
            "gamma": steps[0].gamma if steps else None,
            "seconds": round(self.clock.seconds, 3),
            "train_seconds": round(train_seconds, 3),
            "train_cpu_seconds": round(train_cpu_seconds, 3),
            "data_share": round(self.clock.waited_seconds / train_seconds, 4),
            "seed": self.config.seed,
        }

    def radius(self) -> float:
        """Consensus radius as measured when the workers were last averaged; 0 without gossip."""
        steps = self.accelerator.gossip_steps
        return steps[0].metrics().get("radius", math.nan) if steps else 0.0

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run, its losses and times."""
        position = {"epoch": self.epoch, "step": self.step, "lr": self.lr, "log_bytes": self.output.logged_bytes()}
        return position | self.loss.state_dict() | self.clock.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` saved.

        Raises ConfigError for a checkpoint beyond the last step of this run.
        """
        if state["step"] > self.total_steps:
            raise ConfigError(
                f"resume_from_checkpoint: the checkpoint is of step {state['step']}, but this run has only "
                f"{self.total_steps} steps. Raise num_train_epochs or max_steps."
            )
        self.epoch, self.step, self.lr = state["epoch"], state["step"], state["lr"]
        self.log_bytes = state["log_bytes"]
        self.loss.load_state_dict(state)
        self.clock.load_state_dict(state)
