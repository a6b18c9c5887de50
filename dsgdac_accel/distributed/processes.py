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


class _ByWorker:
    def __init__(self, column: WorkerGroup) -> None:
        assert column.row.mesh is not None
        self.everyone = column.everyone
        self.order = list(chain.from_iterable(column.row.mesh.rows))
        """The launched rank of each process."""
        self.members = Members(column.rank * column.row.size + column.row.rank, len(self.order))

    @property
    def rank(self) -> int:
        return self.members.rank

    @property
    def size(self) -> int:
        return self.members.size

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        values = self.everyone.all_gather_object(value, what)
        return [values[rank] for rank in self.order]
