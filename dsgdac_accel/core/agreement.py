"""The vote by which the processes of one worker decide together, in one collective a step."""

from __future__ import annotations

import torch
from torch import Tensor

from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.distributed.group import WorkerGroup


class Agreement:
    """Sums the votes of all processes of a worker, once a step, and reads the sums at once or a step later.

    A worker that is one process decides by itself, without communication. On a GPU the host would wait for the sums, so
    it reads them in the next step.

    Args:
        group: the workers; its row votes.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.row = group.row
        self.late = group.device.type == "cuda"
        """Whether the host reads the sums a step later."""
        self.sums: dict[str, Tensor] = {}
        """What the last `close` returned."""
        self._votes: dict[str, Tensor | float] = {}
        self._unread: tuple[list[str], HostCopy, int] | None = None

    @property
    def together(self) -> bool:
        """Whether the worker is several processes."""
        return self.row.size > 1

    def vote(self, name: str, value: Tensor | float) -> None:
        """Add a number, or a tensor of shape (), to the sum of that name; equal names on all processes."""
        self._votes[name] = value

    def close(self, step: int) -> dict[str, Tensor]:
        """Sum the votes, and return the sums by name, of shape () on the device; `settle` reads them.

        Collective in the row, and none where it has nothing to vote on.
        """
        votes, self._votes, self.sums = self._votes, {}, {}
        if votes:
            dtype = torch.float64 if self.group.device.type in ("cpu", "cuda") else torch.float32
            values = torch.stack([self._on_device(value, dtype) for value in votes.values()])
            sums = self.row.sum(values, f"comparing the shards of a worker at step {step}")
            self.sums = dict(zip(votes, sums, strict=True))
            self._unread = list(votes), HostCopy(sums), step
        return self.sums

    def _on_device(self, value: Tensor | float, dtype: torch.dtype) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.group.device, dtype)
        return torch.full((), float(value), dtype=dtype, device=self.group.device)

    def peek(self) -> dict[str, float]:
        """Return the sums that were not read yet, and leave them to `settle`; empty if there are none."""
        if self._unread is None:
            return {}
        names, sums, _ = self._unread
        return dict(zip(names, sums.read().tolist(), strict=True))

    def settle(self) -> tuple[dict[str, float], int] | None:
        """Return the sums of the last `close` and their step, unless they were returned before."""
        if self._unread is None:
            return None
        read, step = self.peek(), self._unread[2]
        self._unread = None
        return read, step

    def forget(self) -> None:
        """Drop sums that were not read: the run continues from a checkpoint."""
        self._unread = None
