"""Writing checkpoints: complete or absent, on the spot or in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.checkpoint.manifest import (
    MANIFEST,
    OURS,
    RECEIPT,
    WORKER_FILE,
    WORKERS,
    Manifest,
)
from dsgdac_accel.checkpoint.serialization import (
    CheckpointError,
    Encoded,
    SavedFile,
    encode,
    safetensors_parts,
    sync_folder,
    write_whole,
)
from dsgdac_accel.distributed.failure_detection import WorkersChangedError
from dsgdac_accel.distributed.group import WorkerGroup

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_VISIBLE_SECONDS = 30.0  # network file systems show a new file to other machines a little later


def save_checkpoint(
    folder: Path | str, state: Any, group: WorkerGroup, *, step: int, facts: Mapping[str, Any] | None = None
) -> None:
    """Write this worker's `state` and, when all workers are done, the manifest. Collective.

    A checkpoint that was in `folder` before stays complete until the new one is.

    Args:
        folder: the same on all workers.
        state: a tree of tensors, arrays and plain values; see `state_files.encode`.
        group: the workers.
        step: optimizer steps done.
        facts: plain values for the manifest; worker 0's count.

    Raises:
        CheckpointError: on all workers, if any of them could not write; nothing of the failed checkpoint stays.
    """
    saving = _Saving(folder, group, step, facts)
    saving.close(saving.write(state))


class CheckpointWriter:
    """Writes checkpoints in the background: training stops for a copy of the state to host memory only.

    One checkpoint is written at a time. It is complete as soon as all workers' files are, while training goes on: each
    worker's thread leaves a receipt beside its file, and worker 0's thread waits for those and writes the manifest. No
    thread talks to other workers, whose messages would get between those of training. Failures come to light on all
    workers alike in the next `save` or in `finish`.

    Needs host memory for one more copy of the state.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._saving: _Saving | None = None
        self._thread: threading.Thread | None = None
        self._outcome: _Outcome | None = None

    def save(self, folder: Path | str, state: Any, *, step: int, facts: Mapping[str, Any] | None = None) -> Path | None:
        """Finish the last checkpoint and begin this one; arguments as of `save_checkpoint`. Collective.

        Returns:
            The folder of the last checkpoint, complete now, or None if there was none.
        """
        finished = self.finish()
        saving = _Saving(folder, self.group, step, facts)
        encoded = saving.encoded(state, copy=True)
        self._saving, self._outcome = saving, None

        def work() -> None:
            self._outcome = saving.write_encoded(encoded)
            saving.leave_receipt(self._outcome)
            saving.written.set()
            if saving.rank == 0:
                saving.commit_when_received(self._outcome)

        self._thread = threading.Thread(target=work, name="dsgdac-checkpoint", daemon=True)
        self._thread.start()
        return finished

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written; returns its folder, None if there is none. Collective.

        None also where a worker was lost before its part was written, and the others go on.

        Raises CheckpointError on all workers, if any of them could not write its part.
        """
        if self._saving is None:
            return None
        try:
            finished = self._finish(self._saving)
        except WorkersChangedError:
            raise  # to be begun anew, by all survivors: others may not have come here yet
        except BaseException:
            self._saving = None
            raise
        self._saving = None
        return finished

    def _finish(self, saving: _Saving) -> Path | None:
        assert self._thread is not None
        saving.written.wait()
        outcome = self._outcome
        assert outcome is not None
        # All outcomes arrive with the next collective, so nobody need wait for receipts any more.
        try:
            outcomes = saving.gather(outcome)
        finally:
            saving.abandon.set()
            self._thread.join()
        if saving.numbers != self.group.numbers:
            return saving.folder if saving.was_committed() else None
        saving.conclude(outcomes)
        return saving.folder


@dataclass(frozen=True)
class _Outcome:
    """How one worker's part of a save went."""

    file: SavedFile | None = None
    error: str | None = None


class _Saving:
    """One checkpoint in the making. Construction, `gather`, `conclude` and `close` are collective, the rest is not."""

    def __init__(self, folder: Path | str, group: WorkerGroup, step: int, facts: Mapping[str, Any] | None) -> None:
        self.folder = Path(folder)
        self.group = group
        self.rank, self.workers = group.rank, group.size  # of this checkpoint, whoever is lost meanwhile
        self.numbers = list(group.numbers)
        self.step = step
        self.facts = dict(facts or {})
        self.written = threading.Event()
        self.abandon = threading.Event()
        self.committed: str | None = None
        """None before the manifest is written; then "" or what went wrong."""
        generation, problem = 0, None
        try:
            self.is_new = not self.folder.exists()
            generation = self._clear() if self.rank == 0 else 0
        except OSError as error:  # an error of one worker must not leave the others waiting
            problem = _in_words(error, Path(error.filename or folder))
        plans = group.all_gather_object((str(folder), step, generation, problem), "beginning a checkpoint")
        for rank, plan in enumerate(plans):
            if plan[3] is not None:
                raise CheckpointError(f"worker {rank} cannot save the checkpoint of step {step}: {plan[3]}")
            if plan[:2] != plans[0][:2]:
                raise CheckpointError(
                    f"all workers must save the same step into the same folder; worker 0 saves step {plans[0][1]} into "
                    f"{plans[0][0]} and worker {rank} step {plan[1]} into {plan[0]}."
                )
        # A checkpoint that is replaced stays complete until the manifest of the new one is: hence other file names.
        self.suffix = f"-{plans[0][2]}" if plans[0][2] else ""

    def _clear(self) -> int:
        """The number that tells these files from those of the checkpoint that is in the folder already, if any."""
        files = list((self.folder / WORKERS).glob("*"))
        for file in files:
            if file.suffix == RECEIPT:
                file.unlink(missing_ok=True)
        if not (self.folder / MANIFEST).exists():
            return 0
        numbers = [WORKER_FILE.fullmatch(f"{WORKERS}/{file.name}") for file in files]
        return 1 + max((int(match[2] or 0) for match in numbers if match), default=0)

    def path(self, rank: int, ending: str = ".safetensors") -> Path:
        """Where a worker's file goes."""
        return self.folder / WORKERS / f"{rank:05d}{self.suffix}{ending}"

    # ---- one worker's part

    def encoded(self, state: Any, copy: bool = False) -> Encoded | str:
        """The state taken apart, or what stands in the way."""
        try:
            return encode(state, copy)
        except Exception as error:  # an error of one worker must not leave the others waiting
            return str(error)

    def write(self, state: Any) -> _Outcome:
        """Write this worker's file."""
        return self.write_encoded(self.encoded(state))

    def write_encoded(self, encoded: Encoded | str) -> _Outcome:
        """Write this worker's file, or pass on why not."""
        if isinstance(encoded, str):
            return _Outcome(error=encoded)
        path = self.path(self.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size, digest = write_whole(path, safetensors_parts(encoded))
        except Exception as error:  # as above
            return _Outcome(error=_in_words(error, path))
        return _Outcome(SavedFile(path.relative_to(self.folder).as_posix(), size, digest))

    def leave_receipt(self, outcome: _Outcome) -> None:
        """Tell worker 0's thread that this file is there."""
        if outcome.file is None or self.rank == 0:
            return
        with contextlib.suppress(OSError):  # it only saves time: the outcome is also gathered, in `finish`
            write_whole(self.path(self.rank, RECEIPT), [json.dumps(asdict(outcome.file)).encode()])

    # ---- worker 0's part

    def commit_when_received(self, mine: _Outcome) -> None:
        """Write the manifest once all receipts are there; gives up when abandoned."""
        files = {} if mine.file is None else {0: mine.file}
        while not self.abandon.is_set() and files:
            for rank in range(self.workers):
                if rank not in files:
                    receipt = self.path(rank, RECEIPT)
                    if receipt.exists():
                        files[rank] = SavedFile(**json.loads(receipt.read_bytes()))
            if len(files) == self.workers:
                self.commit([files[rank] for rank in range(self.workers)])
                return
            self.abandon.wait(_POLL_SECONDS)

    def commit(self, files: Sequence[SavedFile]) -> None:
        """Write the manifest, once; then delete files that it does not name."""
        if self.committed is not None:
            return
        assert len(files) == self.workers, "a checkpoint holds all its workers"
        manifest = Manifest(self.workers, self.step, self.facts, tuple(files))
        path = self.folder / MANIFEST
        try:
            self._require_shared(files)
            text = json.dumps(asdict(manifest), indent=2, allow_nan=False)
            with contextlib.suppress(OSError):  # a folder above it need not be one that may be read
                sync_folder(self.folder.parent)
            write_whole(path, [text.encode() + b"\n"])
        except Exception as error:
            self.committed = _in_words(error, path)
            return
        self.committed = ""
        named = {self.folder / file.name for file in files}
        for file in (self.folder / WORKERS).glob("*"):
            if file not in named and OURS.fullmatch(file.name):
                with contextlib.suppress(OSError):  # the checkpoint is complete all the same
                    file.unlink(missing_ok=True)

    def _require_shared(self, files: Sequence[SavedFile]) -> None:
        deadline = time.monotonic() + _VISIBLE_SECONDS
        for rank, file in enumerate(files):
            while not (self.folder / file.name).exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"worker {rank} wrote {file.name}, and worker 0 does not see it. Save to a folder on a file "
                        f"system that all workers share."
                    )
                time.sleep(_POLL_SECONDS)

    # ---- together

    def gather(self, outcome: _Outcome) -> list[_Outcome]:
        """Every worker's outcome."""
        return self.group.all_gather_object(outcome, f"saving the checkpoint of step {self.step}")

    def was_committed(self) -> bool:
        """After a loss: whether the manifest was written in time. If not, an older checkpoint in the folder stays."""
        committed = "" in self.group.all_gather_object(self.committed, f"completing the checkpoint of step {self.step}")
        if not committed and self.group.rank == 0:
            logger.warning(
                "the checkpoint of step %d is not complete: a worker was lost while it was written", self.step
            )
        return committed

    def close(self, outcome: _Outcome) -> None:
        """Complete the checkpoint or raise on all workers."""
        self.conclude(self.gather(outcome))

    def conclude(self, outcomes: Sequence[_Outcome]) -> None:
        """Complete the checkpoint or raise on all workers, with the outcomes of all."""
        failed = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        if not failed and self.rank == 0:
            self.commit([outcome.file for outcome in outcomes if outcome.file is not None])
        what = f"completing the checkpoint of step {self.step}"
        manifest_error = self.group.all_gather_object(self.committed, what)[0]
        if not failed and manifest_error:
            failed = [(0, manifest_error)]
        if not failed:
            return
        self._discard()
        raise CheckpointError(
            f"the checkpoint of step {self.step} could not be saved to {self.folder}; earlier checkpoints are "
            f"untouched. {' '.join(f'Worker {rank}: {error}' for rank, error in failed)}"
        )

    def _discard(self) -> None:
        for file in (self.path(self.rank), self.path(self.rank, RECEIPT)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        self.group.all_gather_object(None, f"discarding the checkpoint of step {self.step}")
        if self.rank == 0 and self.is_new:
            for folder in (self.folder / WORKERS, self.folder):
                with contextlib.suppress(OSError):  # there is something in it
                    folder.rmdir()


def _in_words(error: Exception, path: Path) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{path}: {error.strerror or error}. Free space, or save to a folder that all workers can write."
    return f"{path}: {type(error).__name__}: {error}."
