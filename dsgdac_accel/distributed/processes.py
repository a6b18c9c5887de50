"""All processes of a run in the order of their workers."""

from __future__ import annotations

from itertools import chain
from typing import TypeVar

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.members import Members

T = TypeVar("T")


class Processes:
    """All processes of a run, those of worker 0 first, which save and load together.

    Args:
        group: the workers, or the column of this process.
    """

    def __init__(self, group: WorkerGroup) -> None:
        row, mesh = group.row, group.row.mesh
        self._everyone = group.everyone
        self._order = list(chain.from_iterable(mesh.rows)) if mesh else range(group.size)
        """The launched rank of each process."""
        rank = group.rank * row.size + row.rank
        self.members = members_by_worker(rank, group.size, row.size) if mesh else group.members
        self.rank, self.size = self.members.rank, self.members.size

    def all_gather_object(self, value: T, what: str) -> list[T]:
        """Return the value of every process, as `WorkerGroup.all_gather_object`."""
        values = self._everyone.all_gather_object(value, what)
        return [values[rank] for rank in self._order]


def members_by_worker(rank: int, workers: int, ranks: int) -> Members:
    """Return all processes as members, which messages call by their worker and their place in it.

    Args:
        rank: number of this process.
        workers: number of workers.
        ranks: number of processes of each worker.

    >>> members_by_worker(5, workers=3, ranks=2).me
    'rank 1 of worker 2'
    """
    names = [f"{place} of worker {worker}" for worker in range(workers) for place in range(ranks)]
    return Members(rank, len(names), "rank", names)
