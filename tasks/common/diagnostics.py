"""Curvature of the training loss, measured during training and for finished runs, for all tasks."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm

from dsgdac_accel import GossipAccelerator, WorkerGroup
from dsgdac_accel.checkpoint import newest_checkpoint, read_manifest, worker_parameters
from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature import (
    CurvatureCost,
    CurvatureReport,
    HessianOperator,
    LossFunction,
    consensus_errors,
    flatten,
    measure_curvature,
    set_parameters,
)
from dsgdac_accel.devices import default_device
from tasks.common.checkpoints import PATTERN
from tasks.common.cli_errors import leave
from tasks.common.config import ConfigError, parse_config
from tasks.common.output_dir import AnyAccelerator, write_json
from tasks.common.training_batches import TrainingBatches

_MOST_PRODUCTS = 10_000
"""Most Hessian products for an estimate. Each iteration of Lanczos also keeps a vector as long as the parameters."""


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig:
    """How to measure the curvature of the training loss at the deployed model, and along the workers' disagreement."""

    every: int | None = None
    """Epochs between measurements; the last epoch is always measured. null never measures."""

    batches: int | None = 32
    """Training batches whose mean loss is measured, drawn by the seed: whole batches, at most as many as there are.
    null takes the entire training set, with a smaller last batch, at a cost that is printed before it starts."""

    batch_size: int = 32
    """Samples per batch. Eigenvalues of models with BatchNorm depend on it, since it is in training mode."""

    augment: bool = False
    """Crop and flip the images as in training. The seed fixes the crops and flips of every batch, so that all
    measurements of a run see the same images."""

    iterations: int = 30
    """Lanczos iterations: 30 find the largest eigenvalue, about 80 also the smallest."""

    probes: int = 50
    """Random directions for the trace and the baseline B; 0 leaves both out."""

    noise_batches: int = 32
    """Batches for the alignment of the gradient noise, at most `batches`; 0 leaves it out."""

    def __post_init__(self) -> None:
        for name, unset in (("every", "never to measure"), ("batches", "for the entire training set")):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1, advice=f"Use null {unset}.")
        check_integer("batch_size", self.batch_size, minimum=1)
        check_integer("iterations", self.iterations, minimum=1, maximum=_MOST_PRODUCTS)
        check_integer("probes", self.probes, minimum=0, maximum=_MOST_PRODUCTS)
        check_integer("noise_batches", self.noise_batches, minimum=0)

    def due(self, epoch: int, last: bool) -> bool:
        """Whether to measure at the end of `epoch` (0-based)."""
        return self.every is not None and (last or (epoch + 1) % self.every == 0)

    def training_batches(self, total: int, seed: int, make: Callable[[int, Tensor], Any]) -> TrainingBatches:
        """The batches to measure on; see `TrainingBatches`."""
        return TrainingBatches(total, self.batch_size, self.batches, seed, make)

    def measure(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: TrainingBatches,
        deltas: Sequence[Any],
        *,
        group: WorkerGroup | None = None,
        **options: Any,
    ) -> CurvatureReport:
        """Call `measure_curvature` with these settings. The first process prints the cost and shows a progress bar."""
        shown = group is None or group.rank == 0
        processes = 1 if group is None else group.size
        with ExitStack() as bars:

            def show(cost: CurvatureCost) -> Callable[[], object]:
                if shown:
                    tqdm.write(self.announcement(batches, cost, processes), file=sys.stdout)
                disable = None if shown else True
                bar = tqdm(total=cost.computations, desc="curvature", unit="batch", leave=False, disable=disable)
                return bars.enter_context(bar).update

            return measure_curvature(
                model,
                loss_fn,
                batches,
                deltas,
                weights=batches.sizes,
                group=group,
                iterations=self.iterations,
                probes=self.probes,
                noise_batches=self.noise_batches,
                progress=show,
                **options,
            )

    def announcement(self, batches: TrainingBatches, cost: CurvatureCost, processes: int) -> str:
        """Data and cost of a measurement in one line."""
        asked = self.batches is not None and self.batches > len(batches)
        return (
            f"curvature: {len(batches):,} batches of {batches.size} ({len(batches.order):,} of {batches.total:,} "
            f"training samples{', augmented' if self.augment else ''}"
            f"{f'; curvature.batches asks for {self.batches:,}, but there are no more' if asked else ''}) "
            f"x {cost.products:,} Hessian products{f' over {processes} processes' if processes > 1 else ''}, "
            f"about {timedelta(seconds=math.ceil(cost.seconds))} (h:mm:ss)"
        )


def refuse_batches_of_one(config: CurvatureConfig, model: nn.Module, total: int) -> None:
    """Raise ConfigError if BatchNorm, which is in training mode, would get a single one of the `total` samples."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    if config.batch_size == 1:
        raise ConfigError(
            "curvature.batch_size: the model has BatchNorm, which needs at least 2 samples in a batch; got 1."
        )
    if config.batches is None and total % config.batch_size == 1:
        raise ConfigError(
            f"curvature.batch_size: the model has BatchNorm, which needs at least 2 samples in a batch, but batches of "
            f"{config.batch_size} leave a last one of 1 of the {total} training samples. Use another batch_size, or "
            f"curvature.batches: {max(1, total // config.batch_size)}."
        )


def measure_in_training(
    config: CurvatureConfig,
    accelerator: AnyAccelerator,
    model: nn.Module,
    deployed: nn.Module,
    loss_fn: LossFunction,
    batches: TrainingBatches,
    seed: int,
) -> CurvatureReport:
    """Measure the curvature inside `with accelerator.deployed_model(model) as deployed`. Collective.

    Args:
        config: how to measure.
        accelerator: accelerator of the run.
        model: the prepared model.
        deployed: the average of the workers, or the average over steps.
        loss_fn: mean loss of a batch.
        batches: the same batches on all workers.
        seed: seed of the random directions.
    """
    deltas, frozen = [], []
    if isinstance(accelerator, GossipAccelerator):
        deltas = _centered(
            [flatten(deployed, errors) for errors in accelerator.consensus_errors(model)], accelerator.group
        )
        frozen = [layer for step in accelerator.gossip_steps for layer in step.watch.frozen]
    return config.measure(deployed, loss_fn, batches, deltas, group=accelerator.group, seed=seed, frozen=frozen)


def _centered(deltas: list[Tensor], group: WorkerGroup) -> list[Tensor]:
    """Return x_i - x_bar (d,) of this process's workers, given their x_i - w for the deployed w. Collective.

    w is not x_bar where the deployed model is an average over steps.
    """
    mean = deltas[0].clone()
    group.all_reduce_mean_(mean, "centering the consensus errors", others=deltas[1:])
    return [delta.sub_(mean) for delta in deltas]


def curvature_metrics(report: CurvatureReport) -> dict[str, float]:
    """A report as metrics to log."""
    return {f"curvature/{name}": value for name, value in report.as_dict().items()}


def curvature_line(report: CurvatureReport) -> str:
    """A report in one line."""
    return f"lambda_1 {report.lambda_1:.4g}  Q {report.Q:.4g}  A {report.A:.3g}  B {report.B:.3g}"


# ---- finished runs


@dataclass(frozen=True, kw_only=True)
class CurvatureOfRun:
    """Settings of the subcommand `curvature RUN`."""

    run: Path
    """Output folder of the run."""

    checkpoint: Path | None = None
    """Checkpoint with the states of all workers; null takes the newest one in the run's folder."""

    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    """How to measure; `every` has no effect."""


@dataclass(frozen=True)
class Measurable:
    """A task's model, and the loss to measure."""

    model: nn.Module
    """Model of the run's architecture, on the device to compute on."""
    load_deployed: Callable[[Path], None]
    """Loads the deployed model from a folder into `model`."""
    loss_fn: LossFunction
    """Mean loss of a batch."""
    batches: TrainingBatches
    averages_steps: bool = False
    """Whether the deployed model is an average over the steps, and not the one of the workers at the last step."""


def measure_run(
    arguments: Sequence[str], make: Callable[[Path, CurvatureConfig], tuple[Measurable, int]], prog: str
) -> None:
    """Measure the curvature of a finished run, print it and write curvature.json into its folder.

    Processes that are started together, by torchrun say, share the batches.

    Args:
        arguments: RUN, then settings of `CurvatureOfRun` as `--key value`.
        make: builds the model and the batches from a run's config.yaml; also returns the seed of the run.
        prog: name of the command in help texts.

    Raises ConfigError, OSError or ValueError if the folder holds no run, or the checkpoint does not fit it.
    """
    words = ["--run", *arguments] if arguments and not arguments[0].startswith("-") else list(arguments)
    asked = parse_config(CurvatureOfRun, words, prog=prog, description=measure_run.__doc__)
    group = _launched_group()
    settings = asked.run / "config.yaml"
    if not settings.is_file():
        raise ConfigError(f"RUN must be the output folder of a run; {asked.run} has no config.yaml.")
    try:
        found, seed = make(settings, asked.curvature)
    except ConfigError as error:
        raise ConfigError(
            f"{asked.run} is a run of another task, or of another version of this task ({error})."
        ) from error
    deployed = asked.run / "deployed"
    checkpoint = asked.checkpoint or newest_checkpoint(asked.run / "checkpoints", PATTERN)
    if checkpoint is not None:
        deltas, mean = consensus_errors(worker_parameters(checkpoint), found.model)
        set_parameters(found.model, mean)
        source = f"{len(deltas)} workers at step {read_manifest(checkpoint).step}, {checkpoint}"
        if found.averages_steps and asked.checkpoint is None and deployed.is_dir():
            found.load_deployed(deployed)
            source += f", at the average over steps in {deployed}"
    else:
        deltas = []
        if not deployed.is_dir():
            raise ConfigError(
                f"{asked.run} has neither checkpoints nor a deployed model. Set save_steps in the run, or let it end."
            )
        found.load_deployed(deployed)
        source = f"{deployed}; without a checkpoint of the workers (save_steps) there is no Q and no A"
    refuse_batches_of_one(asked.curvature, found.model, found.batches.total)
    choose_threads(found, shown=group.rank == 0)
    own_deltas = deltas if group.rank == 0 else []  # every process has read those of all workers
    report = asked.curvature.measure(found.model, found.loss_fn, found.batches, own_deltas, group=group, seed=seed)
    if group.rank == 0:
        _write_report(report, asked.run, source, seed, with_workers=bool(deltas))
    if group.size > 1:
        group.barrier("ending the measurement")
        leave()


def choose_threads(found: Measurable, shown: bool) -> None:
    """Use one CPU thread where that is faster, unless OMP_NUM_THREADS chooses, and say so in one line if `shown`.

    A Hessian product of a small model has thousands of short parallel regions. Where other programs use the cores too,
    the threads of each region spin until the last of them gets a core.
    """
    threads = torch.get_num_threads()
    if threads == 1 or "OMP_NUM_THREADS" in os.environ or next(found.model.parameters()).device.type != "cpu":
        return
    hvp = HessianOperator(found.model, found.loss_fn, [found.batches[0]], graph_memory=0)
    vector = torch.ones(hvp.dim, dtype=hvp.dtype, device="cpu")
    hvp(vector)  # includes what happens only once
    seconds = {}
    for count in (threads, 1):
        torch.set_num_threads(count)
        began, done = time.perf_counter(), 0
        while done == 0 or (done < 5 and time.perf_counter() - began < 1):
            hvp(vector)
            done += 1
        seconds[count] = (time.perf_counter() - began) / done
    if seconds[threads] < seconds[1]:
        torch.set_num_threads(threads)
    if shown:
        chosen = torch.get_num_threads()
        print(
            f"curvature: {chosen} CPU thread{'s' if chosen > 1 else ''} per process, by a trial with {threads} and "
            f"with 1; OMP_NUM_THREADS chooses otherwise"
        )


def _launched_group() -> WorkerGroup:
    """The processes that were started together. It also chooses the GPU of this process."""
    device = default_device()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = Accelerator(cpu=device.type == "cpu").device
    return WorkerGroup(device)


def _write_report(report: CurvatureReport, run: Path, source: str, seed: int, with_workers: bool) -> None:
    values = report.as_dict()
    if not with_workers:
        values |= dict.fromkeys(("Q", "A", "penalty"), math.nan)
    width = max(map(len, values))
    print(f"curvature of {source}")
    print("\n".join(f"  {name:{width}}  {value:.6g}" for name, value in values.items()))
    target = run / "curvature.json"
    write_json(target, {"source": source, "seed": seed, **values})
    print(f"written to {target}", file=sys.stderr)
