"""Copies of a `GossipStep`, by `copy.deepcopy` or pickle.

Connections cannot be copied. So a copy has a few parts of its original at first, and makes those that communicate when
all workers first use their copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import Parameter

from dsgdac_accel.core.parameter_guard import ModelWatch

_KEPT = ("optimizer", "group", "config", "schedule", "masters")
_MADE = ("watch", "mixer", "guard", "average", "_updates", "_workers_compared")


@dataclass(frozen=True)
class Unjoined:
    """The facts that a copy needs to make the other parts."""

    models: Sequence[nn.Module]
    worker_of: Callable[[Parameter], int] | None
    state: dict[str, Any]

    @property
    def steps_taken(self) -> int:
        """Optimizer steps of the original."""
        return self.state["mixer"]["step"]


def state_for_copy(step: Any) -> dict[str, Any]:
    """Return the state of a copy of a `GossipStep`, for `__getstate__`."""
    if "unjoined" in vars(step):
        return vars(step)
    unjoined = Unjoined(step.watch.models, step.worker_of, step.state_dict())
    return {name: getattr(step, name) for name in _KEPT} | {"unjoined": unjoined}


def join_and_get(step: Any, name: str) -> Any:
    """Return an attribute that a copy of a `GossipStep` lacks until it has joined, for `__getattr__`. Collective."""
    if "unjoined" not in vars(step) or name not in _MADE:
        raise AttributeError(f"{type(step).__name__!r} object has no attribute {name!r}")
    unjoined, schedule = step.unjoined, step.schedule  # the schedule has the future that it has planned for
    type(step).__init__(
        step, step.optimizer, step.group, step.config, ModelWatch(unjoined.models), unjoined.worker_of, step.masters
    )
    step.load_state_dict(unjoined.state)
    step.schedule = schedule
    del step.unjoined
    return getattr(step, name)
