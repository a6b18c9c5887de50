"""Sharpness-aware minimization (Foret et al. 2021, arXiv 2010.01412): descend by the gradient at the worst near point.

    x <- x - a g(x + rho g(x) / ||g(x)||)

A baseline that also looks for flat minima, at two gradients a step: about twice the time of SGD.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dsgdac_accel.checks import check_number
from dsgdac_accel.randomness import random_state, set_random_state


class SharpnessAwareBackward:
    """Takes the place of `accelerator.backward` and leaves the gradient at x + rho g / ||g|| instead of that at x.

    g is the gradient of the whole optimizer step: averaged over the workers (DDP), all micro-batches together. So the
    step is that of one worker with the whole batch, however it is split, but for layers such as BatchNorm whose output
    depends on the split. The micro-batches of a step are kept until its last one, and are then run again with the same
    inputs and the same random numbers (dropout). Nothing else of the second pass stays: parameters are put back to the
    bit, and so are buffers, so that BatchNorm's running statistics are those of the points the training visits.

    The length of the gradient cancels, so fp16's loss scale does no harm; where the gradient is zero or not finite
    there is no direction, and the second pass runs at x: a gradient scaler then skips the step as usual.

        with accelerator.accumulate(model):
            loss = backward(lambda: loss_function(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()

    Args:
        accelerator: synchronous, that prepared model and optimizer.
        model: as prepared.
        optimizer: as prepared, of any kind.
        rho: distance to ascend, above 0; the paper's 0.05 for CIFAR.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, rho: float = 0.05
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.rho = check_number("rho", rho, above=0)
        # Micro-batches of this step, each with the random state before it.
        self.window: list[tuple[Callable[[], Tensor], dict]] = []

    def __call__(self, compute_loss: Callable[[], Tensor]) -> Tensor:
        """Backward pass of one micro-batch; of the step's last one, also the second pass. Returns the loss at x.

        Args:
            compute_loss: forward pass of the model on this micro-batch, to a loss of shape (); called twice.
        """
        self.window.append((compute_loss, random_state()))
        loss = compute_loss()
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            with self._same_buffers(), self._ascended():
                self._second_pass()
        return loss.detach()

    def _second_pass(self) -> None:
        self.optimizer.zero_grad()
        window, self.window = self.window, []
        for number, (compute_loss, randomness) in enumerate(window, 1):
            set_random_state(randomness)  # after the last one the streams are where the first pass left them
            last = number == len(window)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                self.accelerator.backward(compute_loss())

    @contextlib.contextmanager
    def _same_buffers(self) -> Iterator[None]:
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)

    @contextlib.contextmanager
    def _ascended(self) -> Iterator[None]:
        """With parameters at x + rho g / ||g||, x + 0 if there is no such direction."""
        moved = [(p.detach(), p.grad) for p in self.model.parameters() if p.grad is not None]
        parameters, gradients = [p for p, _ in moved], [gradient for _, gradient in moved]
        values = [p.clone() for p in parameters]
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm) and norm > 0:
            torch._foreach_add_(parameters, gradients, alpha=self.rho / float(norm))
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, values)
