"""The bench that checks run on: this process, its device, and one group of workers that all checks share."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from dsgdac_accel import GossipAccelerator, GossipConfig, WorkerGroup

T = TypeVar("T")

TIMEOUT = 20.0
"""Seconds after which a worker of a check counts as lost."""
_CYCLES_PER_SECOND = 1.5e9  # of a GPU's clock, roughly
_SLEEP_SECONDS = 0.2


class NotHere(Exception):
    """A check says nothing on this machine. The message is the reason."""


class Bench:
    """This process, as the checks see it.

    Args:
        cuda: whether to use the GPU of this process, or the CPU.
        leave: ends this process on behalf of a check, without a word to the other ones.
    """

    def __init__(self, cuda: bool, leave: Callable[[], NoReturn] | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.cuda = cuda
        self.device = torch.device("cpu")
        self.connected = False
        """Whether process groups were made."""
        self._leave = leave
        self._accelerators: list[GossipAccelerator] = []
        if cuda:
            index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)

    # ---- workers

    def accelerator(self, **settings: Any) -> GossipAccelerator:
        """Return a new accelerator with these settings of `GossipConfig`; all of them share one group. Collective."""
        config = GossipConfig(**{"log_every": 0, "timeout": TIMEOUT, **settings})
        self.connected = True
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=3 * TIMEOUT))  # connecting GPUs takes longest
        plain = Accelerator(cpu=not self.cuda, kwargs_handlers=[handler])
        accelerator = GossipAccelerator.adopt(plain, config)
        self._accelerators.append(accelerator)
        return accelerator

    @property
    def group(self) -> WorkerGroup:
        """The group that the accelerators share."""
        return self._accelerators[-1].group if self._accelerators else self.accelerator().group

    def everywhere(self, value: T) -> list[T]:
        """Return the value of every process, by rank. Collective."""
        return self.group.all_gather_object(value, "comparing what the checks found")

    def meet(self) -> None:
        """Wait for the other processes. Collective."""
        self.group.barrier("meeting for a check")

    def leave(self) -> NoReturn:
        """End this process at once, as if it had been killed."""
        assert self._leave is not None
        self._leave()

    def clean_up(self) -> None:
        """Free what a check has prepared."""
        for accelerator in self._accelerators:
            accelerator.free_memory()
        del self._accelerators[:-1]
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    # ---- the device

    def synchronize(self) -> None:
        """Wait until the device has done what is queued."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def delay(self, seed: int, seconds: float) -> None:
        """Put this worker behind by a random time of up to `seconds`: on a GPU in its queue, not on the host."""
        part = random.Random(seed).random()
        if self.cuda:
            torch.cuda._sleep(int(part * seconds * _CYCLES_PER_SECOND))
        else:
            time.sleep(part * seconds)

    def require_memory(self, gigabytes: float) -> None:
        """Raise NotHere on all processes unless each has so many 10^9 bytes of free GPU memory. Collective."""
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] / 1e9
        least = min(self.everywhere(free)) if self.size > 1 else free
        if least < gigabytes:
            raise NotHere(f"needs {gigabytes:g} GB of free GPU memory; {least:.1f} GB are free")

    def seconds(self, work: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one call, on the current stream of the GPU; an exchange may be in flight beside it."""
        torch.cuda.current_stream().synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats


@dataclass
class HostWaits:
    """How the host fared in some calls."""

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
    def watching(self, bench: Bench) -> Iterator[None]:
        """Put the GPU to sleep, so that whatever is queued inside has to wait, and watch the host."""
        bench.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda._sleep(int(_SLEEP_SECONDS * _CYCLES_PER_SECOND))
            torch.cuda.set_sync_debug_mode("warn")
            started = time.perf_counter()
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.seconds = max(self.seconds, time.perf_counter() - started)
        self.reads = max(self.reads, sum("called a synchronizing" in str(warning.message) for warning in caught))

    def __str__(self) -> str:
        return f"{self.reads} reads, {'BLOCKED' if self.blocked else 'free'}"
