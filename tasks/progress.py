"""What a run shows and times while it trains, the same for all tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from run_folder import AnyAccelerator

from dsgdac_accel import NonFiniteError


class WaitingTime:
    """Counts the seconds that training waits for its batches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of `loader`, each waited for on the clock."""
        batches = iter(loader)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - begun
            if batch is None:
                return
            yield batch


def require_finite(accelerator: AnyAccelerator, loss: float, step: int) -> None:
    """End a synchronous run whose training loss is not finite; gossip has a policy of its own for that.

    Raises NonFiniteError.
    """
    if not accelerator.gossip_steps and not math.isfinite(loss):
        raise NonFiniteError(
            f"the training loss is {loss} at step {step}, for all workers. Lower the rate, lengthen the warm-up, or "
            f"clip the gradients."
        )


def figures(accelerator: AnyAccelerator, loss: float, rate: float) -> dict[str, str]:
    """What the progress bar shows beside the step."""
    shown = {"loss": f"{loss:.3f}", "rate": f"{rate:.3g}"}
    for step in accelerator.gossip_steps:
        radius = step.metrics().get("radius", math.nan)
        shown |= {"gamma": f"{step.gamma:.3f}", "radius": f"{radius:.3f}"}
    return shown
