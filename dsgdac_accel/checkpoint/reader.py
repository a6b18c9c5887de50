"""Reading checkpoints, with every file checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.checkpoint.common import PARTS, Place, put_common
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

    def read() -> Any:
        state = load_private(folder, manifest, worker, targets)
        add_common(state, folder, manifest, targets)
        return state

    return on_all(group, read)


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
    state = load_private(folder, manifest, rank)
    add_common(state, folder, manifest)
    return state


def load_private(folder: Path | str, manifest: Manifest, worker: int, targets: Targets = _WHOLE) -> Any:
    """Return the state of a worker without the common tensors. No communication. Raises as `load_worker`."""
    files = manifest.files_of(worker)
    readers = [partial(read_state, Path(folder), files[shard]) for shard in targets.order(len(files))]
    with _damage_named(folder, "a worker's files are not as this library writes them"):
        return put_together(readers, targets, manifest.shards > 0)


def add_common(state: Any, folder: Path | str, manifest: Manifest, targets: Targets = _WHOLE) -> None:
    """Put the common tensors into a state of `load_private`, in place. Raises as `load_checkpoint`."""
    if not manifest.common:
        return
    own = {Place(*path[1:]): tensor for path, tensor in targets.own.items() if path[0] == "models"}
    alike = manifest.ranks == targets.ranks  # otherwise the digests are of other parts than this rank's
    if own and not alike and not all(tensor.stored for tensor in manifest.common):
        raise CheckpointError(
            f"{folder} leaves frozen weights to the base model and the Trainer's own file, and a model that is split "
            f"in another way cannot be compared with them. Launch as many ranks per worker as the saved run had."
        )

    def of_rank(shard: int) -> dict[str, Any]:
        """Return the common tensors of one rank of each worker, in a state that holds nothing else."""
        models: dict[int, Any] = {index: {part: {} for part in PARTS} for index in state["models"]}
        listed = [tensor for tensor in manifest.common if tensor.shard == shard]
        file = manifest.common_file_of(shard)
        put_common(
            models, listed, lambda: read_state(Path(folder), file) if file else {}, own if own and alike else None
        )
        return {"models": models}

    readers = [partial(of_rank, shard) for shard in targets.order(manifest.ranks)]
    with _damage_named(folder, "its common tensors are not those of its models"):
        for index, model in put_together(readers, targets, manifest.shards > 0)["models"].items():
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
