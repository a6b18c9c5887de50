"""Measures variants in turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from dsgdac_accel import WorkerGroup
from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.memory import all_storages, extra_copies
from tasks.benchmarks.variants import LeftOut, Variant, build_variant, synchronize

_WARM_UP = 3


@dataclass
class Turns:
    """Measurements of one variant, one value per round."""

    seconds: list[float] = field(default_factory=list)
    """Seconds per step, mean over the workers."""
    slowest: list[float] = field(default_factory=list)
    """Seconds per step on the slowest worker."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor seconds per step, sum over all threads of all workers."""
    waited: list[float] = field(default_factory=list)
    """Seconds per step spent waiting for other workers, mean over the workers; empty if unknown."""
    bytes_sent: float = 0.0
    """Bytes that a process sends to other workers per step, computed."""
    bytes_carried: float | None = None
    """Bytes that a process sends to other workers per step, as counted by the relay; None without one."""
    extra_copies: float = 0.0
    """Memory beyond model, gradients and optimizer, in copies of the parameters."""


@dataclass(frozen=True)
class Measured:
    """Result of a benchmark."""

    turns: dict[str, Turns]
    """Measurements by variant."""
    left_out: dict[str, str]
    """For each variant that was not measured, the reason."""
    parameters: int
    """Number of parameters of the model."""


def measure(
    config: BenchmarkConfig, group: WorkerGroup, carried: Callable[[], Mapping[int, int]] | None = None
) -> Measured:
    """Build the variants and measure them in turns. Collective.

    Args:
        config: settings of the benchmark.
        group: the workers, as `Joined.group`.
        carried: asks the relay for the bytes that each worker has sent so far.

    Raises WorkerLostError for a lost worker, for variants of other libraries, too.
    """
    everyone = group.everyone
    variants: dict[str, Variant] = {}
    turns: dict[str, Turns] = {}
    left_out: dict[str, str] = {}
    for name in config.variants:
        before = all_storages()
        try:
            variant = everyone.guarded(partial(build_variant, name, config, group), f"building {name}")
        except LeftOut as reason:
            left_out[name] = str(reason)
            continue
        variants[name], turns[name] = variant, Turns()
        everyone.guarded(partial(_warm_up, variant), f"the first steps of {name}")
        workload = variant.workload
        copies = extra_copies(before, workload.model, [*workload.batch, *variant.state()])
        workload.model.zero_grad()
        turns[name].extra_copies = max(everyone.all_gather_object(copies, "comparing memory"))
    for _, name in in_turns(list(variants), config.rounds):
        turn = partial(_take_turn, variants[name], turns[name], config, everyone, carried)
        everyone.guarded(turn, f"a turn of {name}")
    first = next(iter(variants.values()), None)
    parameters = 0 if first is None else sum(parameter.numel() for parameter in first.workload.model.parameters())
    return Measured(turns, left_out, parameters)


def _warm_up(variant: Variant) -> None:
    for _ in range(_WARM_UP):
        variant.step()
    variant.settle()
    variant.fill_gradients()


def _take_turn(
    variant: Variant,
    turns: Turns,
    config: BenchmarkConfig,
    group: WorkerGroup,
    carried: Callable[[], Mapping[int, int]] | None,
) -> None:
    steps = config.steps
    group.barrier("starting a turn")
    before = carried() if carried is not None else {}
    group.barrier("counting bytes")
    used = time.process_time()
    # No exchange is in flight yet. After this step one is, so each timed step includes exactly one exchange. Processor
    # time and bytes count all steps, with the last exchange.
    variant.step()
    waits, sent = [], []
    begun = time.perf_counter()
    for _ in range(steps):
        variant.step()
        waits.append(variant.waited())
        sent.append(variant.bytes_sent())
    synchronize(group.device)
    seconds = time.perf_counter() - begun
    variant.settle()
    cpu_seconds = time.process_time() - used
    known = [wait for wait in waits if wait is not None]
    mine = (seconds / steps, cpu_seconds / (steps + 1), sum(known) / steps, sum(sent) / steps)
    durations, cpus, waited, bytes_sent = zip(*group.all_gather_object(mine, "comparing turns"), strict=True)
    after = carried() if carried is not None else {}
    turns.seconds.append(statistics.mean(durations))
    turns.slowest.append(max(durations))
    turns.cpu_seconds.append(sum(cpus))
    if known:
        turns.waited.append(statistics.mean(waited))
    turns.bytes_sent = statistics.mean(bytes_sent)
    if carried is not None:
        turns.bytes_carried = (sum(after.values()) - sum(before.values())) / (steps + 1) / group.size


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield round and name of every turn; each round starts with the next name.

    >>> list(in_turns(["a", "b"], rounds=2))
    [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for round_ in range(rounds):
        for turn in range(len(names)):
            yield round_, names[(round_ + turn) % len(names)]


def summarize(turns: Mapping[str, Turns]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds, and quartiles of the ratios to every other variant within the same round.

    >>> alone, together = Turns([1.0, 2.0], cpu_seconds=[1.0, 1.0]), Turns([2.0, 6.0], cpu_seconds=[1.0, 2.0])
    >>> table = summarize({"local": alone, "ddp": together})
    >>> table["ddp"]["ratios"]["local"]["median"], table["ddp"]["seconds"]
    (2.5, 4.0)
    """
    table = {}
    for name, mine in turns.items():
        table[name] = {
            "seconds": statistics.median(mine.seconds),
            "cpu_seconds": statistics.median(mine.cpu_seconds),
            "waited": statistics.median(mine.waited) if mine.waited else None,
            "bytes_sent": mine.bytes_sent,
            "bytes_carried": mine.bytes_carried,
            "extra_copies": mine.extra_copies,
            "ratios": {other: quartiles(mine.seconds, theirs.seconds) for other, theirs in turns.items()},
            "cpu_ratios": {other: quartiles(mine.cpu_seconds, theirs.cpu_seconds) for other, theirs in turns.items()},
            "rounds": asdict(mine),
        }
    return table


def quartiles(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Quartiles of the ratios of two variants in the same rounds.

    >>> quartiles([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    {'q1': 1.5, 'median': 2.0, 'q3': 3.0}
    """
    ratios = [one / other if other else float("nan") for one, other in zip(mine, theirs, strict=True)]
    return dict(zip(("q1", "median", "q3"), quartiles_of(ratios), strict=True))


def quartiles_of(values: Sequence[float]) -> list[float]:
    """First quartile, median and third quartile, interpolated linearly between the values, so never beyond them.

    >>> quartiles_of([1.0, 2.0, 3.0, 10.0]), quartiles_of([7.0])
    ([1.75, 2.5, 4.75], [7.0, 7.0, 7.0])
    """
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
