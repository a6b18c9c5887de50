"""The members of a group of processes, and what messages call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class Members:
    """The processes of a group, as one of them sees it.

    Args:
        rank: of this process in the group.
        size: number of members.
        noun: the noun for a member in messages.
        numbers: the number of each member in messages, by rank; by default the rank itself.

    >>> members = Members(2, size=4, noun="rank", numbers=[1, 3, 5, 7])
    >>> members.me, members.named([0, 3])
    ('rank 5', 'ranks 1, 7')
    """

    def __init__(self, rank: int, size: int, noun: str = "worker", numbers: Sequence[object] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.noun = noun
        self.numbers = range(size) if numbers is None else numbers
        self.launched: Sequence[int] = range(size)
        """The launched rank of each member."""
        self.lines: Sequence[Sequence[int]] = [self.launched]
        """The launched ranks of this group and of all groups beside it, in an order that all processes share."""

    @classmethod
    def in_line(cls, me: int, lines: Sequence[Sequence[int]], noun: str) -> Self:
        """Return the line that the process with launched rank `me` belongs to.

        Args:
            me: the launched rank.
            lines: the launched ranks of each line; disjoint, and of all processes together.
            noun: "worker" if the place in the line is the number of a worker; "rank" if messages use launched ranks.

        >>> line = Members.in_line(3, [[0, 2], [1, 3]], "rank")
        >>> line.launched, line.rank, line.me
        ([1, 3], 1, 'rank 3')
        """
        launched = next(line for line in lines if me in line)
        members = cls(launched.index(me), len(launched), noun, launched if noun == "rank" else None)
        members.launched, members.lines = launched, lines
        return members

    def named(self, ranks: Sequence[int]) -> str:
        """Return members, given by rank, as in "worker 1" or "ranks 2, 3"."""
        return f"{self.noun}{'s' if len(ranks) > 1 else ''} {', '.join(str(self.numbers[rank]) for rank in ranks)}"

    @property
    def me(self) -> str:
        """This member, as in "worker 1"."""
        return self.named([self.rank])
