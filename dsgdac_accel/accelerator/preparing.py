"""Preparing models, optimizers, schedulers and loaders for workers that gossip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import IterableDataset

from dsgdac_accel.accelerator.holding import HoldsWorkers
from dsgdac_accel.accelerator.optimizer import GossipOptimizer
from dsgdac_accel.checkpoint.saving import AcceleratorCheckpoints
from dsgdac_accel.compatibility import refuse_unsupported_model
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.parameter_guard import ModelWatch, as_parameter_list
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.dataloader_state import DataPosition, ResumedBatches, data_position, record_passes, recorder_of
from dsgdac_accel.data.equal_steps import EqualSteps, inner_loader, known_length
from dsgdac_accel.data.loaders import (
    differ_per_worker,
    share_own_samplers,
    share_sampler_seed,
    survive_losses,
    warn_of_own_shards,
)
from dsgdac_accel.doctor import quick_check
from dsgdac_accel.randomness import seed_workers_differently, shared_seed
from dsgdac_accel.virtual_workers import VirtualWorkers


class PreparesForGossip(HoldsWorkers, Accelerator):
    """The part of `GossipAccelerator` that prepares: equal starts, no DDP, one tick per step, shared data order."""

    gossip_config: GossipConfig
    gossip_steps: list[GossipStep]
    _is_training: Callable[[], bool]
    _seeded: bool
    _checkpoints: AcceleratorCheckpoints

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, as `Accelerator.prepare`. Collective."""
        for obj in args:
            if isinstance(obj, nn.Module):
                refuse_unsupported_model(obj)
        self._places = {}
        first_model, first_optimizer = len(self._models), len(self._optimizers)
        first_virtual = len(self._virtual_models)
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers[first_optimizer:]:
            for model in self._virtual_models:
                model.complete(optimizer.optimizer)
        self.make_equal(self._models[first_model:], self._optimizers[first_optimizer:])
        if self._virtual_models[first_virtual:]:
            seed, here = shared_seed(self.group), self.workers_per_process
            for number, model in list(enumerate(self._virtual_models))[first_virtual:]:
                model.streams.seed(seed + number, range(self.group.rank * here, (self.group.rank + 1) * here))
        for optimizer in self._optimizers:
            if isinstance(optimizer, GossipOptimizer) and optimizer.gossip is None:
                optimizer.gossip = self._gossip_step(optimizer.optimizer)
        for scheduler in (prepared_scheduler.scheduler for prepared_scheduler in self._schedulers):
            optimizer = getattr(scheduler, "optimizer", None)
            for step in self.gossip_steps:
                if step.optimizer in (optimizer, getattr(optimizer, "optimizer", None)):
                    step.plan(scheduler)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Device placement, autocast and compilation as usual, but no DDP: gradients stay local.

        With several workers in this process, the model becomes `VirtualWorkers`, unless it is for evaluation only.
        """
        refuse_unsupported_model(model)
        count = self.workers_per_process
        if isinstance(model, VirtualWorkers) and model.num_workers != count:
            raise ValueError(
                f"the model is VirtualWorkers of {model.num_workers} workers, and workers_per_process is {count}. Set "
                f"GossipConfig(workers_per_process={model.num_workers})."
            )
        if count == 1 or evaluation_mode:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        workers = model if isinstance(model, VirtualWorkers) else VirtualWorkers(model, count)
        before = len(self._models)
        for number, replica in enumerate(workers.replicas):
            # Each by itself, so that each has a region of autocast of its own: casts are cached for all of a region.
            workers.replicas[number] = super().prepare_model(
                replica, device_placement=device_placement, evaluation_mode=True
            )
        self._models[before:] = [workers]
        workers.mark_prepared()
        return workers

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer so that each of its steps also mixes."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        placement = self.device_placement if device_placement is None else device_placement
        prepared = GossipOptimizer(optimizer, device_placement=placement, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler so that it ticks once per optimizer step, not once per process."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Shard a loader over the workers; where they get unequally many batches, training stops at the shortest."""
        share_sampler_seed(data_loader, self.group)
        if self.group.size > 1 and self.use_seedable_sampler and self.dataloader_config.data_seed is None:
            # Accelerate takes the process's own seed: shards of workers that are seeded differently would overlap.
            self.dataloader_config.data_seed = shared_seed(self.group)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        prepared = record_passes(prepared, self._dataloaders, self._is_training)
        share_own_samplers(prepared, self.group)
        differ_per_worker(prepared, self.group)
        survive_losses(prepared, self.group)
        if isinstance(prepared, DataLoaderDispatcher):
            return prepared  # worker 0 reads for all, so all get equally many
        warn_of_own_shards(data_loader, self.group)
        if known_length(prepared) == 0:
            raise ValueError(
                f"this worker would get no batch: the data set has {len(data_loader.dataset)} samples for "
                f"{self.group.size} workers with batches of {data_loader.batch_size} "
                f"(drop_last={data_loader.drop_last}). "
                f"Use more data, smaller batches or fewer workers."
            )
        equal = EqualSteps(prepared, self.group, active=self._is_training)
        return equal if equal.needed else prepared

    def equal_steps(self, loader: Iterable[Any]) -> EqualSteps:
        """Cut any iterable of this worker's own batches so that all workers take equally many steps. Collective."""
        return EqualSteps(loader, self.group, active=self._is_training)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As `Accelerator.skip_first_batches`; after `load_state` in mid-epoch better use `resumed_batches`.

        Called for what was taken of the loaded pass, it does the same.
        """
        recorder = recorder_of(dataloader)
        if recorder is not None and 0 < num_batches == recorder.loaded_batches:
            return self.resumed_batches(dataloader)
        if isinstance(dataloader, EqualSteps):
            return self.equal_steps(super().skip_first_batches(dataloader.loader, num_batches))
        inner = inner_loader(dataloader)
        if isinstance(inner, DataLoaderDispatcher) and not isinstance(inner.dataset, IterableDataset):
            num_batches *= inner.batches_per_fetch  # Accelerate would leave out that many of what worker 0 reads
        return super().skip_first_batches(dataloader, num_batches)

    def resumed_batches(self, loader: Iterable[Any], replay: bool | None = None) -> ResumedBatches:
        """Return the batches that the next pass over a prepared loader has to take.

        After `load_state` these are the rest of the interrupted pass, with the same batches and random numbers as in
        an unbroken run; otherwise the whole pass. A loop may always be written
        `for batch in accelerator.resumed_batches(loader)`.

        Args:
            loader: a prepared loader.
            replay: how to skip the batches taken before. True fetches and drops them, which also brings random streams
                of loader processes and datasets to their saved state. False skips them in the sampler, which takes no
                time. None replays where loader processes or an iterable dataset need it.
        """
        return ResumedBatches(loader, replay)

    def data_position(self, loader: Any) -> DataPosition:
        """Return the epoch of a prepared loader that is being read or comes next, and the batches taken of it.

        After `load_state`: `for epoch in range(accelerator.data_position(loader).epoch, epochs): ...`.

        Raises:
            TypeError: the loader was not prepared.
        """
        return data_position(loader)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing to join: prepared loaders stop at the shortest worker anyway. `even_batches` is left as prepared."""
        yield

    def _gossip_step(self, optimizer: torch.optim.Optimizer) -> GossipStep:
        watch = ModelWatch(self._models)
        mine = {id(p) for p in as_parameter_list(optimizer.param_groups)}
        for step in self.gossip_steps:
            for parameter in as_parameter_list(step.optimizer.param_groups):
                if id(parameter) in mine:
                    name = watch.names.get(id(parameter), "a parameter")
                    raise ValueError(f"{name} is in two optimizers and would be mixed twice; give it to one of them.")
        several = self.workers_per_process > 1
        step = GossipStep(optimizer, self.group, self.gossip_config, watch, self._worker_of if several else None)
        self.gossip_steps.append(step)
        if self.group.size > 1 and not self._seeded:
            self._seeded = True
            # A process of several workers draws from a stream of its own, which is none of theirs.
            salt = (self.workers_per_process,) if several else ()
            seed_workers_differently(self.group, *salt)
            quick_check(self.group, self.gossip_config)
        return step

    def make_equal(self, models: list[nn.Module], optimizers: Sequence[AcceleratedOptimizer] = ()) -> None:
        """Start from worker 0's parameters, frozen ones included, and buffers, whatever each worker was seeded with.

        Collective; `prepare` does it by itself.
        """
        if self.group.size == 1 or not (models or optimizers):
            return
        named = [item for model in models for item in (*model.named_parameters(), *model.named_buffers())]
        named += [
            (f"optimizer parameter {number}", parameter)
            for optimizer in optimizers
            for number, parameter in enumerate(as_parameter_list(optimizer.param_groups))
        ]
        new = {id(tensor): (name, tensor) for name, tensor in reversed(named)}  # the model's names win
        layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in new.values()]
        self.group.require_equal(layout, "model (names, shapes, dtypes)")
        for name, tensor in new.values():
            self.group.broadcast_(tensor, f"starting from equal values of {name}")
