"""Who belongs to a group of workers, before and after losses."""

from __future__ import annotations


class Members:
    """The workers of a run, as one of them sees it. Only a loss policy changes `original_ranks`.

    After a loss, ranks are renumbered without gaps. Messages and checkpoints call a worker by its original rank, which
    stays.

    Args:
        original_rank: of this worker.
        launched: number of workers that were launched.

    >>> members = Members(2, launched=4)
    >>> members.original_ranks = [0, 2, 3]
    >>> members.rank, members.size, members.lost
    (1, 3, [1])
    """

    def __init__(self, original_rank: int, launched: int) -> None:
        self.original_rank = original_rank
        self.launched = launched
        self.original_ranks = list(range(launched))
        """Original rank of each remaining worker, by rank."""

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
