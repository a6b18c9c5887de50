"""The deployed model: the average of the workers, put into a model for a while or for good.

On exit every byte is restored, also after an exception:

- parameters: `Shown` copies back those that are mixed from the send buffers, and others from copies;
- gradients, buffers, train/eval modes, random streams, and parameters that were re-pointed: `preserved_state`;
- the position of prepared loaders and samplers: `preserved_loaders`, which `Deployment.deployed` enters.

Calibration of BatchNorm is in `calibration`.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel.calibration import (
    Forward,
    calibrate_batch_norm,
    calibrated_layers,
    frozen_layers,
    pooled_batch_norm,
    sharded_batches,
)
from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.parameters import as_parameter_list
from dsgdac_accel.core.shown import KeptPlace, Shown
from dsgdac_accel.data.loaders import preserved_loaders
from dsgdac_accel.data.sharding import TrainingPhase
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.shards import gathering_modules, local_parameters, reshard
from dsgdac_accel.gossip_training import GossipTraining
from dsgdac_accel.randomness import random_state, set_random_state
from dsgdac_accel.tensor_bytes import begin_digest, bits_differ, digest, finish_digests
from dsgdac_accel.unmixed import means_of, unmixed_parameters
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica, replicas_of

logger = logging.getLogger(__name__)


@contextmanager
def deployed_model(
    model: nn.Module,
    averages: Sequence[Average],
    group: WorkerGroup,
    *,
    calibrate: Iterable[Any] | None = None,
    calibration_forward: Forward | None = None,
    frozen: Collection[nn.Module] = (),
    unmixed: Sequence[Sequence[Tensor]] = (),
) -> Iterator[nn.Module]:
    """Inside the context, `model` is the average of the workers in eval mode; on exit, this worker's own model again.

    Parameters are averaged. BatchNorm statistics are calibrated on `calibrate`, or without it pooled over the workers
    by total variance. Every other buffer is worker 0's. On exit parameters, gradients, buffers, train/eval modes and
    random streams are restored to the byte. Collective: enter it on all workers.

    Args:
        model: the model; may be compiled or wrapped by Accelerate. The context yields the inner module of DDP and the
            first replica of `VirtualWorkers`.
        averages: of all its parameters. Empty for a synchronous baseline, whose workers are equal.
        group: the workers.
        calibrate: training data: a prepared DataLoader (read whole, sharded over the workers), or another loader or
            iterable of this worker's own batches.
        calibration_forward: called as `calibration_forward(model, batch)`. Default: `calibration.run_model`.
        frozen: BatchNorm layers whose statistics stay as they are, in addition to those in eval mode while `model` is
            in train mode.
        unmixed: parameters that no optimizer mixes and that differ between the workers, see `unmixed_parameters`.

    Raises:
        ValueError: calibration is not possible, or the workers' buffers have different shapes.
        WorkerLostError: a worker did not enter the context.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module  # DDP's forward broadcasts buffers, and waits where workers have unequally many batches
    holder, model = model, first_replica(model)
    layers = _calibrated_by_worker(holder, frozen)[0]
    group.refuse_combinations(calibrates=bool(layers) and calibrate is not None)
    first_replica_only = holder.whole() if isinstance(holder, VirtualWorkers) else nullcontext()
    with first_replica_only, preserved_state(holder):
        shown = form_average([holder], averages, group, frozen, unmixed, pooled=calibrate is None)
        try:
            shown.show()
            if calibrate is not None:
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                local_workers = holder.num_workers if isinstance(holder, VirtualWorkers) else 1
                batches = sharded_batches(calibrate, group, device, local_workers=local_workers)
                calibrate_batch_norm(model, batches, group, layers=layers, forward=calibration_forward)
            holder.eval()
            yield model
        finally:
            shown.restore()


def form_average(
    models: Sequence[nn.Module],
    averages: Sequence[Average],
    group: WorkerGroup,
    frozen: Collection[nn.Module],
    unmixed: Sequence[Sequence[Tensor]],
    pooled: bool = True,
) -> Shown:
    """Form the average of the workers and everything that models show with it; nothing of them changes. Collective.

    Args:
        models: whose buffers are shared, perhaps in `VirtualWorkers`.
        averages, group, frozen, unmixed: as for `deployed_model`.
        pooled: whether to pool BatchNorm statistics, which are to be calibrated otherwise.
    """
    places: list[KeptPlace] = [place for average in averages for place in average.form()]
    beside: list[tuple[Tensor, Tensor | None]] = [*means_of(unmixed, group)]
    for model in models:
        layers_by_worker = _calibrated_by_worker(model, frozen)
        beside += _shared_buffers(model, layers_by_worker[0], group.everyone)
        beside += pooled_batch_norm(layers_by_worker, group.everyone) if pooled else []
    places += [(tensor, tensor.detach().clone(), value) for tensor, value in beside]
    return Shown(places, [average.copies for average in averages], models)


class Deployment:
    """Deploys the average of an accelerator's workers.

    Args:
        training: the models and GossipSteps of the accelerator.
        gradient_state: Accelerate's record of the loaders that are being read.
        phase: is told that passes over loaders inside do not count as training.
    """

    def __init__(self, training: GossipTraining, gradient_state: GradientState, phase: TrainingPhase) -> None:
        self.training = training
        self.gradient_state = gradient_state
        self.phase = phase
        self._deployments = 0

    @property
    def active(self) -> bool:
        """Whether a `deployed` context is open, so that the models hold the average."""
        return self._deployments > 0

    @contextmanager
    def deployed(
        self,
        model: nn.Module,
        loaders: Sequence[Any],
        calibrate: Iterable[Any] | None,
        calibration_forward: Forward | None,
    ) -> Iterator[nn.Module]:
        """Enter `deployed_model` for a prepared model. Contexts nest, for other models or other calibration data.

        Args:
            model: a prepared model.
            loaders: the prepared loaders, whose position is restored on exit.
            calibrate: as for `deployed_model`.
            calibration_forward: as for `deployed_model`.

        Raises:
            ValueError: no optimizer was prepared, and the workers' parameters differ.
        """
        model, steps, group = self.training.owners.wrapper_of(model), self.training.steps, self.training.group
        gathering = gathering_modules([model, *self.training.models])  # inside, all prepared models are the average
        reshard(gathering)
        references = list(self.gradient_state.dataloader_references)
        averages = [] if self.active else [step.average for step in steps]
        if not (steps or self.active) and group.size > 1:
            _require_equal_parameters(model, group)
        others = [] if self.active else [other for other in self.training.models if other is not model]
        average = deployed_model(
            model,
            averages,
            group,
            calibrate=calibrate,
            calibration_forward=calibration_forward,
            frozen=self._frozen,
            unmixed=self._unmixed([model, *others]) if steps else [],
        )
        self._deployments += 1
        try:
            with self.phase.evaluating(), preserved_loaders(loaders), ExitStack() as preserved:
                for other in others:
                    preserved.enter_context(preserved_state(other))
                deployed = preserved.enter_context(average)
                try:
                    yield deployed
                finally:
                    reshard(gathering)
        finally:
            self._deployments -= 1
            # Otherwise a pass that was left by `break` inside would count as the one that is being read.
            self.gradient_state.dataloader_references = references

    def is_edited(self) -> bool:
        """Return whether a script has written other weights into models that hold the average. Waits once."""
        places = (place for step in self.training.steps for place in step.average.places())
        return any(bits_differ((tensor, value.to(tensor.dtype)) for tensor, _, value in places))

    def form(self) -> Shown:
        """Form the average of all prepared models, which they can show until the next step. Collective."""
        return self._form(self.training.models)

    def _form(self, models: Sequence[nn.Module]) -> Shown:
        training = self.training
        averages, unmixed = [step.average for step in training.steps], self._unmixed(training.models)
        return form_average(models, averages, training.group, self._frozen, unmixed)

    def start_from_average(self, models: Sequence[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give all workers the average of what an earlier gossip has mixed, and of the models with it. Collective.

        All that it has mixed, and its models, take part as soon as some of it is prepared again.
        """
        reshard(gathering_modules(models))
        trained = nn.ParameterList(p for each in optimizers for p in as_parameter_list(each.param_groups))
        earlier = self.training.mixed_earlier
        again = [model for model in (*models, trained) if any(p in earlier for p in model.parameters())]
        if again:
            gc.collect()  # what scripts have dropped is gone on all workers alike
            again += [model for ref in self.training.models_earlier if (model := ref()) is not None]
            again = [*dict.fromkeys(again), nn.ParameterList(earlier)]
            form_average(again, [], self.training.group, (), self._unmixed(again)).leave()
            self.training.models_earlier.clear()

    @property
    def _frozen(self) -> list[nn.Module]:
        return [layer for step in self.training.steps for layer in step.watch.frozen]

    def _unmixed(self, models: Iterable[nn.Module]) -> list[list[Tensor]]:
        """Return what `unmixed_parameters` finds in the models."""
        known, found = set(self.training.mixed), []
        for model in models:
            new = unmixed_parameters(model, known, self.training.group)
            known.update(id(tensor) for tensors in new for tensor in tensors)
            found += new
        return found

    def deploy(
        self,
        model: nn.Module,
        loaders: Sequence[Any],
        calibrate: Iterable[Any] | None,
        calibration_forward: Forward | None,
    ) -> None:
        """End the gossip and leave the average in every replica of `model` and of the other prepared models.

        Collective. Arguments as for `deployed`, which concern `model`.
        """
        training = self.training
        first = training.owners.wrapper_of(model)
        models = [first, *(other for other in training.models if other is not first)]
        reshard(gathering_modules(models))
        if not training.steps and training.group.size > 1:
            for one in models:
                _require_equal_parameters(one, training.group)
        calibrated: list[Tensor] = []
        if calibrate is not None:
            with self.deployed(model, loaders, calibrate, calibration_forward) as deployed:
                calibrated = [buffer.clone() for buffer in deployed.buffers()]
        self._form(models).leave()
        for replica in replicas_of(first):
            for buffer, value in zip(replica.buffers(), calibrated, strict=False):
                buffer.data.copy_(value)
        training.end()


def _require_equal_parameters(model: nn.Module, group: WorkerGroup) -> None:
    """Raise ValueError on every worker unless all have the same parameters. Reads all of them. Collective."""
    group.require_equal(
        [digest(values) for _, _, values in local_parameters(model)],
        "parameters (digests)",
        "There is no average to deploy, because no prepared optimizer mixes the workers (any more). Train with an "
        "optimizer that went through `prepare(model, optimizer)`.",
    )


def _calibrated_by_worker(model: nn.Module, frozen: Collection[nn.Module]) -> list[list[_BatchNorm]]:
    """Return the BatchNorm layers of each replica of a model whose statistics training has not kept fixed."""
    fixed = {*frozen, *frozen_layers(model)}
    return [calibrated_layers(replica, fixed) for replica in replicas_of(model)]


def _shared_buffers(
    model: nn.Module, layers: Sequence[_BatchNorm], group: WorkerGroup
) -> list[tuple[Tensor, Tensor | None]]:
    """Return buffers with worker 0's values, except the statistics of `layers` and caches that differ in shape.

    None is the value of a buffer that is equal on all workers.

    Floating-point buffers with other values on other workers may be running statistics: one warning names them.
    """
    first, *others = (dict(replica.named_buffers()) for replica in replicas_of(model))
    measured = {id(buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)}
    named = {name: buffer for name, buffer in first.items() if id(buffer) not in measured}
    layout = {
        name: (tuple(buffer.shape), str(buffer.dtype), buffer.device.type)  # which decides the way that it is sent
        for name, buffer in named.items()
    }
    everywhere = [(name, buffers[name]) for name in named for buffers in (first, *others) if name in buffers]
    digests = finish_digests([begin_digest(buffer) for _, buffer in everywhere])
    known = {(name, text) for (name, _), text in zip(everywhere, digests, strict=True)}
    gathered = group.all_gather_object((layout, known), "comparing the buffers of the model")
    layouts = [theirs for theirs, _ in gathered]
    values = Counter(name for name, _ in set().union(*(theirs for _, theirs in gathered)))
    pairs: list[tuple[Tensor, Tensor | None]] = []
    differing: list[str] = []
    for name, buffer in named.items():
        if all(theirs.get(name) == layout[name] for theirs in layouts):
            value = None
            if values[name] > 1:
                value = buffer.detach().clone()
                group.broadcast_(value, f"sharing buffer {name} for the deployed model")
                differing += [name] if value.is_floating_point() else []
            replicated = [buffers[name] for buffers in others if name in buffers]
            pairs += [(each, value) for each in (buffer, *replicated) if each.shape == buffer.shape]
        elif name in first_replica(model).state_dict(keep_vars=True):  # which does not warn that it is a worker's own
            seen = [theirs.get(name) for theirs in layouts]
            raise ValueError(
                f"buffer {name} of the deployed model has different shapes, dtypes or devices on the workers: {seen}. "
                f"Keep its shape fixed, or register it with persistent=False so that each worker keeps its own."
            )
    if differing and group.rank == 0:
        _warn_of_buffers(", ".join(differing))
    return pairs


@functools.cache  # once
def _warn_of_buffers(names: str) -> None:
    logger.warning(
        "the deployed model has worker 0's values of these buffers, which differ between the workers and are not "
        "averaged: %s. If they are statistics of the data, average them over the workers by `accelerator.reduce`.",
        names,
    )


# ---- restoring a model


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, train/eval modes and random streams on exit. Gradients are None inside.

    Parameters and gradients that were converted inside (`model.half()`) point to their old memory again. The VALUES of
    parameters are not restored here: that is the part of `Shown`.
    """
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    pointers = [(p, p.data, p.grad) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a backward pass inside must not add to an open accumulation window
    modes = [(module, module.training) for module in model.modules()]
    streams = random_state()
    try:
        yield
    finally:
        for parameter, data, gradient in pointers:
            parameter.data = data
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.data.copy_(value)
                module._buffers[name] = buffer  # `model.half()` replaces the tensor objects
        for module, mode in modes:
            module.training = mode
        set_random_state(streams)
