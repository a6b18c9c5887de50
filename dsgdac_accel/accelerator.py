"""`GossipAccelerator`: an `accelerate.Accelerator` whose workers gossip parameters instead of averaging gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import IterableDataset

from dsgdac_accel.averaging import cloned, deployed_model
from dsgdac_accel.calibration import Forward
from dsgdac_accel.collectives import RepeatsCollectives
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.doctor import quick_check
from dsgdac_accel.equal_steps import EqualSteps, known_length
from dsgdac_accel.failures import announce
from dsgdac_accel.flat import as_parameter_list
from dsgdac_accel.group import WorkerGroup
from dsgdac_accel.holding import HoldsWorkers
from dsgdac_accel.loaders import (
    count_passes,
    differ_per_worker,
    epoch_of,
    preserved_loaders,
    share_own_samplers,
    share_sampler_seed,
    survive_losses,
    warn_of_own_shards,
)
from dsgdac_accel.metrics import ConsensusLogger, consensus_metrics
from dsgdac_accel.randomness import seed_workers_differently, shared_seed
from dsgdac_accel.refusals import refuse_unsupported_launch, refuse_unsupported_model
from dsgdac_accel.restarts import meeting_after_restart
from dsgdac_accel.resuming import inner_loader
from dsgdac_accel.saving import KeepsEveryWorker
from dsgdac_accel.step import GossipStep
from dsgdac_accel.stopping import StopsOnSignals
from dsgdac_accel.watch import ModelWatch
from dsgdac_accel.workers import VirtualWorkers, replicas_of, values_of


class GossipOptimizer(AcceleratedOptimizer):
    """The prepared optimizer: one mix around every local step. Used through `optimizer.step()` as ever."""

    gossip: GossipStep | None = None

    def step(self, closure: Any = None) -> None:
        """Take one optimizer step: local update and one mix (nothing inside an accumulation window)."""
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) evaluates the loss at several points, which one mix per step cannot serve. "
                "Call accelerator.backward(loss) and then optimizer.step() without a closure."
            )
        if self.gossip is None or not self.gradient_state.sync_gradients:
            super().step()
            return
        local_step = self.gossip.before_local_step(self._epoch(), self.scaler)
        if local_step or self.scaler is not None:  # after an overflow the scaler skips the update itself, and backs off
            super().step()
        self.gossip.after_local_step()

    def _epoch(self) -> int | None:
        epoch = epoch_of(self.gradient_state.active_dataloader)
        if epoch is None and self.gossip is not None and self.gossip.config.start_epoch is not None:
            raise ValueError(
                "start_epoch counts the passes over a prepared loader, and none is being read at this step. "
                "Pass the loader through `prepare`, or give start_step instead."
            )
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        """Without the gossip step, whose process groups stay in this process."""
        return {key: value for key, value in super().__getstate__().items() if key != "gossip"}

    @property
    def step_was_skipped(self) -> bool:
        """Always False: every step mixes and counts, so schedulers tick with it and rates stay equal on all workers."""
        return False


class GossipAccelerator(HoldsWorkers, KeepsEveryWorker, StopsOnSignals, RepeatsCollectives, Accelerator):
    """Accelerate for DSGD-AC and DAdam-AC: put this class where `Accelerator` was, and the script gossips.

    Differences from `Accelerator`, all meant: models are not wrapped in DDP; all workers start from worker 0's state;
    random streams then differ per worker while data order is shared; schedulers tick once per optimizer step on every
    worker; passes over data of uneven length stop at the shortest.

    Args:
        gossip: topology, gamma schedule and policies. Default: DSGD-AC on the one-peer ring with p = 3.
        *args, **kwargs: those of `accelerate.Accelerator`. Without an accelerator device, `cpu=True` is set.

    Raises:
        ValueError, TypeError: a launch or a setting under which workers cannot gossip, with the way out.
    """

    _group_is_the_users = False
    """Whether the default process group was there before Accelerate; then `end_training` leaves it running."""

    _adopted_group: WorkerGroup | None = None
    """The workers of the last accelerator that was adopted in this process."""

    def __init__(self, *args: Any, gossip: GossipConfig | None = None, **kwargs: Any) -> None:
        config = _checked_config(gossip)
        if not PartialState._shared_state:  # of Accelerate's state there is one per process, so of this there is, too
            GossipAccelerator._group_is_the_users = torch.distributed.is_initialized()
        if len(args) < 5 and not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)
        handlers = list(kwargs.pop("kwargs_handlers", None) or [])
        if not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
            timeout = timedelta(seconds=config.timeout)
            handlers.append(InitProcessGroupKwargs(init_method=meeting_after_restart(), timeout=timeout))
        announce()
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)
        self._begin_gossip(config)

    @classmethod
    def adopt(cls, accelerator: Accelerator, gossip: GossipConfig | None = None) -> GossipAccelerator:
        """Make a gossiping accelerator of one that exists, in place, for frameworks that build their own. Collective.

        To be called before anything is prepared. Everybody who holds `accelerator` then holds the gossiping one.

        Raises:
            ValueError, TypeError: as of the constructor, or something is prepared already.
        """
        config = _checked_config(gossip)
        if accelerator._models or accelerator._optimizers:
            raise ValueError("`adopt` comes before `prepare`: a model or optimizer of this accelerator is prepared.")
        refuse_unsupported_launch(accelerator)
        earlier = GossipAccelerator._adopted_group
        kind = type(accelerator)
        accelerator.__class__ = cls if kind is Accelerator else type(f"Gossip{kind.__name__}", (cls, kind), {})
        adopted = cast(GossipAccelerator, accelerator)
        # A search makes an Accelerator for each trial, and process groups cost threads and sockets: use them again.
        again = earlier is not None and earlier.serves(accelerator.device, config.timeout)
        adopted._begin_gossip(config, earlier if again else None)
        GossipAccelerator._adopted_group = adopted.group
        return adopted

    def _begin_gossip(self, config: GossipConfig, group: WorkerGroup | None = None) -> None:
        self.gossip_config = config
        self.workers_per_process = config.workers_per_process
        refuse_unsupported_launch(self)
        if group is None:
            group = WorkerGroup(self.device, config.timeout, on_loss=config.on_worker_loss)
        self.group = group
        group.when_workers_change(self._follow_survivors)
        self.gossip_steps: list[GossipStep] = []
        self.consensus_logger = ConsensusLogger(lambda: consensus_metrics(self.gossip_steps), [self._log_to_trackers])
        self._places = {}
        self._seeded = False
        self._deployed = 0  # how many `deployed_model` contexts are open

    def _follow_survivors(self) -> None:
        """Accelerate's own numbers, and with them who is the main process, are those of the workers that are left."""
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared["num_processes"], shared["process_index"] = self.group.size, self.group.rank
            shared["local_process_index"] = self.group.local_rank

    # ---- prepare

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
        prepared = self._recorded(super().prepare_data_loader(data_loader, *args, **kwargs), self._is_training)
        share_own_samplers(prepared, self.group)
        differ_per_worker(prepared, self.group)
        survive_losses(prepared, self.group)
        count_passes(prepared, self._is_training)
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
        if 0 < num_batches == self._batches_taken(dataloader):
            return self.resumed_batches(dataloader)
        if isinstance(dataloader, EqualSteps):
            return self.equal_steps(super().skip_first_batches(dataloader.loader, num_batches))
        inner = inner_loader(dataloader)
        if isinstance(inner, DataLoaderDispatcher) and not isinstance(inner.dataset, IterableDataset):
            num_batches *= inner.batches_per_fetch  # Accelerate would leave out that many of what worker 0 reads
        return super().skip_first_batches(dataloader, num_batches)

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

    # ---- training

    def _is_training(self) -> bool:
        return not self._deployed and torch.is_grad_enabled()

    @contextmanager
    def deployed_model(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> Iterator[nn.Module]:
        """Inside, `model` is the average of the workers in eval mode; on exit training goes on as if nothing had been.

        Collective. See `dsgdac_accel.averaging.deployed_model` for `calibrate`, a loader of training data from which
        BatchNorm statistics are measured. All prepared models are averaged; `model` is put into eval mode with its
        buffers deployed. Contexts nest, for another model or another calibration.
        """
        references = list(self.gradient_state.dataloader_references)
        mixers = [] if self._deployed else [step.mixer for step in self.gossip_steps]
        frozen = [layer for step in self.gossip_steps for layer in step.watch.frozen]
        model = self._holder(model)
        self._deployed += 1
        try:
            with (
                preserved_loaders(self._dataloaders),
                deployed_model(
                    model,
                    mixers,
                    self.group,
                    calibrate=calibrate,
                    calibration_forward=calibration_forward,
                    frozen=frozen,
                ) as deployed,
            ):
                yield deployed
        finally:
            self._deployed -= 1
            # A pass inside that was broken off must not look like the active one.
            self.gradient_state.dataloader_references = references

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Inside, passes over prepared loaders are not those of training: never cut short, and not counted."""
        self._deployed += 1
        try:
            yield
        finally:
            self._deployed -= 1

    def deploy(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> None:
        """End the gossip: `model` is the average of the workers from now on, in ordinary memory. Collective.

        Arguments as of `deployed_model`. To train on, prepare model and optimizer again.
        """

        def take() -> list[torch.Tensor]:
            with self.deployed_model(model, calibrate, calibration_forward) as deployed:
                return [tensor.detach().clone() for tensor in values_of(deployed)]

        average = self.group.redone(take)
        self._end_gossip()
        with torch.no_grad():
            for replica in replicas_of(self._holder(model)):
                for tensor, value in zip(values_of(replica), average, strict=True):
                    tensor.copy_(value)

    def _end_gossip(self) -> None:
        for step in self.gossip_steps:
            step.mixer.release()
        self.gossip_steps.clear()

    def measure_consensus(self, again: bool = True) -> dict[str, float]:
        """Measure the exact consensus radius now and return all consensus metrics. Collective.

        With `again=False` a radius that was measured at this very step is not measured again.
        """
        for step in self.gossip_steps:
            last = step.mixer.last_consensus
            if again or last is None or last.step != step.mixer.step:
                step.mixer.measure_consensus()
        return consensus_metrics(self.gossip_steps)

    # ---- logging

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log `values` together with the consensus metrics, to the trackers and every other sink of the logger."""
        if self.is_main_process:
            self._log_kwargs = log_kwargs
            self.consensus_logger.log(
                values, self.gossip_steps[0].mixer.step if step is None and self.gossip_steps else step
            )

    def _log_to_trackers(self, values: dict[str, Any], step: int | None) -> None:
        super().log(values, step=step, log_kwargs=self._log_kwargs)

    _log_kwargs: dict | None = None

    # ---- saving

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the deployed model, as `Accelerator.save_model` does for the model. Collective.

        BatchNorm statistics are pooled; for calibrated ones call it inside `with deployed_model(model, calibrate=...)`.
        """
        save = super().save_model

        def save_average() -> None:
            with self.deployed_model(model) as deployed:
                save(deployed, save_directory, *args, **kwargs)
            self.group.meet("saving the model")

        self.group.redone(save_average)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dictionary: inside `with deployed_model(model)` of the average, outside of this worker alone.

        Tensors are copies, because parameters are views of one buffer, which savers would take for tied weights.
        """
        if not self._deployed and self.num_workers > 1:
            warnings.warn(
                "get_state_dict outside `with accelerator.deployed_model(model)` gives this worker's weights, "
                "not the average of the workers that is meant to be deployed.",
                stacklevel=2,
            )
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)  # the keys of the eager model
        return cloned(super().get_state_dict(model, unwrap=False))

    def free_memory(self, *objects: Any) -> Any:
        """As `Accelerator.free_memory`; also lets go of the flat buffers."""
        self._end_gossip()  # what is in flight is waited for: its other side would wait for ever
        for optimizer in self._optimizers:
            optimizer.gossip = None  # prepared again, it gossips again
        for model in self._models:
            vars(model).pop("_is_accelerate_prepared", None)  # or no accelerator would wrap it in DDP again
        self._seeded = False
        self._places = {}
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Finish what is in flight or being saved, close the trackers, end the process group unless it was there."""
        self.finish_saving()
        for step in self.gossip_steps:
            step.mixer.drain()
        if self.group.size > 1:
            self.group.close()
        if self._group_is_the_users:
            for tracker in self.trackers:
                tracker.finish()
        else:
            super().end_training()


def _checked_config(gossip: GossipConfig | None) -> GossipConfig:
    config = GossipConfig() if gossip is None else gossip
    if not isinstance(config, GossipConfig):
        raise TypeError(f"gossip must be a GossipConfig; got {type(gossip).__name__}. Write gossip=GossipConfig(...).")
    return config
