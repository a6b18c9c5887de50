"""Lines of processes: disjoint groups of equally many processes, along one or more dimensions of a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsgdac_accel.distributed.members import Members


@dataclass(frozen=True)
class Line:
    """The line that this process belongs to."""

    ranks: Sequence[int]
    """Launched rank of each member."""
    parallel: Sequence[Sequence[int]]
    """This line and all others, in an order that all processes share."""
    members: Members
    """The members as messages call them."""

    @classmethod
    def through(cls, me: int, parallel: Sequence[Sequence[int]], noun: str) -> Line:
        """Return the line of the process with launched rank `me`.

        Args:
            me: the launched rank.
            parallel: the launched ranks of each line.
            noun: "worker" if the place in the line is the number of a worker; "rank" if messages use launched ranks.

        >>> line = Line.through(3, [[0, 2], [1, 3]], "rank")
        >>> line.ranks, line.members.rank, line.members.me
        ([1, 3], 1, 'rank 3')
        """
        ranks = next(line for line in parallel if me in line)
        numbers = ranks if noun == "rank" else None
        return cls(ranks, parallel, Members(ranks.index(me), len(ranks), noun, numbers))
