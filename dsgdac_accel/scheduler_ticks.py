"""The number of ticks of a prepared scheduler in an optimizer step.

`Accelerator` ticks `num_processes` times, because its scripts build their schedules for the loader before it is sharded
over the processes. `SchedulerTicks` does the same where that is so, and ticks once where a schedule was built for the
optimizer steps of one worker.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsgdac_accel.announcements import announce
from dsgdac_accel.schedule import declared_length, tick

logger = logging.getLogger(__name__)

TickSetting = Literal["auto", "once", "num_processes"]
TICK_SETTINGS = ("auto", "once", "num_processes")
_ONCE, _AS_ACCELERATE = "scheduler_ticks='once'", "scheduler_ticks='num_processes'"


class GossipScheduler(AcceleratedScheduler):
    """A prepared scheduler: `step()` ticks `ticks` times after an optimizer step, and not inside a window.

    Args:
        prepared: what `Accelerator` made of the scheduler.
        call: number of the `prepare` in which this was, see `SchedulerTicks`.
    """

    def __init__(self, prepared: AcceleratedScheduler, call: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True)
        self.counts_optimizer_steps = prepared.split_batches or not prepared.step_with_optimizer
        """Whether Accelerator, too, ticks once."""
        self.call = call
        self.ticks = 1
        self.decision: Decision | None = None
        """Why it ticks `ticks` times; None if there is nothing to decide."""
        self.has_ticked = False
        self._ended = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick. Inside an accumulation window, do nothing. Arguments as for the scheduler's own `step`."""
        if not self.has_ticked and self.decision is not None:
            self.decision.log(type(self.scheduler).__name__)
        self.has_ticked = True
        if self.counts_optimizer_steps or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
        else:
            tick(self.scheduler, self.ticks, *args, **kwargs)
        self._warn_of_end()

    def _warn_of_end(self) -> None:
        """Warn once of a schedule that goes on after its end because it ticks several times in each call."""
        length, ticks = declared_length(self.scheduler), self.scheduler.last_epoch
        if self._ended or self.ticks == 1 or length is None or ticks <= 1.1 * length + self.ticks:
            return
        self._ended = True
        if self.decision is not None and not self.decision.quiet:
            logger.warning(
                "%s was built for %d ticks and has ticked %d times, %d in each `step`, as with Accelerator. Its lr "
                "stays at the end or rises again, and gamma follows. Build it for %d ticks; or, if `step` is called "
                "once in an epoch or it was built for the steps of one worker, pass GossipAccelerator(%s).",
                type(self.scheduler).__name__,
                length,
                ticks,
                self.ticks,
                self.ticks * length,
                _ONCE,
            )


@dataclass(frozen=True)
class Decision:
    """The number of ticks of a scheduler in an optimizer step, and the reason."""

    ticks: int
    reason: str
    in_doubt: bool = False
    """Whether the reason could be wrong."""
    quiet: bool = False
    """Whether this process leaves the logging to another one."""

    def log(self, name: str) -> None:
        """Say what was decided for a scheduler of this name: in a warning where it is in doubt."""
        if self.quiet:
            return
        often = "once" if self.ticks == 1 else f"{self.ticks} times, as with Accelerator,"
        other = _ONCE if self.ticks > 1 else _AS_ACCELERATE
        advice = f" If that is wrong, pass GossipAccelerator({other})." if self.in_doubt else ""
        text = f"{name} ticks {often} in each optimizer step: {self.reason}.{advice}"
        logger.warning(text) if self.in_doubt else announce(text)


@dataclass(frozen=True)
class ShardedLoader:
    """The lengths of a prepared loader, in batches; 0 if unknown."""

    whole: int
    """Before it was sharded over the processes."""
    shard: int
    """After it: the batches of one process."""
    call: int
    """Number of the `prepare` in which it was sharded."""

    def fits_whole(self, length: int, window: int) -> bool:
        """Return whether a schedule of `length` ticks is a number of passes over the whole loader.

        That is also so where the steps of one worker were multiplied by the number of processes.

        Args:
            length: ticks of the schedule.
            window: batches per optimizer step of one worker.
        """
        processes = round(self.whole / max(1, self.shard))
        return _is_multiple(length, self.whole, window) or _is_multiple(length, self.shard, window, processes)

    def fits_shard(self, length: int, window: int) -> bool:
        """Return whether a schedule of `length` ticks is a number of passes of one worker."""
        return _is_multiple(length, self.shard, window)


def _is_multiple(length: int, batches: int, window: int, factor: int = 1) -> bool:
    passes = (factor * batches, factor * math.ceil(batches / window))  # in batches, and in optimizer steps
    return any(steps and length % steps == 0 for steps in passes)


class SchedulerTicks:
    """Decides how often each prepared scheduler of an accelerator ticks in an optimizer step.

    A process may have several workers, which share its scheduler: only the number of processes counts.

    Args:
        setting: "once", "num_processes", or "auto" to decide by `decide`.
        processes: number of processes.
        total_steps: optimizer steps of the run, if known.
    """

    def __init__(self, setting: TickSetting, processes: int, total_steps: int | None = None) -> None:
        self.setting = setting
        self.processes = processes
        self.total_steps = total_steps
        self.longest: ShardedLoader | None = None
        """The loader to train with: the longest one that was prepared, until it is known by the first step."""
        self._loaders: weakref.WeakKeyDictionary[Any, ShardedLoader] = weakref.WeakKeyDictionary()
        self._trained = False
        self.call = 0
        """Number of the last `prepare`."""
        self._of_earlier_training = False
        self._depth = 0

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Everything prepared inside was built before any loader inside was sharded. Contexts nest as one."""
        self.call += self._depth == 0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def loader_sharded(self, whole: int | None, shard: int | None, prepared: Any = None) -> None:
        """Note the lengths of a loader before and after it was sharded; None for one without a length."""
        loader = ShardedLoader(whole or 0, shard or 0, self.call)
        if prepared is not None:
            self._loaders[prepared] = loader
        if self.longest is None or self._of_earlier_training or loader.whole > self.longest.whole:
            self.longest, self._of_earlier_training = loader, False

    def trains_on(self, prepared: Any) -> bool:
        """Note the prepared loader (or None) of an optimizer step; return whether it changes what is decided."""
        loader = None if self._trained or prepared is None else self._loaders.get(prepared)
        if loader is None:
            return False
        changed, self.longest, self._trained = loader != self.longest, loader, True
        return changed

    def end_training(self) -> None:
        """Let the next loader that is sharded be the longest; until then it is the present one, which may be reused."""
        self._of_earlier_training, self._trained = True, False

    def last_steps(self, schedulers: Iterable[GossipScheduler]) -> set[int]:
        """Return the optimizer steps with which the run may end: those of the schedules, and `total_steps`."""
        lengths = [(declared_length(scheduler.scheduler), scheduler.ticks) for scheduler in schedulers]
        # Older scripts of Transformers end after as many optimizer steps as the schedule has ticks.
        ends = {end for length, ticks in lengths if length for end in (length, math.ceil(length / ticks))}
        return ends if self.total_steps is None else ends | {self.total_steps}

    def settle(self, schedulers: Iterable[GossipScheduler], window: int, quiet: bool) -> None:
        """Set `ticks` of all schedulers that have not ticked yet.

        Args:
            schedulers: the accelerator's prepared schedulers.
            window: batches per optimizer step.
            quiet: whether another process logs the decisions.
        """
        for scheduler in schedulers:
            if not scheduler.has_ticked:
                scheduler.decision = self.decide(scheduler, window, quiet)
                scheduler.ticks = 1 if scheduler.decision is None else scheduler.decision.ticks

    def decide(self, scheduler: GossipScheduler, window: int = 1, quiet: bool = False) -> Decision | None:
        """Return how often a scheduler ticks, by the first rule that applies; None if there is nothing to decide.

        1. One process, `split_batches=True` or `step_scheduler_with_optimizer=False`: once, as with Accelerator.
        2. The setting, if it is not "auto".
        3. ReduceLROnPlateau: once, since every metric counts once.
        4. No loader was prepared: once, since nothing was sharded.
        5. The length that the schedule declares is nearer to `total_steps` than to `processes` times that: once;
           otherwise `processes` times.
        6. The scheduler was prepared after the loader, and the declared length is a number of passes of one worker but
           not one over the whole loader: once.
        7. Otherwise `processes` times, as with Accelerator.
        """
        if self.processes == 1 or scheduler.counts_optimizer_steps:
            return None

        def once(reason: str, in_doubt: bool = False) -> Decision:
            return Decision(1, reason, in_doubt, quiet)

        def as_accelerate(reason: str, in_doubt: bool = False) -> Decision:
            return Decision(self.processes, reason, in_doubt, quiet)

        if self.setting != "auto":
            return (once if self.setting == "once" else as_accelerate)(f"scheduler_ticks={self.setting!r}")
        if isinstance(scheduler.scheduler, ReduceLROnPlateau):
            return once("each metric counts once")
        loader, length = self.longest, declared_length(scheduler.scheduler)
        if loader is None:
            return once("no loader was prepared, so its steps are taken for optimizer steps", in_doubt=True)
        if length is not None and self.total_steps is not None:
            if length**2 < self.processes * self.total_steps**2:
                return once(f"its {length} steps are the total_steps={self.total_steps} of the run")
            return as_accelerate(f"its {length} steps are {self.processes} times total_steps={self.total_steps}")
        before = scheduler.call <= loader.call
        when = f"it was built {'before' if before else 'after'} the loader was sharded"
        if length is None:
            return as_accelerate(f"{when}, for an unknown number of steps", in_doubt=True)
        whole, shard = loader.fits_whole(length, window), loader.fits_shard(length, window)
        if not before and shard and not whole:
            return once(f"its {length} steps are passes over the sharded loader", in_doubt=True)
        doubt = (shard and not whole) if before else (shard or not whole)
        return as_accelerate(f"{when}, for {length} steps", doubt)
