"""Data order and randomness of loaders: disjoint, repeatable shards, and other random numbers on every worker."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import random_state, set_random_state, shared_seed

_ORDERED_BY_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


# ---- one order for all workers


def share_sampler_seed(loader: DataLoader, group: WorkerGroup) -> None:
    """Give those samplers of torch that would draw from the global random stream a generator that all workers share.

    Accelerate distributes the batches of one order over the workers. The global streams differ between workers, so
    with a sampler that draws from them (`WeightedRandomSampler`, `SubsetRandomSampler`) each worker would take its
    shard of an order of its own, and shards would overlap. Accelerate synchronizes `RandomSampler` itself. For a user's
    own samplers see `SharedStream`.
    """
    if group.size == 1:
        return
    sampler = getattr(loader, "sampler", None)
    inner = getattr(batch_sampler_of(loader), "sampler", None)
    for candidate in (s for s in (sampler, inner) if s is not None):
        if not isinstance(candidate, RandomSampler) and getattr(candidate, "generator", False) is None:
            candidate.shared_seed = shared_seed(group)
            candidate.generator = new_generator(candidate).manual_seed(candidate.shared_seed)


def new_generator(drawing: Any = None) -> torch.Generator:
    """Return a generator for a sampler or a loader, on the device where it draws.

    torch's samplers draw on the device of their weights, or else, like its loaders, on the default device.
    """
    weights = getattr(drawing, "weights", None)
    return torch.Generator(weights.device if isinstance(weights, Tensor) else torch.get_default_device())


class SharedStream:
    """Runs a user's own batch sampler on random streams that all workers share.

    Such a sampler may shuffle with torch's, NumPy's or Python's global stream, which differ between workers. Around
    every batch they are swapped for shared ones, which are seeded anew in each epoch.

    Args:
        batch_sampler: the user's.
        seed: the same on all workers.
    """

    def __init__(self, batch_sampler: Any, seed: int) -> None:
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:  # batch_size, drop_last, sampler, ... of the user's
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Order the next pass as that of `epoch` (0-based)."""
        self.epoch = epoch
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        own = random_state()
        words = numpy.random.SeedSequence([self.seed, self.epoch]).generate_state(3)
        self.epoch += 1
        random.seed(int(words[0]))
        numpy.random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        batches = iter(self.batch_sampler)
        while True:
            batch = next(batches, None)
            shared = random_state()
            set_random_state(own)
            if batch is None:
                return
            yield batch
            own = random_state()
            set_random_state(shared)


def share_own_samplers(prepared: Any, group: WorkerGroup) -> None:
    """Wrap the batch sampler under the shard of a prepared loader in `SharedStream`, unless it is torch's."""
    shard: Any = batch_sampler_of(prepared)
    inner = getattr(shard, "batch_sampler", None)
    if group.size == 1 or inner is None or hasattr(inner, "rank"):  # distributed samplers know the order
        return
    # This covers Accelerate's seedable sampler, which is a RandomSampler.
    if type(inner) is not BatchSampler or not isinstance(inner.sampler, _ORDERED_BY_TORCH):
        shard.batch_sampler = SharedStream(inner, shared_seed(group))


def set_shared_epoch(loader: Any, epoch: int) -> None:
    """Order the next pass as that of `epoch` (0-based), in all samplers of a loader that run on a shared stream.

    For frameworks that count epochs themselves, also in a resumed run.
    """
    for part in parts_of(loader):
        if isinstance(part, SharedStream):
            part.set_epoch(epoch)
        elif "shared_seed" in getattr(part, "__dict__", ()):
            seed = numpy.random.SeedSequence([part.shared_seed, epoch]).generate_state(1, numpy.uint64)[0]
            part.generator.manual_seed(int(seed) >> 1)


def warn_of_own_shards(loader: DataLoader, group: WorkerGroup) -> None:
    """Warn of data whose shards would overlap, or that are split over the workers already.

    Raises:
        ValueError: the loader has no batches that could be distributed.
    """
    if group.size == 1:
        return
    if loader.batch_size is None and batch_sampler_of(loader) is None:
        raise ValueError(
            f"batch_size=None leaves batches to the dataset, and Accelerate cannot distribute them over "
            f"{group.size} workers. Give a BatchSampler as `sampler`, set dispatch_batches=True in "
            f"DataLoaderConfiguration, so that worker 0 reads for all, or let every worker read its own part through "
            f"`accelerator.equal_steps(loader)`, without `prepare`."
        )
    distributed = next((part for part in parts_of(loader) if _is_distributed(part)), None)
    if distributed is not None:
        warnings.warn(
            f"{type(distributed).__name__} gives every worker a part of the data, and `prepare` splits it again: every "
            f"pass would read only one sample in {group.size}. Leave the sampler out (shuffle=True).",
            stacklevel=4,
        )
    if isinstance(loader.dataset, IterableDataset):
        warnings.warn(
            "an IterableDataset read without dispatch_batches must not shuffle with the global random streams, which "
            "differ per worker: the shards would overlap. Give it a generator with the same seed on all workers.",
            stacklevel=4,
        )


def _is_distributed(sampler: Any) -> bool:
    """Return whether a sampler or batch sampler reads one worker's part, as `DistributedSampler` does."""
    replicas = getattr(sampler, "num_replicas", getattr(sampler, "world_size", 1))
    return "rank" in getattr(sampler, "__dict__", ()) and isinstance(replicas, int) and replicas > 1


# ---- randomness that differs


def differ_per_worker(loader: Any, group: WorkerGroup) -> None:
    """Let the processes of this worker's loader draw other random numbers than those of the other workers."""
    plain = getattr(loader, "base_dataloader", loader)
    if (
        group.size > 1
        and getattr(plain, "num_workers", 0) > 0
        and not isinstance(plain.worker_init_fn, _SeedLoaderWorker)
    ):
        plain.worker_init_fn = _SeedLoaderWorker(group.rank, plain.worker_init_fn)


class _SeedLoaderWorker:
    """A picklable `worker_init_fn` that mixes the rank into the seed, then calls the user's function."""

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


# ---- samplers


def batch_sampler_of(loader: Any) -> Any:
    """Return the sampler that makes the batches of a loader; None if the dataset makes them.

    With batch_size=None it is a `BatchSampler` in the place of the sampler: the dataset then gets whole lists of rows.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    return sampler if batch_sampler is None and isinstance(sampler, BatchSampler) else batch_sampler


# ---- leaving no trace


_PASS_STATE = ("iteration", "epoch", "end_of_dataloader", "remainder", "_stop_iteration")


@contextmanager
def preserved_loaders(loaders: Iterable[Any]) -> Iterator[None]:
    """Restore the state of loaders and their samplers on exit, so that passes inside leave no trace.

    This covers epoch counters, end marks, own random generators, and the processes of persistent loader workers, which
    two simultaneous passes would otherwise share.
    """
    parts = {id(part): part for loader in loaders for part in parts_of(loader) if hasattr(part, "__dict__")}.values()
    kept = [(part, name, vars(part)[name]) for part in parts for name in _PASS_STATE if name in vars(part)]
    generators = {id(value): value for part in parts for value in vars(part).values() if is_generator(value)}
    states = [(generator, generator_state(generator)) for generator in generators.values()]
    persistent = [part for part in parts if isinstance(part, DataLoader) and vars(part).get("persistent_workers")]
    passes = [(part, vars(part).get("_iterator")) for part in persistent]
    for part, _ in passes:
        part._iterator = None
    try:
        yield
    finally:
        for part, outer in passes:
            if part._iterator is not None and part._iterator is not outer:
                part._iterator._shutdown_workers()  # type: ignore[attr-defined]
            part._iterator = outer
        for part, name, value in kept:
            setattr(part, name, value)
        for generator, state in states:
            set_generator_state(generator, state)


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator of torch, NumPy or Python."""
    own = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
    return isinstance(value, own)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator, as plain values."""
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state from `generator_state`."""
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def parts_of(loader: Any) -> list[Any]:
    """Return the loader, the loader it wraps, and their chain of samplers, each once."""
    found: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in found:
            continue
        found[id(part)] = part
        waiting += [getattr(part, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]
    return list(found.values())
