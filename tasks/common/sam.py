"""Sharpness-aware minimization (Foret et al. 2021, arXiv 2010.01412): step by the gradient at a nearby worse point.

    x <- x - lr g(x + rho g(x) / ||g(x)||)

In m-SAM (section 3 there) each worker w ascends along the gradient of its own samples:

    x <- x - lr mean_w g_w(x + rho g_w(x) / ||g_w(x)||)

A baseline that also seeks flat minima. It takes two gradients per step, and so about twice the time of SGD.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dsgdac_accel.checks import check_number
from dsgdac_accel.randomness import random_state, set_random_state
from tasks.common.algorithms import SynchronousAccelerator


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
            window, self.window = self.window, []
            with same_buffers(self.model), ascended(self.model, self.rho):
                self.optimizer.zero_grad()
                for number, (compute_loss, randomness) in enumerate(window, 1):
                    set_random_state(randomness)  # the last one leaves the streams where the first pass left them
                    last = number == len(window)
                    with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                        self.accelerator.backward(compute_loss())
        return loss.detach()


class PerWorkerSharpnessAwareBackward:
    """As `SharpnessAwareBackward`, but each worker ascends along its own gradient (m-SAM).

    The gradients are averaged once over all workers, at the end of the step, and not by DDP.

    Args:
        accelerator: synchronous accelerator that prepared the model and the optimizer.
        model: the prepared model.
        optimizer: the prepared optimizer, of any kind.
        rho: distance to ascend, above 0.
    """

    def __init__(
        self,
        accelerator: SynchronousAccelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rho: float = 0.05,
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.bare = accelerator.unwrap_model(model)
        """The model without DDP, for the forward passes."""
        self.rho = check_number("rho", rho, above=0)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        workers = range(accelerator.workers_per_process)
        # For each worker of this process: its gradient, and its forward passes with the random state before each.
        self.gradients: list[list[Tensor | None]] = [[None] * len(self.parameters) for _ in workers]
        self.windows: list[list[tuple[Callable[[], Tensor], dict]]] = [[] for _ in workers]

    def __call__(self, compute_losses: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Run the backward passes of one micro-batch, and after the step's last one the second passes.

        Args:
            compute_losses: for each worker of this process, the forward pass of `bare` on its part of the micro-batch
                to a loss of shape (); each is called twice.

        Returns:
            The mean loss at x, detached.
        """
        losses = []
        for worker, compute_loss in enumerate(compute_losses):
            with self._gradients_of(worker):
                self.windows[worker].append((compute_loss, random_state()))
                losses.append(compute_loss())
                self.accelerator.backward(losses[-1])
        if self.accelerator.sync_gradients:
            with same_buffers(self.model):
                for worker, window in enumerate(self.windows):
                    with self._gradients_of(worker), ascended(self.model, self.rho):
                        self.optimizer.zero_grad()
                        for compute_loss, randomness in window:
                            set_random_state(randomness)  # the last one leaves the streams as the first pass did
                            self.accelerator.backward(compute_loss())
            self.windows = [[] for _ in self.windows]
            self._average()
        return torch.stack(losses).detach().mean()

    @contextlib.contextmanager
    def _gradients_of(self, worker: int) -> Iterator[None]:
        """Inside, the gradients of the parameters are those of a worker."""
        for parameter, gradient in zip(self.parameters, self.gradients[worker], strict=True):
            parameter.grad = gradient
        try:
            yield
        finally:
            self.gradients[worker] = [parameter.grad for parameter in self.parameters]

    def _average(self) -> None:
        """Leave the mean gradient of all workers in the parameters. Collective."""
        zeros = [torch.zeros_like(parameter) for parameter in self.parameters]
        first, *others = [
            torch.cat([(zero if grad is None else grad).flatten() for grad, zero in zip(own, zeros, strict=True)])
            for own in self.gradients
        ]
        self.gradients = [[None] * len(self.parameters) for _ in self.gradients]
        mean = self.accelerator.group.all_reduce_mean_(first, "averaging gradients", others)
        parts = mean.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


@contextlib.contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model on exit."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


@contextlib.contextmanager
def ascended(model: nn.Module, rho: float) -> Iterator[None]:
    """Move the parameters to x + rho g / ||g|| inside the context; they stay at x without a direction."""
    moved = [(p.detach(), p.grad) for p in model.parameters() if p.grad is not None]
    parameters, gradients = [p for p, _ in moved], [gradient for _, gradient in moved]
    values = [p.clone() for p in parameters]
    norm = torch.nn.utils.get_total_norm(gradients)
    if torch.isfinite(norm) and norm > 0:
        torch._foreach_add_(parameters, gradients, alpha=rho / float(norm))
    try:
        yield
    finally:
        torch._foreach_copy_(parameters, values)
