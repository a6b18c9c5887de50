"""What workers tell each other of a failure, through the rendezvous store: connections cannot be trusted any more."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsgdac_accel.elastic.launch import DROPPED, MEETING, MET, RUN_ID

_FIRST_FAILURE = "dsgdac_accel/first_failure"  # keys in the store
_REPORT_OF = "dsgdac_accel/report_of"
_ROLL_CALL = "dsgdac_accel/roll_call"  # one for all: survivors may notice the loss in different places
_STORE_PATIENCE = 3.0  # seconds: the store may live in the very process that was lost
_ANNOUNCE_SECONDS = 10.0
_CHAIN_SECONDS = 2.5  # two waits that began in one step run out about as far apart
_ROLL_CALL_SECONDS = 4.0  # survivors notice a loss at different moments; longer than they are apart


class FailureReports:
    """Reports of this worker and to it.

    Args:
        number: of this worker.
        processes: machine and process of each worker, by its number, this one's included.
    """

    def __init__(self, number: int, processes: Mapping[int, tuple[str, int]]) -> None:
        self.number = number
        self.processes = dict(processes)
        self.store: Any = dist.distributed_c10d._get_default_store() if len(processes) > 1 else None

    def write(self, message: str) -> str:
        """Tell the others why this run ends; returns the first message that any worker wrote."""
        first = [message]

        def write(store: Any) -> None:
            # compare_set answers with the value that is there now: ours, or an earlier worker's.
            first[0] = store.compare_set(_FIRST_FAILURE, "", message).decode() or message
            store.set(f"{_REPORT_OF}/{self.number}", message)

        self._ask(write, _STORE_PATIENCE)
        return first[0]

    def first(self) -> str:
        """What the first worker that noticed a failure wrote; empty if none did yet."""
        found = [""]

        def read(store: Any) -> None:
            if store.check([_FIRST_FAILURE]):
                found[0] = store.get(_FIRST_FAILURE).decode()

        self._ask(read, _STORE_PATIENCE)
        return found[0]

    def of(self, number: int) -> str:
        """What this worker wrote before it ended, or writes within a few seconds; empty if nothing."""
        found = [""]

        def read(store: Any) -> None:
            key = f"{_REPORT_OF}/{number}"
            deadline = time.monotonic() + _CHAIN_SECONDS
            while not store.check([key]) and time.monotonic() < deadline and self.lives(number) is not False:
                time.sleep(0.05)
            if store.check([key]):
                found[0] = store.get(key).decode()

        self._ask(read, _CHAIN_SECONDS + _STORE_PATIENCE)
        return found[0]

    def missing(self) -> tuple[list[int], list[int]]:
        """Who does not sign within a few seconds, where everybody takes part: those that are gone, and the others.

        A connection that broke may be noticed by some long before others, so one that is still there is lost only where
        it is silence that was noticed.
        """
        missing = [number for number in self.processes if number != self.number]

        def call(store: Any) -> None:
            store.set(f"{_ROLL_CALL}/{self.number}", "present")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            while any(self.lives(number) is not False for number in missing) and time.monotonic() < deadline:
                missing[:] = [number for number in missing if not store.check([f"{_ROLL_CALL}/{number}"])]
                time.sleep(0.05)

        self._ask(call, _ROLL_CALL_SECONDS + _STORE_PATIENCE)
        gone = [number for number in missing if not self.lives(number)]
        return gone, [number for number in missing if number not in gone]

    def dismiss(self, numbers: Sequence[int]) -> None:
        """Tell the launcher which workers the others go on without: one that hangs it need not wait for."""
        self._tell_launcher(*(f"{DROPPED}/{number}" for number in numbers))

    def all_met(self) -> None:
        """Tell the launcher that from now on the workers notice by themselves if one is lost."""
        self._tell_launcher(MET)

    def _tell_launcher(self, *keys: str) -> None:
        def write(store: Any) -> None:
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            for key in keys:
                store.set(key, "")

        self._ask(write, _STORE_PATIENCE)

    def lives(self, number: int) -> bool | None:
        """Whether the process of a worker on this machine is there; None for one on another machine."""
        machine, process = self.processes[number]
        if machine != this_machine():
            return None
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"  # killed, and only not collected yet by whoever started it

    def _ask(self, ask: Callable[[Any], None], patience: float) -> None:
        """Use the store, unless it is gone with the worker that kept it."""
        if self.store is None:
            return

        def attempt() -> None:
            with contextlib.suppress(Exception):
                ask(self.store)

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(patience)


def announce() -> None:
    """Tell `dsgdac launch`, if it started this process, that this worker is about to wait for all others."""
    variables = os.environ
    if variables.get("TORCHELASTIC_RUN_ID") != RUN_ID or int(variables.get("WORLD_SIZE", "1")) == 1:
        return
    with contextlib.suppress(RuntimeError):  # whoever needs the store says that it is gone
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        store = dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANNOUNCE_SECONDS)
        )
        store.set(f"{MEETING}/{variables['RANK']}", "")


def this_machine() -> str:
    """What tells machines, and containers with processes of their own, apart."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc here
        return f"{socket.gethostname()} {uuid.uuid4()}"
