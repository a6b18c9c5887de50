"""`examine`: compare the workers of a run, its data and its links before the first step."""

from __future__ import annotations

from typing import Any

from torch import nn

from dsgdac_accel.distributed.failure_detection import WorkerLostError
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.comparison import compare_models, compare_settings, compare_streams, flat_settings
from dsgdac_accel.doctor.data import check_shards, check_steps, share_of
from dsgdac_accel.doctor.links import check_links, measure_links
from dsgdac_accel.doctor.report import Finding, Report
from dsgdac_accel.topology import Topology, build_topology
from dsgdac_accel.virtual_workers import first_replica

HOW_TO_LAUNCH = (
    "Start several with torchrun --nproc_per_node N or accelerate launch --multi_gpu --num_processes N (which starts "
    "CPU workers as well), or set workers_per_process. accelerate launch --cpu starts one process only"
)


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
        ValueError: `parameters` or `timeout` is not positive, or a worker is several processes (`device_mesh`).

    >>> from accelerate import Accelerator
    >>> [finding.level for finding in examine(Accelerator(cpu=True)).findings if finding.name == "workers"]
    ['warning']
    """
    if parameters is not None and parameters < 1:
        raise ValueError(f"parameters must be a number >= 1; got {parameters}.")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds > 0; got {timeout}.")
    if isinstance(getattr(accelerator, "group", None), WorkerGroup) and accelerator.group.row.mesh is not None:
        raise ValueError("examine does not support device_mesh. Examine the launch without it, one process per worker.")
    report = Report()
    try:
        group = WorkerGroup(accelerator.device, timeout)
        own = flat_settings({"gossip": getattr(accelerator, "gossip_config", {}), "parameters": parameters})
        report.findings += [_count_workers(accelerator, group)]
        report.findings += compare_settings(group, own | flat_settings(settings or {}))
        if model is not None:
            steps = getattr(accelerator, "gossip_steps", [])
            report.findings += compare_models(group, model, fresh=bool(steps) and not any(s.mixer.step for s in steps))
            # `prepare` has given each worker its own random streams.
            report.findings += compare_streams(group)
        if report.exit_status:
            report.findings.append(Finding("ok", "data and links", "not examined until the errors above are fixed"))
            return report
        if loader is not None:
            shares = group.all_gather_object(share_of(loader), "looking at the data")
            report.findings += [*check_steps(shares), *check_shards(shares)]
        size = parameter_bytes(model) if parameters is None else 4 * parameters
        if size > 0 and group.size > 1:
            _measure(accelerator, group, size, report)
    except WorkerLostError as error:
        report.findings.append(Finding("error", "lost worker", str(error)))
    return report


def parameter_bytes(model: nn.Module | None) -> int:
    """Return the bytes of the trained parameters of one worker, which are what an exchange sends."""
    parameters = [] if model is None else first_replica(model).parameters()
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def _count_workers(accelerator: Any, group: WorkerGroup) -> Finding:
    local_workers = getattr(accelerator, "workers_per_process", 1)
    count = group.size * local_workers
    if count == 1:
        return Finding("warning", "workers", f"1, on {accelerator.device}: no other worker to mix with", HOW_TO_LAUNCH)
    backend = f", {group.process_groups.backend}" if group.size > 1 else ""
    return Finding("ok", "workers", f"{count} ({group.size} processes x {local_workers}), {group.device.type}{backend}")


def _measure(accelerator: Any, group: WorkerGroup, size: int, report: Report) -> None:
    """Measure exchanges of `size` bytes per worker."""
    config = getattr(accelerator, "gossip_config", None)
    # Without gossip the links of an all-reduce are measured, each process as one worker.
    topology, local_workers = ("complete", 1) if config is None else (config.topology, config.workers_per_process)
    if not isinstance(topology, Topology):
        topology = build_topology(topology, group.size * local_workers)
    links, exchange_seconds = measure_links(group, topology, size, local_workers)
    report.findings += check_links(size, links, exchange_seconds)
    report.values = {
        "parameter_bytes": size,
        "exchange_seconds": exchange_seconds,
        "links": [{"processes": pair, "seconds": seconds} for pair, seconds in sorted(links.items())],
    }
