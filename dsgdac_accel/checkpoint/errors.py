"""Errors that all workers raise together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.distributed.processes import Processes

T = TypeVar("T")


def on_all(group: Processes, attempt: Callable[[], T], what: str = "cannot resume from the checkpoint") -> T:
    """Return the result of `attempt`, or raise the first worker's error on all workers. Collective."""
    problem = None
    try:
        result = attempt()
    except Exception as error:  # the other workers wait below
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    for rank, found in enumerate(group.all_gather_object(problem, "agreeing on a checkpoint")):
        if found is not None:
            raise CheckpointError(f"{group.members.named([rank])} {what}: {found}")
    return result
