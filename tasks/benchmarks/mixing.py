"""Measures the share of mixing in a step, and its memory bandwidth relative to a plain copy.

    python tasks/benchmark.py mixing --config configs/benchmark/mixing.yaml

All workers share one process, so nothing is sent and no worker waits: this measures only the arithmetic of mixing, on
a GPU if there is one. A pair computes the difference of its two models and adds it to both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checks import check_integer, check_number, check_writable
from dsgdac_accel.config import config_to_dict
from dsgdac_accel.core.mixer import Mixer
from tasks.benchmarks.measurement import quartiles_of
from tasks.benchmarks.models import build_workload, check_model_name
from tasks.benchmarks.report import write_result
from tasks.benchmarks.training import Training, this_device
from tasks.common.cli_errors import starting_up
from tasks.common.config import parse_config

_WARM_UP = 2
"""Steps before the measurement: the first one allocates the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class MixingBenchmarkConfig:
    """Settings of the mixing benchmark."""

    cases: tuple[str, ...] = ("wrn-16-4 sgd 16",)
    """Trainings to measure: '<model> <optimizer> <samples per worker>', with a model of `tasks/benchmark.py`."""

    image_size: int = 32
    """Height and width of the random images, in pixels."""

    mixed_precision: Literal["no", "bf16"] = "no"
    """Precision of forward and backward; parameters are mixed in float32."""

    steps: int = 20
    """Measured steps per case."""

    passes: int = 50
    """Mixes without training, alternating with copies, for the bandwidth."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0, workers_per_process=8))
    """How the workers mix: an even number of them, on the one-peer ring."""

    most_of_step: float = 0.02
    """Target: largest share of a step that mixing may take."""

    least_of_copy: float = 0.8
    """Target: smallest bandwidth of mixing relative to a copy."""

    output: Path | None = None
    """JSON file for the result. null only prints."""

    def __post_init__(self) -> None:
        for name in ("image_size", "steps", "passes"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("most_of_step", "least_of_copy"):
            check_number(name, getattr(self, name), above=0)
        if not self.cases:
            raise ValueError("cases must name at least one training. Use 'wrn-16-4 sgd 16', for example.")
        for case in self.cases:
            check_model_name(Training.of(case).model, self.image_size)
        workers, topology = self.gossip.workers_per_process, self.gossip.topology
        if topology != "one_peer_ring" or workers % 2 or self.gossip.comm_dtype != "full" or self.gossip.mix_every != 1:
            raise ValueError(
                f"gossip must mix an even number of workers_per_process in pairs at every step, for which memory "
                f"traffic is counted; got {workers} workers, topology {topology!r}, comm_dtype "
                f"{self.gossip.comm_dtype!r}, mix_every {self.gossip.mix_every}."
            )
        if self.output is not None:
            check_writable("output", self.output)


class Stopwatch:
    """Times spans of work: by events on a GPU, which runs behind the host; else by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time inside the context for `name`."""
        begin = self._now()
        yield
        self._spans.setdefault(name, []).append((begin, self._now()))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts for `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return call

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        spans, self._spans = self._spans, {}
        return {name: sum(_seconds(*span) for span in mine) for name, mine in spans.items()}


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


@dataclass
class Result:
    """Measurements of one case."""

    case: str
    parameters: int
    """Parameters of one worker."""
    step_seconds: float
    """Median over the steps."""
    share: list[float]
    """Share of mixing in a step: quartiles over the steps."""
    copy_bytes_per_second: float
    """Bytes that a plain copy reads and writes per second, median."""
    of_copy: list[float]
    """Bandwidth of mixing relative to the copy that follows it: quartiles."""


def measure(config: MixingBenchmarkConfig, case: str, device: torch.device) -> Result:
    """Train some steps for the share of mixing, then mix and copy in turns for the bandwidth."""
    training, workers = Training.of(case), config.gossip.workers_per_process
    accelerator = GossipAccelerator(
        gossip=config.gossip, mixed_precision=config.mixed_precision, cpu=device.type == "cpu"
    )
    workload = build_workload(
        training.model,
        batch_size=training.batch_size * workers,
        image_size=config.image_size,
        device=device,
        seed=0,
    )
    model, optimizer = accelerator.prepare(workload.model, training.make_optimizer(workload.model.parameters()))
    mixer = accelerator.gossip_steps[0].mixer
    watch = Stopwatch(device)
    for method in ("consensus_update", "add"):
        setattr(mixer, method, watch.timed("mixing", getattr(mixer, method)))
    steps, shares = [], []
    for step in range(_WARM_UP + config.steps):
        with watch.span("step"):
            accelerator.backward(workload.loss(model))
            optimizer.step()
            optimizer.zero_grad()
        took = watch.take()
        if step >= _WARM_UP:
            steps.append(took["step"])
            shares.append(took["mixing"] / took["step"])
    for method in ("consensus_update", "add"):
        delattr(mixer, method)
    parameters = mixer.parameter_bytes // 4
    copies, of_copy = _bandwidths(mixer, watch, config.passes)
    accelerator.free_memory()
    return Result(
        case=case,
        parameters=parameters,
        step_seconds=statistics.median(steps),
        share=quartiles_of(shares),
        copy_bytes_per_second=statistics.median(copies),
        of_copy=quartiles_of(of_copy),
    )


def _bandwidths(mixer: Mixer, watch: Stopwatch, passes: int) -> tuple[list[float], list[float]]:
    """Bytes per second of copying all workers' parameters, and the bandwidth of a mix relative to it."""
    copies, of_copy = [], []
    for number in range(1 + passes):
        with watch.span("mix"):
            mixer.add(mixer.consensus_update(1.0))
        with watch.span("copy"):
            for sent, slots in zip(mixer.copies.sent, mixer.copies.received, strict=True):
                for buffer, slot in zip(sent.buffers, slots[0], strict=True):
                    slot.copy_(buffer)
        took = watch.take()
        if number:  # the first pass warms up
            copied = 2 * len(mixer.copies.sent) * mixer.parameter_bytes / took["copy"]
            copies.append(copied)
            of_copy.append(bytes_of_a_mix(mixer) / took["mix"] / copied)
    return copies, of_copy


def bytes_of_a_mix(mixer: Mixer) -> int:
    """Bytes that mixing in pairs has to read and write, for all workers of the process.

    Each worker reads its model and writes the copy that is sent. A pair reads two copies and writes their difference.
    On a GPU it reads the difference again for its norm; on a CPU it is still in the cache. Then each worker reads its
    model and the difference, and writes its model.
    """
    norm = 0 if mixer.group.device.type == "cpu" else 1
    return len(mixer.copies.sent) // 2 * (2 * 2 + 3 + norm + 2 * 3) * mixer.parameter_bytes


def lines(result: Result, config: MixingBenchmarkConfig) -> list[str]:
    """Lines of the report."""
    low, share, high = (100 * part for part in result.share)
    slow, of_copy, fast = result.of_copy
    most, least = 100 * config.most_of_step, config.least_of_copy
    return [
        f"{result.case}, {result.parameters / 1e6:.1f} M parameters, {1e3 * result.step_seconds:.1f} ms a step",
        f"  mixing takes {share:.2f} % of the step (quartiles {low:.2f} to {high:.2f}); "
        f"aim: at most {most:g} %: {_met(share <= most)}",
        f"  it moves {of_copy:.3f} of the bytes per second of a copy (quartiles {slow:.3f} to {fast:.3f}), which moves "
        f"{result.copy_bytes_per_second / 1e9:.1f} GB/s; aim: at least {least:g}: {_met(of_copy >= least)}",
    ]


def _met(met: bool) -> str:
    return "met" if met else "missed"


def main(arguments: Sequence[str]) -> None:
    """Measure all cases, print them and write the JSON file."""
    with starting_up():
        config = parse_config(MixingBenchmarkConfig, arguments, prog="benchmark.py mixing", description=__doc__)
    device, place = this_device()
    print(f"{config.gossip.workers_per_process} workers in one process, {place}, torch {torch.__version__}", flush=True)
    results = []
    for case in config.cases:
        results.append(measure(config, case, device))
        print("\n".join(lines(results[-1], config)), flush=True)
    if config.output is not None:
        found = {"device": place, "torch": torch.__version__, "config": config_to_dict(config)}
        write_result(config.output, {**found, "cases": [asdict(result) for result in results]})
