"""All-reduces of a round: averaging groups of three or more workers that span several processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from dsgdac_accel.core.messages import Incoming, Outgoing
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.transport import Works


class GroupAllReduce:
    """Sums the copies of each averaging group, by an all-reduce of its processes.

    Args:
        group: the processes.
        rounds: which workers average in a round.
    """

    def __init__(self, group: WorkerGroup, rounds: Rounds) -> None:
        self.group = group
        self.rounds = rounds

    def connect(self) -> None:
        """Make a process group for every all-reduce of a period, member or not, in the same order. Collective."""
        rounds, topology = self.rounds, self.rounds.topology
        for round_ in range(topology.period if rounds.all_reduce else 0):
            for workers in topology.averaging_groups(round_) or ():
                processes = rounds.processes(workers)
                if len(workers) > 2 and len(processes) > 1:
                    self.group.process_groups.subgroup(processes)

    def bytes_sent(self, groups: Sequence[tuple[int, ...]], outgoing: Outgoing) -> int:
        """Return the bytes that this process sends for averaging groups.

        An all-reduce by ring sends 2 (m - 1) / m of its input: once to reduce, once to spread.
        """
        counts = [len(self.rounds.processes(workers)) for workers in groups]
        size = sum(tensor.nbytes for tensor in outgoing(0, None)) if counts else 0
        return sum(round(2 * (count - 1) / count * size) for count in counts)

    def post(self, groups: Sequence[tuple[int, ...]], outgoing: Outgoing, incoming: Incoming) -> Works:
        """Sum the copies of the local workers into the receive buffers, and begin to sum these over the processes.

        Args:
            groups: the averaging groups of a round, see `Rounds.all_reduce_groups`.
            outgoing: the copies.
            incoming: `incoming[i][0]` gets the sum, where i is the group's first local worker.
        """
        works: Works = []
        for workers in groups:
            handle = self.group.process_groups.subgroup(self.rounds.processes(workers))
            first, *others = self.rounds.local(workers)
            totals = incoming[first][0]
            for total, own in zip(totals, outgoing(first, None), strict=True):
                total.copy_(own)
            for other in others:
                for total, own in zip(totals, outgoing(other, None), strict=True):
                    total.add_(own)
            works += [(dist.all_reduce(total, group=handle, async_op=True), None) for total in totals]
        return works
