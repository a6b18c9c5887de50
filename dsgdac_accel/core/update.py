"""The consensus update of Algorithm 1, formed in the receive buffers.

    u_i = gamma * sum_j W_ij (x_j - x_i)

An update is kept as scale * difference, so that neither gamma nor the largest weight costs a pass over memory:

    scale_i      = gamma * max_j W_ij
    difference_i = sum_j (W_ij / max_k W_ik) (x_j - x_i)        over the neighbors j, k != i

Two workers that only have each other share one difference; the second has the negative scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    square: Tensor | None = None
    """||sum_j W_ij x_j / sum_j W_ij - x_i||^2, shape (), if it was measured while the difference was formed.

    Without buckets that another process of the worker counts."""
    sums: Tensor | None = None
    """Sums of the bits of the difference, one for each `SUMMED_BYTES` of a bucket, if asked for; see `pair_update`."""
    skip: Tensor | None = None
    """1 on the device, shape (), if nothing may be added."""
    worker: int = 0
    """The local worker."""

    def norm(self) -> Tensor:
        """Return the distance of the worker to the mean of its neighbors, over all buckets, shape ()."""
        if self.square is not None:
            return self.square.sqrt()
        norms = [torch.linalg.vector_norm(part) for part in self.difference]
        if len(norms) < 2:
            return norms[0] if norms else torch.zeros((), device="cpu")  # everything is frozen
        return torch.stack([norm.double() for norm in norms]).norm()

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
    base = weights.index(largest)
    ratios, squares = [weight / largest for weight in weights], []
    for number, (own, target, *theirs) in enumerate(zip(x, out, *neighbors, strict=True)):
        others = theirs[:base] + theirs[base + 1 :]
        pieces = subtract(theirs[base], own, target, sum(ratios), others, ratios[:base] + ratios[base + 1 :])
        squares += _counted(pieces, number, shares)
    return Update(gamma * largest, list(out), torch.stack(squares).sum() / sum(ratios) ** 2 if squares else None)


def pair_update(
    gamma: float,
    weight: float,
    x: Sequence[Tensor],
    theirs: Sequence[Tensor],
    comes_first: bool,
    out: Sequence[Tensor],
    with_sums: bool = False,
    shares: Sequence[float] = (),
) -> Update:
    """Form the same update for one of two workers i < j that only have each other as neighbors.

    Both form x_j - x_i. Its bits are equal on both if each received what the other still has, so the workers compare
    sums of the bits.

    Args:
        gamma, x, out, shares: as for `neighbors_update`; `out` may be `theirs`.
        weight: W_ij.
        theirs: the parameters of the other worker, a tensor (D,) for each bucket.
        comes_first: whether this worker is i.
        with_sums: whether to sum the bits.
    """
    squares: list[Tensor] = []
    sums: list[Tensor] | None = [] if with_sums else None
    for number, (own, other, target) in enumerate(zip(x, theirs, out, strict=True)):
        first, second = (other, own) if comes_first else (own, other)
        squares += _counted(subtract(first, second, target, sums=sums), number, shares)
    return Update(
        gamma * weight if comes_first else -gamma * weight,
        list(out),
        torch.stack(squares).sum() if squares else None,
        torch.cat(sums) if sums else None,
    )


def group_update(
    gamma: float,
    weights: Sequence[float],
    x: Sequence[Tensor],
    total: Sequence[Tensor],
    out: Sequence[Tensor],
    shares: Sequence[float] = (),
) -> Update:
    """Form the same update for one of m workers that average, from the sum of x over the group.

    With W_j = 1 / m, the difference to the mean of the others is (total - m x) / (m - 1). The scale is divided by m - 1
    in place of the difference, which saves a pass over memory.

    Args:
        gamma, weights, x, out, shares: as for `neighbors_update`; `out` may be `total`.
        total: sum of x over the whole group, a tensor (D,) for each bucket.
    """
    others, squares = len(weights), []
    for number, (own, everybody, target) in enumerate(zip(x, total, out, strict=True)):
        squares += _counted(subtract(everybody, own, target, others + 1), number, shares)
    square = torch.stack(squares).sum() / others**2 if squares else None
    return Update(gamma * sum(weights) / others, list(out), square)


def _counted(pieces: list[Tensor], number: int, shares: Sequence[float]) -> list[Tensor]:
    """Return the squares of a bucket as they count; those that are not finite stay so."""
    return pieces if not shares or shares[number] == 1.0 else [piece * shares[number] for piece in pieces]


def form_updates(gamma: float, round_: int, rounds: Rounds, buckets: Buckets, with_sums: bool = False) -> list[Update]:
    """Form the updates of the local workers that take part in the round, in place of what they received.

    Workers of this process read each other's parameters in place: no update may be added before all are formed.

    Args:
        gamma: the same on all workers.
        round_: decides who mixes with whom.
        rounds: who mixes with whom.
        buckets: the parameters and what was received; an update takes the first receive buffer of its worker.
        with_sums: whether to sum the bits of the differences of pairs.
    """
    first = rounds.workers.start
    updates: dict[int, Update] = {}
    for local, worker in enumerate(rounds.workers):
        plan = rounds.plan(round_, local)
        if not plan.weights or local in updates:  # it sits the round out, and its receive buffers are stale
            continue
        if plan.averaging_group:
            updates |= _updates_of_group(gamma, plan, plan.averaging_group, rounds, buckets)
            continue
        other = rounds.partner(round_, local)
        if other is not None:
            theirs = buckets.received[local][0]
            x, weight = buckets.values(local), plan.weights[other]
            updates[local] = pair_update(gamma, weight, x, theirs, worker < other, theirs, with_sums, buckets.shares)
            continue
        update = updates[local] = _update_of(gamma, local, plan, rounds, buckets)
        partner = next(iter(plan.weights))
        if len(plan.weights) == 1 and partner in rounds.workers:
            back = rounds.plan(round_, partner - first)
            if list(back.weights) == [worker]:  # a pair in this process has one difference, seen from two sides
                scale = -gamma * back.weights[worker]
                updates[partner - first] = Update(scale, update.difference, update.square)
    for local, update in updates.items():
        update.worker = local
    return [updates[local] for local in sorted(updates)]


def _update_of(gamma: float, local: int, plan: RoundPlan, rounds: Rounds, buckets: Buckets) -> Update:
    """Neighbors in other processes come first: they are in the receive buffers, the first of which takes the update."""
    elsewhere = rounds.elsewhere(plan.weights)
    here = [worker for worker in plan.weights if worker in rounds.workers]
    neighbors = [buckets.received[local][slot] for slot in range(len(elsewhere))]
    neighbors += [buckets.values(worker - rounds.workers.start) for worker in here]
    weights = [plan.weights[worker] for worker in elsewhere + here]
    x, out = buckets.values(local), buckets.received[local][0]
    return neighbors_update(gamma, weights, x, neighbors, out, buckets.shares)


def _updates_of_group(
    gamma: float, plan: RoundPlan, group: tuple[int, ...], rounds: Rounds, buckets: Buckets
) -> dict[int, Update]:
    members = rounds.local(group)
    total = buckets.received[members[0]][0]
    if not rounds.spans_processes(group):
        for number, sum_here in enumerate(total):
            sum_here.copy_(buckets.values(members[0])[number])
            for member in members[1:]:
                sum_here.add_(buckets.values(member)[number])
    weights = list(plan.weights.values())  # the same for every member
    shares = buckets.shares
    return {  # the first member comes last, for its receive buffer holds the sum
        member: group_update(gamma, weights, buckets.values(member), total, buckets.received[member][0], shares)
        for member in reversed(members)
    }
