"""All processes of a run in the order of their workers."""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol, TypeVar

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.members import Members

T = TypeVar("T")


class Processes(Protocol):
    """Processes that save and load together: the workers, or all processes of worker 0, 1, ... one after another."""

    members: Members

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_gather_object(self, value: T, what: str) -> list[T]:
        """As `WorkerGroup.all_gather_object`."""


def by_worker(group: WorkerGroup) -> Processes:
    """Return all processes of a run, those of worker 0 first.

    Args:
        group: the workers, or the column of this process.
    """
    return group if group.row.mesh is None else _ByWorker(group)


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


class _ByWorker:
    def __init__(self, column: WorkerGroup) -> None:
        row = column.row
        assert row.mesh is not None
        self.everyone = column.everyone
        self.order = list(chain.from_iterable(row.mesh.rows))
        """The launched rank of each process."""
        self.members = members_by_worker(column.rank * row.size + row.rank, column.size, row.size)

    @property
    def rank(self) -> int:
        return self.members.rank

    @property
    def size(self) -> int:
        return self.members.size

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        values = self.everyone.all_gather_object(value, what)
        return [values[rank] for rank in self.order]
