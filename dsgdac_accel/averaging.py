"""The deployed model: the average of the workers, swapped in for a while and taken out again without a trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel.calibration import (
    Forward,
    calibrate_batch_norm,
    calibrated_layers,
    pool_batch_norm,
    sharded_batches,
)
from dsgdac_accel.group import WorkerGroup
from dsgdac_accel.mixing import Mixer


@contextmanager
def deployed_model(
    model: nn.Module,
    mixers: Sequence[Mixer],
    group: WorkerGroup,
    *,
    calibrate: Iterable[Any] | None = None,
    calibration_forward: Forward | None = None,
) -> Iterator[nn.Module]:
    """Inside the context, `model` is the average of the workers, in eval mode; afterwards this worker trains on.

    Parameters are averaged. BatchNorm statistics are calibrated on the data of `calibrate`, or without it pooled over
    the workers by total variance. Every other buffer is worker 0's. On exit, also after an exception, parameters,
    buffers, train/eval modes and random states are what they were, to the byte. Collective: enter it on all workers.

    Args:
        model: the model; may be compiled or wrapped by Accelerate. Out of DDP, the inner module is yielded.
        mixers: those of all its parameters; empty for a baseline whose workers are equal anyway.
        calibrate: training data: a prepared or plain DataLoader (read whole, sharded over the workers), or any iterable
            of this worker's batches.
        calibration_forward: called as `calibration_forward(model, batch)`.

    Raises:
        WorkerLostError: a worker did not come along.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module  # DDP would broadcast buffers in every forward, and wait where shares are uneven
    layers = calibrated_layers(model, training=model.training)
    with preserved_state(model):
        try:
            for mixer in mixers:
                mixer.swap_in_average()
            _deploy_buffers(model, layers, group)
            if calibrate is None:
                pool_batch_norm(layers, group)
            else:
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                batches = sharded_batches(calibrate, group, device)
                calibrate_batch_norm(model, batches, group, layers=layers, forward=calibration_forward)
            model.eval()
            yield model
        finally:
            for mixer in mixers:
                mixer.restore()


def _deploy_buffers(model: nn.Module, layers: Sequence[nn.Module], group: WorkerGroup) -> None:
    """Worker 0's buffers for everybody, except the running statistics of `layers`."""
    measured = {id(buffer) for layer in layers for buffer in (layer.running_mean, layer.running_var)}
    for name, buffer in model.named_buffers():
        if id(buffer) not in measured:
            group.broadcast_(buffer, f"sharing buffer {name} for the deployed model")


def cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dictionary with tensors of their own; names that share all of a tensor (tied weights) share the copy."""
    copies: dict[tuple, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return copies.setdefault(memory, tensor.detach().clone()) if tensor.numel() else tensor.detach().clone()

    return {name: copy_of(value) if isinstance(value, Tensor) else value for name, value in state.items()}


# ---- leaving no trace


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, train/eval modes and random states back on exit, whatever happened inside."""
    buffers = _buffer_slots(model)
    modes = [(module, module.training) for module in model.modules()]
    randomness = random_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer  # `model.half()` inside replaces the tensor objects
        for module, mode in modes:
            module.training = mode
        set_random_state(randomness)


def _buffer_slots(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def random_state() -> dict[str, Any]:
    """States of all global random streams: torch (CPU and the current CUDA device), NumPy, Python."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Return to a state taken by `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
