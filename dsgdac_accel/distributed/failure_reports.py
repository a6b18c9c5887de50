"""Workers' reports about a failure. They go through the rendezvous store, since connections are suspect."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.poster import run_within

T = TypeVar("T")

_FIRST_FAILURE = "dsgdac_accel/first_failure"  # keys in the store
_REPORT_OF = "dsgdac_accel/report_of"
_ROLL_CALL = "dsgdac_accel/roll_call"  # one for all: workers may notice the loss in different places
_STORE_SECONDS = 3.0  # the store may live in the very process that was lost
_CHAIN_SECONDS = 2.5  # two waits that began in one step time out about this far apart
_ROLL_CALL_SECONDS = 4.0  # longer than the workers' notices of one loss are apart
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class FailureReports:
    """Writes the report of this worker, and reads those of the other workers."""

    def __init__(self, members: Members) -> None:
        self.me = members.rank
        self.ranks = members.launched
        self.processes: list[tuple[str, int]] = [("", 0)] * members.size
        """Machine and process id of each worker, by rank; unknown until all are connected."""
        self.store: Any = None
        """The rendezvous store; None in a run of one process."""

    def write(self, message: str) -> str:
        """Tell the others why this run ends. Returns the first message that any worker wrote."""

        def write(store: Any) -> str:
            # compare_set returns the value that is there now: ours, or an earlier worker's.
            first = store.compare_set(_FIRST_FAILURE, "", message).decode()
            store.set(f"{_REPORT_OF}/{self.ranks[self.me]}", message)
            return first

        return self._ask(write, _STORE_SECONDS) or message

    def first(self) -> str | None:
        """The report of the first worker that noticed a failure; None if there is none yet."""
        return self._ask(lambda store: _read(store, _FIRST_FAILURE), _STORE_SECONDS)

    def of(self, worker: int) -> str | None:
        """Return the report that a worker has written or writes within a few seconds; None if there is none."""
        key = f"{_REPORT_OF}/{self.ranks[worker]}"

        def read(store: Any) -> str | None:
            deadline = time.monotonic() + _CHAIN_SECONDS
            while not store.check([key]) and time.monotonic() < deadline and self.is_alive(worker) is not False:
                time.sleep(0.05)
            return _read(store, key)

        return self._ask(read, _CHAIN_SECONDS + _STORE_SECONDS)

    def missing(self) -> tuple[list[int], list[int]]:
        """Call the roll of all workers for a few seconds, and return who does not answer: (gone, only silent).

        A broken connection may be noticed by some workers long before others. So a worker that is alive, or on another
        machine and perhaps alive, is only to blame where silence was noticed.
        """
        missing = [worker for worker in range(len(self.processes)) if worker != self.me]

        def call(store: Any) -> None:
            store.set(f"{_ROLL_CALL}/{self.ranks[self.me]}", "present")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            while any(self.is_alive(worker) is not False for worker in missing) and time.monotonic() < deadline:
                missing[:] = [worker for worker in missing if not store.check([f"{_ROLL_CALL}/{self.ranks[worker]}"])]
                time.sleep(0.05)

        self._ask(call, _ROLL_CALL_SECONDS + _STORE_SECONDS)
        gone = [worker for worker in missing if self.is_alive(worker) is False]
        return gone, [worker for worker in missing if worker not in gone]

    def is_alive(self, worker: int) -> bool | None:
        """Whether the process of a worker on this machine exists; None for a worker on another machine."""
        machine, process = self.processes[worker]
        if machine != this_machine():
            return None
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"  # killed, and not yet reaped by its parent

    def _ask(self, ask: Callable[[Any], T], seconds: float) -> T | None:
        """Ask the store. Return None if it does not answer in time: its process may be gone."""
        if self.store is None:
            return None
        try:
            return run_within(seconds, lambda: ask(self.store))
        except Exception:
            return None


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def this_machine() -> str:
    """An identifier that differs between machines, and between containers with process ids of their own.

    Machines may have equal hostnames, and the first process namespace has the same number on all of them, but every
    start of a kernel has an id of its own. If it cannot be read, no other worker counts as one of this machine.
    """
    try:
        return f"{socket.gethostname()} {os.readlink(_PID_NAMESPACE)} {_BOOT_ID.read_text().strip()}"
    except OSError:  # no /proc here
        return f"{socket.gethostname()} {uuid.uuid4()}"


def this_kernel() -> str:
    """An identifier of the running kernel, the same in all containers of a machine: they share its GPUs."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
