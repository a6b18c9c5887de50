"""Sharding of an accelerator's loaders over the workers: one order, different randomness, equally many steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DataLoaderConfiguration

from dsgdac_accel.data.dataloader_state import AroundPass, OpenPass, record_passes, unwatched_pass
from dsgdac_accel.data.equal_steps import EqualSteps, known_length
from dsgdac_accel.data.loaders import differ_per_worker, refuse_undistributable, share_order, shared_seed_of
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import shared_seed


class TrainingPhase:
    """Whether passes over the loaders of an accelerator count as training. Others are neither cut short nor counted.

    All its loaders share it, and copies of them do. It keeps nothing alive, so that a loader keeps no model alive.
    """

    def __init__(self) -> None:
        self._evaluations = 0
        self._around: weakref.WeakMethod[AroundPass] | None = None
        self._evaluates_in: weakref.WeakMethod[Callable[[Any], bool]] | None = None
        self._number: weakref.WeakMethod[Callable[[int], int]] | None = None

    def enter_for_passes(self, around: AroundPass) -> None:
        """From now on, run each pass over a loader inside the context `around(loader)`, a method."""
        self._around = weakref.WeakMethod(around)

    def ask_for_evaluations(self, evaluates_in: Callable[[Any], bool]) -> None:
        """From now on, a pass is one of evaluation also where the method `evaluates_in(loader)` says so."""
        self._evaluates_in = weakref.WeakMethod(evaluates_in)

    def number_passes_by(self, number: Callable[[int], int]) -> None:
        """From now on, order a pass by what the method `number` makes of the number of training passes before it."""
        self._number = weakref.WeakMethod(number)

    def number(self, passes: int) -> int | None:
        """Return the number by which a pass is ordered, the same on all workers; None if others set the order."""
        number = None if self._number is None else self._number()
        return None if number is None else number(passes)

    def around(self, loader: Any) -> AbstractContextManager[OpenPass]:
        """Return the context for a pass over a loader."""
        around = None if self._around is None else self._around()
        return unwatched_pass(loader) if around is None else around(loader)

    def may_train(self) -> bool:
        """Return whether an optimizer step may be taken in a pass that begins now."""
        return self._evaluations == 0 and torch.is_grad_enabled()

    def is_training(self, loader: Any) -> bool:
        """Return whether a pass over `loader` that begins now counts as training.

        It does not inside `evaluating`, with gradients disabled, or over a prepared loader that was never trained on
        while the models are in eval mode.
        """
        evaluates_in = None if self._evaluates_in is None else self._evaluates_in()
        return self.may_train() and not (evaluates_in is not None and evaluates_in(loader))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, passes do not count as training."""
        self._evaluations += 1
        try:
            yield
        finally:
            self._evaluations -= 1

    def __deepcopy__(self, memo: dict) -> TrainingPhase:
        return self

    def __reduce__(self) -> tuple:
        return TrainingPhase, ()  # the contexts that are open here end here


class LoaderSharding:
    """Adds to Accelerate's sharding what workers with different random streams need.

    Args:
        group: the workers.
        phase: tells whether a pass counts as training.
    """

    def __init__(self, group: WorkerGroup, phase: TrainingPhase) -> None:
        self.group = group
        self.phase = phase

    def share_seed(self, config: DataLoaderConfiguration) -> None:
        """Seed Accelerate's own samplers alike on all workers, before it prepares a loader. Collective."""
        if self.group.size > 1 and config.use_seedable_sampler and config.data_seed is None:
            # Accelerate uses the process's own seed, with which shards of differently seeded workers would overlap.
            config.data_seed = shared_seed(self.group)

    def complete(self, prepared: Any, loader: Any, loaders: list[Any]) -> Any:
        """Return the loader to train with, for a loader that Accelerate has prepared. Collective.

        Args:
            prepared: what Accelerate made.
            loader: what it was made from.
            loaders: the accelerator's list of prepared loaders, in which `prepared` is replaced.

        Raises:
            ValueError: some worker would get no batch, or the batches cannot be shared out.
        """
        dispatched = isinstance(prepared, DataLoaderDispatcher)
        refuse_undistributable(loader, self.group, dispatched)
        seed = shared_seed_of(loader, self.group, dispatched, len(loaders)) if self.group.size > 1 else 0
        phase = self.phase
        reading = self.group if dispatched else None
        prepared = record_passes(prepared, loaders, phase.may_train, phase.around, phase.number, reading)
        differ_per_worker(prepared, self.group)
        if dispatched:
            return prepared  # worker 0 reads for all workers, so all get equally many batches
        if self.group.size > 1:
            share_order(prepared, seed)
        equal = self.equal_steps(prepared)
        if 0 in equal.lengths:  # on all workers, since none may wait for one that has stopped
            members = self.group.members
            first = members.named([equal.lengths.index(0)])
            raise ValueError(
                f"{first} would get no batch: the dataset has {known_length(loader.dataset)} samples for "
                f"{self.group.size} {members.noun}s with batches of {loader.batch_size} "
                f"(drop_last={loader.drop_last}). Use more data, smaller batches or fewer workers."
            )
        return equal if equal.needed else prepared

    def equal_steps(self, batches: Any) -> EqualSteps:
        """Cut an iterable of this worker's batches to as many as the shortest worker has. Collective."""
        return EqualSteps(batches, self.group, active=self.phase.is_training)
