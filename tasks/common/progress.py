"""What a run shows and times while it trains, the same for all tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from dsgdac_accel import NonFiniteError
from tasks.common.output_dir import AnyAccelerator


class Clock:
    """Seconds since the run began, those before it was resumed included, and of the lap that is being run.

    Args:
        before: seconds that the run took before.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._started = time.perf_counter() - before
        self._lap: float | None = None

    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._started

    def start_lap(self) -> None:
        """Begin to count a lap."""
        self._lap = time.perf_counter()

    def lap(self) -> float:
        """Seconds of the lap so far; 0 between laps."""
        return 0.0 if self._lap is None else time.perf_counter() - self._lap

    def end_lap(self) -> float:
        """Seconds of the lap, which ends here."""
        seconds, self._lap = self.lap(), None
        return seconds


def progress_bar(accelerator: AnyAccelerator, step: int, total_steps: int) -> Any:
    """A bar on the main process, at `step` of `total_steps`."""
    hidden = None if accelerator.is_main_process else True
    return tqdm(initial=step, total=total_steps, disable=hidden, unit="step")


def rest_of_epoch(accelerator: AnyAccelerator, loader: Iterable[Any], epoch: int) -> Iterable[Any]:
    """The batches of `epoch` that are still to be taken; none where the run was resumed after the last of them."""
    if accelerator.data_position(loader).epoch > epoch:
        return ()
    # The data sets of the tasks draw no random numbers, so what was taken need not be read again.
    return accelerator.resumed_batches(loader, replay=False)


class WaitingTime:
    """Counts the seconds that training waits for its batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of `loader`, each waited for on the clock."""
        batches = iter(loader)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - begun
            if batch is None:
                return
            yield batch


def require_finite(accelerator: AnyAccelerator, loss: float, step: int) -> None:
    """End a synchronous run whose training loss is not finite; gossip has a policy of its own for that.

    Raises NonFiniteError.
    """
    if not accelerator.gossip_steps and not math.isfinite(loss):
        raise NonFiniteError(
            f"the training loss is {loss} at step {step}, for all workers. Lower the rate, lengthen the warm-up, or "
            f"clip the gradients."
        )


def figures(accelerator: AnyAccelerator, loss: float, rate: float) -> dict[str, str]:
    """What the progress bar shows beside the step."""
    shown = {"loss": f"{loss:.3f}", "rate": f"{rate:.3g}"}
    for step in accelerator.gossip_steps:
        radius = step.metrics().get("radius", math.nan)
        shown |= {"gamma": f"{step.gamma:.3f}", "radius": f"{radius:.3f}"}
    return shown
