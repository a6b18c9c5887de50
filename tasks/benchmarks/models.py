"""Models of the benchmarks, with random data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.images.transformer import TransformerLayer

TRANSFORMERS = {"transformer-10m": (384, 8), "transformer-40m": (768, 8)}
"""Width and number of layers."""
TRANSLATION = ("translation-tiny", "translation-small", "translation-base", "translation-big")
"""The Transformers of the translation task by size, with a vocabulary of 32,000."""
VOCABULARY = 1000
_LARGE_VOCABULARY = 32_000
TOKENS = 32
"""Length of a sentence."""
_TINY = re.compile(r"tiny-(\d+)")


@dataclass(frozen=True)
class Workload:
    """A model and a batch."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[[nn.Module], Tensor]
    """Computes the loss of the batch, shape (), by the model or a wrapper of it."""


class TinyLayers(nn.Module):
    """Residual layers x + tanh(linear(norm(x))) / 10 of width 32, with `tensors` parameter tensors in all."""

    WIDTH = 32

    def __init__(self, tensors: int) -> None:
        super().__init__()
        width = self.WIDTH
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(tensors // 4)
        )
        self.rest = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(tensors % 4))

    def forward(self, x_BC: Tensor) -> Tensor:
        """Map (B, 32) to the same shape."""
        for layer in self.layers:
            x_BC = x_BC + 0.1 * torch.tanh(layer(x_BC))
        for shift in self.rest:
            x_BC = x_BC + shift
        return x_BC


class LanguageModel(nn.Module):
    """Embedding, pre-LN layers, LayerNorm, linear: maps tokens (B, T) to logits (B, T, 1000)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, dropout=0.0) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, 1000)."""
        return self.out(self.norm(self.layers(self.embedding(tokens_BT))))


def check_model_name(name: str, image_size: int) -> None:
    """Raise ValueError for a model that does not exist, without allocating one."""
    key = name.strip().lower()
    if key in TRANSFORMERS or key in TRANSLATION:
        return
    if found := _TINY.fullmatch(key):
        if int(found[1]) < 1:
            raise ValueError(f"model must have at least 1 of its tensors; got {name!r}.")
        return
    from tasks.images.models import build_image_model  # slow to import, and most benchmarks do not need it

    try:
        with torch.device("meta"):
            build_image_model(key, 10, 3, (image_size, image_size))
    except ValueError as error:
        own = f"{', '.join([*TRANSFORMERS, *TRANSLATION])}, tiny-<tensors>"
        raise ValueError(f"model must be one of {own} or an image model; got {name!r}. {error}") from None


def build_workload(name: str, *, batch_size: int, image_size: int, device: torch.device, seed: int) -> Workload:
    """Build a model, the same in every call, and draw a batch.

    Args:
        name: name of the model; see `BenchmarkConfig.model`.
        batch_size: samples in the batch.
        image_size: height and width of random images.
        device: where the model and the batch go.
        seed: seed of the batch.

    Raises ValueError for an unknown name.
    """
    key = name.strip().lower()
    torch.manual_seed(0)
    model, draw = _model_and_batch(key, batch_size, image_size)
    model.to(device)
    torch.manual_seed(1 + seed)
    inputs, labels = (tensor.to(device) for tensor in draw())

    def loss(module: nn.Module) -> Tensor:
        logits = module(input_ids=inputs, decoder_input_ids=labels).logits if key in TRANSLATION else module(inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    return Workload(model, (inputs, labels), loss)


def _translator(size: Any) -> nn.Module:
    from tasks.translation.config import ModelConfig
    from tasks.translation.model import build_model

    return build_model(ModelConfig(size=size), _LARGE_VOCABULARY, pad=0, end=1)


def _model_and_batch(key: str, batch: int, size: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    if key in TRANSFORMERS:
        tokens = lambda: torch.randint(VOCABULARY, (batch, TOKENS), device="cpu")  # noqa: E731
        return LanguageModel(*TRANSFORMERS[key]), lambda: (tokens(), tokens())
    if key in TRANSLATION:
        words = lambda: torch.randint(2, _LARGE_VOCABULARY, (batch, TOKENS), device="cpu")  # noqa: E731
        return _translator(key.removeprefix("translation-")), lambda: (words(), words())
    if found := _TINY.fullmatch(key):
        width = TinyLayers.WIDTH
        return TinyLayers(int(found[1])), lambda: (
            torch.randn(batch, width, device="cpu"),
            torch.randint(width, (batch,), device="cpu"),
        )
    from tasks.images.models import build_image_model

    shape = (batch, 3, size, size)
    model = build_image_model(key, 10, 3, (size, size))
    return model, lambda: (torch.randn(shape, device="cpu"), torch.randint(10, (batch,), device="cpu"))
