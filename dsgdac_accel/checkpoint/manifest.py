"""The manifest of a checkpoint, and folders of checkpoints: which are complete, which is the newest, which may go."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.checkpoint.serialization import FORMAT, PARTIAL, CheckpointError, SavedFile
from dsgdac_accel.version import __version__

MANIFEST = "gossip.json"
WORKERS = "workers"
RECEIPT = ".receipt"
"""Ending of the note that a worker's file is written, which is there only while a checkpoint is being saved."""

# A manifest from elsewhere must not lead out of its folder.
WORKER_FILE = re.compile(r"workers/(\d{5,})(?:-(\d+))?\.safetensors")
OURS = re.compile(rf"\d{{5,}}(-\d+)?(\.safetensors|{re.escape(RECEIPT)})({re.escape(PARTIAL)})?")
"""Names of the files that saving puts into the folder of the workers."""


class WorkerCountError(CheckpointError):
    """A checkpoint of `saved` workers was to be loaded by `launched` ones."""

    def __init__(self, folder: Path, saved: int, launched: int) -> None:
        self.saved = saved
        self.launched = launched
        super().__init__(
            f"the checkpoint {folder} holds the state of {saved} workers, but {launched} were launched. Launch "
            f"{saved}, or start all workers from the average of the saved ones (on_other_worker_count='deployed')."
        )


# ---- the manifest


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    workers: int
    step: int
    """Optimizer steps done."""
    facts: dict[str, Any]
    """What the caller noted: topology, configuration, ..."""
    files: tuple[SavedFile, ...]
    """State of worker 0, 1, ..."""
    library: str = __version__
    format: int = FORMAT


def read_manifest(folder: Path | str) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises CheckpointError for a folder without one, and for one that is damaged or of another format.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: {MANIFEST}, which is written last, is not there. "
            f"Load another checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}). Load another checkpoint.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Load another checkpoint.") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        wrote = f", written by dsgdac_accel {content['library']}" if found and "library" in content else ""
        raise CheckpointError(
            f"{path} has format {found}{wrote}; this is {__version__}, which reads format {FORMAT}. Load it with the "
            f"version that wrote it."
        )
    try:
        manifest = Manifest(**{**content, "files": tuple(SavedFile(**file) for file in content["files"])})
        names = [WORKER_FILE.fullmatch(file.name) for file in manifest.files]
        ranks = [int(name[1]) for name in names if name]
        if type(manifest.workers) is not int or manifest.workers != len(names) or ranks != list(range(len(names))):
            raise ValueError("its files are not those of its workers")
        if not names or type(manifest.step) is not int or not isinstance(manifest.facts, dict):
            raise ValueError("workers, step and facts are not as this library writes them")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Load another checkpoint.") from error
    return manifest


def is_complete(folder: Path | str) -> bool:
    """Whether the manifest and every file it names are there, in full size; contents are checked by loading."""
    return _manifest_if_complete(folder) is not None


def _manifest_if_complete(folder: Path | str) -> Manifest | None:
    """Read once: a run that is under way may delete the checkpoint at any moment."""
    try:
        manifest = read_manifest(folder)
        sizes = [(Path(folder) / file.name).stat().st_size for file in manifest.files]
    except (CheckpointError, OSError):
        return None
    return manifest if sizes == [file.size for file in manifest.files] else None


def newest_checkpoint(parent: Path | str, pattern: str = "*") -> Path | None:
    """The complete checkpoint of the largest step among the folders of `parent` that match `pattern`.

    Returns None where no checkpoint was ever completed.

    Raises CheckpointError where there are some and none can be used: they are damaged, or of another version. A run
    that took this for none would begin anew and write over them.
    """
    complete = complete_checkpoints(parent, pattern)
    if complete:
        return complete[-1][1]
    unusable = [folder for folder in _folders(parent, pattern) if (folder / MANIFEST).exists()]
    if unusable:
        read_manifest(unusable[-1])  # says what is wrong with it, unless it is the files
        raise CheckpointError(f"{unusable[-1]} is damaged: files of its workers are missing, or not in full size.")
    return None


def prune_checkpoints(parent: Path | str, keep: int, pattern: str = "*", saved: Path | None = None) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `keep`, and what broken-off saves before the newest left behind.

    Call it on one worker, after a save is complete: nothing is deleted where no checkpoint is complete.

    Args:
        parent, pattern: which folders.
        keep: how many complete ones stay, at least 1.
        saved: the one just saved. Those of later steps are of a future that a run has left by going back, and go.

    Returns:
        What was deleted.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, the newest checkpoint; got {keep}.")
    complete = complete_checkpoints(parent, pattern)
    if saved is not None:
        step = read_manifest(saved).step
        left = [folder for at, folder in complete if at > step]
        complete = [(at, folder) for at, folder in complete if at <= step]
    else:
        left = []
    if not complete:
        return []
    newest = complete[-1][1]
    old = left + [folder for _, folder in complete[:-keep]]
    done = {folder for _, folder in complete} | set(left)
    finished = (newest / MANIFEST).stat().st_mtime
    for folder in _folders(parent, pattern):
        if folder not in done and is_leftover(folder) and folder.stat().st_mtime <= finished:
            old.append(folder)
    return [folder for folder in old if delete_checkpoint(folder)]


def delete_checkpoint(folder: Path) -> bool:
    """Delete a checkpoint; broken off in the middle, it leaves none that looks complete.

    Of a link to one that lies elsewhere only the link goes. Returns False, and the checkpoint stays complete, where
    somebody has protected it from being deleted.
    """
    try:
        (folder if folder.is_symlink() else folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _folders(parent: Path | str, pattern: str) -> list[Path]:
    return sorted(folder for folder in Path(parent).glob(pattern) if folder.is_dir())


def complete_checkpoints(parent: Path | str, pattern: str) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints, the oldest first."""
    found = [(_manifest_if_complete(folder), folder) for folder in _folders(parent, pattern)]
    return sorted((manifest.step, folder) for manifest, folder in found if manifest is not None)


def is_leftover(folder: Path) -> bool:
    """Whether this is what a broken-off save of ours left, and not a folder of somebody else's."""
    workers = folder / WORKERS
    ours = workers.is_dir() and all(OURS.fullmatch(file.name) for file in workers.iterdir())
    return ours and not (folder / MANIFEST).exists()
