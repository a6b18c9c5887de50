"""Measures the memory of each worker over thousands of small steps with random delays, saves and evaluations.

python -m tests.soak.steady --steps 6000 --workers 2
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.checkpoint import prune_checkpoints
from tests.workers import run_workers

SAVE_EVERY, EVALUATE_EVERY = 20, 100
_MB = 2**20


def resident() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / _MB


def train_long(rank: int, folder: Path, steps: int) -> list[float]:
    """Resident memory in MB at 40 evenly spaced steps of the run."""
    accelerator = GossipAccelerator(gossip=GossipConfig(log_every=50, timeout=60))
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rows = torch.randn(512, 32)
    loader = DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), 16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    dice = random.Random(rank)
    saved: Path | None = None
    measured: list[float] = []
    step = 0
    while step < steps:
        for inputs, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if dice.random() < 0.02:
                time.sleep(dice.uniform(0, 0.02))
            if step % SAVE_EVERY == 0:
                accelerator.finish_saving()
                if saved is not None and rank == 0:
                    prune_checkpoints(folder, 2, saved=saved)
                saved = accelerator.save_state(folder / f"step-{step:08d}", wait=False)
            if step % EVALUATE_EVERY == 0:
                with accelerator.deployed_model(model, calibrate=loader) as deployed, torch.no_grad():
                    deployed(rows)
            if step % (steps // 40) == 0:
                gc.collect()
                measured.append(resident())
    accelerator.finish_saving()
    return measured


def main() -> None:
    """Train, and print the memory of each worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_workers(train_long, options.workers, Path(folder), options.steps, timeout=3600)
    for rank, measured in enumerate(found):
        print(f"worker {rank}: MB over {options.steps} steps: {' '.join(f'{held:.1f}' for held in measured)}")


if __name__ == "__main__":
    main()
