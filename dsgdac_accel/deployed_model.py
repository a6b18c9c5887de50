"""The deployed model: the average of the workers, swapped in for a while and taken out again without a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel.calibration import (
    Forward,
    calibrate_batch_norm,
    calibrated_layers,
    frozen_layers,
    pool_batch_norm,
    sharded_batches,
)
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import random_state, set_random_state
from dsgdac_accel.virtual_workers import VirtualWorkers, first_replica, replicas_of


@contextmanager
def deployed_model(
    model: nn.Module,
    mixers: Sequence[Mixer],
    group: WorkerGroup,
    *,
    calibrate: Iterable[Any] | None = None,
    calibration_forward: Forward | None = None,
    frozen: Collection[nn.Module] = (),
) -> Iterator[nn.Module]:
    """Inside the context, `model` is the average of the workers, in eval mode; afterwards this worker trains on.

    Parameters are averaged. BatchNorm statistics are calibrated on the data of `calibrate`, or without it pooled over
    the workers by total variance. Every other buffer is worker 0's. On exit, also after an exception, parameters,
    gradients, buffers, train/eval modes and random states are what they were, to the byte. Collective: enter it on all
    workers.

    Args:
        model: the model; may be compiled or wrapped by Accelerate. Out of DDP and of `VirtualWorkers`, the inner module
            is yielded.
        mixers: those of all its parameters; empty for a baseline, whose workers are equal.
        calibrate: training data: a prepared DataLoader (read whole, sharded over the workers), or any other loader or
            iterable of this worker's own batches.
        calibration_forward: called as `calibration_forward(model, batch)`.
        frozen: BatchNorm layers whose statistics are not to be touched, beside those in eval mode while `model` trains.

    Raises:
        WorkerLostError: a worker did not come along.
        WorkersChangedError: a worker was lost inside, and the others go on without it: enter the context once more.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module  # DDP would broadcast buffers in every forward, and wait where shares are uneven
    holder, model = model, first_replica(model)
    untouched = {*frozen, *frozen_layers(holder)}
    layers_of = [calibrated_layers(replica, untouched) for replica in replicas_of(holder)]
    layers = layers_of[0]
    whole = holder.whole() if isinstance(holder, VirtualWorkers) else nullcontext()
    with group.section(), preserved_state(holder), whole:
        try:
            for mixer in mixers:
                mixer.swap_in_average()
            _deploy_buffers(model, layers, group)
            if calibrate is None:
                pool_batch_norm(layers_of, group)
            else:
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                here = holder.num_workers if isinstance(holder, VirtualWorkers) else 1
                batches = sharded_batches(calibrate, group, device, per_process=here)
                calibrate_batch_norm(model, batches, group, layers=layers, forward=calibration_forward)
            holder.eval()
            yield model
        finally:
            for mixer in mixers:
                mixer.restore()


def require_one_model(model: nn.Module, group: WorkerGroup) -> None:
    """Raise ValueError on every worker unless all have the same parameters, where nothing mixes them. Collective.

    Reads all of the parameters.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    group.require_equal(
        digest.hexdigest(),
        "parameters (SHA-256)",
        "There is no average to deploy, since no optimizer was prepared and nothing has mixed the workers. Train with "
        "one that went through `prepare(model, optimizer)`.",
    )


def _deploy_buffers(model: nn.Module, layers: Sequence[nn.Module], group: WorkerGroup) -> None:
    """Worker 0's buffers for everybody, except the running statistics of `layers`, and caches that differ in shape."""
    measured = {id(buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)}
    others = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in measured}
    mine = {name: (tuple(buffer.shape), str(buffer.dtype)) for name, buffer in others.items()}
    layouts = group.all_gather_object(mine, "comparing the buffers of the model")
    stored = model.state_dict().keys()
    for name, buffer in others.items():
        if all(layout.get(name) == mine[name] for layout in layouts):
            group.broadcast_(buffer, f"sharing buffer {name} for the deployed model")
        elif name in stored:
            seen = [layout.get(name) for layout in layouts]
            raise ValueError(
                f"buffer {name} has different shapes or dtypes on the workers: {seen}. The deployed model needs one; "
                f"keep it of one size, or register it with persistent=False if each worker can grow its own."
            )


def cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dictionary with tensors of their own; names that share all of a tensor (tied weights) share the copy."""
    copies: dict[tuple, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return copies.setdefault(memory, tensor.detach().clone()) if tensor.numel() else tensor.detach().clone()

    return {name: copy_of(value) if isinstance(value, Tensor) else value for name, value in state.items()}


@contextmanager
def separate_state(model: nn.Module) -> Iterator[None]:
    """Inside, `model.state_dict()` gives copies, for savers that take views of one buffer for shared weights."""

    def copy_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update(cloned(state))

    hook = model.register_state_dict_post_hook(copy_values)
    try:
        yield
    finally:
        hook.remove()


# ---- leaving no trace


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients, train/eval modes and random states back on exit, whatever happened inside.

    Parameters and gradients that were converted (`model.half()`) point to their old memory again; the VALUES of
    parameters are the mixers' business.
    """
    slots = _buffer_slots(model)
    pointers = [(p, p.data, p.grad, None if p.grad is None else p.grad.data) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a backward pass inside must not add to the gradient of an open accumulation window
    modes = [(module, module.training) for module in model.modules()]
    randomness = random_state()
    try:
        yield
    finally:
        for parameter, data, gradient, gradient_data in pointers:
            parameter.data = data
            if gradient is not None and gradient_data is not None:
                gradient.data = gradient_data
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in slots:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer  # `model.half()` inside replaces the tensor objects
        for module, mode in modes:
            module.training = mode
        set_random_state(randomness)


def _buffer_slots(model: nn.Module) -> list[tuple[nn.Module, str, Tensor | None, Tensor | None]]:
    return [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
