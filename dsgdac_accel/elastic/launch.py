"""Start the workers of one machine so that the survivors continue when one of them is lost.

torchrun and `accelerate launch` end all workers of a machine as soon as one fails. Here the others continue, and the
rendezvous store lives in the launcher, so that no worker is a single point of failure, worker 0 included.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.distributed import TCPStore

from dsgdac_accel.devices import BACKENDS, cpu_is_demanded, default_device
from dsgdac_accel.distributed.launcher_protocol import CONNECTED, DROPPED, EXIT_STOPPED, RUN_ID, WAITING
from dsgdac_accel.elastic.worker_process import Worker

STOP_SECONDS = 300.0
"""Workers that still run this long after the first SIGTERM to the launcher are killed. Until then they can save."""

_HOST = "127.0.0.1"
_MOST_WORKERS = 1024
_MISTAKE = 2  # exit status of a script that was asked for something impossible: then no other worker can run either
_GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL, where the launcher ends workers by itself
_POLL_SECONDS = 0.05
_STORE_SECONDS = 1.0  # between looks into the store
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launch(command: Sequence[str], workers: int, module: bool = False, stop_on_failure: bool = False) -> int:
    """Start the workers, wait for all of them, and return the exit status of the run.

    SIGTERM, SIGINT and SIGUSR1 are forwarded to the workers, which then have time to end: `STOP_SECONDS` after SIGTERM,
    and until a second SIGINT. No process of the workers is left behind, even if the launcher is killed, except for one
    that left its worker's process group.

    A worker that ends before all are connected ends the others, which would wait for it until their `timeout`. So does
    a worker with status 2, a mistake in what was asked for.

    Args:
        command: a script, or a module, and its arguments.
        workers: number of processes, 1 to 1024.
        module: whether `command` starts with a module, as after `python -m`.
        stop_on_failure: whether the others are ended when one fails, as torchrun does.

    Returns:
        0 if the workers that ended last finished, even if others were lost before; 75 if a signal stopped them; else
        the status of the first that failed, 128 + n for signal n.

    Raises ValueError before anything starts: no such script or module, too many workers, or more than GPUs.
    """
    check(command, workers, module)
    variables = environment(workers)
    server = socket.create_server((_HOST, 0))  # a TCPStore by itself would be reachable from other machines
    port = server.getsockname()[1]
    store = TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    variables["MASTER_PORT"] = str(port)
    return Run(store, stop_on_failure).run(["-m", *command] if module else command, variables, workers)


class Run:
    """One launch: its workers, and the signals that came. `store` is the rendezvous store of the workers."""

    def __init__(self, store: TCPStore, stop_on_failure: bool = False) -> None:
        self.store = store
        self.stop_on_failure = stop_on_failure
        self.workers: list[Worker] = []
        self.received: list[int] = []
        """Signals that this process got."""
        self._ending = False  # the launcher ends the workers, since one failed
        self._kill_at = float("inf")
        self._first_failure = 0
        self._last = 0  # status of the worker that ended last
        self._early_looks = 0  # looks in a row at which workers waited for one that has ended

    def run(self, arguments: Sequence[str], variables: dict[str, str], workers: int) -> int:
        """Start all workers, wait for their end, and return the exit status."""
        before = {
            number: signal.signal(number, lambda received, _: self.received.append(received)) for number in _FORWARDED
        }
        try:
            for rank in range(workers):
                if rank and {signal.SIGTERM, signal.SIGINT} & set(self.received):
                    break  # the workers that were started get the signal
                self.workers.append(Worker(rank, arguments, variables | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}))
            self._wait()
        finally:
            for worker in self.workers:
                worker.kill()
            for worker in self.workers:
                worker.end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._exit_status()

    def _wait(self) -> None:
        forwarded, next_look = 0, 0.0
        while self._running():
            time.sleep(_POLL_SECONDS)
            while forwarded < len(self.received):
                forwarded += 1
                self._forward(self.received[:forwarded])
            self._note_ends()
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _STORE_SECONDS
                self._look_into_store()
            if time.monotonic() > self._kill_at:
                for worker in self.workers:
                    worker.kill()

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.status is None]

    def _send(self, number: int, seconds: float) -> None:
        """Send a signal to all workers, which have so many seconds to end."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)
        for worker in self.workers:
            worker.send(number)

    def _forward(self, received: Sequence[int]) -> None:
        """Forward the last of these signals."""
        number = received[-1]
        _say(f"{signal.Signals(number).name} goes to all workers")
        seconds = STOP_SECONDS if number == signal.SIGTERM else float("inf")
        self._send(number, 0.0 if received.count(signal.SIGINT) > 1 else seconds)

    def _note_ends(self) -> None:
        ended = [worker for worker in self.workers if worker.has_ended()]
        if not ended:
            return
        # If several workers have ended at once, a killed one is the cause of the other failures, and the best counts.
        statuses = [worker.status or 0 for worker in ended]
        failures = sorted((status for status in statuses if status), key=lambda status: status > 0)
        self._first_failure = self._first_failure or next(iter(failures), 0)
        self._last = min(statuses, key=lambda status: (status != 0, status != EXIT_STOPPED))
        end_others = any(status == _MISTAKE or (self.stop_on_failure and status != EXIT_STOPPED) for status in failures)
        for worker, status in zip(ended, statuses, strict=True):
            ended_by_launcher = self._ending and status in (-signal.SIGTERM, -signal.SIGKILL)
            if status and not ended_by_launcher:
                running = len(self._running())
                unhurt = running and not (self._ending or end_others or self.received) and status != EXIT_STOPPED
                others = f"; {running} of {len(self.workers)} still run" if unhurt else ""
                _say(f"worker {worker.rank} {_in_words(status)}{others}")
        if end_others:
            self._end_others()

    def _end_others(self) -> None:
        if not self._ending:
            self._ending = True
            self._send(signal.SIGTERM, _GRACE_SECONDS)

    def _look_into_store(self) -> None:
        """Kill workers that the others dropped, and end those that wait for a worker that will never connect."""
        running = self._running()
        for worker in running:
            if self.store.check([f"{DROPPED}/{worker.rank}"]):
                worker.kill()
        waiting = any(self.store.check([f"{WAITING}/{worker.rank}"]) for worker in running)
        early = len(running) < len(self.workers) and waiting and not self.store.check([CONNECTED])
        self._early_looks = self._early_looks + 1 if early else 0
        if self._early_looks > 1 and not self._ending:  # at the first look they may just be connecting
            _say("a worker ended before all were connected: the others, which wait for it, are ended")
            self._end_others()

    def _exit_status(self) -> int:
        if self._first_failure and not self._last and not self._ending:
            lost = [str(worker.rank) for worker in self.workers if worker.status]
            _say(f"finished without worker{'s' if len(lost) > 1 else ''} {', '.join(lost)}")
            return 0
        if self._last == EXIT_STOPPED and not self._ending:
            return EXIT_STOPPED
        return self._first_failure if self._first_failure >= 0 else 128 - self._first_failure


def check(command: Sequence[str], workers: int, module: bool) -> None:
    """Raise ValueError unless the launch is possible; the arguments are those of `launch`."""
    if sys.platform != "linux":
        raise ValueError("dsgdac launch needs Linux. Use torchrun or accelerate launch here.")
    if not 1 <= workers <= _MOST_WORKERS:
        raise ValueError(
            f"workers must be in 1..{_MOST_WORKERS}, since each is a process here; got {workers}. For more, let each "
            f"process hold several: gossip.workers_per_process."
        )
    if not command:
        raise ValueError("name the script to launch, after the options.")
    name = command[0]
    if module:
        package = name.partition(".")[0]
        if not (PathFinder.find_spec(package, [os.getcwd()]) or find_spec(package)):
            raise ValueError(f"there is no module {name}. Install it, or give the path of a script without -m.")
    elif not Path(name).is_file():
        raise ValueError(f"there is no script {name} in {os.getcwd()}. For a module give -m.")


def environment(workers: int) -> dict[str, str]:
    """The environment of the workers, without their ranks and the port. Raises ValueError if there are too few GPUs."""
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    device = default_device()
    if device.type == "cpu" or (workers > 1 and device.type not in BACKENDS):
        variables.setdefault("ACCELERATE_USE_CPU", "true")
    gpus = 0 if cpu_is_demanded(variables) else torch.cuda.device_count()
    if 0 < gpus < workers:
        raise ValueError(
            f"{workers} workers need a GPU each, and this machine has {gpus}. Let a process hold several "
            f"(workers_per_process), or set ACCELERATE_USE_CPU=true."
        )
    return variables | {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": _HOST,
        # Makes torch's workers clients of a store that their launcher keeps.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _say(line: str) -> None:
    print(f"dsgdac launch: {line}", file=sys.stderr, flush=True)


def _in_words(status: int) -> str:
    if status == EXIT_STOPPED:
        return f"was stopped by a signal and has saved (status {status})"
    if status > 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    return f"was ended by {names.get(-status, f'signal {-status}')}"
