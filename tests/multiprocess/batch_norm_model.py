"""A small model with BatchNorm and dropout, its data in any batch form, and an accelerator for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

from dsgdac_accel import GossipAccelerator, GossipConfig


def make_accelerator(**options) -> GossipAccelerator:
    return GossipAccelerator(gossip=GossipConfig(timeout=20, power=2, log_every=0), **options)


class Vectors(Dataset):
    """Random but fixed vectors in a given batch form."""

    def __init__(self, length: int, form: str = "tensor"):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, 3, generator=generator) * torch.tensor([1.0, 5.0, 0.1]) + 2
        self.form = form

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        x, y = self.x[index], index % 2
        return {"tensor": x, "tuple": (x, y), "list": [x, y], "dict": {"pixel_values": x, "labels": y}}[self.form]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(3, 2)

    def forward(self, pixel_values):
        return self.linear(self.drop(self.norm(pixel_values)))


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
