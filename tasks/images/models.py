"""Image classifiers by name: wide ResNets, and small networks for quick runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from dsgdac_accel.checks import check_integer
from tasks.common.limits import check_parameters
from tasks.images.transformer import RowTransformer, check_heads
from tasks.images.wide_resnet import WideResNet, blocks_per_group

MODELS = {
    "wrn-<depth>-<width>": r"wrn-?(\d+)-(\d+)",
    "transformer-<layers>-<width>": r"transformer(?:-(\d+)-(\d+))?",
    "cnn-<channels>-...": r"cnn((?:-\d+)+)",
    "cnn": r"cnn",
    "mlp": r"mlp",
}
"""Every kind of model, and the pattern of its names.

wrn-<depth>-<width>             wide ResNet, such as wrn-28-10
transformer-<layers>-<width>    Transformer over the rows of the image, 4 heads; "transformer" is transformer-2-32
cnn-<channels>-<channels>-...   small convolutional network with max-pooling, such as cnn-16-32-64
cnn                             small convolutional network with strides
mlp                             two hidden layers of 64
"""

_DEEPEST = 1000
_LARGEST_SIZE = 10_000  # of a width or a number of channels


def parse_model_name(name: str, dropout: float = 0.0) -> tuple[str, list[int]]:
    """Return the kind of a model, a key of `MODELS`, and the sizes in its name. Builds nothing.

    Raises ValueError for an unknown name, sizes that cannot be meant, and dropout where the model has none.

    >>> parse_model_name("WRN-28-10")
    ('wrn-<depth>-<width>', [28, 10])
    """
    key = name.strip().lower().replace("_", "-")
    kind = next((kind for kind, pattern in MODELS.items() if re.fullmatch(pattern, key)), None)
    if kind is None:
        raise ValueError(f"model must be one of {', '.join(MODELS)}; got {name!r}. Use wrn-16-8, say.")
    if dropout and not kind.startswith(("wrn", "transformer")):
        raise ValueError(
            f"dropout must be 0 for model {name!r}, which has none; got {dropout}. Use a wide ResNet or a Transformer."
        )
    sizes = [int(digits) for digits in re.findall(r"\d+", key)]
    if kind.startswith("transformer"):
        sizes = sizes or [2, 32]
    for number, size in enumerate(sizes):
        depth = number == 0 and not kind.startswith("cnn")
        what = f"the {'depth' if depth else 'width'} of model {name!r}"
        check_integer(what, size, minimum=1, maximum=_DEEPEST if depth else _LARGEST_SIZE)
    # Weights without biases, norms and classifier.
    parameters = 0
    if kind.startswith("wrn"):
        blocks, widths = blocks_per_group(sizes[0]), [16, *(group * sizes[1] for group in (16, 32, 64))]
        parameters = sum(9 * into * out + 9 * (2 * blocks - 1) * out**2 for into, out in pairwise(widths))
    elif kind.startswith("transformer"):
        check_heads(sizes[1])
        parameters = sizes[0] * 8 * sizes[1] ** 2
    elif sizes:
        parameters = sum(9 * into * out for into, out in pairwise([3, *sizes]))
    check_parameters("model", name, parameters)
    return kind, sizes


def build_image_model(
    name: str, num_classes: int, in_channels: int = 3, image_size: tuple[int, int] | None = None, dropout: float = 0.0
) -> nn.Module:
    """Build a classifier from images (B, in_channels, H, W) to logits (B, num_classes).

    Args:
        name: the architecture, one of `MODELS`, in upper or lower case.
        num_classes: number of classes.
        in_channels: channels of the images.
        image_size: (height, width) of the images; MLPs and Transformers need it.
        dropout: dropout rate of wide ResNets and Transformers; the other models have none.

    Raises what `parse_model_name` raises, and ValueError for images without a size or too small for the model.

    >>> sum(p.numel() for p in build_image_model("WRN-16-1", num_classes=10).parameters())
    175066
    """
    kind, sizes = parse_model_name(name, dropout)
    if kind.startswith("wrn"):
        return WideResNet(sizes[0], sizes[1], num_classes, in_channels, dropout)
    if kind == "cnn":
        return SmallCNN(num_classes, in_channels)
    if kind.startswith("cnn"):
        smallest = 2 ** (len(sizes) - 1)
        if image_size is not None and min(image_size) < smallest:
            raise ValueError(
                f"Model {name!r} halves its images {len(sizes) - 1} times, so they need at least {smallest} pixels a "
                f"side; got {image_size[0]}x{image_size[1]}. Use fewer layers, or set image_size."
            )
        return PooledCNN(sizes, num_classes, in_channels)
    if image_size is None:
        raise ValueError(f"Model {name!r} needs image_size=(height, width) to know the width of its input.")
    if kind.startswith("transformer"):
        return RowTransformer(sizes[0], sizes[1], num_classes, in_channels, image_size, dropout)
    return MLP(in_channels * image_size[0] * image_size[1], num_classes)


class MLP(nn.Sequential):
    """Flatten, then Linear-BatchNorm-ReLU for each hidden size, then a linear classifier.

    Maps (B, ...) with `in_features` values per image to logits (B, num_classes). On 8x8 digits the default is
    64-64-64-10. Hidden layers have no bias, since BatchNorm would subtract it. Weights start He normal (fan in),
    biases at 0.
    """

    def __init__(self, in_features: int, num_classes: int, hidden_sizes: Sequence[int] = (64, 64)) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for wide_in, wide_out in pairwise([in_features, *hidden_sizes]):
            layers += [nn.Linear(wide_in, wide_out, bias=False), nn.BatchNorm1d(wide_out), nn.ReLU()]
        layers.append(nn.Linear([in_features, *hidden_sizes][-1], num_classes))
        super().__init__(*layers)
        self.in_features = in_features
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        values = images[0].numel() if len(images) else self.in_features
        if values != self.in_features:
            shape = tuple(images.shape[1:])
            raise ValueError(
                f"This MLP reads {self.in_features} values per image; got {values}, shape {shape}. "
                "Build it with the in_channels and image_size of the data."
            )
        return super().forward(images)


class SmallCNN(nn.Sequential):
    """Three 3x3 Conv-BatchNorm-ReLU layers at strides 1, 2, 2 (32, 64, 128 channels), global pooling, linear.

    Maps (B, in_channels, H, W) of any size to logits (B, num_classes) with about 95,000 parameters.
    """

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        layers: list[nn.Module] = []
        for channels_in, channels_out, stride in ((in_channels, 32, 1), (32, 64, 2), (64, 128, 2)):
            layers.append(nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False))
            layers += [nn.BatchNorm2d(channels_out), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))
        self.apply(_initialize)


class PooledCNN(nn.Sequential):
    """3x3 Conv-BatchNorm-ReLU for each number of channels, max-pooling by 2 between them, global pooling, linear.

    Maps (B, in_channels, H, W) of at least 2^(layers - 1) pixels a side to logits (B, num_classes). Convolutions start
    He normal (fan in); the linear layer, which no ReLU follows, starts with half their variance.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, in_channels: int = 3) -> None:
        layers: list[nn.Module] = []
        for channels_in, channels_out in pairwise([in_channels, *channels]):
            layers += [nn.MaxPool2d(2)] if layers else []
            layers.append(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(channels_out), nn.ReLU()]
        classifier = nn.Linear(channels[-1], num_classes)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)
        self.apply(_initialize)
        nn.init.kaiming_normal_(classifier.weight, nonlinearity="linear")


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
