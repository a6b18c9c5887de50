"""Ends a failed run with one line and an exit status, instead of a traceback from every worker."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from dsgdac_accel import EXIT_STOPPED, NonFiniteError, StoppedBySignal, WorkerLostError
from dsgdac_accel.checkpoint import CheckpointError

GRACE_SECONDS = 3.0
"""How long the other workers wait for the first one to print. Launchers end them a fraction of a second after it."""


@contextmanager
def starting_up() -> Iterator[None]:
    """Report unusable settings, data and folders as one `error: ...` line, and exit with status 2.

    All workers usually fail alike. The first one prints at once, and the launcher ends the others before they print.
    A worker that fails alone prints after GRACE_SECONDS. No collective is used, so nobody waits for a failed worker.
    Errors of other types are bugs and keep their traceback.
    """
    try:
        yield
    except BrokenPipeError:
        _end_without_reader()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        rank = _rank()
        if rank:
            time.sleep(GRACE_SECONDS)
        _end(f"error: {f'worker {rank}: ' if rank else ''}{_lack_of_memory(error) or error}", 2)


@contextmanager
def training(report: Callable[[str], object]) -> Iterator[None]:
    """Report how training ended in one line, and exit with a status.

    1 after a lost worker, a diverged run, a failed save, an unreadable file or too little memory; 75 (EXIT_STOPPED)
    after a signal, with its checkpoint complete; 130 after an interrupt.

    Args:
        report: tells the other workers about a file that cannot be read or written.
    """
    try:
        yield
    except StoppedBySignal as stop:
        _end(str(stop) if _rank() == 0 else "", EXIT_STOPPED)
    except (WorkerLostError, NonFiniteError, CheckpointError) as error:
        _end(f"error: {error}", 1)
    except (OSError, RuntimeError, MemoryError) as error:
        problem = error if isinstance(error, OSError) else _lack_of_memory(error)
        if problem is None:
            raise
        report(f"worker {_rank()} ended: {problem}")
        _end(f"error: worker {_rank()}: {problem}", 1)
    except KeyboardInterrupt:
        _end("interrupted" if _rank() == 0 else "", 130)


def _lack_of_memory(error: BaseException) -> str | None:
    """Return the message for an allocation that failed; None for another error."""
    size = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
    if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or (size and "memory" in str(error))):
        return None
    asked = f": {size[1]} were asked for" if size else ""
    return f"memory does not suffice{asked}. Use a smaller model, batch or image_size."


def leave() -> NoReturn:
    """End a worker of a finished run with status 0, without the interpreter's teardown.

    The teardown of torch.distributed sometimes aborts ("terminate called without an active exception"), and the
    launcher would report a failed run.
    """
    _end("", 0)


@contextmanager
def quiet_ends() -> Iterator[None]:
    """For commands in a pipe: end quietly with 0 when the reader closes it (`| head`), with 130 on an interrupt."""
    try:
        yield
    except BrokenPipeError:
        _end_without_reader()
    except KeyboardInterrupt:
        _end("interrupted", 130)


def _end_without_reader() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush would fail on the closed pipe
    _end("", 0)


def _rank() -> int:
    """This worker's rank from the launcher; there may be no process group yet, or none any more."""
    return int(os.environ.get("RANK", "0"))


def _end(message: str, status: int) -> NoReturn:
    """Print the message in one line and end this process."""
    if message:
        print(" ".join(message.split()), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit and not sys.exit: the teardown of a process group that lost a worker sometimes aborts.
    os._exit(status)
