"""Duration of an exchange over each link and in each round, measured with the library's own `Exchange`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsgdac_accel.core.exchange import Exchange, Incoming
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.report import Finding, size_text, time_text
from dsgdac_accel.topology import Topology

PROBE_BYTES = 2**20
MOST_BYTES = 2**30
"""Largest exchange to measure; a larger one is scaled up from it. It needs twice its size in memory."""
MOST_ROUNDS = 16
"""Number of rounds to measure of a longer period."""
_REPEATS = 3
_SLOW_FACTOR, _SLOW_SECONDS = 4.0, 0.02
"""A link is slow if it takes this many times, and this many seconds longer than, the median link."""


@dataclass(frozen=True)
class Link:
    """Two processes that exchange the parameters of one model at the same time."""

    processes: tuple[int, int]
    seconds: float
    size: int
    """Bytes in each direction."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second in each direction."""
        return self.size / self.seconds

    def __str__(self) -> str:
        one, other = self.processes
        return f"workers {one} and {other}: {time_text(self.seconds)} ({size_text(self.bandwidth)}/s each way)"


@dataclass(frozen=True)
class Measured:
    """Durations of exchanges, the same on all processes."""

    size: int
    """Bytes of the parameters of one worker."""
    measured_size: int
    """Bytes that were sent to measure; less than `size` if that would take too long or too much memory."""
    links: tuple[Link, ...]
    """Every pair of processes that exchange in some round."""
    rounds: tuple[float, ...]
    """Seconds of the whole exchange in each round, on the slowest worker."""

    @property
    def exchange_seconds(self) -> float:
        """Mean seconds of an exchange."""
        return sum(self.rounds) / len(self.rounds)


def matchings(topology: Topology, per_process: int = 1) -> list[list[tuple[int, int]]]:
    """Return all pairs of processes that exchange in some round, in sets of disjoint pairs.

    >>> from dsgdac_accel.topology import build_topology
    >>> matchings(build_topology("one_peer_ring", 4))
    [[(0, 1), (2, 3)], [(0, 3), (1, 2)]]
    """
    pairs: dict[tuple[int, int], None] = {}
    for round_ in topology.rounds:
        workers = zip(*round_.nonzero(), strict=True)
        for one, other in sorted({(int(i) // per_process, int(j) // per_process) for i, j in workers}):
            if one != other:
                pairs[min(one, other), max(one, other)] = None
    sets: list[list[tuple[int, int]]] = []
    for pair in pairs:
        for disjoint in sets:
            if not any({*pair} & {*other} for other in disjoint):
                disjoint.append(pair)
                break
        else:
            sets.append([pair])
    return sets


def measure_links(
    group: WorkerGroup, topology: Topology, size: int, per_process: int = 1, budget: float = 6.0
) -> Measured:
    """Exchange `size` bytes over every link and in every round. Collective.

    Args:
        group: the processes.
        topology: topology of all workers.
        size: bytes of the parameters of one worker, float32.
        per_process: number of workers in each process.
        budget: seconds that this may take, roughly; a slow network is measured with smaller messages.

    Raises:
        WorkerLostError: a process does not answer.
    """
    pairs = matchings(topology, per_process)
    pairwise = _pairwise(pairs, group.size)
    rounds = min(topology.period, MOST_ROUNDS)
    probe = min(size, PROBE_BYTES)
    probed = [max(times) for times in _times(group, pairwise, probe, 1, len(pairs))]
    # All processes know the same times, so they choose the same size.
    expected = _REPEATS * (sum(probed) + rounds * per_process * max(probed)) / max(probe, 4)
    measured = max(min(size, MOST_BYTES // per_process, int(budget / expected)), probe)
    scale = size / measured if measured else 1.0
    times = _times(group, pairwise, measured, 1, len(pairs))
    links = [
        Link(pair, max(own[end] for end in pair) * scale, size)
        for disjoint, own in zip(pairs, times, strict=True)
        for pair in disjoint
    ]
    whole = [max(own) * scale for own in _times(group, topology, measured, per_process, rounds)]
    return Measured(size, measured, tuple(sorted(links, key=lambda link: link.processes)), tuple(whole))


def _pairwise(pairs: Sequence[Sequence[tuple[int, int]]], processes: int) -> Topology:
    """Return a topology with one round per set of pairs."""
    rounds = []
    for disjoint in pairs:
        matrix = np.eye(processes)
        for one, other in disjoint:
            matrix[[one, one, other, other], [one, other, one, other]] = 0.5
        rounds.append(matrix)
    return Topology.from_matrices(rounds, name="links")


def _times(group: WorkerGroup, topology: Topology, size: int, per_process: int, rounds: int) -> list[list[float]]:
    """Return the seconds of an exchange of `size` bytes, by round and process."""
    sent = torch.zeros(max(1, size // 4), device=group.device)
    exchange = Exchange(group, topology, per_process)
    received = [[[torch.zeros_like(sent)] for _ in range(slots)] for slots in exchange.slots]
    mine = [min(_seconds(group, exchange, step, sent, received) for _ in range(_REPEATS)) for step in range(rounds)]
    by_process = group.all_gather_object(mine, "measuring the links")
    return [list(times) for times in zip(*by_process, strict=True)]


def _seconds(group: WorkerGroup, exchange: Exchange, step: int, sent: torch.Tensor, received: Incoming) -> float:
    """Return the seconds of one exchange that all processes start together."""
    group.all_reduce_max_(torch.zeros(1, device=group.device), "measuring the links")
    _synchronize(group.device)
    started = time.perf_counter()
    exchange.post(step, f"the exchange of step {step}", lambda worker, receiver: [sent], received)
    exchange.wait()
    _synchronize(group.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_links(measured: Measured, topology: Topology) -> list[Finding]:
    """Name the slowest link, and say how long an exchange takes."""
    by_time = sorted(measured.links, key=lambda link: link.seconds)
    median, slowest = by_time[(len(by_time) - 1) // 2], by_time[-1]
    message = f"{len(by_time)} link{'s' * (len(by_time) > 1)}, {size_text(measured.size)} each; slowest, {slowest}"
    if len(by_time) > 1:
        message += f"; fastest, {by_time[0]}"
    link = Finding("ok", "links", message)
    if slowest.seconds > _SLOW_FACTOR * median.seconds and slowest.seconds - median.seconds > _SLOW_SECONDS:
        message += f". The slowest takes {slowest.seconds / median.seconds:.2g} times as long as the median"
        advice = "Check the network between these two, or number the workers so that they are not neighbors"
        link = Finding("warning", "links", message, advice, slowest.processes)
    message = f"an exchange of {size_text(measured.size)} takes {time_text(measured.exchange_seconds)}"
    if len(measured.rounds) > 1:
        number = max(range(len(measured.rounds)), key=measured.rounds.__getitem__)
        message += f", {time_text(measured.rounds[number])} in the slowest round ({number} of {topology.period})"
    if measured.measured_size < measured.size:
        message += f", estimated from {size_text(measured.measured_size)}"
    message += "; it is hidden if forward and backward take longer"
    return [link, Finding("ok", "exchange", message)]
