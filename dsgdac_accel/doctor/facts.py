"""What one process knows of itself, in plain values that can be compared with those of the others."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import pickle
import platform
import random
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsgdac_accel.config import config_to_dict
from dsgdac_accel.version import __version__
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica

PACKAGES = ("torch", "accelerate", "transformers", "numpy", "safetensors")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Facts:
    """Of one process; `rank` is its number, from 0."""

    rank: int
    machine: str
    process: int
    versions: dict[str, str]
    """Of Python, this library and `PACKAGES`."""
    settings: dict[str, Any]
    """Dotted keys and plain values."""
    device: str
    gpu: str | None
    """What tells GPUs apart on all machines."""
    idle_gpu: bool
    """Whether a GPU is there that this process does not use."""
    threads: int
    cores: tuple[int, ...]
    """Numbers of the cores that this process may run on."""
    core_limit: float
    """How many cores' worth of time it may use with the others of its machine."""
    environment: dict[str, str]
    """What launchers set, of `LAUNCH_VARIABLES`."""
    store: str
    """Kind of the rendezvous store."""
    start_method: str
    streams: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the random streams, where they should differ between workers; by name."""
    model: list[tuple] = field(default_factory=list)
    """Name, shape, dtype and whether it is trained, of each parameter and buffer."""
    start: str | None = None
    """Fingerprint of the values of the model, where training has not begun."""
    free_bytes: int | None = None
    """On the disk of the output folder."""
    folder_problem: str | None = None
    """Why the output folder cannot be written."""


LAUNCH_VARIABLES = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_CPU",
)  # fmt: skip


def collect_facts(
    rank: int,
    device: torch.device,
    *,
    settings: Any = None,
    model: nn.Module | None = None,
    streams: bool = False,
    fresh: bool = False,
    output_dir: Path | None = None,
) -> Facts:
    """The facts of this process. Local; leaves random streams and files as they are.

    Args:
        rank: number of this process.
        device: that it trains on.
        settings: a mapping or a tree of configuration dataclasses.
        model: whose layout is compared.
        streams: whether random streams should differ by now.
        fresh: whether the values of `model` should still be equal on all workers.
        output_dir: where the run is going to write.
    """
    free, problem = _disk(output_dir)
    return Facts(
        rank=rank,
        machine=socket.gethostname(),
        process=os.getpid(),
        versions=package_versions(),
        settings=flat_settings(settings),
        device=str(device),
        gpu=_gpu(device),
        idle_gpu=device.type == "cpu" and torch.accelerator.is_available(),
        threads=torch.get_num_threads(),
        cores=_cores(),
        core_limit=_core_limit(),
        environment={name: os.environ[name] for name in LAUNCH_VARIABLES if name in os.environ},
        store=_store(),
        start_method=multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        streams=stream_fingerprints(model) if streams else {},
        model=[] if model is None else model_layout(model),
        start=_values_fingerprint(model) if fresh and model is not None else None,
        free_bytes=free,
        folder_problem=problem,
    )


@functools.cache
def package_versions() -> dict[str, str]:
    """Of Python, this library and what it works with, as far as they are installed."""
    versions = {"python": platform.python_version(), "dsgdac_accel": __version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def flat_settings(settings: Any) -> dict[str, Any]:
    """Settings as dotted keys with plain values.

    >>> flat_settings({"rate": 0.1, "gossip": {"power": 3}})
    {'rate': 0.1, 'gossip.power': 3}
    """
    if is_dataclass(settings) and not isinstance(settings, type):
        settings = config_to_dict(settings)
    flat: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": found for inner, found in flat_settings(value).items()}
        else:
            flat[str(key)] = value if isinstance(value, bool | int | float | str | None) else repr(value)
    return flat


def stream_fingerprints(model: nn.Module | None = None) -> dict[str, str]:
    """A fingerprint of each random stream of this process, and of those of its workers."""
    found = {
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "numpy": _digest(pickle.dumps(numpy.random.get_state())),
        "python": _digest(pickle.dumps(random.getstate())),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = _digest(torch.cuda.get_rng_state().numpy().tobytes())
    if isinstance(model, VirtualWorkers) and not model.shared:
        for number, state in enumerate(model.streams.state_dict()["cpu"]):
            found[f"torch of its worker {number}"] = _digest(state.numpy().tobytes())
    return found


def model_layout(model: nn.Module) -> list[tuple]:
    """Name, shape, dtype and whether it is trained, of each parameter and buffer."""
    inner = first_replica(model)
    named = [*inner.named_parameters(), *inner.named_buffers()]
    return [(name, tuple(value.shape), str(value.dtype), value.requires_grad) for name, value in named]


def parameter_bytes(model: nn.Module) -> int:
    """Size of the parameters of one worker that training exchanges."""
    trained = [parameter for parameter in first_replica(model).parameters() if parameter.requires_grad]
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)


@torch.no_grad()
def _values_fingerprint(model: nn.Module) -> str:
    # Sums tell whether workers started from other values; hashing every byte would take seconds for a large model.
    def sums(value: Tensor) -> Sequence[float]:
        wide = value.double()
        return [float(wide.sum()), float(wide.abs().sum())]

    inner = first_replica(model)
    return _digest(repr([sums(value) for value in (*inner.parameters(), *inner.buffers())]).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _gpu(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{socket.gethostname()} {getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"


def _cores() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not on every system
        return tuple(range(os.cpu_count() or 1))


def _core_limit() -> float:
    """Of a container with a quota of processor time."""
    try:
        quota, period = _QUOTA.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # there is no quota
        return float(os.cpu_count() or 1)


def _store() -> str:
    if not dist.is_initialized():
        return "none"
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def _disk(folder: Path | None) -> tuple[int | None, str | None]:
    """Free bytes where a folder is or would be made, and what stands in the way of writing there."""
    if folder is None:
        return None, None
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return None, f"{place} cannot be read ({error.strerror})"
    if not place.is_dir():
        return free, f"{place} is not a folder"
    return free, None if os.access(place, os.W_OK | os.X_OK) else f"{place} must not be written by this user"
