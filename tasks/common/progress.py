"""Timing and progress output of a run, the same for all tasks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

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


def say(accelerator: AnyAccelerator, text: str) -> None:
    """Print a line on the main process, above the progress bar."""
    if accelerator.is_main_process:
        tqdm.write(text, file=sys.stdout)
