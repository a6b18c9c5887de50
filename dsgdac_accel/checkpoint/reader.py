"""Reading checkpoints, with every file checked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.common import put_common
from dsgdac_accel.checkpoint.errors import on_all
from dsgdac_accel.checkpoint.manifest import Manifest, WorkerCountError, read_manifest
from dsgdac_accel.checkpoint.resharding import Targets, put_together
from dsgdac_accel.checkpoint.serialization import LOAD_ANOTHER, CheckpointError, read_state
from dsgdac_accel.checkpoint.worker_state import by_replica
from dsgdac_accel.distributed.processes import Processes

_WHOLE = Targets()


def load_checkpoint(folder: Path | str, group: Processes, targets: Targets = _WHOLE) -> Any:
    """Return this worker's state, as it was passed to `save_checkpoint`. Collective: all workers load it, or none.

    Args:
        folder: the checkpoint.
        group: all processes: the workers, or the ranks of worker 0, 1, ... one after another.
        targets: this rank's place, and the tensors to load into: a worker may be split in another way than the saved
            one. Common tensors of the same value are put into the state, and not read. By default this process is all
            of a worker, and tensors that the checkpoint does not hold are left out.

    Raises:
        WorkerCountError: it was saved by another number of workers.
        CheckpointError: there is no complete checkpoint, a file is damaged, altered, or of another format, or a
            tensor that the checkpoint does not hold has another value in `targets`.
    """
    manifest = shared_manifest(folder, group)
    worker, workers = group.rank // targets.ranks, group.size // targets.ranks
    if manifest.workers != workers:
        raise WorkerCountError(Path(folder), manifest.workers, workers)

    return on_all(group, lambda: load_state(folder, manifest, worker, targets))


def shared_manifest(folder: Path | str, group: Processes) -> Manifest:
    """Read the manifest of the checkpoint that all workers load. Collective.

    Raises:
        CheckpointError: on all workers, if one finds none, or another one than worker 0.
    """
    manifest = on_all(group, lambda: read_manifest(folder))
    found = group.all_gather_object(manifest, "loading a checkpoint")
    for rank, other in enumerate(found):
        if other != found[0]:
            raise CheckpointError(
                f"all workers must load the same checkpoint; {group.members.named([rank])} finds another one in "
                f"{folder} than {group.members.named([0])}. Give all of them one folder, on a file system that they "
                f"share."
            )
    return manifest


def load_worker(folder: Path | str, rank: int) -> Any:
    """Return the state of worker `rank` of a checkpoint. No communication.

    Of a worker that was sharded, the tensors are put together, and everything else is that of its first rank. Tensors
    that the checkpoint does not hold, because they are in the Trainer's own file, are left out.

    Raises:
        CheckpointError: there is no such worker, or as in `load_checkpoint`.
    """
    manifest = read_manifest(folder)
    if not 0 <= rank < manifest.workers:
        raise CheckpointError(
            f"the checkpoint {folder} holds the state of workers 0 to {manifest.workers - 1}; asked was worker {rank}."
        )
    return load_state(folder, manifest, rank)


def load_state(
    folder: Path | str, manifest: Manifest, worker: int, targets: Targets = _WHOLE, common: bool = True
) -> Any:
    """Return the state of a worker, as in `load_checkpoint`. No communication.

    Args:
        folder, targets: as in `load_checkpoint`.
        manifest: of the checkpoint.
        worker: number of the worker.
        common: whether to put the common tensors into the state. Otherwise it has the references to them.

    Raises:
        CheckpointError: as in `load_checkpoint`.
    """
    files = manifest.files_of(worker)
    same_split = manifest.ranks == targets.ranks  # otherwise the digests are of other parts than this rank's

    def of_rank(shard: int) -> Any:
        state = read_state(Path(folder), files[shard])
        if common:
            file = manifest.common_file_of(shard)
            put_common(state, folder, lambda: read_state(Path(folder), file) if file else {}, targets.own, same_split)
        return state

    readers = [partial(of_rank, shard) for shard in targets.order(len(files))]
    try:
        return put_together(readers, targets, manifest.shards > 0)
    except CheckpointError:
        raise
    except Exception as error:  # a forged file can lead to any, and the other workers wait
        raise CheckpointError(
            f"{folder} is damaged: a worker's files are not as this library writes them ({error!r}). {LOAD_ANOTHER}"
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
