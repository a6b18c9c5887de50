"""The processes that a launch starts: none of them outlives it, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsgdac_accel.elastic.launch_plan import Launch

_PR_SET_PDEATHSIG = 1
_GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    groups ^= {int(line)}
for leader in groups:
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass
"""
"""Told of each group of processes that begins, and again when it has ended; kills the rest without the launcher."""


@dataclass
class Worker:
    """A process under way, or how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    status: int | None = None
    """As of `subprocess`: a signal's is negative."""


def start_worker(plan: Launch, variables: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    """A worker with these variables of the environment, in a group of processes of its own."""
    return subprocess.Popen(
        [sys.executable, "-u", *(["-m"] if plan.module else []), *plan.command], env=variables,
        stdin=subprocess.DEVNULL, stdout=log, stderr=None if log is None else subprocess.STDOUT,
        process_group=0, preexec_fn=_die_with(os.getpid()),
    )  # fmt: skip


def _die_with(launcher: int) -> Callable[[], None]:
    """Called in the new process: the kernel kills it when the launcher ends, however that happens."""
    control = ctypes.CDLL(None).prctl  # looked up here: a forked process should do as little as possible

    def bind() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the kernel knew
            os._exit(1)

    return bind


@contextlib.contextmanager
def guard() -> Iterator[subprocess.Popen[bytes]]:
    """A process that outlives the launcher for as long as it takes to kill what its workers started.

    The workers themselves end with the launcher, but not their own processes. Its input ends with the launcher.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        yield process


def log_file(plan: Launch, rank: int) -> Any:
    """Where a worker's output goes; None for the console."""
    if plan.log_dir is None:
        return None
    plan.log_dir.mkdir(parents=True, exist_ok=True)
    return open(plan.log_dir / f"worker-{rank}.log", "ab", buffering=0)


def copy_to_console(file: Any) -> None:
    """To the console, what came to this file since the last look."""
    if text := file.read():
        sys.stdout.buffer.write(text)
        sys.stdout.flush()


def kill_group(leader: int) -> None:
    """Kill a worker and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
