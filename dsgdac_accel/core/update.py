"""What the workers of a process add to their parameters in a round: the way to the mean of their neighbours.

Neighbours in other processes are read from the receive buffers, those in this one where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from dsgdac_accel.core.buckets import FlatParameters

if TYPE_CHECKING:
    from dsgdac_accel.core.exchange import Exchange, RoundPlan

_PIECE = 2**17  # elements for each thread: they stay in its cache


@dataclass
class Update:
    """What is added to one worker of this process: `scale` times `difference`, by buffer."""

    worker: int
    """Its place in the process."""
    difference: list[Tensor]
    scale: float
    square: Tensor | None = None
    """Squared norm of the difference, shape (), where it was found while the difference was formed."""
    left_out: Tensor | None = None
    """Where this is 1, shape (), on the device, nothing is added."""

    def __bool__(self) -> bool:
        """Whether there is anything to add to: not where everything is frozen."""
        return bool(self.difference)

    def norm(self) -> Tensor:
        """Euclidean norm of the difference over all buffers, shape ()."""
        if self.square is not None:
            return self.square.sqrt()
        norms = [torch.linalg.vector_norm(part) for part in self.difference]
        return norms[0] if len(norms) == 1 else torch.stack([norm.double() for norm in norms]).norm()

    def add_to(self, number: int, x: Tensor) -> None:
        """x += scale * difference, for the flat buffer with this number."""
        add_scaled(x, self.difference[number], self.scale, self.left_out)

    def dense(self, number: int) -> Tensor:
        """The difference of the flat buffer with this number."""
        return self.difference[number]


def add_scaled(x: Tensor, values: Tensor, scale: float, left_out: Tensor | None = None) -> None:
    """x += scale * values, all (D,), unless `left_out`, shape (), is 1: decided on the device, in one pass."""
    if left_out is None:
        x.add_(values, alpha=scale)
        return
    # A step of SGD, whose fused kernel is what skips like that; a product with 0 would let NaN through.
    sgd(
        [x],
        [values],
        [None],
        fused=True,
        found_inf=left_out,
        lr=scale,
        maximize=True,
        weight_decay=0.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
    )


def form_updates(exchange: Exchange, flats: Sequence[FlatParameters], step: int) -> list[Update]:
    """(mean of the neighbours' x, weighted by W_ij) - x_i for each worker here that does not sit the round out.

    Differences are formed in the receive buffers; scales are 1 - W_ii. To be called when the exchange of `step` has
    arrived.

    Args:
        exchange: of the round.
        flats: the parameters of each worker of this process, as they were sent.
        step: decides the round.
    """
    first = exchange.workers.start
    updates: dict[int, Update] = {}
    for here, worker in enumerate(exchange.workers):
        plan = exchange.plan(step, here)
        if not plan.weights or here in updates:  # a receive buffer is stale where nothing was received
            continue
        if plan.averaging_group:
            members = [member - first for member in plan.averaging_group if member in exchange.workers]
            _subtract_from_sum(exchange, flats, plan.averaging_group, members)
            updates |= {member: Update(member, exchange.slots[member][0], plan.total_weight) for member in members}
            continue
        difference = exchange.slots[here][0]
        square = _subtract_from_neighbors(exchange, flats, here, plan)
        updates[here] = Update(here, difference, plan.total_weight, square)
        partner = next(iter(plan.weights)) - first
        if len(plan.weights) == 1 and partner in range(exchange.per_process):
            back = exchange.plan(step, partner)
            if list(back.weights) == [worker]:  # a pair within this process has one difference, seen from two sides
                updates[partner] = Update(partner, difference, -back.total_weight, square)
    return [updates[here] for here in sorted(updates)]


def _subtract_from_sum(
    exchange: Exchange, flats: Sequence[FlatParameters], group: tuple[int, ...], members: list[int]
) -> None:
    """slot <- (sum over the group - m x) / (m - 1), for each of its members here."""
    for number, total in enumerate(exchange.slots[members[0]][0]):
        xs = [flats[member].buffers[number].data for member in members]
        if not exchange.spans_processes(group):
            total.copy_(xs[0])
            for x in xs[1:]:
                total.add_(x)
        for member, x in reversed(list(zip(members, xs, strict=True))):  # the first one's slot holds the sum
            slot = exchange.slots[member][0][number]
            torch.sub(total, x, alpha=len(group), out=slot).div_(len(group) - 1)


def _subtract_from_neighbors(
    exchange: Exchange, flats: Sequence[FlatParameters], here: int, plan: RoundPlan
) -> Tensor | None:
    """slot <- sum_j W_ij x_j / sum_j W_ij - x_i, with the x_j of other processes in the slots.

    Of a single neighbour also the squared norm of that, over all slots.
    """
    squares = []
    elsewhere, slots, first = exchange.elsewhere(plan.weights), exchange.slots[here], exchange.workers.start
    for number, buffer in enumerate(flats[here].buffers):
        target = slots[0][number]
        # What arrived in the target comes first, since it is overwritten.
        terms = [(slots[k][number], plan.weights[worker]) for k, worker in enumerate(elsewhere)]
        terms += [
            (flats[worker - first].buffers[number].data, weight)
            for worker, weight in plan.weights.items()
            if worker in exchange.workers
        ]
        if len(terms) == 1:
            squares += _subtract(terms[0][0], buffer.data, target)
            continue
        torch.mul(terms[0][0], terms[0][1] / plan.total_weight, out=target)
        for x, weight in terms[1:]:
            target.add_(x, alpha=weight / plan.total_weight)
        target.sub_(buffer.data)
    return torch.stack(squares).sum() if squares else None


def _subtract(a: Tensor, b: Tensor, out: Tensor) -> list[Tensor]:
    """out <- a - b, all (D,); and the squared norms of its pieces, each taken while the piece is in the cache."""
    if out.device.type != "cpu":  # nothing stays in the cache, and `dot` would read the difference twice
        return [torch.linalg.vector_norm(torch.sub(a, b, out=out)).square()]
    piece = _PIECE * torch.get_num_threads()
    pieces = zip(a.split(piece), b.split(piece), out.split(piece), strict=True)
    return [torch.dot(torch.sub(mine, theirs, out=difference), difference) for mine, theirs, difference in pieces]
