"""Image classification data sets, whole in memory as uint8 tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from images.decoding import Pixels, decode_images, stack_splits
from images.sources import choose_splits, find_image_column, find_label_column, open_splits

DIGITS_TEST_FRACTION = 360 / 1797
"""Held-out part of the digits, which come without a split."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData:
    """A data set of N training and M test images in K classes, not augmented, not normalised."""

    train_images: Tensor
    """uint8 (N, C, H, W); C is 1 if all images are grey, else 3."""
    train_labels: Tensor
    """int64 (N,), in 0..K-1."""
    test_images: Tensor
    """uint8 (M, C, H, W)."""
    test_labels: Tensor
    """int64 (M,), in 0..K-1, the same mapping."""
    class_names: tuple[str, ...]
    """K names; the numbers as strings where the data has only those."""
    mean: Tensor
    """float32 (C,): mean of all training pixels, in the [0, 1] scale."""
    std: Tensor
    """float32 (C,): their standard deviation; 1 for a constant channel, so that dividing by it is harmless."""
    source: str
    """Where the data came from, in words."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def in_channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.train_images.shape[2], self.train_images.shape[3]


@dataclass(frozen=True)
class LabelledImages:
    """One split as decoded: images and, for each, its class as a name, or as a number where there are no names."""

    images: list[Pixels]
    labels: Sequence[Any]
    declared_names: tuple[str, ...] | None = None

    def rows(self, rows: Sequence[int]) -> LabelledImages:
        """Only these rows, in this order."""
        images, labels = [self.images[row] for row in rows], [self.labels[row] for row in rows]
        return LabelledImages(images, labels, self.declared_names)


def load_image_data(
    name: str | None = None,
    path: Path | str | None = None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    test_split: str | None = None,
    test_fraction: float | None = None,
    image_size: int | None = None,
    seed: int = 0,
) -> ImageData:
    """Load a data set by name or, if `path` is given, from local files (which win over the name).

    name            "digits" (scikit-learn's, offline), "cifar10", "cifar100", or any name on the Hub
    path            folder of train*.parquet and test*.parquet, or of train/<class>/ and test/<class>/ images
    image_column,   columns to read; by default found by type and name (CIFAR-100: fine_label)
    label_column
    test_split      split to evaluate on; by default "test", else "validation", "valid", "val"
    test_fraction   in (0, 1): hold out this part of the training split instead, evenly over the classes
    image_size      resize all images to this square (PIL, bilinear); needed where their sizes differ
    seed            of the held-out part. Leave it alone between runs that are to be compared

    The classes are the declared ones, else the sorted distinct labels of the training split. The result is the
    same in every process.

    Raises ValueError for data that cannot be used as it is (no evaluation split, unclear columns, missing or unseen
    labels, broken images, differing sizes), RuntimeError if the Hub cannot be reached and FileNotFoundError if the
    path does not exist; each says what to do.

    >>> digits = load_image_data("digits")
    >>> digits.train_images.shape, digits.test_images.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be in (0, 1), exclusive; got {test_fraction}.")
    if path is None and name is not None and name.lower() == "digits":
        whole, source = _digits(image_size), "digits of scikit-learn"
        train, test = hold_out(whole, DIGITS_TEST_FRACTION if test_fraction is None else test_fraction, seed)
        return _assemble(train, test, source)
    splits, source = open_splits(name, None if path is None else Path(path))
    train_split, chosen_test = choose_splits(splits, test_split, test_fraction)
    features = splits[train_split].features
    columns = find_image_column(features, image_column), find_label_column(features, label_column)
    train = _read_split(splits[train_split], train_split, columns, image_size)
    if chosen_test is None:
        assert test_fraction is not None
        train, test = hold_out(train, test_fraction, seed)
        return _assemble(train, test, f"{source}, {test_fraction:g} of '{train_split}' held out (seed {seed})")
    test = _read_split(splits[chosen_test], chosen_test, columns, image_size, train.declared_names)
    return _assemble(train, test, f"{source}, evaluated on '{chosen_test}'")


def with_label_noise(labels: Tensor, num_classes: int, fraction: float, seed: int) -> Tensor:
    """Draw exactly round(fraction * N) of the labels (N,) anew, uniformly over all classes, their own included.

    A copy; the same for the same seed, so give every worker the same one.

    >>> with_label_noise(torch.zeros(4, dtype=torch.int64), num_classes=10, fraction=0.0, seed=0)
    tensor([0, 0, 0, 0])

    Raises ValueError unless fraction is in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"The fraction of noisy labels must be in [0, 1]; got {fraction}.")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    noisy = labels.clone()
    noisy[rows] = torch.randint(num_classes, (len(rows),), generator=generator)
    return noisy


class ImageTensors(TorchDataset[dict[str, Tensor]]):
    """Images (N, C, H, W) and labels (N,) as a map-style data set of {"images", "labels"}, untransformed.

    A DataLoader asks `__getitems__` for a whole batch, one copy instead of one per image; pass it `collate`:

    >>> data = ImageTensors(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10))
    >>> batch = next(iter(torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate)))
    >>> batch["images"].shape, batch["labels"]
    (torch.Size([4, 1, 8, 8]), tensor([0, 1, 2, 3]))

    Raises ValueError if there are not as many labels as images.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if len(images) != len(labels):
            raise ValueError(f"Every image needs one label; got {len(images)} images and {len(labels)} labels.")
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices)
        return {"images": self.images.index_select(0, rows), "labels": self.labels.index_select(0, rows)}


def collate(batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Make one batch of items of `ImageTensors`; a batch that is ready passes through."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return {key: torch.stack([item[key] for item in batch]) for key in ("images", "labels")}


def hold_out(whole: LabelledImages, fraction: float, seed: int) -> tuple[LabelledImages, LabelledImages]:
    """Split into two disjoint parts, the second of round(fraction * N) rows, even over the classes.

    Raises ValueError if a part would be empty.
    """
    total = len(whole.labels)
    size = round(fraction * total)
    if not 0 < size < total:
        raise ValueError(f"Both parts of a split need rows; test_fraction={fraction} takes {size} of {total}.")
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    # Evenly spaced picks from the rows in order of class: each class gives its share, to within one.
    by_class = sorted(shuffled, key=lambda row: whole.labels[row])
    held_out = {by_class[(2 * pick + 1) * total // (2 * size)] for pick in range(size)}
    kept = [row for row in range(total) if row not in held_out]
    return whole.rows(kept), whole.rows(sorted(held_out))


def pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over all pixels of uint8 (N, C, H, W), per channel, in the [0, 1] scale.

    >>> mean, std = pixel_statistics(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    >>> mean.item(), std.item()
    (0.5, 0.5)
    """
    # Counts of the 256 values are exact, however many pixels there are.
    counts = [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
    weights = torch.stack(counts).double() / (images.numel() / images.shape[1])
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = weights @ values
    std = (weights * (values - mean[:, None]) ** 2).sum(1).sqrt()
    constant = weights.max(dim=1).values == 1
    return mean.float(), torch.where(constant, 1.0, std).float()


def _digits(image_size: int | None) -> LabelledImages:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Values are 0..16.
    pixels = (digits.images * (255 / 16)).round().astype("uint8")
    images = [Image.fromarray(image) for image in pixels]
    return LabelledImages(decode_images(images, "digits", image_size), digits.target.tolist())


def _read_split(
    dataset: Any,
    split: str,
    columns: tuple[str, str],
    image_size: int | None,
    train_names: tuple[str, ...] | None = None,
) -> LabelledImages:
    image_column, label_column = columns
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise ValueError(
            f"All splits need the same columns; '{split}' lacks {missing}, it has {dataset.column_names}. "
            "Rename its columns as in the training split."
        )
    if len(dataset) == 0:
        raise ValueError(f"Every split needs rows; '{split}' is empty.")
    feature = dataset.features[label_column]
    # An integer column beside a training split with names counts through those names.
    names = tuple(feature.names) if hasattr(feature, "names") else train_names
    # Straight from Arrow: images stay encoded, and decoding is ours.
    table = dataset.with_format("arrow")[:]
    labels = _check_labels(table[label_column].to_pylist(), split, names)
    return LabelledImages(decode_images(table[image_column].to_pylist(), split, image_size), labels, names)


def _check_labels(labels: list[Any], split: str, names: tuple[str, ...] | None) -> list[Any]:
    """Labels as names where there are names, else as they are.

    Raises ValueError for missing labels (null, negative, blank) and for numbers beyond the names.
    """
    missing = [row for row, label in enumerate(labels) if label is None or label == "" or _is_negative(label)]
    if missing:
        raise ValueError(
            f"Every image needs a label; split '{split}' has {len(missing)} of {len(labels)} rows without "
            f"(first: row {missing[0]}, {labels[missing[0]]!r}). Use another split as test_split, or remove those rows."
        )
    if names is None or isinstance(labels[0], str):
        return labels
    if max(labels) >= len(names):
        raise ValueError(f"Labels must be below the {len(names)} declared classes; split '{split}' has {max(labels)}.")
    return [names[label] for label in labels]


def _is_negative(label: Any) -> bool:
    return not isinstance(label, str) and label < 0


def _assemble(train: LabelledImages, test: LabelledImages, source: str) -> ImageData:
    classes = train.declared_names or tuple(sorted(set(train.labels)))
    _check_seen(train, test)
    numbers = {label: number for number, label in enumerate(classes)}
    train_images, test_images = stack_splits([train.images, test.images])
    mean, std = pixel_statistics(train_images)
    return ImageData(
        train_images=train_images,
        train_labels=torch.tensor([numbers[label] for label in train.labels]),
        test_images=test_images,
        test_labels=torch.tensor([numbers[label] for label in test.labels]),
        class_names=tuple(str(label) for label in classes),
        mean=mean,
        std=std,
        source=source,
    )


def _check_seen(train: LabelledImages, test: LabelledImages) -> None:
    unseen = sorted(set(test.labels) - set(train.labels), key=str)
    if unseen:
        count = sum(label in unseen for label in test.labels)
        raise ValueError(
            f"Every class of the test split must occur in training; {count} test rows are of classes that do not: "
            f"{unseen[:5]}. Remove these rows, or add training images of the classes."
        )
