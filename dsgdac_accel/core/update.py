"""The consensus update of Algorithm 1, formed in the receive buffers.

    u_i = gamma * sum_j W_ij (x_j - x_i)        over the neighbors j != i

An update is kept as scale * difference, so that neither gamma nor the largest weight costs a pass over memory:

    scale_i      = gamma * max_j W_ij
    difference_i = sum_j (W_ij / max_k W_ik) (x_j - x_i)

Two workers that only have each other share one difference; the second has the negative scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import Buckets
from dsgdac_accel.core.kernels import add_scaled, subtract
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.topology import RoundPlan


@dataclass
class Update:
    """u = scale * difference, for the parameters of one worker."""

    scale: float
    difference: list[Tensor]
    """(D,) for each bucket."""
    square: Tensor
    """||sum_j W_ij x_j / sum_j W_ij - x_i||^2, shape (), without buckets that another process of the worker counts."""
    checksums: Tensor | None = None
    """Sums of the bits of the difference, one for each `CHECKSUM_BYTES` of a bucket, if asked for."""
    skip: Tensor | None = None
    """1 on the device, shape (), if nothing may be added."""
    local: int = 0
    """The local worker."""

    def norm(self) -> Tensor:
        """Return the distance of the worker to the mean of its neighbors, over all buckets, shape ()."""
        return self.square.sqrt()

    def add_to(self, number: int, x: Tensor) -> None:
        """x += scale * difference, for the bucket with this number."""
        add_scaled(x, self.difference[number], self.scale, self.skip)

    def dense(self, number: int) -> Tensor:
        """Return the difference for the bucket with this number, (D,)."""
        return self.difference[number]


def neighbors_update(
    gamma: float,
    weights: Sequence[float],
    x: Sequence[Tensor],
    neighbors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
    shares: Sequence[float] = (),
) -> Update:
    """Form u = gamma * sum_j W_j (x_j - x) for one worker.

    Args:
        gamma: in [0, 1].
        weights: W_j of each neighbor.
        x: the worker's own parameters, a tensor (D,) for each bucket.
        neighbors: x_j of each neighbor, likewise.
        out: where the difference is formed, likewise. May be the first neighbor's tensors, which are read first.
        shares: how much of each bucket's square counts, see `Bucket.share`; by default all of it.

    >>> x, theirs = torch.tensor([1.0]), torch.tensor([3.0])
    >>> update = neighbors_update(0.5, weights=[0.5], x=[x], neighbors=[[theirs]], out=[theirs])
    >>> update.add_to(0, x)
    >>> x
    tensor([1.5000])
    """
    largest = max(weights)
    ratios, others = [weight / largest for weight in weights], list(neighbors)
    total = sum(ratios)
    base = others.pop(ratios.index(1.0))
    ratios.remove(1.0)
    square = _subtract(base, x, out, shares, total, others, ratios)
    return Update(gamma * largest, list(out), square / total**2)


def pair_update(
    gamma: float,
    weight: float,
    x: Sequence[Tensor],
    theirs: Sequence[Tensor],
    comes_first: bool,
    out: Sequence[Tensor],
    with_checksums: bool = False,
    shares: Sequence[float] = (),
) -> Update:
    """Form u = gamma * W_ij (x_j - x_i), or its opposite, for one of two workers i < j that only have each other.

    Both form the difference x_j - x_i. Its bits are equal on both if each received what the other still has, so the
    workers compare its checksums.

    Args:
        gamma, x, out, shares: as for `neighbors_update`; `out` may be `theirs`.
        weight: W_ij = W_ji.
        theirs: the parameters of the other worker, a tensor (D,) for each bucket.
        comes_first: whether this worker is i.
        with_checksums: whether to sum the bits of the difference.
    """
    checksums: list[Tensor] | None = [] if with_checksums else None
    x_i, x_j = (x, theirs) if comes_first else (theirs, x)
    square = _subtract(x_j, x_i, out, shares, checksums=checksums)
    scale = gamma * weight if comes_first else -gamma * weight
    return Update(scale, list(out), square, torch.cat(checksums) if checksums else None)


def group_update(
    gamma: float,
    weights: Sequence[float],
    x: Sequence[Tensor],
    total: Sequence[Tensor],
    out: Sequence[Tensor],
    shares: Sequence[float] = (),
) -> Update:
    """Form u = gamma * (total / m - x) for one of m workers that average.

    With W_ij = 1 / m, scale is gamma / m and the difference is total - m x = sum_j (x_j - x).

    Args:
        gamma, weights, x, out, shares: as for `neighbors_update`; `out` may be `total`.
        total: sum of x over the whole group, a tensor (D,) for each bucket.
    """
    others = len(weights)
    square = _subtract(total, x, out, shares, others + 1)
    return Update(gamma * sum(weights) / others, list(out), square / others**2)


def _subtract(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    out: Sequence[Tensor],
    shares: Sequence[float],
    factor: float = 1,
    others: Sequence[Sequence[Tensor]] = (),
    ratios: Sequence[float] = (),
    checksums: list[Tensor] | None = None,
) -> Tensor:
    """out <- a + sum_k ratio_k other_k - factor * b for each bucket, see `subtract`. Return the squared norm."""
    squares: list[Tensor] = []
    for number, (minuend, subtrahend, target, *more) in enumerate(zip(a, b, out, *others, strict=True)):
        pieces = subtract(minuend, subtrahend, target, factor, more, ratios, checksums)
        share = shares[number] if shares else 1.0
        squares += pieces if share == 1.0 else [share * piece for piece in pieces]  # a square that is NaN stays NaN
    return total_square(squares)


def total_square(squares: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares, each of shape (); 0 if there are none, because all parameters are frozen."""
    return torch.stack(list(squares)).sum() if squares else torch.zeros((), device="cpu")


def form_updates(
    gamma: float, round_: int, rounds: Rounds, buckets: Buckets, with_checksums: bool = False
) -> list[Update]:
    """Form the updates of the local workers that take part in a round, each in the first receive buffer of its worker.

    Workers of this process read each other's parameters in place: no update may be added before all are formed.

    Args:
        gamma: the same on all workers.
        round_: the round.
        rounds: who mixes with whom.
        buckets: the parameters and what was received.
        with_checksums: whether to sum the bits of the difference to a partner in another process.
    """
    updates: dict[int, Update] = {}
    for local in range(rounds.local_workers):
        plan, partner = rounds.plan(round_, local), rounds.partner(round_, local)
        if not plan.weights or local in updates:  # it sits the round out, or its update was formed with its partner's
            continue
        if plan.averaging_group:
            updates |= _updates_in_group(gamma, plan, plan.averaging_group, rounds, buckets)
        elif partner is not None:
            updates |= _updates_in_pair(gamma, plan, local, partner, rounds, buckets, with_checksums)
        else:
            updates[local] = _update_of(gamma, plan, local, rounds, buckets)
    return [replace(updates[local], local=local) for local in sorted(updates)]


def _update_of(gamma: float, plan: RoundPlan, local: int, rounds: Rounds, buckets: Buckets) -> Update:
    elsewhere = rounds.elsewhere(plan.weights)
    here = [worker for worker in plan.weights if worker in rounds.workers]
    received = buckets.received[local]
    # First those in the receive buffers, for the update takes the first buffer.
    neighbors = [*received[: len(elsewhere)], *map(buckets.values, rounds.local(here))]
    weights = [plan.weights[worker] for worker in elsewhere + here]
    return neighbors_update(gamma, weights, buckets.values(local), neighbors, received[0], buckets.shares)


def _updates_in_pair(
    gamma: float, plan: RoundPlan, local: int, partner: int, rounds: Rounds, buckets: Buckets, with_checksums: bool
) -> dict[int, Update]:
    """If the partner is here, too, the pair has one difference, seen from two sides."""
    x, out, here = buckets.values(local), buckets.received[local][0], rounds.local([partner])
    theirs = buckets.values(here[0]) if here else out
    weight, comes_first = plan.weights[partner], rounds.workers[local] < partner
    update = pair_update(gamma, weight, x, theirs, comes_first, out, with_checksums and not here, buckets.shares)
    return {local: update, **{other: replace(update, scale=-update.scale) for other in here}}


def _updates_in_group(
    gamma: float, plan: RoundPlan, group: tuple[int, ...], rounds: Rounds, buckets: Buckets
) -> dict[int, Update]:
    here = rounds.local(group)
    total = buckets.received[here[0]][0]  # `GroupAllReduce` has summed a group that spans processes
    if not rounds.spans_processes(group):
        for target, first, *others in zip(total, *map(buckets.values, here), strict=True):
            target.copy_(first)
            for other in others:
                target.add_(other)
    weights, shares = list(plan.weights.values()), buckets.shares  # the same for every worker of the group
    return {  # the first worker comes last, for its receive buffer holds the sum
        local: group_update(gamma, weights, buckets.values(local), total, buckets.received[local][0], shares)
        for local in reversed(here)
    }
