"""Resuming with another number of workers: all start from the average of the saved workers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.local_shards import KeyPath, LocalShard, mapped
from dsgdac_accel.checkpoint.manifest import Manifest, read_manifest
from dsgdac_accel.checkpoint.reader import load_private
from dsgdac_accel.checkpoint.resharding import Targets, leaves
from dsgdac_accel.checkpoint.serialization import CheckpointError, revived

logger = logging.getLogger(__name__)


def average_of_workers(
    folder: Path,
    launched: int,
    warn: bool = True,
    targets: Targets | None = None,
) -> dict[str, Any]:
    """Return the state of the deployed model of a checkpoint, for each of `launched` workers.

    Parameters and floating-point optimizer states are averaged in float64; quantized states of torchao by their values.
    States stored as integer codes, as those of bitsandbytes, start anew. BatchNorm statistics are pooled by the law of
    total variance. Everything else is worker 0's. Consumed batches are rescaled to the new number of workers, rounded
    down. The common tensors are left out.

    Args:
        folder: a checkpoint of `save_state`, of any number of workers.
        launched: number of workers that resume.
        warn: whether to log that optimizer states start anew; on one worker is enough.
        targets: the parts of the tensors that this rank of a worker needs. Default: all.

    Raises:
        CheckpointError: the checkpoint was saved inside an accumulation window.
    """
    manifest, targets = read_manifest(folder), targets or Targets()
    state = _state_of_worker(folder, 0, warn, targets)
    if state["window"] is not None:
        raise CheckpointError(
            "it was saved between two micro-batches, and gradients of each worker cannot be shared among others. "
            "Save after an optimizer step."
        )
    means = _Means()
    means.add(state)
    for rank in range(1, manifest.workers):
        other = _state_of_worker(folder, rank, False, targets)
        means.add(other)
        for optimizer, others in zip(state["optimizers"], other["optimizers"], strict=True):
            for parameter, values in others["state"].items():
                optimizer["state"].setdefault(parameter, values)  # worker 0 had no gradient for it yet
    means.write_into(state)
    for gossip in state["gossip"]:
        gossip["mixer"]["workers"] = launched
        gossip["nonfinite_steps"], gossip["consecutive_nonfinite"] = 0, [0]
    fit_to_processes(state, manifest, launched, targets.ranks)
    return state


def fit_to_processes(state: dict[str, Any], manifest: Manifest, launched: int, shards: int) -> None:
    """Change a saved state for other processes than the saved ones, in place.

    Args:
        state: of a process that resumes.
        manifest: of the checkpoint.
        launched: number of workers that resume.
        shards: number of processes of each of them.
    """
    for gossip in state["gossip"]:
        for key in ("references", "references_of", "sent", "was_sent"):  # they belong to the saved processes
            gossip["mixer"].pop(key, None)
    for position in state["loaders"]:
        if position and position["running"]:
            _rescale_position(position, manifest.workers * manifest.shards, launched * shards)


def _state_of_worker(folder: Path, rank: int, warn: bool, targets: Targets) -> Any:
    """Return the state of a worker, without the optimizer states that cannot be averaged."""
    state = revived(load_private(folder, rank, targets))
    for number, optimizer in enumerate(state["optimizers"]):
        coded = [parameter for parameter, values in optimizer["state"].items() if _holds_codes(values)]
        for parameter in coded:
            del optimizer["state"][parameter]
        if coded and warn:
            logger.warning(
                "the %s states of %d parameters are integer codes, whose average means nothing: they start anew",
                state["kinds_of_optimizers"][number],
                len(coded),
            )
    return state


def _holds_codes(values: dict[str, Any]) -> bool:
    """Return whether the state of a parameter has elements that are not values; a single integer is a count."""
    tensors = [_own(found) for _, found in leaves(values)]
    if any(not tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors):
        return True
    subclasses = {type(tensor) for tensor in tensors if hasattr(tensor, "__tensor_flatten__")}
    return any(kind.dequantize is Tensor.dequantize for kind in subclasses)


def _rescale_position(position: dict[str, Any], saved: int, launched: int) -> None:
    running = position["running"]
    if not position["global_batches"]:  # a batch that is split over all workers counts the same for any number of them
        running["taken"] = running["taken"] * saved // launched
    running["fetched_at"] = None  # each worker's random streams are seeded anew
    if running["taken"] == 0:
        position |= {"running": None, "order": running["order"], "passes": running["passes"]}


class _Means:
    """Running sums over the workers of every averaged tensor, by its path in the state."""

    def __init__(self) -> None:
        self.sums: dict[KeyPath, Tensor] = {}
        self.squares: dict[KeyPath, Tensor] = {}
        self.counts: dict[KeyPath, int] = {}

    def add(self, state: dict[str, Any]) -> None:
        """Add the state of one more worker."""
        for path, found in leaves(state):
            if not _is_averaged(path, found):
                continue
            value = _values(found).double()
            self.sums[path] = self.sums[path] + value if path in self.sums else value
            self.counts[path] = self.counts.get(path, 0) + 1
            if _in_buffers(path) and path[-1].endswith("running_mean"):
                self.squares[path] = value.square() + self.squares.get(path, 0)

    def write_into(self, state: dict[str, Any]) -> None:
        """Replace the values of worker 0 by the averages."""
        mapped(state, lambda path, found: self._averaged(path, found) if _is_averaged(path, found) else found)

    def _averaged(self, path: KeyPath, found: Tensor | LocalShard) -> Tensor | LocalShard:
        mean = self._mean(path)
        if _in_buffers(path) and path[-1].endswith("running_var"):
            of_means = (*path[:-1], path[-1].removesuffix("var") + "mean")
            if of_means in self.squares:  # total variance = mean of the variances + variance of the means
                mean_of_squares = self.squares[of_means] / self.counts[of_means]
                mean += (mean_of_squares - self._mean(of_means).square()).clamp_(min=0)
        values = _own(found)
        if hasattr(values, "__tensor_flatten__"):
            values.copy_(mean.to(values.dtype))  # quantizes
            return found
        if isinstance(found, LocalShard):
            found.values = mean.to(values.dtype)
            return found
        return mean.to(values.dtype)

    def _mean(self, path: KeyPath) -> Tensor:
        return self.sums[path] / self.counts[path]


def _is_averaged(path: KeyPath, found: Any) -> bool:
    """Return whether a value at this path of a state is averaged over the workers."""
    if not (isinstance(_own(found), Tensor) and _own(found).is_floating_point()):
        return False
    if path[0] == "optimizers":
        return path[2] == "state" and path[-1] != "step"  # a count, though a float
    statistics = _in_buffers(path) and path[-1].endswith(("running_mean", "running_var"))
    return statistics or path[0] == "loose" or (path[0] == "models" and path[2] == "parameters")


def _in_buffers(path: KeyPath) -> bool:
    return path[0] == "models" and path[2] == "buffers"


def _own(value: Any) -> Any:
    """Return this rank's part of a tensor."""
    return value.values if isinstance(value, LocalShard) else value


def _values(value: Tensor | LocalShard) -> Tensor:
    """Return the values of a tensor that may be quantized, like the optimizer states of torchao."""
    tensor = _own(value)
    return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor
