"""Accelerate's own collectives, repeated by the survivors if a worker is lost in one of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from dsgdac_accel.distributed.group import WorkerGroup

_REPEATED = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone")


def repeat_collectives(accelerator: Any, group: WorkerGroup) -> None:
    """Wrap the collective methods of one `Accelerator`, so that survivors of a loss repeat them.

    The lost worker's part is then missing: `gather` returns fewer rows, `reduce` the sum or mean over the survivors.
    All survivors get the same result, with the lost worker's part only if it was lost after contributing. Inside
    `deployed_model` and other sections all of them get WorkersChangedError instead. After a loss, `gather_for_metrics`
    still counts duplicate samples for all workers that a loader was prepared for; prepare evaluation loaders again.

    The functions of `accelerate.utils` (`broadcast`, `gather_object`, ...) are not covered: they end the survivors.

    Args:
        accelerator: whose methods are replaced, on this instance only.
        group: its workers.
    """
    running = False  # a collective that runs inside another is repeated with it
    owner = weakref.ref(accelerator)  # which must end with its last reference

    def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            method = MethodType(function, owner())
            if group.size == 1 or group.closed or running:
                return method(*args, **kwargs)
            running = True
            try:
                return group.collective(lambda: method(*args, **kwargs), f"`{function.__name__}`", strict=True)
            finally:
                running = False

        return collective

    for name in _REPEATED:
        setattr(accelerator, name, repeated(getattr(type(accelerator), name)))
    accelerator.main_process_first = _goes_first(owner, "is_main_process")
    accelerator.local_main_process_first = _goes_first(owner, "is_local_main_process")


def _goes_first(owner: Callable[[], Any], is_first: str) -> Callable[[], AbstractContextManager[None]]:
    """One process runs the context before the others do; if it is lost in it, the others continue at once."""

    @contextmanager
    def goes_first() -> Iterator[None]:
        accelerator = owner()
        first = getattr(accelerator, is_first)  # on entry: another process may become the main one meanwhile
        if not first:
            accelerator.wait_for_everyone()
        yield
        if first:
            accelerator.wait_for_everyone()

    return goes_first
