"""`Gossip`: decentralized training of a plain PyTorch loop, in the place of `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn

from dsgdac_accel.calibration import Forward
from dsgdac_accel.compatibility import (
    known_loss,
    refuse_unsupported_model,
    refuse_unsupported_optimizer,
)
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.sharding import TrainingPhase
from dsgdac_accel.deployed_model import Deployment
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.restarts import warn_of_restarts
from dsgdac_accel.gossip_training import GossipTraining
from dsgdac_accel.virtual_workers import VirtualWorkers


class Gossip:
    """Lets the workers of a plain PyTorch loop gossip: `optimizer.step()` also mixes from now on. Collective.

        gossip = Gossip(model, optimizer, GossipConfig())  # instead of model = DistributedDataParallel(model)

    All workers start from worker 0's parameters and buffers. Gradients stay local, and random streams then differ per
    worker. Each worker reads its own part of the data, for example through a `DistributedSampler`, and all of them must
    take equally many steps.

    Args:
        model: the bare model, on its device.
        optimizers: a torch optimizer of its parameters, or several that share none of them.
        config: topology, gamma schedule and policies. Default: DSGD-AC on the one-peer ring with p = 3.
        scheduler: a learning-rate scheduler that has not been stepped, so that `max_lr` can look ahead along it.
        scaler: the GradScaler of fp16 training. An overflow on one worker then skips the local update of all.

    Raises:
        ValueError: no process group was made, the workers' models differ, or they cannot gossip. The message has the
            way out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        config: GossipConfig | None = None,
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        config = GossipConfig() if config is None else config
        listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        _refuse(model, listed, config)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.model = model
        warn_of_restarts()
        self.group = WorkerGroup(device, config.timeout)
        self.training = GossipTraining(self.group, config, [model])
        self.training.start_equal([model], listed)
        self._deployment = Deployment(self.training, GradientState(), TrainingPhase())
        self._epoch: int | None = None
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaled = False  # inside `scaler.step`
        self._original_steps: list[tuple[Any, Callable[..., Any]]] = []
        for optimizer in listed:
            self._replace_step(optimizer, self._take_step, self.training.new_step(optimizer))
        if self._scaler is not None:
            self._replace_step(scaler, self._take_scaled_step)
        self.training.plan([(scheduler, 1)])

    @property
    def steps(self) -> list[GossipStep]:
        """The `GossipStep` of each optimizer. Empty after `deploy`."""
        return self.training.steps

    def set_epoch(self, epoch: int) -> None:
        """Tell which epoch begins (0-based), beside `DistributedSampler.set_epoch`; only `start_epoch` needs it."""
        self._epoch = epoch

    # ---- steps

    def _replace_step(self, owner: Any, take: Callable[..., Any], *first: Any) -> None:
        original = owner.step
        self._original_steps.append((owner, original))

        @torch.compiler.disable
        @wraps(original)  # with the mark by which a scheduler of torch that was made before knows it
        def replaced(_: Any, *args: Any, **kwargs: Any) -> Any:
            return take(original, *first, *args, **kwargs)

        owner.step = MethodType(replaced, owner)  # a method, because schedulers that are made later wrap it

    def _take_step(
        self, original: Callable[..., Any], step: GossipStep, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        if self._scaled:
            return original(closure, **kwargs)
        if self._epoch is None and step.config.start_epoch is not None:
            raise ValueError(
                "start_epoch counts epochs. Call gossip.set_epoch(epoch) when one begins, or set start_step."
            )
        result: Any = None
        arguments: tuple[Any, ...] = ()
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            arguments = (known_loss(result),)
        if step.before_local_step(self._epoch):
            with step.local_step():
                result = original(*arguments, **kwargs)
        step.after_local_step()
        return result

    def _take_scaled_step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        step = next((step for step in self.steps if step.optimizer is optimizer), None)
        if step is None:
            return original(optimizer, *args, **kwargs)
        step.before_local_step(self._epoch, self._scaler)
        self._scaled = True
        try:
            with step.local_step():
                result = original(optimizer, *args, **kwargs)  # skips the update after an overflow
        finally:
            self._scaled = False
        step.after_local_step()
        return result

    def restart_exchange(self) -> None:
        """Drop what was sent, see `GossipAccelerator.restart_exchange`. Collective.

        A loop that changes weights before each step also calls it just before it saves, so that a resumed run mixes the
        same as the unbroken one.
        """
        self.training.restart_exchange()

    # ---- the deployed model

    def deployed_model(
        self, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None
    ) -> AbstractContextManager[nn.Module]:
        """Inside the context, the model is the average of the workers in eval mode. Collective.

        On exit every byte of this worker is restored. Evaluate and save inside, on all workers.

        Args:
            calibrate: batches of this worker's training data, from which BatchNorm statistics are measured. Without
                them the workers' statistics are pooled.
            calibration_forward: called as `calibration_forward(model, batch)`. Default: `calibration.run_model`.
        """
        return self._deployment.deployed(self.model, (), calibrate, calibration_forward)

    def deploy(self, calibrate: Iterable[Any] | None = None, calibration_forward: Forward | None = None) -> None:
        """End the gossip and leave the average of the workers in the model. Collective. Arguments as above."""
        self._deployment.deploy(self.model, (), calibrate, calibration_forward)
        for owner, original in self._original_steps:
            owner.step = original

    # ---- measuring, checkpoints

    def metrics(self) -> dict[str, float]:
        """Return the latest consensus metrics (`gossip/gamma`, `gossip/radius`, ...), without communication."""
        return self.training.metrics()

    def measure_consensus(self) -> dict[str, float]:
        """Measure the exact consensus radius and return all consensus metrics. Collective."""
        return self.training.measure_consensus()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in topology and gamma schedule, and the float32 masters of bf16 and fp16 parameters.

        Every worker saves its own, with its own model, optimizer and scheduler. If the loop changes weights before each
        step, call `restart_exchange` first.

        Raises:
            RuntimeError: called inside `deployed_model`, where the model is not this worker's own.
        """
        self._refuse_while_deployed("state_dict")
        steps = [step.state_dict() for step in self.steps]
        masters = [step.masters.edited_values() for step in self.steps]
        return {"steps": steps, "masters": masters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Load it before the model and the optimizer, on all workers.

        Raises:
            ValueError: the state is of another number of workers or optimizers.
            RuntimeError: called inside `deployed_model`.
        """
        self._refuse_while_deployed("load_state_dict")
        if len(state["steps"]) != len(self.steps):
            raise ValueError(
                f"the state is of {len(state['steps'])} optimizers, but this Gossip has {len(self.steps)}. Give the "
                f"same optimizers in the same order."
            )
        for step, saved, masters in zip(self.steps, state["steps"], state["masters"], strict=True):
            step.load_state_dict(saved)
            step.masters.load(masters)

    def _refuse_while_deployed(self, what: str) -> None:
        if self._deployment.active:
            raise RuntimeError(
                f"{what} inside `with deployed_model(...)` would confuse the average with this worker's "
                f"own weights. Call it before or after."
            )


def _refuse(model: nn.Module, optimizers: Sequence[Any], config: GossipConfig) -> None:
    if not isinstance(config, GossipConfig):
        raise TypeError(f"config must be a GossipConfig; got {type(config).__name__}. Write GossipConfig(...).")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizers must be torch optimizers; got {type(optimizer).__name__}.")
        refuse_unsupported_optimizer(optimizer, config)
    refuse_unsupported_model(model)
    count = model.num_workers if isinstance(model, VirtualWorkers) else 1
    if count != config.workers_per_process:
        raise ValueError(
            f"workers_per_process is {config.workers_per_process}, but the model is that of {count} workers. Pass "
            f"VirtualWorkers(model, {config.workers_per_process}), or leave workers_per_process out."
        )
