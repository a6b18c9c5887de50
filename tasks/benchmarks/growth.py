"""Measures how the cost of mixing grows with workers, parameters and tensors, against what the algorithm must cost.

    python tasks/benchmark.py growth --config configs/benchmark/growth.yaml

The cost is processor time of a worker's step without forward, backward and optimizer: the checks of gradients and
parameters, the update, and the exchange. Pairs of the one-peer ring mix in fp32, on the CPU.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import Parameter

from dsgdac_accel import GossipConfig, WorkerGroup
from dsgdac_accel.checks import check_integer
from dsgdac_accel.core.step import GossipStep
from tasks.benchmarks.launching import launch_again
from tasks.benchmarks.report import check_output, write_result
from tasks.common.cli_errors import quiet_ends, starting_up, training
from tasks.common.config import parse_config
from tasks.common.plot_style import BLUE, DPI, VERMILION, add_legend, add_title, finish_axes, new_figure

_CASE = "BENCHMARK_CASE"
"""Environment variable with the case that launched workers measure."""
_RESULT = "BENCHMARK_RESULT"
"""Environment variable with the file that worker 0 writes its result into."""
_CPU = torch.device("cpu")
_TIMEOUT = 120.0
_WARM_UP = 3
_TURN_SECONDS = 0.1
_COPIED = 2**24
"""Elements of the copy that measures the bandwidth: beyond every cache."""
_CALLS = 1000


@dataclass(frozen=True, kw_only=True)
class GrowthBenchmarkConfig:
    """Settings of the growth benchmark. One quantity grows at a time."""

    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    """Numbers of workers in one process, even."""

    processes: tuple[int, ...] = (2, 4, 8)
    """Numbers of processes with one worker each, even. They are started one set after another."""

    parameters: tuple[int, ...] = (10**4, 10**5, 10**6, 10**7, 10**8)
    """Numbers of parameters of each of two workers in one process."""

    tensors: tuple[int, ...] = (1, 4, 16, 64, 256, 1000, 4000)
    """Numbers of parameter tensors of each of two workers in one process."""

    other_parameters: int = 10**6
    """Parameters of a worker where workers or processes grow."""

    few_parameters: int = 10**5
    """Parameters of a worker where tensors grow."""

    other_tensors: int = 10
    """Tensors where something else grows."""

    rounds: int = 7
    """Turns of each case, of a tenth of a second or one step; their median counts."""

    output: Path | None = None
    """JSON file for the result (.json), with a plot beside it (.png). null only prints."""

    def __post_init__(self) -> None:
        for name in ("other_parameters", "few_parameters", "other_tensors", "rounds"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("workers", "processes", "parameters", "tensors"):
            values = getattr(self, name)
            if sorted(set(values)) != list(values) or len(values) == 1:
                raise ValueError(f"{name} must be several growing numbers, or none; got {list(values)}.")
            for value in values:
                check_integer(name, value, minimum=1)
        odd = [count for count in (*self.workers, *self.processes) if count % 2]
        if odd:
            raise ValueError(f"workers and processes must be even, since workers mix in pairs; got {odd[0]}.")
        if max(self.tensors, default=1) > self.few_parameters:
            raise ValueError(
                f"few_parameters must be at least one for each of {max(self.tensors)} tensors; got "
                f"{self.few_parameters}. Use fewer tensors, or more parameters."
            )
        if self.output is not None and self.output.suffix != ".json":
            raise ValueError(f"output must be a file that ends in .json; got {self.output}. The plot is put beside it.")

    def cases(self) -> dict[str, dict[int, Case]]:
        """For each quantity that grows, the cases by its value."""
        large = Case(parameters=self.other_parameters, tensors=min(self.other_tensors, self.other_parameters))
        return {
            "workers": {n: large.but(workers=n) for n in self.workers},
            "processes": {n: large.but(processes=n, workers=1) for n in self.processes},
            "parameters": {n: large.but(parameters=n, tensors=min(self.other_tensors, n)) for n in self.parameters},
            "tensors": {n: Case(parameters=self.few_parameters, tensors=n) for n in self.tensors},
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure."""

    parameters: int
    """Of each worker."""
    tensors: int
    workers: int = 2
    """Of each process."""
    processes: int = 1

    def but(self, **changes: int) -> Case:
        """The case with some numbers changed."""
        return Case(**{**asdict(self), **changes})

    def bytes_moved(self) -> int:
        """Bytes that a worker's step has to read and write.

        It reads its gradient once, x and x_j for the difference, which it writes, and x and the difference to write x.
        Two workers of a process form their difference once. Between processes, a message is copied into the kernel and
        out of it.
        """
        difference, transport = (3, 4) if self.processes > 1 else (1.5, 0)
        return round((1 + difference + 3 + transport) * 4 * self.parameters)


@dataclass(frozen=True)
class Machine:
    """How fast this machine is."""

    bytes_per_second: float
    """That a copy beyond the caches reads and writes."""
    call_seconds: float
    """Of one call of torch on a small tensor."""

    @classmethod
    def measured(cls) -> Machine:
        """Measure it; the medians of some turns."""
        source, target, small = (torch.ones(numbers, device="cpu") for numbers in (_COPIED, _COPIED, 32))
        copies, calls = [], []
        for _ in range(_WARM_UP + 7):
            begun = time.process_time()
            target.copy_(source)
            copied = time.process_time()
            for _ in range(_CALLS):
                small.mul_(1.0)
            copies.append(copied - begun)
            calls.append((time.process_time() - copied) / _CALLS)
        return cls(2 * source.nbytes / statistics.median(copies[_WARM_UP:]), statistics.median(calls[_WARM_UP:]))

    def seconds(self, case: Case) -> float:
        """The least that a worker's step costs: bytes over bandwidth, and a call for each tensor."""
        return case.bytes_moved() / self.bytes_per_second + case.tensors * self.call_seconds


def measure(case: Case, group: WorkerGroup, rounds: int) -> float:
    """Processor seconds of a worker's step, without its computation: the median of the rounds. Collective."""
    step = build(case, group)

    def mix() -> None:
        step.before_local_step()
        step.after_local_step()

    for _ in range(_WARM_UP):
        begun = time.process_time()
        mix()
        step.mixer.drain()
    longest = max(group.all_gather_object(time.process_time() - begun, "choosing the length of turns"))
    steps = max(1, math.ceil(_TURN_SECONDS / longest))
    turns = []
    for _ in range(rounds):
        group.barrier("starting a turn")
        begun = time.process_time()
        for _ in range(steps):
            mix()
        step.mixer.drain()
        turns.append((time.process_time() - begun) / steps / case.workers)
    return statistics.mean(group.all_gather_object(statistics.median(turns), "comparing turns"))


def build(case: Case, group: WorkerGroup) -> GossipStep:
    """A gossip step for parameters that have a gradient and are not computed with. Collective."""
    size, larger = divmod(case.parameters, case.tensors)
    sizes = [size + (number < larger) for number in range(case.tensors)]
    worker_of: dict[int, int] = {}
    parameters: list[Parameter] = []
    for worker in range(case.workers):
        for count in sizes:
            parameter = Parameter(torch.full((count,), 1.0 + worker + group.rank, device="cpu"))
            parameter.grad = torch.ones(count, device="cpu")
            worker_of[id(parameter)] = worker
            parameters.append(parameter)
    config = GossipConfig(topology="one_peer_ring", workers_per_process=case.workers, log_every=0, timeout=_TIMEOUT)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return GossipStep(optimizer, group, config, worker_of=lambda parameter: worker_of[id(parameter)])


def cost(case: Case, rounds: int) -> float:
    """Processor seconds of a worker's step, in this process or in new ones."""
    return measure_in_processes(case) if case.processes > 1 else measure(case, WorkerGroup(_CPU, _TIMEOUT), rounds)


def measure_in_processes(case: Case) -> float:
    """Start this script once for each process of a case, and return what they measure."""
    with tempfile.TemporaryDirectory(prefix="benchmark-growth-") as folder:
        file = Path(folder) / "seconds.json"
        status = launch_again(case.processes, {_CASE: json.dumps(asdict(case)), _RESULT: str(file)})
        if status:
            sys.exit(status)
        return float(json.loads(file.read_text(encoding="utf-8")))


def measure_as_worker(rounds: int) -> None:
    """Be one of the workers that `measure_in_processes` starts."""
    with starting_up():
        accelerator = Accelerator(cpu=True)
        group = WorkerGroup(_CPU, _TIMEOUT)
    with training(group.report):
        seconds = measure(Case(**json.loads(os.environ[_CASE])), group, rounds)
        if group.rank == 0:
            Path(os.environ[_RESULT]).write_text(json.dumps(seconds), encoding="utf-8")
        group.barrier("ending the benchmark")
    accelerator.end_training()


def exponent(points: Mapping[int, float]) -> float:
    """The k of cost ~ n^k, fitted to the larger half of the points.

    >>> round(exponent({1: 5.0, 10: 20.0, 100: 200.0, 1000: 2000.0}), 6)
    1.0
    """
    upper = sorted(points)[(len(points) - 1) // 2 :]
    fit = statistics.linear_regression([math.log(n) for n in upper], [math.log(points[n]) for n in upper])
    return fit.slope


@dataclass(frozen=True)
class Growth:
    """Costs by the quantity that grows, in seconds of a worker's step."""

    measured: dict[int, float]
    formula: dict[int, float]

    def described(self, what: str) -> str:
        """The growth in a line."""
        pairs = ", ".join(f"{n:,}: {1e3 * self.measured[n]:.3g} ({1e3 * self.formula[n]:.3g})" for n in self.measured)
        return (
            f"{what}: measured ^{exponent(self.measured):.2f}, formula ^{exponent(self.formula):.2f}; "
            f"ms of a worker's step (formula): {pairs}"
        )


def plot(growths: Mapping[str, Growth], machine: Machine, path: Path) -> None:
    """Plot measured costs and the formula's lines to a PNG file: workers and processes, parameters, tensors."""
    panels = [[name for name in names if name in growths] for names in _PANELS]
    panels = [names for names in panels if names]
    figure, all_axes = new_figure(1, len(panels), size=(3.8 * len(panels), 3.6))
    handles: dict[str, object] = {}
    for axes, names in zip(all_axes, panels, strict=True):
        for name in names:
            growth, color = growths[name], VERMILION if name == "processes" else BLUE
            (line,) = axes.plot(*_milliseconds(growth.measured), marker="o", color=color)
            (formula,) = axes.plot(*_milliseconds(growth.formula), linestyle="--", color=color, alpha=0.6)
            handles |= {_MEASURED[name]: line, f"{_MEASURED[name]}: formula": formula}
        axes.set_xscale("log")
        axes.set_yscale("log")
        points = sorted({n for name in names for n in growths[name].measured})
        if points[-1] < 100 * points[0]:  # too few powers of ten for ticks
            axes.set_xticks(points, [str(n) for n in points])
            axes.xaxis.set_minor_formatter("")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 3, high * 3)  # so that what is flat looks flat
        slopes = ", ".join(f"{exponent(growths[n].measured):.2f} ({exponent(growths[n].formula):.2f})" for n in names)
        finish_axes(axes, " or ".join(names), "ms of a worker's step", f"fitted slope (formula): {slopes}")
    add_legend(figure, handles.values(), handles)
    add_title(
        figure,
        f"processor time of mixing; formula: bytes moved at {machine.bytes_per_second / 1e9:.1f} GB/s, and "
        f"{1e6 * machine.call_seconds:.2f} µs a tensor",
    )
    figure.savefig(path, dpi=DPI)


_PANELS = (("workers", "processes"), ("parameters",), ("tensors",))
_MEASURED = dict.fromkeys(("workers", "parameters", "tensors"), "workers of one process") | {
    "processes": "one worker in each process"
}


def _milliseconds(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(points), [1e3 * seconds for seconds in points.values()]


def main(arguments: Sequence[str]) -> None:
    """Measure all cases, print the growth and write the files."""
    with starting_up(), quiet_ends():
        config = parse_config(GrowthBenchmarkConfig, arguments, prog="benchmark.py growth", description=__doc__)
        if _CASE in os.environ:
            measure_as_worker(config.rounds)
            return
        if "RANK" in os.environ:
            raise ValueError("growth starts its processes itself. Start it with python alone.")
        if config.output is not None:
            check_output(config.output)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # like the processes that it starts
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    machine, growths = Machine.measured(), {}
    print(
        f"{machine.bytes_per_second / 1e9:.1f} GB/s, {1e6 * machine.call_seconds:.2f} µs a call, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}",
        flush=True,
    )
    for what, cases in config.cases().items():
        if not cases:
            continue
        measured = {n: cost(case, config.rounds) for n, case in cases.items()}
        growths[what] = Growth(measured, {n: machine.seconds(case) for n, case in cases.items()})
        print(growths[what].described(what), flush=True)
    if config.output is not None:
        found = {what: asdict(growth) for what, growth in growths.items()}
        write_result(config.output, {"machine": asdict(machine), "torch": torch.__version__, "growth": found})
        plot(growths, machine, config.output.with_suffix(".png"))
