"""Makes the Accelerator of each algorithm: `sgd`, `sam`, `dsgd`, `dsgd_ac`, `adam`, `dadam` and `dadam_ac`.

The training loop is the same for all. Only this file knows which algorithms average gradients and which gossip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel import ConsensusLogger, GossipAccelerator, GossipConfig, VirtualWorkers, WorkerGroup
from dsgdac_accel.calibration import Forward
from dsgdac_accel.checkpoint.saving import AcceleratorCheckpoints
from dsgdac_accel.data.dataloader_state import DataPosition, ResumedBatches, data_position, record_passes
from dsgdac_accel.deployed_model import deployed_model
from dsgdac_accel.distributed.restarts import init_method_after_restart
from dsgdac_accel.distributed.signals import STOP_SIGNALS
from dsgdac_accel.distributed.stopping import StopOnSignals
from dsgdac_accel.randomness import seed_workers_differently
from dsgdac_accel.virtual_workers import first_replica

SYNCHRONOUS = ("sgd", "sam", "adam")
WITHOUT_CONTROL = ("dsgd", "dadam")
"""Plain gossip, with gamma 1."""


def make_accelerator(
    algorithm: str,
    gossip: GossipConfig,
    total_steps: int | None = None,
    steps_per_epoch: int | None = None,
    **kwargs: Any,
) -> SynchronousAccelerator | GossipAccelerator:
    """Make the Accelerator that trains by `algorithm`.

    Args:
        algorithm: `sgd`, `sam` and `adam` average gradients; `dsgd` and `dadam` gossip with gamma 1; `dsgd_ac` and
            `dadam_ac` gossip with the gamma schedule of `gossip`.
        gossip: topology, gamma schedule and policies.
        total_steps: optimizer steps of the run, if known, from which the largest future learning rate follows.
        steps_per_epoch: optimizer steps per epoch, to convert `gossip.start_epoch`.
        **kwargs: arguments of `accelerate.Accelerator`.

    Raises ValueError for a tracker that is not installed, and a `gossip.total_steps` that is not the run's.
    """
    _require_trackers(kwargs.get("log_with") or ())
    if total_steps is not None and gossip.total_steps not in (None, total_steps):
        raise ValueError(
            f"gossip.total_steps: the run has {total_steps} steps, as its data and epochs give; got "
            f"{gossip.total_steps}. Leave it out."
        )
    if algorithm in SYNCHRONOUS:
        return SynchronousAccelerator(
            timeout=gossip.timeout,
            workers_per_process=gossip.workers_per_process,
            cpu=not torch.accelerator.is_available(),
            **kwargs,
        )
    if algorithm in WITHOUT_CONTROL:
        gossip = replace(gossip, power=0.0, constant=None, floor=0.0, start_step=None, start_epoch=None)
    elif gossip.start_epoch is not None and steps_per_epoch is not None:
        gossip = replace(gossip, start_epoch=None, start_step=gossip.start_epoch * steps_per_epoch)
    gossip = replace(gossip, total_steps=total_steps)
    # The tasks build their schedules for the steps of one worker, and evaluate and save the deployed model.
    return GossipAccelerator(gossip=gossip, scheduler_ticks="once", keep_average=False, **kwargs)


def _require_trackers(names: Iterable[str]) -> None:
    """Raise ValueError for a missing tracker; Accelerate silently skips it if another one is installed."""
    available = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    missing = [name for name in names if name not in (*available, "all")]
    if missing:
        raise ValueError(
            f"report_to: {missing[0]} is not installed here; there are {', '.join(available) or 'none'}. Install it, "
            f"or leave it out."
        )


class SynchronousAccelerator(Accelerator):
    """The baseline: Accelerate's own Accelerator with DDP, and the few names of GossipAccelerator that tasks use.

    Several workers in a process share one model. Each takes its part of the batch, with its own BatchNorm statistics.

    Args:
        timeout: seconds after which a worker that does not answer counts as lost.
        workers_per_process: workers in this process.
        *args, **kwargs: arguments of `accelerate.Accelerator`.
    """

    def __init__(self, *args: Any, timeout: float, workers_per_process: int = 1, **kwargs: Any) -> None:
        handlers = [
            *(kwargs.pop("kwargs_handlers", None) or []),
            InitProcessGroupKwargs(init_method=init_method_after_restart(), timeout=timedelta(seconds=timeout)),
        ]
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)
        self.group = WorkerGroup(self.device, timeout)
        self._stopping = StopOnSignals(self.group)
        self.workers_per_process = workers_per_process
        self._checkpoints = AcceleratorCheckpoints(self, self.group, workers_per_process=workers_per_process)
        self.consensus_logger = ConsensusLogger(sinks=[self._log_to_trackers])

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as Accelerate does, check that DDP averages gradients, and seed the workers differently.

        Raises RuntimeError for a model that is not wrapped in DDP.
        """
        prepared = super().prepare(*args, **kwargs)
        for model in prepared if isinstance(prepared, tuple) else (prepared,):
            bare = getattr(model, "_orig_mod", model)
            if self.num_processes > 1 and isinstance(bare, nn.Module) and not isinstance(bare, DistributedDataParallel):
                raise RuntimeError("the synchronous baseline is not wrapped in DDP, so its workers would train alone.")
            if isinstance(model, DistributedDataParallel):  # in a compiled model the guard would split the graph
                self._name_lost_workers_in_forward(model)
        seed_workers_differently(self.group)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as Accelerate does; the workers of a process share it."""
        if self.workers_per_process == 1 or evaluation_mode:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        inner = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        prepared: nn.Module = VirtualWorkers(inner, self.workers_per_process, shared=True)
        if self.num_processes > 1:
            devices = [self.device] if self.device.type == "cuda" else None
            prepared = DistributedDataParallel(prepared, device_ids=devices)
        self._models[-1] = prepared
        return prepared

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Unwrap a model as Accelerate does, and out of `VirtualWorkers`."""
        return super().unwrap_model(first_replica(super().unwrap_model(model, *args, **kwargs)), *args, **kwargs)

    @property
    def num_workers(self) -> int:
        """Number of all workers."""
        return self.num_processes * self.workers_per_process

    def _name_lost_workers_in_forward(self, model: DistributedDataParallel) -> None:
        """Name a worker that is lost while DDP broadcasts buffers in the forward pass."""
        forward = model.forward

        def guarded_forward(*args: Any, **kwargs: Any) -> Any:
            return self.group.guarded(lambda: forward(*args, **kwargs), "sharing buffers")

        model.forward = guarded_forward  # type: ignore[method-assign]

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as Accelerate does, and record its position for checkpoints."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        return record_passes(prepared, self._dataloaders, torch.is_grad_enabled)

    def save_state(self, output_dir: Any = None, *_: Any, wait: bool = True, facts: Any = None, **__: Any) -> Path:
        """As `GossipAccelerator.save_state`."""
        return self._checkpoints.save(output_dir, wait=wait, facts=facts)

    def finish_saving(self) -> Path | None:
        """As `GossipAccelerator.finish_saving`."""
        return self._checkpoints.finish()

    def load_state(self, input_dir: Any = None, *_: Any, on_other_worker_count: Any = None, **__: Any) -> None:
        """As `GossipAccelerator.load_state`."""
        self._checkpoints.load(input_dir, on_other_worker_count=on_other_worker_count)

    def resumed_batches(self, loader: Iterable[Any], replay: bool | None = None) -> ResumedBatches:
        """As `GossipAccelerator.resumed_batches`."""
        return ResumedBatches(loader, replay)

    def data_position(self, loader: Any) -> DataPosition:
        """As `GossipAccelerator.data_position`."""
        return data_position(loader)

    def end_training(self) -> None:
        """Finish the checkpoint that is being saved, then end as Accelerate does."""
        self.finish_saving()
        super().end_training()

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once per optimizer step as in gossip, not once per process."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as Accelerate does, and name a worker that is lost while DDP averages the gradients."""
        average = super().backward
        self.group.guarded(lambda: average(loss, **kwargs), "averaging gradients")

    def stop_on_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> AbstractContextManager[None]:
        """As `GossipAccelerator.stop_on_signals`."""
        return self._stopping.listening(signals)

    def should_stop(self) -> bool:
        """As `GossipAccelerator.should_stop`."""
        return self._stopping.should_stop()

    @property
    def stop_reason(self) -> str | None:
        """As `GossipAccelerator.stop_reason`."""
        return self._stopping.reason

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log through the ConsensusLogger, like GossipAccelerator."""
        if self.is_main_process:
            self.consensus_logger.log(values, step)

    def _log_to_trackers(self, values: dict[str, Any], step: int | None) -> None:
        super().log(values, step=step)

    @contextmanager
    def deployed_model(
        self, model: nn.Module, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> Iterator[nn.Module]:
        """Yield the model in eval mode with calibrated BatchNorm; all workers have equal parameters already."""
        with deployed_model(
            model, (), self.group, calibrate=calibrate, calibration_forward=calibration_forward
        ) as deployed:
            yield deployed

    @property
    def gossip_steps(self) -> tuple[()]:
        """Empty, since there is no gossip."""
        return ()
