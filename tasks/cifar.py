"""Image classification by gossip or a baseline: `accelerate launch tasks/cifar.py --config configs/digits.yaml`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from tqdm.auto import tqdm

from dsgdac_accel.curvature import CurvatureReport
from tasks.common.algorithms import make_accelerator
from tasks.common.checkpoints import Checkpoints, checkpoint_to_resume, step_of_own
from tasks.common.cli_errors import starting_up
from tasks.common.config import ConfigError, parse_config
from tasks.common.diagnostics import (
    CurvatureConfig,
    Measurable,
    described,
    logged,
    measure_in_training,
    measure_run,
    refuse_batches_of_one,
)
from tasks.common.output_dir import RunFolder, lost_workers, writing_model
from tasks.common.progress import Clock, WaitingTime, figures, progress_bar, require_finite, rest_of_epoch
from tasks.common.runner import run_task
from tasks.common.sam import SharpnessAwareBackward
from tasks.images.augment import CropAndFlip, normalise
from tasks.images.config import CifarConfig
from tasks.images.data import ImageData, ImageTensors, collate, load_image_data, with_label_noise
from tasks.images.models import build_image_model, load_image_model, save_image_model

TASK = "cifar"
MAY_CHANGE = ("eval_batch_size",)


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Factor on the peak rate at 0-based `step`: linear to 1 over the warm-up (never 0), then cosine towards 0.

    >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))


class ImageRun:
    """One training run: builds everything, trains, evaluates the deployed model, writes the run folder."""

    def __init__(self, config: CifarConfig) -> None:
        self.config = config
        set_seed(config.seed)
        self.data = _load_data(config)
        self.steps_per_epoch = len(self.data.train_images) // config.global_batch_size
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"global_batch_size: one step needs {config.global_batch_size} images, but the training split has "
                f"{len(self.data.train_images)}. Use a smaller global_batch_size."
            )
        self.total_steps = config.num_train_epochs * self.steps_per_epoch
        self.accelerator = make_accelerator(
            config.algorithm,
            config.gossip,
            self.total_steps,
            self.steps_per_epoch,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            dataloader_config=DataLoaderConfiguration(
                split_batches=True, use_seedable_sampler=True, data_seed=config.seed
            ),
            dynamo_backend="inductor" if config.compile else "no",
            log_with=list(config.report_to) or None,
            project_dir=str(config.output_dir),
        )
        self._check_batch()
        checkpoint = checkpoint_to_resume(config, self.accelerator, TASK, MAY_CHANGE, any_count=True)
        self.folder = RunFolder(
            config.output_dir,
            config,
            self.accelerator,
            trackers=bool(config.report_to),
            resumed_at=step_of_own(checkpoint, config),
        )
        self._build()
        self.epoch = self.step = 0
        self.lr = 0.0  # that the last step used
        self.losses: list[Tensor] = []  # of this epoch, by micro-batch
        self.logged = 0  # how many of them
        self.worker_loss = math.nan  # of the workers, mean over the last epoch
        self.waiting = WaitingTime()
        self.train_seconds = 0.0
        self.clock = Clock()
        self.checkpoints = Checkpoints(config, self.accelerator, TASK, self.total_steps)
        self.accelerator.register_for_checkpointing(self)
        if checkpoint is not None:
            self.accelerator.load_state(checkpoint)

    def _check_batch(self) -> None:
        shares = self.accelerator.num_workers * self.config.gradient_accumulation_steps
        if self.config.global_batch_size % shares:
            raise ConfigError(
                f"global_batch_size must divide evenly: {self.config.global_batch_size} images over "
                f"{self.accelerator.num_workers} workers x {self.config.gradient_accumulation_steps} accumulation "
                f"steps. Use a multiple of {shares}."
            )

    def _build(self) -> None:
        config, data = self.config, self.data
        model = build_image_model(config.model, data.num_classes, data.in_channels, data.image_size, config.dropout)
        shares = self.accelerator.num_workers * config.gradient_accumulation_steps
        if config.global_batch_size == shares and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
            raise ConfigError(
                f"batch_size: BatchNorm of model {config.model!r} needs at least 2 images per worker and accumulation "
                f"step; {config.global_batch_size} in all gives it 1. Use {2 * shares} or more."
            )
        refuse_batches_of_one(config.curvature, model)
        if config.crop_padding >= min(data.image_size):
            raise ConfigError(
                f"crop_padding must be below the side of the images, {min(data.image_size)} pixels, or a crop may hold "
                f"nothing of them; got {config.crop_padding}."
            )
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out of the stub
        optimizer = _optimizer(model, config)
        warmup_steps = round(config.warmup_epochs * self.steps_per_epoch)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, warmup_steps, self.total_steps)
        )
        images = ImageTensors(data.train_images, data.train_labels)
        loader = DataLoader(
            images,
            batch_size=config.global_batch_size // config.gradient_accumulation_steps,
            # Whole optimizer steps only: left-over micro-batches would make one more, beyond the end of the schedule.
            sampler=RandomSampler(images, num_samples=self.steps_per_epoch * config.global_batch_size),
            drop_last=True,
            collate_fn=collate,
            num_workers=config.dataloader_num_workers,
        )
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.augment = CropAndFlip(config.crop_padding, config.flip)
        self.sharpness_aware = (
            SharpnessAwareBackward(self.accelerator, self.model, self.optimizer, config.sam_rho)
            if config.algorithm == "sam"
            else None
        )

    def described(self) -> str:
        """Algorithm, data and steps, in words."""
        workers = self.accelerator.num_workers
        return (
            f"{self.config.algorithm} on {self.data.source}: {len(self.data.train_images)} training images, "
            f"{workers} worker{'s' if workers > 1 else ''}, {self.total_steps} steps"
            f"{f', resumed at step {self.step}' if self.step else ''}"
        )

    # ---- what a checkpoint keeps of the run itself

    def state_dict(self) -> dict[str, Any]:
        """How far the run is."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr,
            "losses": torch.stack(self.losses),
            "logged": self.logged,
            "log_bytes": self.folder.logged_bytes(),
            "waited": self.waiting.seconds,
            "train_seconds": self.train_seconds + self.clock.lap(),
            "seconds": self.clock.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be there again."""
        self.epoch, self.step, self.lr = state["epoch"], state["step"], state["lr"]
        self.losses, self.logged = list(state["losses"].to(self.accelerator.device)), state["logged"]
        self.folder.cut_log_back(state["log_bytes"])
        self.waiting.seconds, self.train_seconds = state["waited"], state["train_seconds"]
        self.clock = Clock(state["seconds"])

    # ---- training

    def train(self) -> None:
        """All epochs, with an evaluation of the deployed model every `eval_every` and after the last."""
        bar = progress_bar(self.accelerator, self.step, self.total_steps)
        for epoch in range(self.epoch, self.config.num_train_epochs):
            self.epoch = epoch
            self._train_epoch(epoch, bar)
            last = epoch + 1 == self.config.num_train_epochs
            measure = self.config.curvature.due(epoch, last)
            if last or measure or (epoch + 1) % self.config.eval_every == 0:
                self.accelerator.group.retry_after_loss(lambda: self._evaluate(epoch, last, measure))  # noqa: B023  # called at once
            self.losses, self.logged = [], 0
        bar.close()
        self.checkpoints.finish()

    def _train_epoch(self, epoch: int, bar: Any) -> None:
        self.model.train()
        self.clock.start_lap()
        for batch in self.waiting.batches(rest_of_epoch(self.accelerator, self.loader, epoch)):
            with self.accelerator.accumulate(self.model):
                loss = self._backward(self._inputs(batch["images"], train=True), batch["labels"])
                self.lr = self.optimizer.param_groups[0]["lr"]
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss)
            if not self.accelerator.sync_gradients:
                continue
            self.step += 1
            self.accelerator.group.steps_taken = self.step  # which errors name; gossip counts by itself
            bar.update()
            if self.step % self.config.logging_steps == 0:
                self._log_training(self.losses[self.logged :], epoch, bar)
                self.logged = len(self.losses)
            self.checkpoints.save_if_due(self.step)
        self.train_seconds += self.clock.end_lap()
        self.worker_loss = self._mean_over_workers(self.losses)
        require_finite(self.accelerator, self.worker_loss, self.step)

    def _backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Leave the gradient that the algorithm steps by; returns the loss of the micro-batch, shape ()."""

        def compute_loss() -> Tensor:
            return F.cross_entropy(self.model(inputs), labels)

        if self.sharpness_aware is not None:
            return self.sharpness_aware(compute_loss)
        loss = compute_loss()
        self.accelerator.backward(loss)
        return loss.detach()

    def _mean_over_workers(self, losses: list[Tensor]) -> float:
        shares = self.accelerator.group.all_gather_object(
            float(torch.stack(losses).mean()), f"logging step {self.step}"
        )
        return sum(shares) / len(shares)  # all workers see equally many images

    def _inputs(self, images: Tensor, train: bool) -> Tensor:
        images = images.to(self.accelerator.device, non_blocking=True)
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        images = normalise(images, self.data.mean, self.data.std)
        return self.augment(images) if train else images

    def _log_training(self, losses: list[Tensor], epoch: int, bar: Any) -> None:
        loss = self._mean_over_workers(losses)
        self.accelerator.log({"train/loss": loss, "epoch": epoch, "gossip/lr": self.lr}, step=self.step)
        bar.set_postfix(figures(self.accelerator, loss, self.lr))

    # ---- evaluation of the deployed model

    def _evaluate(self, epoch: int, last: bool, measure_curvature: bool) -> None:
        report = None
        calibrate = self.loader if self.config.calibrate else None
        with self.accelerator.deployed_model(self.model, calibrate, self._calibration_forward) as deployed:
            test_loss, accuracy = self._measure(deployed, self.data.test_images, self.data.test_labels)
            values = {"epoch": epoch, "test/loss": test_loss, "test/accuracy": accuracy, "gossip/lr": self.lr}
            if measure_curvature:
                report = self._curvature(deployed)
                values |= logged(report)
            if last:
                values["train/deployed_loss"], _ = self._measure(
                    deployed, self.data.train_images, self.data.train_labels
                )
                if self.accelerator.is_main_process:
                    self._save_model(deployed)
        self.accelerator.log(values, step=self.step)
        radius = [step.metrics()["radius"] for step in self.accelerator.gossip_steps] or [0.0]  # measured just now
        if self.accelerator.is_main_process:
            tqdm.write(
                f"epoch {epoch + 1}/{self.config.num_train_epochs}  workers' train loss {self.worker_loss:.4f}  "
                f"deployed test loss {test_loss:.4f}  test accuracy {accuracy:.2%}  radius {radius[0]:.4g}"
                f"{f'  {described(report)}' if report else ''}",
                file=sys.stdout,
            )
            if last:
                summary = self._summary(values, radius[0], self.clock.seconds()) | lost_workers(self.accelerator)
                self.folder.write_summary(summary | ({"curvature": report.as_dict()} if report else {}))
        if last:
            self.accelerator.group.barrier("writing the results")  # if the one that writes is lost, another does it all

    def _curvature(self, deployed: nn.Module) -> CurvatureReport:
        """Of the training loss, on images as they are (no crops, no flips), at the deployed model. Collective."""
        config = self.config
        rows = config.curvature.rows(len(self.data.train_images), config.seed)
        batches = curvature_batches(self.data, rows, self._inputs_of_evaluation)
        return measure_in_training(
            config.curvature, self.accelerator, self.model, deployed, image_loss, batches, config.seed
        )

    def _inputs_of_evaluation(self, images: Tensor) -> Tensor:
        return self._inputs(images, train=False)

    def _calibration_forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(self._inputs(batch["images"], train=True))

    @torch.no_grad()
    def _measure(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy over all images, each seen by exactly one worker."""
        group, size = self.accelerator.group, self.config.eval_batch_size
        loss = correct = 0.0
        mine = torch.arange(group.rank, len(images), group.size)
        for rows in mine.split(size):
            logits = model(self._inputs(images[rows], train=False)).float()
            wanted = labels[rows].to(logits.device)
            loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
            correct += float((logits.argmax(1) == wanted).sum())
        shares = group.all_gather_object((loss, correct), f"evaluating at step {self.step}")
        return sum(share[0] for share in shares) / len(images), sum(share[1] for share in shares) / len(images)

    def _save_model(self, deployed: nn.Module) -> None:
        inner = self.accelerator.unwrap_model(deployed, keep_torch_compile=False)
        folder = self.config.output_dir / "deployed"
        with writing_model(folder):
            save_image_model(inner, folder, self.config.model, self.config.dropout, self.data)

    def _summary(self, values: dict[str, Any], radius: float, seconds: float) -> dict[str, Any]:
        steps = self.accelerator.gossip_steps
        return {
            "algorithm": self.config.algorithm,
            "workers": self.accelerator.num_workers,
            "topology": steps[0].mixer.topology.name if steps else "all-reduce",
            "model": self.config.model,
            "data": self.data.source,
            "epochs": self.config.num_train_epochs,
            "steps": self.step,
            "train_loss": values["train/deployed_loss"],
            "worker_train_loss": self.worker_loss,
            "test_loss": values["test/loss"],
            "test_accuracy": values["test/accuracy"],
            "radius": radius,
            "gamma": steps[0].gamma if steps else None,
            "seconds": round(seconds, 3),
            "train_seconds": round(self.train_seconds, 3),
            "data_share": round(self.waiting.seconds / self.train_seconds, 4),
            "seed": self.config.seed,
        }


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch (inputs, labels), shape ()."""
    return F.cross_entropy(model(batch[0]), batch[1])


def curvature_batches(
    data: ImageData, rows: Sequence[Sequence[int]], inputs_of: Callable[[Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Training images of these rows as model inputs, with their labels."""
    batches = []
    for row in map(torch.tensor, rows):
        inputs = inputs_of(data.train_images[row])
        batches.append((inputs, data.train_labels[row].to(inputs.device)))
    return batches


def _to_measure(settings: Path, curvature: CurvatureConfig) -> tuple[Measurable, int]:
    """The model and training batches of a run, for `curvature RUN`."""
    config = parse_config(CifarConfig, ["--config", str(settings)])
    data = _load_data(config)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = build_image_model(config.model, data.num_classes, data.in_channels, data.image_size, config.dropout)
    model.to(device)
    batches = curvature_batches(
        data,
        curvature.rows(len(data.train_images), config.seed),
        lambda images: normalise(images.to(device), data.mean, data.std),
    )

    def load_deployed(folder: Path) -> None:
        model.load_state_dict(load_image_model(folder)[0].state_dict())

    return Measurable(model, load_deployed, image_loss, batches), config.seed


def _optimizer(model: nn.Module, config: CifarConfig) -> torch.optim.Optimizer:
    if "adam" in config.algorithm:
        return torch.optim.Adam(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )


def _load_data(config: CifarConfig) -> ImageData:
    """The images that the configuration asks for, with noise in the training labels."""
    arguments = {field.name: getattr(config.data, field.name) for field in fields(config.data)}
    draw = arguments.pop("draw_by_seed")
    data = load_image_data(**arguments, draw=draw, seed=config.seed if draw else 0)
    labels = with_label_noise(data.train_labels, data.num_classes, config.label_noise, config.seed)
    return replace(data, train_labels=labels)


def main() -> None:
    """Train, or measure the `curvature` of a run."""
    if sys.argv[1:2] == ["curvature"]:
        with starting_up():
            measure_run(sys.argv[2:], _to_measure, "cifar.py curvature")
        return
    run_task(ImageRun, CifarConfig, "digits", ("digits*", "cifar*"), __doc__)


if __name__ == "__main__":
    main()
