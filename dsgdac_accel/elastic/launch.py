"""Start the workers of one machine so that the survivors continue when one of them is lost.

torchrun and `accelerate launch` end all workers of a machine as soon as one fails. Here the others continue, and the
rendezvous store lives in the launcher, so that no worker is a single point of failure, worker 0 included.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from dsgdac_accel.distributed.launcher_protocol import EXIT_STOPPED, RUN_ID
from dsgdac_accel.elastic.launch_plan import Launch, LaunchError
from dsgdac_accel.elastic.launch_store import LaunchStore
from dsgdac_accel.elastic.worker_process import Worker, guard

STOP_SECONDS = 300.0
"""Workers that still run this long after the first SIGTERM to the launcher are killed. Until then they can save."""

_MISTAKE = 2  # exit status of a script that was asked for something impossible: then no other worker can run either
_GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL, where the launcher ends workers by itself
_POLL_SECONDS = 0.05
_STORE_SECONDS = 1.0  # between looks into the store
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launch(plan: Launch) -> int:
    """Start the workers, wait for all of them, and return the exit status of the run.

    SIGTERM, SIGINT and SIGUSR1 are forwarded to the workers, which then have time to end: `STOP_SECONDS` after SIGTERM,
    and until a second SIGINT. No process of the workers is left behind, even if the launcher is killed, except for one
    that left its worker's process group.

    A worker that ends before all are connected ends the others, which would wait for it until their `timeout`. So does
    a worker with status 2, a mistake in what was asked for.

    Returns 0 if the workers that ended last finished, even if others were lost before; 75 if a signal stopped them;
    else the status of the first that failed, 128 + n for signal n.

    Raises LaunchError before anything starts: the port is taken, machine 0 does not answer, more workers than GPUs.
    """
    return Run(plan).run()


class Run:
    """One launch: its workers, and the signals that came.

    Args:
        plan: what to start.
    """

    def __init__(self, plan: Launch) -> None:
        self.plan = plan
        self.workers: list[Worker] = []
        self.received: list[int] = []
        """Signals that this process got."""
        self._forwarded = 0  # how many of them the workers got
        self._ending = False  # whether the others are to end, because one failed
        self._told_to_end = False
        self._kill_at = float("inf")
        self._first_failure = 0
        self._last = 0  # status of the worker that ended last

    def run(self) -> int:
        """Start all workers, wait for their end, and return the exit status."""
        with self._signals_noted(), ExitStack() as ended:
            store = LaunchStore(self.plan, interrupted=lambda: bool(self.received))
            self._start_workers(store.port, ended)
            self._wait(store)
            store.leave()
        return self._exit_status()

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, lambda received, _: self.received.append(received)) for number in _FORWARDED
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_workers(self, port: int, ended: ExitStack) -> None:
        plan = self.plan
        watcher = ended.enter_context(guard())
        ended.callback(self._end_all)
        common = environment(plan, port)
        for local_rank in range(plan.workers):
            if self.workers and {signal.SIGTERM, signal.SIGINT} & set(self.received):
                break  # the workers that were started get the signal
            rank = plan.machine_index * plan.workers + local_rank
            variables = common | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            self.workers.append(Worker(rank, [*(["-m"] if plan.module else []), *plan.command], variables, watcher))

    def _end_all(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.end()

    # ---- while the workers run

    def _wait(self, store: LaunchStore) -> None:
        next_look = 0.0
        while any(worker.status is None for worker in self.workers):
            time.sleep(_POLL_SECONDS)
            self._forward_signals()
            self._note_ends()
            if self._ending and not self._told_to_end:
                self._told_to_end = True
                self._kill_at = min(self._kill_at, time.monotonic() + _GRACE_SECONDS)
                for worker in self.workers:
                    worker.send(signal.SIGTERM)
            if time.monotonic() > self._kill_at:
                for worker in self.workers:
                    worker.kill()
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _STORE_SECONDS
                with suppress(RuntimeError):  # the store is gone with machine 0
                    self._look_into(store)

    def _forward_signals(self) -> None:
        for number in self.received[self._forwarded :]:
            self._forwarded += 1
            _say(f"{signal.Signals(number).name} goes to all workers")
            for worker in self.workers:
                worker.send(number)
            if number == signal.SIGTERM:
                self._kill_at = min(self._kill_at, time.monotonic() + STOP_SECONDS)
            if self.received[: self._forwarded].count(signal.SIGINT) > 1:
                self._kill_at = 0.0

    def _note_ends(self) -> None:
        statuses = [self._note_end(worker) for worker in self.workers if worker.has_ended()]
        if statuses:
            # Of workers found ended at once, a killed one is the cause of the others' failures, and the best counts.
            failures = sorted((status for status in statuses if status), key=lambda status: status > 0)
            self._first_failure = self._first_failure or next(iter(failures), 0)
            self._last = min(statuses, key=lambda status: (status != 0, status != EXIT_STOPPED))

    def _note_end(self, worker: Worker) -> int:
        status = worker.status or 0
        self._ending |= status == _MISTAKE or (self.plan.stop_on_failure and status not in (0, EXIT_STOPPED))
        ended_by_launcher = self._told_to_end and status in (-signal.SIGTERM, -signal.SIGKILL)
        if status and not ended_by_launcher:
            running = sum(other.status is None for other in self.workers)
            others = f"; {running} of {len(self.workers)} still run"
            unhurt = running and not (self._ending or self.received) and status != EXIT_STOPPED
            _say(f"worker {worker.rank} {_in_words(status)}{others if unhurt else ''}")
        return status

    def _look_into(self, store: LaunchStore) -> None:
        """Kill workers that the others dropped, and end those that wait for a worker that will never connect."""
        store.beat()
        for worker in self.workers:
            if worker.status is None and store.was_dropped(worker.rank):
                worker.kill()
        if not self._ending and store.lost_early([worker.rank for worker in self.workers if worker.status is None]):
            _say("a worker ended before all were connected: the others, which wait for it, are ended")
            self._ending = True

    def _exit_status(self) -> int:
        if self._first_failure and not self._last and not self._told_to_end:
            lost = [str(worker.rank) for worker in self.workers if worker.status]
            _say(f"finished without worker{'s' if len(lost) > 1 else ''} {', '.join(lost)}")
            return 0
        if self._last == EXIT_STOPPED and not self._told_to_end:
            return EXIT_STOPPED
        return self._first_failure if self._first_failure >= 0 else 128 - self._first_failure


def environment(plan: Launch, port: int) -> dict[str, str]:
    """The environment variables of all workers on this machine."""
    host, _ = plan.host_and_port
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // plan.workers)))
    if not torch.accelerator.is_available():
        variables.setdefault("ACCELERATE_USE_CPU", "true")
    gpus = torch.cuda.device_count() if variables.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true") else 0
    if 0 < gpus < plan.workers:
        raise LaunchError(
            f"{plan.workers} workers need a GPU each, and this machine has {gpus}. Let a process hold several "
            f"(workers_per_process), or set ACCELERATE_USE_CPU=true."
        )
    return variables | {
        "WORLD_SIZE": str(plan.workers * plan.machines),
        "LOCAL_WORLD_SIZE": str(plan.workers),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
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
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
