"""Products of the Hessian with vectors, without the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature.batches import FixedBatches, checksum
from dsgdac_accel.curvature.collective import rank_of, size_of, summed
from dsgdac_accel.curvature.measurement_context import (
    fresh_batch,
    surroundings,
    training_modes,
)
from dsgdac_accel.curvature.parameters import ParameterLayout, State
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.virtual_workers import VirtualWorkers
from dsgdac_accel.wrappers import unwrapped

_ONE_SAMPLE = "Expected more than 1 value per channel when training"  # torch's words

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)`: the mean loss of the batch, shape ()."""


@dataclass
class _Graph:
    """The gradient of one batch as a function of the parameters."""

    gradients: list[Tensor | None]
    """Of each parameter; None where the loss does not use it."""
    loss: float


class HessianOperator:
    """v -> H v, with H the Hessian of F(x) = (1/B) sum_b f(x; s_b), the plain mean of the losses of B fixed batches.

    The model is taken as it trains: BatchNorm normalises with each batch's own statistics, dropout draws the same mask
    for a batch in every product. Autocast, TF32, compilation and fused attention kernels, which cannot be
    differentiated twice, are off meanwhile. Gradients, buffers, modes and random streams of the model stay what they
    are. Autocast that `loss_fn` or the model's own code switches on by itself stays in force.

    With a group, batch b is computed by process b mod n, and all get the same bits; construction, products, `gradient`
    and `loss` are then collective, and every process must pass the same batches. F does not depend on n.

    A product costs about three times the forward and backward pass of training. The graphs of the gradients are kept
    from one product to the next as far as `graph_memory` goes, which saves a fifth to a half of that, most for small
    networks. A graph takes several times the activations of its batch, so without a limit a long list would
    fill the memory; batches beyond it are gone through again in every product, one at a time.

    Args:
        model: at the point where curvature is asked for; mostly the average of the workers, so inside `deployed_model`.
            May be wrapped by Accelerate, compiled, or in DDP.
        loss_fn: called as `loss_fn(model, batch)`; returns the mean loss of the batch, shape (). Use the model it is
            given: what it calls by another name is not unwrapped.
        batches: list of batches, moved to the model's device one by one.
        group: the processes that share the work; None for this one alone.
        seed: of dropout, per batch.
        frozen: modules (BatchNorm layers that are not to adapt) that stay in eval mode. The others are in training mode
            if the whole model is in eval mode now, else in the mode that they are in.
        graph_memory: bytes of each process for graphs; 0 builds every graph anew.

    Raises:
        TypeError, ValueError: batches that are not a list or empty, nothing to differentiate, a loss that is not one
            finite number, processes with different batches or parameters.
        RuntimeError: batches or parameters changed after construction.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> hvp = HessianOperator(net, lambda model, x: model(x).square().mean(), [torch.tensor([[1.0, 0.0], [0.0, 2.0]])])
    >>> hvp(torch.tensor([1.0, 1.0]))  # the Hessian is x' x
    tensor([1., 4.])
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Sequence[Any],
        *,
        group: WorkerGroup | None = None,
        seed: int = 0,
        frozen: Collection[nn.Module] = (),
        graph_memory: float = 2**30,
    ) -> None:
        self.model = unwrapped(model)
        if isinstance(self.model, VirtualWorkers):
            raise ValueError(
                f"curvature is that of one model; got VirtualWorkers of {self.model.num_workers}. Measure their "
                f"average, inside `deployed_model`."
            )
        self.loss_fn = loss_fn
        self.group = group
        self.seed = check_integer("seed", seed, minimum=0)
        self.graph_memory = graph_memory
        self.layout = ParameterLayout.of(self.model)
        self.batches = FixedBatches(batches)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._modes = training_modes(self.model, frozen)
        self._mine = range(rank_of(group), len(self.batches), size_of(group))
        self._point = checksum(self._parameters)
        self._graphs: dict[int, _Graph] = {}
        self._graph_bytes = 0
        self._too_large: set[int] = set()
        self._gradient: Tensor | None = None
        self._looked_through = False
        self._loss = 0.0
        if group is not None:
            group.require_equal((self.layout.names, self.layout.shapes), "parameters to differentiate by")
            group.require_equal(self._point, "values of the parameters", "Measure inside `deployed_model`.")
            group.require_equal(
                self.batches.checksums, "batches", "Pass the whole list to each; the work is shared out."
            )

    # ---- what it acts on

    @property
    def dim(self) -> int:
        """d, the number of trainable values; unused parameters count, frozen ones do not."""
        return self.layout.dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the vectors: float64 if any parameter is, else float32."""
        return self.layout.dtype

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.layout.device

    def flatten(self, values: State | Iterable[Tensor]) -> Tensor:
        """A vector (d,) of values by name, or in the order of the trainable parameters; see `ParameterLayout`."""
        return self.layout.flatten(values)

    @property
    def point(self) -> Tensor:
        """The parameters, (d,), a copy."""
        return self.layout.flatten(self._parameters)

    # ---- values

    def __call__(self, v: Tensor) -> Tensor:
        """H v, (d,), in the dtype of the parameters, summed in float64. Collective; `v` must be alike everywhere."""

        def add_products(total: Tensor) -> None:
            self._require_vector(v)
            parts = self._split(v)
            with self._at_the_point():
                for number in self._mine:
                    self._add_product(number, parts, total)

        return self._mean(add_products, "a Hessian product").to(self.dtype)

    @property
    def gradient(self) -> Tensor:
        """The gradient of F, (d,). Collective when first asked for."""
        if self._gradient is None:

            def add_all(total: Tensor) -> None:
                with self._at_the_point():
                    for number in self._mine:
                        total[-1] += self._add_gradient(number, total[:-1])

            total = self._mean(add_all, "the gradient for curvature", self.dim + 1)
            self._gradient, self._loss = total[:-1].to(self.dtype), float(total[-1])
        return self._gradient

    @property
    def loss(self) -> float:
        """F, the mean loss of the batches. Collective when first asked for."""
        _ = self.gradient  # measured together
        return self._loss

    def batch_gradient(self, number: int) -> Tensor:
        """The gradient of the loss of batch `number` alone, (d,). Collective."""

        def add_one(total: Tensor) -> None:
            if number in self._mine:
                with self._at_the_point():
                    self._add_gradient(number, total)

        return summed(add_one, self.dim, self.device, self.group, f"the gradient of batch {number}").to(self.dtype)

    def release(self) -> None:
        """Let go of the memory of the graphs; the next product builds them anew."""
        self._graphs.clear()
        self._too_large.clear()
        self._graph_bytes = 0

    # ---- one batch

    def _add_product(self, number: int, parts: list[Tensor], total: Tensor) -> None:
        graph = self._graph(number)
        used = [
            (gradient, part)
            for gradient, part in zip(graph.gradients, parts, strict=True)
            if gradient is not None and gradient.requires_grad  # a gradient that is constant has no Hessian
        ]
        if used:
            gradients, vectors = zip(*used, strict=True)
            kept = number in self._graphs
            with fresh_batch(self.model, self.seed, number):  # activation checkpoints run the forward pass again
                products = torch.autograd.grad(
                    gradients, self._parameters, vectors, retain_graph=kept, allow_unused=True
                )
            self._add(products, total)

    def _add_gradient(self, number: int, total: Tensor) -> float:
        """Add the gradient of a batch to `total`, and return its loss."""
        graph = self._graph(number)
        self._add(graph.gradients, total)
        return graph.loss

    def _graph(self, number: int) -> _Graph:
        """The graph of a batch: the one that was kept, or a new one, kept if there is memory for it."""
        if number in self._graphs:
            return self._graphs[number]
        if number in self._too_large or self._graph_bytes >= self.graph_memory:
            return self._build(number)
        scales = _Scales(self._parameters)
        with torch.autograd.graph.saved_tensors_hooks(scales.weigh, _as_it_is):
            graph = self._build(number)
        for gradient in graph.gradients:
            if gradient is not None:
                scales.weigh(gradient)
        if self._graph_bytes + scales.bytes <= self.graph_memory:
            self._graphs[number] = graph
            self._graph_bytes += scales.bytes
        else:
            self._too_large.add(number)
        return graph

    def _build(self, number: int) -> _Graph:
        with fresh_batch(self.model, self.seed, number):
            batch = send_to_device(self.batches.batches[number], self.device)
            try:
                loss = self.loss_fn(self.model, batch)
            except ValueError as error:
                if not str(error).startswith(_ONE_SAMPLE):
                    raise
                raise ValueError(
                    f"batch {number} has a single sample, of which BatchNorm in training mode cannot take the variance "
                    f"({error}). Leave that batch out, or freeze the layers."
                ) from error
            self._require_loss(loss, number)
            self._refuse_reentrant_checkpoints(loss)
            gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, allow_unused=True)
        return _Graph(list(gradients), float(loss.detach()))

    def _add(self, values: Sequence[Tensor | None], total: Tensor) -> None:
        start = 0
        for value, parameter in zip(values, self._parameters, strict=True):
            if value is not None:
                total[start : start + parameter.numel()].add_(value.detach().reshape(-1))
            start += parameter.numel()

    # ---- around it

    def _mean(self, contribute: Callable[[Tensor], None], what: str, length: int | None = None) -> Tensor:
        """Mean over the batches of all processes, float64."""
        return summed(contribute, length or self.dim, self.device, self.group, what).div_(len(self.batches))

    def _at_the_point(self) -> AbstractContextManager[None]:
        self.batches.require_unchanged(self._mine)
        if checksum(self._parameters) != self._point:
            raise RuntimeError(
                "the parameters changed between products (training went on, or `deployed_model` was left). Every "
                "product must be of the same Hessian; make a new HessianOperator at the new parameters."
            )
        return surroundings(self.model, self._modes, self.device)

    def _split(self, v: Tensor) -> list[Tensor]:
        parts = self.layout.unflatten(v.detach()).values()
        return [part.to(parameter.dtype) for part, parameter in zip(parts, self._parameters, strict=True)]

    def _require_vector(self, v: Tensor) -> None:
        arrived = (tuple(v.shape), v.dtype, v.device)
        if arrived != ((self.dim,), self.dtype, self.device):
            raise ValueError(
                f"expected a vector of shape ({self.dim},), {self.dtype} on {self.device}; got {arrived[0]}, "
                f"{arrived[1]} on {arrived[2]}. `flatten` makes one of values by name."
            )

    def _require_loss(self, loss: Any, number: int) -> None:
        if not isinstance(loss, Tensor) or loss.shape != ():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn must return the mean loss of the batch, a tensor of shape (); got {got} for batch {number}. "
                f"Return loss.mean(), or output.loss."
            )
        if not bool(torch.isfinite(loss)):
            raise ValueError(
                f"the loss of batch {number} is {float(loss.detach())}: curvature is undefined there. The model "
                f"diverged, or the batch holds values that are not finite."
            )
        if not loss.requires_grad:
            raise ValueError(
                f"the loss of batch {number} does not depend on a trainable parameter. Compute it from the model that "
                f"loss_fn is given, without `no_grad`, `detach` or `item`."
            )

    def _refuse_reentrant_checkpoints(self, loss: Tensor) -> None:
        """Their parameters would silently look unused."""
        if self._looked_through:
            return
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if "CheckpointFunction" in type(node).__name__:
                raise ValueError(
                    "the model uses reentrant activation checkpoints, which cannot be differentiated twice. Give "
                    "torch.utils.checkpoint use_reentrant=False, or call model.gradient_checkpointing_disable()."
                )
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
        self._looked_through = True


class _Scales:
    """Adds up the memory that a graph keeps alive, beside the parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def weigh(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor.detach()  # the tensor itself would keep the graph alive for ever


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
