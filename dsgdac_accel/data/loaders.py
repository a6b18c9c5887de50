"""Data order and randomness of loaders: disjoint, repeatable shards, and other random numbers on every worker."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import random_state, set_random_state

_ORDERED_BY_TORCH = {
    kind.__iter__
    for kind in (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, SeedableRandomSampler)
}
"""The iterations that draw from the sampler's own generator alone."""


# ---- one order for all workers


def new_generator(drawing: Any = None) -> torch.Generator:
    """Return a generator for a sampler or a loader, on the device where it draws.

    torch's samplers draw on the device of their weights, or else, like its loaders, on the default device.
    """
    weights = getattr(drawing, "weights", None)
    return torch.Generator(weights.device if isinstance(weights, Tensor) else torch.get_default_device())


class SharedStream:
    """The batches of a sampler, or the samples of a stream, in an order that all workers share.

    A sampler may draw from generators of its own and from torch's, NumPy's or Python's global stream, which differ
    between workers. While it is read they are seeded alike on all workers, by the number of the pass. Other passes over
    the same sampler, on one worker or on all, therefore change nothing.

    Args:
        inner: the user's batch sampler or stream.
        seed: the same on all workers.
        chunk: how many items the reader takes before it hands out the first.
    """

    def __init__(self, inner: Any, seed: int, chunk: int = 1) -> None:
        self.inner = inner
        self.seed = seed
        self.chunk = chunk
        self.epoch = 0
        """Number of the next pass."""
        self.numbered = False
        """Whether a framework has set it, by `set_shared_epoch`."""

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:  # batch_size, drop_last, sampler, set_epoch, ... of the user's
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        by_torch = getattr(type(self.inner), "__iter__", None) is BatchSampler.__iter__ and (
            type(self.inner.sampler).__iter__ in _ORDERED_BY_TORCH
        )
        if by_torch and getattr(self.inner.sampler, "generator", False) is None:
            self.inner.sampler.generator = new_generator(self.inner.sampler)
        generators = generators_in(parts_of(self.inner))
        seeds = numpy.random.SeedSequence([self.seed, self.epoch]).generate_state(3 + len(generators))

        def streams() -> tuple[dict[str, Any], list[Any]]:
            return {} if by_torch else random_state(), [generator_state(generator) for generator in generators]

        def use(state: tuple[dict[str, Any], list[Any]]) -> None:
            if not by_torch:
                set_random_state(state[0])
            for generator, own in zip(generators, state[1], strict=True):
                set_generator_state(generator, own)

        outer = streams()
        if not by_torch:
            random.seed(int(seeds[0]))
            numpy.random.seed(int(seeds[1]))
            torch.manual_seed(int(seeds[2]))
        for generator, seed in zip(generators, seeds[3:], strict=True):
            _seed_generator(generator, int(seed))
        items = iter(self.inner)
        while True:
            taken = list(itertools.islice(items, self.chunk))
            shared = streams()
            use(outer)
            if not taken:
                return
            yield from taken
            outer = streams()
            use(shared)


def share_order(prepared: Any, seed: int) -> None:
    """Let every pass over a prepared loader have the order that `SharedStream` gives it.

    Accelerate broadcasts worker 0's generator when a pass begins, for which a worker that only takes a sample would
    wait; this is left out.
    """
    shard: Any = batch_sampler_of(prepared)
    if getattr(shard, "batch_sampler", None) is not None:
        shard.batch_sampler = SharedStream(shard.batch_sampler, seed)
    base = prepared.base_dataloader
    if isinstance(base.dataset, IterableDatasetShard):
        stream = base.dataset
        chunk = (stream.batch_size or 1) * (1 if stream.split_batches else stream.num_processes)
        stream.dataset = SharedStream(stream.dataset, seed, chunk)
        # Loader processes that live on would keep the number of their first pass.
        object.__setattr__(base, "persistent_workers", False)
    prepared.rng_types = [kind for kind in prepared.rng_types or () if kind != "generator"]


def number_passes(loader: Any, number: int) -> None:
    """Order the next passes over a loader as those of `number`, in all that runs on a shared stream."""
    for part in parts_of(loader):
        if isinstance(part, SharedStream) and not part.numbered:
            part.epoch = number


def set_shared_epoch(loader: Any, epoch: int) -> None:
    """Order the next pass as that of `epoch` (0-based), for frameworks that count epochs, also in a resumed run."""
    for part in parts_of(loader):
        if isinstance(part, SharedStream):
            part.epoch, part.numbered = epoch, True
            if hasattr(part.inner, "set_epoch"):
                part.inner.set_epoch(epoch)


# ---- data that the workers do not share


_LISTS = (list, tuple, range, numpy.ndarray, Tensor)
"""What is compared between workers."""
_LIBRARIES = ("builtins", "torch", "typing", "datasets", "accelerate", "transformers")
_RANKS = {"get_rank", "get_node_local_rank", "process_index", "local_process_index", "RANK", "LOCAL_RANK"}


def refuse_undistributable(loader: DataLoader, group: WorkerGroup, dispatched: bool) -> None:
    """Raise ValueError if the loader has no batches that could be distributed, or a stream that is split already."""
    if group.size == 1:
        return
    if getattr(getattr(loader.dataset, "_distributed", None), "world_size", 1) > 1:
        raise ValueError(
            f"split_dataset_by_node gives every worker its part of the stream, and `prepare` would split that over "
            f"{group.size} workers again. Leave split_dataset_by_node out."
        )
    if not dispatched and loader.batch_size is None and batch_sampler_of(loader) is None:
        raise ValueError(
            f"batch_size=None leaves batches to the dataset, and Accelerate cannot distribute them over "
            f"{group.size} workers. Give a BatchSampler as `sampler`, set dispatch_batches=True in "
            f"DataLoaderConfiguration, so that worker 0 reads for all, or let every worker read its own part through "
            f"`accelerator.equal_steps(loader)`, without `prepare`."
        )


def shared_seed_of(loader: DataLoader, group: WorkerGroup, dispatched: bool, number: int) -> int:
    """Return a seed that all workers share, and warn of data that they do not share or have split already. Collective.

    `prepare` splits data of which every worker has all. Lists, arrays and tensors in the dataset and its samplers, such
    as `Subset.indices`, are compared by digests of up to 1,024 of their entries.

    Args:
        loader: as the script made it.
        group: the workers.
        dispatched: whether worker 0 reads for all.
        number: of the loader. Loaders without generators of their own have different orders.
    """
    parts = [part for part in parts_of(loader) if part is not loader]
    states = [generator_state(generator) for generator in generators_in(parts)]
    states = [state.numpy() if isinstance(state, Tensor) else state for state in states]
    seed = int.from_bytes(hashlib.sha256(pickle.dumps((torch.initial_seed(), states or number))).digest()[:7], "little")
    compared = () if dispatched and isinstance(loader.dataset, IterableDataset) else (loader.dataset, *parts)
    digests = dict(itertools.chain.from_iterable(map(_digests, compared)))
    if hasattr(loader.dataset, "__len__"):
        digests[f"len({type(loader.dataset).__name__})"] = _digest(len(loader.dataset))
    ranks = {
        type(part).__name__
        for part in parts
        if any(type(value) is int and value == group.rank for value in getattr(part, "__dict__", {}).values())
    }
    answers = group.all_gather_object((seed, digests, ranks), "comparing the data of the workers")
    own_part = [*map(_split_by, parts), *sorted(set.intersection(*(ranks for _, _, ranks in answers)))]
    split = next((name for name in own_part if name is not None), None)
    differing = [
        (name, rank)
        for rank, (_, others, _) in enumerate(answers)
        for name in {**digests, **others}
        if answers[0][1].get(name) != others.get(name)
    ]
    if split is not None:
        warnings.warn(
            f"{split} gives every worker a part of the data, and `prepare` splits it again: every pass would read "
            f"only one sample in {group.size}. Leave it out (of a sampler: shuffle=True), or read each worker's part "
            f"through `accelerator.equal_steps(loader)`, without `prepare`.",
            stacklevel=5,
        )
    elif differing:
        name, rank = differing[0]
        warnings.warn(
            f"{name} differs between {group.members.named([0])} and {group.members.named([rank])}, but `prepare` "
            f"splits data that all workers share: rows would be read twice or never, or in training although they are "
            f"held out elsewhere. Give all workers the same data, splits and orders: by a seed (random_split(..., "
            f"generator=torch.Generator().manual_seed(0))), and without split_dataset_by_node.",
            stacklevel=5,
        )
    return answers[0][0]


def _split_by(part: Any) -> str | None:
    """Return the method of a sampler or stream of the user's that asks for the rank of this process, or None."""
    own = [kind for kind in type(part).__mro__ if kind.__module__.split(".")[0] not in _LIBRARIES]
    for kind in own:
        for name, member in vars(kind).items():
            code = getattr(member, "__code__", None)
            if code is not None and name != "__init__" and _RANKS.intersection((*code.co_names, *code.co_consts)):
                return f"{kind.__name__}.{name}"
    return None


def _digests(part: Any, depth: int = 4) -> Iterator[tuple[str, bytes]]:
    """Yield names and digests of the lists, arrays and tensors in a dataset, also in those inside it, or a sampler."""
    table = hasattr(part, "_fingerprint") and hasattr(part, "with_format")  # a Dataset of datasets
    if table or isinstance(part, _LISTS):
        named = [("rows", part.with_format("arrow") if table else part)]
    else:
        named = list(getattr(part, "__dict__", {}).items())
    for name, value in named:
        if (isinstance(value, Dataset) or name in ("_ex_iterable", "ex_iterable")) and depth:
            yield from _digests(value, depth - 1)
        elif is_generator(value) and hasattr(part, "ex_iterable"):
            yield "the generator of shuffle(seed=...) of datasets", _digest(generator_state(value))
        elif isinstance(value, _LISTS) or table:
            count, most = len(value) if getattr(value, "ndim", 1) else 0, 32 if table else 1024
            entries = [value[place] for place in sorted({place * count // most for place in range(min(most, count))})]
            for entry in entries if depth else ():
                yield from _digests(entry, depth - 1) if isinstance(entry, Dataset) else ()
            entries = [entry.to_pylist() for entry in entries] if table else entries
            yield f"{type(part).__name__}.{name}", _digest([count, *(_plain(e, 8192 // len(entries)) for e in entries)])


def _digest(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()[:8]


def _plain(entry: Any, size: int) -> Any:
    """Return what can be compared between processes: about `size` numbers, the last part of a path, or a type."""
    if isinstance(entry, Tensor | numpy.ndarray):
        flat = entry.reshape(-1)
        return flat[:: max(1, len(flat) // size)].tolist()
    if isinstance(entry, str):
        return entry.rsplit("/", 1)[-1][:64]
    if isinstance(entry, bytes):
        return entry[-64:]
    if isinstance(entry, list | tuple):
        return [_plain(value, 8) for value in entry[:16]]
    if isinstance(entry, dict):
        return {name: _plain(value, 8) for name, value in entry.items()}
    return entry if isinstance(entry, int | float | numpy.generic | None) else type(entry).__name__


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


def keep_order(loaders: Iterable[Any]) -> Callable[[bool], None]:
    """Return a function `end(keep)` that ends a pass: it gives loaders and samplers the state that they have now.

    This covers epoch counters, end marks, random generators, and what samplers keep in attributes. Until then they have
    copies of their lists and arrays, which they may shuffle in place. With `keep`, the pass leaves its traces.
    """
    parts = {id(part): part for loader in loaders for part in parts_of(loader) if hasattr(part, "__dict__")}.values()
    states = [(generator, generator_state(generator)) for generator in generators_in(parts)]
    kept = []
    for part in parts:
        loads = isinstance(part, DataLoader | DataLoaderShard | DataLoaderDispatcher | IterableDataset)
        own = {name: value for name, value in vars(part).items() if not loads or name in _PASS_STATE}
        lists = {name: value for name, value in own.items() if isinstance(value, list | numpy.ndarray)}
        copies = {name: copy.copy(value) for name, value in lists.items() if name != "data_source"}
        before = {name: copy.copy(own[name]) for name in copies}
        vars(part).update(copies)
        kept.append((part, own, copies, before))

    def end(keep: bool) -> None:
        for part, own, copies, before in kept:
            for name, copied in copies.items():
                if keep and vars(part).get(name) is copied:
                    if _same_entries(own[name], before[name]):  # else a script has written it, such as new weights
                        own[name][:] = copied
                    vars(part)[name] = own[name]
            if not keep:
                vars(part).update(own)
        for generator, state in () if keep else states:
            set_generator_state(generator, state)

    return end


def _same_entries(one: Any, other: Any) -> bool:
    if isinstance(one, numpy.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@contextmanager
def own_processes(loader: Any) -> Iterator[None]:
    """Inside, passes over a loader have loader processes of their own, also if these live on between passes.

    Two simultaneous passes would otherwise share them.
    """
    base = getattr(loader, "base_dataloader", loader)
    if not getattr(base, "persistent_workers", False):
        yield
        return
    outer, base._iterator = base._iterator, None
    try:
        yield
    finally:
        if base._iterator is not None:
            base._iterator._shutdown_workers()
        base._iterator = outer


@contextmanager
def preserved_loaders(loaders: Iterable[Any]) -> Iterator[None]:
    """Restore the order of loaders and their samplers on exit, so that passes inside leave no trace."""
    loaders = list(loaders)
    end = keep_order(loaders)
    try:
        with ExitStack() as processes:
            for loader in loaders:
                processes.enter_context(own_processes(loader))
            yield
    finally:
        end(False)


def generators_in(parts: Iterable[Any]) -> list[Any]:
    """Return the random generators in the attributes of samplers and loaders, each once."""
    values = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    return list({id(value): value for value in values if is_generator(value)}.values())


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


def _seed_generator(generator: Any, seed: int) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def parts_of(loader: Any) -> list[Any]:
    """Return the loader, the loader it wraps, and their chain of samplers or the stream that is split, each once."""
    found: dict[int, Any] = {}
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in found:
            continue
        found[id(part)] = part
        waiting += [getattr(part, name, None) for name in ("base_dataloader", "batch_sampler", "sampler", "inner")]
        stream = getattr(part, "dataset", None)
        waiting.append(stream if isinstance(stream, IterableDatasetShard | SharedStream | IterableDataset) else None)
    return list(found.values())
