"""Cached files that one of several processes builds and all use."""

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
    """Hex digest of JSON values, for the names of files that depend on them."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def build_once(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return `folder/name`, a file or folder, after building it by `build(temporary_path)` if it does not exist.

    One process builds while the others wait. The result is moved into place when it is complete, so a failed or killed
    build leaves only temporary files, which the next build removes. On a file system without locks several processes
    may build at once; the first result counts.

    Raises OSError, naming the folder and `data.cache_dir`, if it cannot be written, and whatever `build` raises.
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
        # Without locks another builder may have finished first. Processes may have mapped its result, so keep it.
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
    """Hold the lock inside the context. Yields False on a file system without locks, such as some network ones."""
    # A soft lock (the existence of a file) would outlive a killed holder on another machine and block forever.
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
    """Remove what killed builds left: our machine's if we hold the lock, and other machines' after a day."""
    workplace = re.compile(rf"\.{re.escape(name)}\.([0-9a-f]+)-\w+\.partial")
    with suppress(OSError):
        for entry in folder.iterdir():
            match = workplace.fullmatch(entry.name)
            if match and ((locked and match.group(1) == _machine()) or time.time() - entry.stat().st_mtime > DAY):
                shutil.rmtree(entry, ignore_errors=True)


def _machine() -> str:
    """Identify the running kernel: within one, file locks work even on network file systems without locks."""
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
