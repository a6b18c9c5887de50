"""Findings about a prepared loader: equal numbers of steps, and shards that do not overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsgdac_accel.data.equal_steps import EqualSteps, known_length
from dsgdac_accel.data.loaders import preserved_loaders
from dsgdac_accel.doctor.report import Finding, named_workers
from dsgdac_accel.randomness import random_state, set_random_state

MOST_SAMPLES = 200_000
"""Number of samples per process to compare, from the beginning of a pass."""


@dataclass(frozen=True)
class Share:
    """The data that one process reads in the next pass."""

    steps: int | None
    """Number of batches; None if unknown."""
    samples: np.ndarray | None
    """Indices into the data set in order, (k,) int64; None if the loader does not reveal them."""
    batch_size: int
    """Size of the largest batch."""
    prepared: bool
    """Whether passes stop at the shortest worker."""
    total: int | None
    """Size of the data set, if known."""


class _Indices(Dataset):
    """Stands in for a data set: every sample is its own index."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of the data set is unknown")
        return self.length

    def __getitem__(self, key: Any) -> Any:
        return key


def share_of(loader: Any) -> Share:
    """Find out what this process reads in the next pass, without reading data. Collective, like a pass.

    Counters, generators and random streams keep their state.
    """
    outer: Any = loader.loader if isinstance(loader, EqualSteps) else loader
    base: Any = getattr(outer, "base_dataloader", outer)
    prepared = isinstance(loader, EqualSteps) or base is not outer
    steps, total = known_length(outer), known_length(base.dataset) if isinstance(base, DataLoader) else None
    if (
        not isinstance(base, DataLoader)
        or isinstance(base.dataset, IterableDataset)
        or isinstance(outer, DataLoaderDispatcher)
    ):
        return Share(steps, None, 0, prepared, total)
    samples: list[Any] = []
    batches = largest = 0
    with torch.no_grad(), _only_indices(outer, base, total):
        for batch in outer:
            batches, largest = batches + 1, max(largest, len(batch))
            samples += batch
            if len(samples) >= MOST_SAMPLES:
                break
        else:
            steps = batches
    return Share(steps, _as_numbers(samples), largest, prepared, total)


@contextmanager
def _only_indices(outer: Any, base: DataLoader, total: int | None) -> Iterator[None]:
    """Let the loader yield lists of indices in place of batches, inside the context."""
    stand_ins = {
        "dataset": _Indices(total), "collate_fn": list, "num_workers": 0, "pin_memory": False, "timeout": 0,
    }  # fmt: skip
    # Through vars(): a DataLoader refuses to replace its parts, which matters only while a pass is under way.
    kept = {name: vars(base)[name] for name in stand_ins}
    state = getattr(outer, "gradient_state", None)
    references = [] if state is None else list(state.dataloader_references)
    streams = random_state()
    try:
        with preserved_loaders([outer]):
            vars(base).update(stand_ins)
            yield
    finally:
        vars(base).update(kept)
        set_random_state(streams)
        if state is not None:
            state.dataloader_references = references


def _as_numbers(keys: Sequence[Any]) -> np.ndarray:
    """Return keys as numbers; keys of other types by a hash that is the same on all processes."""
    try:
        return np.asarray(keys, dtype=np.int64).reshape(len(keys))
    except (TypeError, ValueError, OverflowError):
        digests = (hashlib.sha256(repr(key).encode()).digest()[:8] for key in keys)
        return np.asarray([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=np.int64)


def check_steps(shares: Sequence[Share]) -> list[Finding]:
    """Find workers without a batch, of unknown length, or with more batches than others."""
    steps, prepared = [share.steps for share in shares], all(share.prepared for share in shares)
    empty = tuple(rank for rank, count in enumerate(steps) if count == 0)
    if empty:
        advice = "Use more data, smaller batches or fewer workers"
        return [Finding("error", "steps", f"{named_workers(empty)} would get no batch", advice, empty)]
    unknown = tuple(rank for rank, count in enumerate(steps) if count is None)
    if unknown:
        message = f"the length of a pass is unknown on {named_workers(unknown)}"
        if prepared:
            return [Finding("ok", "steps", f"{message}; passes stop at the shortest worker")]
        return [Finding("error", "steps", message, "Wrap the loader in accelerator.equal_steps(...)", unknown)]
    least = min(count for count in steps if count is not None)
    longer = tuple(rank for rank, count in enumerate(steps) if count != least)
    if not longer:
        return [Finding("ok", "steps", f"{least} batches a pass{' on every worker' if len(shares) > 1 else ''}")]
    message = f"{named_workers(longer)} have more batches a pass than the others ({', '.join(map(str, steps))})"
    if prepared:
        advice = f"Every pass stops after {least}; distribute the data evenly to use all of it"
        return [Finding("warning", "steps", message, advice, longer)]
    return [Finding("error", "steps", message, "Pass the loader through `prepare` or `equal_steps`", longer)]


def check_shards(shares: Sequence[Share]) -> list[Finding]:
    """Find pairs of workers that read the same samples."""
    if len(shares) == 1:
        return []
    seen = [np.unique(share.samples) for share in shares if share.samples is not None]
    if len(seen) < len(shares):
        return [Finding("ok", "shards", "not checked: the loader does not reveal which samples it reads")]
    # A loader may repeat some samples to fill its last batches.
    spare = len(shares) * max(share.batch_size for share in shares)
    findings, repeated = [], 0
    for one, other in combinations(range(len(shares)), 2):
        common = len(np.intersect1d(seen[one], seen[other], assume_unique=True))
        repeated += common
        if common > min(spare, min(len(seen[one]), len(seen[other])) // 2):
            message = f"{named_workers((one, other))} both read {common} samples"
            advice = "Seed all workers alike before `prepare`, and let it distribute the batches"
            findings.append(Finding("error", "shards", message, advice, (one, other)))
    if findings:
        return findings[:8]
    covered = len(np.unique(np.concatenate(seen)))
    of_total = f" of {shares[0].total}" if shares[0].total is not None else ""
    twice = f", {repeated} of them twice to fill the last batches" if repeated else ""
    return [Finding("ok", "shards", f"disjoint, {covered}{of_total} samples{twice}")]
