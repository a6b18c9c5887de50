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
from dsgdac_accel.data.loaders import (
    differ_per_worker,
    share_own_samplers,
    share_sampler_seed,
    warn_of_own_shards,
)
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

    def enter_for_passes(self, around: AroundPass) -> None:
        """From now on, run each pass over a loader inside the context `around(loader)`, a method."""
        self._around = weakref.WeakMethod(around)

    def ask_for_evaluations(self, evaluates_in: Callable[[Any], bool]) -> None:
        """From now on, a pass is one of evaluation also where the method `evaluates_in(loader)` says so."""
        self._evaluates_in = weakref.WeakMethod(evaluates_in)

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

    def share_order(self, loader: Any, config: DataLoaderConfiguration) -> None:
        """Seed the samplers alike on all workers, before Accelerate prepares the loader. Collective."""
        share_sampler_seed(loader, self.group)
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
        prepared = record_passes(prepared, loaders, self.phase.may_train, self.phase.around)
        share_own_samplers(prepared, self.group)
        differ_per_worker(prepared, self.group)
        if isinstance(prepared, DataLoaderDispatcher):
            return prepared  # worker 0 reads for all workers, so all get equally many batches
        warn_of_own_shards(loader, self.group)
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
