"""Loss, gradient and Hessian-vector product of single batches, with their graphs kept as far as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from dsgdac_accel.curvature.batches import FixedBatches
from dsgdac_accel.curvature.measurement_context import fresh_batch

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)`: the mean loss of the batch, shape ()."""

_ONE_SAMPLE = "Expected more than 1 value per channel when training"  # torch's error of BatchNorm


@dataclass(frozen=True)
class GradientGraph:
    """The gradient of one batch, differentiable with respect to the parameters."""

    gradients: tuple[Tensor | None, ...]
    """One gradient per parameter; None if the loss does not use the parameter."""
    loss: float


class BatchDerivatives:
    """Derivatives of the loss of single batches. Owns the kept graphs; leaves the model unchanged.

    Call its methods inside `measurement_context`.

    Args:
        model: the model, unwrapped.
        loss_fn: mean loss of a batch, shape ().
        batches: read and moved to the device one at a time.
        device: device of the parameters.
        seed: seed of dropout; each batch has its own stream.
        memory: bytes for kept graphs; 0 builds every graph anew.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: FixedBatches,
        device: torch.device,
        seed: int,
        memory: float,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.batches = batches
        self.device = device
        self.seed = seed
        self.memory = memory
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.kept: dict[int, GradientGraph] = {}
        """Graphs of batches, by the number of the batch."""
        self.kept_bytes = 0
        self._too_large: set[int] = set()
        self._checked_for_checkpoints = False

    def gradient(self, number: int) -> GradientGraph:
        """Return loss and gradients of a batch: the kept graph, or a new one, which is kept if it fits in memory."""
        if number in self.kept:
            return self.kept[number]
        if number in self._too_large or self.kept_bytes >= self.memory:
            return self._build(number)
        size = _GraphSize(self.parameters)
        with torch.autograd.graph.saved_tensors_hooks(size.add, lambda tensor: tensor):
            graph = self._build(number)
        for gradient in graph.gradients:
            if gradient is not None:
                size.add(gradient)
        if self.kept_bytes + size.bytes <= self.memory:
            self.kept[number] = graph
            self.kept_bytes += size.bytes
        else:
            self._too_large.add(number)
        return graph

    def hessian_product(self, number: int, vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return H_b v = d/dx <g_b(x), v> of batch b, one tensor per parameter; None where it is zero.

        Args:
            number: number of the batch.
            vectors: v, in the shapes of the parameters.
        """
        graph = self.gradient(number)
        used = [
            (gradient, vector)
            for gradient, vector in zip(graph.gradients, vectors, strict=True)
            if gradient is not None and gradient.requires_grad  # a constant gradient has no Hessian
        ]
        if not used:
            return [None] * len(self.parameters)
        gradients, vectors = zip(*used, strict=True)
        with fresh_batch(self.model, self.seed, number):  # activation checkpoints run the forward pass again
            return torch.autograd.grad(
                gradients, self.parameters, vectors, retain_graph=number in self.kept, allow_unused=True
            )

    def release(self) -> None:
        """Free the memory of the kept graphs. The next product builds them again."""
        self.kept.clear()
        self._too_large.clear()
        self.kept_bytes = 0

    def _build(self, number: int) -> GradientGraph:
        with fresh_batch(self.model, self.seed, number):
            batch = send_to_device(self.batches[number], self.device)
            try:
                loss = self.loss_fn(self.model, batch)
            except ValueError as error:
                if not str(error).startswith(_ONE_SAMPLE):
                    raise
                raise ValueError(
                    f"batch {number} has a single sample, and BatchNorm in training mode needs at least two ({error}). "
                    f"Leave that batch out, or freeze the layers."
                ) from error
            _require_loss(loss, number)
            self._refuse_reentrant_checkpoints(loss)
            gradients = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        return GradientGraph(gradients, float(loss.detach()))

    def _refuse_reentrant_checkpoints(self, loss: Tensor) -> None:
        """Raise ValueError for reentrant activation checkpoints, whose parameters would silently look unused."""
        if self._checked_for_checkpoints:
            return
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if "CheckpointFunction" in type(node).__name__:
                raise ValueError(
                    "the model uses reentrant activation checkpoints, which cannot be differentiated twice. Pass "
                    "use_reentrant=False to torch.utils.checkpoint, or call model.gradient_checkpointing_disable()."
                )
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        self._checked_for_checkpoints = True


def _require_loss(loss: Any, number: int) -> None:
    if not isinstance(loss, Tensor) or loss.shape != ():
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return the mean loss of the batch, a tensor of shape (); got {got} for batch {number}. "
            f"Return loss.mean(), or output.loss."
        )
    if not bool(torch.isfinite(loss)):
        raise ValueError(
            f"the loss of batch {number} is {float(loss.detach())}, so curvature is undefined. The model diverged, or "
            f"the batch has values that are not finite."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of batch {number} does not depend on a trainable parameter. Compute it with the model passed to "
            f"loss_fn, without `no_grad`, `detach` or `item`."
        )


class _GraphSize:
    """Counts the bytes that a graph keeps alive in addition to the parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor.detach()  # the tensor itself would keep the graph alive forever
