"""Measures several workers in one process against one worker that accumulates gradients over the same micro-batches.

    OMP_NUM_THREADS=1 python tasks/benchmark.py virtual --config configs/benchmark/virtual.yaml

Times are processor time on a CPU, which other load on the machine affects least, and wall-clock time on a GPU.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checks import check_integer
from tasks.benchmarks.measurement import in_turns, quartiles
from tasks.benchmarks.report import write_result
from tasks.benchmarks.training import Training, this_device
from tasks.common.cli_errors import starting_up
from tasks.common.config import parse_config
from tasks.images.models import build_image_model

VARIANTS = ("accumulation", "separate", "virtual", "vmap")
_WARM_UP = 2
"""Steps before the measurement, after which virtual and vmap must have trained alike."""
_AGREE = 1e-3


@dataclass(frozen=True, kw_only=True)
class VirtualBenchmarkConfig:
    """Settings of the benchmark of virtual workers."""

    cases: tuple[str, ...] = ("mlp sgd 64",)
    """Trainings to measure: '<model> <optimizer> <images per worker>', with an image model of
    `tasks/images/models.py`."""

    image_size: int = 32
    """Height and width of the random images, in pixels."""

    rounds: int = 15
    """Turns of each variant."""

    steps: int = 2
    """Steps per turn."""

    variants: tuple[str, ...] = VARIANTS
    """accumulation (the reference), separate (one model and optimizer per worker, without this library: the cost of the
    work itself), virtual (workers_per_process), vmap (all replicas in one call, with stacked parameters)."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0, power=0, workers_per_process=8))
    """Workers of the process, as many as micro-batches of the accumulating worker. vmap mixes by the one-peer ring with
    gamma 1, so `virtual` has to do the same if both are measured."""

    output: Path | None = None
    """JSON file for the result. null only prints."""

    def __post_init__(self) -> None:
        for name in ("image_size", "rounds", "steps"):
            check_integer(name, getattr(self, name), minimum=1)
        for case in self.cases:
            Training.of(case)
        if self.workers % 2:
            raise ValueError(f"workers_per_process must be even, since workers mix in pairs; got {self.workers}.")
        unknown = [variant for variant in self.variants if variant not in VARIANTS]
        if unknown or "accumulation" not in self.variants:
            raise ValueError(
                f"variants must include 'accumulation' and be among {', '.join(VARIANTS)}; got {self.variants}."
            )

    @property
    def workers(self) -> int:
        """Workers of the process."""
        return self.gossip.workers_per_process


@dataclass
class Variant:
    """One way to train on the micro-batches of all workers."""

    step: Callable[[], None]
    parameters: Callable[[], list[Tensor]] = list
    """Returns the parameters of all workers, one worker after another, for variants that are compared."""


class Case:
    """Random data, and the variants that train on it."""

    def __init__(self, config: VirtualBenchmarkConfig, case: Training, device: torch.device) -> None:
        self.config, self.case, self.device = config, case, device
        torch.manual_seed(0)
        size = config.image_size
        self.model = build_image_model(case.model, 10, 3, (size, size)).to(device)
        count = config.workers * case.batch_size
        self.images = torch.randn(count, 3, size, size, device=device)
        self.labels = torch.randint(10, (count,), device=device)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        size = self.case.batch_size
        return list(zip(self.images.split(size), self.labels.split(size), strict=True))

    def accumulation(self) -> Variant:
        """One model, one update for all micro-batches."""
        model, parts = copy.deepcopy(self.model), self.parts()
        optimizer = self.case.make_optimizer(model.parameters())

        def step() -> None:
            for images, labels in parts:
                (F.cross_entropy(model(images), labels) / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Variant(step)

    def separate(self) -> Variant:
        """Independent models, each with its optimizer."""
        models = [copy.deepcopy(self.model) for _ in range(self.config.workers)]
        optimizers = [self.case.make_optimizer(model.parameters()) for model in models]
        parts = self.parts()

        def step() -> None:
            for model, optimizer, (images, labels) in zip(models, optimizers, parts, strict=True):
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()

        return Variant(step)

    def virtual(self, accelerator: GossipAccelerator) -> Variant:
        """`VirtualWorkers`, as `GossipAccelerator.prepare` makes them."""
        model = copy.deepcopy(self.model)
        model, optimizer = accelerator.prepare(model, self.case.make_optimizer(model.parameters()))

        def step() -> None:
            accelerator.backward(F.cross_entropy(model(self.images), self.labels))
            optimizer.step()
            optimizer.zero_grad()

        return Variant(step, lambda: [p.detach() for replica in model.replicas for p in replica.parameters()])

    def vmap(self) -> Variant:
        """Replicas as slices of stacked parameters (workers, ...); one vectorized call computes all gradients."""
        count = self.config.workers
        model = copy.deepcopy(self.model)
        stacked, buffers = stack_module_state([copy.deepcopy(model) for _ in range(count)])
        optimizer = self.case.make_optimizer(stacked.values())
        images, labels = self.images.unflatten(0, (count, -1)), self.labels.unflatten(0, (count, -1))

        def loss(parameters: dict, state: dict, own_images: Tensor, own_labels: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, (parameters, state), own_images), own_labels)

        gradients = vmap(grad(loss), randomness="different")
        workers = torch.arange(count, device=self.device)
        pairs = workers ^ 1  # 0 and 1, 2 and 3, ...; at every other step 1 and 2, 3 and 4, ...
        partners = pairs, (((workers + 1) % count ^ 1) - 1) % count
        taken = 0

        def step() -> None:
            nonlocal taken
            found = gradients({name: p.detach() for name, p in stacked.items()}, buffers, images, labels)
            partner = partners[taken % 2]
            taken += 1
            with torch.no_grad():
                # Like the library, take the difference before the local step and add it after.
                updates = {name: p[partner].sub_(p) for name, p in stacked.items()}
                for name, p in stacked.items():
                    p.grad = found[name]
                optimizer.step()
                for name, p in stacked.items():
                    p.add_(updates[name], alpha=0.5)

        return Variant(step, lambda: [p[w].detach() for w in range(count) for p in stacked.values()])


def measure(case: Case) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds per step of each variant in each round, and for variants that were left out the reason."""
    accelerator = GossipAccelerator(gossip=case.config.gossip, cpu=case.device.type == "cpu")
    makers: dict[str, Callable[[], Variant]] = {
        "accumulation": case.accumulation,
        "separate": case.separate,
        "virtual": lambda: case.virtual(accelerator),
        "vmap": case.vmap,
    }
    variants, left_out = {}, {}
    for name in case.config.variants:
        try:
            variants[name] = makers[name]()
            for _ in range(_WARM_UP):
                variants[name].step()
        except RuntimeError as error:
            if name != "vmap":
                raise
            variants.pop(name, None)  # not every model can be vectorized
            left_out[name] = str(error).split("\n")[0]
    if {"virtual", "vmap"} <= variants.keys():
        require_agreement(variants["virtual"].parameters(), variants["vmap"].parameters())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _, name in in_turns(list(variants), case.config.rounds):
        begun = _now(case.device)
        for _ in range(case.config.steps):
            variants[name].step()
        seconds[name].append((_now(case.device) - begun) / case.config.steps)
    accelerator.free_memory()
    return seconds, left_out


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def require_agreement(virtual: list[Tensor], stacked: list[Tensor]) -> None:
    """Raise RuntimeError unless two variants ended with the same parameters."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(virtual, stacked, strict=True)) ** 0.5
    whole = sum(float(a.square().sum()) for a in virtual) ** 0.5
    if difference > _AGREE * whole:
        raise RuntimeError(f"virtual and vmap must train alike; their parameters differ by {difference / whole:.1e}.")


def summarize(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median milliseconds, and quartiles of the ratio to accumulation in the same round.

    >>> summarize({"accumulation": [2.0, 4.0], "virtual": [2.0, 5.0]})["virtual"]["ratio"]
    1.125
    """
    table = {}
    for name, mine in seconds.items():
        ratios = quartiles(mine, seconds["accumulation"])
        table[name] = {
            "milliseconds": 1e3 * statistics.median(mine),
            "ratio": ratios["median"],
            "ratio_q1": ratios["q1"],
            "ratio_q3": ratios["q3"],
        }
    return table


def main(arguments: Sequence[str]) -> None:
    """Measure all cases, print the tables and write the JSON file."""
    with starting_up():
        config = parse_config(VirtualBenchmarkConfig, arguments, prog="benchmark.py virtual", description=__doc__)
    device, place = this_device()
    clock = "processor time" if device.type == "cpu" else "wall clock"
    print(f"{config.workers} workers in one process, {place}, {clock}, torch {torch.__version__}")
    results = []
    for name_of_case in config.cases:
        case = Case(config, Training.of(name_of_case), device)
        seconds, left_out = measure(case)
        table = summarize(seconds)
        parameters = sum(p.numel() for p in case.model.parameters())
        print(f"{name_of_case}, {parameters / 1e6:.2f} M parameters")
        for name, row in table.items():
            print(
                f"  {name:12s} {row['milliseconds']:9.2f} ms   {row['ratio']:.3f} of accumulation "
                f"(quartiles {row['ratio_q1']:.3f} to {row['ratio_q3']:.3f})"
            )
        for name, why in left_out.items():
            print(f"  {name:12s} not possible: {why}")
        results.append({"case": name_of_case, "parameters": parameters, "left_out": left_out, **table})
    if config.output is not None:
        result = {"workers": config.workers, "device": device.type, "clock": clock, "cases": results}
        write_result(config.output, result)
