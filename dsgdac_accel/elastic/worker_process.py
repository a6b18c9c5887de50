"""One worker process of a launch. Its own processes end with it, and all of them with the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence


class Worker:
    """A process of `python ARGUMENTS`. It shares a process group with the processes that it starts and with a guard.

    The guard is a shell that waits for the end of its input, which comes with the end of the launcher, and then kills
    the group. As leader of the group it also keeps the group's id from being used again.
    """

    def __init__(self, rank: int, arguments: Sequence[str], variables: dict[str, str]) -> None:
        self.rank = rank
        self.status: int | None = None
        """Its exit status as in `subprocess`, negative for a signal. None while it runs."""
        # A terminal, batch system or library may send signals to the whole group.
        command = ["sh", "-c", "trap '' HUP INT QUIT TERM USR1 USR2; read _; kill -KILL 0"]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        command = [sys.executable, "-u", *arguments]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, process_group=self._guard.pid
        )

    def has_ended(self) -> bool:
        """Whether it has ended since the last call. If so, the processes that it started are killed."""
        if self.status is not None or self._process.poll() is None:
            return False
        self.end()
        return True

    def send(self, number: int) -> None:
        """Send a signal to the worker alone: a DataLoader's processes would die of it before the worker has saved."""
        if self.status is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker and the processes that it started."""
        if self.status is None:
            os.killpg(self._guard.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what still runs, and wait for it."""
        if self.status is None:
            self.kill()
            self._guard.communicate()
            self.status = self._process.wait()
