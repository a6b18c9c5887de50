"""Reading checkpoints, with every file checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.common import Place, put_common
from dsgdac_accel.checkpoint.manifest import WorkerCountError, read_manifest
from dsgdac_accel.checkpoint.serialization import LOAD_ANOTHER, CheckpointError, read_state
from dsgdac_accel.checkpoint.worker_state import by_replica
from dsgdac_accel.distributed.group import WorkerGroup


def load_checkpoint(folder: Path | str, group: WorkerGroup, own: Mapping[Place, Tensor] | None = None) -> Any:
    """Return this worker's state, as it was passed to `save_checkpoint`. Collective: all workers load it, or none.

    Args:
        folder: the checkpoint.
        group: the workers.
        own: the tensors of the models to load into, as of `common.tensors_by_place`. Common tensors of the same value
            are put into the state, and not read. With None, tensors that the checkpoint does not hold are left out.

    Raises:
        WorkerCountError: it was saved by another number of workers.
        CheckpointError: there is no complete checkpoint, a file is damaged, altered, or of another format, or a
            tensor that the checkpoint does not hold has another value in `own`.
    """
    state = error = manifest = None
    try:
        manifest = read_manifest(folder)
        if manifest.workers == group.size:
            state = load_private(folder, group.rank)
            add_common(state, folder, own)
    except CheckpointError as problem:
        error = str(problem)
    seen = group.all_gather_object((error, manifest), "loading a checkpoint")
    problems = [problem for problem, _ in seen if problem]
    if problems:
        raise CheckpointError(problems[0])
    for rank, (_, other) in enumerate(seen):
        if other != seen[0][1]:
            raise CheckpointError(
                f"all workers must load the same checkpoint; worker {rank} finds another one in {folder} than worker "
                f"0. Give all of them one folder, on a file system that they share."
            )
    assert manifest is not None
    if manifest.workers != group.size:
        raise WorkerCountError(Path(folder), manifest.workers, group.size)
    return state


def load_worker(folder: Path | str, rank: int) -> Any:
    """Return the state of worker `rank` of a checkpoint. No communication.

    Tensors that the checkpoint does not hold, because they are in the Trainer's own file, are left out.

    Raises:
        CheckpointError: there is no such worker, or as in `load_checkpoint`.
    """
    state = load_private(folder, rank)
    add_common(state, folder)
    return state


def load_private(folder: Path | str, rank: int) -> Any:
    """Return the state of worker `rank` without the common tensors. No communication. Raises as `load_worker`."""
    manifest = read_manifest(folder)
    if not 0 <= rank < manifest.workers:
        raise CheckpointError(
            f"the checkpoint {folder} holds the state of workers 0 to {manifest.workers - 1}; asked was worker {rank}."
        )
    return read_state(Path(folder), manifest.files[rank])


def add_common(state: Any, folder: Path | str, own: Mapping[Place, Tensor] | None = None) -> None:
    """Put the common tensors into a state of `load_private`, in place. `own` and errors as in `load_checkpoint`."""
    manifest = read_manifest(folder)
    if not manifest.common:
        return

    def read() -> Mapping[str, Tensor]:
        assert manifest.common_file is not None
        return read_state(Path(folder), manifest.common_file)

    try:
        put_common(state["models"], manifest.common, read, own)
    except CheckpointError:
        raise
    except Exception as error:  # a forged manifest can lead to any error
        raise CheckpointError(
            f"{folder} is damaged: its common tensors are not those of its models ({error!r}). {LOAD_ANOTHER}"
        ) from error


def worker_parameters(folder: Path | str, model: int = 0) -> list[dict[str, Tensor]]:
    """Return the parameters of every worker by name, from a checkpoint of `save_state`. No communication.

    Args:
        folder: the checkpoint. With several workers per process, each of them gets its own entry. Frozen parameters
            that only the Trainer's own file holds are left out.
        model: index of the prepared model.

    Raises:
        CheckpointError: there is no such model, or as in `load_checkpoint`.
    """
    workers: list[dict[str, Tensor]] = []
    for rank in range(read_manifest(folder).workers):
        models = load_worker(folder, rank).get("models", {})
        if model not in models:
            raise CheckpointError(f"{folder} holds the models {sorted(models)}; there is no model {model} in it.")
        workers += by_replica(models[model]["parameters"])
    return workers
