"""A training run of the image task."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from dsgdac_accel.curvature import CurvatureReport
from tasks.common.algorithms import SynchronousAccelerator, make_accelerator
from tasks.common.checkpoints import checkpoint_to_resume, step_of_own
from tasks.common.config import ConfigError
from tasks.common.diagnostics import (
    curvature_line,
    curvature_metrics,
    measure_in_training,
    refuse_batches_of_one,
)
from tasks.common.limits import check_steps
from tasks.common.lr_schedules import warmup_cosine
from tasks.common.output_dir import OutputDir, writing_model
from tasks.common.precision import check_precision
from tasks.common.progress import say
from tasks.common.sam import PerWorkerSharpnessAwareBackward, SharpnessAwareBackward
from tasks.common.training_loop import Prepared, TrainingLoop
from tasks.images.augment import CropAndFlip, ModelInputs
from tasks.images.config import CifarConfig
from tasks.images.curvature import curvature_batches, image_loss
from tasks.images.data import ImageTensors, load_configured_data
from tasks.images.evaluation import loss_and_accuracy
from tasks.images.fixed_shards import FixedShards
from tasks.images.models import build_image_model
from tasks.images.saving import save_image_model

TASK = "cifar"
MAY_CHANGE = ("eval_batch_size",)
"""Settings that a resumed run may change, besides those of all tasks."""


class ImageRun:
    """One training run: trains, evaluates the deployed model and writes the output folder.

    Creating it loads the data and builds everything that settings can spoil, before the output folder is touched.

    Args:
        config: settings of the run.

    Raises:
        ConfigError: settings that do not fit each other, the data or the number of workers.
        ValueError, OSError, RuntimeError: data or an output folder that cannot be used.
    """

    def __init__(self, config: CifarConfig) -> None:
        self.config = config
        check_precision(config.mixed_precision)
        set_seed(config.seed)
        self.data = load_configured_data(config)
        steps_per_epoch = len(self.data.train_images) // config.global_batch_size
        if steps_per_epoch == 0:
            raise ConfigError(
                f"global_batch_size: one step needs {config.global_batch_size} images, but the training split has "
                f"{len(self.data.train_images)}. Use a smaller global_batch_size."
            )
        total_steps = config.num_train_epochs * steps_per_epoch
        check_steps(total_steps)
        self.accelerator = make_accelerator(
            config.algorithm,
            config.gossip,
            total_steps,
            steps_per_epoch,
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            dataloader_config=DataLoaderConfiguration(
                split_batches=True, use_seedable_sampler=True, data_seed=config.seed
            ),
            dynamo_backend="inductor" if config.compile else "no",
            log_with=list(config.report_to) or None,
            project_dir=str(config.output_dir),
        )
        self.output = OutputDir(config, self.accelerator)
        self.shards: FixedShards | None = None
        # Each process has a part of the average over steps, so their number must stay.
        any_count = config.weight_average.kind == "none"
        checkpoint = checkpoint_to_resume(config, self.accelerator, TASK, MAY_CHANGE, any_count)
        prepared = Prepared(*self.accelerator.prepare(*self._build(steps_per_epoch, total_steps)))
        self.model, self.optimizer, self.loader, _ = prepared
        self.inputs = ModelInputs(
            self.data.mean,
            self.data.std,
            self.accelerator.device,
            CropAndFlip(config.crop_padding, config.flip),
            config.channels_last,
        )
        self.sharpness_aware = self._make_sharpness_aware()
        self.loop = TrainingLoop(TASK, config, self.accelerator, prepared, self.output, steps_per_epoch, total_steps)
        if checkpoint is not None:
            self.accelerator.load_state(checkpoint)
        self.output.begin(step_of_own(checkpoint, config), self.loop.log_bytes)

    def _build(self, steps_per_epoch: int, total_steps: int) -> tuple[nn.Module, Any, DataLoader, Any]:
        """Model, optimizer, loader and scheduler, to be prepared.

        Raises ConfigError or ValueError for settings that they cannot have.
        """
        config, data = self.config, self.data
        model = build_image_model(config.model, data.num_classes, data.in_channels, data.image_size, config.dropout)
        self._check_batch_size(model)
        if config.crop_padding >= min(data.image_size):
            raise ConfigError(
                f"crop_padding must be below the side of the images, {min(data.image_size)} pixels, or a crop may "
                f"show nothing of them; got {config.crop_padding}."
            )
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out of the stub
        optimizer = _make_optimizer(model, config)
        warmup_steps = round(config.warmup_epochs * steps_per_epoch)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, warmup_steps, total_steps)
        )
        return model, optimizer, self._build_loader(steps_per_epoch), scheduler

    def _build_loader(self, steps_per_epoch: int) -> DataLoader:
        config, accumulation = self.config, self.config.gradient_accumulation_steps
        images = ImageTensors(self.data.train_images, self.data.train_labels)
        size = config.global_batch_size // accumulation
        how: dict[str, Any] = {"collate_fn": dict, "num_workers": config.dataloader_num_workers}
        if self.config.data.shards == "fixed":
            workers = self.accelerator.num_workers
            self.shards = FixedShards(len(images), size, steps_per_epoch * accumulation, workers, config.seed)
            return DataLoader(images, batch_sampler=self.shards, **how)
        # Whole optimizer steps only: left-over micro-batches would make one more, beyond the end of the schedule.
        sampler = RandomSampler(images, num_samples=steps_per_epoch * config.global_batch_size)
        return DataLoader(images, batch_size=size, sampler=sampler, drop_last=True, **how)

    def _make_sharpness_aware(self) -> SharpnessAwareBackward | PerWorkerSharpnessAwareBackward | None:
        if self.config.algorithm != "sam":
            return None
        assert isinstance(self.accelerator, SynchronousAccelerator)
        kind = PerWorkerSharpnessAwareBackward if self.config.sam_per_worker else SharpnessAwareBackward
        return kind(self.accelerator, self.model, self.optimizer, self.config.sam_rho)

    def _check_batch_size(self, model: nn.Module) -> None:
        config, workers = self.config, self.accelerator.num_workers
        shares = workers * config.gradient_accumulation_steps
        if config.global_batch_size % shares:
            raise ConfigError(
                f"global_batch_size must divide evenly: {config.global_batch_size} images over {workers} workers x "
                f"{config.gradient_accumulation_steps} accumulation steps. Use a multiple of {shares}."
            )
        if config.global_batch_size == shares and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
            raise ConfigError(
                f"global_batch_size: BatchNorm of model {config.model!r} needs at least 2 images per worker and "
                f"accumulation step, and {config.global_batch_size} in all give it 1. Use {2 * shares} or more."
            )
        refuse_batches_of_one(config.curvature, model, len(self.data.train_images))

    def described(self) -> str:
        """Algorithm, data, workers and steps in one line."""
        workers, step = self.accelerator.num_workers, self.loop.step
        return (
            f"{self.config.algorithm} on {self.data.source}: {len(self.data.train_images)} training images, "
            f"{workers} worker{'s' if workers > 1 else ''}, {self.loop.total_steps} steps"
            f"{f', resumed at step {step}' if step else ''}"
        )

    def train(self) -> None:
        """Train all epochs; evaluate the deployed model every `eval_every` epochs and after the last one."""
        self.loop.run(self)

    # ---- what the training loop calls

    def begin_epoch(self) -> None:
        """Choose the order of fixed shards; torch's sampler follows the loader."""
        if self.shards is not None:
            self.shards.set_epoch(self.loop.epoch)

    def backward(self, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        """Compute the gradients of a micro-batch, for `sam` at the point it ascends to. Returns (mean loss, 1)."""
        inputs, labels = self.inputs.augmented(batch["images"]), batch["labels"]
        if self.sharpness_aware is None:
            loss = image_loss(self.model, (inputs, labels))
            self.accelerator.backward(loss)
            return loss, 1.0
        if isinstance(self.sharpness_aware, SharpnessAwareBackward):
            return self.sharpness_aware(partial(image_loss, self.model, (inputs, labels))), 1.0
        workers = self.accelerator.workers_per_process
        parts = zip(inputs.chunk(workers), labels.chunk(workers), strict=True)
        return self.sharpness_aware([partial(image_loss, self.sharpness_aware.bare, part) for part in parts]), 1.0

    def after_step(self) -> None:
        """Nothing to do."""

    def record_values(self) -> tuple[dict[str, float], dict[str, str]]:
        """Nothing beside the loss."""
        return {}, {}

    def end_epoch(self) -> None:
        """Nothing to do."""

    def evaluate(self, done: bool, measure_curvature: bool) -> None:
        """Log test loss and accuracy of the deployed model; when done, save it and write the summary."""
        loop, data, report = self.loop, self.data, None
        calibrate = self.loader if self.config.calibrate else None
        with loop.deployed_model(calibrate, self._calibration_forward) as deployed:
            test_loss, accuracy = self._measure(deployed, data.test_images, data.test_labels)
            values = {"test/loss": test_loss, "test/accuracy": accuracy}
            if len(data.validation_labels):
                found = self._measure(deployed, data.validation_images, data.validation_labels)
                values |= dict(zip(("validation/loss", "validation/accuracy"), found, strict=True))
            if measure_curvature:
                report = self._curvature(deployed)
                values |= curvature_metrics(report)
            if done:
                if self.accelerator.is_main_process:
                    self._save_model(deployed)
                values["train/deployed_loss"], _ = self._measure(deployed, data.train_images, data.train_labels)
        loop.log(values)
        say(
            self.accelerator,
            f"epoch {loop.epoch + 1}/{self.config.num_train_epochs}  workers' train loss {loop.loss.last_epoch:.4f}  "
            f"deployed test loss {test_loss:.4f}  test accuracy {accuracy:.2%}  radius {loop.radius():.4g}"
            f"{f'  {curvature_line(report)}' if report else ''}",
        )
        if done:
            if self.accelerator.is_main_process:
                self.output.write_summary(self._summary(values, report))
            # If the main worker is lost while it writes, the next one evaluates and writes again.
            self.accelerator.group.barrier("writing the results")

    def _curvature(self, deployed: nn.Module) -> CurvatureReport:
        """Curvature of the training loss at the deployed model. Collective."""
        config = self.config
        batches = curvature_batches(self.data, config.curvature, config.seed, self.inputs)
        return measure_in_training(
            config.curvature, self.accelerator, self.model, deployed, image_loss, batches, config.seed
        )

    def _calibration_forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(self.inputs.augmented(batch["images"]))

    def _measure(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
        what = f"evaluating at step {self.loop.step}"
        bare = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        return loss_and_accuracy(
            bare, images, labels, self.inputs, self.accelerator.group, self.config.eval_batch_size, what
        )

    def _save_model(self, deployed: nn.Module) -> None:
        bare = self.accelerator.unwrap_model(deployed, keep_torch_compile=False)
        folder = self.config.output_dir / "deployed"
        with writing_model(folder):
            save_image_model(bare, folder, self.config.model, self.config.dropout, self.data)

    def _summary(self, values: dict[str, float], report: CurvatureReport | None) -> dict[str, Any]:
        return {
            **self.loop.summary(),
            "model": self.config.model,
            "data": self.data.source,
            "train_loss": values["train/deployed_loss"],
            "test_loss": values["test/loss"],
            "test_accuracy": values["test/accuracy"],
            **{key.replace("/", "_"): value for key, value in values.items() if key.startswith("validation/")},
            **({"curvature": report.as_dict()} if report else {}),
        }


def _make_optimizer(model: nn.Module, config: CifarConfig) -> torch.optim.Optimizer:
    parameters: Any = _decayed_and_others(model) if config.no_decay else model.parameters()
    if "adam" in config.algorithm:
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        return kind(
            parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        parameters, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )


def _decayed_and_others(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: those with weight decay, and those with one dimension, as biases and norms have."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
