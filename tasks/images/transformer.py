"""A small Transformer whose tokens are the rows of an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 4
"""Attention heads of every layer."""


def check_heads(width: int) -> None:
    """Raise ValueError unless every head has an equal share of the width."""
    if width % HEADS:
        raise ValueError(
            f"The width of a Transformer must be a multiple of its {HEADS} heads; got {width}. Use 32, say."
        )


class TransformerLayer(nn.Module):
    """Pre-LN layer: x + Attention(LN(x)), then x + FeedForward(LN(x)), with GELU and a hidden size of 2 * width.

    Maps (B, T, width) to the same shape. Attention is not masked. Dropout acts on the outputs of both branches.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 2 * width)
        self.feed_forward_out = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout(self._attention(self.attention_norm(x_BTC)))
        hidden = F.gelu(self.feed_forward_in(self.feed_forward_norm(x_BTC)))
        return x_BTC + self.dropout(self.feed_forward_out(hidden))

    def _attention(self, x_BTC: Tensor) -> Tensor:
        heads = self.queries_keys_values(x_BTC).unflatten(-1, (3, HEADS, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, T, C / heads)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return self.attention_out(attended.transpose(1, 2).flatten(2))


class RowTransformer(nn.Module):
    """Classifier whose tokens are the rows of the image, all channels together, with learned positions.

    Maps images (B, in_channels, H, W) to logits (B, num_classes): embedding of the H rows, `layers` pre-LN layers,
    LayerNorm, mean over the tokens, linear. Linear layers start with torch's default, positions normal with standard
    deviation 0.1. `image_size` is (H, W), the only size that the model reads.

    Raises ValueError for a width that is no multiple of the 4 heads and, in the forward pass, images of another size.

    >>> sum(p.numel() for p in RowTransformer(2, 32, num_classes=10, in_channels=1, image_size=(8, 8)).parameters())
    18026
    """

    def __init__(
        self,
        layers: int,
        width: int,
        num_classes: int,
        in_channels: int,
        image_size: tuple[int, int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_heads(width)
        self.image_shape = (in_channels, *image_size)
        self.embedding = nn.Linear(in_channels * image_size[1], width)
        self.positions = nn.Parameter(0.1 * torch.randn(image_size[0], width))
        self.layers = nn.Sequential(*(TransformerLayer(width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"This Transformer reads images of shape {self.image_shape}; got {tuple(images.shape[1:])}. "
                "Build it with the in_channels and image_size of the data."
            )
        rows_BHR = images.transpose(1, 2).flatten(2)  # R = C * W values per row
        hidden = self.layers(self.embedding(rows_BHR) + self.positions)
        return self.classifier(self.norm(hidden).mean(1))
