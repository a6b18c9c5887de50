"""Real workers for tests, on gloo or NCCL: fresh processes, a file to meet at, no ports, a deadline for everything."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsgdac_accel.devices import BACKENDS

_CONTEXT = multiprocessing.get_context("forkserver")
_SPAWNING = multiprocessing.get_context("spawn")


@dataclass
class Outcome:
    """How one worker ended."""

    rank: int
    exit_code: int | None
    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def run_workers(
    function: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 90.0, device: str = "cpu"
) -> list[Any]:
    """What `function(rank, *args)` returned on each worker, in order of rank; any failure is raised here.

    With `device="cuda"` each worker has a GPU of its own, by rank, and they meet on NCCL.
    """
    return raise_failures(try_workers(function, num_workers, *args, timeout=timeout, device=device))


def raise_failures(outcomes: list[Outcome]) -> list[Any]:
    """What the workers returned; raises if any failed."""
    broken = [f"worker {o.rank} (exit code {o.exit_code}):\n{o.error}" for o in outcomes if o.error or o.exit_code != 0]
    if broken:
        raise AssertionError("\n".join(broken))
    return [outcome.value for outcome in outcomes]


def try_workers(
    function: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 90.0, device: str = "cpu"
) -> list[Outcome]:
    """Like `run_workers`, but reports failures. A worker past the deadline is killed and has exit code None."""
    return Launch(function, num_workers, *args, timeout=timeout, device=device).outcomes()


class Launch:
    """Workers that were started and run on their own, until `outcomes` waits for them."""

    def __init__(
        self, function: Callable[..., Any], num_workers: int, *args: Any, timeout: float = 90.0, device: str = "cpu"
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.deadline = time.monotonic() + timeout
        started = _spawn if device == "cuda" else fork
        self.processes = [
            started(_work, function, rank, num_workers, self.folder.name, device, args) for rank in range(num_workers)
        ]

    def outcomes(self, hanging: int | None = None) -> list[Outcome]:
        """How the workers ended; worker `hanging`, if it is given, is killed as soon as all others have ended."""
        with self.folder:
            found = {}
            for rank, process in sorted(enumerate(self.processes), key=lambda worker: worker[0] == hanging):
                process.join(0 if rank == hanging else max(0.0, self.deadline - time.monotonic()))
                hung = process.is_alive()
                if hung:
                    process.kill()
                    process.join()
                found[rank] = _outcome(rank, None if hung else process.exitcode, Path(self.folder.name))
            return [found[rank] for rank in range(len(self.processes))]

    def stop(self) -> None:
        """End workers that nobody waited for."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


class LaunchesAhead:
    """Launches of many cases that mostly wait: when one is asked for, the next ones are started as well."""

    def __init__(self, start: Callable[[Any], Launch], cases: Iterable[Any], ahead: int = 3) -> None:
        self.start, self.ahead = start, ahead
        self.waiting = list(cases)
        self.started: dict[Any, Launch] = {}

    def outcomes(self, case: Any, hanging: int | None = None) -> list[Outcome]:
        """How the workers of `case` ended, as `Launch.outcomes` gives it."""
        if case not in self.started:
            self._start(case)
        while self.waiting and len(self.started) <= self.ahead:
            self._start(self.waiting[0])
        return self.started.pop(case).outcomes(hanging)

    def _start(self, case: Any) -> None:
        self.waiting.remove(case)
        self.started[case] = self.start(case)

    def stop(self) -> None:
        """End what was started and not asked for."""
        for launch in self.started.values():
            launch.stop()


def fork(function: Callable[..., Any], *args: Any) -> Any:
    """A started process that calls `function(*args)`, forked from one that has imported all that tests import."""
    _CONTEXT.set_forkserver_preload(_preloaded())
    process = _CONTEXT.Process(target=function, args=args)
    process.start()
    return process


def _spawn(function: Callable[..., Any], *args: Any) -> Any:
    """As `fork`, afresh: once an import has asked CUDA for its devices, no forked process can use them."""
    process = _SPAWNING.Process(target=function, args=args)
    process.start()
    return process


def _preloaded() -> list[str]:
    """What the server that workers are forked from imports when it starts, at the first launch.

    The modules of all collected tests are among them: a worker that has to import its own test module, pytest and
    Transformers' Trainer first takes half a second of processor time, a forked one 20 ms. Task scripts also draw plots.
    """
    tests = sorted(name for name in sys.modules if name.startswith("tests."))
    plots = ["matplotlib.figure", "matplotlib.backends.backend_agg", "sklearn.datasets", "torch.utils.tensorboard"]
    tasks = plots if any(name.startswith("tests.tasks.") for name in tests) else []
    return ["torch._dynamo", "accelerate", "dsgdac_accel", "dsgdac_accel.trainer", *tasks, *tests]


def _outcome(rank: int, exit_code: int | None, folder: Path) -> Outcome:
    saved = folder / f"result_{rank}.pt"
    result = torch.load(saved, weights_only=False, map_location="cpu") if saved.exists() else {}
    if exit_code is None:
        result.setdefault("error", "still running at the deadline")
    return Outcome(rank, exit_code, **result)


def _work(function: Callable[..., Any], rank: int, num_workers: int, folder: str, device: str, args: tuple) -> None:
    started = time.monotonic()
    gc.freeze()  # a full collection, as `free_memory` makes, then skips what the imports left: 0.3 s each
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_workers), LOCAL_WORLD_SIZE=str(num_workers),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        ACCELERATE_USE_CPU=str(device == "cpu").lower(),
    )  # fmt: skip
    torch.set_num_threads(1)
    # As in a script; with the method inherited from here, every process of a DataLoader would import everything anew.
    multiprocessing.set_start_method("fork", force=True)
    result: dict[str, Any] = {}
    code = 0
    try:
        if device == "sham":
            from tests.sham_cuda import cuda  # only where the device was preloaded

            cuda.install()
        if device != "cpu":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        if num_workers > 1:
            backend = BACKENDS["cpu" if device == "cpu" else "cuda"]
            meeting = f"file://{folder}/store"
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_workers)
        result["value"] = function(rank, *args)
        if num_workers > 1:
            dist.barrier()  # nobody's sockets close while another one still reads
    except BaseException:
        result["error"], code = traceback.format_exc(), 1
    result["seconds"] = time.monotonic() - started
    torch.save(result, f"{folder}/result_{rank}.pt")
    os._exit(code)  # a failed worker must look dead to its peers at once
