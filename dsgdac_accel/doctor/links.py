"""How long one exchange takes, over each link and in each round, measured with the library's own `Exchange`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.report import Finding, size_text, time_text
from dsgdac_accel.topology import Topology

PROBE_BYTES = 2**20
MOST_BYTES = 2**30
"""A larger exchange is measured with so much and scaled up: it takes memory twice."""
MOST_ROUNDS = 16
"""Of a longer period only so many rounds are measured."""
_REPEATS = 3
_SLOW_FACTOR, _SLOW_SECONDS = 4.0, 0.02
"""A link is slow that takes so many times, and so much longer, than the link in the middle."""
_OFTEN = 10


@dataclass(frozen=True)
class Link:
    """What two processes need to send each other the parameters of one model at the same time."""

    processes: tuple[int, int]
    latency: float
    """Seconds for a message of one number."""
    seconds: float
    """Seconds for the parameters."""
    size: int
    """Their bytes."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second in each direction."""
        return self.size / self.seconds

    def between(self) -> str:
        """The pair in words."""
        return f"workers {self.processes[0]} and {self.processes[1]}"


@dataclass(frozen=True)
class Measured:
    """Times of exchanges, the same on all processes."""

    size: int
    """Bytes of the parameters of one worker."""
    measured_size: int
    """Bytes that were sent to find out; less where all of them would take too long or too much memory."""
    links: tuple[Link, ...]
    """Every pair of processes that the topology joins."""
    rounds: tuple[float, ...]
    """Seconds of the whole exchange in each round, by the slowest worker."""
    bytes_sent: int
    """By this process in the first round."""
    radius_seconds: float
    """Of one measurement of the consensus radius, or one average of the workers."""

    @property
    def exchange_seconds(self) -> float:
        """Of one exchange, the mean over the rounds."""
        return sum(self.rounds) / len(self.rounds)


def matchings(topology: Topology, per_process: int = 1) -> list[list[tuple[int, int]]]:
    """All pairs of processes that exchange in some round, in sets of pairs that can be measured at the same time.

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
    found: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = next((group for group in found if not {*pair} & {end for other in group for end in other}), None)
        if free is None:
            found.append([pair])
        else:
            free.append(pair)
    return found


def measure_links(
    group: WorkerGroup, topology: Topology, size: int, per_process: int = 1, budget: float = 6.0
) -> Measured:
    """Exchange `size` bytes along every link and in every round. Collective.

    Args:
        group: the processes.
        topology: of all workers.
        size: bytes of the parameters of one worker, float32.
        per_process: workers of each process.
        budget: seconds that this may take, roughly; a slow network is measured with smaller messages.

    Raises WorkerLostError where a process does not answer.
    """
    pairs = matchings(topology, per_process)
    of_pairs = _pairwise(pairs, group.size)
    rounds = min(topology.period, MOST_ROUNDS)
    small = _times(group, of_pairs, _buffer(group, 4), range(len(pairs)))
    probe = min(size, PROBE_BYTES)
    tried = _times(group, of_pairs, _buffer(group, probe), range(len(pairs)))
    probed = [max(times) for times in zip(*tried, strict=True)]
    # The plan is the same on all processes, since the times are.
    expected = _REPEATS * (sum(probed) + (rounds + 2) * per_process * max(probed)) / max(probe, 4)
    affordable = int(budget / expected)
    measured = max(min(size, MOST_BYTES // per_process, affordable), probe)
    scale = size / measured if measured else 1.0
    buffer = _buffer(group, measured)
    took = _times(group, of_pairs, buffer, range(len(pairs)))
    links = [
        Link(pair, max(small[end][number] for end in pair), max(took[end][number] for end in pair) * scale, size)
        for number, joined in enumerate(pairs)
        for pair in joined
    ]
    whole, sent = _measure_rounds(group, topology, [buffer] * per_process, range(rounds))
    return Measured(
        size=size,
        measured_size=measured,
        links=tuple(sorted(links, key=lambda link: link.processes)),
        rounds=tuple(seconds * scale for seconds in whole),
        bytes_sent=round(sent * scale),
        radius_seconds=_radius_seconds(group, buffer) * scale,
    )


def _buffer(group: WorkerGroup, size: int) -> Tensor:
    return torch.zeros(max(1, size // 4), device=group.device)


def _pairwise(pairs: Sequence[Sequence[tuple[int, int]]], processes: int) -> Topology:
    rounds = []
    for joined in pairs:
        matrix = np.eye(processes)
        for one, other in joined:
            matrix[[one, one, other, other], [one, other, one, other]] = 0.5
        rounds.append(matrix)
    return Topology.from_matrices(rounds, name="links")


def _times(group: WorkerGroup, topology: Topology, sent: Tensor, rounds: Sequence[int]) -> list[list[float]]:
    """Seconds of each round, for each process."""
    exchange = Exchange(group, topology, [[sent]])
    mine = [min(_seconds(group, exchange, step) for _ in range(_REPEATS)) for step in rounds]
    exchange.release()
    return group.all_gather_object(mine, "measuring the links")


def _measure_rounds(
    group: WorkerGroup, topology: Topology, sent: Sequence[Tensor], rounds: Sequence[int]
) -> tuple[list[float], int]:
    exchange = Exchange(group, topology, [[tensor] for tensor in sent])
    mine = [min(_seconds(group, exchange, step) for _ in range(_REPEATS)) for step in rounds]
    exchange.post(0)
    exchange.wait()
    bytes_sent = exchange.bytes_sent
    exchange.release()
    shares = group.all_gather_object(mine, "measuring an exchange")
    return [max(times) for times in zip(*shares, strict=True)], bytes_sent


def _seconds(group: WorkerGroup, exchange: Exchange, step: int) -> float:
    """One exchange, begun by all processes at the same time."""
    group.all_reduce_max_(torch.zeros(1, device=group.device), "measuring the links")
    _synchronise(group)
    started = time.perf_counter()
    exchange.post(step)
    exchange.wait()
    _synchronise(group)
    return time.perf_counter() - started


def _radius_seconds(group: WorkerGroup, buffer: Tensor) -> float:
    group.all_reduce_max_(torch.zeros(1, device=group.device), "measuring an average")
    _synchronise(group)
    started = time.perf_counter()
    group.all_reduce_mean_(buffer, "measuring an average")
    _synchronise(group)
    return max(group.all_gather_object(time.perf_counter() - started, "measuring an average"))


def _synchronise(group: WorkerGroup) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


# ---- findings


def check_links(measured: Measured, topology: Topology, config: GossipConfig | None) -> list[Finding]:
    """What the times mean for a run; without a configuration, for one that averages gradients over all workers."""
    if config is None:
        text = f"an all-reduce of {size_text(measured.size)} takes {time_text(measured.exchange_seconds)}"
        return [*_link_findings(measured), Finding("ok", "exchange", f"{text}, which DDP hides behind backward")]
    return [*_link_findings(measured), *_exchange_findings(measured, topology, config), *_radius(measured, config)]


def _link_findings(measured: Measured) -> list[Finding]:
    by_time = sorted(measured.links, key=lambda link: link.seconds)
    middle, slowest = by_time[(len(by_time) - 1) // 2], by_time[-1]
    shown = {"slowest": slowest, "fastest": by_time[0]} if len(by_time) > 1 else {"only": slowest}
    text = "; ".join(f"{which}, {_described(link)}" for which, link in shown.items())
    text = f"{len(by_time)} link{'s' if len(by_time) > 1 else ''}: {text}"
    if slowest.seconds > _SLOW_FACTOR * middle.seconds and slowest.seconds - middle.seconds > _SLOW_SECONDS:
        factor = slowest.seconds / middle.seconds
        advice = "Look at the network between these two, or number the workers so that they are not neighbours"
        slow = f"{slowest.between()} have the slowest link, {factor:.2g} times the time of the middle one"
        return [Finding("warning", "links", f"{slow}. {text}", advice, slowest.processes)]
    return [Finding("ok", "links", text)]


def _described(link: Link) -> str:
    return (
        f"{link.between()}: {time_text(link.seconds)} for {size_text(link.size)} each way "
        f"({size_text(link.bandwidth)}/s), {time_text(link.latency)} for a small message"
    )


def _exchange_findings(measured: Measured, topology: Topology, config: GossipConfig) -> list[Finding]:
    seconds = measured.exchange_seconds
    text = f"an exchange of {size_text(measured.size)} takes {time_text(seconds)}"
    if len(measured.rounds) > 1:
        slowest = max(range(len(measured.rounds)), key=measured.rounds.__getitem__)
        text += f" (round {slowest} of {topology.period} {time_text(measured.rounds[slowest])})"
    if measured.measured_size < measured.size:
        text += f", reckoned from {size_text(measured.measured_size)}"
    if not config.overlap:
        advice = f"Set overlap = true to hide it: every step now takes {time_text(seconds)} longer"
        return [Finding("warning", "exchange", text, advice)]
    text += ": hidden behind the step if forward and backward take longer"
    if topology.name == "complete" and topology.num_workers >= 8 and seconds > 0.05:
        one_peer = max(link.seconds for link in measured.links)
        advice = (
            f"complete averages all {topology.num_workers} workers at every step; one_peer_exponential or base_graph "
            f"reach the same average in a few steps of some {time_text(one_peer)} each"
        )
        return [Finding("warning", "exchange", text, advice)]
    return [Finding("ok", "exchange", text)]


def _radius(measured: Measured, config: GossipConfig) -> list[Finding]:
    each = measured.radius_seconds
    if not config.log_every:
        return [Finding("ok", "radius", f"{time_text(each)} a measurement, at evaluations only")]
    text = f"a measurement of the consensus radius takes {time_text(each)}, every {config.log_every} steps"
    if config.log_every < _OFTEN and each / config.log_every > 0.005:
        advice = f"Set log_every = 50: nothing hides it, and it now adds {time_text(each / config.log_every)} to a step"
        return [Finding("warning", "radius", text, advice)]
    return [Finding("ok", "radius", text)]
