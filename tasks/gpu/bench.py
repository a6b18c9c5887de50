"""What checks run on: this process, its device, and one group of workers that all checks share."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from dsgdac_accel import GossipAccelerator, GossipConfig, WorkerGroup

T = TypeVar("T")

TIMEOUT = 20.0
"""Seconds after which a worker of a check counts as lost."""


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
            torch.cuda._sleep(int(part * seconds * 1.5e9))  # cycles of the GPU's clock
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


@contextlib.contextmanager
def counted_waits(counts: list[int]) -> Iterator[None]:
    """Append how many operations inside made the host wait for the GPU.

    torch reports copies to the host and what reads a value. It does not report the wait for an event, as when the host
    reads what was copied in the step before.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.append(sum("called a synchronizing" in str(warning.message) for warning in caught))
