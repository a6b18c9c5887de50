"""Simulates workers of unequal speed: in lockstep, with smaller batches of the slow one, asynchronously, and by DDP.

    python tasks/benchmark.py speeds --seeds "[0, 1, 2]"

A virtual clock gives each worker its speed, so neither losses nor times depend on the machine or its load. All workers
share one process: lockstep follows `simulation.Simulation`, the others `simulation.AsynchronousSimulation`, with which
real processes agree to 1e-9. Worker 1 is the slow one. All cases see equally many images.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgdac_accel import AdaptiveConsensus, build_topology
from dsgdac_accel.checks import check_choice, check_integer, check_writable
from dsgdac_accel.simulation import AsynchronousSimulation, Simulation, Snapshot
from tasks.benchmarks.report import write_result
from tasks.common.cli_errors import starting_up
from tasks.common.config import load_config, parse_config
from tasks.common.lr_schedules import warmup_cosine
from tasks.images.augment import ModelInputs
from tasks.images.config import CifarConfig
from tasks.images.data import load_configured_data
from tasks.images.models import build_image_model

SLOW = 1
"""Number of the slow worker, which answers."""
_STUDY = Path(__file__).resolve().parents[2] / "configs" / "digits_study.yaml"
_DELAY = 0.05  # steps of a fast worker that a message takes
_JITTER = 0.1


@dataclass(frozen=True)
class Case:
    """How the workers train; speeds are relative to a fast worker."""

    kind: Literal["lockstep", "asynchronous", "ddp"] = "lockstep"
    slowdown: float = 1.0
    """How much longer a step of the slow worker takes for the same number of images."""
    stalls: float = 0.0
    """Probability of each worker to stall at a step, for 0.83 of a step."""
    batch_share: float = 1.0
    """Images of a step of the slow worker, relative to the others."""
    weighted: bool = False
    """Whether each worker's loss is weighted by its share of the images."""


CASES = {
    "lockstep, half speed": Case(slowdown=2),
    "lockstep, half speed, half batch": Case(slowdown=2, batch_share=0.5),
    "lockstep, half speed, half batch, weighted": Case(slowdown=2, batch_share=0.5, weighted=True),
    "asynchronous, half speed": Case("asynchronous", slowdown=2),
    "ddp, half speed": Case("ddp", slowdown=2),
    "lockstep, quarter speed, quarter batch, weighted": Case(slowdown=4, batch_share=0.25, weighted=True),
    "asynchronous, quarter speed": Case("asynchronous", slowdown=4),
    "lockstep, random stalls": Case(stalls=0.2),
    "asynchronous, random stalls": Case("asynchronous", stalls=0.2),
    "lockstep, equal speeds": Case(),
    "asynchronous, equal speeds": Case("asynchronous"),
}


@dataclass(frozen=True, kw_only=True)
class SpeedsConfig:
    """Settings of the simulation of workers of unequal speed."""

    study: Path = _STUDY
    """Configuration of the image task that gives data, model, schedule and batches."""

    workers: int = 4
    """Number of workers: even, and more than the number of the slow one, 1."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of data, initialization, order and speeds."""

    cases: tuple[str, ...] = tuple(CASES)
    """Which cases to run; the differences are to the first one."""

    output: Path | None = None
    """JSON file for the result. null only prints."""

    def __post_init__(self) -> None:
        check_integer("workers", self.workers, minimum=2)
        if self.workers % 2:
            raise ValueError(f"workers must be even, since pairs exchange; got {self.workers}. Use {self.workers + 1}.")
        if not self.seeds or not self.cases:
            raise ValueError("seeds and cases must name at least one each. Leave them out for all.")
        for case in self.cases:
            check_choice("cases", case, tuple(CASES))
        if self.output is not None:
            check_writable("output", self.output)


@dataclass
class Outcome:
    """The result of one run."""

    test_loss: float
    test_accuracy: float
    radius: float
    time: float
    """Duration, in steps of a fast worker."""
    slow_steps: float
    """Steps of the slow worker, relative to the mean of the others."""


class Study:
    """Data, model and schedule of a study for one seed.

    Args:
        config: settings of the image task; their seed is this one's.
        workers: number of workers.
    """

    def __init__(self, config: CifarConfig, workers: int) -> None:
        self.config = config
        self.workers = workers
        data = load_configured_data(config)
        inputs = ModelInputs(data.mean, data.std, torch.device("cpu"))
        self.train = inputs.plain(data.train_images), data.train_labels
        self.test = inputs.plain(data.test_images), data.test_labels
        torch.manual_seed(config.seed)
        self.model = build_image_model(config.model, data.num_classes, data.in_channels, data.image_size)
        self.rows = config.global_batch_size // workers
        self.steps_per_epoch = len(data.train_labels) // config.global_batch_size
        self.rng = random.Random(config.seed)

    def run(self, case: Case) -> Outcome:
        """Train all workers, and evaluate their average."""
        self.rng.seed(self.config.seed)
        rows = [self.rows] * self.workers
        rows[SLOW] = round(case.batch_share * self.rows)
        # Equally many images in all: smaller batches take more steps.
        total = math.ceil(self.config.num_train_epochs * self.steps_per_epoch * self.workers * self.rows / sum(rows))
        per_epoch = total / self.config.num_train_epochs
        warm_up = round(self.config.warmup_epochs * per_epoch)

        def lr_at(step: int) -> float:
            return self.config.learning_rate * warmup_cosine(min(step, total - 1), warm_up, total)

        gossip = self.config.gossip
        schedules = [
            AdaptiveConsensus(
                power=gossip.power,
                start_step=round((gossip.start_epoch or 0) * per_epoch),
                planned_lrs=[lr_at(step) for step in range(total)],
            )
            for _ in range(self.workers)
        ]
        models = [copy.deepcopy(self.model).train() for _ in range(self.workers)]
        optimizers = [
            torch.optim.SGD(
                model.parameters(), lr=lr_at(0), momentum=self.config.momentum, weight_decay=self.config.weight_decay
            )
            for model in models
        ]
        images = self._shared_queue()

        def fill_gradients(worker: int) -> None:
            weight = self.workers * rows[worker] / sum(rows) if case.weighted else 1.0
            mine = torch.tensor(list(itertools.islice(images, rows[worker])), device="cpu")
            models[worker].zero_grad()
            loss = F.cross_entropy(models[worker](self.train[0][mine]), self.train[1][mine])
            (weight * loss).backward()

        if case.kind == "asynchronous":
            workers = AsynchronousSimulation(models, optimizers, schedules, lr_at)
            duration = _run_by_clock(workers, total, fill_gradients, self._durations(case))
            slow_steps = workers.steps_N[SLOW] / statistics.mean(
                steps for worker, steps in enumerate(workers.steps_N) if worker != SLOW
            )
            return self._evaluated(models, duration, slow_steps)
        topology = build_topology("one_peer_ring", self.workers)
        lockstep = Simulation(models, optimizers, topology, schedules[0])
        for step in range(total):
            for worker, optimizer in enumerate(optimizers):
                optimizer.param_groups[0]["lr"] = lr_at(step)
                fill_gradients(worker)
            if case.kind == "ddp":
                _average_gradients(models)  # equal workers stay equal, so that mixing them changes nothing
            lockstep.step()
        neighbors = None if case.kind == "ddp" else topology.neighbors
        return self._evaluated(models, _time_in_lockstep(neighbors, self.workers, total, self._durations(case)), 1.0)

    def _shared_queue(self) -> Iterator[int]:
        """Rows in a random order, pass by pass: whoever is ready takes the next ones."""
        order = torch.Generator().manual_seed(self.config.seed)
        while True:
            yield from torch.randperm(len(self.train[1]), generator=order, device="cpu").tolist()

    def _durations(self, case: Case) -> Callable[[int], float]:
        def seconds(worker: int) -> float:
            stall = 0.83 if self.rng.random() < case.stalls else 0.0
            slowdown = case.slowdown * case.batch_share if worker == SLOW else 1.0
            return slowdown * self.rng.uniform(1 - _JITTER, 1 + _JITTER) + stall

        return seconds

    @torch.no_grad()
    def _evaluated(self, models: Sequence[nn.Module], duration: float, slow_steps: float) -> Outcome:
        flat_ND = torch.stack([torch.cat([x.flatten() for x in model.parameters()]) for model in models])
        deployed = copy.deepcopy(models[0])
        for mean, *values in zip(deployed.parameters(), *(model.parameters() for model in models), strict=True):
            mean.copy_(torch.stack(values).mean(0))
        for layer in deployed.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.reset_running_stats()
                layer.momentum = None
        deployed.train()(self.train[0])  # measures the statistics of BatchNorm
        logits: Tensor = deployed.eval()(self.test[0])
        return Outcome(
            test_loss=float(F.cross_entropy(logits, self.test[1])),
            test_accuracy=100 * float((logits.argmax(1) == self.test[1]).float().mean()),
            radius=float((flat_ND - flat_ND.mean(0)).norm(dim=1).mean()),
            time=duration,
            slow_steps=slow_steps,
        )


def _average_gradients(models: Sequence[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([x.grad for x in parameters]).mean(0)
        for x in parameters:
            x.grad = mean.clone()


def _time_in_lockstep(
    neighbors: Callable[[int, int], Iterable[int]] | None, count: int, total: int, seconds: Callable[[int], float]
) -> float:
    """Return when the last of `count` workers has taken `total` steps.

    With `neighbors(step, worker)`, a step ends once these have ended the step before; otherwise once all have computed.
    """
    ended = [0.0] * count
    for step in range(total):
        computed = [ended[worker] + seconds(worker) for worker in range(count)]
        if neighbors is None:
            ended = [max(computed)] * count
        else:
            ended = [
                max(computed[worker], *(ended[peer] + _DELAY for peer in neighbors(step, worker)))
                for worker in range(count)
            ]
    return max(ended)


def _run_by_clock(
    workers: AsynchronousSimulation,
    total: int,
    fill_gradients: Callable[[int], None],
    seconds: Callable[[int], float],
) -> float:
    """Run asynchronous workers by a virtual clock until each has a progress of `total`. Returns the time."""
    count = len(workers.parameters_N)
    turns, asks = [0] * count, [False] * count
    numbers = itertools.count()
    events: list[tuple[float, int, str, int, tuple[int, Snapshot, Snapshot | None] | None]] = []
    now = 0.0

    def after(delay: float, kind: str, worker: int, exchange: tuple[int, Snapshot, Snapshot | None] | None) -> None:
        heapq.heappush(events, (now + delay, next(numbers), kind, worker, exchange))

    for worker in range(count):
        after(seconds(worker), "step", worker, None)
    while events:
        now, _, kind, worker, exchange = heapq.heappop(events)
        if exchange is None:
            fill_gradients(worker)
            workers.step(worker)
            if worker % 2 == 0 and not asks[worker]:
                neighbor = (worker + (-1) ** turns[worker]) % count
                turns[worker] += 1
                asks[worker] = True
                after(_DELAY, "question", neighbor, (worker, workers.take(worker), None))
            if workers.furthest_N[worker] < total:
                after(seconds(worker), "step", worker, None)
        elif kind == "question":
            asker, question, _ = exchange
            answer = workers.take(worker)
            workers.apply(worker, answer, question)
            after(_DELAY, "answer", asker, (worker, question, answer))
        else:
            _, question, reply = exchange
            assert reply is not None
            workers.apply(worker, question, reply)
            asks[worker] = False
    for worker in range(count):
        workers.settle(worker)
    return now


def table(outcomes: dict[str, list[Outcome]]) -> list[str]:
    """Lines of a table: means over the seeds, and paired differences to the first case."""
    reference = next(iter(outcomes.values()))
    width = max(map(len, outcomes))
    lines = [
        f"{'':{width}}  {'test loss':>9}  {'difference':>16}  {'accuracy %':>10}  {'radius':>6}  {'time':>6}  slow"
    ]
    for name, mine in outcomes.items():
        differences = [one.test_loss - other.test_loss for one, other in zip(mine, reference, strict=True)]
        spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
        means = [statistics.mean(getattr(one, field) for one in mine) for field in ("test_loss", "test_accuracy")]
        radius, duration, slow = (
            statistics.mean(getattr(one, field) for one in mine) for field in ("radius", "time", "slow_steps")
        )
        difference = f"{statistics.mean(differences):+7.3f} +- {spread:5.3f}"
        numbers = f"{means[0]:9.3f}  {difference}  {means[1]:10.2f}  {radius:6.2f}  {duration:6.0f}  {slow:4.2f}"
        lines.append(f"{name:{width}}  {numbers}")
    return lines


def main(arguments: Sequence[str]) -> None:
    """Run all cases for all seeds, print the table and write the file."""
    with starting_up():
        config = parse_config(SpeedsConfig, arguments, prog="benchmark.py speeds", description=__doc__)
        study = load_config(CifarConfig, config.study)
    outcomes: dict[str, list[Outcome]] = {case: [] for case in config.cases}
    for seed in config.seeds:
        for case in config.cases:
            outcome = Study(replace(study, seed=seed), config.workers).run(CASES[case])
            outcomes[case].append(outcome)
            print(f"seed {seed}  {case}: test loss {outcome.test_loss:.3f}", flush=True)
    print("\n".join(table(outcomes)))
    if config.output is not None:
        result = {case: [vars(outcome) for outcome in runs] for case, runs in outcomes.items()}
        write_result(config.output, {"seeds": list(config.seeds), "workers": config.workers, "cases": result})
