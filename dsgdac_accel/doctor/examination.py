"""`examine`: compare the workers of a run, its data and its links before the first step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.distributed.failure_detection import WorkerLostError
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.comparison import Facts, collect_facts, compare, flat_settings, parameter_bytes
from dsgdac_accel.doctor.data import Share, check_shards, check_steps, share_of
from dsgdac_accel.doctor.links import check_links, measure_links
from dsgdac_accel.doctor.report import Finding, Report, named_workers, size_text
from dsgdac_accel.topology import TOLERANCE, Topology, build_topology, steps_to_mix

HOW_TO_LAUNCH = (
    "Start several with torchrun --nproc_per_node N or accelerate launch --multi_gpu --num_processes N (which starts "
    "CPU workers as well), or set workers_per_process. accelerate launch --cpu starts one process only"
)
_BLOCKING = ("configuration", "device", "launch")
"""Subjects of errors after which a pass or an exchange might hang."""


def examine(
    accelerator: Any,
    model: nn.Module | None = None,
    loader: Any = None,
    *,
    settings: Any = None,
    parameters: int | None = None,
    timeout: float = 30.0,
) -> Report:
    """Examine a run after `prepare` and before its first step. Collective; changes nothing.

    Args:
        accelerator: a `GossipAccelerator`, or any other `accelerate.Accelerator`.
        model: the prepared model. Its parameters and buffers are compared, and its size is that of an exchange.
        loader: the prepared loader. Steps and shards are found by a pass over sample indices, without reading data.
        settings: further settings that all workers must share, as a mapping or a configuration dataclass.
        parameters: number of float32 parameters in an exchange, in place of those of `model`.
        timeout: seconds after which a worker that does not answer is reported as lost.

    Returns:
        The report, the same on all workers. A lost worker is an error in the report, not an exception.

    Raises:
        ValueError: `parameters` or `timeout` is not positive.

    >>> from accelerate import Accelerator
    >>> [finding.level for finding in examine(Accelerator(cpu=True)).findings if finding.subject == "workers"]
    ['warning']
    """
    if parameters is not None and parameters < 1:
        raise ValueError(f"parameters must be a number >= 1; got {parameters}.")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds > 0; got {timeout}.")
    report = Report()
    try:
        group = _group(accelerator, timeout)
        facts = _all_facts(accelerator, group, model, settings)
        report.add([_workers(accelerator, group, facts), *compare(facts)])
        report.values["workers"] = group.size * getattr(accelerator, "workers_per_process", 1)
        topology = _topology(accelerator)
        if topology is not None:
            report.values |= {"topology": topology.name, "spectral_gap": topology.spectral_gap()}
            report.add(check_topology(topology))
        if any(finding.level == "error" and finding.subject in _BLOCKING for finding in report.findings):
            report.add([Finding("ok", "links", "not measured until the errors above are fixed")])
            return report
        if loader is not None:
            report.add(_check_data(group, loader, report))
        _measure(accelerator, group, model, parameters, topology, report)
    except WorkerLostError as error:
        report.add([lost_worker(error)])
    return report


def lost_worker(error: WorkerLostError) -> Finding:
    """Return the finding for a worker that does not answer."""
    return Finding("error", "lost worker", str(error))


def _group(accelerator: Any, timeout: float) -> WorkerGroup:
    """Return the accelerator's own group if its timeout is short enough and a loss ends it, otherwise a new one."""
    own = getattr(accelerator, "group", None)
    if isinstance(own, WorkerGroup) and own.timeout <= timeout and own.policy.name == "stop":
        return own
    return WorkerGroup(accelerator.device, timeout)


def _all_facts(accelerator: Any, group: WorkerGroup, model: nn.Module | None, settings: Any) -> list[Facts]:
    config: GossipConfig | None = getattr(accelerator, "gossip_config", None)
    steps = getattr(accelerator, "gossip_steps", ())
    own = {} if config is None else {f"gossip.{key}": value for key, value in flat_settings(config).items()}
    if config is not None and isinstance(config.topology, Topology):
        own["gossip.topology (rounds)"] = config.topology.fingerprint
    facts = collect_facts(
        group.rank,
        accelerator.device,
        settings=own | flat_settings(settings),
        model=model,
        # `prepare` gives each worker its own random streams.
        streams=group.size > 1 and (bool(steps) if config is not None else model is not None),
        fresh=bool(steps) and all(step.mixer.step == 0 for step in steps),
    )
    return group.all_gather_object(facts, "comparing the workers")


def _workers(accelerator: Any, group: WorkerGroup, facts: list[Facts]) -> Finding:
    per_process = getattr(accelerator, "workers_per_process", 1)
    count, machines = group.size * per_process, len({fact.machine for fact in facts})
    if count == 1:
        return Finding("warning", "workers", f"1, on {accelerator.device}: no other worker to mix with", HOW_TO_LAUNCH)
    processes = f"{group.size} process{'es' * (group.size > 1)} x {per_process}"
    backend = f"{group.process_groups.backend}, " if group.size > 1 else ""
    where = f"{machines} machine{'s' * (machines > 1)}, {backend}{facts[0].device.split(':')[0]}"
    return Finding("ok", "workers", f"{count} ({processes}), {where}")


def _topology(accelerator: Any) -> Topology | None:
    """Return the topology of all workers; None without gossip."""
    config: GossipConfig | None = getattr(accelerator, "gossip_config", None)
    if config is None:
        return None
    if isinstance(config.topology, Topology):
        return config.topology
    return build_topology(config.topology, accelerator.num_processes * accelerator.workers_per_process)


def check_topology(topology: Topology) -> list[Finding]:
    """Say how fast the topology mixes."""
    if topology.num_workers == 1:
        return []
    gap = topology.spectral_gap()
    message = f"{topology.name} of {topology.num_workers} workers, period {topology.period}, spectral gap {gap:.3g}"
    if gap < TOLERANCE:
        advice = "Let each worker keep some of its own weight, or use base_graph"
        return [Finding("error", "topology", f"{message}: the workers never agree, even at gamma 1", advice)]
    return [Finding("ok", "topology", f"{message}, {steps_to_mix(topology, 1e-3)} steps at gamma 1 mix to 1e-3")]


def _check_data(group: WorkerGroup, loader: Any, report: Report) -> list[Finding]:
    """Compare the shares of all processes. An error in the user's loader is a finding that names the worker."""
    share: Share | None = None
    problem: str | None = None
    try:
        share = share_of(loader)
    except WorkerLostError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    answers = group.all_gather_object((share, problem), "looking at the data")
    failed = tuple(rank for rank, (_, problem) in enumerate(answers) if problem is not None)
    if failed:
        message = f"the loader failed on {named_workers(failed)}; worker {failed[0]}: {answers[failed[0]][1]}"
        return [Finding("error", "data", message, "Fix the loader", failed)]
    shares = [share for share, _ in answers if share is not None]
    report.values["steps_per_pass"] = [share.steps for share in shares]
    return [*check_steps(shares), *check_shards(shares)]


def _measure(
    accelerator: Any,
    group: WorkerGroup,
    model: nn.Module | None,
    parameters: int | None,
    topology: Topology | None,
    report: Report,
) -> None:
    """Measure exchanges of the model's size."""
    own = 4 * parameters if parameters is not None else None if model is None else parameter_bytes(model)
    size = group.all_gather_object(own, "agreeing on a size")[0]
    if not size:
        return
    report.values["parameter_bytes"] = size
    if group.size == 1:
        count = getattr(accelerator, "workers_per_process", 1)
        message = f"none: the {count} workers exchange {size_text(size)} in the memory of this process"
        report.add([Finding("ok", "links", message)] if count > 1 else [])
        return
    # Without gossip the links of an all-reduce are measured, each process as one worker.
    per_process = accelerator.workers_per_process if topology is not None else 1
    topology = topology or build_topology("complete", group.size)
    measured = measure_links(group, topology, size, per_process)
    report.add(check_links(measured, topology))
    report.values |= {
        "measured_bytes": measured.measured_size,
        "exchange_seconds": measured.exchange_seconds,
        "round_seconds": list(measured.rounds),
        "links": [asdict(link) | {"bytes_per_second": link.bandwidth} for link in measured.links],
    }
