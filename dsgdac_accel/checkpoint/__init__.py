"""Checkpoints of all workers: complete or absent, without pickle, checked when read.

    folder/workers/00000.safetensors    state of worker 0, one file per worker
    folder/gossip.json                  the manifest, written last: a folder without it is no checkpoint

A worker that is several processes has a folder with a file for each: 00000/000.safetensors, 00000/001.safetensors, ...
The folder must be on a file system that all workers share.
"""

from dsgdac_accel.checkpoint.manifest import (
    Manifest,
    WorkerCountError,
    is_complete,
    newest_checkpoint,
    prune_checkpoints,
    read_manifest,
)
from dsgdac_accel.checkpoint.reader import load_checkpoint, load_worker, worker_parameters
from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.checkpoint.worker_state import load_model_state, model_state
from dsgdac_accel.checkpoint.writer import CheckpointWriter, save_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointWriter",
    "Manifest",
    "WorkerCountError",
    "is_complete",
    "load_checkpoint",
    "load_model_state",
    "load_worker",
    "model_state",
    "newest_checkpoint",
    "prune_checkpoints",
    "read_manifest",
    "save_checkpoint",
    "worker_parameters",
]
