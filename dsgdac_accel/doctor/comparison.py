"""Facts about each worker, and findings from comparing them: what must be equal and what must differ."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import random
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dsgdac_accel.config import config_to_dict
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.report import Finding, Level, named_workers
from dsgdac_accel.version import __version__
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "accelerate", "transformers", "numpy", "safetensors")
_MUST_AGREE = ("dsgdac_accel", "torch", "accelerate")
"""Packages that decide what is computed and sent. A different version of another package is only a warning."""
_MOST_DIFFERENCES = 8
_ABSENT = "nothing"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Facts:
    """Facts about one process as plain values, which can be sent and compared."""

    rank: int
    machine: str
    versions: dict[str, str]
    """Versions of Python, this library and `PACKAGES`."""
    settings: dict[str, Any]
    """Plain values by dotted key."""
    device: str
    gpu: str | None
    """Machine and UUID of the GPU, if the process uses one."""
    threads: int
    cores: tuple[int, ...]
    """Numbers of the CPU cores that this process may use."""
    core_limit: float
    """CPU time that all processes of this container may use, in cores."""
    announced: int
    """WORLD_SIZE as the launcher set it."""
    streams: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the random streams by name, once they should differ between workers."""
    model: list[tuple] = field(default_factory=list)
    """Name, shape, dtype and requires_grad of each parameter and buffer."""
    start: str | None = None
    """Fingerprint of the model's values, if training has not begun."""


def collect_facts(
    rank: int,
    device: torch.device,
    *,
    settings: Any = None,
    model: nn.Module | None = None,
    streams: bool = False,
    fresh: bool = False,
) -> Facts:
    """Collect the facts about this process. Local; does not change the random streams.

    Args:
        rank: rank of this process.
        device: device that it trains on.
        settings: a mapping or a tree of configuration dataclasses.
        model: model to compare.
        streams: whether the random streams should differ between workers by now.
        fresh: whether the values of `model` should still be equal on all workers.
    """
    return Facts(
        rank=rank,
        machine=socket.gethostname(),
        versions=package_versions(),
        settings=flat_settings(settings),
        device=str(device),
        gpu=_gpu(device),
        threads=torch.get_num_threads(),
        cores=_cores(),
        core_limit=_core_limit(),
        announced=int(os.environ.get("WORLD_SIZE", "1")),
        streams=stream_fingerprints(model) if streams else {},
        model=[] if model is None else model_layout(model),
        start=_values_fingerprint(model) if fresh and model is not None else None,
    )


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python, this library and `PACKAGES`."""
    versions = {"python": platform.python_version(), "dsgdac_accel": __version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def flat_settings(settings: Any) -> dict[str, Any]:
    """Return settings as plain values by dotted key.

    >>> flat_settings({"lr": 0.1, "gossip": {"power": 3}})
    {'lr': 0.1, 'gossip.power': 3}
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
    """Return a fingerprint of each random stream of this process and of its virtual workers."""
    found = {
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "numpy": _digest(pickle.dumps(numpy.random.get_state())),
        "python": _digest(pickle.dumps(random.getstate())),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = _digest(torch.cuda.get_rng_state().numpy().tobytes())
    if isinstance(model, VirtualWorkers) and not model.shared:
        for number, state in enumerate(model.streams.state_dict()["cpu"]):
            found[f"torch, virtual worker {number}"] = _digest(state.numpy().tobytes())
    return found


def model_layout(model: nn.Module) -> list[tuple]:
    """Return name, shape, dtype and requires_grad of each parameter and buffer."""
    inner = first_replica(model)
    named = [*inner.named_parameters(), *inner.named_buffers()]
    return [(name, tuple(value.shape), str(value.dtype), value.requires_grad) for name, value in named]


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the trained parameters of one worker, which are what an exchange sends."""
    trained = [parameter for parameter in first_replica(model).parameters() if parameter.requires_grad]
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)


@torch.no_grad()
def _values_fingerprint(model: nn.Module) -> str:
    # Sums tell different starts apart; hashing every byte of a large model would take seconds.
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
    except AttributeError:  # not available on every system
        return tuple(range(os.cpu_count() or 1))


def _core_limit() -> float:
    """Return the CPU quota of the container, in cores."""
    try:
        quota, period = _QUOTA.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # no quota
        return float(os.cpu_count() or 1)


# ---- findings: functions of the facts of all processes in order of rank, without communication


def quick_check(group: WorkerGroup, settings: Any = None) -> list[Finding]:
    """Check that versions and settings are equal and random streams differ, by one small message. Collective.

    Takes milliseconds; runs at the first `prepare` of every training, after the random streams were set. Worker 0 logs
    the warnings.

    Args:
        group: all workers.
        settings: settings that all workers must share.

    Returns:
        The warnings.

    Raises:
        ValueError: on all workers, if the run would fail or be wrong. The message names worker, key and values.
    """
    if group.size == 1:
        return []
    own = collect_facts(group.rank, group.device, settings=settings, streams=True)
    facts = group.all_gather_object(own, "checking the workers")
    findings = [*check_versions(facts), *check_settings(facts), *check_streams([fact.streams for fact in facts])]
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError(" ".join(finding.sentence() for finding in errors))
    warnings = [finding for finding in findings if finding.level == "warning"]
    for finding in warnings if group.rank == 0 else ():
        logger.warning("%s: %s", finding.subject, finding.sentence())
    return warnings


def compare(facts: Sequence[Facts]) -> list[Finding]:
    """Return all findings that follow from the facts of all processes."""
    return [
        *check_launch(facts),
        *check_versions(facts),
        *check_settings(facts),
        *check_models(facts),
        *check_streams([fact.streams for fact in facts]),
        *check_devices(facts),
        *check_threads(facts),
    ]


def check_launch(facts: Sequence[Facts]) -> list[Finding]:
    """Find launched processes that do not see each other."""
    if facts[0].announced == len(facts):
        return []
    message = (
        f"{facts[0].announced} processes were launched (WORLD_SIZE) and {len(facts)} see each other, so each would "
        "train alone"
    )
    advice = (
        "On the CPU pass cpu=True or set ACCELERATE_USE_CPU=true, and launch with torchrun or with --multi_gpu, which "
        "starts CPU workers as well; --cpu starts one process"
    )
    return [Finding("error", "launch", message, advice)]


def check_versions(facts: Sequence[Facts]) -> list[Finding]:
    """Find different package versions."""
    findings = []
    for package, first in facts[0].versions.items():
        for version, ranks in _others([fact.versions.get(package) for fact in facts]):
            level: Level = "error" if package in _MUST_AGREE else "warning"
            message = f"{named_workers(ranks)}: {package} {version}, but worker 0: {package} {first}"
            findings.append(Finding(level, "versions", message, "Install the same versions for all workers", ranks))
    shown = ", ".join(f"{name} {version}" for name, version in facts[0].versions.items() if version != "not installed")
    return findings or [Finding("ok", "versions", f"{shown}{_everywhere(facts)}")]


def check_settings(facts: Sequence[Facts]) -> list[Finding]:
    """Find different settings."""
    findings = []
    keys = list(dict.fromkeys(key for fact in facts for key in fact.settings))
    for key in keys:
        first = facts[0].settings.get(key, _ABSENT)
        for value, ranks in _others([fact.settings.get(key, _ABSENT) for fact in facts]):
            message = f"{named_workers(ranks)}: {key} = {value}, but worker 0: {key} = {first}"
            advice = "Start all workers with the same file and arguments"
            findings.append(Finding("error", "configuration", message, advice, ranks))
    if len(findings) > _MOST_DIFFERENCES:
        more = len(findings) - _MOST_DIFFERENCES
        findings = [*findings[:_MOST_DIFFERENCES], Finding("error", "configuration", f".. and {more} more differences")]
    if findings or not keys:
        return findings
    return [Finding("ok", "configuration", f"{len(keys)} settings{_everywhere(facts)}")]


def check_models(facts: Sequence[Facts]) -> list[Finding]:
    """Find models that differ in parameters or buffers or, at the start, in their values."""
    findings = []
    for model, ranks in _others([fact.model for fact in facts]):
        message = f"{named_workers(ranks)} and worker 0 have different models: "
        message += _first_difference(model, facts[0].model)
        findings.append(Finding("error", "model", message, "Build the same model on all workers", ranks))
    if findings or not facts[0].model:
        return findings
    for _, ranks in _others([fact.start for fact in facts]):
        message = f"{named_workers(ranks)} and worker 0 start from different values"
        advice = "Pass the model through `prepare`, and do not change it afterwards on some workers only"
        findings.append(Finding("error", "model", message, advice, ranks))
    equal = " and values" if facts[0].start is not None and len(facts) > 1 else ""
    message = f"{len(facts[0].model)} parameters and buffers, the same names, shapes{equal}{_everywhere(facts)}"
    return findings or [Finding("ok", "model", message)]


def _first_difference(theirs: Sequence[tuple], first: Sequence[tuple]) -> str:
    def described(entry: tuple) -> str:
        name, shape, dtype, trained = entry
        return f"{name} {tuple(shape)} {dtype}{'' if trained else ', not trained'}"

    for mine, other in zip(theirs, first, strict=False):
        if mine != other:
            return f"{described(mine)} instead of {described(other)}"
    return f"{len(theirs)} parameters and buffers instead of {len(first)}"


def check_streams(streams: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Find workers that draw the same random numbers.

    Args:
        streams: fingerprints by name of each process, in order of rank; empty if streams may be equal.
    """
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, own in enumerate(streams):
        for name, fingerprint in own.items():
            kind = "torch of virtual workers" if name.startswith("torch,") else name
            owners[kind, fingerprint].append(rank)
    findings = []
    for (kind, _), ranks in owners.items():
        if len(ranks) > 1:
            equal = tuple(sorted(set(ranks)))
            message = f"{named_workers(equal)} draw the same random numbers ({kind}): same dropout and augmentation"
            advice = "Seed alike on all workers before `prepare`, which then gives each worker its own stream"
            findings.append(
                Finding("error" if kind.startswith("torch") else "warning", "random streams", message, advice, equal)
            )
    if findings or len(streams) == 1 or not streams[0]:
        return findings
    return [Finding("ok", "random streams", f"torch, NumPy and Python differ between all {len(streams)} processes")]


def check_devices(facts: Sequence[Facts]) -> list[Finding]:
    """Find processes that share a GPU, and processes on different kinds of devices."""
    findings = []
    users: dict[str, list[int]] = defaultdict(list)
    for fact in facts:
        if fact.gpu is not None:
            users[fact.gpu].append(fact.rank)
    for gpu, sharing in users.items():
        if len(sharing) > 1:
            message = f"{named_workers(sharing)} share one GPU ({gpu}), which NCCL refuses"
            advice = "Launch one process per GPU, and set workers_per_process for several workers on it"
            findings.append(Finding("error", "device", message, advice, tuple(sharing)))
    for kind, ranks in _others([fact.device.split(":")[0] for fact in facts]):
        message = f"{named_workers(ranks)}: {kind}, but worker 0: {facts[0].device}"
        findings.append(Finding("error", "device", message, "Train on the same kind of device everywhere", ranks))
    return findings


def check_threads(facts: Sequence[Facts]) -> list[Finding]:
    """Find machines with more threads than cores, or with idle cores in training on the CPU."""
    machines: dict[str, list[Facts]] = defaultdict(list)
    for fact in facts:
        machines[fact.machine].append(fact)
    findings = []
    for machine, here in machines.items():
        cores = min(len({core for fact in here for core in fact.cores}), max(fact.core_limit for fact in here))
        threads, each, processes = sum(fact.threads for fact in here), here[0].threads, len(here)
        message = f"{processes} process{'es' * (processes > 1)} of {each} thread{'s' * (each > 1)} on {cores:g} "
        message += f"core{'s' * (cores != 1)} of {machine}"
        setting = f"OMP_NUM_THREADS={max(1, int(cores // processes))}"
        ranks = tuple(fact.rank for fact in here)
        if threads > max(cores, processes):
            advice = f"Set {setting}: threads that compete for a core slow every step down"
            findings.append(Finding("warning", "threads", message, advice, ranks))
        elif here[0].device == "cpu" and threads <= cores / 2:
            findings.append(Finding("warning", "threads", message, f"Set {setting} to use all cores", ranks))
        else:
            findings.append(Finding("ok", "threads", message))
    return findings


def _others(values: Sequence[Any]) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the values that differ from worker 0's, each with the ranks that have it.

    >>> _others(["a", "b", "a", "b", "c"])
    [('b', (1, 3)), ('c', (4,))]
    """
    different: list[Any] = []
    for value in values:
        if value != values[0] and value not in different:
            different.append(value)
    return [(value, tuple(rank for rank, own in enumerate(values) if own == value)) for value in different]


def _everywhere(facts: Sequence[Facts]) -> str:
    return f" on all {len(facts)} processes" if len(facts) > 1 else ""
