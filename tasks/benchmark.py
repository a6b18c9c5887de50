"""What a gossip step costs: variants of the same local step, interleaved in one launch, compared by medians.

    torchrun --nproc_per_node 2 tasks/benchmark.py --config configs/benchmark/wrn.yaml

Rounds take the variants in turn, so that a noisy machine disturbs all alike.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from images.models import build_image_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel import GossipConfig, WorkerGroup
from dsgdac_accel.config import config_from_command_line
from dsgdac_accel.config.checks import check_integer
from dsgdac_accel.step import GossipStep

VARIANTS = ("local", "gossip", "gossip_no_overlap", "gossip_mix_first", "ddp")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """One comparison of step times."""

    model: str = "wrn-16-4"
    """An image model of `tasks/images/models.py`."""

    image_size: int = 32
    """Height and width of the random images."""

    batch_size: int = 32
    """Images per worker and step."""

    variants: tuple[str, ...] = VARIANTS
    """local (no communication, the reference), gossip, gossip_no_overlap, gossip_mix_first, ddp."""

    rounds: int = 9
    """Times that each variant gets its turn."""

    steps: int = 3
    """Steps per turn."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0))
    """Topology and timeout of the gossip variants."""

    output: Path | None = None
    """JSON file for the result; null only prints."""

    def __post_init__(self) -> None:
        for name in ("image_size", "batch_size", "rounds", "steps"):
            check_integer(name, getattr(self, name), minimum=1)
        unknown = [variant for variant in self.variants if variant not in VARIANTS]
        if unknown or "local" not in self.variants:
            raise ValueError(f"variants must include 'local' and be among {', '.join(VARIANTS)}; got {self.variants}.")


@dataclass
class Variant:
    """One way to take a step."""

    step: Callable[[], None]
    settle: Callable[[], None] = lambda: None
    """Finish what is in flight, so that the next variant starts from silence."""
    memory: float = 0.0
    """Receive buffers, in copies of the parameters."""


def build(name: str, config: BenchmarkConfig, group: WorkerGroup) -> Variant:
    """A fresh model, optimizer and step function."""
    torch.manual_seed(0)
    model = build_image_model(config.model, 10, 3, (config.image_size, config.image_size)).to(group.device)
    for parameter in model.parameters():
        group.broadcast_(parameter, "starting the benchmark")
    shape = (config.batch_size, 3, config.image_size, config.image_size)
    images, labels = torch.randn(shape, device=group.device), torch.randint(10, shape[:1], device=group.device)
    if name == "ddp" and group.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    if not name.startswith("gossip"):
        return Variant(lambda: local_step(model, optimizer, images, labels))
    settings = replace(config.gossip, overlap=name != "gossip_no_overlap")
    if name == "gossip_mix_first":
        settings = replace(settings, order="mix_first")
    gossip = GossipStep(optimizer, group, settings)
    held = sum(t.numel() * t.element_size() for slot in gossip.mixer.exchange.received for t in slot)
    return Variant(
        lambda: local_step(model, optimizer, images, labels, gossip),
        gossip.mixer.drain,
        held / gossip.mixer.parameter_bytes,
    )


def local_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, gossip: GossipStep | None = None
) -> None:
    """Forward, backward, update; with `gossip`, one mix around the update."""
    F.cross_entropy(model(images), labels).backward()
    if gossip is None:
        optimizer.step()
    else:
        if gossip.before_local_step():
            optimizer.step()
        gossip.after_local_step()
    optimizer.zero_grad()


def measure(config: BenchmarkConfig, group: WorkerGroup) -> dict[str, list[float]]:
    """Seconds per step of each variant in each round, of the slowest worker."""
    variants = {name: build(name, config, group) for name in config.variants}
    for variant in variants.values():
        for _ in range(2):
            variant.step()
        variant.settle()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(config.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            group.meet("starting a turn")
            begun = time.perf_counter()
            for _ in range(config.steps):
                variants[name].step()
            if group.device.type == "cuda":
                torch.cuda.synchronize()
            mine = (time.perf_counter() - begun) / config.steps
            seconds[name].append(max(group.gather(mine, "comparing step times")))
            variants[name].settle()
    for name, variant in variants.items():
        if variant.memory and group.rank == 0:
            print(f"{name}: receive buffers hold {variant.memory:.3f} copies of the parameters")
    return seconds


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median milliseconds, and the median and quartiles of the ratio to the local step of the same round."""
    table = {}
    for name, times in seconds.items():
        ratios = sorted(mine / local for mine, local in zip(times, seconds["local"], strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        table[name] = {
            "milliseconds": 1e3 * statistics.median(times),
            "ratio": statistics.median(ratios),
            "ratio_q1": quartiles[0],
            "ratio_q3": quartiles[2],
        }
    return table


def main() -> None:
    """Measure, print the table, write the JSON."""
    config = config_from_command_line(BenchmarkConfig, description=__doc__)
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    group = WorkerGroup(accelerator.device, config.gossip.timeout)
    table = summarise(measure(config, group))
    if group.rank == 0:
        model = build_image_model(config.model, 10, 3, (config.image_size, config.image_size))
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{config.model}, {parameters / 1e6:.2f} M parameters, batch {config.batch_size} per worker, "
            f"{group.size} workers, {torch.get_num_threads()} thread(s) each, torch {torch.__version__}"
        )
        for name, row in table.items():
            print(
                f"{name:18s} {row['milliseconds']:9.2f} ms   {row['ratio']:.3f} of local "
                f"(quartiles {row['ratio_q1']:.3f} to {row['ratio_q3']:.3f})"
            )
        if config.output is not None:
            config.output.parent.mkdir(parents=True, exist_ok=True)
            result = {"workers": group.size, "model": config.model, **table}
            config.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
