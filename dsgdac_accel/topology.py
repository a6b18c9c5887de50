"""Topologies: who averages with whom in each step, as data that anyone can print.

A *round* is the mixing matrix W of one step: worker i adds gamma * sum_j W[i, j] (x_j - x_i). A *topology* is a tuple
of rounds that repeats: step t uses round t modulo the period. Each round is doubly stochastic, so mixing never moves
the mean of the workers, and the rounds together connect every worker with every other. No process group is needed.
"""

import contextlib
import difflib
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsgdac_accel.base_graph import Exchange, base_graph_rounds, hypercube

Round = NDArray[np.float64]
"""Mixing matrix of one step, shape (n, n)."""

TOLERANCE = 1e-9
"""How far a row or column sum of a round may be from 1: float64 rounding passes, float32 rounding of 1/3 does not."""


@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """Mixing matrices that repeat with a period, checked when built.

    Two topologies are equal when their rounds are, whatever their names. Raises ValueError for rounds that are not
    square, of one size, finite, non-negative, doubly stochastic and together connected.

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
    """What the topology is called in logs and errors."""

    rounds: tuple[Round, ...]
    """The matrix of each step of one period, read-only."""

    def __post_init__(self) -> None:
        rounds = tuple(_checked_round(matrix, f"round {index}") for index, matrix in enumerate(self.rounds))
        _check_together(rounds)
        object.__setattr__(self, "rounds", rounds)

    @classmethod
    def from_matrices(cls, matrices: Iterable[Any], name: str = "custom") -> Self:
        """A topology of one's own, from one (n, n) matrix per round: nested lists, NumPy arrays or tensors.

        A directed round (W not symmetric) is accepted as long as its rows and its columns sum to 1.

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
        """Number of rounds after which the topology repeats, at least 1."""
        return len(self.rounds)

    def matrix(self, step: int) -> Tensor:
        """Mixing matrix of `step` >= 0, a fresh (n, n) float64 tensor on the CPU."""
        return torch.from_numpy(self._round(step).copy())

    def neighbors(self, step: int, worker: int) -> dict[int, float]:
        """The peers that `worker` receives from at `step`, in order, each with its weight W[worker, peer].

        >>> build_topology("ring", 4).neighbors(step=0, worker=0)
        {1: 0.3333333333333333, 3: 0.3333333333333333}
        """
        row = self._round(step)[self._checked_worker(worker)]
        return {int(peer): float(row[peer]) for peer in row.nonzero()[0] if peer != worker}

    def recipients(self, step: int, worker: int) -> tuple[int, ...]:
        """The peers that `worker` sends to at `step`, in order; for a symmetric round the peers it receives from."""
        column = self._round(step)[:, self._checked_worker(worker)]
        return tuple(int(peer) for peer in column.nonzero()[0] if peer != worker)

    def averaging_groups(self, step: int) -> tuple[tuple[int, ...], ...] | None:
        """The groups of two or more workers that take their plain average at `step`, or None if the round does more.

        A worker in no group sits the round out, so a round without any communication gives ().

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

    def of_survivors(self, workers: Sequence[int]) -> "Topology":
        """The topology of those of its `workers` that are left when others are lost, numbered anew in order.

        A topology of the library is built for as many workers: to drop the lost ones would part a ring, for example.
        Where there is none (`one_peer_exponential` but for powers of two) it is `base_graph`. Any other keeps its
        rounds, and the weight of the lost workers goes to those that would have used it; where that would not be a
        topology any more, directed or in parts, it is `base_graph`, too.

        >>> build_topology("one_peer_ring", 5).of_survivors([0, 1, 3, 4]).matrix(0)[0]
        tensor([0.5000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
        >>> ring = Topology.from_matrices([build_topology("ring", 4).matrix(0)])
        >>> ring.of_survivors([0, 1, 2]).matrix(0)[0]
        tensor([0.6667, 0.3333, 0.0000], dtype=torch.float64)
        """
        left = [self._checked_worker(worker) for worker in workers]
        if len(left) == self.num_workers:
            return self
        if self.name in TOPOLOGIES and self == build_topology(self.name, self.num_workers):
            with contextlib.suppress(ValueError):
                return build_topology(self.name, len(left))
            return build_topology("base_graph", len(left))
        rounds = [round_[np.ix_(left, left)] for round_ in self.rounds]
        try:
            return Topology(self.name, tuple(round_ + np.diag(1 - round_.sum(axis=1)) for round_ in rounds))
        except ValueError:
            return build_topology("base_graph", len(left))

    def period_matrix(self) -> Tensor:
        """What a whole period does at gamma = 1: the product of its rounds, first one rightmost, (n, n) float64."""
        return torch.from_numpy(self._product())

    def spectral_gap(self) -> float:
        """Share of the disagreement that one period at gamma = 1 removes at least, in [0, 1]; 1 is exact averaging.

        1 minus the largest singular value of (product of the rounds - 11'/n).

        >>> round(build_topology("one_peer_exponential", 8).spectral_gap(), 12)
        1.0
        """
        deviation = self._product() - 1 / self.num_workers
        return max(0.0, 1.0 - float(np.linalg.norm(deviation, ord=2)))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the rounds without the name, 64 hex digits: workers compare it to see that they agree."""
        digest = hashlib.sha256(f"{self.period} rounds of {self.num_workers} workers".encode())
        for round_ in self.rounds:
            digest.update(round_.astype("<f8").tobytes())  # little-endian, so that every machine hashes the same bytes
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, num_workers={self.num_workers}, period={self.period})"

    def _product(self) -> Round:
        product = np.eye(self.num_workers)
        for round_ in self.rounds:
            product = round_ @ product
        return product

    def _round(self, step: int) -> Round:
        if step < 0:
            raise ValueError(f"step counts from 0; got {step}.")
        return self.rounds[step % self.period]

    def _checked_worker(self, worker: int) -> int:
        # A negative index would silently name a worker from the end.
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker must be from 0 to {self.num_workers - 1}; got {worker}.")
        return worker


def build_topology(name: str, num_workers: int) -> Topology:
    """The topology called `name` (a key of TOPOLOGIES) for `num_workers` >= 1 workers.

    A single worker has the trivial topology [[1]] under every name. Raises ValueError for an unknown name and for a
    number of workers that the topology cannot serve.

    >>> build_topology("base_graph", 6).period
    4
    """
    if not isinstance(name, str) or name not in TOPOLOGIES:
        raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}; got {name!r}.{_suggestion(name)}")
    if isinstance(num_workers, bool) or not isinstance(num_workers, numbers.Integral) or num_workers < 1:
        raise ValueError(f"num_workers must be a whole number >= 1; got {num_workers!r}.")
    num_workers = int(num_workers)
    rounds = TOPOLOGIES[name](num_workers) if num_workers > 1 else [np.ones((1, 1))]
    return Topology(name, tuple(rounds))


def one_peer_ring(num_workers: int) -> list[Round]:
    """Pair each worker with one ring neighbour, then with the other; each pair takes its average.

    Even n: (0,1)(2,3).. then (1,2)(3,4)..(n-1,0), period 2 (1 for two workers). Odd n: the ring without one worker
    splits into pairs in one way only, and who sits out goes round the ring, n-1, 0, 1, ..: period n. A worker then
    meets its right, left, right, .. neighbour in turn, with one round of rest in n, and every edge of the ring is used.
    """
    if num_workers == 2:
        starts = [0]
    elif num_workers % 2 == 0:
        starts = [0, 1]
    else:
        starts = list(range(num_workers))  # the worker before `start` sits out
    return [_pairs_from(start, num_workers) for start in starts]


def one_peer_exponential(num_workers: int) -> list[Round]:
    """In round j, worker i takes the average with worker i XOR 2^j; one period of log2(n) rounds averages exactly.

    Raises ValueError unless the number of workers is a power of two.
    """
    if num_workers & (num_workers - 1):
        raise ValueError(
            f"one_peer_exponential needs a power of two of workers; got {num_workers}. "
            f"Use 'base_graph' for other counts."
        )
    return [_exchange_round(exchanges, num_workers) for exchanges in hypercube(range(num_workers))]


def complete(num_workers: int) -> list[Round]:
    """Everyone averages with everyone: W = 11'/n, period 1."""
    return [np.full((num_workers, num_workers), 1 / num_workers)]


def ring(num_workers: int) -> list[Round]:
    """Average with both ring neighbours: weights 1/3 (1/2 for two workers), period 1."""
    return [_circulant({1, -1}, num_workers)]


def exponential(num_workers: int) -> list[Round]:
    """Average with the workers at distances 1, 2, 4, .. up to n/2 on both sides of the ring, period 1.

    All weights, one's own included, are 1 / (number of peers + 1), as every worker has the same number of peers.
    """
    distances = [1 << bit for bit in range((num_workers // 2).bit_length())]
    return [_circulant({sign * distance for distance in distances for sign in (1, -1)}, num_workers)]


def grid(num_workers: int) -> list[Round]:
    """Neighbours on the most square grid of exactly n cells (a path for a prime n), period 1.

    Weights are Metropolis-Hastings: W[i, j] = 1 / (1 + max(degree i, degree j)), which makes an irregular graph
    doubly stochastic; a worker keeps the rest of its weight to itself.
    """
    height = max(side for side in range(1, math.isqrt(num_workers) + 1) if num_workers % side == 0)
    row, column = np.divmod(np.arange(num_workers), num_workers // height)
    distance = abs(row[:, None] - row) + abs(column[:, None] - column)
    adjacent = distance == 1
    degree = adjacent.sum(axis=1)
    round_ = adjacent / (1 + np.maximum(degree[:, None], degree))
    return [round_ + np.diag(1 - round_.sum(axis=1))]


def base_graph(num_workers: int) -> list[Round]:
    """One peer per round, and one period of O(log n) rounds averages any number of workers exactly.

    The Base-2 graph of Takezawa et al. (2023), explained in `dsgdac_accel.base_graph`.
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
"""Every name that `build_topology` knows, with the function that lists its rounds for two workers or more."""


def _pairs_from(start: int, num_workers: int) -> Round:
    """Average the ring's pairs (start, start + 1), (start + 2, start + 3), ..; with odd n, start - 1 sits out."""
    lefts = range(start, start + num_workers - 1, 2)
    pairs = [(left % num_workers, (left + 1) % num_workers, 0.5) for left in lefts]
    return _exchange_round(pairs, num_workers)


def _exchange_round(exchanges: Iterable[Exchange], num_workers: int) -> Round:
    """The matrix of a round of disjoint pairs; whoever is in none keeps its parameters."""
    round_ = np.eye(num_workers)
    for one, other, weight in exchanges:
        round_[one, other] = round_[other, one] = weight
        round_[one, one] = round_[other, other] = 1 - weight
    return round_


def _circulant(offsets: set[int], num_workers: int) -> Round:
    """Equal weights for oneself and the workers at `offsets` along the ring; offsets that coincide count once."""
    members = {offset % num_workers for offset in offsets} | {0}
    round_ = np.zeros((num_workers, num_workers))
    for worker in range(num_workers):
        round_[worker, [(worker + offset) % num_workers for offset in members]] = 1 / len(members)
    return round_


def _suggestion(name: object) -> str:
    close = difflib.get_close_matches(str(name), TOPOLOGIES, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _checked_round(matrix: Any, label: str) -> Round:
    """The matrix as a read-only float64 array, or a ValueError that names the first rule it breaks."""
    round_ = _as_float64(matrix, label)
    if round_.ndim != 2 or round_.shape[0] != round_.shape[1] or not len(round_):
        raise ValueError(
            f"each round must be a square matrix with a row and a column per worker; {label} has shape "
            f"{round_.shape}. Pass a list of (n, n) matrices, [W] for a single one."
        )
    if not np.isfinite(round_).all():
        raise ValueError(f"weights must be finite; {label} has {_first(round_, ~np.isfinite(round_))}.")
    if (round_ < -TOLERANCE).any():
        raise ValueError(f"weights must be >= 0; {label} has {_first(round_, round_ < -TOLERANCE)}.")
    _check_sums(round_, label)
    # A weight of -1e-17, left by a subtraction, means 0; adding 0.0 turns -0.0 into 0.0 for the fingerprint.
    round_ = np.maximum(round_, 0.0) + 0.0
    round_.setflags(write=False)
    return round_


def _as_float64(matrix: Any, label: str) -> Round:
    """A fresh float64 copy of whatever NumPy or torch can read as real numbers."""
    try:
        array = matrix.detach().cpu().numpy() if isinstance(matrix, Tensor) else np.array(matrix)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"its entries are of type {array.dtype}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"each round must be a matrix of real numbers; {label} is not: {error}.") from error
    return array.astype(np.float64)


def _first(round_: Round, where: NDArray[np.bool_]) -> str:
    row, column = np.argwhere(where)[0]
    return f"W[{row}, {column}] = {round_[row, column]}"


def _check_sums(round_: Round, label: str) -> None:
    for axis, line in ((1, "row"), (0, "column")):
        sums = round_.sum(axis=axis)
        worst = int(abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(
                f"each round must be doubly stochastic, or mixing moves the mean of the workers: every row and column "
                f"sums to 1 within {TOLERANCE:g}; {line} {worst} of {label} sums to {float(sums[worst])!r}. "
                f"Normalise it in float64; Metropolis-Hastings weights do for any undirected graph."
            )


def _check_together(rounds: tuple[Round, ...]) -> None:
    """Refuse no rounds, rounds of different sizes, and workers that can never hear of each other."""
    if not rounds:
        raise ValueError("a topology needs at least one round; got none.")
    sizes = [len(round_) for round_ in rounds]
    if len(set(sizes)) > 1:
        raise ValueError(f"all rounds must be for the same number of workers; got sizes {sizes}.")
    reached = _reached_from_first(np.any(np.stack(rounds) > 0, axis=0))
    if not reached.all():
        raise ValueError(
            f"the rounds together must connect all workers; no path joins worker 0 and worker "
            f"{int(reached.argmin())}. Add a round that links their two parts."
        )


def _reached_from_first(adjacent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which workers a path from worker 0 reaches; in a doubly stochastic matrix a path back then exists as well."""
    reached = np.arange(len(adjacent)) == 0
    while True:
        further = reached | adjacent[reached].any(axis=0)
        if (further == reached).all():
            return reached
        reached = further
