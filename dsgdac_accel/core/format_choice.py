"""`comm_dtype: auto`: choose the number format of messages once, from the duration of the first steps."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsgdac_accel.core.formats import FORMATS
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.rounds import Rounds

logger = logging.getLogger(__name__)

CHOICES = ("full", "bf16", "int8", "int4", "int2")
"""In order of rounding error."""
_WARM_UP, _MEASURED = 3, 8  # mixes; the first ones allocate, connect and compile
_EXPOSED = 0.03  # an exchange counts as hidden if nobody waits for more than this share of the step


@dataclass(frozen=True)
class FirstSteps:
    """Medians of one worker over the first steps that mix, in seconds."""

    step: float
    waited: float
    """Wait for the neighbors in a step."""
    latency: float
    """Duration of an exchange without bytes; with gloo two messages, since the receiver first says that it is ready."""
    sent: float = 1.0
    """Bytes that this worker sends in full in a round, in parameter copies."""
    messages: int = 1
    """Messages about all parameters that it sends in a round of pairs, which other formats need."""


def choose_format(measured: Sequence[FirstSteps], bits: float = 32.0) -> str:
    """Return the first of `CHOICES` whose exchange hides behind the computation, or else the last one.

    A step takes max(C, T) with T = L + S / B for S bytes, see `scaling`. C is that of the slowest worker: the others
    wait for it, too. If even that worker waits, the step takes T, and with S' bytes it would take L + (T - L) S' / S.

    Args:
        measured: of all workers, sending parameters in full.
        bits: of a parameter.

    >>> choose_format([FirstSteps(step=0.83, waited=0.65, latency=0.03)] * 4)
    'int4'
    >>> choose_format([FirstSteps(0.5, 0.0, 0.01), FirstSteps(0.5, 0.4, 0.01)])  # a worker is slow, not the link
    'full'
    """
    computing = max(one.step - one.waited for one in measured)
    exchange = max(one.step for one in measured)
    latency = min(exchange, max(one.latency for one in measured))
    sent = max(one.sent for one in measured)
    if sent == 0.0 or min(one.waited for one in measured) <= _EXPOSED * exchange:
        return "full"
    # Whole groups exchange in pairs then; in full they use an all-reduce, which sends less.
    share = max(one.messages for one in measured) / sent / bits
    for name in CHOICES[1:]:
        if latency + (exchange - latency) * share * FORMATS[name].bits <= computing:
            return name
    return CHOICES[-1]


class FormatChoice:
    """Measures the first mixes of a run, and then lets the mixer use the format of `choose_format` on all workers.

    Args:
        mixer: sends parameters in full until then.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.chosen: str | None = None
        self._decides_at = self._end_of_measurement(mixer.step)
        self._before = 0.0
        self._steps: list[tuple[float, float]] = []
        """Duration of each step that mixed, and of the wait in it."""
        self._sent = 0

    def _end_of_measurement(self, step: int) -> int:
        return step + (_WARM_UP + _MEASURED) * self.mixer.mix_every

    @property
    def bits(self) -> float:
        """Bits per parameter that are sent now."""
        return self._full_bits if self.chosen in (None, "full") else FORMATS[self.chosen].bits

    @property
    def _full_bits(self) -> float:
        return 8.0 * max((x.element_size() for x in self.mixer.buckets.values(0)), default=4)

    def measure_step(self, mixed: bool) -> None:
        """Measure the step that was just taken. After the last one that is measured, choose: collective.

        Args:
            mixed: whether this process took part in a round.
        """
        if self.chosen is not None:
            return
        now, before = time.perf_counter(), self._before
        self._before = now
        if before and mixed:
            self._steps.append((now - before, self.mixer.exchange.waited_seconds))
            self._sent = max(self._sent, self.mixer.exchange.bytes_sent)
        if self.mixer.step >= self._decides_at:
            self._choose()

    def _choose(self) -> None:
        group = self.mixer.group.everyone  # also the processes of a sharded worker choose alike
        latency = self._latency()
        measured = group.all_gather_object(self._first_steps(latency), "choosing the number format of messages")
        name = choose_format(measured, self._full_bits)
        self._use(name)
        if group.rank == 0:
            step, waited = max(one.step for one in measured), min(one.waited for one in measured)
            logger.warning(
                "comm_dtype auto: %s, %.4g bits a parameter, from step %d on. In full, a step took %.0f ms, of which "
                "every worker waited %.0f ms or more.",
                name, self.bits, self.mixer.step, 1e3 * step, 1e3 * waited,
            )  # fmt: skip

    def _first_steps(self, latency: float) -> FirstSteps:
        mixer = self.mixer
        pairs = Rounds(mixer.topology, mixer.group.members, mixer.rounds.local_workers, all_reduce=False)
        messages = [sum(len(pairs.elsewhere(plan.recipients)) for plan in plans) for plans in pairs.plans]
        steps, waits = zip(*self._steps[-_MEASURED:] or [(0.0, math.inf)], strict=True)  # no round has used this worker
        return FirstSteps(statistics.median(steps), statistics.median(waits), latency, self._copies(), max(messages))

    def _copies(self) -> float:
        """Return the bytes that all processes of this worker send in a round, in parameter copies."""
        mixer = self.mixer
        mine = torch.tensor([self._sent, mixer.parameter_bytes], dtype=torch.float64, device="cpu")
        sent, size = mixer.group.row.sum(mine, "measuring what a worker sends").tolist()
        return sent / size if size else 0.0  # everything is frozen

    def _latency(self) -> float:
        """Return the duration of the shortest of three barriers, each a message there and one back."""
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self.mixer.group.barrier("measuring the latency")
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def _use(self, name: str) -> None:
        self.chosen = name
        if name != "full":
            self.mixer.compress(name)

    def metrics(self) -> dict[str, float]:
        """Return the bits per parameter that are sent now."""
        return {"bits_per_parameter": self.bits}

    def state_dict(self) -> dict[str, Any]:
        """Return the choice."""
        return {"chosen": self.chosen}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Keep a choice that was made, or measure anew from `step` on. The mixer's state is to be loaded after this."""
        if self.chosen is None and state["chosen"] is not None:
            self._use(state["chosen"])
        self._decides_at = self._end_of_measurement(step)
        self._steps = []
