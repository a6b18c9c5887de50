"""Going on with another number of workers: one state made of those of all saved workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint import load_worker
from dsgdac_accel.checkpoint.manifest import read_manifest
from dsgdac_accel.checkpoint.serialization import CheckpointError


def average_of_workers(folder: Path, launched: int) -> dict[str, Any]:
    """The state of the deployed model, for each of `launched` workers, from a checkpoint of more, fewer or others.

    Parameters and floating states of optimizers are averaged in float64; BatchNorm statistics are pooled by the law of
    total variance; everything else is worker 0's. Of the pass that is running as many samples count as taken as were,
    rounded down to whole batches.

    Raises CheckpointError for a checkpoint from inside an accumulation window.
    """
    manifest = read_manifest(folder)
    saved, dealt = manifest.workers, manifest.workers + len(manifest.facts.get("lost", ()))
    state = load_worker(folder, 0)
    if state["window"] is not None:
        raise CheckpointError(
            "it was saved between two micro-batches, with gradients of each worker, which other workers cannot share. "
            "Save after an optimizer step."
        )
    means = _Means()
    means.add(state)
    for rank in range(1, saved):
        other = load_worker(folder, rank)
        means.add(other)
        for optimizer, others in zip(state["optimizers"], other["optimizers"], strict=True):
            for parameter, values in others["state"].items():
                optimizer["state"].setdefault(parameter, values)  # worker 0 has had no gradient for it yet
    means.write_into(state)
    for gossip in state["gossip"]:
        gossip["mixer"]["workers"] = launched
        gossip["mixer"].pop("references", None)  # of pairs that are no more
        gossip["nonfinite_steps"], gossip["consecutive_nonfinite"] = 0, [0]
    for position in state["loaders"]:
        running = position and position["running"]
        if running:
            share = 1 if position["global_batches"] else dealt / launched  # those that were lost had one, too
            running["taken"] = int(running["taken"] * share)
            running["fetched_at"] = None  # each worker's own random streams begin anew
            if running["taken"] == 0:
                position |= {"running": None, "order": running["order"], "passes": running["passes"]}
    return state


class _Means:
    """Running sums over the workers of what is averaged."""

    def __init__(self) -> None:
        self.sums: dict[tuple, Tensor] = {}
        self.squares: dict[tuple, Tensor] = {}
        self.counts: dict[tuple, int] = {}

    def add(self, state: dict[str, Any]) -> None:
        """Take in the state of one more worker."""
        for place, tensor in _averaged_tensors(state):
            wide = tensor.double()
            self.sums[place] = wide if place not in self.sums else self.sums[place] + wide
            self.counts[place] = self.counts.get(place, 0) + 1
            if str(place[-1]).endswith("running_mean"):
                self.squares[place] = wide.square() + self.squares.get(place, 0)

    def write_into(self, state: dict[str, Any]) -> None:
        """Put the averages in place of worker 0's values."""
        for place, total in self.sums.items():
            mean = total / self.counts[place]
            if str(place[-1]).endswith("running_var"):
                of_means = (*place[:-1], place[-1].removesuffix("var") + "mean")
                if of_means in self.sums:
                    count = self.counts[of_means]
                    mean += (self.squares[of_means] / count - (self.sums[of_means] / count).square()).clamp_(min=0)
            _set(state, place, mean)


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
                if name != "step"  # a count, though a float
            ]
    return [(place, value) for place, value in found if isinstance(value, Tensor) and value.is_floating_point()]


def _set(state: Any, place: Sequence[Any], mean: Tensor) -> None:
    for key in place[:-1]:
        state = state[key]
    state[place[-1]] = mean.to(state[place[-1]].dtype)
