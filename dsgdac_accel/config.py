"""`GossipConfig`, the settings of the algorithm, and configurations as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from dsgdac_accel.checks import (
    LONGEST_TIMEOUT,
    absolute_path,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    did_you_mean,
)
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import OTHER_TOPOLOGY_NAMES, TOPOLOGIES, Topology

_SCHEDULE = ("power", "start_step", "start_epoch", "max_lr", "floor", "constant")
_COMM_DTYPES = ("full", "bf16", "int8", "int4", "int2")
_ORDERS = ("local_first", "mix_first")
_ON_OTHER_WORKER_COUNT = ("refuse", "deployed")

REMOVED = {
    "asynchronous": "Give slower workers smaller batches (docs/accelerate.md).",
    "on_worker_loss": "A lost worker ends the run; torchrun --max-restarts=N starts it again (docs/checkpoints.md).",
    "sketch": "Set log_every to measure the radius more often.",
}
"""Settings that earlier versions had, with the way out."""

OTHER_NAMES = {
    "p": "power",
    "exponent": "power",
    "gamma": "power",
    "lr": "max_lr",
    "lr_max": "max_lr",
    "rate": "max_lr",
    "warmup": "start_step",
    "warmup_steps": "start_step",
    "max_steps": "total_steps",
    "graph": "topology",
    "num_workers": "workers_per_process",
    "local_workers": "workers_per_process",
    "compression": "comm_dtype",
    "gossip_every": "mix_every",
    "logging_steps": "log_every",
}
"""Names that other libraries and papers use for a setting."""


@dataclass(frozen=True, kw_only=True)
class GossipConfig:
    """Settings of gossip (DSGD-AC, Algorithm 1): topology, gamma, communication, and failures of workers.

    The defaults are those of the paper: a one-peer ring and gamma = (lr / max_lr)^3 from the first step.

    Raises:
        ValueError: a value is out of range. The message names the rule, the value and the way out.

    >>> GossipConfig(power=2, start_epoch=10).power
    2.0
    >>> GossipConfig(powr=2)
    Traceback (most recent call last):
    TypeError: GossipConfig has no setting 'powr'. Did you mean 'power'?
    >>> GossipConfig(topology="hypercube")
    Traceback (most recent call last):
    ValueError: topology must be one of one_peer_ring, one_peer_exponential, complete, ring, exponential, grid, \
base_graph; got 'hypercube'. Did you mean 'one_peer_exponential'?
    >>> GossipConfig(power=-1)
    Traceback (most recent call last):
    ValueError: power must be a finite number >= 0; got -1. Use 0 for plain DSGD (gamma is 1 throughout).
    """

    # Schedule: how large gamma is in each step.

    power: float = 3.0
    """Exponent p >= 0 of gamma = (lr / max_lr)^p. 0 is plain DSGD (or DAdam): gamma is 1 throughout."""

    start_step: int | None = None
    """First optimizer step (0-based) of adaptive consensus; earlier steps mix with gamma 1. null starts at step 0,
    unless start_epoch is given."""

    start_epoch: int | None = None
    """First epoch (0-based) of adaptive consensus; earlier epochs mix with gamma 1. An epoch is one pass over the
    prepared training loader. Give this or start_step, not both."""

    max_lr: Literal["active", "run"] | float = "active"
    """Learning rate at which gamma is 1. active is the largest one since adaptive consensus started (the paper's
    appendix), run is the largest one of the whole run (Algorithm 1); or give a number > 0."""

    floor: float = 0.0
    """Smallest gamma, in [0, 1]. Above 0, the workers keep mixing while the learning rate is 0, for example at the
    start of a warm-up."""

    constant: float | None = None
    """A fixed gamma in [floor, 1] that replaces the power law once adaptive consensus has started, as a control
    experiment. null uses the power law."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, if known. max_lr then looks ahead along the learning-rate scheduler."""

    # Communication: who exchanges what, when, and what is measured.

    topology: str | Topology = "one_peer_ring"
    """Workers that mix in each round: one_peer_ring, one_peer_exponential (2^k workers), complete, ring, exponential,
    grid or base_graph (any number of workers). A worker has a copy of its trained parameters to send, and one for each
    neighbor that it receives from at once. Python code may also pass a Topology."""

    workers_per_process: int = 1
    """Workers in each process (>= 1). Each has its own copy of the model, part of the process's batch, optimizer state,
    dropout and BatchNorm statistics. Use it to run 8 workers on one GPU, or 32 on four."""

    comm_dtype: Literal["full", "bf16", "int8", "int4", "int2"] = "full"
    """Format of the messages between processes. full sends the copies as they are; the others send the change since the
    last exchange of the two workers, rounded to 16, 8, 4 or 2 bits a parameter."""

    mix_every: int = 1
    """Mix in every k-th step (>= 1) and not in between, which sends one k-th of the messages."""

    order: Literal["local_first", "mix_first"] = "local_first"
    """local_first takes the local step at x and adds the consensus update of the same x (Algorithm 1 to the letter).
    mix_first adds it before the local step, as the authors' code does: weight decay sees the mixed parameters."""

    overlap: bool = True
    """Send right after the step, so that the exchange travels during the next forward and backward. false sends inside
    the step and waits there, so that weights which a script has changed between two steps are mixed at once."""

    log_every: int = 50
    """Steps between measurements of the exact consensus radius, each a reduction of the size of the model. 0 measures
    at evaluations only."""

    # Faults: what is noticed, after how long, and what follows.

    timeout: float = 600.0
    """Seconds (> 0) within which every worker notices that another one is lost or silent. The run then ends on all of
    them with an error that names it."""

    on_other_worker_count: Literal["refuse", "deployed"] = "refuse"
    """Treatment of a checkpoint of another number of workers. refuse stops; deployed starts every worker from the
    deployed model: the average of the saved parameters and optimizer states, with newly seeded random streams."""

    max_consecutive_nonfinite: int = 10
    """Consecutive steps (>= 1) with a non-finite gradient on one worker before the run stops and names that worker."""

    def __new__(cls, **settings: Any) -> GossipConfig:
        """Name the way out for settings that were removed or misspelled. Raises TypeError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name in REMOVED:
                raise TypeError(f"{name} was removed. {REMOVED[name]}")
            if name not in known:
                hint = did_you_mean(name, known, OTHER_NAMES) or f" Settings: {', '.join(known)}."
                raise TypeError(f"GossipConfig has no setting {name!r}.{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_schedule()
        self._check_communication()
        self._check_faults()

    def _check_schedule(self) -> None:
        schedule = {name: getattr(self, name) for name in _SCHEDULE}
        checked = AdaptiveConsensus(**schedule)
        for name, value in schedule.items():
            if value is not None:  # what is left out stays so
                self._set(name, getattr(checked, name))
        if self.total_steps is not None:
            self._integer("total_steps", minimum=1)
            if self.start_step is not None and self.start_step > self.total_steps:
                raise ValueError(
                    f"start_step must be <= total_steps = {self.total_steps}, the end of the run; got "
                    f"{self.start_step}. Lower it, or use power 0 for plain DSGD."
                )

    def _check_communication(self) -> None:
        _check_topology(self.topology)
        self._integer("workers_per_process", minimum=1, advice="Use 1 for one worker per process.")
        if self.comm_dtype in ("topk", "auto"):
            raise ValueError(f"comm_dtype={self.comm_dtype!r} was removed. Choose one of {', '.join(_COMM_DTYPES)}.")
        check_choice("comm_dtype", self.comm_dtype, _COMM_DTYPES)
        self._integer("mix_every", minimum=1, advice="Use 1 to mix in every step.")
        check_choice("order", self.order, _ORDERS)
        check_flag("overlap", self.overlap)
        self._integer("log_every", minimum=0, advice="Use 0 to measure at evaluations only.")

    def _check_faults(self) -> None:
        self._number("timeout", above=0, maximum=LONGEST_TIMEOUT, advice="It is in seconds.")
        check_choice("on_other_worker_count", self.on_other_worker_count, _ON_OTHER_WORKER_COUNT)
        self._integer("max_consecutive_nonfinite", minimum=1, advice="Use 1 to stop at the first one.")

    def _number(self, name: str, **rule: Any) -> None:
        self._set(name, check_number(name, getattr(self, name), **rule))

    def _integer(self, name: str, **rule: Any) -> None:
        self._set(name, check_integer(name, getattr(self, name), **rule))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # a frozen dataclass can store plain numbers in no other way


def _check_topology(topology: object) -> None:
    if isinstance(topology, Topology):
        return
    if not isinstance(topology, str):
        got = f"{topology!r} ({type(topology).__name__})"
        raise ValueError(f"topology must be a name or a Topology; got {got}. Names: {', '.join(TOPOLOGIES)}.")
    check_choice("topology", topology, TOPOLOGIES, OTHER_TOPOLOGY_NAMES)


def config_to_dict(config: Any, *, spell: Callable[[Topology], str] = attrgetter("name")) -> dict[str, Any]:
    """A configuration as nested dicts, lists and plain values, in the order of its fields.

    Args:
        config: any tree of dataclasses. Fields with `init=False` are left out.
        spell: turns a Topology into text.

    Returns:
        Plain values: a path becomes absolute text, a tuple a list.

    Raises:
        TypeError: a value has no plain form; the message names its dotted key.

    >>> config_to_dict(GossipConfig(power=2))["power"]
    2.0
    """
    return _section_to_dict(config, "", spell)


def _section_to_dict(section: Any, path: str, spell: Callable[[Topology], str]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(section) if field.init]
    return {name: _plain(getattr(section, name), f"{path}.{name}" if path else name, spell) for name in names}


def _plain(value: Any, path: str, spell: Callable[[Topology], str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Topology):
        return spell(value)
    if isinstance(value, Path):
        return str(absolute_path(value, Path.cwd()))
    if isinstance(value, list | tuple):
        return [_plain(item, path, spell) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, path, spell) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _section_to_dict(value, path, spell)
    raise TypeError(f"{path}: {value!r} ({type(value).__name__}) cannot be written to a file. Use a plain value.")
