"""Data order: shards disjoint and repeatable, randomness that differs per worker."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from accelerate.utils import synchronize_rng_states
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
    """Give torch's samplers that would draw from the global random stream a generator that all workers share.

    Accelerate deals the batches of ONE order out to the workers. Since our workers' global streams differ, a sampler on
    the global stream (`WeightedRandomSampler`, `SubsetRandomSampler`) would make overlapping shards of different
    orders. `RandomSampler` is synchronised by Accelerate itself; for samplers of the user's own see `SharedStream`.
    """
    if group.size == 1:
        return
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for candidate in (s for s in (sampler, inner) if s is not None):
        if not isinstance(candidate, RandomSampler) and getattr(candidate, "generator", False) is None:
            candidate.shared_seed = shared_seed(group)
            candidate.generator = torch.Generator().manual_seed(candidate.shared_seed)


class SharedStream:
    """A batch sampler of the user's own, run on a random stream that all workers share.

    Such a sampler may shuffle with torch's, NumPy's or Python's global stream. Those differ per worker, so around
    every batch the streams are swapped for shared ones, seeded anew each epoch.
    """

    def __init__(self, batch_sampler: Any, seed: int) -> None:
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __getattr__(self, name: str) -> Any:  # batch_size, drop_last, sampler, ...: those of the user's
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch` (0-based)."""
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
    """Put a `SharedStream` under the shard of a prepared loader whose sampler is not one of torch's."""
    shard: Any = getattr(prepared, "batch_sampler", None)
    inner = getattr(shard, "batch_sampler", None)
    if group.size == 1 or inner is None or hasattr(inner, "rank"):  # one that knows its rank orders by itself
        return
    # Accelerate's seedable sampler is a RandomSampler, too.
    if type(inner) is not BatchSampler or not isinstance(inner.sampler, _ORDERED_BY_TORCH):
        shard.batch_sampler = SharedStream(inner, shared_seed(group))


class RepeatedSharing:
    """In place of a loader's `rng_types`: going through it shares the random states, again where a worker is lost.

    Accelerate goes through them at the start of each pass, also of what `skip_first_batches` makes of a loader, and
    itself would broadcast the states in a way that ends the survivors of a loss.
    """

    def __init__(self, kinds: Sequence[Any], generator: torch.Generator | None, group: WorkerGroup) -> None:
        self.kinds = list(kinds)
        self.generator = generator
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        if self.group.size > 1:
            self.group.collective(
                lambda: synchronize_rng_states(self.kinds, self.generator), "sharing the order of a loader", strict=True
            )
        return iter(())


def survive_losses(prepared: Any, group: WorkerGroup) -> None:
    """Let a prepared loader share its random states so that the survivors of a loss go on, where they are to go on."""
    if group.on_loss == "continue" and getattr(prepared, "rng_types", None):
        prepared.rng_types = RepeatedSharing(prepared.rng_types, prepared.synchronized_generator, group)


def set_shared_epoch(loader: Any, epoch: int) -> None:
    """Let the samplers under a prepared loader that run on a shared stream order the next pass as that of `epoch`.

    For frameworks that count epochs by themselves, also in a run that resumes.
    """
    for part in parts_of(loader):
        if isinstance(part, SharedStream):
            part.set_epoch(epoch)
        elif "shared_seed" in getattr(part, "__dict__", ()):
            seed = numpy.random.SeedSequence([part.shared_seed, epoch]).generate_state(1, numpy.uint64)[0]
            part.generator.manual_seed(int(seed) >> 1)


def warn_of_own_shards(loader: DataLoader, group: WorkerGroup) -> None:
    """Say which data will not be shared out as they should be: of unknown order, or shared out already.

    Raises:
        ValueError: nobody knows what a batch is, so that none can be dealt out.
    """
    if group.size == 1:
        return
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(
            f"batch_size=None leaves batches to the data set, and Accelerate can deal out none of them to {group.size} "
            f"workers. Set dispatch_batches=True in DataLoaderConfiguration, so that worker 0 reads for all, or let "
            f"every worker read a part of its own through `accelerator.equal_steps(loader)`, without `prepare`."
        )
    shares = next((part for part in parts_of(loader) if _is_share(part)), None)
    if shares is not None:
        warnings.warn(
            f"{type(shares).__name__} gives every worker a part of the data, and `prepare` shares out each part once "
            f"more: of every pass only one sample in {group.size} would be read. Leave the sampler out (shuffle=True).",
            stacklevel=4,
        )
    if isinstance(loader.dataset, IterableDataset):
        warnings.warn(
            "an IterableDataset read without dispatch_batches must not shuffle with the global random streams, which "
            "differ per worker: the shards would overlap. Give it a generator seeded alike on all workers.",
            stacklevel=4,
        )


def _is_share(sampler: Any) -> bool:
    """Whether a sampler, or batch sampler, reads the part of one of several workers, as `DistributedSampler` does."""
    replicas = getattr(sampler, "num_replicas", getattr(sampler, "world_size", 1))
    return "rank" in getattr(sampler, "__dict__", ()) and isinstance(replicas, int) and replicas > 1


# ---- randomness that differs


def differ_per_worker(loader: Any, group: WorkerGroup) -> None:
    """Let the loader's own worker processes draw other random numbers than those of the other workers."""
    plain = getattr(loader, "base_dataloader", loader)
    if (
        group.size > 1
        and getattr(plain, "num_workers", 0) > 0
        and not isinstance(plain.worker_init_fn, _SeedLoaderWorker)
    ):
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


# ---- leaving no trace


_PASS_STATE = ("iteration", "epoch", "end_of_dataloader", "remainder", "_stop_iteration")


@contextmanager
def preserved_loaders(loaders: Iterable[Any]) -> Iterator[None]:
    """Put the state of loaders and their samplers back on exit, whoever iterated over them inside.

    That is: epoch counters, marks of the end, random generators of their own, and the processes of persistent workers,
    which two passes at once would otherwise share.
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
    """Whether this is a random stream of one's own: of torch, NumPy or Python."""
    own = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
    return isinstance(value, own)


def generator_state(generator: Any) -> Any:
    """The state of such a stream, as plain values."""
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Return to a state taken by `generator_state`."""
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def parts_of(loader: Any) -> list[Any]:
    """The loader, the one it wraps, and their chain of samplers, without repetition."""
    found: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in found:
            continue
        found[id(part)] = part
        waiting += [getattr(part, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]
    return list(found.values())
