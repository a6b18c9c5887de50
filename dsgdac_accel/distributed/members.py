"""The members of a group of workers, and what messages call them."""

from __future__ import annotations

from collections.abc import Sequence


class Members:
    """The workers of a run, as one of them sees it.

    Args:
        rank: of this worker.
        size: number of workers.
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

    def named(self, ranks: Sequence[int]) -> str:
        """Return members, given by rank, as in "worker 1" or "ranks 2, 3"."""
        return f"{self.noun}{'s' if len(ranks) > 1 else ''} {', '.join(str(self.numbers[rank]) for rank in ranks)}"

    @property
    def me(self) -> str:
        """This member, as in "worker 1"."""
        return self.named([self.rank])
