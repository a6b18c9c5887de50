"""Launches a task, and watches its workers while they are killed, stopped and delayed.

Like a launcher's agent, the harness keeps the rendezvous store. Unlike an agent, it does not end the other workers when
one fails, since what they do by themselves is tested.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tasks.cifar  # so that the server that workers are forked from has imported everything
import tasks.wmt14  # noqa: F401
from tests.launching import ROOT, _run_script
from tests.soak import sabotage
from tests.soak.sabotage import Fault, as_json
from tests.workers import fork

AFTER = "after a random time"
"""Moment of the faults that the harness causes from outside."""

_TICK = 0.02


class Launch:
    """The workers of one launch.

    Args:
        script: a file of `tasks/`.
        arguments: for it.
        workers: how many.
        folder: an empty folder for what the harness needs.
        cwd: where the script runs.
        faults: what is to happen to it.
        delays: seed of random delays; None for none.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        workers: int,
        folder: Path,
        cwd: Path,
        faults: Sequence[Fault] = (),
        delays: str | None = None,
    ) -> None:
        self.workers = workers
        self.faults = list(faults)
        self.folder = folder
        folder.mkdir(parents=True)
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        variables = {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers),
            "SOAK_FAULTS": as_json(self.faults), "SOAK_MARKS": str(folder), "ACCELERATE_USE_CPU": "true",
        } | ({} if delays is None else {"SOAK_DELAYS": delays})  # fmt: skip
        program = [sabotage.__file__, str(ROOT / "tasks" / script), *arguments]
        self.started = time.monotonic()
        self.processes: list[Any] = []
        for rank in range(workers):
            outputs = [str(folder / f"{stream}{rank}") for stream in ("out", "err")]
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(fork(_run_script, program, str(cwd), own, outputs))
        self.happened: dict[int, float] = {}
        """When each fault was seen, by its number."""
        self.ended: dict[int, float] = {}
        """When each worker ended."""
        self.handled: set[int] = set()

    # ---- while the workers run

    def running(self) -> list[int]:
        """The workers that have not ended."""
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            # `exitcode` alone would be late: it is read from a pipe that children of the worker keep open.
            if rank not in self.ended and (process.exitcode is not None or _state(process.pid) in "ZX"):
                self.ended[rank] = now
        return [rank for rank in range(self.workers) if rank not in self.ended]

    def tick(self) -> None:
        """Wait a little, and cause the faults that happen from outside."""
        alive = self.running()
        if alive:
            multiprocessing.connection.wait([self.processes[rank].sentinel for rank in alive], _TICK)
        now = time.monotonic()
        for fault in self.faults:
            if fault.moment == AFTER and fault.number not in self.happened and now > self.started + fault.seconds:
                self.happened[fault.number] = now
                if fault.kind == "kill":
                    self.send(fault.victim, signal.SIGKILL)
                elif fault.kind in ("stop", "pause"):
                    self.send(fault.victim, signal.SIGSTOP)
                elif fault.kind in ("SIGTERM", "SIGUSR1"):
                    self.send(fault.victim, getattr(signal, fault.kind))
            if fault.number not in self.happened and (self.folder / f"fault-{fault.number}").exists():
                self.happened[fault.number] = now
            seen = self.happened.get(fault.number)
            if seen is None or fault.number in self.handled:
                continue
            if fault.kind == "kill_all":
                for rank in random.sample(range(self.workers), self.workers):
                    self.send(rank, signal.SIGKILL)
            if fault.kind == "pause":
                if now < seen + fault.seconds:
                    continue
                self.send(fault.victim, signal.SIGCONT)
            self.handled.add(fault.number)

    def send(self, rank: int, what: signal.Signals) -> None:
        """A signal to one worker, if it is still there."""
        if rank in self.running():
            os.kill(self.processes[rank].pid, what)

    # ---- the end

    def close(self) -> list[int]:
        """Kill the workers that still run, and return them."""
        left = self.running()
        for rank in left:
            self.send(rank, signal.SIGUSR2)  # they write where they are
        if left:
            time.sleep(0.5)
        for rank, process in enumerate(self.processes):
            if rank in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join()
        del self.store
        return left

    def children_gone(self, patience: float) -> float | None:
        """Seconds until the processes that workers had started were gone too; None if some stayed."""
        begun = time.monotonic()
        sessions = {process.pid for process in self.processes}
        while _alive_in(sessions):
            if time.monotonic() > begun + patience:
                return None
            time.sleep(0.1)
        return time.monotonic() - begun

    def exit_codes(self) -> list[int | None]:
        """Exit code of each worker, negative for a signal."""
        return [process.exitcode for process in self.processes]

    def text(self, rank: int, stream: str = "err") -> str:
        """The output of a worker."""
        file = self.folder / f"{stream}{rank}"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _state(process: int) -> str:
    """The kernel's letter for the state of a process; X if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _alive_in(sessions: set[int]) -> list[int]:
    """Processes of these sessions, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
    return found
