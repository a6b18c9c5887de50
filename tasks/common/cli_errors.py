"""How a run ends early: one line that says why, instead of a traceback from every worker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from dsgdac_accel import EXIT_STOPPED, NonFiniteError, StoppedBySignal, WorkerLostError
from dsgdac_accel.checkpoint import CheckpointError

GRACE_SECONDS = 3.0
"""How long the other workers let the first one speak; launchers end them within a fraction of a second of its end."""


@contextmanager
def starting_up() -> Iterator[None]:
    """Report settings, data and folders that cannot be used as one `error: ...` line, and exit with status 2.

    The first worker speaks at once and its exit makes the launcher end the others. A worker that failed alone is not
    ended in its grace time and speaks for itself. No collective is involved, so nobody waits for one that failed.
    Errors of any other type are bugs and keep their traceback.
    """
    try:
        yield
    except BrokenPipeError:
        _leave_the_reader()
    except (ValueError, OSError, RuntimeError) as error:
        rank = _rank()
        if rank:
            time.sleep(GRACE_SECONDS)
        _end(f"error: {f'worker {rank}: ' if rank else ''}{error}", 2)


@contextmanager
def training(report: Callable[[str], object]) -> Iterator[None]:
    """Report a lost worker, a diverged run or a failed save in one line and exit with 1; of an interrupt with 130.

    A file that cannot be read or written is told the other workers by `report`.

    A run that a signal stopped, with its checkpoint complete, exits with 75.
    """
    try:
        yield
    except StoppedBySignal as stop:
        _end(str(stop) if _rank() == 0 else "", EXIT_STOPPED)
    except (WorkerLostError, NonFiniteError, CheckpointError) as error:
        _end(f"error: {error}", 1)
    except OSError as error:
        report(f"worker {_rank()} ended: {error}")
        _end(f"error: worker {_rank()}: {error}", 1)
    except KeyboardInterrupt:
        _end("interrupted" if _rank() == 0 else "", 130)


def leave() -> NoReturn:
    """End this process of several, whose work is done and written, with status 0.

    Not by returning: the interpreter's own teardown of what torch.distributed leaves behind aborts now and then
    ("terminate called without an active exception"), and the launcher would report a failed run.
    """
    _end("", 0)


@contextmanager
def quiet_ends() -> Iterator[None]:
    """For filters: a reader that has enough (`| head`) is no error, and an interrupt exits with 130."""
    try:
        yield
    except BrokenPipeError:
        _leave_the_reader()
    except KeyboardInterrupt:
        _end("interrupted", 130)


def _leave_the_reader() -> NoReturn:
    """Whoever read the output has enough, as `| head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at the end has nowhere to go
    _end("", 0)


def _rank() -> int:
    """From the launcher: there may be no process group yet, or no longer."""
    return int(os.environ.get("RANK", "0"))


def _end(message: str, status: int) -> NoReturn:
    """Say it in one line and end this process."""
    if message:
        print(" ".join(message.split()), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: tearing down a process group that lost a worker aborts now and then, with another status.
    os._exit(status)
