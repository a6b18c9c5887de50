"""What a prepared loader gives each worker, found by a pass over the numbers of its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsgdac_accel.data.equal_steps import EqualSteps, known_length
from dsgdac_accel.data.loaders import preserved_loaders
from dsgdac_accel.doctor.facts import Facts
from dsgdac_accel.doctor.report import Finding, named_workers
from dsgdac_accel.randomness import random_state, set_random_state

MOST_SAMPLES = 200_000
"""Samples of each process that are compared; of a longer pass its beginning."""


@dataclass(frozen=True)
class Share:
    """What one process is given in the next pass."""

    steps: int | None
    """Batches; None where nobody can tell."""
    samples: np.ndarray | None
    """Their numbers in the data set, (k,) int64, in order; None where they cannot be seen."""
    whole: bool
    """Whether `samples` are those of the whole pass."""
    batch_size: int
    """Samples of the largest batch."""
    prepared: bool
    """Whether passes stop at the shortest worker."""
    loader_workers: int
    persistent: bool
    total: int | None
    """Samples of the data set."""


class _Numbers(Dataset):
    """Stands in for a data set: its samples are their own keys."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of the data set is unknown")
        return self.length

    def __getitem__(self, key: Any) -> Any:
        return key


def share_of(loader: Any) -> Share:
    """What this process is going to read, without reading the data. Collective, as a pass over the loader is.

    Counters, generators and random streams are left as they were.
    """
    outer: Any = loader.loader if isinstance(loader, EqualSteps) else loader
    base: Any = getattr(outer, "base_dataloader", outer)
    prepared = isinstance(loader, EqualSteps) or base is not outer
    plain = isinstance(base, DataLoader)
    visible = plain and not isinstance(base.dataset, IterableDataset) and not isinstance(outer, DataLoaderDispatcher)
    total = known_length(base.dataset) if plain else None
    common: dict[str, Any] = {
        "prepared": prepared,
        "loader_workers": base.num_workers if plain else 0,
        "persistent": bool(base.persistent_workers) if plain else False,
        "total": total,
    }
    if not visible:
        return Share(steps=known_length(outer), samples=None, whole=False, batch_size=0, **common)
    samples: list[Any] = []
    steps = largest = 0
    whole = True
    with torch.no_grad(), _only_numbers(outer, base, total):
        for batch in outer:
            steps, largest = steps + 1, max(largest, len(batch))
            samples += batch
            if len(samples) >= MOST_SAMPLES:
                whole = False
                break
    length = known_length(outer)
    return Share(
        steps=steps if whole else length,
        samples=_as_numbers(samples),
        whole=whole,
        batch_size=largest,
        **common,
    )


@contextmanager
def _only_numbers(outer: Any, base: DataLoader, total: int | None) -> Iterator[None]:
    """Inside, the loader yields lists of keys in place of batches."""
    put = {
        "dataset": _Numbers(total), "collate_fn": list, "num_workers": 0, "pin_memory": False, "timeout": 0,
    }  # fmt: skip
    # A DataLoader guards its parts against being exchanged while a pass is under way; none is, here.
    kept = {name: vars(base)[name] for name in put}
    state = getattr(outer, "gradient_state", None)
    references = [] if state is None else list(state.dataloader_references)
    streams = random_state()
    try:
        with preserved_loaders([outer]):
            vars(base).update(put)
            yield
    finally:
        vars(base).update(kept)
        set_random_state(streams)
        if state is not None:
            state.dataloader_references = references


def _as_numbers(keys: Sequence[Any]) -> np.ndarray:
    """Keys as numbers; those that are none by their hash, which is the same on all processes."""
    try:
        return np.asarray(keys, dtype=np.int64).reshape(len(keys))
    except (TypeError, ValueError, OverflowError):
        digests = (hashlib.sha256(repr(key).encode()).digest()[:8] for key in keys)
        return np.asarray([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=np.int64)


# ---- findings


def check_shares(shares: Sequence[Share], facts: Sequence[Facts]) -> list[Finding]:
    """Equal numbers of steps, disjoint shards, and loader processes that fit the machine."""
    return [*_check_steps(shares), *_check_shards(shares), *_check_loader_workers(shares, facts)]


def _check_steps(shares: Sequence[Share]) -> list[Finding]:
    steps = [share.steps for share in shares]
    empty = tuple(rank for rank, count in enumerate(steps) if count == 0)
    if empty:
        advice = "Use more data, smaller batches or fewer workers"
        return [Finding("error", "steps", f"{named_workers(empty)} would get no batch", advice, empty)]
    if None in steps:
        unknown = tuple(rank for rank, count in enumerate(steps) if count is None)
        text = f"the length of a pass is not known on {named_workers(unknown)}"
        if all(share.prepared for share in shares):
            return [Finding("ok", "steps", f"{text}; passes stop at the worker that has least")]
        return [Finding("error", "steps", text, "Wrap the loader in accelerator.equal_steps(...)", unknown)]
    known = [count for count in steps if count is not None]
    least = min(known)
    longer = tuple(rank for rank, count in enumerate(known) if count > least)
    if not longer:
        return [Finding("ok", "steps", f"{least} batches a pass{' on every worker' if len(shares) > 1 else ''}")]
    counts = ", ".join(map(str, known))
    text = f"{named_workers(longer)} have more batches a pass than the others ({counts})"
    if all(share.prepared for share in shares):
        advice = f"Every pass stops after {least}; deal the data out evenly to use all of it"
        return [Finding("warning", "steps", text, advice, longer)]
    return [Finding("error", "steps", text, "Pass the loader through `prepare` or `equal_steps`", longer)]


def _check_shards(shares: Sequence[Share]) -> list[Finding]:
    if len(shares) == 1:
        return []
    seen = [np.unique(share.samples) for share in shares if share.samples is not None]
    if len(seen) < len(shares):
        return [Finding("ok", "shards", "not looked at: the loader does not tell which samples it reads")]
    # To fill its last batches, a loader may deal some samples out twice.
    spare = len(shares) * max(share.batch_size for share in shares)
    findings, doubled = [], 0
    for one in range(len(shares)):
        for other in range(one + 1, len(shares)):
            common = len(np.intersect1d(seen[one], seen[other], assume_unique=True))
            doubled += common
            if common > min(spare, min(len(seen[one]), len(seen[other])) // 2):
                text = f"{named_workers((one, other))} read {common} samples both"
                advice = "Seed all workers alike before `prepare`, and let it deal the batches out"
                findings.append(Finding("error", "shards", text, advice, (one, other)))
    if findings:
        return findings[:8]
    covered = len(np.unique(np.concatenate(seen)))
    of = f" of {shares[0].total}" if shares[0].total is not None else ""
    beginning = "" if all(share.whole for share in shares) else "the beginning of a pass: "
    twice = f", {doubled} of them twice to fill the last batches" if doubled else ""
    return [Finding("ok", "shards", f"{beginning}disjoint, {covered}{of} samples{twice}")]


def _check_loader_workers(shares: Sequence[Share], facts: Sequence[Facts]) -> list[Finding]:
    most = max(share.loader_workers for share in shares)
    if most == 0:
        return []
    findings = []
    for machine in {fact.machine for fact in facts}:
        here = [fact.rank for fact in facts if fact.machine == machine]
        count = sum(shares[rank].loader_workers for rank in here)
        cores = len({core for rank in here for core in facts[rank].cores})
        if count + len(here) > 2 * cores:
            text = f"{count} loader processes beside {len(here)} workers on {cores} cores of {machine}"
            findings.append(Finding("warning", "loader", text, "Use fewer num_workers", tuple(here)))
    if facts[0].start_method != "fork" and not all(share.persistent for share in shares):
        text = f"loader processes start by {facts[0].start_method}, which imports everything anew for every pass"
        findings.append(Finding("warning", "loader", text, "Set persistent_workers=True, or num_workers=0"))
    text = f"{most} processes for each worker, start method {facts[0].start_method}"
    return findings or [Finding("ok", "loader", text)]
