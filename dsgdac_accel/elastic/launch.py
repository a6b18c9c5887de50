"""Start the workers of one machine so that those left can go on when one of them is lost.

torchrun and `accelerate launch` end all workers of a machine as soon as one fails. Here the others go on, and the
rendezvous store lives in the launcher, so that no worker is a single point of failure: worker 0 can be lost, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dsgdac_accel.elastic.launch_plan import Launch, LaunchError
from dsgdac_accel.elastic.launched_processes import Worker, copy_to_console, guard, kill_group, log_file, start_worker

STOPPED = 75
"""Exit status of a worker that a signal stopped, with a complete checkpoint (EX_TEMPFAIL: try again later)."""

MISTAKE = 2
"""Exit status of a script that was asked for something impossible: with it, no other worker can go on either."""

DROPPED = "dsgdac_accel/dropped"
"""Key in the rendezvous store; with `/RANK`, of a worker that the others go on without. It is ended if it hangs."""

RUN_ID = "dsgdac"
"""Of torch's variables of the environment: tells workers that this launcher started them."""

MEETING = "dsgdac_accel/meeting"
"""Key in the rendezvous store, with `/RANK`: this worker waits for the others, or is about to."""

MET = "dsgdac_accel/met"
"""Key in the rendezvous store: all workers have met, and can go on by themselves when one of them is lost."""

STOP_SECONDS = 300.0
"""From the first SIGTERM to the launcher, in which workers can save and end; those that have not are then killed."""

_LOST_EARLY = "dsgdac_launch/lost_early"  # a worker that ended before all had met, on whichever machine
_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_PATIENCE_SECONDS = 300.0  # for the launcher of machine 0 to be there
_SILENCE_SECONDS = 30.0  # after which a machine without a sign of life counts as lost
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launch(plan: Launch) -> int:
    """Start the workers, wait for all of them, and return the exit status of the whole.

    SIGTERM, SIGINT and SIGUSR1 go on to the workers, whose end is then waited for, without a restart: for at most
    `STOP_SECONDS` after SIGTERM, and a second SIGINT ends them at once. Whatever happens, no process of theirs stays
    behind, also where the launcher itself is killed, except for one that left its worker's process group.

    A worker that ends before all have met ends the others, which would wait for it until their `timeout`.

    Returns 0 where the workers that ended last finished well, even if others were lost before, and 75 where they were
    stopped by a signal; else the status of the first that failed, 128 + n for signal n.

    Raises LaunchError before anything starts: the port is taken, machine 0 does not answer, more workers than GPUs.
    """
    run = _Run(plan)
    with run.signals():
        for attempt in range(plan.max_restarts + 1):
            status = run.once(attempt)
            if status in (0, MISTAKE) or run.received or attempt == plan.max_restarts:
                break
            _say(f"restarting all {plan.workers} workers ({attempt + 1} of {plan.max_restarts} restarts)")
    return status


class _Run:
    """One launch: its workers, the store, and the signals that came."""

    def __init__(self, plan: Launch) -> None:
        self.plan = plan
        self.received: list[int] = []
        self.workers: list[Worker] = []
        self._pending: list[int] = []  # signals that the workers have not been told of
        self._told_to_end = False
        self._ending = False  # whether the others are told to end because one failed
        self._in_vain = 0  # looks at which workers were found to wait for one that has ended
        self._stop_until = float("inf")  # when those that were told to stop are killed
        self._guard: Any = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self.received.append(number)
            self._pending.append(number)

        before = {number: signal.signal(number, note) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def once(self, attempt: int) -> int:
        """Start all workers and wait for their end."""
        plan = self.plan
        self.workers, self._ending, self._told_to_end, self._in_vain = [], False, False, 0
        with contextlib.ExitStack() as ended:
            store, port = self._open_store()
            self._guard = ended.enter_context(guard())
            ended.callback(self._end_all)
            first = plan.machine_index * plan.workers
            common = _environment(plan, port, attempt)
            echo = None
            for local in range(plan.workers):
                if self.workers and {signal.SIGTERM, signal.SIGINT} & set(self.received):
                    break  # those that are there are told to end
                own = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                log = log_file(plan, first + local)
                if log is not None:
                    ended.callback(log.close)
                    if first + local == 0:
                        echo = ended.enter_context(open(log.name, "rb"))
                        echo.seek(0, os.SEEK_END)
                self.workers.append(Worker(first + local, start_worker(plan, common | own, log)))
                self._tell_guard(self.workers[-1])
            status = self._wait(store, echo)
            if plan.machines > 1:
                self._leave_store(store)
        return status

    def _wait(self, store: Any, echo: Any) -> int:
        first_failure, last = 0, 0
        deadline: float | None = None  # of those that were told to end
        next_beat = 0.0
        while any(worker.status is None for worker in self.workers):
            time.sleep(_POLL_SECONDS)
            self._forward()
            ends = [worker.status or 0 for worker in self.workers if self._has_ended(worker)]
            if echo is not None:
                copy_to_console(echo)
            for status in sorted(ends, key=lambda status: status >= 0):  # others may have ended because one was killed
                first_failure = first_failure or status
            if ends:
                # Of those that end at the same time, one that finishes counts, and then one that was stopped.
                last = min(ends, key=lambda status: (status != 0, status != STOPPED))
            if self._ending and deadline is None:
                deadline = time.monotonic() + self.plan.grace
                self._told_to_end = True
                self._signal_all(signal.SIGTERM)
            if time.monotonic() > min(self._stop_until, float("inf") if deadline is None else deadline):
                self._kill_all()
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                self._ask_store(store)
        lost = [str(worker.rank) for worker in self.workers if worker.status]
        if first_failure and not last and deadline is None:
            plural = "s" if len(lost) > 1 else ""
            _say(f"finished without worker{plural} {', '.join(lost)}")
            return 0
        if last == STOPPED and deadline is None:
            return STOPPED
        return first_failure if first_failure >= 0 else 128 - first_failure

    def _has_ended(self, worker: Worker) -> bool:
        """Whether this worker has ended since the last look."""
        if worker.status is not None:
            return False
        process = worker.process
        # Not reaped yet, its number is still its own, so that its children can be ended by it.
        if not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        kill_group(process.pid)
        self._tell_guard(worker)
        worker.status = process.wait()
        by_us = self._told_to_end and worker.status in (-signal.SIGTERM, -signal.SIGKILL)
        self._ending |= worker.status == MISTAKE or (self.plan.stop_on_failure and worker.status not in (0, STOPPED))
        if worker.status and not by_us:
            left = sum(other.status is None for other in self.workers)
            others = (
                f"; {left} of {len(self.workers)} still run"
                if left and not (self._ending or self.received) and worker.status != STOPPED
                else ""
            )
            _say(f"worker {worker.rank} {_in_words(worker.status)}{others}")
        return True

    def _forward(self) -> None:
        while self._pending:
            number = self._pending.pop(0)
            _say(f"{signal.Signals(number).name} goes to all workers")
            self._signal_all(number)
            if number == signal.SIGTERM:
                self._stop_until = min(self._stop_until, time.monotonic() + STOP_SECONDS)
            if number == signal.SIGINT and self.received.count(signal.SIGINT) > 1:
                self._kill_all()

    def _ask_store(self, store: Any) -> None:
        """Tell machine 0 that this one is there, and end workers that were dropped or that wait in vain."""
        with contextlib.suppress(RuntimeError):  # the store is gone with machine 0
            if self.plan.machines > 1:
                store.add(f"dsgdac_launch/beats/{self.plan.machine_index}", 1)
            for worker in self.workers:
                if worker.status is None and store.check([f"{DROPPED}/{worker.rank}"]):
                    kill_group(worker.process.pid)
            if not self._ending and self._wait_in_vain(store):
                _say("a worker ended before all had met: the others wait in vain and are ended")
                self._ending = True

    def _wait_in_vain(self, store: Any) -> bool:
        """Whether a worker has ended before all have met, and others wait for it."""
        living = [worker.rank for worker in self.workers if worker.status is None]
        early = len(living) < len(self.workers) or store.check([_LOST_EARLY])
        if not (early and any(store.check([f"{MEETING}/{rank}"]) for rank in living)) or store.check([MET]):
            self._in_vain = 0
            return False
        self._in_vain += 1
        if self._in_vain < 2:  # they may just be meeting
            return False
        store.set(_LOST_EARLY, "")
        return True

    def _tell_guard(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):  # somebody ended it
            self._guard.stdin.write(f"{worker.process.pid}\n".encode())
            self._guard.stdin.flush()

    def _signal_all(self, number: int) -> None:
        for worker in self.workers:
            if worker.status is None:
                # Not to its group: processes of a DataLoader would die of it before the worker has saved.
                worker.process.send_signal(number)

    def _kill_all(self) -> None:
        for worker in self.workers:
            if worker.status is None:
                kill_group(worker.process.pid)

    def _end_all(self) -> None:
        self._kill_all()
        for worker in self.workers:
            worker.process.wait()
            if worker.status is None:
                self._tell_guard(worker)

    def _open_store(self) -> tuple[Any, int]:
        """The rendezvous store, kept by the launcher of machine 0, and its port."""
        from torch.distributed import TCPStore

        plan = self.plan
        host, port = plan.host_and_port
        if plan.machine_index == 0:
            try:
                # Reachable by others only where there are other machines.
                server = socket.create_server(("" if plan.machines > 1 else host, port))
            except OSError as error:
                raise LaunchError(f"port {port} cannot be used ({error.strerror}): give another address.") from None
            port = server.getsockname()[1]
            descriptor: int | None = server.detach()
            host = "127.0.0.1" if plan.machines > 1 else host
        else:
            self._await_machine_0(host, port)
            descriptor = None
        store = TCPStore(
            host, port, is_master=descriptor is not None, wait_for_workers=False, timeout=timedelta(seconds=10),
            master_listen_fd=descriptor,
        )  # fmt: skip
        if plan.machines > 1:
            me, shape = uuid.uuid4().hex, f"{plan.machines} machines with {plan.workers} workers each"
            first = store.compare_set("dsgdac_launch/shape", "", shape).decode()
            if first != shape:
                raise LaunchError(f"machine {plan.machine_index} was given {shape}, and another one {first}.")
            if store.compare_set(f"dsgdac_launch/machine/{plan.machine_index}", "", me).decode() != me:
                raise LaunchError(f"machine index {plan.machine_index} is taken: give each machine its own.")
        return store, port

    def _await_machine_0(self, host: str, port: int) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.received:
            try:
                socket.create_connection((host, port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"no launcher of machine 0 answered at {host}:{port} within {_PATIENCE_SECONDS:g} s ({error})."
                    ) from None
            time.sleep(1)
        raise KeyboardInterrupt

    def _leave_store(self, store: Any) -> None:
        """Machine 0 keeps the store until the others are done or silent; they say that they are done."""
        plan = self.plan
        with contextlib.suppress(RuntimeError):
            if plan.machine_index:
                store.set(f"dsgdac_launch/done/{plan.machine_index}", "")
                return
            seen = {other: (-1, time.monotonic()) for other in range(1, plan.machines)}
            while seen and not self.received:
                for other, (beats, since) in list(seen.items()):
                    now = store.add(f"dsgdac_launch/beats/{other}", 0)
                    if now != beats:
                        seen[other] = (now, time.monotonic())
                    if store.check([f"dsgdac_launch/done/{other}"]) or time.monotonic() - since > _SILENCE_SECONDS:
                        del seen[other]
                time.sleep(_POLL_SECONDS)


def _environment(plan: Launch, port: int, attempt: int) -> dict[str, str]:
    """What all workers of this machine are told."""
    import torch

    host, _ = plan.host_and_port
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // plan.workers)))
    if not torch.accelerator.is_available():
        variables.setdefault("ACCELERATE_USE_CPU", "true")
    gpus = torch.cuda.device_count() if variables.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true") else 0
    if 0 < gpus < plan.workers:
        raise LaunchError(
            f"{plan.workers} workers need a GPU each, and this machine has {gpus}. Let a process hold "
            f"several (workers_per_process), or set ACCELERATE_USE_CPU=true."
        )
    return variables | {
        "WORLD_SIZE": str(plan.workers * plan.machines), "LOCAL_WORLD_SIZE": str(plan.workers),
        "MASTER_ADDR": host, "MASTER_PORT": str(port),
        # torch's workers are then clients of a store that whoever launched them keeps.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
    }  # fmt: skip


def _say(line: str) -> None:
    print(f"dsgdac launch: {line}", file=sys.stderr, flush=True)


def _in_words(status: int) -> str:
    if status == STOPPED:
        return f"was stopped by a signal and has saved (status {status})"
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
