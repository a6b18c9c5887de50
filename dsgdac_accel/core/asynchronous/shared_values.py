"""Values that the threads of one worker share: its parameters, averages on their way into them, and its clock.

Call v = x + pending. An exchange takes a copy s of v, and adds its part c (s_j - s_i) to `pending` some time later; x
follows at the next boundary of an own step, so that a gradient never sees it change.

The clock counts the own steps and is averaged in the same exchanges, always with c = 1/2. Its mean over the workers is
the exact mean of their steps, so it stands for the samples that all have seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import Buckets
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup

Event = tuple[str] | tuple[str, int, int]
"""("step",), ("settle",), ("take", asker, number) or ("apply", asker, number)."""


class SharedValues:
    """The values that the training thread and the threads that communicate share. Whoever uses them holds `lock`.

    It also has what a `GradientGuard` reads of a synchronous mixer's `arrivals`.

    Args:
        group: the workers.
        rounds: who this worker is.
        buckets: x, and the receive buffers, which hold `pending`.
    """

    checks_late = False
    """Whether a gradient that is not finite is found a step later, as on a GPU."""

    def __init__(self, group: WorkerGroup, rounds: Rounds, buckets: Buckets) -> None:
        self.group, self.rounds = group, rounds
        self.lock = threading.Lock()
        self.x = buckets.values(0)
        self.pending = buckets.received[0][0]
        self._is_pending = False
        self.progress = self.pending_progress = 0.0
        self.gamma = 1.0
        self.stepped_at = time.monotonic()
        """Time of the latest step of this worker."""
        self.disagreement = 0.0
        """||s_j - s_i|| of the last exchange."""
        self.bytes_sent = 0
        """Bytes that this worker sent in the last exchange."""
        self.waited_seconds = 0.0
        """Duration of the last wait of a step for the lock."""
        self.history: list[Event] | None = None
        """A list here records all events in their order, for `simulation.AsynchronousSimulation.replay`."""

    def take(self, copy: Sequence[Tensor], asker: int, number: int) -> tuple[float, float]:
        """Copy v into `copy`; return gamma and the progress that belongs to v."""
        with self.lock:
            for x, pending, target in zip(self.x, self.pending, copy, strict=True):
                torch.add(x, pending, out=target) if self._is_pending else target.copy_(x)
            self._record("take", asker, number)
            return self.gamma, self.progress + self.pending_progress

    def apply(self, update: Update, progress: float, asker: int, number: int) -> None:
        """Add a part of an exchange to `pending`. The update is used up."""
        for difference in update.difference:
            difference.mul_(update.scale)
        with self.lock:
            for pending, part in zip(self.pending, update.difference, strict=True):
                pending.add_(part) if self._is_pending else pending.copy_(part)
            self._is_pending = True
            self.pending_progress += progress
            self._record("apply", asker, number)

    def settle(self) -> None:
        """Add `pending` to x between two steps, as before an evaluation. The caller holds the lock."""
        self._add_pending()
        self._record("settle")

    def end_step(self) -> None:
        """Add `pending` to x after a local step, and move the clock on. The caller holds the lock."""
        self._add_pending()
        self.progress += 1.0 + self.pending_progress
        self.pending_progress = 0.0
        self.stepped_at = time.monotonic()
        self._record("step")

    def _add_pending(self) -> None:
        if self._is_pending:
            for x, pending in zip(self.x, self.pending, strict=True):
                x.add_(pending)
        self._is_pending = False

    def _record(self, kind: str, *exchange: int) -> None:
        if self.history is not None:
            self.history.append((kind, *exchange))  # type: ignore[arg-type]
