"""Where the tests of this folder run: on the GPUs of this machine, or on its CPU, so that their code does not rot."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.multiprocess.scenarios import Scenario, World, train
from tests.workers import Outcome, run_workers, try_workers

TIMEOUT = 20.0
"""Seconds after which a worker counts as lost."""
_CYCLES_PER_SECOND = 1.5e9  # of a GPU's clock, roughly
_SLEEP_SECONDS = 0.2


def on_devices(gpus: int, *, slow_on_cpu: bool = False) -> Any:
    """Run a test with `device` "cuda", if there are so many GPUs, and with "cpu", where it tells less."""
    cpu = pytest.param("cpu", marks=[pytest.mark.slow] if slow_on_cpu else [])
    return pytest.mark.parametrize("device", [cpu, pytest.param("cuda", marks=pytest.mark.gpu(gpus))])


def workers_on(device: str) -> int:
    """Number of processes for a test that needs several: as many as GPUs, an even number up to 8; 2 on a CPU."""
    return 2 if device == "cpu" else min(torch.cuda.device_count(), 8) // 2 * 2


def launch(body: Callable[..., Any], device: str, *args: Any, workers: int = 1) -> list[Any]:
    """What `body(here, *args)` returned in each process."""
    return run_workers(call, workers, body, device, args, timeout=240.0, device=device)


def try_launch(body: Callable[..., Any], device: str, *args: Any, workers: int) -> list[Outcome]:
    """As `launch`, but reports failures."""
    return try_workers(call, workers, body, device, args, timeout=240.0, device=device)


def call(rank: int, body: Callable[..., Any], device: str, args: tuple) -> Any:
    """Return what `body(here, *args)` returns in the process of this rank."""
    return body(Here(rank, device), *args)


def require_memory(device: str, gigabytes: float, gpus: int = 1) -> None:
    """Skip the test unless each GPU has so many 10^9 bytes of free memory."""
    if device == "cuda":
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(gpus)) / 1e9
        if free < gigabytes:
            pytest.skip(f"needs {gigabytes:g} GB of free GPU memory, found {free:.1f}")


def follow(here: Here, world: World, scenario: Scenario, after: Any = None) -> dict[str, Any]:
    """Return what `require_equal` compares with the simulation. Workers are late at random."""
    late = functools.partial(_come_late, here)
    return train(here.rank, world, scenario, after=after, each_step=late)


def _come_late(here: Here, accelerator: GossipAccelerator, step: int) -> None:
    here.delay(31 * here.rank + step, 0.02)


class Here:
    """A process of a test, and its device."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.size = rank, int(os.environ["WORLD_SIZE"])
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")

    def accelerator(self, **settings: Any) -> GossipAccelerator:
        """Return a new accelerator with these settings of `GossipConfig`. Collective."""
        return GossipAccelerator(
            cpu=not self.cuda, gossip=GossipConfig(**{"log_every": 0, "timeout": TIMEOUT, **settings})
        )

    def synchronize(self) -> None:
        """Wait until the device has done what is queued."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def delay(self, seed: int, seconds: float) -> None:
        """Put this worker behind by a random time of up to `seconds`: on a GPU in its queue, not on the host."""
        self.sleep(random.Random(seed).random() * seconds)

    def sleep(self, seconds: float) -> None:
        """Let the device sleep."""
        if self.cuda:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
        else:
            time.sleep(seconds)

    def free_memory(self) -> int:
        """Free bytes of the GPU; 0 on a CPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.cuda else 0


@dataclass
class HostWatch:
    """How the host fared in some calls, which on a GPU do not wait for it. Counts nothing on a CPU."""

    reads: int = 0
    """Most operations of one call that torch reports as waiting for the GPU: copies to the host, values that are read.
    It does not report waits for events."""
    seconds: float = 0.0
    """Longest time of a call during which the GPU slept."""

    @property
    def blocked(self) -> bool:
        """Whether a call returned only when the GPU had woken up, for whatever reason."""
        return self.seconds > _SLEEP_SECONDS / 2

    @contextlib.contextmanager
    def watching(self, here: Here) -> Iterator[None]:
        """Put the GPU to sleep, so that whatever is queued inside has to wait, and watch the host."""
        if not here.cuda:
            yield
            return
        here.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here.sleep(_SLEEP_SECONDS)
            torch.cuda.set_sync_debug_mode("warn")
            started = time.perf_counter()
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.seconds = max(self.seconds, time.perf_counter() - started)
        self.reads = max(self.reads, sum("called a synchronizing" in str(warning.message) for warning in caught))
