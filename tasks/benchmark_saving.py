"""What saving costs training: turns of so many steps with one checkpoint in their middle, and without, interleaved.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tasks/benchmark_saving.py --config configs/benchmark/saving.yaml

Variants take turns, so that a noisy machine disturbs all alike. A turn ends when its checkpoint is complete.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checks import check_integer
from tasks.common.config import config_from_command_line
from tasks.images.models import build_image_model

VARIANTS = ("none", "background", "waiting")
_WARM_UP = 5  # steps before the first turn


@dataclass(frozen=True, kw_only=True)
class SavingBenchmarkConfig:
    """One comparison of training times."""

    model: str = "transformer-5-512"
    """An image model of `tasks/images/models.py`."""

    image_size: int = 32
    """Height and width of the random images, in pixels."""

    batch_size: int = 4
    """Images per worker and step."""

    optimizer: Literal["sgd", "adam"] = "adam"
    """sgd saves two numbers per parameter and worker (with its momentum), adam three (with its two moments)."""

    every: int = 200
    """Steps per turn, which is also the distance between checkpoints."""

    rounds: int = 7
    """Turns of each variant."""

    variants: tuple[str, ...] = ("none", "background")
    """none (the reference), background (training goes on while files are written), waiting (training waits)."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0))
    """Topology and timeout."""

    folder: Path | None = None
    """Folder for the checkpoints, each deleted after its turn. null takes a temporary folder."""

    output: Path | None = None
    """JSON file for the result. null only prints."""

    def __post_init__(self) -> None:
        for name in ("image_size", "batch_size", "every", "rounds"):
            check_integer(name, getattr(self, name), minimum=1)
        unknown = [variant for variant in self.variants if variant not in VARIANTS]
        if unknown or "none" not in self.variants:
            raise ValueError(f"variants must include 'none' and be among {', '.join(VARIANTS)}; got {self.variants}.")


class Training:
    """A model that takes steps on random images, prepared by a GossipAccelerator."""

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
        """Forward, backward, update and mix."""
        self.accelerator.backward(F.cross_entropy(self.model(self.images), self.labels))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, variant: str, steps: int, folder: Path) -> dict[str, float]:
        """Seconds of `steps` steps with a checkpoint in their middle, and those in which training stood still for it.

        "finishing" are the seconds at the end, until the checkpoint is complete; "processor" those that the processors
        of all workers were at work, which other users of the machine disturb less.
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
    """What each variant took in each round, on the slowest worker."""
    for _ in range(_WARM_UP):
        training.step()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in config.variants}
    names = list(config.variants)
    for round_ in range(config.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            folder = parent / f"{name}-{round_}"
            turns[name].append(training.turn(name, config.every, folder))
            if training.accelerator.is_main_process and folder.exists():
                shutil.rmtree(folder)
    return turns


def summarise(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median seconds, and the median and quartiles of the ratio to the turn without saving of the same round.

    >>> turns = {"none": [{"seconds": 2.0, "processor": 4.0}], "background": [{"seconds": 2.1, "processor": 4.1}]}
    >>> row = summarise(turns)["background"]
    >>> row["ratio"], row["ratio_q1"], row["processor_ratio"]
    (1.05, 1.05, 1.025)
    """
    table = {}
    for name, mine in turns.items():
        pairs = list(zip(mine, turns["none"], strict=True))
        ratios = sorted(one["seconds"] / none["seconds"] for one, none in pairs)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        table[name] = {
            **{key: statistics.median(turn[key] for turn in mine) for key in mine[0]},
            "ratio": statistics.median(ratios),
            "ratio_q1": quartiles[0],
            "ratio_q3": quartiles[2],
            "processor_ratio": statistics.median(one["processor"] / none["processor"] for one, none in pairs),
        }
    return table


def report(config: SavingBenchmarkConfig, training: Training, table: dict[str, dict[str, float]]) -> None:
    """Print the table and write the JSON."""
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
        config.output.parent.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"workers": workers, "model": config.model, "parameters": training.parameters}
        result |= {"optimizer": config.optimizer, "every": config.every, **table}
        config.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print the table, write the JSON."""
    config = config_from_command_line(SavingBenchmarkConfig, description=__doc__)
    training = Training(config)
    group = training.accelerator.group
    own = tempfile.mkdtemp(prefix="benchmark-saving-") if config.folder is None and group.rank == 0 else None
    parent = Path(group.all_gather_object(str(config.folder or own), "agreeing on a folder")[0])
    try:
        table = summarise(measure(config, training, parent))
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    if training.accelerator.is_main_process:
        report(config, training, table)
    training.accelerator.end_training()


if __name__ == "__main__":
    main()
