"""Resuming with another number of workers: all start from the average of the saved workers."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.local_shards import KeyPath, LocalShard, mapped
from dsgdac_accel.checkpoint.manifest import Manifest
from dsgdac_accel.checkpoint.reader import load_state
from dsgdac_accel.checkpoint.resharding import Targets, leaves
from dsgdac_accel.checkpoint.serialization import CheckpointError

logger = logging.getLogger(__name__)


def average_of_workers(
    folder: Path, manifest: Manifest, warn: bool = True, targets: Targets | None = None
) -> dict[str, Any]:
    """Return the state of the deployed model of a checkpoint, from which each worker of another number starts.

    Parameters and floating-point optimizer states are averaged in float64; quantized states of torchao by their values.
    States stored as integer codes, as those of bitsandbytes, start anew. BatchNorm statistics are pooled by the law of
    total variance. Everything else is worker 0's.

    Args:
        folder: a checkpoint of `save_state`, of any number of workers.
        manifest: its manifest.
        warn: whether to log that optimizer states start anew; on one worker is enough.
        targets: the parts of the tensors that this rank of a worker needs. Default: all.

    Raises:
        CheckpointError: the checkpoint was saved inside an accumulation window.
    """
    sums: dict[KeyPath, Tensor] = {}
    counts: Counter[KeyPath] = Counter()

    def add(path: KeyPath, value: Tensor) -> None:
        sums[path] = sums[path] + value if path in sums else value
        counts[path] += 1

    targets = targets or Targets()
    state = load_state(folder, manifest, 0, targets)
    if state["window"] is not None:
        raise CheckpointError(
            "it was saved between two micro-batches, and gradients of each worker cannot be shared among others. Save "
            "after an optimizer step."
        )
    _drop_codes(state, warn)
    for worker in range(manifest.workers):
        other = load_state(folder, manifest, worker, targets, common=False)
        _drop_codes(other, False)
        for path, found in leaves(other):
            if _is_averaged(path, found):
                own = _own(found)
                value = (own.dequantize() if hasattr(own, "__tensor_flatten__") else own).double()
                add(path, value)
                if _ends_with(path, "running_mean"):
                    add((*path, "squared"), value.square())
        for optimizer, others in zip(state["optimizers"], other["optimizers"], strict=True):
            for parameter, values in others["state"].items():
                optimizer["state"].setdefault(parameter, values)  # worker 0 had no gradient for it yet

    def mean(path: KeyPath) -> Tensor:
        return sums[path] / counts[path]

    def averaged(path: KeyPath, found: Any) -> Any:
        if path not in sums:
            return found
        value, own = mean(path), _own(found)
        if _ends_with(path, "running_var"):
            of_means = (*path[:-1], path[-1].removesuffix("var") + "mean")
            if of_means in sums:  # total variance = mean of the variances + variance of the means
                value += (mean((*of_means, "squared")) - mean(of_means).square()).clamp_(min=0)
        value = value.to(own.dtype)
        if hasattr(own, "__tensor_flatten__"):
            own.copy_(value)  # quantizes
        elif isinstance(found, LocalShard):
            found.values = value
        else:
            return value
        return found

    mapped(state, averaged)
    for gossip in state["gossip"]:
        gossip["nonfinite_steps"], gossip["consecutive_nonfinite"] = 0, [0]
    return state


def fit_to_processes(state: dict[str, Any], manifest: Manifest, launched: int, shards: int) -> None:
    """Change a saved state for other processes than the saved ones, in place.

    Consumed batches are rescaled to their number, rounded down.

    Args:
        state: of a process that resumes.
        manifest: of the checkpoint.
        launched: number of workers that resume.
        shards: number of processes of each of them.
    """
    for gossip in state["gossip"]:
        gossip["mixer"]["workers"] = launched
        for key in ("references", "references_of", "sent", "was_sent"):  # they belong to the saved processes
            gossip["mixer"].pop(key, None)
    for position in state["loaders"]:
        if position and position["running"]:
            running = position["running"]
            if not position["global_batches"]:  # one that is split over all workers counts the same for any number
                running["taken"] = running["taken"] * manifest.workers * manifest.ranks // (launched * shards)
            running["fetched_at"] = None  # each worker's random streams are seeded anew
            if running["taken"] == 0:
                position |= {"running": None, "order": running["order"], "passes": running["passes"]}


def _drop_codes(state: dict[str, Any], warn: bool) -> None:
    """Remove optimizer states with elements that are no values and have no average. A single integer is a count."""
    for number, optimizer in enumerate(state["optimizers"]):
        coded = []
        for parameter, values in optimizer["state"].items():
            tensors = [_own(found) for _, found in leaves(values)]
            kinds = {type(tensor) for tensor in tensors if hasattr(tensor, "__tensor_flatten__")}
            if any(not tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors) or any(
                kind.dequantize is Tensor.dequantize for kind in kinds
            ):
                coded.append(parameter)
        for parameter in coded:
            del optimizer["state"][parameter]
        if coded and warn:
            logger.warning(
                "the %s states of %d parameters are integer codes, whose average means nothing: they start anew",
                state["kinds_of_optimizers"][number],
                len(coded),
            )


def _is_averaged(path: KeyPath, found: Any) -> bool:
    """Return whether a value at this path of a state is averaged over the workers."""
    if not (isinstance(_own(found), Tensor) and _own(found).is_floating_point()):
        return False
    if path[0] == "optimizers":
        return path[2] == "state" and path[-1] != "step"  # a count, though a float
    if path[0] == "models":
        return path[2] == "parameters" or _ends_with(path, "running_mean", "running_var")
    return path[0] == "loose"


def _ends_with(path: KeyPath, *names: str) -> bool:
    """Return whether a path leads to a buffer of a model whose name ends with one of these."""
    return path[0] == "models" and path[2] == "buffers" and path[-1].endswith(names)


def _own(value: Any) -> Any:
    """Return this rank's part of a tensor."""
    return value.values if isinstance(value, LocalShard) else value
