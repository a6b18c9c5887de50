"""What mixing takes of a step, and how near its passes over memory come to a plain copy.

    python tasks/benchmark_mixing.py --config configs/benchmark/mixing.yaml

Several workers in one process, so that nothing is sent and nobody is waited for: what is measured is the arithmetic of
mixing, on a GPU if there is one. A pair takes the difference of its two models and adds it to both.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
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
from tasks.benchmarks.training import Training, this_device
from tasks.common.config import config_from_command_line

_WARM_UP = 2  # steps: the first makes the optimizer's state, the second finds all memory there


@dataclass(frozen=True, kw_only=True)
class MixingBenchmarkConfig:
    """Training runs whose mixing is measured."""

    cases: tuple[str, ...] = ("wrn-16-4 sgd 16",)
    """Training runs: '<model> <optimizer> <samples per worker>', with a model of `tasks/benchmark.py`."""

    image_size: int = 32
    """Height and width of the random images, in pixels."""

    mixed_precision: Literal["no", "bf16"] = "no"
    """Autocast type of forward and backward. Parameters are mixed in float32."""

    steps: int = 20
    """Measured steps per case."""

    passes: int = 50
    """Mixes without training, and copies between them, to measure the bandwidth."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0, workers_per_process=8))
    """How the workers mix: an even number of them, on the one-peer ring."""

    most_of_step: float = 0.02
    """Target: largest share of a step that mixing takes."""

    least_of_copy: float = 0.8
    """Target: smallest bandwidth of mixing, as a fraction of that of a copy."""

    output: Path | None = None
    """JSON file for the result. null only prints."""

    def __post_init__(self) -> None:
        for name in ("image_size", "steps", "passes"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("most_of_step", "least_of_copy"):
            check_number(name, getattr(self, name), above=0)
        if not self.cases:
            raise ValueError("cases must name at least one training run; got none. Write 'wrn-16-4 sgd 16', say.")
        for case in self.cases:
            check_model_name(Training.of(case).model, self.image_size)
        workers, topology = self.gossip.workers_per_process, self.gossip.topology
        if topology != "one_peer_ring" or workers % 2 or self.gossip.comm_dtype != "full" or self.gossip.mix_every != 1:
            raise ValueError(
                f"gossip must mix an even number of workers_per_process in pairs and in every step, as the memory that "
                f"a mix passes over is counted for that; got {workers} workers, topology {topology!r}, comm_dtype "
                f"{self.gossip.comm_dtype!r}, mix_every {self.gossip.mix_every}."
            )
        if self.output is not None:
            check_writable("output", self.output)


class Stopwatch:
    """Seconds between moments: of the GPU where there is one, which runs behind the host; else of the wall clock."""

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
        """Inside, time counts for `name`."""
        begin = self._now()
        yield
        self._spans.setdefault(name, []).append((begin, self._now()))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return call

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        spans, self._spans = self._spans, {}
        return {name: sum(_seconds(*span) for span in mine) for name, mine in spans.items()}


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


@dataclass
class Result:
    """Of one case."""

    case: str
    parameters: int
    """Of one worker."""
    step_seconds: float
    """Median over the steps."""
    share: list[float]
    """Of the step that mixing takes: quartiles over the steps."""
    copy_bytes_per_second: float
    """Read and written by a copy of one worker's parameters, median."""
    of_copy: list[float]
    """Bytes per second of mixing, as a part of that: quartiles over pairs of neighbouring measurements."""


def measure(config: MixingBenchmarkConfig, case: str, device: torch.device) -> Result:
    """Train for some steps, then mix and copy in turns."""
    training, workers = Training.of(case), config.gossip.workers_per_process
    accelerator = GossipAccelerator(
        gossip=config.gossip, mixed_precision=config.mixed_precision, cpu=device.type == "cpu"
    )
    workload = build_workload(
        training.model,
        batch_size=training.batch_size * workers,
        image_size=config.image_size,
        compute_seconds=0.0,
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
    """Bytes per second of copying the parameters of all workers, and those of a mix as a part of it."""
    copies, of_copy = [], []
    for number in range(1 + passes):
        with watch.span("mix"):
            mixer.add(mixer.consensus_update(1.0))
        with watch.span("copy"):
            for flat, slots in zip(mixer.flats, mixer.buckets.received, strict=True):
                for bucket, slot in zip(flat.buckets, slots[0], strict=True):
                    slot.copy_(bucket.data)
        took = watch.take()
        if number:  # the first one warms up
            copied = 2 * len(mixer.flats) * mixer.parameter_bytes / took["copy"]
            copies.append(copied)
            of_copy.append(bytes_of_a_mix(mixer) / took["mix"] / copied)
    return copies, of_copy


def bytes_of_a_mix(mixer: Mixer) -> int:
    """What a mix of pairs has to read and write, for all workers of the process.

    A pair reads two models and writes their difference, on a GPU reads it once more for its norm (on a CPU that is done
    while it is in the cache), and each of the two reads its model and the difference and writes its model.
    """
    norm = 0 if mixer.group.device.type == "cpu" else 1
    return len(mixer.flats) // 2 * (3 + norm + 2 * 3) * mixer.parameter_bytes


def lines(result: Result, config: MixingBenchmarkConfig) -> list[str]:
    """For people."""
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


def main() -> None:
    """Measure, print, write the JSON."""
    config = config_from_command_line(MixingBenchmarkConfig, description=__doc__)
    device, place = this_device()
    print(f"{config.gossip.workers_per_process} workers in one process, {place}, torch {torch.__version__}", flush=True)
    results = []
    for case in config.cases:
        results.append(measure(config, case, device))
        print("\n".join(lines(results[-1], config)), flush=True)
    if config.output is not None:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"device": place, "torch": torch.__version__, "config": config_to_dict(config)}
        found["cases"] = [asdict(result) for result in results]
        config.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
