"""How the processes of a launch find each other, naming those that do not come. Nothing here waits for ever."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsgdac_accel.doctor.report import Finding, named_workers

_PREFIX = "dsgdac_accel/doctor"
_calls = itertools.count()


class SilentWorkersError(RuntimeError):
    """Workers did not come to a meeting."""

    def __init__(self, missing: Sequence[int], what: str, timeout: float, store: str = "") -> None:
        self.missing = tuple(missing)
        super().__init__(f"{named_workers(missing)} did not answer within {timeout:g} s in {what}{store}")


def lost(error: RuntimeError) -> Finding:
    """The finding of a worker that did not come or was lost on the way; other errors say by themselves what to do."""
    if isinstance(error, SilentWorkersError):
        advice = "Look at its own output, and whether its machine can be reached"
        return Finding("error", "lost worker", str(error), advice, error.missing)
    return Finding("error", "lost worker", str(error))


def launched() -> tuple[int, int]:
    """Number of this process and how many there are, as the launcher's variables say; (0, 1) without one.

    Raises ValueError for variables that contradict each other.
    """
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        size, rank = int(found["WORLD_SIZE"] or 1), int(found["RANK"] or 0)
    except ValueError:
        size, rank = 0, 0
    if not 0 <= rank < size or (size > 1 and found["RANK"] is None):
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"RANK must be a number from 0 to WORLD_SIZE - 1; got {shown}. Use torchrun.")
    return rank, size


def open_store(rank: int, size: int, timeout: float, keeps: bool = True) -> dist.Store:
    """The rendezvous store of the launch; `keeps` lets worker 0 serve it where no agent does.

    Raises SilentWorkersError where nobody serves it, ValueError where the launcher did not say where it is.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port or not port.isdigit():
        raise ValueError(
            f"MASTER_ADDR and MASTER_PORT say where workers meet; got {host} and {port}. Use torchrun or accelerate "
            f"launch."
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and keeps and not agent
    try:
        # Not waiting for the others, so that it can be said which of them are missing.
        store: dist.Store = dist.TCPStore(
            host, int(port), size, serves, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        if serves:
            raise ValueError(f"worker 0 cannot serve at {host}:{port}: {error}. Choose another MASTER_PORT.") from error
        raise SilentWorkersError([0], "the meeting", timeout, f", which keeps the store at {host}:{port}") from error
    # An agent's store outlives restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{_PREFIX}/attempt_{attempt}", store)


def join(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Make the default process group, after a roll call.

    Raises SilentWorkersError with the workers that did not come.
    """
    roll_call(store, rank, size, "the meeting", timeout)
    backend = "nccl" if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU") != "true" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def roll_call(store: Any, rank: int, size: int, what: str, timeout: float) -> None:
    """Return when all are here; each process waits `timeout` seconds from when it came.

    Collective: every process must make the same calls in the same order. Raises SilentWorkersError.
    """
    key = f"{_PREFIX}/roll_call/{next(_calls)}"
    missing = list(range(size))
    deadline = time.monotonic() + timeout
    try:
        store.set(f"{key}/{rank}", "here")
        while missing := [other for other in missing if not store.check([f"{key}/{other}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    except RuntimeError as error:  # the store is gone, and with it the process that kept it
        raise SilentWorkersError([0], what, timeout, ", which keeps the rendezvous store") from error
    if missing:
        raise SilentWorkersError(missing, what, timeout)


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()
