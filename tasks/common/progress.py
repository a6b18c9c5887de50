"""Timing and progress output of a run, the same for all tasks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

from dsgdac_accel import NonFiniteError
from tasks.common.output_dir import AnyAccelerator


class Clock:
    """Seconds of a run, those before it was resumed included: of all of it, of training, and of waiting for batches."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        """How long training has waited for batches."""
        self._began = time.perf_counter()
        self._trained = 0.0, 0.0
        """Wall time of training up to the latest pause, and processor time of this process in it."""
        self._lap: tuple[float, float] | None = None
        """Both clocks when training went on after the latest pause."""

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    @property
    def train_seconds(self) -> tuple[float, float]:
        """Wall time of training alone, and processor time of this process in it."""
        wall, cpu = self._trained
        if self._lap is not None:
            wall, cpu = wall + time.perf_counter() - self._lap[0], cpu + time.process_time() - self._lap[1]
        return wall, cpu

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside the context as training."""
        self._lap = time.perf_counter(), time.process_time()
        yield
        self._trained, self._lap = self.train_seconds, None

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of `loader` and count the time until each arrives as waiting."""
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, float]:
        """Return all times."""
        wall, cpu = self.train_seconds
        return {
            "seconds": self.seconds,
            "train_seconds": wall,
            "train_cpu_seconds": cpu,
            "waited": self.waited_seconds,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from saved times."""
        self._began = time.perf_counter() - state["seconds"]
        self._trained = state["train_seconds"], state["train_cpu_seconds"]
        self.waited_seconds = state["waited"]


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
