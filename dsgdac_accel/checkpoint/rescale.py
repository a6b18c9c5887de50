"""Resuming with another number of workers: all start from the average of the saved workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.manifest import read_manifest
from dsgdac_accel.checkpoint.reader import load_worker
from dsgdac_accel.checkpoint.serialization import CheckpointError


def average_of_workers(folder: Path, launched: int) -> dict[str, Any]:
    """Return the state of the deployed model of a checkpoint, for each of `launched` workers.

    Parameters and floating-point optimizer states are averaged in float64. BatchNorm statistics are pooled by the law
    of total variance. Everything else is worker 0's. Consumed batches are rescaled to the new number of workers,
    rounded down.

    Args:
        folder: a checkpoint of `save_state`, of any number of workers.
        launched: number of workers that resume.

    Raises:
        CheckpointError: the checkpoint was saved inside an accumulation window.
    """
    manifest = read_manifest(folder)
    state = load_worker(folder, 0)
    if state["window"] is not None:
        raise CheckpointError(
            "it was saved between two micro-batches, and gradients of each worker cannot be shared among others. "
            "Save after an optimizer step."
        )
    means = _Means()
    means.add(state)
    for rank in range(1, manifest.workers):
        other = load_worker(folder, rank)
        means.add(other)
        for optimizer, others in zip(state["optimizers"], other["optimizers"], strict=True):
            for parameter, values in others["state"].items():
                optimizer["state"].setdefault(parameter, values)  # worker 0 had no gradient for it yet
    means.write_into(state)
    for gossip in state["gossip"]:
        gossip["mixer"]["workers"] = launched
        gossip["mixer"].pop("references", None)  # they belong to pairs of the saved workers
        gossip["nonfinite_steps"], gossip["consecutive_nonfinite"] = 0, [0]
    # Lost workers had a share of the data, too.
    sharing = manifest.workers + len(manifest.facts.get("lost", ()))
    for position in state["loaders"]:
        if position and position["running"]:
            _rescale_position(position, sharing, launched)
    return state


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
        self.sums: dict[tuple, Tensor] = {}
        self.squares: dict[tuple, Tensor] = {}
        self.counts: dict[tuple, int] = {}

    def add(self, state: dict[str, Any]) -> None:
        """Add the state of one more worker."""
        for path, tensor in _averaged_tensors(state):
            wide = tensor.double()
            self.sums[path] = wide if path not in self.sums else self.sums[path] + wide
            self.counts[path] = self.counts.get(path, 0) + 1
            if str(path[-1]).endswith("running_mean"):
                self.squares[path] = wide.square() + self.squares.get(path, 0)

    def write_into(self, state: dict[str, Any]) -> None:
        """Replace worker 0's values by the averages."""
        for path, total in self.sums.items():
            mean = total / self.counts[path]
            if str(path[-1]).endswith("running_var"):
                of_means = (*path[:-1], path[-1].removesuffix("var") + "mean")
                if of_means in self.sums:  # total variance = mean of the variances + variance of the means
                    count = self.counts[of_means]
                    mean += (self.squares[of_means] / count - (self.sums[of_means] / count).square()).clamp_(min=0)
            _set(state, path, mean)


def _averaged_tensors(state: dict[str, Any]) -> list[tuple[tuple, Tensor]]:
    found: list[tuple[tuple, Any]] = []
    for index, model in state["models"].items():
        found += [(("models", index, "parameters", name), tensor) for name, tensor in model["parameters"].items()]
        found += [
            (("models", index, "buffers", name), tensor)
            for name, tensor in model["buffers"].items()
            if name.endswith(("running_mean", "running_var"))
        ]
    for number, parameters in enumerate(state["loose"]):
        found += [(("loose", number, index), tensor) for index, tensor in enumerate(parameters)]
    for number, optimizer in enumerate(state["optimizers"]):
        for parameter, values in optimizer["state"].items():
            found += [
                (("optimizers", number, "state", parameter, name), value)
                for name, value in values.items()
                if name != "step"  # a count, stored as a float
            ]
    return [(path, value) for path, value in found if isinstance(value, Tensor) and value.is_floating_point()]


def _set(state: Any, path: Sequence[Any], mean: Tensor) -> None:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = mean.to(state[path[-1]].dtype)
