"""`GossipConfig`: the settings of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dsgdac_accel.checks import (
    LONGEST_TIMEOUT,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    did_you_mean,
)
from dsgdac_accel.topology import TOPOLOGIES, Topology

_COMM_DTYPES = ("full", "bf16", "int8")
_ORDERS = ("local_first", "mix_first")
_MAX_LR_WORDS = ("active", "run")
_OTHER_COUNTS = ("refuse", "deployed")
_ON_LOSS = ("stop", "continue")


@dataclass(frozen=True, kw_only=True)
class GossipConfig:
    """Who mixes with whom, how strongly and when (DSGD-AC, Algorithm 1).

    The defaults are the paper's: a one-peer ring and gamma = (rate / max_lr)^3 from the first step. Values are
    checked on construction: a ValueError names the rule, the value and the way out.

    >>> GossipConfig(power=2, start_epoch=10).power
    2.0
    >>> GossipConfig(power=-1)
    Traceback (most recent call last):
    ValueError: power must be a finite number >= 0; got -1. Use 0 for plain DSGD (gamma 1 throughout).
    """

    topology: str | Topology = "one_peer_ring"
    """Who mixes with whom: one_peer_ring, one_peer_exponential (2^k workers), complete, ring, exponential, grid or
    base_graph (any number of workers); in Python also a Topology of your own."""

    power: float = 3.0
    """Exponent p >= 0 of gamma = (rate / max_lr)^p; 0 is plain DSGD (or DAdam), whose gamma is 1 throughout."""

    start_step: int | None = None
    """Optimizer step (0-based) at which adaptive consensus begins: steps 0 to start_step - 1 mix with gamma 1.
    null begins at the first step, unless start_epoch is given."""

    start_epoch: int | None = None
    """Epoch (0-based) at which adaptive consensus begins: epochs 0 to start_epoch - 1 mix with gamma 1. An epoch is
    a training pass begun over the prepared loader. Give this or start_step, not both."""

    max_lr: Literal["active", "run"] | float = "active"
    """The rate at which gamma is 1: the largest rate among the steps since adaptive consensus began (active, the
    paper's appendix), the largest of the whole run (run, Algorithm 1), or a number > 0."""

    floor: float = 0.0
    """Smallest gamma in [0, 1]; above 0 the workers keep mixing where the learning rate is 0, as at the start of a
    warm-up."""

    constant: float | None = None
    """A fixed gamma in [floor, 1] in place of the power law once adaptive consensus has begun: a control experiment."""

    workers_per_process: int = 1
    """Workers that each process holds (>= 1), each with a copy of the model of its own, its part of the process's
    batch, and its own optimizer state, dropout and BatchNorm statistics: 8 on one GPU, or 32 on four."""

    comm_dtype: Literal["full", "bf16", "int8"] = "full"
    """What neighbours in other processes are sent: the parameters as they are (full), or the difference to what the
    two of them last had in common, rounded to bf16 (half the bytes of fp32) or int8 (a quarter)."""

    mix_every: int = 1
    """Mix in every k-th step (>= 1) and keep apart in between: a k-th of the messages."""

    order: Literal["local_first", "mix_first"] = "local_first"
    """local_first takes the local step at x and adds the mixing update of the same x (Algorithm 1 to the letter);
    mix_first mixes before the local step: fewer passes over memory, but weight decay sees the mixed point."""

    overlap: bool = True
    """Start the next exchange right after the step, hidden behind the next forward and backward; false posts it
    inside the step."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, if known: lets max_lr look ahead along the learning-rate scheduler."""

    log_every: int = 50
    """Steps between measurements of the exact consensus radius, each a reduction of the size of the model; 0 measures
    at evaluations only."""

    sketch: int = 0
    """Numbers that each worker sends to worker 0 in every step, from which the radius is estimated there, with a
    relative standard error of at most sqrt(1 / (2 sketch)): 2.2 % for 1024; 0 estimates nothing."""

    timeout: float = 600.0
    """Seconds (> 0) within which a lost or silent worker is noticed by every other worker."""

    on_worker_loss: Literal["stop", "continue"] = "stop"
    """What a lost worker means to the others: stop ends the run on all of them, with an error that names it; continue
    goes on without it (CPU workers), mixes by the topology of those that are left, and deploys their average."""

    on_other_worker_count: Literal["refuse", "deployed"] = "refuse"
    """Resuming from a checkpoint of more or fewer workers: refuse, or let all workers start from the deployed model
    (deployed): parameters and optimizer states averaged over the saved workers, random streams seeded anew."""

    max_consecutive_nonfinite: int = 10
    """Steps in a row (>= 1) with a gradient that is not finite on one worker before the run stops and names it."""

    def __post_init__(self) -> None:
        self._set("topology", _checked_topology(self.topology))
        self._set("max_lr", _checked_max_lr(self.max_lr))
        self._check_gamma()
        self._check_start()
        self._check_running()

    def _check_gamma(self) -> None:
        advice = "Use 0 for plain DSGD (gamma 1 throughout)."
        self._set("power", check_number("power", self.power, minimum=0, advice=advice))
        self._set(
            "floor", check_number("floor", self.floor, minimum=0, maximum=1, advice="It bounds gamma from below.")
        )
        if self.constant is not None:
            advice = f"It is a gamma, and floor = {self.floor:g} bounds every gamma; leave it out for the power law."
            constant = check_number("constant", self.constant, minimum=self.floor, maximum=1, advice=advice)
            self._set("constant", constant)

    def _check_start(self) -> None:
        for name in ("start_step", "start_epoch"):
            value = getattr(self, name)
            if value is not None:
                advice = "Counting starts at 0; leave it out to begin at the first step."
                self._set(name, check_integer(name, value, minimum=0, advice=advice))
        if self.start_step is not None and self.start_epoch is not None:
            got = f"start_step={self.start_step} and start_epoch={self.start_epoch}"
            raise ValueError(f"start_step and start_epoch exclude each other; got {got}. Keep one.")
        if self.total_steps is not None:
            self._set("total_steps", check_integer("total_steps", self.total_steps, minimum=1))
            _check_within(self.start_step, self.total_steps)

    def _check_running(self) -> None:
        advice = "Use 1 for one worker per process."
        count = check_integer("workers_per_process", self.workers_per_process, minimum=1, advice=advice)
        self._set("workers_per_process", count)
        check_choice("comm_dtype", self.comm_dtype, _COMM_DTYPES)
        advice = "Use 1 to mix in every step."
        self._set("mix_every", check_integer("mix_every", self.mix_every, minimum=1, advice=advice))
        check_choice("order", self.order, _ORDERS)
        check_flag("overlap", self.overlap)
        advice = "Use 0 to measure at evaluations only."
        self._set("log_every", check_integer("log_every", self.log_every, minimum=0, advice=advice))
        advice = "Use 0 for no estimate of the radius between exact measurements, or about 1024."
        self._set("sketch", check_integer("sketch", self.sketch, minimum=0, advice=advice))
        advice = "It is in seconds."
        self._set("timeout", check_number("timeout", self.timeout, above=0, maximum=LONGEST_TIMEOUT, advice=advice))
        check_choice("on_worker_loss", self.on_worker_loss, _ON_LOSS)
        check_choice("on_other_worker_count", self.on_other_worker_count, _OTHER_COUNTS)
        advice = "Use 1 to stop at the first."
        limit = check_integer("max_consecutive_nonfinite", self.max_consecutive_nonfinite, minimum=1, advice=advice)
        self._set("max_consecutive_nonfinite", limit)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way a frozen dataclass normalises its own fields


def _checked_topology(topology: object) -> str | Topology:
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str):
        got = f"{topology!r} ({type(topology).__name__})"
        raise ValueError(f"topology must be a name or a Topology; got {got}. Names: {', '.join(TOPOLOGIES)}.")
    return check_choice("topology", topology, TOPOLOGIES)


def _checked_max_lr(max_lr: Any) -> Any:
    if not isinstance(max_lr, str):
        advice = "Or use 'active' or 'run'."
        return check_number("max_lr", max_lr, above=0, advice=advice)
    if max_lr not in _MAX_LR_WORDS:
        suggestion = did_you_mean(max_lr, _MAX_LR_WORDS)
        raise ValueError(f"max_lr must be 'active', 'run' or a number > 0; got {max_lr!r}.{suggestion}")
    return max_lr


def _check_within(start_step: int | None, total_steps: int) -> None:
    if start_step is not None and start_step > total_steps:
        raise ValueError(
            f"start_step must be <= total_steps = {total_steps}, beyond which there is no step; got {start_step}. "
            "Lower it, or use power 0 for plain DSGD."
        )
