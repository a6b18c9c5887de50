"""Findings about a prepared loader: equal numbers of steps, and shards that do not overlap."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsgdac_accel.data.equal_steps import EqualSteps, inner_loader, known_length
from dsgdac_accel.data.loaders import preserved_loaders
from dsgdac_accel.doctor.report import Finding, named_workers
from dsgdac_accel.randomness import random_state, set_random_state

MOST_SAMPLES = 200_000
"""Number of samples per process to compare, from the beginning of a pass."""


@dataclass(frozen=True)
class Share:
    """The data that one process reads in the next pass. None: unknown."""

    steps: int | None
    samples: list[Any] | None
    """Keys of the data set in order."""
    batch_size: int
    """Size of the largest batch."""
    equalized: bool
    """Whether passes stop at the shortest worker."""


class _Keys(Dataset):
    """Stands in for a data set: every sample is its own key."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, key: Any) -> Any:
        return key


def share_of(loader: Any) -> Share:
    """Find out what this process reads in the next pass, without reading data. Collective, like a pass.

    Counters, generators and random streams keep their state.
    """
    outer = inner_loader(loader)
    base = getattr(outer, "base_dataloader", outer)
    equalized = isinstance(loader, EqualSteps) or base is not outer
    steps = known_length(outer)
    reveals = isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset)
    if not reveals or isinstance(outer, DataLoaderDispatcher):
        return Share(steps, None, 0, equalized)
    samples: list[Any] = []
    batches = largest = 0
    with _only_keys(outer, base):
        for batch in outer:
            batches, largest = batches + 1, max(largest, len(batch))
            samples += [key if isinstance(key, int) else repr(key) for key in batch]
            if len(samples) >= MOST_SAMPLES:
                break
        else:
            steps = batches
    return Share(steps, samples, largest, equalized)


@contextmanager
def _only_keys(outer: Any, base: DataLoader) -> Iterator[None]:
    """Let the loader yield lists of keys in place of batches, inside the context."""
    stand_ins = {"dataset": _Keys(), "collate_fn": list, "num_workers": 0, "pin_memory": False, "timeout": 0}
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


def check_steps(shares: Sequence[Share]) -> list[Finding]:
    """Find workers without a batch, and workers with different or unknown numbers of batches."""
    steps = [share.steps for share in shares]
    if 0 in steps:
        empty = [rank for rank, count in enumerate(steps) if count == 0]
        advice = "Use more data, smaller batches or fewer workers"
        return [Finding("error", "steps", f"{named_workers(empty)} would get no batch", advice)]
    shown = ", ".join("unknown" if count is None else str(count) for count in steps)
    if None not in steps and len(set(steps)) == 1:
        return [Finding("ok", "steps", f"{steps[0]} batches a pass")]
    text = f"the workers have different or unknown numbers of batches a pass ({shown})"
    if not all(share.equalized for share in shares):
        return [Finding("error", "steps", text, "Pass the loader through `prepare` or `equal_steps`")]
    if None in steps:
        return [Finding("ok", "steps", f"{text}; a pass stops at the shortest worker")]
    return [Finding("warning", "steps", f"{text}; a pass stops at the shortest", "Distribute the data evenly")]


def check_shards(shares: Sequence[Share]) -> list[Finding]:
    """Find pairs of workers that read the same samples."""
    seen = [set(share.samples) for share in shares if share.samples is not None]
    if len(seen) < len(shares):
        return [Finding("ok", "shards", "not checked: the loader does not reveal which samples it reads")]
    first_reader: dict[Any, int] = {}
    common: Counter[tuple[int, int]] = Counter()
    for rank, samples in enumerate(seen):
        for sample in samples:
            reader = first_reader.setdefault(sample, rank)
            if reader != rank:
                common[reader, rank] += 1
    # A loader may repeat some samples to fill its last batches.
    spare = len(shares) * max(share.batch_size for share in shares)
    findings = []
    for (one, other), count in common.items():
        if count > min(spare, len(seen[one]) // 2, len(seen[other]) // 2):
            text = f"{named_workers((one, other))} both read {count} samples"
            advice = "Seed all workers alike before `prepare`, and let it distribute the batches"
            findings.append(Finding("error", "shards", text, advice))
    return findings[:8] or [Finding("ok", "shards", f"disjoint, {len(first_reader)} samples compared")]
