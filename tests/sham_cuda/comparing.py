"""Compares what a run left on CUDA with what it left on the CPU, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from tests.sham_cuda.launching import ShamCuda
from tests.workers import run_workers


def run_both(sham: ShamCuda, function: Callable[..., Any], num_workers: int, *args: Any) -> tuple[list, list]:
    """Return what `function(rank, *args)` returned on CUDA and on the CPU. It returns a tree with the key "device"."""
    on_cpu = run_workers(function, num_workers, *args)
    on_cuda = sham.run(function, num_workers, *args)
    assert {run.pop("device") for run in on_cpu} == {"cpu"}
    assert {run.pop("device") for run in on_cuda} == {"cuda"}
    return on_cuda, on_cpu


def differences(ours: Any, theirs: Any, place: str = "") -> dict[str, Any]:
    """Return where two trees of values differ: the largest distance of two tensors, or the two values."""
    if isinstance(ours, numpy.ndarray):
        ours, theirs = torch.from_numpy(ours), torch.from_numpy(theirs)
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return _of_tensors(ours.detach().cpu(), theirs.detach().cpu(), place)
    if isinstance(ours, Mapping) and ours.keys() == theirs.keys():
        parts = [(f"{place}.{key}", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, Sequence) and not isinstance(ours, str) and len(ours) == len(theirs):
        parts = [(f"{place}.{number}", *pair) for number, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        return {} if ours == theirs or (ours != ours and theirs != theirs) else {place: (ours, theirs)}
    return {where: found for part, *pair in parts for where, found in differences(*pair, part).items()}


def _of_tensors(ours: torch.Tensor, theirs: torch.Tensor, place: str) -> dict[str, Any]:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return {place: ((ours.dtype, ours.shape), (theirs.dtype, theirs.shape))}
    if torch.equal(ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)):
        return {}
    return {place: float((ours.double() - theirs.double()).abs().max())}
