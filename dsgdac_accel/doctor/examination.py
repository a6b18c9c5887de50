"""`examine`: everything that can be known about a run before it trains; `quick_check`: what costs nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.distributed.failure_detection import WorkerLostError
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.doctor.checks import check_facts, check_room, wrong_run
from dsgdac_accel.doctor.data import check_shares, share_of
from dsgdac_accel.doctor.facts import Facts, collect_facts, flat_settings, parameter_bytes, stream_fingerprints
from dsgdac_accel.doctor.links import check_links, measure_links
from dsgdac_accel.doctor.meeting import SilentWorkersError, default_store, lost, roll_call
from dsgdac_accel.doctor.report import Finding, Report, named_workers, size_text
from dsgdac_accel.doctor.settings import check_gossip, check_topology
from dsgdac_accel.topology import Topology, build_topology

T = TypeVar("T")

logger = logging.getLogger(__name__)

HOW_TO_LAUNCH = (
    "Start several with torchrun --nproc_per_node N, or accelerate launch --multi_gpu --num_processes N (which starts "
    "CPU workers, too), or set workers_per_process"
)
_STOPPERS = ("configuration", "device", "GPU", "launch")
"""Errors after which an exchange would fail or hang."""


def examine(
    accelerator: Any,
    model: nn.Module | None = None,
    loader: Any = None,
    *,
    settings: Any = None,
    parameters: int | None = None,
    output_dir: Path | str | None = None,
    timeout: float = 30.0,
    report: Report | None = None,
) -> Report:
    """Examine a run after `prepare` and before its first step. Collective; changes nothing.

    Args:
        accelerator: a `GossipAccelerator`; of any other `accelerate.Accelerator` what it knows.
        model: prepared; its parameters and buffers are compared, and its size is that of an exchange.
        loader: prepared; a pass over the numbers of its samples tells shards and steps, without reading the data.
        settings: further settings that all workers must share: a mapping or a configuration dataclass.
        parameters: numbers (float32) in an exchange, in place of those of `model`.
        output_dir: where the run is going to write; nothing is written there now.
        timeout: seconds after which a worker that does not answer is named.
        report: filled in place of a new one.

    Returns:
        The report, the same on all workers. A worker that is missing or was lost is an error in it, not an exception.

    Raises:
        ValueError: `parameters` or `timeout` is not above 0.

    >>> from accelerate import Accelerator
    >>> [finding.level for finding in examine(Accelerator(cpu=True)).findings if finding.subject == "workers"]
    ['warning']
    """
    if parameters is not None and parameters < 1:
        raise ValueError(f"parameters must be a number >= 1; got {parameters}.")
    if not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds > 0; got {timeout}.")
    report = Report() if report is None else report
    started = time.monotonic()
    examination = _Examination(accelerator, model, timeout, report)
    try:
        examination.meet()
        examination.compare(settings, None if output_dir is None else Path(output_dir))
        examination.look_at_settings()
        examination.look_at_data(loader)
        examination.measure(parameters)
    except (SilentWorkersError, WorkerLostError) as error:
        report.add([lost(error)])
    report.values["seconds"] = round(time.monotonic() - started, 3)
    return report


def quick_check(
    group: WorkerGroup, settings: Any = None, model: nn.Module | None = None, *, streams: bool = True
) -> list[Finding]:
    """Equal versions and settings and differing random streams, by one small message. Collective.

    For the start of every run: it takes milliseconds. Warnings are logged by worker 0.

    Args:
        group: the workers.
        settings: that all must share.
        model: `VirtualWorkers` whose random streams are compared, too.
        streams: whether random streams should differ by now.

    Returns:
        The warnings.

    Raises:
        ValueError: on all workers: a run would fail or be wrong; the message names worker, key and values.
    """
    if group.size == 1:
        return []
    fact = collect_facts(group.rank, group.device, settings=settings, streams=streams, model=None)
    if streams and model is not None:
        fact = replace(fact, streams=stream_fingerprints(model))
    findings = wrong_run(group.all_gather_object(fact, "checking the workers"))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError(" ".join(f"{finding.message}. {finding.advice}." for finding in errors))
    for finding in findings:
        if group.rank == 0:
            logger.warning("%s: %s. %s.", finding.subject, finding.message, finding.advice)
    return findings


class _Examination:
    """One examination, stage by stage; every stage is collective."""

    def __init__(self, accelerator: Any, model: nn.Module | None, timeout: float, report: Report) -> None:
        self.accelerator = accelerator
        self.model = model
        self.timeout = timeout
        self.report = report
        self.config: GossipConfig | None = getattr(accelerator, "gossip_config", None)
        self.per_process: int = getattr(accelerator, "workers_per_process", 1)
        self.steps: Sequence[Any] = getattr(accelerator, "gossip_steps", ())
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.facts: list[Facts] = []

    @property
    def num_workers(self) -> int:
        return self.size * self.per_process

    def meet(self) -> None:
        """Find out who is there, before anything that would wait for all."""
        if self.size > 1:
            roll_call(default_store(), self.rank, self.size, "the examination", self.timeout)
        own = getattr(self.accelerator, "group", None)
        # A run may give its workers more time than an examination has, and go on without one that is lost.
        if isinstance(own, WorkerGroup) and own.timeout <= self.timeout and own.on_loss == "stop":
            self.group = own
        else:
            self.group = WorkerGroup(self.accelerator.device, self.timeout)

    def compare(self, settings: Any, output_dir: Path | None) -> None:
        """Everything that follows from what each process knows of itself."""
        seeded = getattr(self.accelerator, "_seeded", self.model is not None) and self.size > 1
        fresh = bool(self.steps) and all(step.mixer.step == 0 for step in self.steps)
        fact = collect_facts(
            self.rank,
            self.accelerator.device,
            settings=self._all_settings(settings),
            model=self.model,
            streams=seeded,
            fresh=fresh,
            output_dir=output_dir,
        )
        self.facts = self.group.all_gather_object(fact, "comparing the workers")
        machines = len({fact.machine for fact in self.facts})
        self.report.values |= {
            "workers": self.num_workers,
            "processes": self.size,
            "workers_per_process": self.per_process,
            "machines": machines,
            "backend": self.group.backend if self.size > 1 else None,
            "device": str(self.accelerator.device),
        }
        self.report.add([self._workers(machines), *check_facts(self.facts)])

    def _all_settings(self, settings: Any) -> dict[str, Any]:
        own = {} if self.config is None else {f"gossip.{k}": v for k, v in flat_settings(self.config).items()}
        if self.config is not None and isinstance(self.config.topology, Topology):
            own["gossip.topology (rounds)"] = self.config.topology.fingerprint
        return own | flat_settings(settings)

    def _workers(self, machines: int) -> Finding:
        if self.num_workers == 1:
            advice = HOW_TO_LAUNCH
            if self.facts[0].environment.get("ACCELERATE_USE_CPU", "").lower() == "true":
                advice += ". accelerate launch --cpu starts one process, whatever --num_processes says"
            return Finding("warning", "workers", f"1, on {self.facts[0].device}: nobody to gossip with", advice)
        processes = f"{self.size} process{'es' if self.size > 1 else ''} x {self.per_process}"
        where = f"{machines} machine{'s' if machines > 1 else ''}"
        backend = f"{self.group.backend}, " if self.size > 1 else ""
        device = self.facts[0].device.split(":")[0]
        return Finding("ok", "workers", f"{self.num_workers} ({processes}), {where}, {backend}{device}")

    @property
    def stopped(self) -> bool:
        """Whether workers are too different to go on together."""
        return any(finding.level == "error" and finding.subject in _STOPPERS for finding in self.report.findings)

    def look_at_settings(self) -> None:
        """Topology and gamma."""
        self.topology: Topology | None = None
        if self.config is None:
            self.report.add([Finding("ok", "gossip", "none: the workers average gradients (DDP)")])
            return
        named = self.config.topology
        topology = named if isinstance(named, Topology) else build_topology(named, self.num_workers)
        planned = self.steps[0].schedule.planned_lrs if self.steps else None
        findings, values = check_topology(topology, self.config.total_steps)
        self.topology = topology
        self.report.values |= {"topology": topology.name, **values}
        self.report.add([*findings, *check_gossip(self.config, self.config.total_steps, planned)])

    def look_at_data(self, loader: Any) -> None:
        """Shards and steps."""
        if loader is None or self.stopped:
            return
        shares = self._from_all(lambda: share_of(loader), "looking at the data")
        if shares is not None:
            self.report.add(check_shares(shares, self.facts))
            self.report.values["steps_per_pass"] = [share.steps for share in shares]

    def measure(self, parameters: int | None) -> None:
        """The links, by exchanges of the model's size."""
        here = 4 * parameters if parameters is not None else None
        if here is None and self.model is not None:
            here = parameter_bytes(self.model)
        size = self.group.all_gather_object(here, "agreeing on a size")[0]
        if not size:
            return
        self.report.values["parameter_bytes"] = size
        self.report.add(check_room(self.facts, size * self.num_workers * (1 + self._optimizer_copies())))
        if self.stopped:
            self.report.add([Finding("ok", "links", "not measured before the errors above are mended")])
            return
        if self.size == 1:
            if self.num_workers > 1:
                text = f"none: all {self.num_workers} workers exchange {size_text(size)} in the memory of this process"
                self.report.add([Finding("ok", "links", text)])
            return
        topology = self.topology or build_topology("complete", self.size)
        measured = measure_links(self.group, topology, size, self.per_process if self.topology else 1)
        self.report.add(check_links(measured, topology, self.config))
        self.report.values |= {
            "measured_bytes": measured.measured_size,
            "exchange_seconds": measured.exchange_seconds,
            "round_seconds": list(measured.rounds),
            "bytes_sent": measured.bytes_sent,
            "radius_seconds": measured.radius_seconds,
            "links": [asdict(link) | {"bytes_per_second": link.bandwidth} for link in measured.links],
        }

    def _optimizer_copies(self) -> int:
        """Copies of the parameters that the optimizer keeps, for the size of a checkpoint."""
        copies = 0
        for optimizer in getattr(self.accelerator, "_optimizers", ()):
            defaults: Mapping[str, Any] = getattr(optimizer, "defaults", {})
            copies = max(copies, 2 if "betas" in defaults else int(bool(defaults.get("momentum"))))
        return copies

    def _from_all(self, find: Callable[[], T], what: str) -> list[T] | None:
        """What every process finds; an error of one of them is a finding that names it."""
        found: T | None = None
        problem: str | None = None
        try:
            found = find()
        except WorkerLostError:
            raise
        except Exception as error:  # the loader is the user's code
            problem = f"{type(error).__name__}: {error}"
        answers = self.group.all_gather_object((found, problem), what)
        problems = [(rank, said) for rank, (_, said) in enumerate(answers) if said is not None]
        for rank, said in problems[:1]:
            ranks = tuple(rank for rank, _ in problems)
            text = f"{what} failed on {named_workers(ranks)}; worker {rank}: {said}"
            self.report.add([Finding("error", "data", text, "Mend the loader", ranks)])
        return None if problems else [answer for answer, _ in answers]  # type: ignore[misc]
