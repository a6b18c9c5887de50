"""Reading checkpoints, with every file checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.common import PARTS, Place, put_common
from dsgdac_accel.checkpoint.manifest import Manifest, WorkerCountError, read_manifest
from dsgdac_accel.checkpoint.resharding import Targets, put_together
from dsgdac_accel.checkpoint.serialization import LOAD_ANOTHER, CheckpointError, read_state
from dsgdac_accel.checkpoint.worker_state import by_replica
from dsgdac_accel.distributed.processes import Processes

_WHOLE = Targets()


def load_checkpoint(
    folder: Path | str, group: Processes, own: Mapping[Place, Tensor] | None = None, targets: Targets = _WHOLE
) -> Any:
    """Return this worker's state, as it was passed to `save_checkpoint`. Collective: all workers load it, or none.

    Args:
        folder: the checkpoint.
        group: all processes: the workers, or the ranks of worker 0, 1, ... one after another.
        own: the tensors of the models to load into, as of `common.tensors_by_place`. Common tensors of the same value
            are put into the state, and not read. With None, tensors that the checkpoint does not hold are left out.
        targets: this rank's place, and the parts of tensors that it needs: a worker may be split in another way than
            the saved one. By default this process is all of a worker.

    Raises:
        WorkerCountError: it was saved by another number of workers.
        CheckpointError: there is no complete checkpoint, a file is damaged, altered, or of another format, or a
            tensor that the checkpoint does not hold has another value in `own`.
    """
    state = error = manifest = None
    worker, workers = group.rank // targets.ranks, group.size // targets.ranks
    try:
        manifest = read_manifest(folder)
        if manifest.workers == workers:
            state = load_private(folder, worker, targets)
            add_common(state, folder, own, targets)
    except CheckpointError as problem:
        error = str(problem)
    seen = group.all_gather_object((error, manifest), "loading a checkpoint")
    problems = [problem for problem, _ in seen if problem]
    if problems:
        raise CheckpointError(problems[0])
    for rank, (_, other) in enumerate(seen):
        if other != seen[0][1]:
            raise CheckpointError(
                f"all workers must load the same checkpoint; worker {rank // targets.ranks} finds another one in "
                f"{folder} than worker 0. Give all of them one folder, on a file system that they share."
            )
    assert manifest is not None
    if manifest.workers != workers:
        raise WorkerCountError(Path(folder), manifest.workers, workers)
    return state


def load_worker(folder: Path | str, rank: int) -> Any:
    """Return the state of worker `rank` of a checkpoint. No communication.

    Of a worker that was sharded, the tensors are put together, and everything else is that of its first rank. Tensors
    that the checkpoint does not hold, because they are in the Trainer's own file, are left out.

    Raises:
        CheckpointError: there is no such worker, or as in `load_checkpoint`.
    """
    state = load_private(folder, rank)
    add_common(state, folder)
    return state


def load_private(folder: Path | str, rank: int, targets: Targets = _WHOLE) -> Any:
    """Return the state of worker `rank` without the common tensors. No communication. Raises as `load_worker`."""
    manifest = read_manifest(folder)
    if not 0 <= rank < manifest.workers:
        raise CheckpointError(
            f"the checkpoint {folder} holds the state of workers 0 to {manifest.workers - 1}; asked was worker {rank}."
        )
    files = manifest.files_of(rank)
    order = targets.order(manifest.shards)
    with _damage_named(folder, "a worker's files are not as this library writes them"):
        return put_together(
            [partial(read_state, Path(folder), files[shard]) for shard in order], targets, bool(manifest.mesh)
        )


def add_common(
    state: Any, folder: Path | str, own: Mapping[Place, Tensor] | None = None, targets: Targets = _WHOLE
) -> None:
    """Put the common tensors into a state of `load_private`, in place. `own` and errors as in `load_checkpoint`."""
    manifest = read_manifest(folder)
    if not manifest.common:
        return
    alike = manifest.shards == targets.ranks  # otherwise the digests are of other parts than this rank's
    if own is not None and not alike and not all(tensor.stored for tensor in manifest.common):
        raise CheckpointError(
            f"{folder} leaves frozen weights to the base model and the Trainer's own file, and a model that is split "
            f"in another way cannot be compared with them. Launch as many ranks per worker as the saved run had."
        )
    order = targets.order(manifest.shards)
    mine = own if alike else None
    with _damage_named(folder, "its common tensors are not those of its models"):
        readers = [partial(_common_of, manifest, Path(folder), shard, state["models"], mine) for shard in order]
        for index, model in put_together(readers, targets, sharded=bool(manifest.mesh))["models"].items():
            for part in PARTS:
                state["models"][index][part].update(model[part])


@contextmanager
def _damage_named(folder: Path | str, what: str) -> Iterator[None]:
    """Turn every error into a CheckpointError: a forged file can lead to any, and the other workers wait."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} is damaged: {what} ({error!r}). {LOAD_ANOTHER}") from error


def _common_of(
    manifest: Manifest, folder: Path, shard: int, indices: Iterable[int], own: Mapping[Place, Tensor] | None
) -> dict[str, Any]:
    """Return the common tensors of one rank of each worker, in a state that holds nothing else."""
    models: dict[int, Any] = {index: {part: {} for part in PARTS} for index in indices}

    def read() -> Mapping[str, Tensor]:
        file = manifest.common_file_of(shard)
        assert file is not None
        return read_state(folder, file)

    put_common(models, [tensor for tensor in manifest.common if tensor.shard == shard], read, own)
    return {"models": models}


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
