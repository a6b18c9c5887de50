"""Starts workers whose CUDA device is a sham, from a process of its own into which the device is preloaded."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.sham_cuda.build import library
from tests.workers import Outcome, raise_failures, try_workers


class ShamCuda:
    """A process that forks workers with a sham device. Raises Unavailable as `library` does."""

    def __init__(self) -> None:
        device = library()
        self._host = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = str(device)
        try:
            self._host.submit(os.getpid).result()  # starts it
        finally:
            os.environ.pop("LD_PRELOAD")
            if before is not None:
                os.environ["LD_PRELOAD"] = before

    def run(self, function: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 240.0) -> list[Any]:
        """As `tests.workers.run_workers`."""
        return raise_failures(self.attempt(function, num_workers, *args, timeout=timeout))

    def attempt(
        self, function: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 240.0
    ) -> list[Outcome]:
        """As `tests.workers.try_workers`."""
        return self._host.submit(try_workers, function, num_workers, *args, timeout=timeout, device="sham").result()

    def close(self) -> None:
        """End the process."""
        self._host.shutdown()
