"""Timing and progress output of a run, the same for all tasks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from dsgdac_accel import NonFiniteError
from tasks.common.output_dir import AnyAccelerator


class Clock:
    """Seconds since the run began, including those before it was resumed, and wall and processor time of a lap.

    Args:
        before: seconds that the run took before it was resumed.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._started = time.perf_counter() - before
        self._lap: tuple[float, float] | None = None

    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started

    def start_lap(self) -> None:
        """Start a lap."""
        self._lap = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Seconds of the lap so far, and seconds of processor time of this process in it; 0 between laps."""
        if self._lap is None:
            return 0.0, 0.0
        return time.perf_counter() - self._lap[0], time.process_time() - self._lap[1]

    def end_lap(self) -> tuple[float, float]:
        """End the lap and return its seconds and seconds of processor time."""
        seconds, self._lap = self.lap(), None
        return seconds


class WaitingTime:
    """Counts the seconds that training waits for batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of `loader` and count the time until each arrives."""
        batches = iter(loader)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - begun
            if batch is None:
                return
            yield batch


def progress_bar(accelerator: AnyAccelerator, step: int, total_steps: int) -> Any:
    """A progress bar on the main process, at `step` of `total_steps`."""
    hidden = None if accelerator.is_main_process else True
    return tqdm(initial=step, total=total_steps, disable=hidden, unit="step")


def progress_figures(accelerator: AnyAccelerator, loss: float, lr: float) -> dict[str, str]:
    """Figures that the progress bar shows beside the step."""
    shown = {"loss": f"{loss:.3f}", "lr": f"{lr:.3g}"}
    for step in accelerator.gossip_steps:
        radius = step.metrics().get("radius", math.nan)
        shown |= {"gamma": f"{step.gamma:.3f}", "radius": f"{radius:.3f}"}
    return shown


def say(accelerator: AnyAccelerator, text: str) -> None:
    """Print a line on the main process, above the progress bar."""
    if accelerator.is_main_process:
        tqdm.write(text, file=sys.stdout)


def rest_of_epoch(accelerator: AnyAccelerator, loader: Iterable[Any], epoch: int) -> Iterable[Any]:
    """The batches of `epoch` that training has not taken yet; none if the run was resumed after the last one."""
    if accelerator.data_position(loader).epoch > epoch:
        return ()
    # The data sets of the tasks draw no random numbers, so batches already taken need not be read again.
    return accelerator.resumed_batches(loader, replay=False)


def require_finite(accelerator: AnyAccelerator, loss: float, step: int) -> None:
    """End a synchronous run whose training loss is not finite; gossip has a policy of its own for it.

    Raises NonFiniteError.
    """
    if not accelerator.gossip_steps and not math.isfinite(loss):
        raise NonFiniteError(
            f"the training loss is {loss} at step {step} on all workers. Lower the learning rate, lengthen the "
            f"warm-up, or clip the gradients."
        )
