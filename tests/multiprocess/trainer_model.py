"""A tiny model, data and training arguments for the Hugging Face Trainer, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Inputs (6,) and targets (2,), from a seed."""

    def __init__(self, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randn(length, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": self.x[row], "labels": self.y[row], "row": row}


class Model(nn.Module):
    """Two layers, with the mean loss over the batch. Records the rows that it was trained on."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(6, 8)
            self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
            self.dropout = nn.Dropout(dropout)
            self.second = nn.Linear(8, 2)
        self.double()
        self.rows: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, row: torch.Tensor | None = None) -> dict[str, Any]:
        if self.training and row is not None:
            self.rows.append(row.tolist())
        logits = self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    """Return quiet training arguments for the CPU."""
    settings = {
        "use_cpu": True, "per_device_train_batch_size": 3, "max_steps": 12, "learning_rate": 0.1, "report_to": [],
        "save_strategy": "no", "logging_strategy": "no", "lr_scheduler_type": "linear", "disable_tqdm": True,
        "max_grad_norm": 0.0, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(folder, **{**settings, **changes})
