"""Augmentation against one image at a time, and normalization against its formula."""

import pytest
import torch
from torch.utils.data import DataLoader

from tasks.images.augment import CropAndFlip, ModelInputs, normalize
from tasks.images.data import ImageTensors

FORMATS = [torch.contiguous_format, torch.channels_last]


def crop_one(image, padding, top, left, flipped):
    """Pad with zeros, cut at (top, left), mirror: one image (C, H, W), one pixel at a time in mind."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    cut = padded[:, top : top + height, left : left + width]
    return cut.flip(2) if flipped else cut


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("shape", [(64, 3, 8, 8), (64, 1, 5, 7), (1, 3, 8, 8), (0, 3, 8, 8)])
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("flip", [True, False])
def test_equals_one_image_at_a_time(shape, padding, flip, memory_format):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8).contiguous(memory_format=memory_format)
    augment = CropAndFlip(padding, flip)
    torch.manual_seed(0)
    draws = augment.draw(len(images), images.device)
    expected = [crop_one(image, padding, *draw) for image, *draw in zip(images, *draws, strict=True)]
    torch.manual_seed(0)
    augmented = augment(images)
    assert augmented.shape == images.shape
    if expected:
        assert torch.equal(augmented, torch.stack(expected))


def test_every_offset_and_both_directions_are_drawn_evenly():
    top, left, flipped = CropAndFlip(padding=4, generator=torch.Generator().manual_seed(0)).draw(
        90_000, torch.device("cpu")
    )
    for offsets in (top, left):
        # 10,000 expected each; 5 standard deviations are about 470.
        assert (torch.bincount(offsets, minlength=9) - 10_000).abs().max() < 500
    assert abs(flipped.float().mean().item() - 0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([top, left, flipped]).float())[0, 1:]).max() < 0.02


def test_without_padding_and_flip_nothing_changes():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(CropAndFlip(padding=0, flip=False)(images), images)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_layout_is_kept(memory_format):
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8).contiguous(memory_format=memory_format)
    augmented = CropAndFlip()(images)
    normal = normalize(augmented, torch.full((3,), 0.5), torch.full((3,), 0.2))
    assert normal.is_contiguous(memory_format=memory_format)
    assert augmented.is_contiguous(memory_format=memory_format)
    assert augmented.dtype == torch.uint8


def test_seeds_repeat_and_workers_differ():
    images = torch.randint(256, (32, 3, 8, 8), dtype=torch.uint8)

    def augmented(seed):
        torch.manual_seed(seed)
        return CropAndFlip()(images)

    assert torch.equal(augmented(0), augmented(0))
    assert not torch.equal(augmented(0), augmented(1))


def test_an_own_generator_leaves_the_global_one_alone():
    images, before = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8), torch.get_rng_state()
    first = CropAndFlip(generator=torch.Generator().manual_seed(0))(images)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, CropAndFlip(generator=torch.Generator().manual_seed(0))(images))


def test_training_batches_vary_while_evaluation_batches_do_not():
    """Augmentation is no part of the data set, so the two splits cannot share it."""
    data = ImageTensors(torch.randint(256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16))
    mean, std = torch.full((3,), 0.5), torch.full((3,), 0.2)

    inputs = ModelInputs(mean, std, torch.device("cpu"), CropAndFlip())

    def fetch():
        (batch,) = DataLoader(data, batch_size=16, collate_fn=dict)
        return batch["images"]

    assert torch.equal(inputs.plain(fetch()), inputs.plain(fetch()))
    assert not torch.equal(inputs.augmented(fetch()), inputs.augmented(fetch()))


def test_normalize_follows_its_formula_and_leaves_the_input():
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    copy, mean, std = images.clone(), torch.tensor([0.49, 0.48, 0.44]), torch.tensor([0.247, 0.2435, 0.2616])
    expected = (images.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    torch.testing.assert_close(normalize(images, mean, std).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(images, copy)


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="must be uint8"):
        normalize(torch.zeros(1, 3, 4, 4), torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"got torch\.float32 .* Call it before normalize"):
        CropAndFlip()(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match="uint8 batch"):
        CropAndFlip()(torch.zeros(3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="padding must be >= 0; got -1"):
        CropAndFlip(padding=-1)


def test_inputs_are_cropped_from_a_black_frame_and_plain_ones_are_not_cropped():
    images = torch.full((64, 1, 4, 4), 100, dtype=torch.uint8)
    mean, std = torch.tensor([0.25]), torch.tensor([0.5])
    inputs = ModelInputs(mean, std, torch.device("cpu"), CropAndFlip(padding=2))
    inside = (100 / 255 - 0.25) / 0.5
    found = inputs.augmented(images).unique()
    torch.testing.assert_close(found, torch.tensor([-0.25 / 0.5, inside]))  # black, as normalized
    torch.testing.assert_close(inputs.plain(images).unique(), torch.tensor([inside]))
    assert (
        ModelInputs(mean, std, torch.device("cpu"), channels_last=True)
        .plain(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
        .is_contiguous(memory_format=torch.channels_last)
    )
