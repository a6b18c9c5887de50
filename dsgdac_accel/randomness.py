"""Random streams: one shared seed, streams that differ per worker, and putting streams back."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy
import torch

from dsgdac_accel.group import WorkerGroup


def shared_seed(group: WorkerGroup) -> int:
    """Worker 0's seed, the same on all workers. Collective."""
    return group.gather(torch.initial_seed(), "agreeing on a seed")[0]


def seed_workers_differently(group: WorkerGroup, *salt: int) -> None:
    """Give every worker random streams (torch, NumPy, Python) of its own, derived from worker 0's seed and `salt`.

    Repeats when the run is repeated with the same seed. Samplers keep the order that all workers share, see `loaders`.
    """
    words = numpy.random.SeedSequence([shared_seed(group), group.rank, *salt]).generate_state(4)
    random.seed(int(words[0]))
    numpy.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))


def random_state() -> dict[str, Any]:
    """States of all global random streams: torch (CPU and the current CUDA device), NumPy, Python."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Return to a state taken by `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
