"""Cost of a training step with n workers: bytes, messages and seconds of synchronous and decentralized training.

Every worker has one full-duplex line of bandwidth B (bytes per second) to a network without other bottlenecks. A
message of S bytes arrives after L + S / B, where L is the latency in seconds (Hockney's model). The model favors the
all-reduce: in a real network its ring crosses every slow link, which gossip in pairs can avoid. Noise and stragglers
are not modeled; they cost synchronous training more.

All numbers are per worker and step. Ring all-reduce: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms.
Trees: Sanders, Speck and Träff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dsgdac_accel.checks import check_integer, check_number

MOST_WORKERS = 10_000_000
MOST_PARAMETERS = 1e13
FEWEST_BITS, MOST_BITS = 0.001, 10_000
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes; the buckets of torch's DistributedDataParallel
_MESSAGE = 64 * 2**20  # bytes; a piece of the library's exchange on gloo


@dataclass(frozen=True)
class Traffic:
    """Data that one worker sends in one step, and the seconds this takes by itself."""

    bytes_sent: float
    messages: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """One training step of one worker."""

    bytes_sent: float
    messages: int
    exchange_seconds: float
    """Duration of the exchange by itself."""
    seconds: float
    """Duration of the step, including the part of the exchange that computation does not hide."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers with their computation and their network.

    >>> slow = Cluster(parameters=1_000_000, compute_seconds=0.18, bandwidth=12.5e6, latency=0.01)
    >>> one_peer_gossip(slow, 4).seconds, one_peer_gossip(slow, 10_000).seconds
    (0.33, 0.33)
    >>> round(ring_ddp(slow, 4).seconds, 3), round(ring_ddp(slow, 10_000).seconds, 1)
    (0.691, 400.7)

    Raises:
        ValueError: a value is out of range.
    """

    parameters: float
    """Number of parameters to exchange."""
    compute_seconds: float
    """Duration of forward, backward and update."""
    bandwidth: float
    """Bytes per second in each direction."""
    latency: float = 0.0
    """Seconds per message, one way, on top of the time for its bytes."""
    bits: float = 32.0
    """Bits per parameter in gossip; those of each `comm_dtype` are in `core.formats.FORMATS`."""
    gradient_bits: float = 32.0
    """Bits per gradient entry in the all-reduce."""
    forward_share: float = 1 / 3
    """Share of the computation that is over before the first gradient is ready."""
    buckets: int | None = None
    """Number of equal buckets for the gradients; None takes DDP's: the first has 1 MiB, the others 25 MiB."""
    overlap: bool = True
    """Whether gossip runs behind the next forward and backward."""

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
        """Bytes of the parameters as gossip sends them."""
        return self.parameters * self.bits / 8

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one gradient as the all-reduce sends it."""
        return self.parameters * self.gradient_bits / 8

    def gradient_buckets(self) -> tuple[tuple[int, float], ...]:
        """Return (count, bytes of each) for the runs of equal buckets, in the order in which they become ready."""
        size = self.gradient_bytes
        if self.buckets is not None:
            return ((self.buckets, size / self.buckets),)
        if size <= _FIRST_BUCKET:
            return ((1, size),)
        others = math.ceil((size - _FIRST_BUCKET) / _BUCKET)
        return (1, float(_FIRST_BUCKET)), (others, (size - _FIRST_BUCKET) / others)


# ---- traffic of one collective or exchange


def ring_all_reduce(workers: int, size: float, bandwidth: float = math.inf, latency: float = 0.0) -> Traffic:
    """Sum `size` bytes over all workers by a ring.

    Each of 2 (n - 1) rounds sends S / n bytes to the right neighbor. In the first n - 1 rounds every worker adds its
    part to the data from its left neighbor and passes it on; then each worker holds one n-th of the sum, which
    circulates in n - 1 more rounds. Bytes: 2 (n - 1) S / n, the least possible. Seconds: 2 (n - 1) (L + S / (n B)).

    >>> ring_all_reduce(4, 4e6, bandwidth=12.5e6, latency=0.01)
    Traffic(bytes_sent=6000000.0, messages=6, seconds=0.54)
    """
    rounds = 2 * (check_workers(workers) - 1)
    return Traffic(rounds * size / workers, rounds, rounds * (latency + size / workers / bandwidth))


def tree_all_reduce(workers: int, size: float, bandwidth: float = math.inf, latency: float = 0.0) -> Traffic:
    """Sum `size` bytes over all workers by two pipelined binary trees, the best known method for many workers.

    Each tree sums one half of the data, up the tree and down again. A worker is an inner node of one tree and a leaf of
    the other: it sends its half up in both trees and two halves down in one, about 2 S bytes. Pieces follow each other
    without gaps, so in the limit of small pieces the seconds are 2 ceil(log2 n) L + 2 S / B. The messages count one
    piece per half and direction.

    >>> tree_all_reduce(1024, 1e6, bandwidth=1e6, latency=0.01)
    Traffic(bytes_sent=2000000.0, messages=4, seconds=2.2)
    """
    if check_workers(workers) < 3:
        return ring_all_reduce(workers, size, bandwidth, latency)
    depth = (workers - 1).bit_length()
    return Traffic(2 * size, 4, 2 * (depth * latency + size / bandwidth))


def one_peer_exchange(workers: int, size: float, bandwidth: float = math.inf, latency: float = 0.0) -> Traffic:
    """Send `size` bytes to one neighbor and receive as many at the same time: L + S / B seconds for any n.

    >>> one_peer_exchange(10_000, 4e6, bandwidth=12.5e6, latency=0.01)
    Traffic(bytes_sent=4000000.0, messages=1, seconds=0.33)
    """
    if check_workers(workers) == 1:
        return Traffic(0.0, 0)
    return Traffic(size, math.ceil(size / _MESSAGE), latency + size / bandwidth)


# ---- training steps


def ring_ddp(cluster: Cluster, workers: int) -> Step:
    """Synchronous training that averages gradients by ring all-reduces, in buckets, during backward.

    Bucket k of sizes s_1 .. s_m is ready at c_k = F + (C - F) (s_1 + .. + s_k) / S, where F is the time of forward and
    C that of the whole computation. Buckets are reduced one after the other in T_k seconds each, so the last one ends
    at max over k of c_k + T_k + .. + T_m; then the optimizer steps. The bounds are max(C, F + T) for many tiny buckets
    and C + T for a single one.
    """
    return _ddp(cluster, workers, ring_all_reduce)


def tree_ddp(cluster: Cluster, workers: int) -> Step:
    """Synchronous training with `tree_all_reduce`, whose latency grows with the logarithm of n."""
    return _ddp(cluster, workers, tree_all_reduce)


def one_peer_gossip(cluster: Cluster, workers: int) -> Step:
    """Gossip with one peer per step (one-peer ring, exponential, base graph): max(C, L + S / B) for any n.

    Parameters are sent as soon as they are final and are needed when the computation of the next step ends.
    """
    return _gossip(cluster, one_peer_exchange(workers, cluster.parameter_bytes, cluster.bandwidth, cluster.latency))


def complete_gossip(cluster: Cluster, workers: int) -> Step:
    """Gossip with all workers: a ring all-reduce of the parameters behind the next step, max(C, T).

    The exchange has the whole computation to hide behind, where DDP has backward only. Its latency still grows with n.
    """
    return _gossip(cluster, ring_all_reduce(workers, cluster.parameter_bytes, cluster.bandwidth, cluster.latency))


SCHEMES: dict[str, Callable[[Cluster, int], Step]] = {
    "DDP, ring": ring_ddp,
    "DDP, tree": tree_ddp,
    "one-peer gossip": one_peer_gossip,
    "complete gossip": complete_gossip,
}
"""The schemes by their names in tables and plots."""


def _ddp(cluster: Cluster, workers: int, all_reduce: Callable[[int, float, float, float], Traffic]) -> Step:
    forward = cluster.forward_share * cluster.compute_seconds
    backward = cluster.compute_seconds - forward
    bytes_sent, messages, exchange, ready, ended = 0.0, 0, 0.0, 0.0, 0.0
    for count, size in cluster.gradient_buckets():
        part = all_reduce(workers, size, cluster.bandwidth, cluster.latency)
        # Among equal buckets c_k + T_k + .. is linear in k, so the first or the last one decides.
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


def check_workers(workers: int) -> int:
    """Return `workers` if it is an integer from 1 to MOST_WORKERS; raise ValueError otherwise."""
    return check_integer("workers", workers, minimum=1, maximum=MOST_WORKERS)


def worker_counts(largest: int) -> list[int]:
    """Return the powers of two up to `largest`, and `largest` itself.

    >>> worker_counts(10)
    [1, 2, 4, 8, 10]
    """
    counts = [2**power for power in range(check_workers(largest).bit_length())]
    return counts if counts[-1] == largest else [*counts, largest]
