"""Decodes images of any pixel mode to uint8 tensors with one size and one number of channels."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

Pixels = np.ndarray
"""One decoded image, uint8: (H, W) if gray, (H, W, 3) if color."""

Resampling = Literal["bilinear", "box"]
"""How to resize images: Pillow's bilinear, or box, the mean over the area that each new pixel covers."""


def decode_images(
    cells: Iterable[tuple[int, Any]], split: str, image_size: int | None = None, resampling: Resampling = "bilinear"
) -> list[Pixels]:
    """Decode the cells of an image column.

    Args:
        cells: row number and cell of each image. A cell is the bytes of an image file, a path, a dict {"bytes": ...,
            "path": ...} as `datasets` stores it, or a Pillow image.
        split: name of the split, for error messages.
        image_size: side of the square to resize to; None keeps the size.
        resampling: how to resize.

    Raises ValueError, naming split and row, for the first image that is missing or cannot be decoded.
    """
    decoded = []
    for row, cell in cells:
        try:
            decoded.append(decode_image(cell, image_size, resampling))
        # For a broken file Pillow raises many types of errors, SyntaxError and struct.error among them.
        except Exception as error:
            raise ValueError(
                f"Every image must be readable; row {row} of split '{split}' is not ({error}). "
                "Repair or remove that row."
            ) from error
    return decoded


def decode_image(cell: Any, image_size: int | None = None, resampling: Resampling = "bilinear") -> Pixels:
    """Decode one image to 8-bit gray or RGB, with its EXIF orientation applied.

    Modes 1, L, LA and 16-bit gray become gray; palette, RGB, RGBA, CMYK and others become RGB. Transparent pixels are
    composited on white, 16-bit values keep their high byte, and an animation gives its first frame.
    """
    image = _open(cell)
    if image.getexif().get(ExifTags.Base.Orientation) is not None:
        image = ImageOps.exif_transpose(image)
    image = to_grey_or_rgb(image)
    if image_size is not None:
        # With reducing_gap, box shrinks by a whole factor in rows and columns at once: one rounding, not two.
        gap = 1.0 if resampling == "box" else None
        image = image.resize((image_size, image_size), Image.Resampling[resampling.upper()], reducing_gap=gap)
    return np.asarray(image)


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any 8- or 16-bit mode to L or RGB.

    >>> to_grey_or_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)

    Raises ValueError for 32-bit integers and floats, whose range is unknown.
    """
    # Pillow before 11 opens a 16-bit PNG as 32-bit integers, mode I.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel mode '{image.mode}' has no fixed range; save it with 8 or 16 bits per channel")
    gray = image.mode in ("1", "L", "LA", "La")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(opaque, image.convert("RGBA"))
    return image.convert("L" if gray else "RGB")


def stack_splits(splits: Sequence[list[Pixels]]) -> list[Tensor]:
    """Stack each split to uint8 (N, C, H, W); C is 1 if all images of all splits are gray, else 3.

    Raises ValueError, counting the sizes, unless all images have one size.
    """
    sizes = Counter(image.shape[:2] for split in splits for image in split)
    if len(sizes) > 1:
        commonest = ", ".join(f"{height}x{width}: {count}" for (height, width), count in sizes.most_common(5))
        more = f" and {len(sizes) - 5} more sizes" if len(sizes) > 5 else ""
        raise ValueError(
            f"All images must have one size; got (height x width: images) {commonest}{more}. "
            "Set image_size to resize them all to a square."
        )
    ((height, width),) = sizes
    channels = 3 if any(image.ndim == 3 for split in splits for image in split) else 1
    stacked = []
    for split in splits:
        pixels_NHWC = np.empty((len(split), height, width, channels), dtype=np.uint8)
        for row, image in enumerate(split):
            pixels_NHWC[row] = image if image.ndim == 3 else image[..., None]
        stacked.append(torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).contiguous())
    return stacked


def _open(cell: Any) -> Image.Image:
    if isinstance(cell, Image.Image):
        return cell
    if isinstance(cell, dict):
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if not isinstance(cell, bytes | str | Path):
        raise ValueError(f"it is missing: the cell has neither bytes nor a path, but {cell!r}")
    image: Image.Image = Image.open(io.BytesIO(cell) if isinstance(cell, bytes) else cell)
    image.load()  # decodes the image and closes its file
    return image
