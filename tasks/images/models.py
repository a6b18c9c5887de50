"""Image classifiers by name: wide ResNets, and small networks for quick runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from tasks.images.transformer import RowTransformer
from tasks.images.wide_resnet import WideResNet

WIDE_RESNET_NAME = re.compile(r"wrn-?(\d+)-(\d+)")
POOLED_CNN_NAME = re.compile(r"cnn((?:-\d+)+)")
TRANSFORMER_NAME = re.compile(r"transformer(?:-(\d+)-(\d+))?")
KNOWN_NAMES = (
    "'wrn-<depth>-<width>' (as 'wrn-28-10'), 'transformer-<layers>-<width>' (as 'transformer-2-32', or 'transformer'), "
    "'cnn-<channels>-...' (as 'cnn-16-32-64'), 'cnn' and 'mlp'"
)


def build_image_model(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    image_size: tuple[int, int] | None = None,
    dropout: float = 0.0,
) -> nn.Module:
    """Build a classifier from images (B, in_channels, H, W) to logits (B, num_classes).

    Names, in upper or lower case:

    wrn-<depth>-<width>             wide ResNet, such as "wrn-28-10"
    transformer-<layers>-<width>    Transformer over the rows of the image, 4 heads; "transformer" is transformer-2-32
    cnn-<channels>-<channels>-...   small convolutional network with max-pooling, such as "cnn-16-32-64"
    cnn                             small convolutional network with strides
    mlp                             two hidden layers of 64

    Args:
        name: the architecture.
        num_classes: number of classes.
        in_channels: channels of the images.
        image_size: (height, width) of the images; MLPs and Transformers need it.
        dropout: dropout rate of wide ResNets and Transformers; the other models have none.

    Raises ValueError for an unknown name, impossible sizes, images without a size or too small for the model, and
    dropout where the model has none.

    >>> sum(p.numel() for p in build_image_model("WRN-16-1", num_classes=10).parameters())
    175066
    """
    key = name.strip().lower().replace("_", "-")
    if match := WIDE_RESNET_NAME.fullmatch(key):
        depth, width = (int(number) for number in match.groups())
        return WideResNet(depth, width, num_classes, in_channels, dropout)
    transformer, pooled_cnn = TRANSFORMER_NAME.fullmatch(key), POOLED_CNN_NAME.fullmatch(key)
    if not (transformer or pooled_cnn or key in ("mlp", "cnn")):
        raise ValueError(f"Unknown model {name!r}; there are {KNOWN_NAMES}.")
    if dropout and not transformer:
        raise ValueError(
            f"Model {name!r} has no dropout; got dropout={dropout}. Set it to 0 or use a wide ResNet or a Transformer."
        )
    if key == "cnn":
        return SmallCNN(num_classes, in_channels)
    if pooled_cnn:
        channels = [int(number) for number in pooled_cnn[1].split("-")[1:]]
        smallest = 2 ** (len(channels) - 1)
        if image_size is not None and min(image_size) < smallest:
            raise ValueError(
                f"Model {name!r} halves its images {len(channels) - 1} times, so they need at least {smallest} pixels "
                f"a side; got {image_size[0]}x{image_size[1]}. Use fewer layers, or set image_size."
            )
        return PooledCNN(channels, num_classes, in_channels)
    if image_size is None:
        raise ValueError(f"Model {name!r} needs image_size=(height, width) to know the width of its input.")
    if transformer:
        layers, width = int(transformer[1] or 2), int(transformer[2] or 32)
        return RowTransformer(layers, width, num_classes, in_channels, image_size, dropout)
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

    Raises ValueError for a layer without channels.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, in_channels: int = 3) -> None:
        if min(channels) < 1:
            raise ValueError(
                f"Every layer of a CNN needs at least 1 channel; got {list(channels)}. Use cnn-16-32-64, for example."
            )
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
