"""The manifest of a checkpoint, and folders of checkpoints: which is complete, which is the newest, which to delete."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.checkpoint.serialization import (
    FORMAT,
    LOAD_ANOTHER,
    PARTIAL,
    CheckpointError,
    SavedFile,
    reader_of,
)
from dsgdac_accel.version import __version__

logger = logging.getLogger(__name__)

MANIFEST = "gossip.json"
WORKERS = "workers"
RECEIPT = ".receipt"
"""Suffix of the file that reports a worker's file as written; it exists only while a checkpoint is being saved."""

# Names are matched as a whole, so that a manifest from elsewhere cannot point outside its folder.
_STEM = r"workers/(?P<owner>\d{5,}|common)(?:-(?P<generation>\d+))?(?:/(?P<shard>\d{3,}))?"
_SAVED = re.compile(rf"{_STEM}\.safetensors")
_OURS = re.compile(rf"{_STEM}(\.safetensors|{re.escape(RECEIPT)})({re.escape(PARTIAL)})?")
"""Names of the files that saving writes, relative to the checkpoint's folder."""


class WorkerCountError(CheckpointError):
    """A checkpoint of `saved` workers cannot be loaded by `launched` workers."""

    def __init__(self, folder: Path, saved: int, launched: int) -> None:
        self.saved = saved
        self.launched = launched
        super().__init__(
            f"the checkpoint {folder} holds the state of {saved} workers, but {launched} were launched. Launch "
            f"{saved}, or start all workers from the average of the saved ones (on_other_worker_count='deployed')."
        )


# ---- one checkpoint


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest."""

    workers: int
    step: int
    """Optimizer steps done."""
    facts: dict[str, Any]
    """Plain values from the caller: topology, configuration, ..."""
    files: tuple[SavedFile, ...]
    """State of worker 0, 1, ...; of a worker that is sharded, that of its ranks one after another."""
    common_files: tuple[SavedFile, ...] = ()
    """The tensors that `files` have references to, by digest: one file, or one for each rank of a worker that has
    some."""
    shards: int = 0
    """Ranks of each worker, which have a file each; 0 if a worker is one process without a device mesh."""
    library: str = __version__

    @property
    def ranks(self) -> int:
        """Processes of each worker."""
        return max(1, self.shards)

    def files_of(self, worker: int) -> tuple[SavedFile, ...]:
        """Return the files of a worker, one for each of its ranks."""
        return self.files[worker * self.ranks : (worker + 1) * self.ranks]

    def common_file_of(self, shard: int) -> SavedFile | None:
        """Return the file of the common tensors that the ranks at one place of all workers share, if any is stored."""
        return next((file for file in self.common_files if _place_of(file) == ("common", shard)), None)

    def content(self) -> dict[str, Any]:
        """Return what the manifest's file holds."""
        content = asdict(self)
        shards = content.pop("shards")
        return content | {"mesh": {"dp_shard": shards} if shards else {}, "format": FORMAT}


def _lack(folder: Path) -> str:
    """Return why a folder without a manifest is no checkpoint, and the way out."""
    if not folder.exists():
        return f"does not exist. {LOAD_ANOTHER}"
    if any(folder.glob("random_states_*.pkl")):
        return (
            "is a checkpoint of plain Accelerate, without the state of the workers. Load its weights into the model "
            "before `prepare`, or go on with Accelerator."
        )
    return f"holds no complete checkpoint: {MANIFEST}, which is written last, is missing. {LOAD_ANOTHER}"


def read_manifest(folder: Path | str) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: the folder has none, or it is damaged or of another format.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} {_lack(Path(folder))}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}). {LOAD_ANOTHER}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). {LOAD_ANOTHER}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        wrote = f", written by dsgdac_accel {content['library']}" if found and "library" in content else ""
        raise CheckpointError(
            f"{path} has format {found}{wrote}; this is {__version__}, which reads format {FORMAT}. Load it with "
            f"{reader_of(found)}."
        )
    try:
        return _parsed(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). {LOAD_ANOTHER}") from error


def _parsed(content: dict[str, Any]) -> Manifest:
    """Return the manifest that a file holds, or raise an error if this library does not write such a one."""
    mesh = content.pop("mesh")
    if mesh.keys() - {"dp_shard"} or mesh.get("dp_shard", 1) < 1:
        raise ValueError(f"its mesh is {mesh}, and only 'dp_shard' may split a worker")
    files, common_files = (tuple(SavedFile(**file) for file in content[key]) for key in ("files", "common_files"))
    rest = {key: value for key, value in content.items() if key != "format"}
    rest |= {"files": files, "common_files": common_files}
    manifest = Manifest(**rest, shards=mesh.get("dp_shard", 0))
    if any(type(number) is not int for number in (manifest.workers, manifest.step, manifest.shards)):
        raise ValueError("workers, step and mesh are not as this library writes them")
    ranks = manifest.ranks  # both numbers may be forged and huge, the list of files may not
    places = [(f"{number // ranks:05d}", number % ranks) for number in range(len(files))]
    if not 0 < manifest.workers * ranks == len(files) or list(map(_place_of, files)) != places:
        raise ValueError("its files are not those of its workers")
    if not isinstance(manifest.facts, dict):
        raise ValueError("its facts are not as this library writes them")
    if any(place is None or place[0] != "common" for place in map(_place_of, common_files)):
        raise ValueError("its common files are not as this library writes them")
    return manifest


def _place_of(file: SavedFile) -> tuple[str, int] | None:
    """Return the number of the worker, or "common", and the rank within it; None for another name."""
    match = _SAVED.fullmatch(file.name)
    return match and (match["owner"], int(match["shard"] or 0))


def complete_manifest(folder: Path | str) -> Manifest:
    """Read the manifest and check that every file it names exists in full size. Loading checks the contents.

    Raises:
        CheckpointError: the checkpoint is incomplete, with the reason.
    """
    manifest = read_manifest(folder)
    for file in (*manifest.files, *manifest.common_files):
        path = Path(folder) / file.name
        try:
            size = path.stat().st_size
        except OSError as error:  # also if another process deletes the checkpoint right now
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
        if size != file.size:
            raise CheckpointError(f"{path} has {size:,} bytes, and {file.size:,} were written.")
    return manifest


def is_complete(folder: Path | str) -> bool:
    """Return whether the manifest and every file it names exist in full size. Loading checks the contents."""
    try:
        complete_manifest(folder)
    except CheckpointError:
        return False
    return True


def is_leftover(folder: Path) -> bool:
    """Return whether `folder` holds only what an interrupted save left."""
    everything = [path for path in (folder / WORKERS).rglob("*") if not path.is_dir()]
    ours = (folder / WORKERS).is_dir() and set(everything) == set(our_files(folder))
    return ours and not (folder / MANIFEST).exists()


def our_files(folder: Path) -> dict[Path, int]:
    """Return the files in a checkpoint's folder that saving wrote, complete or not, with their generations."""
    matches = {path: _OURS.fullmatch(path.relative_to(folder).as_posix()) for path in (folder / WORKERS).rglob("*")}
    return {path: int(match["generation"] or 0) for path, match in matches.items() if match}


def delete_files(files: Iterable[Path]) -> None:
    """Delete files, and folders of workers that are empty then. What permissions forbid stays."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        if file.parent.name != WORKERS:
            with contextlib.suppress(OSError):  # not empty
                file.parent.rmdir()


def delete_checkpoint(folder: Path) -> bool:
    """Delete a checkpoint. The manifest goes first, so that an interrupted deletion leaves no complete-looking one.

    A symbolic link is deleted without its target. Returns False, and leaves the checkpoint complete, where permissions
    forbid the deletion.
    """
    try:
        (folder if folder.is_symlink() else folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


# ---- folders of checkpoints


def complete_checkpoints(parent: Path | str, pattern: str) -> list[tuple[int, Path]]:
    """Return steps and folders of the complete checkpoints, the oldest first."""
    found = []
    for folder in _folders(parent, pattern):
        try:
            found.append((complete_manifest(folder).step, folder))
        except CheckpointError:
            continue
    return sorted(found)


def newest_checkpoint(parent: Path | str, pattern: str = "*") -> Path | None:
    """Return the complete checkpoint of the largest step among the folders of `parent` that match `pattern`.

    Logs a warning for each newer one that is unreadable. Returns None where no checkpoint was ever completed.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged or of another version. A run that took this for
            none would start anew and overwrite them.
    """
    return newest_readable(sorted(_folders(parent, pattern), key=_step))


def newest_readable(folders: Sequence[Path]) -> Path | None:
    """Return the last complete checkpoint of `folders`, the oldest first. Logs and raises as `newest_checkpoint`."""
    skipped: list[tuple[Path, CheckpointError]] = []
    for folder in reversed(folders):
        try:
            complete_manifest(folder)
        except CheckpointError as error:
            if (folder / MANIFEST).exists() or is_leftover(folder):
                skipped.append((folder, error))
            continue
        for _, problem in skipped:
            reason = str(problem).removesuffix(f" {LOAD_ANOTHER}")
            logger.warning("skipped an unreadable checkpoint: %s Using the older %s.", reason, folder)
        return folder
    for folder, problem in skipped:
        if (folder / MANIFEST).exists():
            raise problem
    return None


def prune_checkpoints(parent: Path | str, keep: int, pattern: str = "*", saved: Path | None = None) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `keep`, and what interrupted saves before the newest one left.

    Call it on one worker after a save is complete. Deletes nothing where no checkpoint is complete.

    Args:
        parent, pattern: which folders.
        keep: number of complete checkpoints to keep, at least 1.
        saved: the one just saved. Checkpoints of later steps are deleted: the run has gone back before them.

    Returns:
        The deleted folders.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, the newest checkpoint; got {keep}.")
    found = complete_checkpoints(parent, pattern)
    last = read_manifest(saved).step if saved is not None else math.inf
    complete = [folder for step, folder in found if step <= last]
    later = [folder for step, folder in found if step > last and complete and delete_checkpoint(folder)]
    return later + delete_old(complete, _folders(parent, pattern), keep)


def delete_old(complete: Sequence[Path], folders: Iterable[Path], keep: int) -> list[Path]:
    """Delete `complete` checkpoints, the oldest first, beyond `keep`, and which of `folders` interrupted saves left.

    What is newer than the newest complete checkpoint may be one that is being written, and stays.

    Returns:
        The deleted folders.
    """
    if not complete:
        return []
    finished = (complete[-1] / MANIFEST).stat().st_mtime
    left = [folder for folder in folders if is_leftover(folder) and folder.stat().st_mtime <= finished]
    return [folder for folder in (*complete[:-keep], *left) if delete_checkpoint(folder)]


def _folders(parent: Path | str, pattern: str) -> list[Path]:
    return sorted(folder for folder in Path(parent).glob(pattern) if folder.is_dir())


def _step(folder: Path) -> int:
    """Return the step of a checkpoint, from its name where the manifest cannot be read."""
    try:
        return read_manifest(folder).step
    except CheckpointError:
        numbers = re.findall(r"\d+", folder.name)
        return int(numbers[-1]) if numbers else -1
