"""Data order: shards disjoint and repeatable, randomness that differs per worker, the same number of steps for all."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, RandomSampler

from dsgdac_accel.group import WorkerGroup


def share_sampler_seed(loader: DataLoader, group: WorkerGroup) -> None:
    """Give samplers that would draw from the global random stream a generator that all workers share.

    Accelerate deals the batches of ONE order out to the workers. Since our workers' global streams differ, a sampler on
    the global stream (`WeightedRandomSampler`, `SubsetRandomSampler`) would make overlapping shards of different
    orders. `RandomSampler` is synchronised by Accelerate itself.
    """
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for candidate in (s for s in (sampler, inner) if s is not None):
        if isinstance(candidate, RandomSampler) or getattr(candidate, "generator", 0) is not None:
            continue
        candidate.generator = torch.Generator().manual_seed(shared_seed(group))


def shared_seed(group: WorkerGroup) -> int:
    """Worker 0's seed, the same on all workers. Collective."""
    return group.gather(torch.initial_seed(), "agreeing on a seed")[0]


def differ_per_worker(loader: Any, group: WorkerGroup) -> None:
    """Let the loader's own worker processes draw other random numbers than those of the other workers."""
    plain = getattr(loader, "base_dataloader", loader)
    if getattr(plain, "num_workers", 0) and not isinstance(plain.worker_init_fn, _SeedLoaderWorker):
        plain.worker_init_fn = _SeedLoaderWorker(group.rank, plain.worker_init_fn)


class _SeedLoaderWorker:
    """A picklable `worker_init_fn`: mixes the rank into the seed, then calls the user's own function."""

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        words = numpy.random.SeedSequence([torch.initial_seed() % 2**63, self.rank]).generate_state(3)
        random.seed(int(words[0]))
        numpy.random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        if self.then is not None:
            self.then(worker_id)


def known_length(loader: Any) -> int | None:
    """Batches in `loader`, or None where it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class EqualSteps:
    """Any iterable of this worker's batches, cut so that all workers take the same number of steps per pass.

    Every mix needs all workers. Where lengths are known, the shortest is agreed on once, here; where one is not, the
    workers ask each other before every batch whether all still have one. Construction and iteration are collective.

    Args:
        loader: this worker's batches.
        group: the workers.
        active: whether passes are cut now; evaluation must see all its data. Default: always.
    """

    def __init__(self, loader: Iterable[Any], group: WorkerGroup, active: Callable[[], bool] = lambda: True) -> None:
        self.loader = loader
        self.group = group
        self.active = active
        self.lengths = group.gather(known_length(loader), "comparing the lengths of data loaders")
        known = [length for length in self.lengths if length is not None]
        self.steps = min(known) if len(known) == group.size else None
        self._said = False

    @property
    def needed(self) -> bool:
        """Whether the workers' lengths differ or are unknown; otherwise the loader can be used as it is."""
        return self.steps is None or len(set(self.lengths)) > 1

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("the number of batches is unknown on some worker")
        return self.steps

    def __getattr__(self, name: str) -> Any:  # dataset, batch_size, set_epoch, ...: those of the loader
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if not self.active():
            yield from self.loader
            return
        yield from self._counted() if self.steps is not None else self._asking()

    def _counted(self) -> Iterator[Any]:
        """Lengths are known: stop at the shortest."""
        if self.group.rank == 0 and not self._said and self.needed:
            self._warn(
                f"the workers have different numbers of batches ({', '.join(map(str, self.lengths))}); "
                f"every pass stops at the shortest, {self.steps}."
            )
        batches = iter(self.loader)
        for taken, batch in enumerate(batches, 1):
            if self.steps == 0:
                break
            if taken == self.steps:
                self._mark_end()
            yield batch
            if taken == self.steps and taken < (self.lengths[self.group.rank] or 0):
                break
        else:
            return
        self._end_early(batches)

    def _asking(self) -> Iterator[Any]:
        """A length is unknown: fetch one batch ahead, so that the last step is known as such when it is taken."""
        batches = iter(self.loader)
        nothing = object()
        batch = next(batches, nothing)
        taken, everywhere = 0, self._all_have(batch is not nothing)
        while everywhere:
            following = next(batches, nothing)
            everywhere = self._all_have(following is not nothing)
            if not everywhere:
                self._mark_end()
            taken += 1
            yield batch
            batch = following
        if batch is not nothing:
            if not self._said:
                self._warn(f"worker {self.group.rank} has more batches than another; the pass stopped after {taken}.")
            self._end_early(batches)

    def _all_have(self, mine: bool) -> bool:
        return all(self.group.gather(mine, "asking whether every worker has another batch"))

    def _warn(self, message: str) -> None:
        self._said = True
        warnings.warn(message, stacklevel=4)

    def _mark_end(self) -> None:
        """Tell Accelerate that this batch is the last, so that a left-over accumulation window is stepped by all."""
        if hasattr(self.loader, "end_of_dataloader"):
            self.loader.end_of_dataloader = True

    def _end_early(self, batches: Iterator[Any]) -> None:
        """End a pass before its loader does, counting the epoch as an Accelerate loader does at its end."""
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        if hasattr(self.loader, "iteration"):
            self.loader.iteration += 1
        if hasattr(self.loader, "end"):
            self.loader.end()
