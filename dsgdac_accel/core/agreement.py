"""The vote by which the processes of one worker decide together, in one collective a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsgdac_accel.core.host_copy import HostCopy, to_device
from dsgdac_accel.distributed.group import WorkerGroup

Then = Callable[[list[float], int], None]
"""A method that is called with the sums and the step of a vote, once the host knows them. It may raise."""


class Vote:
    """Numbers that are summed over the processes of a worker, and what to do with the sums.

    Args:
        numbers: (N,), of this process.
        then: called once by `resolve`.
    """

    def __init__(self, numbers: Tensor, then: Then) -> None:
        self.sums = numbers
        """(N,), where they are computed; the sums from `Agreement.close` on."""
        self.step = 0
        self.resolved = False
        """Whether the host has read the sums and acted on them."""
        self._then = weakref.WeakMethod(then)  # whoever keeps its vote must end with its last reference all the same
        self._copy: HostCopy | None = None

    def send_to_host(self) -> None:
        """Let the sums travel to the host."""
        self._copy = HostCopy(self.sums)

    def read(self) -> list[float]:
        """Return the sums; the host waits for them."""
        return (self._copy or HostCopy(self.sums)).read().tolist()

    def resolve(self) -> None:
        """Read the sums and act on them, unless that is done; raises what that raises."""
        then = self._then()
        if not self.resolved and then is not None:
            self.resolved = True
            then(self.read(), self.step)


class Agreement:
    """Sums the votes of all processes of a worker once a step, and resolves them at once, or on a GPU a step later.

    There the host would wait for the sums. A worker that is one process decides by itself, without communication.

    Args:
        group: the workers; its row votes.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.late = group.device.type == "cuda"
        """Whether votes are resolved a step later."""
        self._open: dict[str, Vote] = {}
        self._closed: list[Vote] = []

    @property
    def alone(self) -> bool:
        """Whether the worker is one process."""
        return self.group.row.size == 1

    def vote(self, name: str, numbers: Tensor | Sequence[float], then: Then) -> Vote:
        """Vote in this step, by a name that is the same in all processes of the worker.

        Args:
            name: replaces a vote of this name that was not closed.
            numbers: to be summed, of any shape.
            then: what to do with the sums.
        """
        if not isinstance(numbers, Tensor):
            numbers = to_device(numbers, self.group.device)
        vote = self._open[name] = Vote(numbers.detach().reshape(-1), then)
        if self.alone:
            vote.send_to_host()  # now: a vote that is resolved early does not wait for what is queued behind it
        return vote

    def close(self, step: int) -> None:
        """Sum the votes of this step. Collective in the row; nothing is sent if nobody has voted."""
        votes, self._open = list(self._open.values()), {}
        if votes and not self.alone:
            numbers = torch.cat([vote.sums.to(self.group.device, torch.float64) for vote in votes])
            sums = self.group.row.sum(numbers, f"comparing the shards of a worker at step {step}")
            for vote, part in zip(votes, sums.split([len(vote.sums) for vote in votes]), strict=True):
                vote.sums = part
                vote.send_to_host()
        for vote in votes:
            vote.step = step
        self._closed = votes
        if not self.late:
            self.resolve()

    def resolve(self) -> None:
        """Act on the votes that were closed last, in their order, unless that is done; raises what that raises."""
        votes, self._closed = self._closed, []
        for vote in votes:
            vote.resolve()

    def forget(self) -> None:
        """Drop the votes that are not resolved: the run continues from a checkpoint."""
        self._open, self._closed = {}, []
