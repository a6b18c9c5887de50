"""Checks of a launch, made with its own workers before it trains: what differs between them, and the slowest link.

`examine` is for your own script, after `prepare`; the command `dsgdac doctor` calls it. `quick_check` runs at the first
`prepare` of every training.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import pickle
import platform
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from statistics import median_low
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.devices import synchronize
from dsgdac_accel.distributed.failure_detection import WorkerLostError
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import random_state
from dsgdac_accel.topology import Topology, build_topology
from dsgdac_accel.version import __version__

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "accelerate", "transformers", "numpy", "safetensors")
_MAY_DIFFER = ("python", "transformers", "numpy", "safetensors")
"""Different versions of these are only a warning. The others decide what is computed and sent."""
_MOST_DIFFERENCES = 8

PROBE_BYTES = 2**20
MOST_BYTES = 2**30
"""Most memory for what is received. A larger exchange is scaled up from a smaller one."""
_REPEATS = 3
_BUDGET_SECONDS = 3.0
"""Time to measure the links, roughly; a slow network is measured with smaller messages."""
_SLOW_FACTOR, _SLOW_SECONDS = 4.0, 0.02
"""A link is slow if it takes this many times, and this many seconds longer than, the median link."""

HOW_TO_LAUNCH = (
    "Start several with torchrun --nproc_per_node N or accelerate launch --multi_gpu --num_processes N (which starts "
    "CPU workers as well), or set workers_per_process. accelerate launch --cpu starts one process only"
)

Level = Literal["ok", "warning", "error"]
Links = dict[tuple[int, int], float]
"""Seconds of an exchange between two processes."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> Finding("warning", "links", "workers 0 and 1 are slow", "Check the network").line()
    'warning  links           workers 0 and 1 are slow. Check the network.'
    """

    level: Level
    """ok; warning: the run is slower than it could be or loses something; error: the run would fail or be wrong."""
    name: str
    """The thing checked, in a word or two."""
    text: str
    """The result, with its values."""
    advice: str = ""
    """The way out."""

    def sentence(self) -> str:
        """Join text and advice on one line."""
        return " ".join((f"{self.text}. {self.advice}." if self.advice else self.text).split())

    def line(self) -> str:
        """Format the finding as one line of a report."""
        return f"{self.level:<7}  {self.name:<14}  {self.sentence()}"


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are errors."""
    return [finding for finding in findings if finding.level == "error"]


def examine(accelerator: Any, parameters: int, *, settings: Any = None, timeout: float = 30.0) -> list[Finding]:
    """Examine a run after `prepare` and before its first step. Collective; changes nothing.

    Args:
        accelerator: a `GossipAccelerator`, or any other `accelerate.Accelerator`.
        parameters: number of trained parameters of one worker, which an exchange sends in float32.
        settings: further settings that all workers must share, as a mapping or a configuration dataclass.
        timeout: seconds after which a worker that does not answer is reported as lost.

    Returns:
        The findings, the same on all workers. A lost worker is an error among them, not an exception.

    Raises:
        ValueError: `parameters` or `timeout` is not positive, or a worker is several processes (`device_mesh`).

    >>> from accelerate import Accelerator
    >>> [finding.name for finding in examine(Accelerator(cpu=True), 10) if finding.level == "warning"]
    ['workers']
    """
    if parameters < 1:
        raise ValueError(f"parameters must be a number >= 1; got {parameters}.")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds > 0; got {timeout}.")
    own_group = getattr(accelerator, "group", None)
    if isinstance(own_group, WorkerGroup):
        own_group.refuse_combinations(call="examine")
    findings: list[Finding] = []
    try:
        group = WorkerGroup(accelerator.device, timeout)
        own = flat_settings({"gossip": getattr(accelerator, "gossip_config", {}), "parameters": parameters})
        findings += [_count_workers(accelerator, group)]
        findings += compare_settings(group, own | flat_settings(settings or {}))
        if errors_of(findings):
            return [*findings, Finding("ok", "network", "not measured until the errors above are fixed")]
        if group.size > 1:
            # Without gossip the links of an all-reduce are measured, each process as one worker.
            config = getattr(accelerator, "gossip_config", None)
            topology, local = ("complete", 1) if config is None else (config.topology, config.workers_per_process)
            if not isinstance(topology, Topology):
                topology = build_topology(topology, group.size * local)
            findings.append(check_links(4 * parameters, measure_links(group, topology, 4 * parameters, local)))
    except WorkerLostError as error:
        findings.append(Finding("error", "lost worker", str(error)))
    return findings


def quick_check(group: WorkerGroup, settings: Any = None) -> list[Finding]:
    """Check that versions and settings are equal and random streams differ, by two small messages. Collective.

    Runs at the first `prepare` of every training, after the random streams were set. Returns the warnings, which
    worker 0 logs. `settings` is a mapping or a configuration dataclass.

    Raises:
        ValueError: on all workers, if the run would fail or be wrong. The message names worker, key and values.
    """
    if group.size == 1:
        return []
    findings = compare_settings(group, settings)
    streams = group.all_gather_object(stream_fingerprints(), "comparing the random streams")
    findings += check_streams(streams)
    if errors := errors_of(findings):
        raise ValueError(" ".join(finding.sentence() for finding in errors))
    warnings = [finding for finding in findings if finding.level == "warning"]
    for finding in warnings if group.rank == 0 else ():
        logger.warning("%s: %s", finding.name, finding.sentence())
    return warnings


def _count_workers(accelerator: Any, group: WorkerGroup) -> Finding:
    local_workers = getattr(accelerator, "workers_per_process", 1)
    count = group.size * local_workers
    if count == 1:
        return Finding("warning", "workers", f"1, on {accelerator.device}: no other worker to mix with", HOW_TO_LAUNCH)
    backend = f", {group.process_groups.transport.backend}" if group.size > 1 else ""
    return Finding("ok", "workers", f"{count} ({group.size} processes x {local_workers}), {group.device.type}{backend}")


def _named(workers: Iterable[int]) -> str:
    """Name workers by their ranks.

    >>> _named([3]), _named([0, 2]), _named(range(12))
    ('worker 3', 'workers 0, 2', 'workers 0, 1, 2, 3, 4, 5, 6, 7, .. (12 in all)')
    """
    listed = list(workers)
    shown = ", ".join(map(str, listed[:8])) + (f", .. ({len(listed)} in all)" if len(listed) > 8 else "")
    return f"worker{'s' if len(listed) != 1 else ''} {shown}"


# ---- versions, settings, random streams


def compare_settings(group: WorkerGroup, settings: Any = None) -> list[Finding]:
    """Find different versions and settings. Collective."""
    own = package_versions(), flat_settings(settings or {})
    versions, configurations = zip(*group.all_gather_object(own, "comparing the settings"), strict=True)
    return [
        *check_equal("versions", versions, "Install the same versions for all workers", may_differ=_MAY_DIFFER),
        *check_equal("configuration", configurations, "Start all workers with the same file and arguments"),
    ]


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


def stream_fingerprints() -> dict[str, str]:
    """Return a fingerprint of each random stream of this process."""
    plain = {name: state.tolist() if isinstance(state, Tensor) else state for name, state in random_state().items()}
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in plain.items()}


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
            text = f"{_named(ranks)}: {key} = {value}, but worker 0: {key} = {first[0]}"
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
                text = f"{_named(ranks)} draw the same random numbers ({stream})"
                advice = "Seed alike on all workers before `prepare`, which then gives each worker its own stream"
                findings.append(Finding(level, "random streams", text, advice))
    return findings or [Finding("ok", "random streams", f"{', '.join(workers[0])}: different on all workers")]


def _owners(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, in order of rank."""
    owners = defaultdict(list)
    for rank, value in enumerate(values):
        owners[value].append(rank)
    return owners


# ---- links, measured with the library's own `Exchange`


def measure_links(group: WorkerGroup, topology: Topology, size: int, local_workers: int = 1) -> Links:
    """Measure exchanges of `size` bytes. Collective; the result is the same on all processes.

    Args:
        group: the processes.
        topology: topology of all workers.
        size: bytes of the parameters of one worker, float32.
        local_workers: number of workers in each process.

    Returns:
        Seconds of each link.

    Raises:
        WorkerLostError: a process does not answer.
    """
    probe = min(size, PROBE_BYTES)
    probed = sum(map(max, _times(group, topology, probe, local_workers)))
    affordable = int(probe * _BUDGET_SECONDS / (_REPEATS * probed))
    measured = max(probe, min(size, MOST_BYTES // topology.num_workers, affordable))
    found = link_times(topology, _times(group, topology, measured, local_workers), local_workers)
    return {pair: size / measured * seconds for pair, seconds in found.items()}


def link_times(topology: Topology, times: list[list[float]], local_workers: int = 1) -> Links:
    """Attribute the seconds of each process in each round to its links.

    A slow link delays both of its ends, so it takes at most the seconds of the faster end.

    >>> from dsgdac_accel.topology import build_topology
    >>> link_times(build_topology("one_peer_ring", 4), [[1, 1, 2, 2], [3, 4, 4, 3]])
    {(0, 1): 1, (2, 3): 2, (0, 3): 3, (1, 2): 4}
    """
    links: Links = {}
    for round_, seconds in zip(topology.rounds, times, strict=True):
        for one, other in sorted({tuple(sorted(map(int, pair))) for pair in np.argwhere(round_) // local_workers}):
            if one != other:
                faster = min(seconds[one], seconds[other])
                links[one, other] = min(links.get((one, other), math.inf), faster)
    return links


def _times(group: WorkerGroup, topology: Topology, size: int, local_workers: int) -> list[list[float]]:
    """Return the seconds of an exchange of `size` bytes, by round and process."""
    sent = torch.zeros(max(1, size // 4), device=group.device)
    rounds = Rounds(topology, group.members, local_workers, all_reduce=False)
    exchange = Exchange(group, rounds)
    received = [[[torch.zeros_like(sent)] for _ in range(slots)] for slots in rounds.slots]

    def seconds(round_: int) -> float:
        # Not a barrier, whose workers leave one after the other.
        group.all_reduce_max_(torch.zeros(1, device=group.device), "measuring the links")
        synchronize(group.device)
        started = time.perf_counter()
        exchange.post(round_, "measuring the links", lambda worker, receiver: [sent], received)
        exchange.wait()
        synchronize(group.device)
        return time.perf_counter() - started

    mine = [min(seconds(round_) for _ in range(_REPEATS)) for round_ in range(topology.period)]
    by_process = group.all_gather_object(mine, "measuring the links")
    return [list(times) for times in zip(*by_process, strict=True)]


def check_links(size: int, links: Links) -> Finding:
    """Name the slowest link, and say how long an exchange of `size` bytes takes over it."""
    pair, median = max(links, key=links.__getitem__), median_low(links.values())
    slowest = links[pair]
    text = (
        f"{len(links)} measured, an exchange of {size / 1e6:.3g} MB each; slowest, workers {pair[0]} and {pair[1]}: "
        f"{1e3 * slowest:.3g} ms ({size / slowest / 1e6:.3g} MB/s each way); median {1e3 * median:.3g} ms"
    )
    if slowest > _SLOW_FACTOR * median and slowest - median > _SLOW_SECONDS:
        advice = "Check the network between these two, or number the workers so that they are not neighbors"
        return Finding("warning", "links", text, advice)
    return Finding("ok", "links", text)
