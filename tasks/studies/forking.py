"""Starts Python scripts in processes forked from one that has loaded their packages, which takes seconds, only once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.common.known_tasks import FOLDER

_LOCK = threading.Lock()
"""multiprocessing looks at all children whenever it starts one, so one thread at a time may start or look."""

_SLOW = ("torch._dynamo", "matplotlib.backends.backend_agg", "matplotlib.figure", "sklearn.datasets")


class ForkedScript:
    """A script under way, with the members of subprocess.Popen that a sweep uses.

    Args:
        command: interpreter, script and arguments. The script runs in the interpreter of this process.
        log: file for its output.
        variables: its environment.
    """

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        script = Path(command[1])
        known = [f"{FOLDER.name}.{script.stem}", *_SLOW] if script.parent.samefile(FOLDER) else []
        context.set_forkserver_preload([__name__, *known])  # for the first start
        self._process = context.Process(target=_run, args=(tuple(command), str(log), dict(variables)))
        with _LOCK:
            self._process.start()

    @property
    def pid(self) -> int:
        """Process id, which is also that of its session."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status; raise subprocess.TimeoutExpired if it takes longer."""
        begin = time.monotonic()
        while True:
            with _LOCK:
                status = self._process.exitcode
            if status is not None:
                return status
            if timeout is not None and time.monotonic() > begin + timeout:
                raise subprocess.TimeoutExpired("forked script", timeout)
            time.sleep(0.02)


def _run(command: Sequence[str], log: str, variables: Mapping[str, str]) -> None:
    os.setsid()
    # The process that this one is forked from may have been started in the background, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(variables)
    if "torch" in sys.modules and "OMP_NUM_THREADS" in variables:  # it has read the variable of another process
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
    sys.argv = list(command[1:])
    sys.path[0:0] = [str(Path(command[1]).parent)]
    runpy.run_path(command[1], run_name="__main__")
