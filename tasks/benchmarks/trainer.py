"""Measures what GossipCallback adds to a step of the Hugging Face Trainer, beyond the cost of the mixing core.

    torchrun --nproc_per_node 2 tasks/benchmark.py trainer --rounds 15

Three Trainers of the same model take turns in one launch: `local` without communication, `core` with a callback that
drives the bare mixing core, `callback` with GossipCallback.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from dsgdac_accel import GossipCallback, GossipConfig, Mixer, WorkerGroup, build_topology
from tasks.benchmarks.measurement import in_turns, quartiles
from tasks.common.cli_errors import starting_up
from tasks.common.config import parse_config
from tasks.images.models import build_image_model

VARIANTS = ("local", "core", "callback")
_WARM_UP = 2
"""Steps of each turn that are not timed."""


@dataclass(frozen=True, kw_only=True)
class TrainerBenchmarkConfig:
    """Settings of the Trainer benchmark."""

    model: str = "wrn-16-4"
    """An image model of `tasks/images/models.py`."""

    batch_size: int = 32
    """Images (32x32) per worker and step."""

    rounds: int = 9
    """Turns of each variant."""

    steps: int = 4
    """Timed steps per turn."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0))
    """Topology and timeout."""


class RandomImages(Dataset):
    """Random images for one turn."""

    def __init__(self, length: int) -> None:
        self.images = torch.randn(length, 3, 32, 32, device="cpu")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"images": self.images[row], "labels": row % 10}


class Classifier(nn.Module):
    """An image model that returns the loss that a Trainer needs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = build_image_model(name, 10, 3, (32, 32))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Clock(TrainerCallback):
    """Measures seconds per step after the warm-up of a turn."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == _WARM_UP:
            self.begun = time.perf_counter()
        if state.global_step == state.max_steps:
            self.seconds = (time.perf_counter() - self.begun) / (state.max_steps - _WARM_UP)


class BareCore(TrainerCallback):
    """Drives the exchange of Algorithm 1 and nothing else."""

    def __init__(self, config: GossipConfig, group: WorkerGroup) -> None:
        self.topology = build_topology(str(config.topology), group.size)
        self.group = group

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mixer = Mixer(kwargs["model"].parameters(), self.topology, self.group)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates = self.mixer.consensus_update(1.0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mixer.add(self.updates)
        self.mixer.start_exchange()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mixer.drain()


def take_turn(variant: str, config: TrainerBenchmarkConfig, folder: str, group: WorkerGroup) -> float:
    """Seconds per step of a short training run, on the slowest worker. Collective."""
    torch.manual_seed(0)
    model = Classifier(config.model)
    steps = _WARM_UP + config.steps
    arguments = TrainingArguments(
        folder,
        use_cpu=not torch.accelerator.is_available(),
        per_device_train_batch_size=config.batch_size,
        max_steps=steps,
        optim="sgd",
        learning_rate=1e-3,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        average_tokens_across_devices=False,
    )
    clock = Clock()
    others: list[TrainerCallback] = []
    if variant == "callback":
        others = [GossipCallback(config.gossip, calibrate=False)]
    elif variant == "core":
        others = [BareCore(config.gossip, group)]
    if variant != "callback":
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate then leaves DDP out
    data = RandomImages(steps * config.batch_size * group.size)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[clock, *others])
    group.barrier("starting a turn")
    trainer.train()
    return max(group.all_gather_object(clock.seconds, "comparing step times"))


def main(arguments: Sequence[str]) -> None:
    """Measure and print the table."""
    with starting_up():
        config = parse_config(TrainerBenchmarkConfig, arguments, prog="benchmark.py trainer", description=__doc__)
    use_cpu = not torch.accelerator.is_available()
    with tempfile.TemporaryDirectory() as folder:
        device = TrainingArguments(folder, use_cpu=use_cpu, report_to=[]).device  # creates the process group
        group = WorkerGroup(device, config.gossip.timeout)
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _, name in in_turns(VARIANTS, config.rounds):
            seconds[name].append(take_turn(name, config, folder, group))
        group.barrier("ending the benchmark")
    if group.rank == 0:
        added = statistics.median(a / b for a, b in zip(seconds["callback"], seconds["core"], strict=True))
        for name, times in seconds.items():
            ratio = quartiles(times, seconds["local"])
            print(
                f"{name:9s} {1e3 * statistics.median(times):9.2f} ms   {ratio['median']:.3f} of local "
                f"(quartiles {ratio['q1']:.3f} to {ratio['q3']:.3f})"
            )
        print(f"callback: {added:.3f} of core, {group.size} workers, {config.model}, torch {torch.__version__}")
