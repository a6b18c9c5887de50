"""Image classification data sets, held in memory as uint8 tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from tasks.common.limits import check_memory
from tasks.images.config import CifarConfig
from tasks.images.decoding import Resampling, decode_images, stack_splits
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
    arguments = {field.name: getattr(config.data, field.name) for field in fields(config.data)}
    del arguments["shards"]  # they concern the order of training
    draw = arguments.pop("draw_by_seed")
    data = load_image_data(**arguments, draw=draw, seed=config.seed if draw else 0)
    labels = with_label_noise(data.train_labels, data.num_classes, config.label_noise, config.seed)
    return replace(data, train_labels=labels)


def load_image_data(
    name: str | None = None,
    path: Path | str | None = None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    test_split: str | None = None,
    test_fraction: float | None = None,
    image_size: int | None = None,
    resampling: Resampling = "bilinear",
    train_limit: int | None = None,
    test_limit: int | None = None,
    validation_limit: int | None = None,
    draw: bool = False,
    seed: int = 0,
) -> ImageData:
    """Load a data set by name, or from local files. The result is the same in every process.

    The classes are the declared ones, else the sorted distinct labels of the whole training split. Only images that
    are used are decoded and counted in mean and std.

    Args:
        name: "digits" (scikit-learn's, offline), "cifar10", "cifar100", or a name on the Hub.
        path: local data, used instead of `name`: a folder of train*.parquet and test*.parquet, or of images in
            train/<class>/ and test/<class>/.
        image_column, label_column: columns to read; by default found by type and name (CIFAR-100: fine_label).
        test_split: split to evaluate on; by default "test", else "validation", "valid", "val".
        test_fraction: fraction of the training split to hold out instead, in (0, 1), even over the classes.
        image_size: side of the square to resize all images to; needed if their sizes differ.
        resampling: "bilinear" (Pillow's), or "box", the mean over the area of each new pixel.
        train_limit, test_limit: most images of a split to use: the first ones or, with `draw`, random ones.
        validation_limit: test images to set aside as validation images, even over the classes.
        draw: draw the limited images by `seed`.
        seed: seed of the held-out part and of `draw`; keep it the same in runs to compare.

    Raises:
        ValueError: data that cannot be used: no evaluation split, unclear columns, missing or unseen labels, broken
            images, differing sizes.
        RuntimeError: the Hub cannot be reached.
        FileNotFoundError: `path` does not exist.

    >>> digits = load_image_data("digits")
    >>> digits.train_images.shape, digits.test_images.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be in (0, 1), exclusive; got {test_fraction}.")
    if path is None and name is not None and name.lower() == "digits":
        _refuse_for_digits(image_column=image_column, label_column=label_column, test_split=test_split)
        fraction = DIGITS_TEST_FRACTION if test_fraction is None else test_fraction
        train, test = hold_out(_digits(), fraction, seed)
        source = f"digits of scikit-learn{f' (split of seed {seed})' if seed else ''}"
    else:
        splits, source = open_splits(name, None if path is None else Path(path))
        train_split, chosen_test = choose_splits(splits, test_split, test_fraction)
        features = splits[train_split].features
        columns = find_image_column(features, image_column), find_label_column(features, label_column)
        train = _read_split(splits[train_split], train_split, columns)
        if chosen_test is None:
            assert test_fraction is not None
            train, test = hold_out(train, test_fraction, seed)
            source += f", {test_fraction:g} of '{train_split}' held out (seed {seed})"
        else:
            test = _read_split(splits[chosen_test], chosen_test, columns, train.classes if train.has_names else None)
            source += f", evaluated on '{chosen_test}'"
    _check_seen(train, test)
    train = limited(train, train_limit, (seed, 0) if draw else None)
    test = limited(test, test_limit, (seed, 1) if draw else None)
    test, validation = set_aside(test, validation_limit, seed)
    return _assemble(train, test, validation, source, image_size, resampling)


def limited(images: LabeledImages, limit: int | None, seed: tuple[int, ...] | None = None) -> LabeledImages:
    """Keep at most `limit` rows in their order: the first ones or, with a seed, a uniform draw without replacement."""
    if limit is None or limit >= len(images.labels):
        return images
    if seed is None:
        return images.rows(range(limit))
    # numpy's SeedSequence keeps these streams independent of those of the split and of label noise.
    generator = numpy.random.default_rng(seed)
    return images.rows(sorted(generator.permutation(len(images.labels))[:limit].tolist()))


def set_aside(images: LabeledImages, count: int | None, seed: int) -> tuple[LabeledImages, LabeledImages]:
    """Split off `count` validation images, even over the classes; None splits off none.

    Raises ValueError unless some images are left.
    """
    if count is None:
        return images, images.rows([])
    total = len(images.labels)
    if count >= total:
        raise ValueError(
            f"data.validation_limit must leave test images; it is {count}, and the test split has {total}. Lower it."
        )
    return hold_out(images, count / total, seed)


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

    A DataLoader reads a whole batch by `__getitems__`, in one copy instead of one per image. Pass it `collate`:

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
        rows = torch.as_tensor(indices, device="cpu")
        return {"images": self.images.index_select(0, rows), "labels": self.labels.index_select(0, rows)}


def collate(batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack items of `ImageTensors` to one batch; a batch passes through."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return {key: torch.stack([item[key] for item in batch]) for key in ("images", "labels")}


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


def _refuse_for_digits(**given: str | None) -> None:
    for key, value in given.items():
        if value is not None:
            raise ValueError(
                f"{key} is for data with columns and splits, which the digits do not have; got {value!r}. Leave it "
                "out; test_fraction sets how much is held out."
            )


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
    names = tuple(feature.names) if hasattr(feature, "names") else train_names
    # Reading the Arrow table keeps images encoded, so that decode_images decodes them.
    table = dataset.with_format("arrow")[:]
    labels = _check_labels(table[label_column].to_pylist(), split, names)
    classes = tuple(sorted(set(labels))) if names is None else names
    return LabeledImages(list(enumerate(table[image_column].to_pylist())), labels, classes, split, names is not None)


def _check_labels(labels: list[Any], split: str, names: tuple[str, ...] | None) -> list[Any]:
    """Turn numbers into names where there are names.

    Raises ValueError for missing labels (null, negative, blank) and for numbers beyond the names.
    """
    missing = [row for row, label in enumerate(labels) if _is_missing(label)]
    if missing:
        raise ValueError(
            f"Every image needs a label; split '{split}' has {len(missing)} of {len(labels)} rows without one "
            f"(first: row {missing[0]}, {labels[missing[0]]!r}). Use another split as test_split, or remove those rows."
        )
    if names is None or isinstance(labels[0], str):
        return labels
    if max(labels) >= len(names):
        raise ValueError(f"Labels must be below the {len(names)} declared classes; split '{split}' has {max(labels)}.")
    return [names[label] for label in labels]


def _is_missing(label: Any) -> bool:
    return label is None or (not label.strip() if isinstance(label, str) else label < 0)


def _assemble(
    train: LabeledImages, test: LabeledImages, validation: LabeledImages, source: str, image_size: int | None,
    resampling: Resampling,
) -> ImageData:  # fmt: skip
    numbers = {label: number for number, label in enumerate(train.classes)}
    if image_size is not None:
        rows = len(train.labels) + len(test.labels) + len(validation.labels)
        what = f"data.image_size: {rows:,} images of {image_size}x{image_size} pixels"
        check_memory(what, rows * image_size**2, "Use a smaller image_size, or train_limit and test_limit.")
    train_images, held_out_images = stack_splits(
        [
            decode_images(images, split, image_size, resampling)
            for images, split in (
                (train.images, train.split),
                ([*test.images, *validation.images], test.split),
            )
        ]
    )
    held_out_labels = torch.tensor([numbers[label] for label in (*test.labels, *validation.labels)], device="cpu")
    tests = len(test.labels)
    mean, std = pixel_statistics(train_images)
    return ImageData(
        train_images=train_images,
        train_labels=torch.tensor([numbers[label] for label in train.labels], device="cpu"),
        test_images=held_out_images[:tests],
        test_labels=held_out_labels[:tests],
        validation_images=held_out_images[tests:],
        validation_labels=held_out_labels[tests:],
        class_names=tuple(str(label) for label in train.classes),
        mean=mean,
        std=std,
        source=source,
    )


def _check_seen(train: LabeledImages, test: LabeledImages) -> None:
    unseen = sorted(set(test.labels) - set(train.labels), key=str)
    if unseen:
        count = sum(label in unseen for label in test.labels)
        raise ValueError(
            f"Every class of the test split must occur in training; {count} test rows have other classes: "
            f"{unseen[:5]}. Remove these rows, or add training images of these classes."
        )
