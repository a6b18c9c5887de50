"""Normalization and random augmentation of whole batches, on the device that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Compute (images / 255 - mean) / std per channel, in float32.

    Args:
        images: uint8, (B, C, H, W). The result keeps their device and memory format.
        mean: per channel (C,), for pixels in [0, 1].
        std: per channel (C,), likewise.

    >>> images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    >>> normalize(images, torch.tensor([0.5]), torch.tensor([0.25])).flatten().tolist()
    [-2.0, 2.0]

    Raises ValueError for images that are not uint8, which may be scaled already.
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"Images to normalize must be uint8, in 0..255; got {images.dtype}.")
    # Scaling mean and std to 0..255 instead of the images saves one pass over them.
    mean_C11 = (255 * mean.float()).view(-1, 1, 1).to(images.device)
    std_C11 = (255 * std.float()).view(-1, 1, 1).to(images.device)
    return images.float().sub_(mean_C11).div_(std_C11)


@dataclass(frozen=True)
class CropAndFlip:
    """Random crop of the zero-padded image and random horizontal flip, for a whole batch at once.

    Maps a uint8 batch (B, C, H, W) to one of the same shape, device and memory format (contiguous or channels_last).
    Each image draws its own offset and flip.

    Apply it before `normalize`: the padding is then black, as with RandomCrop of torchvision and in the code of
    arXiv:2602.02899.

    Raises ValueError for a negative padding, a batch without four dimensions, and images that are not uint8.
    """

    padding: int = 4
    """Pixels added on each side, so offsets are uniform in 0..2 * padding; 0 disables the crop."""

    flip: bool = True
    """Mirror each image with probability 0.5. Disable it where mirroring changes the class, as for digits."""

    generator: torch.Generator | None = None
    """Random generator on the images' device; None takes the device's global one, which workers seed differently."""

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must be >= 0; got {self.padding}.")

    def __call__(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.dtype != torch.uint8:
            raise ValueError(
                f"CropAndFlip needs a uint8 batch (B, C, H, W); got {images.dtype} of shape {tuple(images.shape)}. "
                "Call it before normalize."
            )
        top_B, left_B, flipped_B = self.draw(len(images), images.device)
        height, width = images.shape[2:]
        rows_BH = top_B[:, None] + torch.arange(height, device=images.device)
        columns_W = torch.arange(width, device=images.device)
        columns_BW = left_B[:, None] + torch.where(flipped_B[:, None], width - 1 - columns_W, columns_W)
        padded_BHWC = F.pad(images, [self.padding] * 4).permute(0, 2, 3, 1)
        images_B = torch.arange(len(images), device=images.device)[:, None, None]
        # With channels last, one index fetches all channels of a pixel.
        pixels_BHWC = padded_BHWC[images_B, rows_BH[:, :, None], columns_BW[:, None, :]]
        return torch.empty_like(images).copy_(pixels_BHWC.permute(0, 3, 1, 2))

    def draw(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets from the top and the left of the padded image, and which images to flip; each of shape (B,)."""
        offsets = torch.randint(2 * self.padding + 1, (2, batch_size), device=device, generator=self.generator)
        if not self.flip:
            return offsets[0], offsets[1], torch.zeros(batch_size, dtype=torch.bool, device=device)
        flipped = torch.rand(batch_size, device=device, generator=self.generator) < 0.5
        return offsets[0], offsets[1], flipped


@dataclass(frozen=True)
class ModelInputs:
    """Turns uint8 images (B, C, H, W) into inputs of a model: on its device, augmented in training, normalized."""

    mean: Tensor
    std: Tensor
    """Per channel (C,), for pixels in [0, 1]."""
    device: torch.device
    augment: CropAndFlip | None = None
    channels_last: bool = False

    def plain(self, images: Tensor) -> Tensor:
        """Inputs for evaluation."""
        return normalize(self._placed(images), self.mean, self.std)

    def augmented(self, images: Tensor) -> Tensor:
        """Inputs for training, cropped and flipped at random."""
        placed = self._placed(images)
        return normalize(placed if self.augment is None else self.augment(placed), self.mean, self.std)

    def _placed(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images
