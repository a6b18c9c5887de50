"""Sharding of an accelerator's loaders over the workers: one order, different randomness, equally many steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DataLoaderConfiguration

from dsgdac_accel.data.dataloader_state import AroundPass, record_passes
from dsgdac_accel.data.equal_steps import EqualSteps, known_length
from dsgdac_accel.data.loaders import (
    differ_per_worker,
    share_own_samplers,
    share_sampler_seed,
    survive_losses,
    warn_of_own_shards,
)
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import shared_seed


class LoaderSharding:
    """Adds to Accelerate's sharding what workers with different random streams need.

    Args:
        group: the workers.
        is_training: returns whether a pass counts as training. Other passes are neither cut nor counted.
        around: returns a context for each pass over a prepared loader.
    """

    def __init__(self, group: WorkerGroup, is_training: Callable[[], bool], around: AroundPass = nullcontext) -> None:
        self.group = group
        self.is_training = is_training
        self.around = around

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
        prepared = record_passes(prepared, loaders, self.is_training, self.around)
        share_own_samplers(prepared, self.group)
        differ_per_worker(prepared, self.group)
        survive_losses(prepared, self.group)
        if isinstance(prepared, DataLoaderDispatcher):
            return prepared  # worker 0 reads for all workers, so all get equally many batches
        warn_of_own_shards(loader, self.group)
        if known_length(prepared) == 0:
            raise ValueError(
                f"this worker would get no batch: the dataset has {len(loader.dataset)} samples for "
                f"{self.group.size} workers with batches of {loader.batch_size} (drop_last={loader.drop_last}). "
                f"Use more data, smaller batches or fewer workers."
            )
        equal = self.equal_steps(prepared)
        return equal if equal.needed else prepared

    def equal_steps(self, batches: Any) -> EqualSteps:
        """Cut an iterable of this worker's batches to as many as the shortest worker has. Collective."""
        return EqualSteps(batches, self.group, active=self.is_training)
