"""Policies for a lost worker. Stopping is the default, and the only policy of the core."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any, Literal, NoReturn, TypeVar

from dsgdac_accel.distributed.failure_detection import Failure, FailureDetector

T = TypeVar("T")

OnLoss = Literal["stop", "continue"]

_ENTRY_POINTS = "dsgdac.on_worker_loss"


class StopOnLoss:
    """A lost worker ends the run on all others by an error that names it. Everything runs once.

    Another policy overrides every method.
    """

    name: OnLoss = "stop"

    def __init__(self, detector: FailureDetector) -> None:
        self.detector = detector

    def handle(self, failure: Failure, error: RuntimeError) -> NoReturn:
        """Raise WorkerLostError or WorkersChangedError for a failure."""
        raise self.detector.worker_lost(failure) from error

    def collective(self, run: Callable[[], T], what: str) -> T:
        """Run a collective of all workers; after a loss in it the survivors do it once more if the run continues."""
        return run()

    def section(self) -> AbstractContextManager[None]:
        """Context for work that is shared out among the workers, such as an evaluation. Sections nest.

        If the run continues after a loss, the section ends by WorkersChangedError on all survivors, since part of the
        work is missing.
        """
        return nullcontext()

    def retry_after_loss(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, run as a section and repeated if the run continues after a loss in it."""
        return work()

    def complete_exchange(self, wait: Callable[[], None]) -> bool:
        """Wait for a posted exchange. False: a worker was lost in it, the run continues, and the round is dropped.

        Raises WorkersChangedError inside a section, which then starts over.
        """
        wait()
        return True

    def cover_collectives(self, accelerator: Any) -> None:
        """Apply this policy to the collectives of an `accelerate.Accelerator` too."""


def load_policy(on_loss: str) -> Callable[[Any], StopOnLoss]:
    """The policy that a package registered under this name, to be called with the `WorkerGroup`.

    Registered as an entry point, so that the core runs without it. Raises ImportError if there is none.
    """
    found = entry_points(group=_ENTRY_POINTS, name=on_loss)
    if not found:
        raise ImportError(
            f"on_worker_loss={on_loss!r} needs the entry point {_ENTRY_POINTS}, which is not installed. Install "
            f"dsgdac_accel again (pip install .), or use on_worker_loss='stop'."
        )
    return next(iter(found)).load()
