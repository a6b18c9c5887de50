"""Measures what saving costs training, by turns of some steps with and without one checkpoint in their middle.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tasks/benchmark.py saving --config configs/benchmark/saving.yaml

A turn ends when its checkpoint is complete.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checks import check_integer
from tasks.benchmarks.measurement import in_turns, quartiles
from tasks.benchmarks.report import write_result
from tasks.common.cli_errors import starting_up
from tasks.common.config import parse_config
from tasks.images.models import build_image_model

VARIANTS = ("none", "background", "waiting")
_WARM_UP = 5
"""Steps before the first turn."""


@dataclass(frozen=True, kw_only=True)
class SavingBenchmarkConfig:
    """Settings of the saving benchmark."""

    model: str = "transformer-5-512"
    """An image model of `tasks/images/models.py`."""

    image_size: int = 32
    """Height and width of the random images, in pixels."""

    batch_size: int = 4
    """Images per worker and step."""

    optimizer: Literal["sgd", "adam"] = "adam"
    """Optimizer, which decides what is saved per parameter and worker: two numbers with sgd, three with adam."""

    every: int = 200
    """Steps per turn, and so between two checkpoints."""

    rounds: int = 7
    """Turns of each variant."""

    variants: tuple[str, ...] = ("none", "background")
    """none (no checkpoint, the reference), background (training continues while files are written), waiting (training
    waits for the files)."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0))
    """Topology and timeout."""

    folder: Path | None = None
    """Folder of the checkpoints, which are deleted after their turns; null takes a temporary folder."""

    output: Path | None = None
    """JSON file for the result. null only prints."""

    def __post_init__(self) -> None:
        for name in ("image_size", "batch_size", "every", "rounds"):
            check_integer(name, getattr(self, name), minimum=1)
        unknown = [variant for variant in self.variants if variant not in VARIANTS]
        if unknown or "none" not in self.variants:
            raise ValueError(f"variants must include 'none' and be among {', '.join(VARIANTS)}; got {self.variants}.")


class Training:
    """A training on random images by a GossipAccelerator."""

    def __init__(self, config: SavingBenchmarkConfig) -> None:
        torch.manual_seed(0)
        self.accelerator = GossipAccelerator(gossip=config.gossip, cpu=not torch.accelerator.is_available())
        size = config.image_size
        model = build_image_model(config.model, 10, 3, (size, size))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        if config.optimizer == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
        self.model: nn.Module
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        device = self.accelerator.device
        self.images = torch.randn(config.batch_size, 3, size, size, device=device)
        self.labels = torch.randint(10, (config.batch_size,), device=device)

    def step(self) -> None:
        """Take one optimizer step."""
        self.accelerator.backward(F.cross_entropy(self.model(self.images), self.labels))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, variant: str, steps: int, folder: Path) -> dict[str, float]:
        """Take `steps` steps, with a checkpoint in their middle unless the variant is "none". Collective.

        Returns:
            On the slowest worker: "seconds" of the turn, "stood_still" in which training waited for the checkpoint, and
            "finishing" at the end until it was complete. "processor" is the processor time of all workers, which other
            load on the machine affects less.
        """
        group = self.accelerator.group
        group.barrier("starting a turn")
        begun, worked = time.perf_counter(), time.process_time()
        stood_still = 0.0
        for number in range(steps):
            if number == steps // 2 and variant != "none":
                asked = time.perf_counter()
                self.accelerator.save_state(folder, wait=variant == "waiting")
                stood_still = time.perf_counter() - asked
            self.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        asked = time.perf_counter()
        self.accelerator.finish_saving()
        ended = time.perf_counter()
        mine = (ended - begun, stood_still, ended - asked, time.process_time() - worked)
        *slowest, processors = zip(*group.all_gather_object(mine, "comparing times"), strict=True)
        found = dict(zip(("seconds", "stood_still", "finishing"), map(max, slowest), strict=True))
        return {**found, "processor": sum(processors)}


def measure(config: SavingBenchmarkConfig, training: Training, parent: Path) -> dict[str, list[dict[str, float]]]:
    """The results of `Training.turn` of each variant in each round. Collective."""
    for _ in range(_WARM_UP):
        training.step()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in config.variants}
    for round_, name in in_turns(config.variants, config.rounds):
        folder = parent / f"{name}-{round_}"
        turns[name].append(training.turn(name, config.every, folder))
        if training.accelerator.is_main_process and folder.exists():
            shutil.rmtree(folder)
    return turns


def summarize(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians, and quartiles of the ratio to the turn without saving in the same round.

    >>> turns = {"none": [{"seconds": 2.0, "processor": 4.0}], "background": [{"seconds": 2.1, "processor": 4.1}]}
    >>> row = summarize(turns)["background"]
    >>> row["ratio"], row["ratio_q1"], row["processor_ratio"]
    (1.05, 1.05, 1.025)
    """
    table = {}
    for name, mine in turns.items():
        ratios, processor_ratios = (
            quartiles([turn[key] for turn in mine], [turn[key] for turn in turns["none"]])
            for key in ("seconds", "processor")
        )
        table[name] = {
            **{key: statistics.median(turn[key] for turn in mine) for key in mine[0]},
            "ratio": ratios["median"],
            "ratio_q1": ratios["q1"],
            "ratio_q3": ratios["q3"],
            "processor_ratio": processor_ratios["median"],
        }
    return table


def report(config: SavingBenchmarkConfig, training: Training, table: dict[str, dict[str, float]]) -> None:
    """Print the table and write the JSON file."""
    workers = training.accelerator.num_processes
    print(
        f"{config.model}, {training.parameters / 1e6:.2f} M parameters, {config.optimizer}, batch {config.batch_size} "
        f"per worker, {workers} workers, {torch.get_num_threads()} thread(s) each, one checkpoint every "
        f"{config.every} steps, torch {torch.__version__}"
    )
    for name, row in table.items():
        print(
            f"{name:10s} {1e3 * row['seconds'] / config.every:9.2f} ms a step   {row['ratio']:.3f} of none (quartiles "
            f"{row['ratio_q1']:.3f} to {row['ratio_q3']:.3f})   processor time {row['processor_ratio']:.3f} of none   "
            f"stood still for {row['stood_still']:.3f} s"
        )
    if config.output is not None:
        result = {"workers": workers, "model": config.model, "parameters": training.parameters}
        write_result(config.output, {**result, "optimizer": config.optimizer, "every": config.every, **table})


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table and write the JSON file."""
    with starting_up():
        config = parse_config(SavingBenchmarkConfig, arguments, prog="benchmark.py saving", description=__doc__)
    training = Training(config)
    group = training.accelerator.group
    own = tempfile.mkdtemp(prefix="benchmark-saving-") if config.folder is None and group.rank == 0 else None
    parent = Path(group.all_gather_object(str(config.folder or own), "agreeing on a folder")[0])
    try:
        table = summarize(measure(config, training, parent))
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    if training.accelerator.is_main_process:
        report(config, training, table)
    training.accelerator.end_training()
