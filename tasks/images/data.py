"""Image classification data sets, held in memory as uint8 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from tasks.common.limits import check_memory
from tasks.images.config import CifarConfig, DataConfig
from tasks.images.decoding import decode_images, stack_splits
from tasks.images.sources import choose_splits, find_image_column, find_label_column, open_splits

DIGITS_TEST_FRACTION = 360 / 1797
"""Fraction of the digits that is held out for testing; scikit-learn ships them as one split."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData:
    """A data set of N training and M test images in K classes, neither augmented nor normalized."""

    train_images: Tensor
    """uint8 (N, C, H, W); C is 1 if all images are gray, else 3."""
    train_labels: Tensor
    """int64 (N,), in 0..K-1."""
    test_images: Tensor
    """uint8 (M, C, H, W)."""
    test_labels: Tensor
    """int64 (M,), in 0..K-1, numbered as the training labels."""
    validation_images: Tensor
    """uint8 (V, C, H, W), set aside from the test split; V is 0 unless asked for."""
    validation_labels: Tensor
    """int64 (V,), in 0..K-1."""
    class_names: tuple[str, ...]
    """Names of the K classes; numbers as strings if the data has no names."""
    mean: Tensor
    """float32 (C,): mean of all training pixels, scaled to [0, 1]."""
    std: Tensor
    """float32 (C,): their standard deviation; 1 for a constant channel, so that dividing by it is harmless."""
    source: str
    """Description of where the data came from."""

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
class LabeledImages:
    """Encoded images of a split, or of a part of it, with their labels."""

    images: Sequence[tuple[int, Any]]
    """For each image, its row in the split and its cell of the image column."""
    labels: Sequence[Any]
    """For each image, the name of its class, or its number if the data has no names."""
    classes: tuple[Any, ...]
    """All classes of the whole split: the declared ones, else its distinct labels, sorted."""
    split: str
    """Name of the split, for error messages."""
    has_names: bool = False
    """Whether the data declares the names of its classes."""

    def rows(self, rows: Sequence[int]) -> LabeledImages:
        """Select these rows, in this order."""
        return replace(self, images=[self.images[row] for row in rows], labels=[self.labels[row] for row in rows])


def load_configured_data(config: CifarConfig) -> ImageData:
    """Load the data of a run's configuration, with noise in the training labels if it asks for it.

    Raises what `load_image_data` raises.
    """
    data = load_image_data(config.data, config.seed)
    labels = with_label_noise(data.train_labels, data.num_classes, config.label_noise, config.seed)
    return replace(data, train_labels=labels)


def load_image_data(config: DataConfig, seed: int = 0) -> ImageData:
    """Load a data set by name, or from local files. The result is the same in every process.

    The classes are the declared ones, else the sorted distinct labels of the whole training split. Only images that
    are used are decoded and counted in mean and std.

    Args:
        config: what to load.
        seed: seed of the held-out part and of the limited images, if `draw_by_seed`; keep it the same in runs to
            compare.

    Raises:
        ValueError: data that cannot be used: no evaluation split, unclear columns, missing or unseen labels, broken
            images, differing sizes.
        RuntimeError: the Hub cannot be reached.
        FileNotFoundError: `path` does not exist.

    >>> digits = load_image_data(DataConfig(name="digits"))
    >>> digits.train_images.shape, digits.test_images.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    draw = config.draw_by_seed
    seed = seed if draw else 0
    fraction = config.test_fraction
    if config.path is None and config.name is not None and config.name.lower() == "digits":
        for key in ("image_column", "label_column", "test_split"):
            if getattr(config, key) is not None:
                raise ValueError(
                    f"{key} is for data with columns and splits, which the digits do not have; got "
                    f"{getattr(config, key)!r}. Leave it out; test_fraction sets how much is held out."
                )
        train, test = hold_out(_digits(), DIGITS_TEST_FRACTION if fraction is None else fraction, seed)
        source = f"digits of scikit-learn{f' (split of seed {seed})' if seed else ''}"
    else:
        splits, source = open_splits(config.name, config.path)
        train_split, test_split = choose_splits(splits, config.test_split, fraction)
        features = splits[train_split].features
        columns = find_image_column(features, config.image_column), find_label_column(features, config.label_column)
        train = _read_split(splits[train_split], train_split, columns)
        if test_split is None:
            assert fraction is not None
            train, test = hold_out(train, fraction, seed)
            source += f", {fraction:g} of '{train_split}' held out (seed {seed})"
        else:
            test = _read_split(splits[test_split], test_split, columns, train.classes if train.has_names else None)
            source += f", evaluated on '{test_split}'"
    unseen = sorted(set(test.labels) - set(train.labels), key=str)
    if unseen:
        count = sum(label in unseen for label in test.labels)
        raise ValueError(
            f"Every class of the test split must occur in training; {count} test rows have other classes: "
            f"{unseen[:5]}. Remove these rows, or add training images of these classes."
        )
    train = limited(train, config.train_limit, (seed, 0) if draw else None)
    test = limited(test, config.test_limit, (seed, 1) if draw else None)
    validation, set_aside = test.rows([]), config.validation_limit
    if set_aside is not None:
        total = len(test.labels)
        if set_aside >= total:
            raise ValueError(
                f"data.validation_limit must be below the {total} images of the test split; got {set_aside}. Lower it."
            )
        test, validation = hold_out(test, set_aside / total, seed)
    return _decoded(train, test, validation, source, config)


def limited(images: LabeledImages, limit: int | None, seed: tuple[int, ...] | None = None) -> LabeledImages:
    """Keep at most `limit` rows in their order: the first ones or, with a seed, a uniform draw without replacement."""
    if limit is None or limit >= len(images.labels):
        return images
    if seed is None:
        return images.rows(range(limit))
    # numpy's SeedSequence keeps these streams independent of those of the split and of label noise.
    generator = numpy.random.default_rng(seed)
    return images.rows(sorted(generator.permutation(len(images.labels))[:limit].tolist()))


def with_label_noise(labels: Tensor, num_classes: int, fraction: float, seed: int) -> Tensor:
    """Replace round(fraction * N) of the labels (N,) by random classes; a label may keep its class.

    Returns a copy, which depends on the seed alone: give all workers the same seed.

    >>> with_label_noise(torch.zeros(4, dtype=torch.int64), num_classes=10, fraction=0.0, seed=0)
    tensor([0, 0, 0, 0])

    Raises ValueError unless fraction is in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"The fraction of noisy labels must be in [0, 1]; got {fraction}.")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(labels), generator=generator, device="cpu")[: round(fraction * len(labels))]
    noisy = labels.clone()
    noisy[rows] = torch.randint(num_classes, (len(rows),), generator=generator, device="cpu")
    return noisy


class ImageTensors(TorchDataset[dict[str, Tensor]]):
    """Images (N, C, H, W) and labels (N,) as a map-style data set of {"images", "labels"}.

    A DataLoader reads a whole batch by `__getitems__`, in one copy instead of one per image, so nothing is collated:

    >>> data = ImageTensors(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10))
    >>> batch = next(iter(torch.utils.data.DataLoader(data, batch_size=4, collate_fn=dict)))
    >>> batch["images"].shape, batch["labels"]
    (torch.Size([4, 1, 8, 8]), tensor([0, 1, 2, 3]))
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, device="cpu")
        return {"images": self.images.index_select(0, rows), "labels": self.labels.index_select(0, rows)}


def hold_out(whole: LabeledImages, fraction: float, seed: int) -> tuple[LabeledImages, LabeledImages]:
    """Split into two disjoint parts; the second has round(fraction * N) rows, spread evenly over the classes.

    Raises ValueError if a part would be empty.
    """
    total = len(whole.labels)
    size = round(fraction * total)
    if not 0 < size < total:
        raise ValueError(f"Both parts of a split need rows; test_fraction={fraction} takes {size} of {total}.")
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    # Evenly spaced picks from the rows sorted by class take each class's share, to within one row.
    by_class = sorted(shuffled, key=lambda row: whole.labels[row])
    held_out = {by_class[(2 * pick + 1) * total // (2 * size)] for pick in range(size)}
    kept = [row for row in range(total) if row not in held_out]
    return whole.rows(kept), whole.rows(sorted(held_out))


def pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of all pixels of uint8 images (N, C, H, W) per channel, scaled to [0, 1].

    >>> mean, std = pixel_statistics(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    >>> mean.item(), std.item()
    (0.5, 0.5)
    """
    # Counting the 256 values is exact for any number of pixels.
    counts = [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
    weights = torch.stack(counts).double() / (images.numel() / images.shape[1])
    values = torch.arange(256, dtype=torch.float64, device="cpu") / 255
    mean = weights @ values
    std = (weights * (values - mean[:, None]) ** 2).sum(1).sqrt()
    constant = weights.max(dim=1).values == 1
    return mean.float(), torch.where(constant, 1.0, std).float()


def _digits() -> LabeledImages:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Values are 0..16.
    pixels = (digits.images * (255 / 16)).round().astype("uint8")
    images = [Image.fromarray(image) for image in pixels]
    return LabeledImages(list(enumerate(images)), digits.target.tolist(), tuple(range(10)), "digits")


def _read_split(
    dataset: Any,
    split: str,
    columns: tuple[str, str],
    train_names: tuple[str, ...] | None = None,
) -> LabeledImages:
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
    # An integer column indexes the names that the training split declares.
    names: tuple[Any, ...] | None = tuple(feature.names) if hasattr(feature, "names") else train_names
    # Reading the Arrow table keeps images encoded, so that decode_images decodes them.
    table = dataset.with_format("arrow")[:]
    labels: list[Any] = table[label_column].to_pylist()
    unlabeled = [row for row, label in enumerate(labels) if _is_missing(label)]
    if unlabeled:
        raise ValueError(
            f"Every image needs a label; split '{split}' has {len(unlabeled)} of {len(labels)} rows without one "
            f"(first: row {unlabeled[0]}, {labels[unlabeled[0]]!r}). Use another test_split, or remove those rows."
        )
    if names is not None and not isinstance(labels[0], str):
        if max(labels) >= len(names):
            raise ValueError(
                f"Labels must be below the {len(names)} declared classes; split '{split}' has {max(labels)}."
            )
        labels = [names[label] for label in labels]
    classes = tuple(sorted(set(labels))) if names is None else names
    return LabeledImages(list(enumerate(table[image_column].to_pylist())), labels, classes, split, names is not None)


def _is_missing(label: Any) -> bool:
    return label is None or (not label.strip() if isinstance(label, str) else label < 0)


def _decoded(
    train: LabeledImages, test: LabeledImages, validation: LabeledImages, source: str, config: DataConfig
) -> ImageData:
    parts, side = (train, test, validation), config.image_size
    if side is not None:
        rows = sum(len(part.labels) for part in parts)
        what = f"data.image_size: {rows:,} images of {side}x{side} pixels"
        check_memory(what, rows * side**2, "Use a smaller image_size, or train_limit and test_limit.")
    images = stack_splits([decode_images(part.images, part.split, side, config.resampling) for part in parts])
    numbers = {label: number for number, label in enumerate(train.classes)}
    labels = [
        torch.tensor([numbers[label] for label in part.labels], dtype=torch.int64, device="cpu") for part in parts
    ]
    mean, std = pixel_statistics(images[0])
    return ImageData(
        train_images=images[0],
        train_labels=labels[0],
        test_images=images[1],
        test_labels=labels[1],
        validation_images=images[2],
        validation_labels=labels[2],
        class_names=tuple(str(label) for label in train.classes),
        mean=mean,
        std=std,
        source=source,
    )
