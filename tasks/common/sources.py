"""Opens data of any task from the Hub, saved data sets and parquet files, and finds its splits."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing")
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval")


def open_hub(name: str, subset: str | None = None, *, way_out: str) -> tuple[dict[str, Dataset], str]:
    """Download a data set of the Hub, or find it in the cache. Returns its splits with a description.

    Raises RuntimeError, with `way_out` as advice, if the Hub cannot be reached or has no such data set.
    """
    try:
        HfApi().dataset_info(name, timeout=10)
    except HfHubHTTPError:
        pass  # load_dataset says what is wrong
    except Exception:  # of the HTTP client, whose types depend on its version
        # The Hub does not answer: read the cache at once, without asking five times more for half a minute.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        loaded = datasets.load_dataset(*filter(None, (name, subset)))
    # The types of network, naming and format errors depend on the versions of the Hub's clients.
    except Exception as error:
        raise RuntimeError(
            f"Data set '{name}' could not be loaded from the Hugging Face Hub "
            f"({type(error).__name__}: {error}). Check the name; without network, {way_out}."
        ) from error
    return dict(loaded), f"{name}{f' ({subset})' if subset else ''} from the Hugging Face Hub"


def saved_splits(path: Path) -> dict[str, Dataset]:
    """Load what `save_to_disk` of `datasets` wrote into `path`, or into folders of it that are named after a split.

    Returns the data sets by split; a data set without splits is "train". Empty if nothing was saved that way.

    Raises ValueError for a data set that cannot be read.
    """
    if (path / "dataset_dict.json").is_file():
        return dict(_load_saved(path))
    if (path / "state.json").is_file():
        return {"train": _load_saved(path)}
    folders = [entry for entry in sorted(path.iterdir()) if (entry / "state.json").is_file()]
    return {split: _load_saved(folder) for folder in folders if (split := split_of(folder.name))}


def _load_saved(folder: Path) -> Any:
    try:
        return datasets.load_from_disk(str(folder))
    # Missing and broken files raise errors of `datasets`, Arrow and json.
    except Exception as error:
        raise ValueError(
            f"{folder} must be a data set as `save_to_disk` writes it ({type(error).__name__}: {error}). Save it again."
        ) from error


def split_of(name: str) -> str | None:
    """Name of the split that a file or folder is named after, or None.

    >>> split_of("train-00000-of-00001"), split_of("Val"), split_of("training_images"), split_of("trainers")
    ('train', 'val', 'training', None)
    """
    match = re.match(rf"({'|'.join(TRAIN_NAMES + TEST_NAMES + VALIDATION_NAMES)})(?![a-z])", name.lower())
    return match.group(1) if match else None


def find_split_files(path: Path, suffix: str) -> dict[str, list[Path]]:
    """Find files below `path` by split, such as train-00000-of-00002.parquet or train/0000.parquet.

    Returns the shards of each split in order; empty if no file is named after a split. Hidden files and folders, where
    editors and download tools keep copies, are ignored.

    Raises ValueError if splits lie in several folders, a shard is missing, or a file that is named like a whole split
    (train.en) has other files of the split beside it (train.tok.en).
    """
    splits: dict[Path, dict[str, list[Path]]] = {}
    for file in sorted(path.rglob(f"*{suffix}")):
        if file.is_dir() or any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
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
    """Read and concatenate parquet files, with the features that `datasets` stored in them, if any.

    Raises ValueError for a file that cannot be read, or whose columns differ from those of the first one.
    """
    parts = {file: _read_parquet_file(file) for file in files}
    first, *others = parts
    for file in others:
        if not _are_alike(parts[first].features, parts[file].features):
            raise ValueError(
                f"All files of a split must have the same columns; {file} has {_listed(parts[file].features)}, "
                f"{first.name} has {_listed(parts[first].features)}. Write them with the same columns."
            )
    return datasets.concatenate_datasets(list(parts.values()))


def _are_alike(features: datasets.Features, others: datasets.Features) -> bool:
    """Whether names and types agree; a column of nulls agrees with any type."""
    nothing = datasets.Value("null")
    return features.keys() == others.keys() and all(
        features[name] == others[name] or nothing in (features[name], others[name]) for name in features
    )


def _listed(features: datasets.Features) -> str:
    return ", ".join(f"{name}: {getattr(kind, 'dtype', type(kind).__name__)}" for name, kind in features.items())


def _read_parquet_file(file: Path) -> Dataset:
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{file} must be a readable parquet file: {error}. Write or download it again.") from error
    return Dataset(_without_dictionaries(table))


def _without_dictionaries(table: pa.Table) -> pa.Table:
    # pandas writes categorical columns with dictionary encoding, which `datasets` does not read.
    plain = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(plain, metadata=table.schema.metadata))


def _check_shards(shards: list[Path]) -> None:
    whole = next((shard for shard in shards if split_of(shard.stem) == shard.stem.lower()), None)
    if whole and len(shards) > 1:
        other = next(shard for shard in shards if shard != whole)
        raise ValueError(
            f"{whole.name} is named like a whole split, but {other.name} of the same split is beside it in "
            f"{whole.parent}. Remove one of them, or name them as shards ({split_of(whole.stem)}-00000-of-00002, ...)."
        )
    for shard in shards:
        match = re.search(r"-of-(\d+)$", shard.stem)
        if match and int(match.group(1)) != len(shards):
            raise ValueError(
                f"{shard.name} is one of {int(match.group(1))} shards; found {len(shards)} in {shard.parent}. "
                "Download the missing ones."
            )
    found = [re.search(r"(\d+)-of-\d+$", shard.stem) for shard in shards]
    numbers = sorted(int(match.group(1)) for match in found if match)
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(shards))):
        raise ValueError(
            f"Shards must be numbered without gaps; found {', '.join(shard.name for shard in shards)} in "
            f"{shards[0].parent}. Download the missing shard, and remove files of other splits."
        )
