"""What a lost worker means to the others. Stopping is the default, and the only policy of the core."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from dsgdac_accel.distributed.failure_detection import Failure, FailureDetector

T = TypeVar("T")

OnLoss = Literal["stop", "continue"]

_ENTRY_POINTS = "dsgdac.on_worker_loss"


class LossPolicy(Protocol):
    """What a `WorkerGroup` asks when a worker may be lost; the methods of the same names there say more."""

    name: str

    def handle(self, failure: Failure, error: RuntimeError) -> NoReturn:
        """Raise what the failure means to the caller: WorkerLostError, or WorkersChangedError."""

    def collective(self, run: Callable[[], T], what: str) -> T: ...
    def section(self) -> AbstractContextManager[None]: ...
    def retry_after_loss(self, work: Callable[[], T]) -> T: ...
    def complete_exchange(self, wait: Callable[[], None]) -> bool: ...
    def cover_collectives(self, accelerator: Any) -> None:
        """Apply this policy to the collectives of an `accelerate.Accelerator` too."""


class StopOnLoss:
    """A lost worker ends the run on all others by an error that names it. Everything runs once."""

    name = "stop"

    def __init__(self, detector: FailureDetector) -> None:
        self.detector = detector

    def handle(self, failure: Failure, error: RuntimeError) -> NoReturn:
        raise self.detector.worker_lost(failure) from error

    def collective(self, run: Callable[[], T], what: str) -> T:
        return run()

    def section(self) -> AbstractContextManager[None]:
        return nullcontext()

    def retry_after_loss(self, work: Callable[[], T]) -> T:
        return work()

    def complete_exchange(self, wait: Callable[[], None]) -> bool:
        wait()
        return True

    def cover_collectives(self, accelerator: Any) -> None:
        pass


def load_policy(on_loss: str) -> Callable[[Any], LossPolicy]:
    """The policy that a package registered under this name, to be called with the `WorkerGroup`.

    Registered as an entry point, so that the core runs without it.

    Raises ImportError if there is none.
    """
    found = entry_points(group=_ENTRY_POINTS, name=on_loss)
    if not found:
        raise ImportError(
            f"on_worker_loss={on_loss!r} needs the entry point {_ENTRY_POINTS}, which is not installed. Install "
            f"dsgdac_accel again (pip install .), or use on_worker_loss='stop'."
        )
    return next(iter(found)).load()
