"""Duration of an exchange over each link and of all workers, measured with the library's own `Exchange`."""

from __future__ import annotations

import math
import time
from statistics import fmean, median_low

import numpy as np
import torch

from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.report import Finding
from dsgdac_accel.topology import Topology

Links = dict[tuple[int, int], float]
"""Seconds of an exchange between two processes."""

PROBE_BYTES = 2**20
MOST_BYTES = 2**30
"""Most memory for what is received. A larger exchange is scaled up from a smaller one."""
_REPEATS = 3
_SLOW_FACTOR, _SLOW_SECONDS = 4.0, 0.02
"""A link is slow if it takes this many times, and this many seconds longer than, the median link."""


def measure_links(
    group: WorkerGroup, topology: Topology, size: int, local_workers: int = 1, budget: float = 6.0
) -> tuple[Links, float]:
    """Measure exchanges of `size` bytes. Collective; the result is the same on all processes.

    Args:
        group: the processes.
        topology: topology of all workers.
        size: bytes of the parameters of one worker, float32.
        local_workers: number of workers in each process.
        budget: seconds that this may take, roughly; a slow network is measured with smaller messages.

    Returns:
        Seconds of each link, and of an exchange of all workers (mean of the rounds).

    Raises:
        WorkerLostError: a process does not answer.
    """
    probe = min(size, PROBE_BYTES)
    probed = sum(map(max, _times(group, topology, probe, local_workers)))
    affordable = int(probe * budget / (2 * _REPEATS * probed))
    measured = max(probe, min(size, MOST_BYTES // topology.num_workers, affordable))
    scale = size / measured
    apart = _times(group, topology, measured, local_workers, all_reduce=False)
    links = {pair: scale * seconds for pair, seconds in link_times(topology, apart, local_workers).items()}
    return links, scale * fmean(map(max, _times(group, topology, measured, local_workers)))


def link_times(topology: Topology, times: list[list[float]], local_workers: int = 1) -> Links:
    """Attribute the seconds of each process in each round to its links.

    A slow link delays both of its ends, so it takes at most the seconds of the faster end.

    >>> from dsgdac_accel.topology import build_topology
    >>> link_times(build_topology("one_peer_ring", 4), [[1, 1, 2, 2], [3, 4, 4, 3]])
    {(0, 1): 1, (2, 3): 2, (0, 3): 3, (1, 2): 4}
    """
    links: Links = {}
    for round_, seconds in zip(topology.rounds, times, strict=True):
        for one, other in sorted({tuple(sorted(map(int, pair))) for pair in np.argwhere(round_) // local_workers}):
            if one != other:
                faster = min(seconds[one], seconds[other])
                links[one, other] = min(links.get((one, other), math.inf), faster)
    return links


def _times(
    group: WorkerGroup, topology: Topology, size: int, local_workers: int, all_reduce: bool = True
) -> list[list[float]]:
    """Return the seconds of an exchange of `size` bytes, by round and process."""
    sent = torch.zeros(max(1, size // 4), device=group.device)
    rounds = Rounds(topology, group.members, local_workers, all_reduce)
    exchange = Exchange(group, rounds)
    received = [[[torch.zeros_like(sent)] for _ in range(slots)] for slots in rounds.slots]

    def synchronize() -> None:
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    def seconds(round_: int) -> float:
        # Not a barrier, whose workers leave one after the other.
        group.all_reduce_max_(torch.zeros(1, device=group.device), "measuring the links")
        synchronize()
        started = time.perf_counter()
        exchange.post(round_, "measuring the links", lambda worker, receiver: [sent], received)
        exchange.wait()
        synchronize()
        return time.perf_counter() - started

    mine = [min(seconds(round_) for _ in range(_REPEATS)) for round_ in range(topology.period)]
    by_process = group.all_gather_object(mine, "measuring the links")
    return [list(times) for times in zip(*by_process, strict=True)]


def check_links(size: int, links: Links, exchange_seconds: float) -> list[Finding]:
    """Name the slowest link, and say how long an exchange of `size` bytes takes."""
    pair, median = max(links, key=links.__getitem__), median_low(links.values())
    slowest = links[pair]
    text = (
        f"{len(links)} measured; slowest, workers {pair[0]} and {pair[1]}: {1e3 * slowest:.3g} ms "
        f"({size / slowest / 1e6:.3g} MB/s each way); median {1e3 * median:.3g} ms"
    )
    link = Finding("ok", "links", text)
    if slowest > _SLOW_FACTOR * median and slowest - median > _SLOW_SECONDS:
        advice = "Check the network between these two, or number the workers so that they are not neighbors"
        link = Finding("warning", "links", text, advice)
    text = f"an exchange of {size / 1e6:.3g} MB takes {1e3 * exchange_seconds:.3g} ms"
    return [link, Finding("ok", "exchange", f"{text}; it is hidden if forward and backward take longer")]
