"""Contexts for the forward and backward passes of a curvature measurement. On exit, all settings are restored.

Double backward needs the math attention kernel, small curvature needs full precision, and products of the same Hessian
need the same dropout masks and buffers in every pass.
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

from dsgdac_accel.devices import accelerator_streams, using
from dsgdac_accel.randomness import random_state, set_random_state

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, each with whether it is in training mode."""


def training_modes(model: nn.Module, frozen: Collection[nn.Module] = ()) -> Modes:
    """Return the current modes; of a model in eval mode, all modules train. Modules in `frozen` are in eval mode."""
    in_eval = {id(inner) for module in frozen for inner in module.modules()}
    return [
        (module, (module.training or not model.training) and id(module) not in in_eval) for module in model.modules()
    ]


@contextmanager
def measurement_context(model: nn.Module, modes: Modes, device: torch.device) -> Iterator[None]:
    """Run the model in the given modes, in full precision, eagerly and twice differentiable; restore all on exit.

    Random states are restored as well. `fresh_batch` sets them, and the buffers, for each batch inside the context.
    """
    before = [(module, module.training) for module in model.modules()]
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.enter_context(using(device))  # random_state saves the stream of the current device
        randomness = random_state()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in sorted({"cpu", device.type}):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_full_precision(model))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes seconds
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
    """Undo Accelerate's mixed precision inside the context. It replaces `forward` by a version wrapped in autocast."""
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
    """Seed the random streams for batch `number`, and let modules write to copies of their buffers.

    Every batch therefore starts from the same buffers and masks, whichever process computes it and in whatever order.
    Updates of a pass in training mode (running statistics, counters, power iterations) reach neither the model nor a
    retained graph.
    """
    words = numpy.random.SeedSequence([seed, number]).generate_state(4)
    random.seed(int(words[0]))
    numpy.random.seed(int(words[1]))
    # torch.manual_seed would seed the generators of all devices, and queue the seeds if none is initialized.
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))
    accelerator = accelerator_streams()
    if accelerator is not None:
        accelerator[1].manual_seed(int(words[2]) << 32 | int(words[3]))
    slots = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    copies: dict[int, Tensor] = {}  # by identity, so that a buffer shared by several modules has one copy
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
