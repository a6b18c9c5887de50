"""What is around a forward and backward pass while curvature is measured, and putting it back without a trace.

Double backward needs the math attention kernel; small curvature needs full precision; equal products need equal dropout
masks and buffers in every pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsgdac_accel.randomness import random_state, set_random_state

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, and whether each of them is in training mode."""


def training_modes(model: nn.Module, frozen: Collection[nn.Module] = ()) -> Modes:
    """The modes of training: those of a model that trains, or all modules of one in eval mode; never those in `frozen`.

    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).eval()
    >>> [training for module, training in training_modes(net, frozen=[net[0]])]
    [True, False, True]
    """
    still = {id(inner) for module in frozen for inner in module.modules()}
    if model.training:
        return [(module, module.training and id(module) not in still) for module in model.modules()]
    return [(module, id(module) not in still) for module in model.modules()]


@contextmanager
def surroundings(model: nn.Module, modes: Modes, device: torch.device) -> Iterator[None]:
    """Inside, `model` is in `modes`, in full precision, eager, twice differentiable; on exit all is as it was.

    Buffers and random streams are the business of `fresh_batch`, for every batch; the streams are put back here.
    """
    before = [(module, module.training) for module in model.modules()]
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))  # whose random stream is the current one
        randomness = random_state()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in sorted({"cpu", device.type}):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_full_precision(model))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if device.type == "cuda":
            recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())  # no double backward in cuDNN
            cudnn = torch.backends.cudnn
            stack.enter_context(
                cudnn.flags(not recurrent, cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False)
            )
        try:
            torch.set_float32_matmul_precision("highest")
            for module, training in modes:
                module.training = training
            yield
        finally:
            for module, training in before:
                module.training = training
            torch.set_float32_matmul_precision(precision)
            set_random_state(randomness)


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """Undo for a while what Accelerate does for mixed precision: a forward wrapped in autocast, on the instance."""
    wrapped = [
        (module, vars(module)["forward"])
        for module in model.modules()
        if "_original_forward" in vars(module) and "forward" in vars(module)
    ]
    try:
        for module, _ in wrapped:
            module.forward = vars(module)["_original_forward"]
        yield
    finally:
        for module, forward in wrapped:
            module.forward = forward


@contextmanager
def fresh_batch(model: nn.Module, seed: int, number: int) -> Iterator[None]:
    """Inside, random streams are those of batch `number`, and modules write into copies of their buffers.

    So every batch begins with the same buffers, whoever computes it and after whichever other, and what a train-mode
    pass updates (running statistics, counters, power iterations) reaches neither the model nor a retained graph.
    """
    words = numpy.random.SeedSequence([seed, number]).generate_state(4)
    random.seed(int(words[0]))
    numpy.random.seed(int(words[1]))
    # Not torch.manual_seed, which reaches for the generators of all devices, and queues them where CUDA has not begun.
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(int(words[2]) << 32 | int(words[3]))
    slots = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    copies: dict[int, Tensor] = {}  # one for a buffer that several modules share
    try:
        for module, buffers in slots:
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for module, buffers in slots:
            module._buffers.clear()
            module._buffers.update(buffers)
