"""Bounds on the size of a run, checked before memory is taken."""

from __future__ import annotations

import os

MOST_PARAMETERS = 2**31
"""Parameters of a model: 8.6 GB for one float32 copy, and training keeps several."""

MOST_LOADER_PROCESSES = 256
"""Loader processes of a worker, which all start before the first step."""

MOST_STEPS = 10_000_000
"""Optimizer steps of a run, each of which has a planned learning rate."""


def check_parameters(name: str, value: object, parameters: int) -> None:
    """Check roughly how many parameters settings ask for.

    Raises:
        ValueError: there are more than MOST_PARAMETERS.

    >>> check_parameters("model", "wrn-999-9", 10**10)
    Traceback (most recent call last):
    ValueError: model must have at most 2,147,483,648 parameters; got wrn-999-9 with 10,000,000,000. Use a smaller one.
    """
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{name} must have at most {MOST_PARAMETERS:,} parameters; got {value} with {parameters:,}. "
            "Use a smaller one."
        )


def check_steps(total_steps: int) -> None:
    """Check the number of optimizer steps of a run.

    Raises:
        ValueError: there are more than MOST_STEPS.
    """
    if total_steps > MOST_STEPS:
        raise ValueError(
            f"num_train_epochs must give at most {MOST_STEPS:,} optimizer steps; got {total_steps:,}. Use fewer epochs."
        )


def check_memory(what: str, needed: int, way_out: str) -> None:
    """Check that data fits into the memory of this machine, before it is allocated.

    Args:
        what: the setting, and what it asks for.
        needed: bytes.
        way_out: advice for the message.

    Raises:
        ValueError: it needs more than the machine has.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"{what} need at least {needed / 1e9:.3g} GB of memory; this machine has {there / 1e9:.3g} GB. {way_out}"
        )
