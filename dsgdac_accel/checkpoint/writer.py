"""Writing checkpoints that are complete or absent, in the foreground or in the background."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.manifest import MANIFEST, RECEIPT, WORKERS, Manifest, delete_files, our_files
from dsgdac_accel.checkpoint.serialization import (
    CheckpointError,
    Encoded,
    SavedFile,
    encode,
    safetensors_parts,
    sync_folder,
    write_whole,
)
from dsgdac_accel.distributed.processes import Processes

VISIBLE_SECONDS = 30.0
"""Time within which worker 0 must see the files of all workers: network file systems show new files with a delay."""

_POLL_SECONDS = 0.05


def save_checkpoint(
    folder: Path | str,
    state: Any,
    group: Processes,
    *,
    step: int,
    facts: Mapping[str, Any] | None = None,
    common: Mapping[str, Tensor] | None = None,
    shards: int = 0,
) -> None:
    """Write this worker's `state`, and the manifest once all workers have written theirs. Collective.

    A checkpoint that is replaced stays complete until the new one is.

    Args:
        folder: the same on all workers.
        state: a tree of tensors, arrays and plain values; see `serialization.encode`.
        group: all processes: the workers, or the ranks of worker 0, 1, ... one after another.
        step: optimizer steps done.
        facts: plain values for the manifest, taken from worker 0.
        common: tensors to which `state` has references, which worker 0 writes; see `common.take_common`.
        shards: ranks of each worker, which write a file each; 0 if a worker is one process without a device mesh.

    Raises:
        CheckpointError: on all workers, if any of them could not write. The failed checkpoint is removed.
    """
    pending = PendingCheckpoint(folder, group, step, facts, common, shards)
    outcome = pending.write(pending.encoded(state))
    pending.conclude(pending.gather(outcome))


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time. Training waits only for a copy of the state in host memory.

    On a GPU it does not wait for that either, up to 8 GiB of state: the copy is queued before the next step. See
    `staging.staged`.

    A checkpoint becomes complete while training continues: the thread of each worker writes a receipt beside its file,
    and worker 0's thread waits for all receipts and writes the manifest. The threads use files, not messages, which
    would interleave with those of training. The next `save` or `finish` raises errors on all workers.

    Args:
        group, shards: as in `save_checkpoint`.
    """

    def __init__(self, group: Processes, shards: int = 0) -> None:
        self.group = group
        self.shards = shards
        self._pending: tuple[PendingCheckpoint, threading.Thread, Future[Outcome]] | None = None

    def save(
        self,
        folder: Path | str,
        state: Any,
        *,
        step: int,
        facts: Mapping[str, Any] | None = None,
        common: Mapping[str, Tensor] | None = None,
    ) -> Path | None:
        """Finish the previous checkpoint and start this one. Arguments as in `save_checkpoint`. Collective.

        Returns:
            The folder of the previous checkpoint, which is complete now; None if there was none.
        """
        finished = self.finish()
        pending = PendingCheckpoint(folder, self.group, step, facts, common, self.shards)
        encoded = pending.encoded(state, copy=True)
        written: Future[Outcome] = Future()

        def work() -> None:
            outcome = pending.write(encoded)
            pending.leave_receipt(outcome)
            written.set_result(outcome)
            if pending.rank == 0:
                pending.commit_when_received(outcome)

        thread = threading.Thread(target=work, name="dsgdac-checkpoint", daemon=True)
        self._pending = pending, thread, written
        thread.start()
        return finished

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written. Collective.

        Returns:
            Its folder; None if there is none.

        Raises:
            CheckpointError: on all workers, if any of them could not write its part.
        """
        if self._pending is None:
            return None
        (pending, thread, written), self._pending = self._pending, None
        outcome = written.result()
        try:
            outcomes = pending.gather(outcome)
        finally:
            pending.abandon.set()  # the gathered outcomes replace the receipts
            thread.join()
        pending.conclude(outcomes)
        return pending.folder


@dataclass(frozen=True)
class Outcome:
    """Result of writing one process's part: its files, or the error."""

    files: tuple[SavedFile, ...] = ()
    """That of its state, and that of the common tensors if it wrote one."""
    error: str | None = None


class PendingCheckpoint:
    """One checkpoint that is being written. Owns the files in `folder/workers` and the manifest.

    The constructor, `gather` and `conclude` are collective. No other method communicates or raises,
    because the other workers would wait forever: errors travel in `Outcome`.

    Args:
        folder, group, step, facts, common, shards: as in `save_checkpoint`.

    Raises:
        CheckpointError: on all workers, if they save different steps or folders, or worker 0 cannot use the folder.
    """

    def __init__(
        self,
        folder: Path | str,
        group: Processes,
        step: int,
        facts: Mapping[str, Any] | None,
        common: Mapping[str, Tensor] | None = None,
        shards: int = 0,
    ) -> None:
        self.folder = Path(folder)
        self.group = group
        self.rank = group.rank
        self.shards, self.ranks = shards, max(1, shards)
        self.step = step
        self.facts = dict(facts or {})
        self.common = common or {}
        self.abandon = threading.Event()
        self.commit_error: str | None = None
        """None before the manifest is written; then "", or the error."""
        generation, problem = 0, None
        try:
            self.is_new = not self.folder.exists()
            generation = self._clear() if self.rank == 0 else 0
        except OSError as error:
            problem = _described(error, Path(error.filename or folder))
        plans = group.all_gather_object((str(folder), step, generation, problem), "beginning a checkpoint")
        for rank, plan in enumerate(plans):
            if plan[3] is not None:
                raise CheckpointError(f"{self._who(rank)} cannot save the checkpoint of step {step}: {plan[3]}")
            if plan[:2] != plans[0][:2]:
                raise CheckpointError(
                    f"all workers must save the same step into the same folder; {self._who(0)} saves step "
                    f"{plans[0][1]} into {plans[0][0]} and {self._who(rank)} step {plan[1]} into {plan[0]}. Give all "
                    f"of them one folder on shared storage, and save after the same step."
                )
        # New file names, so that a checkpoint that is replaced stays complete until the new manifest is written.
        self.suffix = f"-{plans[0][2]}" if plans[0][2] else ""

    def _clear(self) -> int:
        """Delete what interrupted saves left. Return a number that no file of a checkpoint in the folder has."""
        files, replaced = our_files(self.folder), (self.folder / MANIFEST).exists()
        for file in files:
            if file.suffix == RECEIPT or not replaced:
                file.unlink(missing_ok=True)
        return 1 + max(files.values(), default=0) if replaced else 0

    def path(self, rank: int, suffix: str = ".safetensors", common: bool = False) -> Path:
        """Return the path of a process's file, or of the file of the common tensors that it would write."""
        owner = "common" if common else f"{rank // self.ranks:05d}"
        shard = f"/{rank % self.ranks:03d}" if self.shards else ""
        return self.folder / WORKERS / f"{owner}{self.suffix}{shard}{suffix}"

    def _who(self, rank: int) -> str:
        return self.group.members.named([rank])

    # ---- the part of every worker

    def encoded(self, state: Any, copy: bool = False) -> dict[Path, Encoded] | str:
        """Return what this process writes by path, encoded: its state, in worker 0 the common tensors. Or the error."""
        try:
            files = {self.path(self.rank): encode(state, copy)}
            if self.rank < self.ranks and self.common:
                files[self.path(self.rank, common=True)] = encode(dict(self.common), copy)
            return files
        except Exception as error:
            return str(error)

    def write(self, encoded: dict[Path, Encoded] | str) -> Outcome:
        """Write this process's files, unless there is an error already."""
        if isinstance(encoded, str):
            return Outcome(error=encoded)
        files = []
        for path, content in encoded.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                size, digest = write_whole(path, safetensors_parts(content))
            except Exception as error:
                return Outcome(error=_described(error, path))
            files.append(SavedFile(path.relative_to(self.folder).as_posix(), size, digest))
        return Outcome(tuple(files))

    def leave_receipt(self, outcome: Outcome) -> None:
        """Report this process's files to worker 0's thread."""
        if outcome.error is not None or self.rank == 0:
            return
        with contextlib.suppress(OSError):  # a receipt only saves time: `finish` gathers the outcome, too
            write_whole(self.path(self.rank, RECEIPT), [json.dumps([asdict(file) for file in outcome.files]).encode()])

    # ---- the part of worker 0

    def commit_when_received(self, mine: Outcome) -> None:
        """Write the manifest once all receipts exist, unless `abandon` is set before."""
        outcomes = {} if mine.error is not None else {0: mine}
        while not self.abandon.is_set() and outcomes:
            for rank in range(self.group.size):
                if rank not in outcomes and (receipt := self.path(rank, RECEIPT)).exists():
                    files = json.loads(receipt.read_bytes())
                    outcomes[rank] = Outcome(tuple(SavedFile(**file) for file in files))
            if len(outcomes) == self.group.size:
                self.commit([outcomes[rank] for rank in range(self.group.size)])
                return
            self.abandon.wait(_POLL_SECONDS)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Write the manifest, unless it was written before. Then delete older files of this folder."""
        if self.commit_error is not None:
            return
        files = tuple(outcome.files[0] for outcome in outcomes)
        common = tuple(file for outcome in outcomes for file in outcome.files[1:])
        workers = self.group.size // self.ranks
        manifest = Manifest(workers, self.step, self.facts, files, common, self.shards)
        path = self.folder / MANIFEST
        try:
            self._require_shared([*files, *common])
            text = json.dumps(manifest.content(), indent=2, allow_nan=False)
            if self.shards:
                sync_folder(self.folder / WORKERS)  # it has a folder for each worker
            with contextlib.suppress(OSError):  # the parent folder need not be readable
                sync_folder(self.folder.parent)
            write_whole(path, [text.encode() + b"\n"])
        except Exception as error:
            self.commit_error = _described(error, path)
            return
        self.commit_error = ""
        named = {self.folder / file.name for file in (*files, *common)}
        delete_files(our_files(self.folder).keys() - named)

    def _require_shared(self, files: Sequence[SavedFile]) -> None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        for file in files:
            while not (self.folder / file.name).exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{file.name} was written, and worker 0 does not see it. Save to a folder on a file system "
                        f"that all workers share."
                    )
                time.sleep(_POLL_SECONDS)

    # ---- together

    def gather(self, outcome: Outcome) -> list[Outcome]:
        """Return every worker's outcome. Collective."""
        return self.group.all_gather_object(outcome, f"saving the checkpoint of step {self.step}")

    def conclude(self, outcomes: Sequence[Outcome]) -> None:
        """Complete the checkpoint, or remove it and raise on all workers. Collective.

        Raises:
            CheckpointError: naming every worker that failed.
        """
        failed = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if not failed and self.rank == 0:
            self.commit(outcomes)
        what = f"completing the checkpoint of step {self.step}"
        commit_error = self.group.all_gather_object(self.commit_error, what)[0]
        if not failed and commit_error:
            failed = [(0, commit_error)]
        if not failed:
            return
        self._discard()
        raise CheckpointError(
            f"the checkpoint of step {self.step} could not be saved to {self.folder}; earlier checkpoints are "
            f"untouched. {' '.join(f'{self._who(rank).capitalize()}: {error}' for rank, error in failed)}"
        )

    def _discard(self) -> None:
        mine = [self.path(self.rank), self.path(self.rank, RECEIPT)]
        if self.rank < self.ranks:
            mine.append(self.path(self.rank, common=True))
        delete_files(mine)
        self.group.all_gather_object(None, f"discarding the checkpoint of step {self.step}")
        if self.rank == 0 and self.is_new:
            for folder in (self.folder / WORKERS, self.folder):
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def _described(error: Exception, path: Path) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{path}: {error.strerror or error}. Free space, or save to a folder that all workers can write."
    return f"{path}: {type(error).__name__}: {error}."
