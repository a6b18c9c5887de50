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
    squares: list[list[Tensor]]
    """The squared norm of the difference: for each bucket that of its pieces, each of shape ()."""
    ratio_sum: float = 1.0
    """sum_j W_ij / max_j W_ij."""
    checksums: Tensor | None = None
    """Sums of the bits of the difference, one for each `CHECKSUM_BYTES` of a bucket, if asked for."""
    skip: Tensor | None = None
    """1 on the device, shape (), if nothing may be added."""
    local: int = 0
    """The local worker."""

    def norm(self) -> Tensor:
        """Return the distance of the worker to the mean of its neighbors, shape ().

        ||sum_j W_ij x_j / sum_j W_ij - x_i|| = ||difference|| / ratio_sum
        """
        squares = [piece for pieces in self.squares for piece in pieces]
        if not squares:  # everything is frozen
            return torch.zeros((), device="cpu")
        norm = torch.stack(squares).sum().sqrt()
        return norm if self.ratio_sum == 1.0 else norm / self.ratio_sum

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
) -> Update:
    """Form u = gamma * sum_j W_j (x_j - x) for one worker.

    Args:
        gamma: in [0, 1].
        weights: W_j of each neighbor.
        x: the worker's own parameters, a tensor (D,) for each bucket.
        neighbors: x_j of each neighbor, likewise.
        out: where the difference is formed, likewise. May be the first neighbor's tensors, which are read first.

    >>> x, theirs = torch.tensor([1.0]), torch.tensor([3.0])
    >>> update = neighbors_update(0.5, weights=[0.5], x=[x], neighbors=[[theirs]], out=[theirs])
    >>> update.add_to(0, x)
    >>> x
    tensor([1.5000])
    """
    largest, others = max(weights), list(neighbors)
    ratios = [weight / largest for weight in weights]
    ratio_sum, heaviest = sum(ratios), others.pop(ratios.index(1.0))
    ratios.remove(1.0)
    squares = [
        subtract(theirs, own, target, ratio_sum, more, ratios)
        for theirs, own, target, *more in zip(heaviest, x, out, *others, strict=True)
    ]
    return Update(gamma * largest, list(out), squares, ratio_sum)


def pair_update(
    gamma: float,
    weight: float,
    x: Sequence[Tensor],
    theirs: Sequence[Tensor],
    comes_first: bool,
    out: Sequence[Tensor],
    with_checksums: bool = False,
) -> Update:
    """Form u = gamma * W_ij (x_j - x_i), or its negative, for one of two workers i < j that only have each other.

    Both form the difference x_j - x_i. Its bits are equal on both if each received what the other still has, so the
    workers compare its checksums.

    Args:
        gamma, x, out: as for `neighbors_update`; `out` may be `theirs`.
        weight: W_ij = W_ji.
        theirs: the parameters of the other worker, a tensor (D,) for each bucket.
        comes_first: whether this worker is i.
        with_checksums: whether to sum the bits of the difference.
    """
    checksums: list[Tensor] | None = [] if with_checksums else None
    x_i, x_j, scale = (x, theirs, gamma * weight) if comes_first else (theirs, x, -gamma * weight)
    squares = [subtract(b, a, target, checksums=checksums) for a, b, target in zip(x_i, x_j, out, strict=True)]
    return Update(scale, list(out), squares, checksums=torch.cat(checksums) if checksums else None)


def group_update(
    gamma: float, num_workers: int, x: Sequence[Tensor], total: Sequence[Tensor], out: Sequence[Tensor]
) -> Update:
    """Form u = gamma * (total / m - x) for one of m workers that average.

    With W_ij = 1 / m, the difference is sum_j (x_j - x) = total - m x.

    Args:
        gamma, x, out: as for `neighbors_update`; `out` may be `total`.
        num_workers: m.
        total: sum of x over the whole group, a tensor (D,) for each bucket.
    """
    squares = [
        subtract(everybody, own, target, num_workers) for own, everybody, target in zip(x, total, out, strict=True)
    ]
    return Update(gamma / num_workers, list(out), squares, num_workers - 1.0)


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
    for local, worker in enumerate(rounds.workers):
        plan, partner = rounds.plan(round_, local), rounds.partner(round_, local)
        if not plan.weights or local in updates:  # it sits the round out, or its update was formed with another's
            continue
        if plan.averaging_group:
            updates |= _updates_in_group(gamma, plan.averaging_group, rounds, buckets)
            continue
        x, x_j, out = buckets.values(local), _neighbors(local, plan, rounds, buckets), buckets.received[local][0]
        if partner is None:
            updates[local] = neighbors_update(gamma, [plan.weights[j] for j in x_j], x, list(x_j.values()), out)
            continue
        here, weight = rounds.local([partner]), plan.weights[partner]
        update = pair_update(gamma, weight, x, x_j[partner], worker < partner, out, with_checksums and not here)
        updates[local] = update
        for other in here:  # the difference is the same, seen from the other side
            updates[other] = replace(update, scale=-update.scale)
    return [replace(updates[local], local=local) for local in sorted(updates)]


def _neighbors(local: int, plan: RoundPlan, rounds: Rounds, buckets: Buckets) -> dict[int, list[Tensor]]:
    """Return x_j of each neighbor j, those in the receive buffers first, because the update takes the first buffer."""
    received = dict(zip(rounds.elsewhere(plan.weights), buckets.received[local], strict=False))
    return received | {j: buckets.values(j - rounds.workers.start) for j in plan.weights if j in rounds.workers}


def _updates_in_group(gamma: float, group: Sequence[int], rounds: Rounds, buckets: Buckets) -> dict[int, Update]:
    here = rounds.local(group)
    total = buckets.received[here[0]][0]  # `GroupAllReduce` has summed a group that spans processes
    if not rounds.elsewhere(group):
        for target, first, *others in zip(total, *map(buckets.values, here), strict=True):
            target.copy_(first)
            for other in others:
                target.add_(other)
    return {  # the first worker comes last, for its receive buffer holds the sum
        local: group_update(gamma, len(group), buckets.values(local), total, buckets.received[local][0])
        for local in reversed(here)
    }
