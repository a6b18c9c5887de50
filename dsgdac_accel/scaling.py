"""What a step costs with n workers: bytes, messages and seconds of synchronous and decentralized training.

Every worker has one full-duplex line of `bandwidth` B bytes per second to a network without other bottlenecks, and a
message takes `latency` L seconds besides its bytes: S bytes arrive after L + S / B (Hockney's model). That favours the
all-reduce, whose rings cross every slow link of a real network; a model that only uses pairs can avoid them.

All figures are per worker and step. Ring all-reduce: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms.
Trees: Sanders, Speck and Träff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan. The formulas
know neither noise nor stragglers, which cost synchronous training more; see `synchronous_stall`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.checks import check_integer, check_number, check_writable

MOST_WORKERS = 10_000_000
MOST_PARAMETERS = 1e13
FEWEST_BITS, MOST_BITS = 0.001, 10_000
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes; torch's DistributedDataParallel
_MESSAGE = 64 * 2**20  # bytes; `exchange.CHUNK_BYTES`


@dataclass(frozen=True)
class Traffic:
    """What one worker sends in one step, and how long that takes if nothing else does."""

    bytes_sent: float
    messages: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """One step of one worker."""

    bytes_sent: float
    messages: int
    exchange_seconds: float
    """Of the exchange by itself."""
    seconds: float
    """Of the step, with what of the exchange is not hidden behind computation."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers, their computation and their network.

    >>> slow = Cluster(parameters=1_000_000, compute_seconds=0.18, bandwidth=12.5e6, latency=0.01)
    >>> one_peer_gossip(slow, 4).seconds, one_peer_gossip(slow, 10_000).seconds
    (0.33, 0.33)
    >>> round(ring_ddp(slow, 4).seconds, 3), round(ring_ddp(slow, 10_000).seconds, 1)
    (0.691, 400.7)

    Raises ValueError for values out of range.
    """

    parameters: float
    """Numbers that are exchanged."""
    compute_seconds: float
    """Of forward, backward and update."""
    bandwidth: float
    """Bytes per second in each direction."""
    latency: float = 0.0
    """Seconds of a message besides its bytes, one way."""
    bits: float = 32.0
    """Of a number as gossip sends it; 8-bit blocks of 256 with one 32-bit scale have 8.125."""
    gradient_bits: float = 32.0
    """Of a number as the all-reduce sends it."""
    forward_share: float = 1 / 3
    """Of the computation: that much is over before the first gradient is there."""
    buckets: int | None = None
    """Parts in which gradients are reduced as they become ready; None is DDP's: 1 MiB, then 25 MiB each."""
    overlap: bool = True
    """Whether gossip is hidden behind the next forward and backward."""

    def __post_init__(self) -> None:
        check_number("parameters", self.parameters, minimum=1, maximum=MOST_PARAMETERS)
        check_number("compute_seconds", self.compute_seconds, minimum=0)
        check_number("bandwidth", self.bandwidth, above=0, advice="It is in bytes per second.")
        check_number("latency", self.latency, minimum=0, advice="It is in seconds.")
        for name in ("bits", "gradient_bits"):
            check_number(name, getattr(self, name), minimum=FEWEST_BITS, maximum=MOST_BITS)
        check_number("forward_share", self.forward_share, minimum=0, maximum=1)
        if self.buckets is not None:
            check_integer("buckets", self.buckets, minimum=1)

    @property
    def parameter_bytes(self) -> float:
        """Of one exchange by gossip."""
        return self.parameters * self.bits / 8

    @property
    def gradient_bytes(self) -> float:
        """Of one gradient."""
        return self.parameters * self.gradient_bits / 8

    def gradient_buckets(self) -> tuple[tuple[int, float], ...]:
        """The parts that gradients are reduced in, in order of becoming ready: how many of how many bytes each."""
        size = self.gradient_bytes
        if self.buckets is not None:
            return ((self.buckets, size / self.buckets),)
        if size <= _FIRST_BUCKET:
            return ((1, size),)
        others = math.ceil((size - _FIRST_BUCKET) / _BUCKET)
        return (1, float(_FIRST_BUCKET)), (others, (size - _FIRST_BUCKET) / others)


# ---- traffic


def ring_all_reduce(workers: int, size: float, bandwidth: float = math.inf, latency: float = 0.0) -> Traffic:
    """Sum of `size` bytes over all workers by a ring: 2 (n - 1) rounds of messages of S / n to the right neighbour.

    In n - 1 rounds every worker adds its own part to what comes from the left and hands it on; then each holds one n-th
    of the sum, which goes round in n - 1 more. Bytes 2 (n - 1) S / n, which no all-reduce can undercut; seconds
    2 (n - 1) (L + S / (n B)).

    >>> ring_all_reduce(4, 4e6, bandwidth=12.5e6, latency=0.01)
    Traffic(bytes_sent=6000000.0, messages=6, seconds=0.54)
    """
    rounds = 2 * (check_workers(workers) - 1)
    return Traffic(rounds * size / workers, rounds, rounds * (latency + size / workers / bandwidth))


def tree_all_reduce(workers: int, size: float, bandwidth: float = math.inf, latency: float = 0.0) -> Traffic:
    """The same by two binary trees with pipelining, the best known for many workers: up the trees, then down.

    Each tree sums one half of the numbers. A worker is inside one tree and a leaf of the other, so it sends its half up
    in both and, down, two halves in one: about 2 S bytes. Pieces follow each other without gaps, so that seconds are
    2 ceil(log2 n) L + 2 S / B, in the limit of small pieces; messages are counted as one piece for each half and way.

    >>> tree_all_reduce(1024, 1e6, bandwidth=1e6, latency=0.01)
    Traffic(bytes_sent=2000000.0, messages=4, seconds=2.2)
    """
    if check_workers(workers) < 3:
        return ring_all_reduce(workers, size, bandwidth, latency)
    depth = (workers - 1).bit_length()
    return Traffic(2 * size, 4, 2 * (depth * latency + size / bandwidth))


def one_peer_exchange(workers: int, size: float, bandwidth: float = math.inf, latency: float = 0.0) -> Traffic:
    """`size` bytes to one neighbour and as many from it at the same time: seconds L + S / B, whatever n.

    >>> one_peer_exchange(10_000, 4e6, bandwidth=12.5e6, latency=0.01)
    Traffic(bytes_sent=4000000.0, messages=1, seconds=0.33)
    """
    if check_workers(workers) == 1:
        return Traffic(0.0, 0)
    return Traffic(size, math.ceil(size / _MESSAGE), latency + size / bandwidth)


# ---- steps


def ring_ddp(cluster: Cluster, workers: int) -> Step:
    """Synchronous training: gradients averaged by ring all-reduces, in buckets, while backward goes on.

    Bucket k of sizes s_1 .. s_m is ready when backward has come to its last layer, at
    c_k = F + (C - F) (s_1 + .. + s_k) / S, where F is the time of forward and C that of all computation. Buckets are
    reduced one after the other, T_k seconds each, so that the last ends at max over k of c_k + T_k + .. + T_m (what is
    not waiting for c_k is waiting for the line): then the optimizer steps. At best, with one endless stream of tiny
    buckets, that is max(C, F + T); with one bucket C + T.
    """
    return _ddp(cluster, workers, ring_all_reduce)


def tree_ddp(cluster: Cluster, workers: int) -> Step:
    """`ring_ddp` with `tree_all_reduce`: its latency grows with the logarithm of n."""
    return _ddp(cluster, workers, tree_all_reduce)


def one_peer_gossip(cluster: Cluster, workers: int) -> Step:
    """One-peer gossip, as by the ring, the exponential and the base graph: max(C, L + S / B), whatever n.

    Parameters are sent as soon as they are final, and needed when the next step's computation is over.
    """
    return _gossip(cluster, one_peer_exchange(workers, cluster.parameter_bytes, cluster.bandwidth, cluster.latency))


def complete_gossip(cluster: Cluster, workers: int) -> Step:
    """Gossip with everybody, an all-reduce of the parameters by a ring, hidden like any gossip: max(C, T).

    It has all computation to hide behind, where DDP has only backward, and still its latency grows with n.
    """
    return _gossip(cluster, ring_all_reduce(workers, cluster.parameter_bytes, cluster.bandwidth, cluster.latency))


SCHEMES: dict[str, Callable[[Cluster, int], Step]] = {
    "DDP, ring": ring_ddp,
    "DDP, tree": tree_ddp,
    "one-peer gossip": one_peer_gossip,
    "complete gossip": complete_gossip,
}
"""By the name that tables and plots have for them."""


def _ddp(cluster: Cluster, workers: int, all_reduce: Callable[[int, float, float, float], Traffic]) -> Step:
    forward = cluster.forward_share * cluster.compute_seconds
    backward = cluster.compute_seconds - forward
    bytes_sent, messages, exchange, ready, ended = 0.0, 0, 0.0, 0.0, 0.0
    for count, size in cluster.gradient_buckets():
        part = all_reduce(workers, size, cluster.bandwidth, cluster.latency)
        # Among equal buckets c_k + T_k + .. is linear in k: the first or the last one decides.
        first, last = (
            forward + backward * min(1.0, done / cluster.gradient_bytes)
            for done in (ready + size, ready + count * size)
        )
        ended = max(max(ended, first) + count * part.seconds, last + part.seconds)
        ready += count * size
        bytes_sent += count * part.bytes_sent
        messages += count * part.messages
        exchange += count * part.seconds
    return Step(bytes_sent, messages, exchange, max(ended, cluster.compute_seconds))


def _gossip(cluster: Cluster, traffic: Traffic) -> Step:
    compute, exchange = cluster.compute_seconds, traffic.seconds
    seconds = max(compute, exchange) if cluster.overlap else compute + exchange
    return Step(traffic.bytes_sent, traffic.messages, exchange, seconds)


def synchronous_stall(workers: int, probability: float, seconds: float) -> float:
    """Seconds by which a synchronous step is longer on average when each worker, by itself, stalls in some steps.

    All wait for whoever stalls: (1 - (1 - p)^n) s. A worker alone loses p s, and gossip comes near that where the stall
    is shorter than what the exchange has to spare, since neighbours then have not come to need it.

    >>> round(synchronous_stall(8, 0.1, 0.05), 4), round(synchronous_stall(1, 0.1, 0.05), 4)
    (0.0285, 0.005)
    """
    check_number("probability", probability, minimum=0, maximum=1)
    check_number("seconds", seconds, minimum=0)
    return (1 - (1 - probability) ** check_workers(workers)) * seconds


def check_workers(workers: int) -> int:
    """Raises ValueError for anything but a number of workers."""
    check_integer("workers", workers, minimum=1)
    if workers > MOST_WORKERS:
        raise ValueError(f"workers must be at most {MOST_WORKERS:,}; got {workers:,}.")
    return workers


def worker_counts(largest: int) -> list[int]:
    """1, 2, 4, .. up to `largest`, which is the last whether or not it is a power of two.

    >>> worker_counts(10)
    [1, 2, 4, 8, 10]
    """
    counts = [2**power for power in range(check_workers(largest).bit_length())]
    return counts if counts[-1] == largest else [*counts, largest]


# ---- table and plot


def table_lines(cluster: Cluster, counts: Sequence[int]) -> list[str]:
    """Bytes, messages and milliseconds of each scheme for each number of workers, as text."""
    lines = [f"{'':>9}  " + "  ".join(f"{name:^27}" for name in SCHEMES)]
    lines.append(f"{'workers':>9}  " + "  ".join(f"{'MB':>8} {'messages':>8} {'ms':>9}" for _ in SCHEMES))
    for workers in counts:
        steps = [scheme(cluster, workers) for scheme in SCHEMES.values()]
        cells = [f"{step.bytes_sent / 1e6:8.4g} {step.messages:8d} {1e3 * step.seconds:9.5g}" for step in steps]
        lines.append(f"{workers:9d}  " + "  ".join(cells))
    return lines


def plot(cluster: Cluster, largest: int, path: Path | str) -> Path:
    """Seconds per step, and bytes per step, against the number of workers up to `largest`, as a PNG file.

    Raises the errors of `check_plot`.
    """
    from dsgdac_accel.plotting import BLUE, DPI, GREEN, ORANGE, VERMILION, set_logarithmic

    path = check_plot(Path(path))
    from matplotlib.figure import Figure

    counts = _spread(largest)
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, 2)
    styles = zip(SCHEMES.items(), (VERMILION, ORANGE, BLUE, GREEN), ("-", "--", "-", "--"), strict=True)
    for (name, scheme), colour, dashes in styles:
        steps = [scheme(cluster, workers) for workers in counts]
        panels[0].plot(counts, [step.seconds for step in steps], dashes, color=colour, label=name)
        panels[1].plot(counts, [step.bytes_sent / 1e6 for step in steps], dashes, color=colour, label=name)
    panels[0].axhline(cluster.compute_seconds, color="0.5", linewidth=1, linestyle=":", label="computation alone")
    set_logarithmic(panels[0])
    panels[1].set_ylim(bottom=0)
    for panel, label in zip(panels, ("seconds per step", "MB sent per worker and step"), strict=True):
        panel.set_xscale("log")
        panel.set_xlabel("workers")
        panel.set_ylabel(label)
        panel.grid(True, color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize="small")
    figure.suptitle(described(cluster), fontsize="medium")
    figure.savefig(path, dpi=DPI)
    return path


def check_plot(path: Path, name: str = "path") -> Path:
    """Raises ValueError, which calls it by `name`, where no PNG file can be written, ImportError without matplotlib."""
    if path.suffix != ".png":
        raise ValueError(f"{name} must be a file that ends in .png; got {path}.")
    check_writable(name, path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("The plot needs matplotlib: pip install dsgdac-accel[tasks]") from error
    return path


def described(cluster: Cluster) -> str:
    """The cluster in a line."""
    bits = (
        f"{cluster.bits:g} bits"
        if cluster.bits == cluster.gradient_bits
        else (f"{cluster.bits:g} bits (gradients {cluster.gradient_bits:g})")
    )
    return (
        f"{cluster.parameters / 1e6:g} M parameters of {bits}, {8 * cluster.bandwidth / 1e6:g} Mb/s, "
        f"{1e3 * cluster.latency:g} ms, {1e3 * cluster.compute_seconds:g} ms of computation"
    )


def _spread(largest: int) -> list[int]:
    """About twenty counts a decade, evenly on a logarithmic axis."""
    points = max(1, math.ceil(20 * math.log10(check_workers(largest))))
    return sorted({round(largest ** (point / points)) for point in range(points + 1)})
