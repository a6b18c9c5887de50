"""The consensus update of Algorithm 1, formed from the copies s that were exchanged, in the receive buffers.

    u_i = gamma * sum_j W_ij (s_j - s_i)        over the neighbors j != i

An update is kept as scale * difference, so that neither gamma nor the largest weight costs a pass over memory:

    scale_i      = gamma * max_j W_ij
    difference_i = sum_j (W_ij / max_k W_ik) (s_j - s_i)

Two workers that only have each other share one difference; the second has the negative scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsgdac_accel.core.copies import Copies
from dsgdac_accel.core.kernels import subtract
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.topology import RoundPlan


@dataclass
class Update:
    """u = scale * difference, for the parameters of one worker."""

    scale: float
    difference: list[Tensor]
    """(D,) for each buffer."""
    squares: list[Tensor]
    """The squared norms of the pieces of the difference, each of shape ()."""
    ratio_sum: float = 1.0
    """sum_j W_ij / max_j W_ij."""
    skip: Tensor | None = None
    """1 on the device, shape (), if nothing may be added."""
    local: int = 0
    """The local worker."""
    formed_by: int = 0
    """The local worker in whose receive buffer the difference is: of two that only have each other, the first."""

    def square(self) -> Tensor:
        """Return the squared distance of the worker to the mean of its neighbors, shape ().

        ||sum_j W_ij x_j / sum_j W_ij - x_i||^2 = ||difference||^2 / ratio_sum^2
        """
        if not self.squares:  # everything is frozen
            return torch.zeros((), device="cpu")
        square = torch.stack(self.squares).sum()
        return square if self.ratio_sum == 1.0 else square / self.ratio_sum**2


def neighbors_update(
    gamma: float,
    weights: Sequence[float],
    own: Sequence[Tensor],
    neighbors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
) -> Update:
    """Form u = gamma * sum_j W_j (s_j - s) for one worker.

    Args:
        gamma: in [0, 1].
        weights: W_j of each neighbor.
        own: s, the worker's own copy, a tensor (D,) for each buffer.
        neighbors: s_j of each neighbor, likewise.
        out: where the difference is formed, likewise. May be the first neighbor's tensors, which are read first.

    >>> own, theirs = torch.tensor([1.0]), torch.tensor([3.0])
    >>> update = neighbors_update(0.5, weights=[0.5], own=[own], neighbors=[[theirs]], out=[theirs])
    >>> own + update.scale * update.difference[0]
    tensor([1.5000])
    """
    largest, others = max(weights), list(neighbors)
    ratios = [weight / largest for weight in weights]
    ratio_sum, heaviest = sum(ratios), others.pop(ratios.index(1.0))
    ratios.remove(1.0)
    squares = [
        square
        for theirs, mine, target, *more in zip(heaviest, own, out, *others, strict=True)
        for square in subtract(theirs, mine, target, ratio_sum, more, ratios)
    ]
    return Update(gamma * largest, list(out), squares, ratio_sum)


def pair_update(
    gamma: float,
    weight: float,
    own: Sequence[Tensor],
    theirs: Sequence[Tensor],
    comes_first: bool,
    out: Sequence[Tensor],
) -> Update:
    """Form u = gamma * W_ij (s_j - s_i), or its negative, for one of two workers i < j that only have each other.

    Both form the difference s_j - s_i, with the same bits, so the mean of the two is kept exactly.

    Args:
        gamma, own, out: as for `neighbors_update`; `out` may be `theirs`.
        weight: W_ij = W_ji.
        theirs: the copy of the other worker, a tensor (D,) for each buffer.
        comes_first: whether this worker is i.
    """
    s_i, s_j, scale = (own, theirs, gamma * weight) if comes_first else (theirs, own, -gamma * weight)
    squares = [square for a, b, target in zip(s_i, s_j, out, strict=True) for square in subtract(b, a, target)]
    return Update(scale, list(out), squares)


def group_update(
    gamma: float, num_workers: int, own: Sequence[Tensor], total: Sequence[Tensor], out: Sequence[Tensor]
) -> Update:
    """Form u = gamma * (total / m - s) for one of m workers that average.

    With W_ij = 1 / m, the difference is sum_j (s_j - s) = total - m s.

    Args:
        gamma, own, out: as for `neighbors_update`; `out` may be `total`.
        num_workers: m.
        total: sum of s over the whole group, a tensor (D,) for each buffer.
    """
    squares = [
        square
        for mine, everybody, target in zip(own, total, out, strict=True)
        for square in subtract(everybody, mine, target, num_workers)
    ]
    return Update(gamma / num_workers, list(out), squares, num_workers - 1.0)


def form_updates(gamma: float, round_: int, rounds: Rounds, copies: Copies) -> list[Update]:
    """Form the updates of the local workers that take part in a round, each in the first receive buffer of its worker.

    Workers of this process read each other's send buffers.

    Args:
        gamma: the same on all workers.
        round_: the round.
        rounds: who mixes with whom.
        copies: what was sent and received.
    """
    updates: dict[int, Update] = {}
    for local, worker in enumerate(rounds.workers):
        plan, partner = rounds.plan(round_, local), rounds.partner(round_, local)
        if not plan.weights or local in updates:  # it sits the round out, or its update was formed with another's
            continue
        if plan.averaging_group:
            updates |= _updates_in_group(gamma, plan.averaging_group, rounds, copies)
            continue
        own, theirs, out = (
            copies.sent[local].buffers,
            _neighbors(local, plan, rounds, copies),
            copies.received[local][0],
        )
        if partner is None:
            update = neighbors_update(gamma, [plan.weights[j] for j in theirs], own, list(theirs.values()), out)
        else:
            update = pair_update(gamma, plan.weights[partner], own, theirs[partner], worker < partner, out)
            for other in rounds.local([partner]):  # the difference is the same, seen from the other side
                updates[other] = replace(update, scale=-update.scale, local=other, formed_by=local)
        updates[local] = replace(update, local=local, formed_by=local)
    return [updates[local] for local in sorted(updates)]


def _neighbors(local: int, plan: RoundPlan, rounds: Rounds, copies: Copies) -> dict[int, list[Tensor]]:
    """Return s_j of each neighbor j, those in the receive buffers first, because the update takes the first buffer."""
    received = dict(zip(rounds.elsewhere(plan.weights), copies.received[local], strict=False))
    return received | {j: copies.sent[j - rounds.workers.start].buffers for j in plan.weights if j in rounds.workers}


def _updates_in_group(gamma: float, group: Sequence[int], rounds: Rounds, copies: Copies) -> dict[int, Update]:
    here = rounds.local(group)
    own = [copies.sent[local].buffers for local in here]
    total = copies.received[here[0]][0]  # `Exchange` has summed a group that spans processes
    if not rounds.elsewhere(group):
        for target, first, *others in zip(total, *own, strict=True):
            target.copy_(first)
            for other in others:
                target.add_(other)
    updates = {}
    for local, mine in reversed(list(zip(here, own, strict=True))):  # the first one's receive buffer holds the sum
        update = group_update(gamma, len(group), mine, total, copies.received[local][0])
        updates[local] = replace(update, local=local, formed_by=local)
    return updates
