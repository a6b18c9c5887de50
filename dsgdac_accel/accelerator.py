"""`GossipAccelerator`: an `accelerate.Accelerator` whose workers gossip parameters instead of averaging gradients.

The accelerator translates Accelerate's calls for its parts and computes nothing: `GossipTraining` has the gossip,
`Deployment` the average of the workers, `LoaderSharding` the data, `AcceleratorCheckpoints` the checkpoints.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils.data import IterableDataset

from dsgdac_accel.calibration import Forward
from dsgdac_accel.checkpoint.saving import AcceleratorCheckpoints
from dsgdac_accel.checks import check_choice, check_flag
from dsgdac_accel.compatibility import (
    known_loss,
    refuse_parallelism_beside_mesh,
    refuse_sharding_arguments,
    refuse_unsupported_launch,
    refuse_unsupported_model,
    refuse_unsupported_optimizer,
    supported_on,
    warn_of_single_worker,
)
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.gradients import clip_worker_grad_norms_
from dsgdac_accel.core.parameters import as_parameter_list
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.dataloader_state import (
    DataPosition,
    ResumedBatches,
    data_position,
    epoch_of,
    recorder_of,
)
from dsgdac_accel.data.equal_steps import EqualSteps, inner_loader, known_length
from dsgdac_accel.data.sharding import LoaderSharding, TrainingPhase
from dsgdac_accel.deployed_model import Deployment
from dsgdac_accel.distributed.failure_detection import WorkerLostError, short_cause
from dsgdac_accel.distributed.group import WorkerGroup, refuse_copy
from dsgdac_accel.distributed.launcher_variables import join_slurm_step
from dsgdac_accel.distributed.model_state import own_state
from dsgdac_accel.distributed.restarts import init_method_after_restart, warn_of_restarts
from dsgdac_accel.distributed.sharded_workers import mesh_of_workers, with_workers, workers_in
from dsgdac_accel.distributed.shards import gathering_modules, reshard
from dsgdac_accel.distributed.signals import STOP_SIGNALS
from dsgdac_accel.distributed.stopping import StopOnSignals
from dsgdac_accel.gossip_training import GossipTraining
from dsgdac_accel.metrics import ConsensusLogger
from dsgdac_accel.pass_average import PassAverage
from dsgdac_accel.scheduler_ticks import (
    TICK_SETTINGS,
    GossipScheduler,
    SchedulerTicks,
    TickSetting,
)
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica
from dsgdac_accel.wrappers import eager_name

logger = logging.getLogger(__name__)


class GossipOptimizer(AcceleratedOptimizer):
    """A prepared optimizer: `step()` takes the local step and one mix."""

    gossip: GossipStep | None = None
    pass_average: PassAverage | None = None
    trains_on: weakref.WeakMethod[Callable[[Any], None]] | None = None
    """Notes the prepared loader, or None, that a step is taken in. Weak, since it is the accelerator's."""
    ended = False
    """Whether the gossip has ended. Then no step is taken until the optimizer is given to `prepare` again."""

    __reduce__ = refuse_copy

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step: the local update and one mix. Does nothing inside an accumulation window.

        Args:
            closure: computes the loss and its gradient; called once, before the step.

        Returns:
            The result of the closure.

        Raises:
            ValueError: `start_epoch` is set and no prepared loader is being read.
            RuntimeError: the step lies in an evaluation pass, or the gossip has ended.
        """
        if self.ended and self.gradient_state.sync_gradients:
            raise RuntimeError(
                "gossip has ended (`deploy` or `free_memory`), and in this step each worker would train alone; prepare "
                "model and optimizer again to train on."
            )
        if self.gossip is None or not self.gradient_state.sync_gradients:
            super().step(closure)
            return None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if self.pass_average is not None:
            self.pass_average.before_step()
        note = None if self.trains_on is None else self.trains_on()
        if note is not None:
            note(self.gradient_state.active_dataloader)
        local_step = self.gossip.before_local_step(self._epoch(), self.scaler)
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if local_step or scaled:  # after an overflow the scaler skips the update and lowers its scale
            with self.gossip.local_step():
                super().step(None if closure is None else known_loss(loss))
        self.gossip.after_local_step()
        if self.pass_average is not None:
            self.pass_average.after_step()
        return loss

    def _epoch(self) -> int | None:
        epoch = epoch_of(self.gradient_state.active_dataloader)
        if epoch is None and self.gossip is not None and self.gossip.config.start_epoch is not None:
            raise ValueError(
                "start_epoch counts the passes over a prepared loader, but none is being read at this step. "
                "Pass the loader through `prepare`, or set start_step instead."
            )
        return epoch

    @property
    def step_was_skipped(self) -> bool:
        """Always False: every step counts, so schedulers tick with it and all workers keep the same lr."""
        return False


class GossipAccelerator(Accelerator):
    """Accelerate for DSGD-AC and DAdam-AC: replace `Accelerator` by this class, and the script gossips.

    Intended differences from `Accelerator`: models are not wrapped in DDP; all workers start from worker 0's state;
    random streams then differ per worker while the data order is shared; training passes over data of uneven length
    stop at the shortest worker's; between the last step of a pass and the next step, evaluation passes and
    `save_pretrained` read the average of the workers; the exchange takes memory for copies of the trained parameters.

    Args:
        gossip: topology, gamma schedule and policies. Default: DSGD-AC on the one-peer ring with p = 3.
        scheduler_ticks: how often a prepared scheduler ticks in an optimizer step. "once" suits a schedule that was
            built for the optimizer steps of one worker, "num_processes" one that was built for the unsharded loader, as
            for `Accelerator`. "auto" finds out and says so, see `SchedulerTicks.decide`.
        keep_average: whether to keep the average of the workers from the last step of a pass until the next step, for
            evaluation passes and `save_pretrained`, see `PassAverage`. It takes one reduction of the size of the model
            per pass. It ends with the first `deployed_model`, and is not kept of sharded
            models.
        device_mesh: the processes as workers that are several processes each, which shard the model: a mesh of all
            processes with the dimensions `dp_replicate` (the workers, which gossip) and `dp_shard` (FSDP2). Shard the
            model by `fully_shard(..., mesh=device_mesh["dp_shard"])` before the optimizer is made. Default: a worker is
            one process, or what `parallelism_config` says.
        *args: as for `accelerate.Accelerator`.
        **kwargs: as for `accelerate.Accelerator`. Without an accelerator device, `cpu=True` is the default.
            `parallelism_config` with `fsdp_plugin` shards on GPUs: `dp_replicate_size` is the number of workers.

    Raises:
        ValueError, TypeError: workers cannot gossip with this launch or these settings. The message has the way out.
    """

    # Process-wide, like Accelerate's shared state.
    _user_owns_process_group = False
    """Whether the default process group existed before Accelerate. `end_training` then leaves it running."""
    _adopted_group: WorkerGroup | None = None
    """The group of the last accelerator that was adopted in this process."""
    _latest_group: WorkerGroup | None = None
    """The group of the last accelerator in this process."""
    _warned_of_single_worker = False

    def __init__(
        self,
        *args: Any,
        gossip: GossipConfig | None = None,
        scheduler_ticks: TickSetting = "auto",
        keep_average: bool = True,
        device_mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        config = _checked_config(gossip)
        check_choice("scheduler_ticks", scheduler_ticks, TICK_SETTINGS)
        check_flag("keep_average", keep_average)
        if not PartialState._shared_state:
            GossipAccelerator._user_owns_process_group = torch.distributed.is_initialized()
            if not GossipAccelerator._user_owns_process_group:
                join_slurm_step()  # later, Accelerate would not read the variables any more
        warn_of_restarts()
        if len(args) < 5 and not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)
        handlers = list(kwargs.pop("kwargs_handlers", None) or [])
        own_timeout = any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers)
        if not own_timeout:
            handlers.append(InitProcessGroupKwargs(timeout=timedelta(seconds=config.timeout)))
        if not torch.distributed.is_initialized():
            method = init_method_after_restart()
            handlers = [
                replace(handler, init_method=handler.init_method or method)
                if isinstance(handler, InitProcessGroupKwargs)
                else handler
                for handler in handlers
            ]
        refuse_sharding_arguments(kwargs, device_mesh is not None)
        if device_mesh is None:
            kwargs = with_workers(kwargs)
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)
        if device_mesh is None:
            device_mesh = mesh_of_workers(self.parallelism_config, self.torch_device_mesh)
        else:
            refuse_parallelism_beside_mesh(self)
        refuse_unsupported_launch(self)
        config = supported_on(device_mesh, config, self)
        keep_average = keep_average and device_mesh is None
        group = WorkerGroup.make(device_mesh, self.device, config.timeout)
        self._begin_gossip(config, group, scheduler_ticks, keep_average, watch_average=True)
        if not (own_timeout or GossipAccelerator._user_owns_process_group):
            self.group.process_groups.limit_default_group()
        if self.num_workers == 1 and not GossipAccelerator._warned_of_single_worker:
            GossipAccelerator._warned_of_single_worker = True
            warn_of_single_worker(self.group)

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, gossip: GossipConfig | None = None, device_mesh: DeviceMesh | None = None
    ) -> GossipAccelerator:
        """Turn an existing accelerator into a gossiping one, in place. Collective.

        For frameworks that build their own accelerator. Every reference to `accelerator` sees the gossiping one. The
        framework evaluates and saves inside `deployed_model`: no average is kept for it.

        The replicas of its `parallelism_config` become workers, and FSDP2 then stays inside each of them. Arguments as
        for the constructor.

        Raises:
            ValueError, TypeError: as for the constructor, or something has been prepared already.
        """
        config = _checked_config(gossip)
        if accelerator._models or accelerator._optimizers:
            raise ValueError(
                "this accelerator has already prepared a model or an optimizer. Call `adopt` before `prepare`."
            )
        warn_of_restarts()
        if device_mesh is not None:
            refuse_parallelism_beside_mesh(accelerator)
        workers = None if device_mesh is not None else workers_in(accelerator)
        refuse_unsupported_launch(accelerator, workers)
        if workers is not None:
            device_mesh = mesh_of_workers(workers, workers.device_mesh)
        config = supported_on(device_mesh, config, accelerator)
        if workers is not None:  # FSDP2 asks them for the dimensions to shard over when it prepares the model
            accelerator.state.parallelism_config, accelerator.state.device_mesh = workers, workers.device_mesh
        # A hyperparameter search makes an Accelerator per trial, and process groups cost threads and sockets: reuse.
        earlier = GossipAccelerator._adopted_group
        group = WorkerGroup.make(device_mesh, accelerator.device, config.timeout, earlier)
        kind = type(accelerator)
        accelerator.__class__ = cls if kind is Accelerator else type(f"Gossip{kind.__name__}", (cls, kind), {})
        adopted = cast(GossipAccelerator, accelerator)
        adopted._begin_gossip(config, group)
        GossipAccelerator._adopted_group = group
        return adopted

    def _begin_gossip(
        self,
        config: GossipConfig,
        group: WorkerGroup,
        scheduler_ticks: TickSetting = "auto",
        keep_average: bool = False,
        watch_average: bool = False,
    ) -> None:
        self.gossip_config = config
        self.group = group
        self.training = GossipTraining(self.group, config, self._models)
        self._gathering: list[Any] = []
        """The prepared modules to which FSDP2 was applied."""
        phase = TrainingPhase()
        self.deployment = Deployment(self.training, self.gradient_state, phase)
        self.sharding = LoaderSharding(self.group.everyone, phase)
        self.tick_rules = SchedulerTicks(scheduler_ticks, self.group.everyone.size, config.total_steps)
        self.consensus_logger = ConsensusLogger(self.training.metrics)
        self.pass_average = PassAverage(
            self.training, self.deployment, self.gradient_state, keep_average, watch_average
        )
        phase.enter_for_passes(self.pass_average.during_pass)
        phase.number_passes_by(self._number_of_pass)
        self.pass_average.last_steps = self.tick_rules.last_steps(self._gossip_schedulers)
        self.checkpoints = AcceleratorCheckpoints(
            self, self.group, self.gossip_steps, config, workers_per_process=config.workers_per_process
        )
        self.stopping = StopOnSignals(self.group.everyone)
        GossipAccelerator._latest_group = group
        memory.should_reduce_batch_size = _all_reduce_batch_size

    __reduce__ = refuse_copy

    @property
    def gossip_steps(self) -> list[GossipStep]:
        """The GossipStep of each prepared optimizer. Empty after `deploy` and `free_memory`."""
        return self.training.steps

    @property
    def workers_per_process(self) -> int:
        """Workers in every process."""
        return self.gossip_config.workers_per_process

    @property
    def num_workers(self) -> int:
        """All workers of the run: processes times `workers_per_process`."""
        return self.training.num_workers

    @property
    def distributed_type(self) -> DistributedType:
        """As for `Accelerator`; raises ValueError for Accelerate's LocalSGD, which asks for it first."""
        if sys._getframe(1).f_code is LocalSGD.__init__.__code__:
            raise ValueError(
                "LocalSGD averages the weights every few steps by itself. Leave it out, and set "
                "GossipConfig(mix_every=k) to mix in every k-th step; with topology='complete' and power=0 all workers "
                "are averaged there."
            )
        return super().distributed_type

    # ---- preparing

    @torch.inference_mode(False)  # what is made here is trained on, also if it is first prepared to evaluate
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, as `Accelerator.prepare`. Collective."""
        for obj in args:
            if isinstance(obj, nn.Module):
                refuse_unsupported_model(obj)
            if isinstance(obj, torch.optim.Optimizer):
                refuse_unsupported_optimizer(obj, self.gossip_config)
        first_model, first_optimizer = len(self._models), len(self._optimizers)
        with self.tick_rules.preparing():
            prepared = super().prepare(*args, device_placement=device_placement)
        self._gathering = gathering_modules(self._models)
        new_optimizers = [prepared_optimizer.optimizer for prepared_optimizer in self._optimizers[first_optimizer:]]
        self.deployment.start_from_average(self._models[first_model:], new_optimizers)
        self.training.start_equal(self._models[first_model:], new_optimizers)
        for optimizer in self._optimizers:
            if not isinstance(optimizer, GossipOptimizer):
                continue
            given_again = optimizer.ended and any(obj is optimizer for obj in args)
            if optimizer.gossip is None or given_again:
                optimizer.ended = False
                optimizer.gossip = self.training.new_step(optimizer.optimizer)
                optimizer.pass_average = self.pass_average
                optimizer.trains_on = weakref.WeakMethod(self._train_on)
                self._warn_of_unscaled_gradients(optimizer.gossip)
        self._settle_schedulers()
        self.pass_average.watch(self._models[first_model:])
        return prepared

    def _warn_of_unscaled_gradients(self, step: GossipStep) -> None:
        kinds = {slot.rounded_to for slots in step.mixer.slots.of_workers for slot in slots}
        if torch.float16 in kinds and self.scaler is None and self.is_main_process:
            logger.warning(
                "trained parameters are float16, and without loss scaling gradients below 6e-8 become 0. Set "
                "mixed_precision='fp16' (fp16=True in a Trainer), or load the model in bfloat16 or float32."
            )

    def _train_on(self, loader: Any) -> None:
        if self.tick_rules.trains_on(loader):
            self._settle_schedulers()

    def _settle_schedulers(self) -> None:
        """Decide how the schedulers tick, and let gamma look ahead along them."""
        schedulers = self._gossip_schedulers
        self.tick_rules.settle(schedulers, self.gradient_accumulation_steps, quiet=not self.is_main_process)
        self.training.plan((prepared.scheduler, prepared.ticks) for prepared in schedulers)
        self.pass_average.last_steps = self.tick_rules.last_steps(schedulers)

    @property
    def _gossip_schedulers(self) -> list[GossipScheduler]:
        return [scheduler for scheduler in self._schedulers if isinstance(scheduler, GossipScheduler)]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Apply device placement, autocast and compilation as usual, but no DDP: gradients stay local.

        With several workers per process the model becomes `VirtualWorkers`, unless it is for evaluation only.
        """
        refuse_unsupported_model(model)
        count = self.workers_per_process
        if isinstance(model, VirtualWorkers) and model.num_workers != count:
            raise ValueError(
                f"the model is VirtualWorkers of {model.num_workers} workers, but workers_per_process is {count}. Set "
                f"GossipConfig(workers_per_process={model.num_workers})."
            )
        if count == 1 or evaluation_mode:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        workers = model if isinstance(model, VirtualWorkers) else VirtualWorkers(model, count)
        before = len(self._models)
        for number, replica in enumerate(workers.replicas):
            # One autocast region per replica: a region caches the casts of parameters that change meanwhile.
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
        """Wrap a scheduler so that it ticks in each optimizer step as `scheduler_ticks` says."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, GossipScheduler):
            return prepared
        with self.tick_rules.preparing():
            own = self._schedulers[-1] = GossipScheduler(prepared, self.tick_rules.call)
        self._settle_schedulers()
        return own

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Shard a loader over the workers. If they get unequally many batches, training stops at the shortest."""
        new = not getattr(data_loader, "_is_accelerate_prepared", False)
        self.sharding.share_seed(self.dataloader_config)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if not new:
            return prepared
        completed = self.sharding.complete(prepared, data_loader, self._dataloaders)
        with self.tick_rules.preparing():
            self.tick_rules.loader_sharded(known_length(data_loader), known_length(completed), inner_loader(completed))
        return completed

    def _number_of_pass(self, passes: int) -> int:
        """Return the number by which a pass is ordered: the steps before it, or the passes if nothing is trained.

        Steps are the same on all workers, whatever one of them has read alone.
        """
        return self.training.taken_steps if self.training.steps else passes

    def equal_steps(self, loader: Iterable[Any]) -> EqualSteps:
        """Cut any iterable of this worker's own batches so that all workers take equally many steps. Collective."""
        return self.sharding.equal_steps(loader)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As `Accelerator.skip_first_batches`. After `load_state` in mid-epoch, prefer `resumed_batches`.

        With the number of batches that the interrupted pass has taken, both do the same.
        """
        recorder = recorder_of(dataloader)
        if recorder is not None and 0 < num_batches == recorder.loaded_batches:
            return self.resumed_batches(dataloader)
        if recorder is not None:
            if recorder.loaded_batches and self.is_main_process:
                logger.warning(
                    "skip_first_batches(loader, %d) after load_state, but %d batches of this pass were taken: rows are "
                    "left out or read again. Iterate over accelerator.resumed_batches(loader).",
                    num_batches,
                    recorder.loaded_batches,
                )
            recorder.begin_elsewhere()
        if isinstance(dataloader, EqualSteps):
            return self.equal_steps(super().skip_first_batches(dataloader.loader, num_batches))
        inner = inner_loader(dataloader)
        if isinstance(inner, DataLoaderDispatcher) and not isinstance(inner.dataset, IterableDataset):
            num_batches *= inner.batches_per_fetch  # Accelerate counts the batches that worker 0 reads for all
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
        """Override `even_batches` of the loaders that do not train, as Accelerate does for all. Nothing else is joined.

        Passes of training keep it: all workers take equally many steps, and stop at the shortest worker's.
        """
        loaders = [] if even_batches is None else [inner_loader(loader) for loader in self._dataloaders]
        samplers = [
            loader.batch_sampler
            for loader in loaders
            if hasattr(getattr(loader, "batch_sampler", None), "even_batches")
            and not self.sharding.phase.is_training(loader)
        ]
        before = [sampler.even_batches for sampler in samplers]
        for sampler in samplers:
            sampler.even_batches = even_batches
        try:
            yield
        finally:
            for sampler, own in zip(samplers, before, strict=True):
                sampler.even_batches = own

    def make_equal(self, models: list[nn.Module]) -> None:
        """Give all workers worker 0's parameters, frozen ones included, and buffers, as `prepare` does. Collective."""
        self.training.make_equal(models)

    # ---- gradients

    def clip_grad_norm_(self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip this worker's own gradient, as `Accelerator.clip_grad_norm_`; sparse gradients are supported.

        Several workers of a process are clipped by their own norms.

        Returns:
            The norm before clipping, shape (); with several workers per process, the mean of their norms.
        """
        self.unscale_gradients()
        return clip_worker_grad_norms_(self._by_worker(parameters), max_norm, norm_type, self.group.row)

    def clip_grad_value_(self, parameters: Iterable[Parameter], clip_value: float) -> None:
        """As `Accelerator.clip_grad_value_`, for all workers of this process."""
        super().clip_grad_value_([p for mine in self._by_worker(parameters) for p in mine], clip_value)

    def _by_worker(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        reshard(self._gathering)  # before `model.parameters()` is read: the shards have the gradients
        return self.training.owners.by_worker(as_parameter_list(parameters))

    # ---- the deployed model

    @contextmanager
    def deployed_model(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> Iterator[nn.Module]:
        """Inside the context, `model` is the average of the workers in eval mode. Collective.

        On exit training continues as if nothing had happened: every byte is restored. All prepared models are averaged;
        `model` is put into eval mode, and its buffers are deployed. Contexts nest, for another model or another
        calibration.

        Args:
            model: a prepared model.
            calibrate: a loader of training data, from which BatchNorm statistics are measured. Without it they are
                pooled over the workers. See `deployed_model.deployed_model`.
            calibration_forward: called as `calibration_forward(model, batch)`. Default: `calibration.run_model`.

        Raises:
            ValueError: no optimizer was prepared, and the workers' parameters differ.
        """
        self.pass_average.enabled = False  # the script looks after the average itself
        with self._average_in(model, calibrate, calibration_forward) as deployed:
            yield deployed
            self.pass_average.warn_of_edited_average()

    @contextmanager
    def _average_in(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> Iterator[nn.Module]:
        with (
            self.pass_average.hidden(),
            self.deployment.deployed(model, self._dataloaders, calibrate, calibration_forward) as deployed,
        ):
            yield deployed

    def restart_exchange(self) -> None:
        """Drop what was sent: the next step mixes the weights as they are at its beginning. Collective.

        Call it after a script has given the workers other weights, such as by `load_state_dict`. Otherwise the next
        step adds to the new weights what the old ones would have been mixed by.
        """
        self.training.restart_exchange()

    def not_training(self) -> AbstractContextManager[None]:
        """Inside, passes over prepared loaders do not count as training: they are neither cut short nor counted."""
        return self.sharding.phase.evaluating()

    def deploy(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> None:
        """End the gossip and leave the average of the workers in all prepared models. Collective.

        Arguments as for `deployed_model`; they concern `model`. To train again, prepare models and optimizers again.
        """
        self.pass_average.end()
        self.deployment.deploy(model, self._dataloaders, calibrate, calibration_forward)
        for optimizer in self._optimizers:
            if isinstance(optimizer, GossipOptimizer):
                optimizer.ended = True

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the deployed model as `Accelerator.save_model` saves a model. Collective.

        BatchNorm statistics are pooled. For calibrated ones, call this inside `deployed_model(model, calibrate=...)`.
        """
        with self._average_in(model) as deployed:
            super().save_model(deployed, save_directory, *args, **kwargs)
        self.group.everyone.barrier("saving the model")

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dictionary of the average of the workers, as `save_model` saves it. Collective.

        If the model is sharded, the main process gets whole tensors on the CPU, and the others an empty dictionary.

        Between the last step of a pass and the next step, the kept average is returned without communication. BatchNorm
        statistics are pooled; inside `deployed_model(model, calibrate=...)` they are the calibrated ones. A model that
        is not prepared gives its own state. Tensors are copies.

        Raises:
            WorkerLostError: not all workers called it within `timeout`.
        """
        prepared = self.training.has_prepared(model)
        if not prepared:
            self.pass_average.warn_of_unprepared(model)
        differs = self.training.taken_steps > 0 and self.num_workers > 1 and prepared
        keyed = self.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        with self.pass_average.shown() as average:
            self.pass_average.warn_of_edited_average()
            found = own_state(keyed, self.group) if average or not differs else None
        if found is None:
            with self._average_in(model):
                found = own_state(keyed, self.group)
        # The keys of the eager model, also where a submodule is compiled.
        return {eager_name(name): value for name, value in found.items()} if unwrap else found

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.unwrap_model`. For `VirtualWorkers`, return the model that was given to `prepare`."""
        return super().unwrap_model(first_replica(model), *args, **kwargs)

    # ---- gathering

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`; warns once if results of this worker's own model are gathered in eval mode."""
        self.pass_average.warn_of_own_evaluation(gathered=True)
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `Accelerator.gather_for_metrics`; warns as `gather`."""
        self.pass_average.warn_of_own_evaluation(gathered=True)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `Accelerator.reduce`; warns as `gather`."""
        self.pass_average.warn_of_own_evaluation(gathered=True)
        return super().reduce(tensor, reduction, scale)

    # ---- checkpoints

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool = True,
        facts: Mapping[str, Any] | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save the state of every worker, as `Accelerator.save_state` does for one. Collective.

        A checkpoint holds models, optimizers, schedulers, gradient scaler, random streams, positions in topology, gamma
        schedule and prepared loaders, registered objects, and inside an accumulation window the gradients. Nothing is
        pickled, and training is not disturbed. Automatic naming and `total_limit` work as in Accelerate, but older
        checkpoints are deleted only after this one is complete.

        Args:
            output_dir: folder on a file system that all workers share. Leave it out with automatic naming.
            safe_serialization: ignored, files are always safetensors.
            save_model_func_kwargs: ignored.
            wait: False writes in the background after a copy to host memory. The checkpoint becomes complete a little
                later, and the next `save_state` or `finish_saving` raises its errors.
            facts: plain values for the manifest, such as the run's configuration.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: on all workers, if any of them could not write; older checkpoints are untouched.
            RuntimeError: called inside `deployed_model`.
        """
        if self._save_model_state_pre_hook:
            self.pass_average.warn_of_hooks()
        with self.pass_average.hidden():
            return self.checkpoints.save(output_dir, wait=wait, facts=facts)

    def finish_saving(self) -> Path | None:
        """Wait until the checkpoint that is written in the background, if any, is complete. Collective.

        Returns:
            Its folder; None if there was none.

        Raises:
            CheckpointError: on all workers, if any of them could not write its part.
        """
        return self.checkpoints.finish()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        on_other_worker_count: Literal["refuse", "deployed"] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Path | None:
        """Load each worker's own state from `save_state` into the same prepared objects. Collective.

        Training then continues bit by bit as if it had not stopped, also where the script has changed weights since
        they were sent. Take the rest of the interrupted pass from `resumed_batches`; loaders with
        `use_stateful_dataloader=True` hand it out by themselves. If the workers have another number of shards than the
        saved ones, each gets its own values, and random streams are seeded anew.

        Args:
            input_dir: the checkpoint. With automatic naming, leave it out to load the newest complete one; "auto" loads
                it if there is one, so that a script that is started again goes on by itself.
            load_kwargs: ignored.
            load_model_func_kwargs: ignored.
            on_other_worker_count: what to do with a checkpoint of more or fewer workers: "refuse", or "deployed" to
                start all workers from the average of the saved ones. Parameters and floating-point optimizer states
                are then averaged, BatchNorm statistics are pooled, everything else is worker 0's, and random streams
                are seeded anew. Default: the GossipConfig's.

        Returns:
            The folder of the checkpoint; None for "auto" where there is none yet.

        Raises:
            WorkerCountError: another number of workers, refused.
            CheckpointError: no complete checkpoint, a damaged file, or a checkpoint of another model or setup.
            RuntimeError: called inside `deployed_model`.
        """
        self.pass_average.drop()
        loaded = self.checkpoints.load(input_dir, on_other_worker_count=on_other_worker_count)
        if loaded is not None:
            for step in self.training.steps:
                step.mixer.resume_exchange(step.schedule.total_lr)
            self.pass_average.after_load()
        return loaded

    # ---- stopping on a signal

    def stop_on_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> AbstractContextManager[None]:
        """Inside, a signal to any worker makes `should_stop` True on all of them, after the same step. Collective.

            with accelerator.stop_on_signals():
                for batch in loader:
                    ...
                    optimizer.step()
                    if accelerator.should_stop():
                        accelerator.save_state(folder)
                        raise SystemExit(EXIT_STOPPED)

        Outside, a signal takes its usual effect. See `StopOnSignals.listening`.

        Args:
            signals: which signals. Default: SIGTERM and SIGUSR1.

        Raises:
            ValueError: outside of the main thread, where Python allows no handlers; use `stop_on_request` there.
        """
        return self.stopping.listening(signals)

    def stop_on_request(self) -> AbstractContextManager[None]:
        """Inside, `request_stop` on any worker makes `should_stop` True on all, after the same step. Collective.

        Use it in programs that are asked to stop by other means than signals, or that train in a thread.
        """
        return self.stopping.listening(None)

    def request_stop(self, reason: str = "a request") -> None:
        """Ask all workers to stop after the same step, like a signal to this one. One worker is enough.

        It sends nothing and does not wait, and any thread may call it.

        Args:
            reason: for `stop_reason`, which adds this worker, as in "preemption of worker 1".

        Raises:
            RuntimeError: outside of `stop_on_request` and `stop_on_signals`.
        """
        self.stopping.request(reason)

    def should_stop(self) -> bool:
        """Return whether the run stops at this step. Call it after every optimizer step, on all workers."""
        return self.stopping.should_stop()

    @property
    def stop_reason(self) -> str | None:
        """The signal or request that stops the run, as in "SIGTERM to worker 1"; None if nothing does."""
        return self.stopping.reason

    # ---- measuring and logging

    def measure_consensus(self, again: bool = True) -> dict[str, float]:
        """Measure the exact consensus radius and return all consensus metrics. Collective.

        Args:
            again: whether to measure anew if the radius was measured at this very step.
        """
        with self.pass_average.hidden():
            return self.training.measure_consensus(again)

    def consensus_errors(self, model: nn.Module) -> list[dict[str, Tensor]]:
        """Return x_i - x_bar of each worker of this process by parameter name. Call it inside `deployed_model(model)`.

        The names are in the model's order. Tied parameters occur once, parameters without training not at all: they are
        equal on all workers.
        """
        return self.training.consensus_errors(model)

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log `values` and the consensus metrics, to the trackers and to every other sink of `consensus_logger`.

        Args:
            values: what to log.
            step: default: the number of optimizer steps taken.
            log_kwargs: as for `Accelerator.log`.
        """
        if self.is_main_process:
            if step is None and self.gossip_steps:
                step = self.gossip_steps[0].steps_taken
            super().log(self.consensus_logger.log(values, step), step=step, log_kwargs=log_kwargs)

    # ---- ending

    def free_memory(self, *objects: Any) -> Any:
        """As `Accelerator.free_memory`; also ends the gossip and frees its buffers.

        Every worker keeps its own weights. The next `prepare` of these starts all workers from their average.
        """
        self.pass_average.end()
        self.training.end()
        for optimizer in self._optimizers:
            optimizer.gossip = optimizer.pass_average = None  # the next `prepare` makes a new GossipStep
            optimizer.ended = self.num_workers > 1
        for model in self._models:
            vars(model).pop("_is_accelerate_prepared", None)  # so that a plain Accelerator wraps it in DDP again
        released = super().free_memory(*objects)
        self._gathering = []
        self.training.restart(self._models)
        self.tick_rules.end_training()
        self.pass_average.last_steps = self.tick_rules.last_steps(self._gossip_schedulers)
        return released

    def end_training(self) -> None:
        """Finish exchanges and background saves, close the trackers, and end the process group that Accelerate made."""
        self.finish_saving()
        self.training.drain()
        if self.group.everyone.size > 1:
            self.group.close()
        if self._user_owns_process_group:
            for tracker in self.trackers:
                tracker.finish()
        else:
            super().end_training()


_should_reduce_batch_size = memory.should_reduce_batch_size


def _all_reduce_batch_size(error: Exception) -> bool:
    """Decide as accelerate's `find_executable_batch_size`, but let no worker start again with a smaller batch alone."""
    group = GossipAccelerator._latest_group
    smaller = _should_reduce_batch_size(error) and not isinstance(error, WorkerLostError)  # which quotes others' errors
    if smaller and group is not None and group.everyone.size > 1 and not group.closed:
        again = f"starting again with a smaller batch after {type(error).__name__}: {short_cause(error)}"
        logger.warning("%s: %s", group.everyone.members.me, again)
        group.everyone.barrier(again)
    return smaller


def _checked_config(gossip: GossipConfig | None) -> GossipConfig:
    config = GossipConfig() if gossip is None else gossip
    if not isinstance(config, GossipConfig):
        raise TypeError(f"gossip must be a GossipConfig; got {type(gossip).__name__}. Write gossip=GossipConfig(...).")
    return config
