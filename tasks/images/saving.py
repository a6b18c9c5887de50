"""The deployed image classifier in files: weights, and a card with what is needed to use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from tasks.images.data import ImageData
from tasks.images.models import build_image_model


def save_image_model(model: nn.Module, folder: Path, name: str, dropout: float, data: ImageData) -> None:
    """Write everything that is needed to use the model: weights, architecture, classes and normalization."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    card = {
        "model": name,
        "dropout": dropout,
        "num_classes": data.num_classes,
        "in_channels": data.in_channels,
        "image_size": list(data.image_size),
        "class_names": list(data.class_names),
        "mean": data.mean.tolist(),
        "std": data.std.tolist(),
    }
    (folder / "config.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def load_image_model(folder: Path | str) -> tuple[nn.Module, dict[str, Any]]:
    """Load what `save_image_model` wrote: the model in eval mode, and its card with classes, mean and std."""
    folder = Path(folder)
    card = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = build_image_model(
        card["model"], card["num_classes"], card["in_channels"], tuple(card["image_size"]), card["dropout"]
    )
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), card
