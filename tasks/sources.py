"""Where data of any task comes from: the Hub by name, parquet files by path; which file is which split."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing")
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval")


def open_hub(name: str, subset: str | None = None, *, way_out: str) -> tuple[dict[str, Dataset], str]:
    """Download (or find in the cache) a data set of the Hub: its splits, and a description.

    Raises RuntimeError, with the `way_out`, if the Hub cannot be reached or has no such data set.
    """
    try:
        loaded = datasets.load_dataset(*filter(None, (name, subset)))
    # Network, naming and format errors reach us as many types, depending on the versions of the Hub's clients.
    except Exception as error:
        raise RuntimeError(
            f"Data set '{name}' could not be loaded from the Hugging Face Hub "
            f"({type(error).__name__}: {error}). Check the name; without network, {way_out}."
        ) from error
    return dict(loaded), f"{name}{f' ({subset})' if subset else ''} from the Hugging Face Hub"


def split_of(name: str) -> str | None:
    """Name of the split that a file or folder holds, or None.

    >>> split_of("train-00000-of-00001"), split_of("Val"), split_of("training_images"), split_of("trainers")
    ('train', 'val', 'training', None)
    """
    match = re.match(rf"({'|'.join(TRAIN_NAMES + TEST_NAMES + VALIDATION_NAMES)})(?![a-z])", name.lower())
    return match.group(1) if match else None


def find_split_files(path: Path, suffix: str) -> dict[str, list[Path]]:
    """Files below `path` by split, shards in order: train-00000-of-00002.parquet or train/0000.parquet.

    Empty where no file names a split.

    Raises ValueError if splits lie in several folders (several configurations) or a shard is missing.
    """
    splits: dict[Path, dict[str, list[Path]]] = {}
    for file in sorted(path.rglob(f"*{suffix}")):
        if split := split_of(file.stem):
            splits.setdefault(file.parent, {}).setdefault(split, []).append(file)
        elif file.parent != path and (split := split_of(file.parent.name)):
            splits.setdefault(file.parent.parent, {}).setdefault(split, []).append(file)
    if len(splits) > 1:
        folders = ", ".join(str(folder) for folder in splits)
        raise ValueError(f"data.path must hold one data set; {path} has several: {folders}. Pass one of them.")
    found = next(iter(splits.values()), {})
    for shards in found.values():
        _check_shards(shards)
    return found


def read_parquet(files: Collection[Path]) -> Dataset:
    """Read and concatenate parquet files, with the features that `datasets` noted in them, if any."""
    return datasets.concatenate_datasets([_read_parquet_file(file) for file in files])


def _read_parquet_file(file: Path) -> Dataset:
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{file} must be a readable parquet file: {error}. Write or download it again.") from error
    return Dataset(_without_dictionaries(table))


def _without_dictionaries(table: pa.Table) -> pa.Table:
    # Pandas writes categorical columns dictionary-encoded, which `datasets` does not read.
    plain = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(plain, metadata=table.schema.metadata))


def _check_shards(shards: list[Path]) -> None:
    for shard in shards:
        match = re.search(r"-of-(\d+)$", shard.stem)
        if match and int(match.group(1)) != len(shards):
            raise ValueError(
                f"{shard.name} is one of {int(match.group(1))} shards; found {len(shards)} in {shard.parent}. "
                "Download the others: a part of the split would be missing."
            )
