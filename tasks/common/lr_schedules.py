"""Learning rate schedules of the tasks, as factors on the peak rate for torch's LambdaLR."""

from __future__ import annotations

import math


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up to 1, then a cosine towards 0.

    Args:
        step: optimizer step, from 0.
        warmup_steps: steps of the warm-up. The factor is never 0 in it.
        total_steps: steps of the run.

    >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps)))


def inverse_square_root(step: int, warmup_steps: int, warmup_peak: float = 1.0) -> float:
    """Linear warm-up to `warmup_peak`, then (warmup_steps / t)^0.5 with t = step + 1 (Vaswani et al. 2017). Never 0.

    Args:
        step: optimizer step, from 0.
        warmup_steps: steps of the warm-up, at least 1.
        warmup_peak: factor at the last step of the warm-up, above 0. If it is not 1, the factor jumps in the next step.

    >>> [5e-4 * inverse_square_root(t - 1, warmup_steps=4000) for t in (1, 4000, 16000)]
    [1.25e-07, 0.0005, 0.00025]
    """
    t = step + 1
    return warmup_peak * t / warmup_steps if t <= warmup_steps else (warmup_steps / t) ** 0.5
