"""Runs a script in which faults happen: `python sabotage.py SCRIPT ARGUMENTS...`.

The environment variable SOAK_FAULTS holds a list of faults as JSON, of all workers; SOAK_DELAYS, if it is given, the
seed of random delays. Before a fault happens, the worker leaves the file `fault-<number>` in the folder SOAK_MARKS.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import random
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])

MOMENTS = {
    "starting up": ("dsgdac_accel.distributed.group", "WorkerGroup.__init__", ""),
    "loading a checkpoint": ("dsgdac_accel.checkpoint.saving", "load_checkpoint", ""),
    "between steps": ("tasks.common.checkpoints", "Checkpoints.save_if_due", ""),
    "in the exchange": ("dsgdac_accel.core.mixer", "Mixer.drain", ""),
    "averaging gradients": ("tasks.common.algorithms", "SynchronousAccelerator.backward", ""),
    "copying the state to save": ("dsgdac_accel.checkpoint.writer", "encode", ""),
    "writing its file": ("dsgdac_accel.checkpoint.writer", "safetensors_parts", ""),
    "before its file is renamed": ("dsgdac_accel.checkpoint.serialization", "os.fsync", ""),
    "having written its file": ("dsgdac_accel.checkpoint.writer", "PendingCheckpoint.leave_receipt", ""),
    "writing the manifest": ("dsgdac_accel.checkpoint.writer", "PendingCheckpoint.commit", ""),
    "finishing a checkpoint": ("dsgdac_accel.checkpoint.writer", "PendingCheckpoint.conclude", ""),
    "deleting an old checkpoint": ("dsgdac_accel.checkpoint.manifest", "shutil.rmtree", ""),
    "averaging the workers": ("dsgdac_accel.core.consensus", "Average.form", ""),
    "in calibration": ("dsgdac_accel.calibration", "_Moments.add", ""),
    "in evaluation": ("dsgdac_accel.distributed.group", "WorkerGroup.all_gather_object", "evaluating"),
    "in decoding": ("tasks.translation.decoding", "_translate_batch", ""),
    "writing the summary": ("tasks.common.output_dir", "OutputDir.write_summary", ""),
}
"""For each moment: a module, the function at whose call the fault happens, and the start of one of its arguments."""

FULL_AT = 8_000  # bytes of a file that still fit
ENDLESS = 600.0  # seconds; the harness ends the worker long before


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    """kill, kill_all, stop, pause, raise, disk_full, SIGTERM or SIGUSR1; others happen between two launches."""

    victim: int
    """Rank of the worker."""

    moment: str
    """A key of MOMENTS, or another name for faults that do not happen inside a worker."""

    call: int = 1
    """At which call of the moment's function, counted from 1."""

    seconds: float = 0.0
    """After how many seconds, where the moment is a time."""

    number: int = 0
    """Identifies the fault within a launch."""


class Injected(RuntimeError):
    """A bug in a training script."""


def as_json(faults: list[Fault]) -> str:
    """For SOAK_FAULTS."""
    return json.dumps([asdict(fault) for fault in faults])


def mark(fault: Fault) -> Path:
    """The file that shows that it happened."""
    return Path(os.environ["SOAK_MARKS"]) / f"fault-{fault.number}"


def happen(fault: Fault) -> None:
    """Cause the fault in this process."""
    mark(fault).touch()
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "kill_all":
        time.sleep(ENDLESS)  # the harness sees the mark and kills all
    if fault.kind in ("stop", "pause"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "raise":
        raise Injected(f"injected into worker {fault.victim}")
    if fault.kind == "disk_full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, resource.RLIM_INFINITY))
    if fault.kind in ("SIGTERM", "SIGUSR1"):
        os.kill(os.getpid(), getattr(signal, fault.kind))


def install(faults: list[Fault]) -> None:
    """Make every fault happen at its moment."""
    for fault in faults:
        if fault.moment in MOMENTS:
            module, name, word = MOMENTS[fault.moment]
            wrap(module, name, functools.partial(_at_call, fault, word))


def wrap(module: str, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace `module.name`, which may have dots, by `wrapper` of it."""
    *path, last = name.split(".")
    holder = functools.reduce(getattr, path, importlib.import_module(module))
    setattr(holder, last, wrapper(getattr(holder, last)))


def _at_call(fault: Fault, word: str, function: Any) -> Any:
    calls = [0]

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not word or any(isinstance(value, str) and value.startswith(word) for value in args):
            calls[0] += 1
            if calls[0] == fault.call:
                if function.__name__ == "safetensors_parts":
                    return _half(function(*args, **kwargs), fault)
                happen(fault)
        return function(*args, **kwargs)

    return wrapped


def _half(parts: Any, fault: Fault) -> Any:
    """The pieces of a file; the fault happens after two of them."""
    for number, part in enumerate(parts):
        if number == 2:
            happen(fault)
        yield part


def delay(seed: str) -> None:
    """Sleep now and then: between steps, and in the thread that writes checkpoints."""
    dice = random.Random(seed)
    lock = threading.Lock()

    def late(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with lock:
                seconds = dice.uniform(0, 0.1) if dice.random() < 0.15 else 0.0
            time.sleep(seconds)
            return function(*args, **kwargs)

        return wrapped

    wrap("tasks.common.checkpoints", "Checkpoints.save_if_due", late)
    wrap("dsgdac_accel.checkpoint.writer", "PendingCheckpoint.write", late)
    wrap("dsgdac_accel.checkpoint.writer", "PendingCheckpoint.commit_when_received", late)


def main() -> None:
    """Install this worker's faults, then run the script."""
    sys.path.insert(0, ROOT)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # for the harness to ask where a worker hangs
    rank = os.environ.get("RANK", "0")
    faults = [Fault(**fault) for fault in json.loads(os.environ.get("SOAK_FAULTS", "[]"))]
    install([fault for fault in faults if fault.victim == int(rank)])
    if "SOAK_DELAYS" in os.environ:
        delay(f"{os.environ['SOAK_DELAYS']} {rank}")
    script, sys.argv = sys.argv[1], sys.argv[1:]
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
