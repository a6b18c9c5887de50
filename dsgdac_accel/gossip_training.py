"""The gossip of an accelerator: its models, one `GossipStep` per optimizer, and the owner of each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.model_watch import ModelWatch
from dsgdac_accel.core.parameters import as_parameter_list
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.distributed.equal_values import make_equal_
from dsgdac_accel.distributed.fsdp_collectives import name_losses
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.shards import gathering_modules, reshard
from dsgdac_accel.doctor import quick_check
from dsgdac_accel.metrics import consensus_metrics
from dsgdac_accel.randomness import seed_workers_differently, shared_seed
from dsgdac_accel.virtual_workers import ParameterOwners, first_replica, values_of


class GossipTraining:
    """Starts the workers equal, makes a `GossipStep` for every optimizer, and measures how far the workers are apart.

    Args:
        group: the workers.
        config: topology, gamma schedule and policies.
        models: the accelerator's list of prepared models, which grows with every `prepare`.
    """

    def __init__(self, group: WorkerGroup, config: GossipConfig, models: Sequence[nn.Module]) -> None:
        self.group = group
        self.config = config
        self.steps: list[GossipStep] = []
        """One per prepared optimizer."""
        self._plans: dict[tuple[int, int], int] = {}
        """The ticks with which each step has looked ahead along a scheduler."""
        self.mixed_earlier: Any = WeakTensorKeyDictionary()
        """The parameters that were mixed until the gossip ended."""
        self.models_earlier: list[weakref.ref[nn.Module]] = []
        """The models of that gossip."""
        self.restart(models)

    def restart(self, models: Sequence[nn.Module]) -> None:
        """Forget all models. `models` is the accelerator's new list of prepared ones."""
        self.models = models
        self.owners = ParameterOwners(models, self.config.workers_per_process)
        self._workers_seeded = False

    # ---- preparing

    def start_equal(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Start newly prepared models on all workers from worker 0's state, and optimizers on all replicas. Collective.

        What is mixed or in a model that trains already stays as it is. Virtual workers get a random stream each.
        """
        name_losses(gathering_modules(models), self.group.row)
        for optimizer in optimizers:
            for virtual in self.owners.virtual_models:
                virtual.complete(optimizer)
        new = {id(model) for model in models}
        running = [tensor for model in self.trained_models if id(model) not in new for tensor in values_of(model)]
        joining = [p for optimizer in optimizers for p in as_parameter_list(optimizer.param_groups)]
        self.make_equal(models, optimizers, self.mixed.union(map(id, running)) - (set(map(id, joining)) - self.mixed))
        numbered = [(number, v) for number, v in enumerate(self.owners.virtual_models) if id(v) in new]
        if numbered:
            seed, local = shared_seed(self.group), self.config.workers_per_process
            for number, virtual in numbered:
                virtual.streams.seed(seed + number, range(self.group.rank * local, (self.group.rank + 1) * local))

    def make_equal(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = (), keep: Collection[int] = ()
    ) -> None:
        """Give all workers worker 0's parameters, frozen ones included, and buffers. Collective.

        Only tensors whose digests differ are sent. Those whose `id` is in `keep` stay.

        Raises:
            ValueError: names, shapes or dtypes differ between the workers, or quantized weights do.
        """
        if not (models or optimizers):
            return
        self.restart_exchange()
        reshard(gathering_modules(models))
        named = [item for model in models for item in (*model.named_parameters(), *model.named_buffers())]
        named += [
            (f"optimizer parameter {number}", parameter)
            for optimizer in optimizers
            for number, parameter in enumerate(as_parameter_list(optimizer.param_groups))
        ]
        distinct: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named:  # the model's names come first, and win
            if id(tensor) not in keep:
                distinct.setdefault(id(tensor), (name, tensor))
        make_equal_(list(distinct.values()), self.group)

    def new_step(self, optimizer: torch.optim.Optimizer) -> GossipStep:
        """Return a new `GossipStep` for an optimizer. Collective.

        The first one also seeds the workers differently and checks that their versions and configurations are equal.

        Raises:
            ValueError: a parameter is in two optimizers, or the workers cannot gossip together.
        """
        watch = ModelWatch(self.models)
        several = self.config.workers_per_process > 1
        step = GossipStep(optimizer, self.group, self.config, watch, self.owners.worker_of if several else None)
        self.steps.append(step)
        for parameter in as_parameter_list(optimizer.param_groups):
            self.mixed_earlier.pop(parameter, None)
        if self.group.everyone.size > 1 and not self._workers_seeded:
            self._workers_seeded = True
            # A process of several workers draws from a stream that none of its workers uses.
            salt = (self.config.workers_per_process,) if several else ()
            seed_workers_differently(self.group.everyone, *salt)
            quick_check(self.group.everyone, self.config)
        return step

    def plan(self, schedulers: Iterable[tuple[Any, int]]) -> None:
        """Let gamma look ahead along each scheduler of a gossiping optimizer, once for each way of ticking.

        Args:
            schedulers: each with its ticks in an optimizer step.
        """
        for scheduler, ticks in schedulers:
            optimizer = getattr(scheduler, "optimizer", None)
            for step in self.steps:
                ours = step.optimizer in (optimizer, getattr(optimizer, "optimizer", None))
                if ours and self._plans.get((id(step), id(scheduler))) != ticks:
                    self._plans[id(step), id(scheduler)] = ticks
                    step.schedule.plan(scheduler, ticks)

    @property
    def mixed(self) -> set[int]:
        """`id` of every parameter that an optimizer mixes."""
        slots = (slot for step in self.steps for mine in step.mixer.slots.of_workers for slot in mine)
        return {id(parameter) for slot in slots for parameter in slot.parameters}

    @property
    def trained_models(self) -> list[nn.Module]:
        """The prepared models with a parameter that an optimizer mixes."""
        mixed = self.mixed
        return [model for model in self.models if any(id(p) in mixed for p in model.parameters())]

    def has_prepared(self, model: nn.Module) -> bool:
        """Return whether a model, or the `VirtualWorkers` around it, is prepared."""
        return any(self.owners.wrapper_of(model) is prepared for prepared in self.models)

    # ---- measuring

    @property
    def num_workers(self) -> int:
        """All workers of the run: processes times `workers_per_process`."""
        return self.group.size * self.config.workers_per_process

    @property
    def taken_steps(self) -> int:
        """Optimizer steps so far; of several optimizers, the largest number."""
        return max((step.steps_taken for step in self.steps), default=0)

    def metrics(self) -> dict[str, float]:
        """Return the latest consensus metrics, without communication."""
        return consensus_metrics(self.steps)

    def measure_consensus(self, again: bool = True) -> dict[str, float]:
        """Measure the consensus radius and return all consensus metrics. Collective.

        Args:
            again: False skips the optimizers whose radius was measured at this very step.
        """
        for step in self.steps:
            if again or step.average.latest_step != step.mixer.step:
                step.average.start_measurement()
        return self.metrics()

    def consensus_errors(self, model: nn.Module) -> list[dict[str, Tensor]]:
        """Return x_i - x_bar by parameter name, one dictionary per worker of this process; of this process's shards.

        The names are in the model's order. Tied parameters occur once, parameters without training not at all: they are
        equal on all workers.

        Raises:
            RuntimeError: no average is deployed.
        """
        reshard(gathering_modules([model]))
        inner = extract_model_from_parallel(first_replica(self.owners.wrapper_of(model)), keep_torch_compile=False)
        by_worker: list[dict[int, Tensor]] = [{} for _ in range(self.config.workers_per_process)]
        for step in self.steps:
            for mine, errors in zip(by_worker, step.average.errors(), strict=True):
                mine.update(errors)
        # In the model's order, not the optimizer's.
        named = list(inner.named_parameters())
        return [{name: mine[id(p)] for name, p in named if id(p) in mine} for mine in by_worker]

    # ---- ending

    def restart_exchange(self) -> None:
        """Drop what was sent for every optimizer, see `Mixer.restart_exchange`. Collective."""
        for step in self.steps:
            step.restart_exchange()

    def drain(self) -> None:
        """Wait for the exchanges in flight, and raise what the last step has found."""
        for step in self.steps:
            step.mixer.drain()
            step.mixer.agreement.resolve()

    def end(self) -> None:
        """End all gossip: wait for the exchanges in flight, free the copies, and take the masters out."""
        if self.steps:
            self.models_earlier = list(map(weakref.ref, self.models))
        for step in self.steps:
            for slot in chain.from_iterable(step.mixer.slots.of_workers):
                self.mixed_earlier.update(dict.fromkeys(slot.parameters))
            step.mixer.release()
            step.masters.release()
            if step.optimizer_watch is not None:
                step.optimizer_watch.release()
        self.steps.clear()
        self._plans.clear()
