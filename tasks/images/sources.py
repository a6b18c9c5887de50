"""Opens image data from the Hub, parquet files or image folders, and finds its splits and columns."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import datasets
from datasets import ClassLabel, Dataset, Features, Value

from tasks.common.sources import (
    TEST_NAMES,
    TRAIN_NAMES,
    VALIDATION_NAMES,
    find_split_files,
    open_hub,
    read_parquet,
    saved_splits,
)
from tasks.images.config import DataConfig

HUB_NAMES = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
}
"""Short names of data sets on the Hub."""

EVALUATION_NAMES = TEST_NAMES + VALIDATION_NAMES
"""Names of the evaluation split, in order of preference."""

IMAGE_NAMES = ("image", "img", "pixel_values")
LABEL_NAMES = ("label", "fine_label", "labels", "target", "class")
"""Names of the columns in lower case, in order of preference."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm")
OF_SYSTEMS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information")
"""Folders that systems and archivers add to folders of images."""
INDEX_NAMES = ("id", "idx", "index", "image_id", "__index_level_0__")

EXPECTED_FILES = (
    "Expected train*.parquet and test*.parquet (or validation*, valid*, val*), "
    "folders train/<class>/ and test/<class>/ with image files, or what `save_to_disk` of `datasets` wrote."
)


def open_splits(name: str | None, path: Path | None) -> tuple[dict[str, Dataset], str]:
    """Open all splits of a local `path` if given, else of `name` on the Hub. Returns them with a description.

    Raises what `find_local` and `open_hub` raise, and ValueError if neither is given.
    """
    if path is not None:
        found, origin = find_local(Path(path).expanduser())
        return {split: read() for split, read in found.items()}, origin
    if name:
        way_out = "set data.path to local parquet files or image folders, or use 'digits', which needs no download"
        return open_hub(HUB_NAMES.get(name.lower(), name), way_out=way_out)
    raise ValueError("Image data needs a name ('digits', 'cifar10', a Hub name) or a path; got neither.")


def find_local(path: Path) -> tuple[dict[str, Callable[[], Dataset]], str]:
    """Find the splits of a saved data set, parquet files or image folders by names of files, and what reads each.

    A single file, or a saved data set without splits, is the training split. Also returns a description.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: a folder without recognizable splits, a missing shard, or splits in several folders.
    """
    if not path.exists():
        raise FileNotFoundError(f"data.path must exist; got {path}. {EXPECTED_FILES}")
    if path.is_file():
        if path.suffix != ".parquet":
            raise ValueError(f"A file as data.path must be *.parquet; got {path}. {EXPECTED_FILES}")
        return {"train": partial(read_parquet, [path])}, f"parquet file {path}"
    if saved := saved_splits(path):
        return {split: partial(saved.__getitem__, split) for split in saved}, f"data set saved in {path}"
    if files := find_split_files(path, ".parquet"):
        return {split: partial(read_parquet, shards) for split, shards in files.items()}, f"parquet files in {path}"
    entries = sorted(path.iterdir())
    folders = {entry.name.lower(): entry for entry in entries if entry.is_dir()}
    if named := {name: folders[name] for name in folders if name in TRAIN_NAMES + EVALUATION_NAMES}:
        return {split: partial(read_image_folder, own) for split, own in named.items()}, f"image folders in {path}"
    found = ", ".join(entry.name for entry in entries[:10]) or "nothing"
    raise ValueError(f"No splits in {path}; found {found}. {EXPECTED_FILES}")


def require_local_splits(data: DataConfig) -> None:
    """Raise the errors of `find_local` and `choose_splits` for local data that a run cannot use. Reads no images."""
    if data.path is not None:
        choose_splits(find_local(data.path.expanduser())[0], data.test_split, data.test_fraction)


def read_image_folder(folder: Path) -> Dataset:
    """List the images in <folder>/<class>/, at any depth, labeled by class.

    Other files are ignored, and so are, at any depth, hidden files and folders such as .ipynb_checkpoints, and those
    that systems add, such as __MACOSX.

    Raises ValueError if there are no images, and for names that are not UTF-8.
    """
    files = {entry.name: _image_files(folder, entry) for entry in sorted(folder.iterdir()) if entry.is_dir()}
    names = [name for name, images in files.items() if images]
    if not names:
        raise ValueError(
            f"Image folders must be {folder}/<class>/<image files>; found no image there. {EXPECTED_FILES}"
        )
    rows = [(str(file), label) for label, name in enumerate(names) for file in files[name]]
    columns = {"image": [file for file, _ in rows], "label": [label for _, label in rows]}
    return Dataset.from_dict(columns, features=Features(image=datasets.Image(), label=ClassLabel(names=names)))


def choose_splits(
    available: Collection[str], test_split: str | None = None, test_fraction: float | None = None
) -> tuple[str, str | None]:
    """Choose the training and the evaluation split; None for the latter if `test_fraction` of train is held out.

    >>> choose_splits(["train", "validation", "test"])
    ('train', 'test')

    Raises ValueError without a training split, and without an evaluation split or `test_fraction`: training data is
    never evaluated on unless asked for.
    """
    found = ", ".join(repr(name) for name in available)
    if test_split is not None and test_fraction is not None:
        raise ValueError(f"Give test_split or test_fraction, not both; got {test_split!r} and {test_fraction}.")
    train = next((name for name in TRAIN_NAMES if name in available), None)
    if train is None:
        raise ValueError(f"Training needs a split named 'train'; found {found}.")
    if test_fraction is not None:
        return train, None
    if test_split is not None:
        if test_split not in available or test_split == train:
            raise ValueError(f"test_split must be a split other than '{train}'; got {test_split!r}, found {found}.")
        return train, test_split
    test = next((name for name in EVALUATION_NAMES if name in available), None)
    if test is None:
        raise ValueError(
            f"Evaluation needs a split named 'test', 'validation', 'valid' or 'val'; found only {found}. "
            "Add one, or set test_fraction (such as 0.1) to hold out a part of the training split."
        )
    return train, test


def find_image_column(features: Features, wanted: str | None = None) -> str:
    """Name of the image column: `wanted`, else one of the usual names, else the only candidate.

    Candidates have the Image feature or, in plain parquet, hold {"bytes": ...} structs or binary values.

    Raises ValueError, listing the columns, if none can be chosen.
    """
    candidates = [
        name
        for name, feature in features.items()
        if isinstance(feature, datasets.Image)
        or (isinstance(feature, Mapping) and "bytes" in feature)
        or "binary" in _type_of(feature)
    ]
    return _choose_column("image", candidates, [candidates], IMAGE_NAMES, features, wanted)


def find_label_column(features: Features, wanted: str | None = None) -> str:
    """Name of the label column: `wanted`, else one of the usual names, else the only ClassLabel, else the only integer.

    Under the usual names, strings and booleans are labels, too.

    Raises ValueError, listing the columns, if none can be chosen.
    """
    types = {name: _type_of(feature) for name, feature in features.items()}
    class_labels = [name for name, kind in types.items() if kind == "ClassLabel"]
    integers = [name for name, kind in types.items() if re.fullmatch(r"u?int\d+", kind)]
    others = [name for name, kind in types.items() if kind in ("string", "large_string", "bool")]
    candidates = [name for name in features if name in class_labels + integers + others]
    counted = [name for name in integers if name.lower() not in INDEX_NAMES]
    return _choose_column("label", candidates, [class_labels, counted], LABEL_NAMES, features, wanted)


def _choose_column(
    kind: str,
    candidates: list[str],
    alone: list[list[str]],
    preferred: tuple[str, ...],
    features: Features,
    wanted: str | None,
) -> str:
    if wanted in candidates:
        return str(wanted)
    if wanted is None:
        by_lower_name = {name.lower(): name for name in reversed(candidates)}
        named = [by_lower_name[name] for name in preferred if name in by_lower_name]
        only = [group[0] for group in alone if len(group) == 1]
        if named or only:
            return (named + only)[0]
    columns = ", ".join(f"{name}: {_type_of(feature)}" for name, feature in features.items())
    problem = f"{kind}_column={wanted!r} is not one" if wanted else f"{len(candidates)} may be one, none by its name"
    raise ValueError(
        f"The data needs a column of {kind}s; {problem}. Set {kind}_column to one of the columns: {columns}."
    )


def _type_of(feature: object) -> str:
    return feature.dtype if isinstance(feature, Value) else type(feature).__name__


def _image_files(folder: Path, class_folder: Path) -> list[Path]:
    files = []
    for file in sorted(class_folder.rglob("*")):
        parts = file.relative_to(folder).parts
        ignored = any(part.startswith(".") or part in OF_SYSTEMS for part in parts)
        # Reading a named pipe would wait for a writer. A dangling link is kept, so that decoding it reports it.
        if ignored or file.suffix.lower() not in IMAGE_SUFFIXES or not (file.is_file() or file.is_symlink()):
            continue
        try:
            str(file).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(file).decode(errors="replace")
            raise ValueError(f"Names of image files and classes must be UTF-8; got {shown}. Rename it.") from None
        files.append(file)
    return files
