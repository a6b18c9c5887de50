"""The state of loaders and samplers from which the order of their next pass follows."""

from __future__ import annotations

from typing import Any

import torch

from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.data.loaders import generator_state, is_generator, parts_of, set_generator_state

_COUNTERS = ("iteration", "epoch", "seed", "initial_seed", "shared_seed")
"""What samplers and loaders derive an order from."""


def order_state(loader: Any) -> list[dict[str, Any]]:
    """Counters, seeds and generators of a loader and its chain of samplers, as plain values."""
    return [
        {
            "kind": type(part).__name__,
            "counters": {name: vars(part)[name] for name in _COUNTERS if type(vars(part).get(name)) is int},
            "generators": {name: generator_state(v) for name, v in vars(part).items() if is_generator(v)},
        }
        for part in _described(loader)
    ]


def set_order_state(loader: Any, state: list[dict[str, Any]], lenient: bool = False) -> None:
    """Put back what `order_state` gave.

    Raises CheckpointError for a loader that is put together differently; `lenient` then sets what fits.
    """
    parts = _described(loader)
    kinds, saved = [type(part).__name__ for part in parts], [part["kind"] for part in state]
    if kinds != saved and not lenient:
        raise CheckpointError(
            f"the checkpoint is of a loader made of {', '.join(saved)}, and this one is made of {', '.join(kinds)}. "
            f"Prepare the loader as it was when saved."
        )
    remaining = list(state)
    for part in parts:
        match = next((saved for saved in remaining if saved["kind"] == type(part).__name__), None)
        if match is None:
            continue
        remaining.remove(match)
        for name, value in match["counters"].items():
            if type(vars(part).get(name)) is int:
                setattr(part, name, value)
        for name, value in match["generators"].items():
            generator = vars(part).get(name)
            if generator is None and isinstance(value, torch.Tensor):
                generator = torch.Generator()
                setattr(part, name, generator)
            if generator is not None:
                set_generator_state(generator, value)


def _described(loader: Any) -> list[Any]:
    return [part for part in parts_of(loader) if hasattr(part, "__dict__")]
