"""Wide residual networks for small images (Zagoruyko & Komodakis 2016, arXiv:1605.07146)."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

STEM_CHANNELS = 16


class WideBlock(nn.Module):
    """Pre-activation basic block: BN-ReLU-3x3, BN-ReLU-(dropout)-3x3, plus the shortcut.

    Maps (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride), rounding up.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _conv3x3(out_channels, out_channels, 1)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        # As in the authors' code, a projection reads the activated input; the identity reads the raw one.
        skipped = x if self.shortcut is None else self.shortcut(activated)
        hidden = self.conv1(activated)
        return skipped + self.conv2(self.dropout(F.relu(self.bn2(hidden))))


class WideResNet(nn.Module):
    """WRN-depth-width: a 3x3 stem and three groups of (depth - 4) / 6 blocks at strides 1, 2, 2.

    Maps images (B, in_channels, H, W) of any size to logits (B, num_classes). The groups have 16, 32 and 64 times
    `width` channels. Weights start as in the authors' code: He normal (fan out) convolutions, BatchNorm weights 1, all
    biases 0.

    Raises ValueError unless depth is 6 m + 4 with m >= 1.

    >>> sum(p.numel() for p in WideResNet(16, 1, num_classes=10).parameters())
    175066
    """

    def __init__(self, depth: int, width: int, num_classes: int, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        blocks = blocks_per_group(depth)
        channels = [STEM_CHANNELS * width * factor for factor in (1, 2, 4)]
        self.stem = _conv3x3(in_channels, STEM_CHANNELS, 1)
        self.group1 = _group(blocks, STEM_CHANNELS, channels[0], 1, dropout)
        self.group2 = _group(blocks, channels[0], channels[1], 2, dropout)
        self.group3 = _group(blocks, channels[1], channels[2], 2, dropout)
        self.bn = nn.BatchNorm2d(channels[2])
        self.classifier = nn.Linear(channels[2], num_classes)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        features = self.group3(self.group2(self.group1(self.stem(images))))
        pooled = F.relu(self.bn(features)).mean(dim=(2, 3))
        return self.classifier(pooled)


def blocks_per_group(depth: int) -> int:
    """Number m of blocks in each of the three groups, where depth = 6 m + 4.

    >>> blocks_per_group(28)
    4

    Raises ValueError, naming the nearest valid depths, for any other depth.
    """
    if depth >= 10 and (depth - 4) % 6 == 0:
        return (depth - 4) // 6
    below = (depth - 4) // 6 * 6 + 4
    nearest = " or ".join(str(valid) for valid in (below, below + 6) if valid >= 10) or "10"
    raise ValueError(f"The depth of a wide ResNet must be 6 m + 4 (10, 16, 22, 28, ...); got {depth}. Use {nearest}.")


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)


def _group(blocks: int, in_channels: int, out_channels: int, stride: int, dropout: float) -> nn.Sequential:
    first = WideBlock(in_channels, out_channels, stride, dropout)
    rest = [WideBlock(out_channels, out_channels, 1, dropout) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        # Uniform within 1 / sqrt(fan_in): the default of Lua Torch and PyTorch, which the authors kept.
        bound = 1 / math.sqrt(module.in_features)
        nn.init.uniform_(module.weight, -bound, bound)
        nn.init.zeros_(module.bias)
