"""What `dsgdac launch` is asked to start, checked before anything starts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_WORKERS = 1024


class LaunchError(ValueError):
    """The launch is impossible as asked for."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start. Raises LaunchError if it is impossible."""

    command: Sequence[str]
    """A script and its arguments, or a module and its arguments."""
    module: bool = False
    """Whether `command` starts with a module, as after `python -m`."""
    workers: int
    """Worker processes on each machine, 1 to 1024."""
    machines: int = 1
    machine_index: int = 0
    address: str | None = None
    """HOST:PORT of machine 0, whose launcher keeps the store; by default a free port of 127.0.0.1."""
    stop_on_failure: bool = False
    """Whether the others are ended when one fails, as torchrun does."""

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise LaunchError("dsgdac launch needs Linux. Use torchrun or accelerate launch here.")
        for name in ("workers", "machines"):
            value = getattr(self, name)
            if value < 1:
                raise LaunchError(f"{name} must be at least 1; got {value}.")
        if self.workers > _MOST_WORKERS:
            raise LaunchError(
                f"workers must be at most {_MOST_WORKERS}, since each is a process here; got {self.workers}. "
                f"For more, let each process hold several: gossip.workers_per_process."
            )
        if not 0 <= self.machine_index < self.machines:
            raise LaunchError(f"the machine index must be in 0..{self.machines - 1}; got {self.machine_index}.")
        if self.machines > 1 and self.address is None:
            raise LaunchError(f"{self.machines} machines need the address HOST:PORT of machine 0, the same on all.")
        _ = self.host_and_port
        if not self.command:
            raise LaunchError("name the script to launch, after the options.")
        name = self.command[0]
        if self.module:
            package = name.partition(".")[0]
            here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
            if not (here or importlib.util.find_spec(package)):
                raise LaunchError(f"there is no module {name}. Install it, or give the path of a script without -m.")
        elif not Path(name).is_file():
            raise LaunchError(f"there is no script {name} in {os.getcwd()}. For a module give -m.")

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Where the store is; port 0 is any free one."""
        host, colon, port = ("127.0.0.1:0" if self.address is None else self.address).rpartition(":")
        if not (host and colon and port.isdecimal() and int(port) < 2**16 and (int(port) or self.machines == 1)):
            raise LaunchError(f"the address must be HOST:PORT, such as node0:29500; got {self.address!r}.")
        return host, int(port)
