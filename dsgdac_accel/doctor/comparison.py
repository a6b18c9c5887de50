"""Comparison of the workers: versions, settings and models must be equal, random streams must differ."""

from __future__ import annotations

import functools
import hashlib
import logging
import pickle
import platform
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.report import Finding, Level, named_workers
from dsgdac_accel.randomness import random_state
from dsgdac_accel.topology import Topology
from dsgdac_accel.version import __version__
from dsgdac_accel.virtual_workers import first_replica

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "accelerate", "transformers", "numpy", "safetensors")
_MAY_DIFFER = ("python", "transformers", "numpy", "safetensors")
"""Different versions of these are only a warning. The others decide what is computed and sent."""
_MOST_DIFFERENCES = 8


def quick_check(group: WorkerGroup, settings: Any = None) -> list[Finding]:
    """Check that versions and settings are equal and random streams differ, by two small messages. Collective.

    Runs at the first `prepare` of every training, after the random streams were set. Returns the warnings, which
    worker 0 logs. `settings` is a mapping or a configuration dataclass.

    Raises:
        ValueError: on all workers, if the run would fail or be wrong. The message names worker, key and values.
    """
    if group.size == 1:
        return []
    findings = [*compare_settings(group, settings), *compare_streams(group)]
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError(" ".join(finding.sentence() for finding in errors))
    warnings = [finding for finding in findings if finding.level == "warning"]
    for finding in warnings if group.rank == 0 else ():
        logger.warning("%s: %s", finding.name, finding.sentence())
    return warnings


def compare_settings(group: WorkerGroup, settings: Any = None) -> list[Finding]:
    """Find different versions and settings. Collective."""
    own = package_versions(), flat_settings(settings or {})
    versions, configurations = zip(*group.all_gather_object(own, "comparing the settings"), strict=True)
    return [
        *check_equal("versions", versions, "Install the same versions for all workers", may_differ=_MAY_DIFFER),
        *check_equal("configuration", configurations, "Start all workers with the same file and arguments"),
    ]


def compare_models(group: WorkerGroup, model: nn.Module, fresh: bool) -> list[Finding]:
    """Find models with different parameters or buffers and, if `fresh`, with different values. Collective."""
    models = group.all_gather_object(describe_model(model, fresh), "comparing the models")
    return check_equal("model", models, "Build the same model on all workers, and change none after `prepare`")


def compare_streams(group: WorkerGroup) -> list[Finding]:
    """Find workers that draw the same random numbers. Collective."""
    fingerprints = group.all_gather_object(stream_fingerprints(), "comparing the random streams")
    return check_streams(fingerprints)


# ---- facts about this worker


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
    """Return a mapping or a tree of dataclasses as plain values by dotted key.

    >>> flat_settings({"lr": 0.1, "gossip": {"power": 3}})
    {'lr': 0.1, 'gossip.power': 3}
    """
    if is_dataclass(settings):
        settings = {field.name: getattr(settings, field.name) for field in fields(settings)}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Topology):
            flat[key] = f"{value.name} {value.fingerprint[:16]}"
        elif isinstance(value, Mapping) or is_dataclass(value):
            flat |= {f"{key}.{inner}": found for inner, found in flat_settings(value).items()}
        else:
            flat[key] = value if isinstance(value, bool | int | float | None) else str(value)
    return flat


@torch.no_grad()
def describe_model(model: nn.Module, values: bool) -> dict[str, str]:
    """Return position, shape and dtype of each parameter and buffer by name, and sums of their `values` if asked."""
    inner = first_replica(model)
    found = {}
    for number, (name, value) in enumerate([*inner.named_parameters(), *inner.named_buffers()]):
        found[name] = f"no. {number}, {tuple(value.shape)} {value.dtype}{', trained' if value.requires_grad else ''}"
        if values:  # sums tell different starts apart; hashing every byte of a large model would take seconds
            wide = value.double()
            found[name] += f", sum {wide.sum():.9g}, absolute sum {wide.abs().sum():.9g}"
    return found


def stream_fingerprints() -> dict[str, str]:
    """Return a fingerprint of each random stream of this process."""
    plain = {name: state.tolist() if isinstance(state, Tensor) else state for name, state in random_state().items()}
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in plain.items()}


# ---- findings from the facts of all workers, in order of rank


def check_equal(
    name: str, workers: Sequence[Mapping[str, Any]], advice: str, may_differ: Collection[str] = ()
) -> list[Finding]:
    """Find keys whose values differ from worker 0's. Differences in the keys of `may_differ` are only warnings.

    >>> [finding.text for finding in check_equal("versions", [{"a": 1}, {"a": 2}, {"a": 2}], "")]
    ['workers 1, 2: a = 2, but worker 0: a = 1']
    """
    findings = []
    for key in dict.fromkeys(key for worker in workers for key in worker):
        first, *others = _owners([worker.get(key, "nothing") for worker in workers]).items()
        for value, ranks in others:
            text = f"{named_workers(ranks)}: {key} = {value}, but worker 0: {key} = {first[0]}"
            findings.append(Finding("warning" if key in may_differ else "error", name, text, advice))
    if len(findings) > _MOST_DIFFERENCES:
        more = len(findings) - _MOST_DIFFERENCES
        return [*findings[:_MOST_DIFFERENCES], Finding("error", name, f".. and {more} more differences")]
    return findings or [Finding("ok", name, f"{len(workers[0])} compared, equal on all workers")]


def check_streams(workers: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Find workers that draw the same random numbers, given the fingerprints of their streams."""
    findings = []
    for stream in workers[0]:
        for fingerprint, ranks in _owners([worker.get(stream) for worker in workers]).items():
            if fingerprint is not None and len(ranks) > 1:
                level: Level = "warning" if stream in ("numpy", "python") else "error"
                text = f"{named_workers(ranks)} draw the same random numbers ({stream})"
                advice = "Seed alike on all workers before `prepare`, which then gives each worker its own stream"
                findings.append(Finding(level, "random streams", text, advice))
    return findings or [Finding("ok", "random streams", f"{', '.join(workers[0])}: different on all workers")]


def _owners(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, in order of rank."""
    owners = defaultdict(list)
    for rank, value in enumerate(values):
        owners[value].append(rank)
    return owners
