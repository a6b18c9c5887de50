"""Topologies: which workers mix in each step, as plain matrices that need no process group.

A *round* is the mixing matrix W of one step: worker i adds gamma sum_j W[i, j] (x_j - x_i) to its parameters. A
*topology* is a sequence of rounds that repeats: step t uses round t modulo the period. Every round is doubly
stochastic, so mixing never moves the mean of the workers. The rounds of one period together connect all workers.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsgdac_accel.base_graph import Exchange, base_graph_rounds, hypercube
from dsgdac_accel.checks import check_choice, check_integer

Round = NDArray[np.float64]
"""Mixing matrix of one step, shape (n, n)."""

TOLERANCE = 1e-9
"""Largest distance of a row or column sum from 1. Float64 rounding passes; a 1/3 rounded to float32 does not."""


@dataclass(frozen=True)
class RoundPlan:
    """The part of one worker in one round."""

    weights: dict[int, float]
    """W_ij of every neighbor j that it receives from."""
    recipients: tuple[int, ...]
    """The neighbors that it sends to."""
    averaging_group: tuple[int, ...] | None = None
    """Set if the round averages a group of three or more workers uniformly, so that an all-reduce can do it."""


@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """A sequence of mixing matrices that repeats, checked on construction.

    Two topologies are equal if their rounds are equal; the names do not matter.

    Raises:
        ValueError: a round is not square, finite, non-negative and doubly stochastic; the rounds differ in size; or
            the rounds together do not connect all workers.

    >>> ring = build_topology("one_peer_ring", 4)
    >>> ring
    Topology('one_peer_ring', num_workers=4, period=2)
    >>> ring.matrix(step=1)
    tensor([[0.5000, 0.0000, 0.0000, 0.5000],
            [0.0000, 0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000, 0.0000],
            [0.5000, 0.0000, 0.0000, 0.5000]], dtype=torch.float64)
    >>> ring.neighbors(step=2, worker=0)
    {1: 0.5}
    """

    name: str
    """Name shown in logs and errors."""

    rounds: tuple[Round, ...]
    """One read-only (n, n) float64 matrix per step of a period."""

    def __post_init__(self) -> None:
        rounds = tuple(_checked_round(matrix, f"round {index}") for index, matrix in enumerate(self.rounds))
        _check_together(rounds)
        object.__setattr__(self, "rounds", rounds)

    @classmethod
    def from_matrices(cls, matrices: Iterable[Any], name: str = "custom") -> Self:
        """Build a custom topology from one (n, n) matrix per round.

        Args:
            matrices: nested lists, NumPy arrays or tensors. A directed round (W not symmetric) is accepted if its rows
                and its columns sum to 1.
            name: name shown in logs and errors.

        Raises:
            ValueError: see `Topology`.

        >>> Topology.from_matrices([[[0.75, 0.25], [0.25, 0.75]]]).spectral_gap()
        0.5
        """
        return cls(name, tuple(matrices))

    @property
    def num_workers(self) -> int:
        """Number of workers n, at least 1."""
        return len(self.rounds[0])

    @property
    def period(self) -> int:
        """Number of rounds before the topology repeats, at least 1."""
        return len(self.rounds)

    def matrix(self, step: int) -> Tensor:
        """Return the mixing matrix of `step` >= 0 as a new (n, n) float64 tensor on the CPU."""
        return torch.from_numpy(self._round(step).copy())

    def neighbors(self, step: int, worker: int) -> dict[int, float]:
        """Return the neighbors j that `worker` receives from at `step`, in ascending order, with weights W[worker, j].

        >>> build_topology("ring", 4).neighbors(step=0, worker=0)
        {1: 0.3333333333333333, 3: 0.3333333333333333}
        """
        row = self._round(step)[self._checked_worker(worker)]
        return {int(j): float(row[j]) for j in row.nonzero()[0] if j != worker}

    def recipients(self, step: int, worker: int) -> tuple[int, ...]:
        """Return the neighbors that `worker` sends to at `step`, in ascending order.

        In a symmetric round these are the neighbors that it receives from.
        """
        column = self._round(step)[:, self._checked_worker(worker)]
        return tuple(int(j) for j in column.nonzero()[0] if j != worker)

    def plan(self, step: int, worker: int) -> RoundPlan:
        """Return the part of `worker` in the round of `step`.

        >>> build_topology("one_peer_ring", 4).plan(step=0, worker=1)
        RoundPlan(weights={0: 0.5}, recipients=(0,), averaging_group=None)
        """
        groups = self.averaging_groups(step) or ()
        mine = next((group for group in groups if worker in group and len(group) > 2), None)
        return RoundPlan(self.neighbors(step, worker), self.recipients(step, worker), mine)

    def averaging_groups(self, step: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the groups of workers that take their plain average at `step`.

        Returns:
            Groups of two or more workers. A worker in no group sits the round out, so a round without communication
            gives (). None if the round is not made of plain averages of disjoint groups.

        >>> build_topology("one_peer_ring", 5).averaging_groups(step=0)
        ((0, 1), (2, 3))
        >>> build_topology("ring", 5).averaging_groups(step=0) is None
        True
        """
        round_ = self._round(step)
        supports = sorted({tuple(row.nonzero()[0].tolist()) for row in round_})
        if sum(map(len, supports)) != self.num_workers:
            return None  # the groups overlap
        averaging = np.zeros_like(round_)
        for group in supports:
            averaging[np.ix_(group, group)] = 1 / len(group)
        if not np.allclose(round_, averaging, rtol=0, atol=TOLERANCE):
            return None
        return tuple(group for group in supports if len(group) > 1)

    def period_matrix(self) -> Tensor:
        """Return the effect of one period at gamma = 1: the (n, n) float64 product W(T-1) ... W(1) W(0)."""
        product = np.eye(self.num_workers)
        for round_ in self.rounds:
            product = round_ @ product
        return torch.from_numpy(product)

    def spectral_gap(self) -> float:
        """Return the smallest share of disagreement that one period at gamma = 1 removes, in [0, 1].

            1 - ||W(T-1) ... W(0) - 11'/n||_2

        A gap of 1 means that one period averages exactly.

        >>> round(build_topology("one_peer_exponential", 8).spectral_gap(), 12)
        1.0
        """
        deviation = self.period_matrix().numpy() - 1 / self.num_workers
        return max(0.0, 1.0 - float(np.linalg.norm(deviation, ord=2)))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the rounds as 64 hex digits. Workers compare it to verify that they use the same topology."""
        digest = hashlib.sha256(f"{self.period} rounds of {self.num_workers} workers".encode())
        for round_ in self.rounds:
            digest.update(round_.astype("<f8").tobytes())  # little-endian: the same bytes on every machine
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, num_workers={self.num_workers}, period={self.period})"

    def _round(self, step: int) -> Round:
        if step < 0:
            raise ValueError(f"step counts from 0; got {step}.")
        return self.rounds[step % self.period]

    def _checked_worker(self, worker: int) -> int:
        # NumPy would accept a negative index and count from the end.
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker must be from 0 to {self.num_workers - 1}; got {worker}.")
        return worker


def build_topology(name: str, num_workers: int) -> Topology:
    """Build a topology of the library by name.

    Args:
        name: a key of TOPOLOGIES.
        num_workers: number of workers, at least 1. A single worker has the topology [[1]] under every name.

    Raises:
        ValueError: the name is unknown, or the topology does not exist for this number of workers.

    >>> build_topology("base_graph", 6).period
    4
    """
    check_choice("topology", name, TOPOLOGIES, OTHER_TOPOLOGY_NAMES)
    num_workers = check_integer("num_workers", num_workers, minimum=1)
    rounds = TOPOLOGIES[name](num_workers) if num_workers > 1 else [np.ones((1, 1))]
    return Topology(name, tuple(rounds))


def one_peer_ring(num_workers: int) -> list[Round]:
    """Pair each worker with its two ring neighbors in turn; each pair takes its average.

    Even n: pairs (0, 1), (2, 3), ... alternate with (1, 2), (3, 4), ..., (n-1, 0). The period is 2 (1 for n = 2).

    Odd n: one worker sits out each round, in the order n-1, 0, 1, .... The period is n. Each worker alternates between
    its right and left neighbor, sits out one round in n, and every edge of the ring is used.
    """
    if num_workers == 2:
        starts = [0]
    elif num_workers % 2 == 0:
        starts = [0, 1]
    else:
        starts = list(range(num_workers))  # the worker before `start` sits out
    return [_pairs_from(start, num_workers) for start in starts]


def one_peer_exponential(num_workers: int) -> list[Round]:
    """Pair worker i with worker i XOR 2^j in round j; log2(n) rounds average exactly.

    Raises:
        ValueError: the number of workers is not a power of two.
    """
    if num_workers & (num_workers - 1):
        raise ValueError(
            f"one_peer_exponential needs a number of workers that is a power of two; got {num_workers}. "
            f"Use 'base_graph' for other numbers."
        )
    return [_exchange_round(exchanges, num_workers) for exchanges in hypercube(range(num_workers))]


def complete(num_workers: int) -> list[Round]:
    """Average all workers in every step: W = 11'/n, period 1."""
    return [np.full((num_workers, num_workers), 1 / num_workers)]


def ring(num_workers: int) -> list[Round]:
    """Average each worker with both ring neighbors: weights 1/3 (1/2 for two workers), period 1."""
    return [_circulant({1, -1}, num_workers)]


def exponential(num_workers: int) -> list[Round]:
    """Average each worker with those at ring distances 1, 2, 4, ... up to n/2 on both sides, period 1.

    All workers have the same number of neighbors, k. Every weight, including the worker's own, is 1 / (k + 1).
    """
    distances = [1 << bit for bit in range((num_workers // 2).bit_length())]
    return [_circulant({sign * distance for distance in distances for sign in (1, -1)}, num_workers)]


def grid(num_workers: int) -> list[Round]:
    """Mix each worker with its neighbors on the most square grid of n cells (a path for a prime n), period 1.

    Weights are Metropolis-Hastings: W[i, j] = 1 / (1 + max(degree of i, degree of j)). The worker's own weight is the
    remainder to 1, which makes an irregular graph doubly stochastic.
    """
    height = max(side for side in range(1, math.isqrt(num_workers) + 1) if num_workers % side == 0)
    row, column = np.divmod(np.arange(num_workers), num_workers // height)
    distance = abs(row[:, None] - row) + abs(column[:, None] - column)
    adjacent = distance == 1
    degree = adjacent.sum(axis=1)
    round_ = adjacent / (1 + np.maximum(degree[:, None], degree))
    return [round_ + np.diag(1 - round_.sum(axis=1))]


def base_graph(num_workers: int) -> list[Round]:
    """Pair workers so that one period of O(log n) rounds averages any number of workers exactly.

    This is the Base-2 graph of Takezawa et al. (2023); see `dsgdac_accel.base_graph`.
    """
    return [_exchange_round(exchanges, num_workers) for exchanges in base_graph_rounds(num_workers)]


TOPOLOGIES: dict[str, Callable[[int], list[Round]]] = {
    "one_peer_ring": one_peer_ring,
    "one_peer_exponential": one_peer_exponential,
    "complete": complete,
    "ring": ring,
    "exponential": exponential,
    "grid": grid,
    "base_graph": base_graph,
}
"""Topologies of `build_topology` by name. Each function returns the rounds for two or more workers."""


def _pairs_from(start: int, num_workers: int) -> Round:
    """Average the ring pairs (start, start + 1), (start + 2, start + 3), ...; for odd n, worker start - 1 sits out."""
    lefts = range(start, start + num_workers - 1, 2)
    pairs = [(left % num_workers, (left + 1) % num_workers, 0.5) for left in lefts]
    return _exchange_round(pairs, num_workers)


def _exchange_round(exchanges: Iterable[Exchange], num_workers: int) -> Round:
    """Return the matrix of a round of disjoint pairs. A worker in no pair keeps its parameters."""
    round_ = np.eye(num_workers)
    for one, other, weight in exchanges:
        round_[one, other] = round_[other, one] = weight
        round_[one, one] = round_[other, other] = 1 - weight
    return round_


def _circulant(offsets: set[int], num_workers: int) -> Round:
    """Average each worker with those at `offsets` along the ring; coinciding offsets count once."""
    members = {offset % num_workers for offset in offsets} | {0}
    round_ = np.zeros((num_workers, num_workers))
    for worker in range(num_workers):
        round_[worker, [(worker + offset) % num_workers for offset in members]] = 1 / len(members)
    return round_


def _checked_round(matrix: Any, label: str) -> Round:
    """Return the matrix as a read-only float64 array; raise a ValueError that names the first broken rule."""
    round_ = _as_float64(matrix, label)
    if round_.ndim != 2 or round_.shape[0] != round_.shape[1] or not len(round_):
        raise ValueError(
            f"each round must be a square matrix with one row and column per worker; {label} has shape "
            f"{round_.shape}. Pass a list of (n, n) matrices, [W] for a single round."
        )
    if not np.isfinite(round_).all():
        raise ValueError(f"weights must be finite; {label} has {_first_entry(round_, ~np.isfinite(round_))}.")
    if (round_ < -TOLERANCE).any():
        raise ValueError(f"weights must be >= 0; {label} has {_first_entry(round_, round_ < -TOLERANCE)}.")
    _check_sums(round_, label)
    # A subtraction can leave -1e-17 for 0. Adding 0.0 turns -0.0 into 0.0, which has other bytes in the fingerprint.
    round_ = np.maximum(round_, 0.0) + 0.0
    round_.setflags(write=False)
    return round_


def _as_float64(matrix: Any, label: str) -> Round:
    """Copy a list, array or tensor of real numbers to a new float64 array."""
    try:
        array = matrix.detach().cpu().numpy() if isinstance(matrix, Tensor) else np.array(matrix)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"its entries are of type {array.dtype}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"each round must be a matrix of real numbers; {label} is not: {error}.") from error
    return array.astype(np.float64)


def _first_entry(round_: Round, where: NDArray[np.bool_]) -> str:
    row, column = np.argwhere(where)[0]
    return f"W[{row}, {column}] = {round_[row, column]}"


def _check_sums(round_: Round, label: str) -> None:
    for axis, line in ((1, "row"), (0, "column")):
        sums = round_.sum(axis=axis)
        worst = int(abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(
                f"each round must be doubly stochastic (rows and columns sum to 1 within {TOLERANCE:g}), or mixing "
                f"moves the mean of the workers; {line} {worst} of {label} sums to {float(sums[worst])!r}. "
                f"Normalize it in float64, or use Metropolis-Hastings weights, which fit any undirected graph."
            )


def _check_together(rounds: tuple[Round, ...]) -> None:
    """Raise a ValueError unless there are rounds, all of one size, that together connect all workers."""
    if not rounds:
        raise ValueError("a topology needs at least one round; got none.")
    sizes = [len(round_) for round_ in rounds]
    if len(set(sizes)) > 1:
        raise ValueError(f"all rounds must have the same number of workers; got sizes {sizes}.")
    reached = _reached_from_first(np.any(np.stack(rounds) > 0, axis=0))
    if not reached.all():
        raise ValueError(
            f"the rounds together must connect all workers; no path joins worker 0 and worker "
            f"{int(reached.argmin())}. Add a round that links the two parts."
        )


def _reached_from_first(adjacent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which workers a path from worker 0 reaches. In a doubly stochastic matrix, a path back exists as well."""
    reached = np.arange(len(adjacent)) == 0
    while True:
        further = reached | adjacent[reached].any(axis=0)
        if (further == reached).all():
            return reached
        reached = further


OTHER_TOPOLOGY_NAMES = {
    "hypercube": "one_peer_exponential",
    "one_peer_exp": "one_peer_exponential",
    "static_exponential": "exponential",
    "one_peer": "one_peer_ring",
    "torus": "grid",
    "full": "complete",
    "fully_connected": "complete",
    "all_reduce": "complete",
    "allreduce": "complete",
}
"""Names of topologies that other libraries and papers use."""
