"""The values of a parameter that are mixed: its float32 master, or its own."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter


def held(accelerator: Any, parameter: Parameter) -> Parameter:
    """Return the float32 master of a parameter, or the parameter itself if it has none."""
    masters = [step.masters.master_of(parameter) for step in accelerator.gossip_steps]
    return next((master for master in masters if master is not None), parameter)
