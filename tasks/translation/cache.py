"""Files that one of several processes builds and all of them use."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

DAY = 86_400.0

BOOT = Path("/proc/sys/kernel/random/boot_id")


def digest_of(*parts: object) -> str:
    """Hex digest of plain values (what JSON can hold), for names of files that depend on them."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def build_once(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`folder/name`, a file or folder, made by `build(temporary_path)` where it is not there yet.

    Of several processes one builds while the others wait. The result is moved into place when it is complete, so what
    a failed or killed build leaves behind never counts; the next build clears it away. Where the file system has no
    locks, several processes may build at once: the first to finish gives the result.

    Raises OSError, naming the folder and `data.cache_dir`, if nothing can be written there, and what `build` raises.
    """
    finished = folder / name
    with _explained(folder):
        if finished.exists():
            return finished
        folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / f".{name}.lock") as locked:
        if not finished.exists():
            _remove_leftovers(folder, name, locked)
            _build(finished, build)
    return finished


def _build(finished: Path, build: Callable[[Path], None]) -> None:
    with _explained(finished.parent):
        workplace = tempfile.mkdtemp(".partial", f".{finished.name}.{_machine()}-", finished.parent)
    try:
        temporary = Path(workplace) / finished.name
        try:
            build(temporary)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _cannot_write(finished.parent, error) from error
            raise
        # A builder that no lock held back may have been faster. Processes may have mapped its result: leave it.
        if not finished.exists():
            try:
                os.replace(temporary, finished)
            except OSError:
                if not finished.exists():
                    raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[bool]:
    """Hold the lock, and say whether there is one: some network file systems have none."""
    # A soft lock (a file that exists or not) would outlive a killed holder on another machine and block for ever.
    lock = FileLock(lock_file, fallback_to_soft=False)
    try:
        lock.acquire()
    except (OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _remove_leftovers(folder: Path, name: str, locked: bool) -> None:
    """Remove what killed builds left, but nothing that a living one on a machine we share no lock with may use."""
    workplace = re.compile(rf"\.{re.escape(name)}\.([0-9a-f]+)-\w+\.partial")
    with suppress(OSError):
        for entry in folder.iterdir():
            match = workplace.fullmatch(entry.name)
            if match and ((locked and match.group(1) == _machine()) or time.time() - entry.stat().st_mtime > DAY):
                shutil.rmtree(entry, ignore_errors=True)


def _machine() -> str:
    """Tells running kernels apart: within one, file locks hold even where a network file system has none."""
    identity = BOOT.read_text() if BOOT.exists() else platform.node()
    return hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> OSError:
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return OSError(f"Prepared data must be written to {folder}; that failed ({reason}). Set data.cache_dir elsewhere.")
