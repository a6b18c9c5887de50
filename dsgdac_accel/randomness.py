"""Random streams: one shared seed, streams that differ per worker, and putting streams back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from dsgdac_accel.distributed.group import WorkerGroup


def shared_seed(group: WorkerGroup) -> int:
    """Worker 0's seed, the same on all workers. Collective."""
    return group.all_gather_object(torch.initial_seed(), "agreeing on a seed")[0]


def seed_workers_differently(group: WorkerGroup, *salt: int) -> None:
    """Give every worker random streams (torch, NumPy, Python) of its own, derived from worker 0's seed and `salt`.

    Repeats when the run is repeated with the same seed. Samplers keep the order that all workers share, see `loaders`.
    """
    words = _words(shared_seed(group), group.rank, *salt)
    random.seed(words[0])
    numpy.random.seed(words[1])
    torch.manual_seed(words[2] << 32 | words[3])


def _words(seed: int, worker: int, *salt: int) -> list[int]:
    return [int(word) for word in numpy.random.SeedSequence([seed, worker, *salt]).generate_state(4)]


def random_state() -> dict[str, Any]:
    """States of all global random streams: torch (CPU and the current CUDA device), NumPy, Python."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Return to a state taken by `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class StreamsOfWorkers:
    """A stream of torch's random numbers for each worker of a process, the one that its own process would draw from.

    Args:
        seed: that all workers of the run share.
        workers: numbers of the workers in this process.
    """

    def __init__(self, seed: int, workers: Sequence[int]) -> None:
        self._cuda: list[Tensor] | None = None
        self.seed(seed, workers)

    def seed(self, seed: int, workers: Sequence[int]) -> None:
        """Begin anew."""
        self._seeds = [words[2] << 32 | words[3] for words in (_words(seed, worker) for worker in workers)]
        self._cpu = [torch.Generator().manual_seed(own).get_state() for own in self._seeds]
        self._cuda = None  # made when first used: looking must not begin to use a GPU

    @contextmanager
    def swapped(self) -> Iterator[Callable[[int], None]]:
        """Inside, call the function given with the place of a worker: what follows draws from that worker's stream."""
        cuda = torch.cuda.is_initialized()
        if cuda and self._cuda is None:
            self._cuda = [torch.Generator("cuda").manual_seed(own).get_state() for own in self._seeds]
        outer = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
        running: int | None = None

        def put_back() -> None:
            if running is not None:
                self._cpu[running] = torch.get_rng_state()
                if cuda and self._cuda is not None:
                    self._cuda[running] = torch.cuda.get_rng_state()

        def use(worker: int) -> None:
            nonlocal running
            put_back()
            running = worker
            torch.set_rng_state(self._cpu[worker])
            if cuda and self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda[worker])

        try:
            yield use
        finally:
            put_back()
            torch.set_rng_state(outer[0])
            if outer[1] is not None:
                torch.cuda.set_rng_state(outer[1])

    def state_dict(self) -> dict[str, Tensor]:
        """States of all streams, (workers, bytes)."""
        state = {"cpu": torch.stack(self._cpu)}
        return state if self._cuda is None else state | {"cuda": torch.stack(self._cuda)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        # Each in memory of its own: torch reads a generator's state from the beginning of the storage.
        self._cpu = [stream.clone() for stream in state["cpu"]]
        self._cuda = [stream.clone() for stream in state["cuda"]] if "cuda" in state else None
