"""The worker processes of a launch. None of them, nor what they start, outlives the launcher, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
"""Reads the id of each process group when it starts and again when it has ended, and kills the rest at the end."""


class Worker:
    """One worker process, in a process group of its own.

    Args:
        rank: of the worker.
        arguments: of Python.
        variables: its environment.
        guard: from `guard()`; kills the process group if the launcher ends first.
    """

    def __init__(self, rank: int, arguments: Sequence[str], variables: dict[str, str], guard: Any) -> None:
        self.rank = rank
        self.status: int | None = None
        """How it ended, as in `subprocess`: negative for a signal. None while it runs."""
        self._guard = guard
        self._process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_die_with(os.getpid()),
        )
        self._tell_guard()

    def has_ended(self) -> bool:
        """Whether it has ended since the last call. If so, the processes that it started are killed."""
        if self.status is not None:
            return False
        # Not reaped yet, so that the id of its process group cannot be another's.
        if not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        self._reap()
        return True

    def send(self, number: int) -> None:
        """Send a signal to the worker alone: a DataLoader's processes would die of it before the worker has saved."""
        if self.status is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker and the processes that it started."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it if it still runs, and wait."""
        if self.status is None:
            self._reap()

    def _reap(self) -> None:
        self.kill()
        self._tell_guard()
        self.status = self._process.wait()

    def _tell_guard(self) -> None:
        with contextlib.suppress(OSError):  # somebody ended it
            self._guard.stdin.write(f"{self._process.pid}\n".encode())
            self._guard.stdin.flush()


@contextlib.contextmanager
def guard() -> Iterator[subprocess.Popen[bytes]]:
    """A process that outlives the launcher for as long as it takes to kill what the workers started.

    The kernel ends the workers with the launcher, but not the workers' own processes. The guard's input ends with the
    launcher.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        yield process


def _die_with(launcher: int) -> Callable[[], None]:
    """Called in the new process: the kernel kills it when the launcher ends."""
    control = ctypes.CDLL(None).prctl  # looked up here: a forked process should do as little as possible

    def bind() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the kernel knew
            os._exit(1)

    return bind
