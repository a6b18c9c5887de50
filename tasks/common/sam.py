"""Sharpness-aware minimization (Foret et al. 2021, arXiv 2010.01412): step by the gradient at a nearby worse point.

    x <- x - lr g(x + rho g(x) / ||g(x)||)

A baseline that also seeks flat minima. It takes two gradients per step, and so about twice the time of SGD.
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
    """Replaces `accelerator.backward` and leaves the gradient at x + rho g / ||g|| in place of the one at x.

    g is the gradient of the whole optimizer step: averaged over the workers (by DDP) and over all micro-batches. The
    step is therefore the same however the batch is split, except for layers such as BatchNorm whose output depends on
    the split. The micro-batches of a step are kept until its last one and then run again, with the same inputs and the
    same random numbers (dropout). The second pass leaves only gradients: parameters and buffers are restored to the
    bit, so that BatchNorm's running statistics are those of the points that training visits.

    The length of the gradient cancels, so the loss scale of fp16 has no effect. A zero or nonfinite gradient gives no
    direction; the second pass then runs at x, and a gradient scaler skips the step as usual.

        with accelerator.accumulate(model):
            loss = backward(lambda: loss_function(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()

    Args:
        accelerator: synchronous accelerator that prepared the model and the optimizer.
        model: the prepared model.
        optimizer: the prepared optimizer, of any kind.
        rho: distance to ascend, above 0; the paper uses 0.05 for CIFAR.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, rho: float = 0.05
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.rho = check_number("rho", rho, above=0)
        # Forward passes of this step's micro-batches, each with the random state before it.
        self.window: list[tuple[Callable[[], Tensor], dict]] = []

    def __call__(self, compute_loss: Callable[[], Tensor]) -> Tensor:
        """Run the backward pass of one micro-batch, and after the step's last one the second pass.

        Args:
            compute_loss: forward pass of the model on this micro-batch to a loss of shape (); called twice.

        Returns:
            The loss at x, detached.
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
            set_random_state(randomness)  # the last one leaves the streams where the first pass left them
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
        """Move the parameters to x + rho g / ||g|| inside the context; they stay at x without a direction."""
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
