"""The members of a group of workers, before and after losses."""

from __future__ import annotations

from collections.abc import Sequence


class Members:
    """The workers of a run, as one of them sees it. Only a loss policy changes `original_ranks`.

    After a loss, ranks are renumbered without gaps. Messages and checkpoints call a worker by its original rank, which
    stays.

    Args:
        original_rank: of this worker.
        launched: number of workers that were launched.
        noun: the noun for a member in messages.
        numbers: the number of each member in messages, by original rank; by default that rank itself.

    >>> members = Members(2, launched=4)
    >>> members.original_ranks = [0, 2, 3]
    >>> members.rank, members.size, members.lost
    (1, 3, [1])
    """

    def __init__(
        self, original_rank: int, launched: int, noun: str = "worker", numbers: Sequence[object] | None = None
    ) -> None:
        self.noun = noun
        self.numbers = range(launched) if numbers is None else numbers
        self.original_rank = original_rank
        self.launched = launched
        self.original_ranks = list(range(launched))
        """Original rank of each remaining worker, by rank."""

    def named(self, originals: Sequence[int]) -> str:
        """Return members, given by original rank, as in "worker 1" or "ranks 2, 3"."""
        return f"{self.noun}{'s' if len(originals) > 1 else ''} {', '.join(str(self.numbers[m]) for m in originals)}"

    @property
    def me(self) -> str:
        """This member, as in "worker 1"."""
        return self.named([self.original_rank])

    @property
    def rank(self) -> int:
        """Rank of this worker among the remaining ones."""
        return self.original_ranks.index(self.original_rank)

    @property
    def size(self) -> int:
        """Number of remaining workers."""
        return len(self.original_ranks)

    @property
    def lost(self) -> list[int]:
        """Original ranks of the workers that were lost, in order."""
        return [rank for rank in range(self.launched) if rank not in self.original_ranks]
