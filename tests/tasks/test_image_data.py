"""Loading image data: columns, pixel modes, splits and labels as they are met in the field."""

import io
import os
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from tasks.common.sources import split_of
from tasks.images.config import DataConfig
from tasks.images.data import (
    ImageTensors,
    LabeledImages,
    hold_out,
    limited,
    load_image_data,
    pixel_statistics,
    with_label_noise,
)
from tasks.images.decoding import decode_image
from tasks.images.sources import choose_splits, find_image_column, find_label_column
from tests.selection import real_data


def load(name=None, seed=0, **options):
    return load_image_data(DataConfig(name=name, **options), seed)


def png(value=0, mode="RGB", size=(4, 4)):
    stream = io.BytesIO()
    Image.new(mode, size, value).save(stream, "PNG")
    return stream.getvalue()


def rows(labels, image="img", label="label", cell=None, mode="RGB", **others):
    """One 4x4 image per label, whose pixels tell its row."""
    colors = [(row, row, row) if mode == "RGB" else row for row in range(len(labels))]
    encoded = [png(color, mode) for color in colors]
    return {image: [cell(data) if cell else {"bytes": data, "path": None} for data in encoded], label: labels, **others}


def write(folder, file="train", features=None, **columns):
    folder.mkdir(parents=True, exist_ok=True)
    if features is None:
        pd.DataFrame(columns).to_parquet(folder / f"{file}.parquet")
    else:
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{file}.parquet")


def write_both(folder, labels=(0, 1, 0, 1), test_labels=(1, 0), **options):
    write(folder, "train", **rows(list(labels), **options))
    write(folder, "test", **rows(list(test_labels), **options))


def class_label_features(names, image="img", label="label", **others):
    return datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=names), **others})


def write_tree(folder, names, mode="RGB", suffix="png"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (4, 4)).save(folder / f"{name}.{suffix}")


class TestDigits:
    def test_shapes_range_and_strata(self):
        data = load("Digits")
        assert data.train_images.shape == (1437, 1, 8, 8)
        assert data.test_images.shape == (360, 1, 8, 8)
        assert data.train_images.dtype == torch.uint8
        assert data.train_images.max() == 255
        assert data.class_names == tuple("0123456789")
        assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, (8, 8))
        # 1,797 digits, 174 to 183 of each.
        assert (torch.bincount(data.test_labels) - 36).abs().max() <= 1

    def test_split_repeats_and_uses_each_digit_once(self):
        from sklearn.datasets import load_digits

        data, again = load("digits"), load("digits")
        assert torch.equal(data.train_images, again.train_images)
        together = torch.cat([data.train_images, data.test_images]).flatten(1).tolist()
        everything = (load_digits().images.reshape(1797, 64) * 255 / 16).round().astype(int).tolist()
        assert sorted(together) == sorted(everything)

    def test_size_of_the_split_and_of_the_images(self):
        data = load("digits", test_fraction=797 / 1797, image_size=16)
        assert (len(data.train_labels), len(data.test_labels)) == (1000, 797)
        assert data.image_size == (16, 16)

    def test_the_seed_draws_another_split_only_if_asked_for(self):
        of_seed_0 = load("digits").test_images
        assert torch.equal(load("digits", seed=1).test_images, of_seed_0)
        assert not torch.equal(load("digits", seed=1, draw_by_seed=True).test_images, of_seed_0)


class TestRealData:
    @pytest.mark.data
    def test_lossless_cifar_is_decoded_exactly(self):
        path = real_data("cifar10_png")
        data = load(path=path)
        reference = datasets.load_dataset("parquet", data_files=str(path / "train.parquet"), split="train[:20]")
        expected = np.stack([np.asarray(image) for image in reference["img"]]).transpose(0, 3, 1, 2)
        assert data.train_images.shape == (4000, 3, 32, 32)
        assert data.test_images.shape == (1000, 3, 32, 32)
        assert np.array_equal(data.train_images[:20].numpy(), expected)
        assert data.train_labels[:20].tolist() == reference["label"][:]
        assert data.class_names[:2] == ("airplane", "automobile")

    @pytest.mark.data
    @pytest.mark.slow
    def test_std_of_cifar_is_over_all_pixels(self):
        data = load(path=real_data("cifar10"))
        # Published for the lossless images: 0.2470, 0.2435, 0.2616. JPEG coding lowers it by up to .0018 (measured);
        # the mean of per-image values, the error to exclude, is .2023, .1994, .2010.
        torch.testing.assert_close(data.std, torch.tensor([0.2470, 0.2435, 0.2616]), rtol=0, atol=0.003)
        torch.testing.assert_close(data.mean, torch.tensor([0.4914, 0.4822, 0.4465]), rtol=0, atol=0.001)


class TestStatistics:
    def test_against_float64(self):
        images = torch.randint(256, (7, 3, 5, 5), dtype=torch.uint8)
        mean, std = pixel_statistics(images)
        pixels = images.double().div(255).transpose(0, 1).flatten(1)
        torch.testing.assert_close(mean, pixels.mean(1).float())
        torch.testing.assert_close(std, pixels.std(1, correction=0).float())

    def test_constant_channel_does_not_divide_by_zero(self):
        assert pixel_statistics(torch.full((3, 1, 2, 2), 9, dtype=torch.uint8))[1].item() == 1

    def test_only_training_pixels_count(self, tmp_path):
        write(tmp_path, "train", **rows([0, 1]))
        write(tmp_path, "test", img=[png((255, 255, 255))], label=[0])
        assert load(path=tmp_path).mean.tolist() == pytest.approx([0.5 / 255] * 3)


class TestColumns:
    @pytest.mark.parametrize("image", ["img", "image", "pixel_values", "Image", "photo"])
    @pytest.mark.parametrize("label", ["label", "labels", "fine_label", "target", "class", "Label", "digit"])
    def test_usual_names_or_the_only_candidate(self, tmp_path, image, label):
        write_both(tmp_path, image=image, label=label)
        data = load(path=tmp_path)
        assert data.train_labels.tolist() == [0, 1, 0, 1]
        assert data.train_images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "cell", [lambda data: data, lambda data: {"bytes": data}, lambda data: {"bytes": data, "path": "gone.png"}]
    )
    def test_bytes_in_plain_parquet(self, tmp_path, cell):
        write_both(tmp_path, cell=cell)
        assert load(path=tmp_path).train_images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]

    def test_cifar100_gives_its_fine_labels(self, tmp_path):
        names = [f"fine {number}" for number in range(4)]
        features = class_label_features(names, label="fine_label", coarse_label=datasets.ClassLabel(names=["a", "b"]))
        for file in ("train", "test"):
            write(tmp_path, file, features, **rows([3, 2, 1, 0], label="fine_label", coarse_label=[0, 0, 1, 1]))
        assert load(path=tmp_path).class_names == tuple(names)
        coarse = load(path=tmp_path, label_column="coarse_label")
        assert coarse.train_labels.tolist() == [0, 0, 1, 1]

    def test_ambiguous_or_missing_columns_are_listed_with_their_types(self):
        image, number, text = datasets.Image(), datasets.Value("int64"), datasets.Value("string")
        with pytest.raises(
            ValueError, match=r"image_column to one of the columns: left: Image, right: Image, y: int64"
        ):
            find_image_column(datasets.Features(left=image, right=image, y=number))
        with pytest.raises(ValueError, match=r"Set label_column to one of the columns: img: Image, a: int64, b: int64"):
            find_label_column(datasets.Features(img=image, a=number, b=number))
        with pytest.raises(ValueError, match="column of labels; 1 may be one, none by its name"):
            find_label_column(datasets.Features(img=image, caption=text))
        with pytest.raises(ValueError, match="column of labels; 1 may be one"):
            find_label_column(datasets.Features(img=image, id=number))
        with pytest.raises(ValueError, match="image_column='photo' is not one"):
            find_image_column(datasets.Features(img=image), wanted="photo")
        assert find_image_column(datasets.Features(left=image, right=image), wanted="right") == "right"

    def test_an_image_beside_its_mask(self):
        assert find_image_column(datasets.Features(mask=datasets.Image(), image=datasets.Image())) == "image"

    def test_splits_with_different_columns(self, tmp_path):
        write(tmp_path, "train", **rows([0, 1]))
        write(tmp_path, "test", **rows([0, 1], label="target"))
        with pytest.raises(ValueError, match=r"'test' lacks \['label'\]"):
            load(path=tmp_path)


class TestPixels:
    @pytest.mark.parametrize(
        ("mode", "value", "expected"),
        [
            ("1", 1, 255),
            ("L", 77, 77),
            ("LA", (77, 255), 77),
            ("LA", (77, 0), 255),
            ("I;16", 77 * 257, 77),
            ("RGB", (1, 2, 3), [1, 2, 3]),
            ("RGBA", (1, 2, 3, 255), [1, 2, 3]),
            ("RGBA", (1, 2, 3, 0), [255, 255, 255]),
        ],
    )
    def test_modes(self, mode, value, expected):
        pixels = decode_image(png(value, mode))
        assert pixels.dtype == np.uint8
        assert pixels.shape == ((4, 4) if isinstance(expected, int) else (4, 4, 3))
        assert pixels[2, 1].tolist() == expected

    def test_palette_with_and_without_transparency(self):
        image = Image.new("P", (2, 1))
        image.putpalette([10, 20, 30, 40, 50, 60])
        image.putpixel((1, 0), 1)
        opaque, transparent = io.BytesIO(), io.BytesIO()
        image.save(opaque, "PNG")
        image.save(transparent, "PNG", transparency=1)
        assert decode_image(opaque.getvalue()).tolist() == [[[10, 20, 30], [40, 50, 60]]]
        assert decode_image(transparent.getvalue()).tolist() == [[[10, 20, 30], [255, 255, 255]]]

    def test_cmyk_jpeg(self):
        stream = io.BytesIO()
        Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(stream, "JPEG")
        cyan = decode_image(stream.getvalue())[4, 4]
        assert np.abs(cyan.astype(int) - [0, 255, 255]).max() < 5

    def test_rotated_photograph_stands_upright(self):
        image, exif, stream = Image.new("RGB", (4, 2)), Image.Exif(), io.BytesIO()
        exif[0x0112] = 6
        image.save(stream, "PNG", exif=exif)
        assert decode_image(stream.getvalue()).shape == (4, 2, 3)

    def test_pixels_without_a_known_range(self, tmp_path):
        Image.new("F", (4, 4)).save(tmp_path / "float.tiff")
        with pytest.raises(ValueError, match="'F' has no fixed range"):
            decode_image(tmp_path / "float.tiff")

    def test_grey_stays_one_channel(self, tmp_path):
        write_both(tmp_path, mode="L")
        data = load(path=tmp_path)
        assert data.train_images.shape == (4, 1, 4, 4)
        assert data.mean.shape == (1,)

    def test_one_color_image_makes_all_rgb_in_both_splits(self, tmp_path):
        write(tmp_path, "train", **rows([0, 1], mode="L"))
        write(tmp_path, "test", **rows([0, 1], mode="RGB"))
        data = load(path=tmp_path)
        assert data.train_images.shape == (2, 3, 4, 4)
        assert data.train_images[1, :, 0, 0].tolist() == [1, 1, 1]

    def test_sizes_are_counted_and_image_size_helps(self, tmp_path):
        write(tmp_path, "train", img=[png(), png(), png(size=(6, 5))], label=[0, 1, 1])
        write(tmp_path, "test", img=[png()], label=[0])
        with pytest.raises(ValueError, match=r"4x4: 3, 5x6: 1.*image_size"):
            load(path=tmp_path)
        assert load(path=tmp_path, image_size=7).train_images.shape == (3, 3, 7, 7)

    @pytest.mark.parametrize(
        "broken",
        [b"no image", b"", png((1, 2, 3))[:50], {"bytes": None, "path": None}, {"bytes": None, "path": "gone"}],
    )
    def test_broken_image_is_named_by_split_and_row(self, tmp_path, broken):
        write(tmp_path, "train", **rows([0, 1]))
        good = png() if isinstance(broken, bytes) else {"bytes": png(), "path": None}
        write(tmp_path, "test", img=[good, broken], label=[0, 1])
        with pytest.raises(ValueError, match="row 1 of split 'test' is not"):
            load(path=tmp_path)

    def test_box_resampling_is_the_mean_of_the_pixels_under_a_new_one(self, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        for file in ("train", "test"):
            write(tmp_path, file, img=[stream.getvalue()], label=[0])
        pooled, smooth = (
            load(path=tmp_path, image_size=4, resampling=kind).train_images[0].double() for kind in ("box", "bilinear")
        )
        mean = torch.nn.functional.avg_pool2d(torch.from_numpy(pixels).permute(2, 0, 1).double(), 2)
        assert (pooled - mean).abs().max() <= 0.5  # rounded to whole numbers
        assert (smooth - mean).abs().max() > 5


class TestLimits:
    def loaded(self, folder, **options):
        """Rows of the split that were loaded; the pixels tell them."""
        data = load(path=folder, **options)
        return [images[:, 0, 0, 0].tolist() for images in (data.train_images, data.test_images)]

    def test_the_first_rows(self, tmp_path):
        write_both(tmp_path, [0, 1] * 20, [1, 0] * 10)
        assert self.loaded(tmp_path, train_limit=5, test_limit=3) == [[0, 1, 2, 3, 4], [0, 1, 2]]
        assert self.loaded(tmp_path, train_limit=5, seed=7) == [[0, 1, 2, 3, 4], list(range(20))]
        assert self.loaded(tmp_path, train_limit=41) == [list(range(40)), list(range(20))]

    def test_a_seed_draws_rows_again_and_another_seed_others(self, tmp_path):
        write_both(tmp_path, [0, 1] * 20, [1, 0] * 20)
        limits = {"train_limit": 12, "test_limit": 12, "draw_by_seed": True}
        train, test = self.loaded(tmp_path, **limits, seed=3)
        assert [train, test] == self.loaded(tmp_path, **limits, seed=3)
        assert (len(set(train)), len(set(test))) == (12, 12)
        assert train != test
        assert train != self.loaded(tmp_path, **limits, seed=4)[0]

    def test_every_row_is_drawn_equally_often(self):
        split = LabeledImages([(row, None) for row in range(8)], [0] * 8, (0,), "train")
        drawn = torch.tensor([[row for row, _ in limited(split, 2, (seed,)).images] for seed in range(2000)])
        counts = drawn.flatten().bincount(minlength=8)
        assert (counts - 500).abs().max() < 4 * (2000 * 0.25 * 0.75) ** 0.5

    def test_labels_stay_with_their_images_and_classes_with_the_data(self, tmp_path):
        labels = list(range(40, 0, -1))
        write_both(tmp_path, labels, [1])
        data = load(path=tmp_path, train_limit=6, draw_by_seed=True)
        of_row = [int(data.class_names[label]) for label in data.train_labels]
        assert of_row == [labels[row] for row in data.train_images[:, 0, 0, 0].tolist()]
        assert data.class_names == tuple(str(label) for label in range(1, 41))

    def test_only_used_images_are_decoded_and_counted(self, tmp_path):
        columns = rows([0, 1, 0, 1])
        columns["img"][3] = {"bytes": b"broken", "path": None}
        write(tmp_path, "train", **columns)
        write(tmp_path, "test", **rows([0]))
        data = load(path=tmp_path, train_limit=2)
        assert data.mean.tolist() == pytest.approx([0.5 / 255] * 3)  # pixels 0 and 1
        seed = next(seed for seed in range(9) if 3 in np.random.default_rng((seed, 0)).permutation(4)[:2])
        with pytest.raises(ValueError, match="row 3 of split 'train' is not"):
            load(path=tmp_path, train_limit=2, draw_by_seed=True, seed=seed)


class TestSplits:
    @pytest.mark.parametrize(
        ("available", "chosen"),
        [
            (["train", "test"], "test"),
            (["validation", "test", "train"], "test"),
            (["train", "val"], "val"),
            (["train", "valid", "validation"], "validation"),
        ],
    )
    def test_order_of_preference(self, available, chosen):
        assert choose_splits(available) == ("train", chosen)

    def test_no_split_to_evaluate_on(self, tmp_path):
        write(tmp_path, "train", **rows([0, 1] * 5))
        with pytest.raises(ValueError, match=r"found only 'train'.*test_fraction"):
            load(path=tmp_path)
        with pytest.raises(ValueError, match="found only 'train'"):
            load(path=tmp_path / "train.parquet")
        with pytest.raises(ValueError, match="Training needs a split named 'train'; found 'test'"):
            choose_splits(["test"])

    def test_held_out_part_is_disjoint_and_repeats(self, tmp_path):
        write(tmp_path, "train", **rows([0, 1] * 20))
        data, again = (load(path=tmp_path / "train.parquet", test_fraction=0.25) for _ in range(2))
        train, test = (images[:, 0, 0, 0].tolist() for images in (data.train_images, data.test_images))
        assert sorted(train + test) == list(range(40))
        assert data.test_labels.bincount().tolist() == [5, 5]
        assert torch.equal(data.test_images, again.test_images)
        assert "0.25 of 'train' held out (seed 0)" in data.source

    def test_named_test_split(self, tmp_path):
        write_both(tmp_path)
        write(tmp_path, "validation", **rows([0, 1, 1]))
        assert len(load(path=tmp_path, test_split="validation").test_labels) == 3
        with pytest.raises(ValueError, match="test_split must be a split other than 'train'; got 'dev'"):
            load(path=tmp_path, test_split="dev")
        with pytest.raises(ValueError, match="not both"):
            load(path=tmp_path, test_split="test", test_fraction=0.5)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
    def test_fraction_outside_its_range(self, fraction):
        with pytest.raises(ValueError, match="test_fraction must be in"):
            load("digits", test_fraction=fraction)

    def test_held_out_part_may_not_be_empty(self, tmp_path):
        write(tmp_path, "train", **rows([0, 1]))
        with pytest.raises(ValueError, match="takes 0 of 2"):
            load(path=tmp_path, test_fraction=0.1)

    def test_every_class_keeps_training_rows(self):
        labels = [0] * 90 + [1] * 6 + [2] * 2
        train, _ = hold_out(LabeledImages([(0, None)] * 98, labels, (0, 1, 2), "train"), 0.5, seed=0)
        assert set(train.labels) == {0, 1, 2}

    def test_shards_and_the_layout_of_the_hub(self, tmp_path):
        for shard in range(2):
            write(tmp_path / "plain_text", f"train-{shard:05d}-of-00002", **rows([shard, 1 - shard]))
        write(tmp_path / "plain_text", "test-00000-of-00001", **rows([0]))
        assert load(path=tmp_path).train_labels.tolist() == [0, 1, 1, 0]
        (tmp_path / "plain_text" / "train-00001-of-00002.parquet").unlink()
        with pytest.raises(ValueError, match="one of 2 shards; found 1"):
            load(path=tmp_path)

    def test_a_folder_per_split(self, tmp_path):
        write(tmp_path / "train", "0000", **rows([0, 1]))
        write(tmp_path / "test", "0000", **rows([0]))
        assert len(load(path=str(tmp_path)).test_labels) == 1

    def test_several_data_sets_in_one_folder(self, tmp_path):
        write_both(tmp_path / "first")
        write_both(tmp_path / "second")
        with pytest.raises(ValueError, match=r"several: .*first, .*second"):
            load(path=tmp_path)
        assert load(path=tmp_path / "second").num_classes == 2

    def test_the_name_of_the_folder_itself_says_nothing(self, tmp_path):
        write(tmp_path / "test_run", "data", **rows([0, 1]))
        with pytest.raises(ValueError, match=r"found data\.parquet\. Expected"):
            load(path=tmp_path / "test_run")

    @pytest.mark.parametrize(("name", "split"), [("test_b", "test"), ("trainval", None), ("data", None)])
    def test_names_of_splits(self, name, split):
        assert split_of(name) == split

    def test_nothing_to_load(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"data.path must exist.*train\*.parquet"):
            load(path=tmp_path / "absent")
        (tmp_path / "notes.txt").touch()
        with pytest.raises(ValueError, match=r"found notes\.txt\. Expected train"):
            load(path=tmp_path)
        with pytest.raises(ValueError, match=r"must be \*.parquet"):
            load(path=tmp_path / "notes.txt")
        with pytest.raises(ValueError, match=r"a name .* or a path; got neither"):
            load()

    @pytest.mark.parametrize("in_folders", [False, True])
    def test_what_datasets_saved_is_what_it_was(self, tmp_path, in_folders):
        features = class_label_features(["cat", "dog"])
        labels = {"train": [0, 1, 1, 0], "test": [1, 0]}
        saved = datasets.DatasetDict(
            {name: datasets.Dataset.from_dict(rows(own), features=features) for name, own in labels.items()}
        )
        if in_folders:
            for name, split in saved.items():
                split.save_to_disk(tmp_path / name)
        else:
            saved.save_to_disk(tmp_path)
        data = load(path=tmp_path)
        assert data.class_names == ("cat", "dog")
        assert [data.train_labels.tolist(), data.test_labels.tolist()] == list(labels.values())
        assert data.train_images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
        (tmp_path / "train" / "state.json").write_text("{")
        with pytest.raises(ValueError, match="as `save_to_disk` writes it"):
            load(path=tmp_path)

    def test_a_saved_data_set_without_splits_is_training_data(self, tmp_path):
        datasets.Dataset.from_dict(rows([0, 1] * 4)).save_to_disk(tmp_path)
        assert len(load(path=tmp_path, label_column="label", test_fraction=0.25).train_labels) == 6

    def test_a_folder_of_parts_is_read_once_and_hidden_copies_never(self, tmp_path):
        write(tmp_path / "train.parquet", "part-00000-c000", **rows([0, 1]))
        write(tmp_path / ".copies", "train", **rows([0, 1]))
        write(tmp_path, "test", **rows([0]))
        assert load(path=tmp_path).train_labels.tolist() == [0, 1]

    def test_a_whole_split_has_no_other_files_beside_it(self, tmp_path):
        write_both(tmp_path)
        write(tmp_path, "train_small", **rows([0, 1]))
        with pytest.raises(ValueError, match=r"train\.parquet is named like a whole split, but train_small\.parquet"):
            load(path=tmp_path)

    @pytest.mark.parametrize(("numbers", "fits"), [((0, 1, 2), True), ((1, 2, 3), True), ((0, 1, 3), False)])
    def test_shards_are_numbered_without_gaps(self, tmp_path, numbers, fits):
        for number in numbers:
            write(tmp_path, f"train-{number:05d}-of-00003", **rows([0, 1]))
        if fits:
            assert len(load(path=tmp_path, test_fraction=0.5).train_labels) == 3
            return
        with pytest.raises(ValueError, match="without gaps; found train-00000-of-00003"):
            load(path=tmp_path, test_fraction=0.5)

    @pytest.mark.parametrize("other", [rows([0, 1], image="photo"), rows(["0", "1"])])
    def test_shards_have_the_same_columns(self, tmp_path, other):
        write(tmp_path, "train-0", **rows([0, 1]))
        write(tmp_path, "train-1", **other)
        with pytest.raises(ValueError, match=r"same columns; .*train-1\.parquet has .*, train-0\.parquet has "):
            load(path=tmp_path, test_fraction=0.5)

    @pytest.mark.parametrize("key", ["image_column", "label_column", "test_split"])
    def test_what_the_digits_have_not_is_refused(self, key):
        with pytest.raises(ValueError, match=f"{key} is for data with columns and splits"):
            load("digits", **{key: "test"})

    def test_unreadable_parquet(self, tmp_path):
        (tmp_path / "train.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1")
        with pytest.raises(ValueError, match=r"train.parquet must be a readable parquet file"):
            load(path=tmp_path)

    def test_empty_split(self, tmp_path):
        features = class_label_features(["a", "b"])
        write(tmp_path, "train", features, **rows([0, 1]))
        write(tmp_path, "test", features, img=[], label=[])
        with pytest.raises(ValueError, match="'test' is empty"):
            load(path=tmp_path)

    @pytest.mark.parametrize("answers", [True, False])
    def test_hub_out_of_reach_is_not_asked_again(self, monkeypatch, answers):
        offline = []

        def ask(self, name, timeout):
            response = SimpleNamespace(request=None, headers={})
            raise HfHubHTTPError("404", response=response) if answers else ConnectionError

        def unreachable(name):
            offline.append((datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE))
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub")

        for module in (datasets.config, huggingface_hub.constants):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        with pytest.raises(RuntimeError, match=r"'uoft-cs/cifar10' could not be loaded.*set data.path"):
            load("cifar10")
        assert offline == [(not answers, not answers)]

    def test_data_of_the_hub_whose_rows_were_selected_keep_their_order(self, monkeypatch):
        features = class_label_features(["cat", "dog"])
        whole = datasets.Dataset.from_dict(rows([0, 1, 1, 0]), features=features)
        hub = datasets.DatasetDict(train=whole.select([3, 1]), test=whole.select([2]))
        monkeypatch.setattr(datasets, "load_dataset", lambda name: hub)
        data = load("someone/pets")
        assert data.train_images[:, 0, 0, 0].tolist() == [3, 1]
        assert data.train_labels.tolist() == [0, 1]
        assert data.source == "someone/pets from the Hugging Face Hub, evaluated on 'test'"


class TestImageFolders:
    def test_classes_are_folders(self, tmp_path):
        write_tree(tmp_path, ["train/cat/1", "train/cat/deep/2", "train/dog/1", "train/ant/1", "test/dog/1"])
        (tmp_path / "train" / "cat" / "notes.txt").touch()
        (tmp_path / "train" / "cat" / "._1.png").touch()
        os.mkfifo(tmp_path / "train" / "cat" / "pipe.png")  # reading it would wait for a writer
        (tmp_path / "train" / "cat" / "folder.png").mkdir()
        for hidden in (".ipynb_checkpoints", "cat/.thumbnails/deep", "__MACOSX", "dog/@eaDir"):  # of other tools
            (tmp_path / "train" / hidden).mkdir(parents=True)
            (tmp_path / "train" / hidden / "1.png").touch()
        data = load(path=tmp_path)
        assert data.class_names == ("ant", "cat", "dog")
        assert data.train_labels.tolist() == [0, 1, 1, 2]
        assert data.test_labels.tolist() == [2]

    def test_suffixes_in_any_case_and_validation_folder(self, tmp_path):
        write_tree(tmp_path, ["train/a/1", "train/b/1", "val/a/1"], suffix="JPG")
        assert load(path=tmp_path).source.endswith("evaluated on 'val'")

    def test_names_that_are_no_text_and_links_to_nothing_are_errors(self, tmp_path):
        write_tree(tmp_path, ["train/a/1", "train/b/1", "test/a/1"])
        link = tmp_path / "train" / "a" / "2.png"
        link.symlink_to(tmp_path / "gone.png")
        with pytest.raises(ValueError, match=r"row 1 of split 'train' is not .*No such file"):
            load(path=tmp_path)
        link.unlink()
        os.rename(os.fsencode(tmp_path / "train" / "b"), os.fsencode(tmp_path / "train") + b"/\xff")
        with pytest.raises(ValueError, match=r"Names of image files and classes must be UTF-8; got .*Rename it"):
            load(path=tmp_path)

    def test_sizes_beyond_the_memory_are_refused_before_they_are_taken(self, tmp_path, monkeypatch):
        write_tree(tmp_path, ["train/a/1", "test/a/1"])
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2 * 4095**2}.get)
        with pytest.raises(ValueError, match=r"data.image_size: 2 images of 4096x4096 pixels need at least 0.0336 GB"):
            load(path=tmp_path, image_size=4096)
        assert load(path=tmp_path, image_size=4095 // 16).image_size == (255, 255)

    def test_images_outside_class_folders(self, tmp_path):
        write_tree(tmp_path, ["train/1", "test/1"])
        with pytest.raises(ValueError, match=r"must be .*/<class>/<image files>; found no image there"):
            load(path=tmp_path)


class TestLabels:
    def test_strings_are_sorted_classes(self, tmp_path):
        write_both(tmp_path, ["dog", "ant", "cat", "ant"], ["cat", "ant"])
        data = load(path=tmp_path)
        assert data.class_names == ("ant", "cat", "dog")
        assert data.train_labels.tolist() == [2, 0, 1, 0]
        assert data.test_labels.tolist() == [1, 0]
        assert data.train_labels.dtype == torch.int64

    def test_categories_of_pandas(self, tmp_path):
        write(tmp_path, "train", **rows(pd.Categorical(["b", "a"])))
        write(tmp_path, "test", **rows(pd.Categorical(["b"])))
        assert load(path=tmp_path).test_labels.tolist() == [1]

    def test_gaps_are_closed_alike_in_both_splits(self, tmp_path):
        write_both(tmp_path, [10, 3, 7, 3], [7, 10])
        data = load(path=tmp_path)
        assert data.class_names == ("3", "7", "10")
        assert data.train_labels.tolist() == [2, 0, 1, 0]
        assert data.test_labels.tolist() == [1, 2]

    def test_declared_classes_count_even_if_none_is_seen(self, tmp_path):
        for file in ("train", "test"):
            write(tmp_path, file, class_label_features(["a", "b", "c"]), **rows([0, 2]))
        data = load(path=tmp_path)
        assert data.num_classes == 3
        assert data.test_labels.tolist() == [0, 2]

    def test_splits_that_number_their_classes_differently(self, tmp_path):
        write(tmp_path, "train", class_label_features(["cat", "dog"]), **rows([0, 1]))
        write(tmp_path, "test", class_label_features(["dog", "cat"]), **rows([0, 0, 1]))
        assert load(path=tmp_path).test_labels.tolist() == [1, 1, 0]

    def test_test_labels_without_their_names(self, tmp_path):
        write(tmp_path, "train", class_label_features(["cat", "dog"]), **rows([0, 1]))
        write(tmp_path, "test", **rows([1, 0]))
        assert load(path=tmp_path).test_labels.tolist() == [1, 0]

    @pytest.mark.parametrize("missing", [-1, -100, None, "", " \t"])
    def test_missing_labels(self, tmp_path, missing):
        known = "a" if isinstance(missing, str) else 0
        write(tmp_path, "train", **rows([known, known]))
        write(tmp_path, "test", **rows(pd.array([known, missing], dtype="string" if known == "a" else "Int64")))
        with pytest.raises(ValueError, match=r"'test' has 1 of 2 rows without one \(first: row 1"):
            load(path=tmp_path)

    @pytest.mark.parametrize(("train", "test"), [([0, 1], [0, 2]), (["a", "b"], ["c", "a"])])
    def test_class_of_the_test_split_that_training_lacks(self, tmp_path, train, test):
        write_both(tmp_path, train, test)
        with pytest.raises(ValueError, match="1 test rows have other classes"):
            load(path=tmp_path)

    def test_number_beyond_the_names(self, tmp_path):
        write(tmp_path, "train", class_label_features(["cat", "dog"]), **rows([0, 1]))
        write(tmp_path, "test", **rows([2]))
        with pytest.raises(ValueError, match="below the 2 declared classes; split 'test' has 2"):
            load(path=tmp_path)


class TestLabelNoise:
    @pytest.mark.parametrize("fraction", [0.0, 0.2, 0.37, 1.0])
    def test_exactly_the_fraction_is_drawn_anew(self, fraction):
        # A label of its own outside the classes shows every redrawn row.
        noisy = with_label_noise(torch.full((1000,), -1), 10, fraction, seed=0)
        redrawn = noisy[noisy >= 0]
        assert len(redrawn) == round(fraction * 1000)
        assert fraction == 0 or set(redrawn.tolist()) == set(range(10))

    def test_uniform_over_all_classes(self):
        counts = with_label_noise(torch.zeros(50_000, dtype=torch.int64), 5, 1.0, seed=0).bincount()
        assert (counts - 10_000).abs().max() < 500

    def test_repeats_and_leaves_its_input_and_the_global_generator(self):
        labels, state = torch.arange(100) % 10, torch.get_rng_state()
        copy = labels.clone()
        first = with_label_noise(labels, 10, 0.5, seed=3)
        assert torch.equal(first, with_label_noise(labels, 10, 0.5, seed=3))
        assert not torch.equal(first, with_label_noise(labels, 10, 0.5, seed=4))
        assert torch.equal(labels, copy)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
    def test_fraction_outside_its_range(self, fraction):
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            with_label_noise(torch.zeros(4, dtype=torch.int64), 2, fraction, seed=0)


class TestImageTensors:
    def data(self):
        return ImageTensors(torch.arange(30, dtype=torch.uint8).view(10, 3, 1, 1), torch.arange(10))

    def test_a_batch_holds_its_items(self):
        data = self.data()
        whole = data.__getitems__([7, 0, 7])
        for key, values in whole.items():
            assert torch.equal(values, torch.stack([data[row][key] for row in (7, 0, 7)]))
        assert whole["images"].dtype == torch.uint8
