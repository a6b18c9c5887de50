"""Who exchanges with whom in a round, seen from one process: neighbors, messages with their tags, all-reduces.

Nothing is sent here. The round alone decides who communicates, and how, so all workers agree without asking.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.transport import Message
from dsgdac_accel.topology import RoundPlan, Topology

Outgoing = Callable[[int, int | None], Sequence[Tensor]]
"""(local worker, receiver) -> the tensors to send; if the receiver is None, those to sum over an averaging group."""
Incoming = Sequence[Sequence[Sequence[Tensor]]]
"""[local worker][k] -> the tensors to fill with those that its k-th neighbor in another process sends. The first local
worker of an averaging group gets the sum over the group in [0]."""

_CHANNELS, _ROUNDS, _MAX_CHUNKS = 2**7, 2**12, 2**12  # how many get tags of their own; 31 bits in all


class Rounds:
    """The rounds of a topology, for the workers of this process.

    Workers are numbered over all processes, `local_workers` per process. A local worker is counted from 0.

    Args:
        topology: the rounds of all workers.
        members: the processes.
        local_workers: workers of each process.
        all_reduce: whether rounds that average whole groups of three or more workers use an all-reduce. Otherwise these
            workers exchange in pairs.

    Raises:
        ValueError: the topology is for another number of workers.
    """

    def __init__(self, topology: Topology, members: Members, local_workers: int = 1, all_reduce: bool = True) -> None:
        if topology.num_workers != members.size * local_workers:
            each = f" processes of {local_workers} workers each" if local_workers > 1 else ""
            raise ValueError(
                f"topology '{topology.name}' is for {topology.num_workers} workers, but {members.size}{each} were "
                f"launched. Launch {topology.num_workers} workers, or build it for {members.size * local_workers}."
            )
        self.rank = members.rank
        self.local_workers = local_workers
        self.topology = topology
        self._all_reduce = all_reduce
        self.workers = range(members.rank * local_workers, (members.rank + 1) * local_workers)
        """Numbers of the workers of this process."""
        period = range(topology.period)
        self.plans = [[self._plan_of(round_, worker) for worker in self.workers] for round_ in period]
        """Plans of the local workers, by round."""
        self._partners = [[self._partner_of(round_, worker) for worker in self.workers] for round_ in period]
        self.slots = [self._slots_of(local) for local in range(local_workers)]
        """Sets of receive buffers that each local worker needs: one per simultaneous neighbor in another process."""
        groups = [(all_reduce and topology.averaging_groups(round_)) or () for round_ in period]
        self.all_reduces = [[each for each in row if len(each) > 2 and len(self.processes(each)) > 1] for row in groups]
        """Groups of workers of several processes that average by an all-reduce, here or elsewhere, by round."""

    def _slots_of(self, local: int) -> int:
        plans = [plans[local] for plans in self.plans if plans[local].weights]
        # An update needs one in any case, and the sum over an averaging group, too.
        return max((1 if p.averaging_group else max(1, len(self.elsewhere(p.weights))) for p in plans), default=0)

    def require_workers(self, saved: int) -> None:
        """Raise ValueError if a state is of another number of workers."""
        if saved != self.topology.num_workers:
            raise ValueError(f"the state is of {saved} workers, but {self.topology.num_workers} were launched.")

    # ---- neighbors

    def plan(self, round_: int, local: int = 0) -> RoundPlan:
        """Return the part of a local worker in a round."""
        return self.plans[round_ % len(self.plans)][local]

    def _plan_of(self, round_: int, worker: int) -> RoundPlan:
        plan = self.topology.plan(round_, worker)
        return plan if self._all_reduce else replace(plan, averaging_group=None)

    def partner(self, round_: int, local: int = 0) -> int | None:
        """Return the worker that a local worker is paired with: neither exchanges with anyone else."""
        return self._partners[round_ % len(self._partners)][local]

    def _partner_of(self, round_: int, worker: int) -> int | None:
        plan = self._plan_of(round_, worker)
        if len(plan.weights) != 1:
            return None
        (other,) = plan.weights
        back = self._plan_of(round_, other)
        only_each_other = {*plan.recipients} == {other} and {*back.weights, *back.recipients} == {worker}
        return other if only_each_other else None

    def elsewhere(self, workers: Iterable[int]) -> list[int]:
        """Return the workers among `workers` that other processes hold."""
        return [worker for worker in workers if worker not in self.workers]

    def local(self, workers: Iterable[int]) -> list[int]:
        """Return the workers among `workers` that this process holds, as local workers."""
        return [worker - self.workers.start for worker in workers if worker in self.workers]

    def processes(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of the processes that hold `workers`, in order."""
        return tuple(sorted({worker // self.local_workers for worker in workers}))

    # ---- what travels between processes

    def peers(self, round_: int) -> tuple[int, ...]:
        """Return the ranks of the other processes that send to this one in a round."""
        plans = self.plans[round_ % len(self.plans)]
        return self.processes(self.elsewhere({worker for plan in plans for worker in plan.weights}))

    def messages(
        self,
        round_: int,
        channel: int,
        outgoing: Outgoing,
        incoming: Incoming,
        pieces: Callable[[Tensor], Iterable[Tensor]],
    ) -> tuple[list[Message], list[Message], Callable[[], int]]:
        """Return receives, sends, and a function that returns the most messages that any process has in a round.

        Both ends of a message derive its tag alike.

        Args:
            round_: decides who exchanges with whom.
            channel: separates these messages from those of another exchange.
            outgoing: what is sent, equally many tensors to each receiver.
            incoming: what to fill.
            pieces: cuts a tensor into messages.
        """
        pairs: list[tuple[int, int]] = []  # (sender, receiver), one of which is here and one elsewhere
        for local, worker in enumerate(self.workers):
            plan = self.plan(round_, local)
            if not plan.averaging_group:
                pairs += [(sender, worker) for sender in self.elsewhere(plan.weights)]
                pairs += [(worker, receiver) for receiver in self.elsewhere(plan.recipients)]
        receives: list[Message] = []
        sends: list[Message] = []
        # A worker that is a round off must not be taken for one in step, nor one optimizer's parameters for another's.
        base = (channel % _CHANNELS * _ROUNDS + round_ % _ROUNDS) * _MAX_CHUNKS
        count: Counter[tuple[int, int]] = Counter()  # messages from one process to another so far
        per_pair = 0
        for sender, receiver in sorted(pairs):  # both ends share this order
            source, target = sender // self.local_workers, receiver // self.local_workers
            if source == self.rank:
                tensors = outgoing(sender - self.workers.start, receiver)
            else:
                local = receiver - self.workers.start
                tensors = incoming[local][self.elsewhere(self.plan(round_, local).weights).index(sender)]
            per_pair = len(tensors)
            for piece in itertools.chain.from_iterable(map(pieces, tensors)):
                tag = base + count[source, target]
                count[source, target] += 1
                if source == self.rank:
                    sends.append((piece, target, tag))
                else:
                    receives.append((piece, source, tag))
        return receives, sends, lambda: per_pair * self._most_pairs

    @cached_property
    def _most_pairs(self) -> int:
        """The most pairs of workers between which any process sends and receives in a round."""
        counts: Counter[tuple[int, int]] = Counter()  # by round and process
        for round_, receiver in itertools.product(range(self.topology.period), range(self.topology.num_workers)):
            plan = self._plan_of(round_, receiver)
            there = receiver // self.local_workers
            for sender in () if plan.averaging_group else plan.weights:
                here = sender // self.local_workers
                if here != there:
                    counts.update([(round_, here), (round_, there)])
        return max(counts.values(), default=0)

    def all_reduce_groups(self, round_: int) -> list[tuple[int, ...]]:
        """Return the averaging groups of a round with workers here and in other processes, in order."""
        return [group for group in self.all_reduces[round_ % len(self.plans)] if self.local(group)]
