"""Random streams: one shared seed, streams that differ per worker, and saving and restoring streams."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from dsgdac_accel.devices import accelerator_streams
from dsgdac_accel.distributed.group import WorkerGroup


def shared_seed(group: WorkerGroup) -> int:
    """Return worker 0's torch seed, the same on all workers. Collective."""
    return group.all_gather_object(torch.initial_seed(), "agreeing on a seed")[0]


def seed_workers_differently(group: WorkerGroup, *salt: int) -> None:
    """Seed torch, NumPy and Python differently on every worker, from worker 0's seed and `salt`. Collective.

    A run that is repeated with the same seed gets the same streams. Samplers are not affected: they keep the order that
    all workers share (see `data.loaders`).
    """
    words = _seed_words(shared_seed(group), group.rank, *salt)
    random.seed(words[0])
    numpy.random.seed(words[1])
    torch.manual_seed(_torch_seed(words))


def make_streams_differ(group: WorkerGroup) -> None:
    """Seed the workers differently if two of them have the same torch stream. Collective."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    digests = group.all_gather_object(digest, "comparing random states")
    if len(set(digests)) < group.size:
        seed_workers_differently(group)


def _seed_words(seed: int, worker: int, *salt: int) -> list[int]:
    """Four 32-bit words: for Python, for NumPy, and two for torch."""
    return [int(word) for word in numpy.random.SeedSequence([seed, worker, *salt]).generate_state(4)]


def _torch_seed(words: Sequence[int]) -> int:
    return words[2] << 32 | words[3]


def random_state() -> dict[str, Any]:
    """Return the state of all global random streams: torch (CPU and the current accelerator), NumPy, Python."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(),
    }
    accelerator = accelerator_streams()
    if accelerator is not None:
        kind, module = accelerator
        state[kind] = module.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state returned by `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy.random.set_state(state["numpy"])
    accelerator = accelerator_streams()
    if accelerator is not None and accelerator[0] in state:
        kind, module = accelerator
        module.set_rng_state(state[kind])


class WorkerStreams:
    """One torch random stream per worker of a process, equal to the stream that a process of its own would use.

    Args:
        seed: the seed that all workers of the run share.
        workers: ranks of this process's workers among all workers.
    """

    def __init__(self, seed: int, workers: Sequence[int]) -> None:
        self.seed(seed, workers)

    def seed(self, seed: int, workers: Sequence[int]) -> None:
        """Restart the streams. Arguments as in the constructor."""
        self._seeds = [_torch_seed(_seed_words(seed, worker)) for worker in workers]
        self._cpu = [torch.Generator().manual_seed(own).get_state() for own in self._seeds]
        # Streams of an accelerator are made at first use, because making them would initialize it.
        self._kind = ""
        self._accelerated: list[Tensor] | None = None

    @contextmanager
    def swapped(self) -> Iterator[Callable[[int], None]]:
        """Yield a function `use(index)`, which makes the stream of worker `index` the global one.

        `index` counts the workers of this process from 0. The global stream from before is restored on exit.
        """
        kind, accelerator = accelerator_streams() or ("", None)
        if accelerator is not None and (self._accelerated is None or self._kind != kind):
            self._kind = kind
            self._accelerated = [torch.Generator(kind).manual_seed(own).get_state() for own in self._seeds]
        outer = torch.get_rng_state(), None if accelerator is None else accelerator.get_rng_state()
        running: int | None = None

        def save_running() -> None:
            if running is not None:
                self._cpu[running] = torch.get_rng_state()
                if accelerator is not None and self._accelerated is not None:
                    self._accelerated[running] = accelerator.get_rng_state()

        def use(worker: int) -> None:
            nonlocal running
            save_running()
            running = worker
            torch.set_rng_state(self._cpu[worker])
            if accelerator is not None and self._accelerated is not None:
                accelerator.set_rng_state(self._accelerated[worker])

        try:
            yield use
        finally:
            save_running()
            torch.set_rng_state(outer[0])
            if accelerator is not None:
                accelerator.set_rng_state(outer[1])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of all streams, shape (workers, bytes) each."""
        state = {"cpu": torch.stack(self._cpu)}
        return state if self._accelerated is None else state | {self._kind: torch.stack(self._accelerated)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore states returned by `state_dict`."""
        # Clone each row: torch reads a generator's state from the beginning of the storage.
        self._cpu = [stream.clone() for stream in state["cpu"]]
        self._kind = next((kind for kind in state if kind != "cpu"), "")
        self._accelerated = [stream.clone() for stream in state[self._kind]] if self._kind else None
