"""Products of the Hessian of the training loss with vectors, without forming the Hessian."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature.batches import FixedBatches, checksum
from dsgdac_accel.curvature.collective import summed
from dsgdac_accel.curvature.measurement_context import fresh_batch, measurement_context, training_modes
from dsgdac_accel.curvature.parameters import flatten, trainable_parameters, unflatten, vector_dtype
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.virtual_workers import VirtualWorkers
from dsgdac_accel.wrappers import unwrapped

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)`: the mean loss of the batch, shape ()."""

Derivatives = Sequence[Tensor | None]
"""One tensor for each parameter; None if it is zero."""


class HessianOperator:
    """v -> H v, with H the Hessian of F(x) = sum_b w_b f(x; s_b) / sum_b w_b, the mean loss of B fixed batches.

    The weights w_b are 1 unless given. With the numbers of samples as weights, F is the mean over all samples, also if
    the last batch is smaller.

    The model is measured as it trains: BatchNorm normalizes with the statistics of each batch, and dropout draws the
    same mask for a batch in every product. Autocast, TF32, compilation and fused attention kernels, which cannot be
    differentiated twice, are off during a product. Autocast that `loss_fn` or the model's code enables itself stays on.
    Gradients, buffers, training modes and random states of the model do not change.

    With a group, batch b is computed by process b mod n, and all processes get the same bits. Construction, products
    and gradients are then collective, and all processes must pass the same batches. F does not depend on n.

    A product costs about three times a forward and backward pass of training. The graphs of the gradients of the first
    batches are kept between products up to `graph_memory`, which saves a fifth to a half of that, most for small
    networks. A graph takes several times the activations of its batch. The others are recomputed in every product, one
    at a time. A `Sequence` that makes a batch when it is read keeps only that one in memory, so memory does not grow
    with B.

    Args:
        model: the model at the point to measure, usually the average of the workers inside `deployed_model`. It may be
            wrapped by Accelerate, compiled, or in DDP.
        loss_fn: called as `loss_fn(model, batch)`; returns the mean loss of the batch, shape (). It must use the model
            that it is passed, which is unwrapped.
        batches: list of batches, or another `Sequence` that returns the same batch at each reading. They are moved to
            the model's device one at a time.
        weights: weight of each batch in F, such as its number of samples; None weighs all equally.
        group: the processes that share the work; None for this one alone.
        seed: seed of dropout; each batch has its own stream.
        frozen: modules that stay in eval mode, such as BatchNorm layers that do not adapt. The others keep their mode;
            if the whole model is in eval mode, they are in training mode.
        graph_memory: bytes per process for kept graphs; 0 builds every graph anew.
        on_batch: called after each product or gradient of a batch on this process, for a progress bar.

    Raises:
        TypeError: batches is not a list.
        ValueError: there is no batch or no trainable parameter, weights do not fit the batches, a loss is not one
            finite number, or the processes have different batches or parameters.
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
        weights: Sequence[float] | None = None,
        group: WorkerGroup | None = None,
        seed: int = 0,
        frozen: Collection[nn.Module] = (),
        graph_memory: float = 2**30,
        on_batch: Callable[[], object] = lambda: None,
    ) -> None:
        self.model = unwrapped(model)
        if isinstance(self.model, VirtualWorkers):
            raise ValueError(
                f"curvature is that of one model; got VirtualWorkers of {self.model.num_workers}. Measure their "
                f"average, inside `deployed_model`."
            )
        self.loss_fn = loss_fn
        self.batches = FixedBatches(batches, weights)
        self.group = group
        self.seed = check_integer("seed", seed, minimum=0)
        self.on_batch = on_batch
        self.graph_memory = graph_memory
        named = trainable_parameters(self.model)
        self.parameters = list(named.values())
        self.dim = sum(parameter.numel() for parameter in self.parameters)
        """Number d of trainable values. Unused parameters count, frozen ones do not."""
        self.dtype = vector_dtype(self.parameters)
        """Dtype of the vectors: float64 if any parameter is, else float32."""
        self.device = self.parameters[0].device
        """Device of the vectors."""
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        self.share = range(rank, len(self.batches), size)
        """Numbers of the batches that this process computes."""
        self._modes = training_modes(self.model, frozen)
        self._checksum = checksum(self.parameters)
        self._gradient: Tensor | None = None
        self.kept: dict[int, Derivatives] = {}
        """Gradients of batches with their graphs, by the number of the batch."""
        self._free_bytes = graph_memory
        if group is not None:
            group.require_equal([(name, p.shape) for name, p in named.items()], "parameters to differentiate by")
            group.require_equal(self._checksum, "values of the parameters", "Measure inside `deployed_model`.")
            advice = "Pass the whole list on every process; the work is shared."
            group.require_equal((self.batches.checksums, self.batches.weights), "batches", advice)

    @property
    def point(self) -> Tensor:
        """A copy of the parameters, (d,)."""
        return flatten(self.model)

    def __call__(self, v: Tensor) -> Tensor:
        """Return H v = sum_b w_b H_b v / sum_b w_b, (d,), summed in float64.

        Collective, with the same `v` on all processes.
        """
        total = self._weighted_sum(lambda number: self._product(number, v), self.share, "a Hessian product")
        return total.div_(sum(self.batches.weights)).to(self.dtype)

    @property
    def gradient(self) -> Tensor:
        """Gradient of F, sum_b w_b g_b / sum_b w_b, (d,). Collective on first access."""
        if self._gradient is None:
            total = self._weighted_sum(self._gradients, self.share, "the gradient for curvature")
            self._gradient = total.div_(sum(self.batches.weights)).to(self.dtype)
        return self._gradient

    def batch_gradient(self, number: int) -> Tensor:
        """Return the gradient g_b of the loss of batch `number` alone, (d,). Collective."""
        mine = [number] if number in self.share else []
        total = self._weighted_sum(self._gradients, mine, f"the gradient of batch {number}")
        return total.div_(self.batches.weights[number]).to(self.dtype)

    def seconds_per_product(self) -> float:
        """Estimate the seconds of a product from those of one batch, with its graph built anew. Collective."""
        times: list[float] = []

        def timed(number: int) -> Derivatives:
            vector = torch.ones(self.dim, dtype=self.dtype, device=self.device)
            for _ in range(3):  # the first one includes what happens only once, such as the choice of kernels
                self.kept.clear()
                self._free_bytes = self.graph_memory
                began = time.perf_counter()
                self._product(number, vector)
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)
                times.append(time.perf_counter() - began)
            return ()

        what = "timing a Hessian product"
        self._weighted_sum(timed, self.share[:1], what)
        slowest = min(times, default=0.0)
        if self.group is not None:
            slowest = max(self.group.all_gather_object(slowest, what))
        return slowest * math.ceil(len(self.batches) / (1 if self.group is None else self.group.size))

    def _weighted_sum(self, of_batch: Callable[[int], Derivatives], numbers: Iterable[int], what: str) -> Tensor:
        """Return the sum of w_b times `of_batch(b)` over the batches `numbers` of all processes, (d,), float64."""

        def contribute(total: Tensor) -> None:
            self.batches.require_unchanged(number for number in self.share if number in self.kept)
            if checksum(self.parameters) != self._checksum:
                raise RuntimeError(
                    "the parameters changed between products (training continued, or `deployed_model` was left). Make "
                    "a new HessianOperator at the new parameters."
                )
            parts = unflatten(total, self.parameters)
            with measurement_context(self.model, self._modes, self.device):
                for number in numbers:
                    for value, part in zip(of_batch(number), parts, strict=False):
                        if value is not None:
                            part.add_(value.detach(), alpha=self.batches.weights[number])
                    self.on_batch()

        return summed(contribute, self.dim, self.device, self.group, what)

    def _product(self, number: int, v: Tensor) -> Derivatives:
        """Return H_b v = d/dx <g_b(x), v> of one batch."""
        got = (tuple(v.shape), v.dtype, v.device)
        if got != ((self.dim,), self.dtype, self.device):
            raise ValueError(
                f"expected a vector of shape ({self.dim},), {self.dtype} on {self.device}; got {got[0]}, {got[1]} on "
                f"{got[2]}. `dsgdac_accel.curvature.flatten` makes one from values by name."
            )
        gradients, vectors = [], []
        for gradient, part in zip(self._gradients(number), unflatten(v.detach(), self.parameters), strict=True):
            if gradient is not None and gradient.requires_grad:  # a constant gradient has no Hessian
                gradients.append(gradient)
                vectors.append(part.to(gradient.dtype))
        if not gradients:
            return ()
        with fresh_batch(self.model, self.seed, number):  # activation checkpoints run the forward pass again
            return torch.autograd.grad(
                gradients, self.parameters, vectors, retain_graph=number in self.kept, allow_unused=True
            )

    def _gradients(self, number: int) -> Derivatives:
        """Return the gradients of one batch with their graph, which is kept if it fits in memory."""
        if number in self.kept:
            return self.kept[number]
        keep, size = self._free_bytes > 0, _GraphSize(self.parameters)
        with (
            fresh_batch(self.model, self.seed, number),
            saved_tensors_hooks(size.add, lambda tensor: tensor) if keep else nullcontext(),
        ):
            loss = self.loss_fn(self.model, send_to_device(self.batches[number], self.device))
            _require_loss(loss, number)
            gradients = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        if keep:
            for gradient in gradients:
                if gradient is not None:
                    size.add(gradient)
            self._free_bytes -= size.bytes  # below 0, nothing more is kept
            if self._free_bytes >= 0:
                self.kept[number] = gradients
        return gradients


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
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if "CheckpointFunction" in type(node).__name__:  # its parameters would silently look unused
            raise ValueError(
                "the model uses reentrant activation checkpoints, which cannot be differentiated twice. Pass "
                "use_reentrant=False to torch.utils.checkpoint, or call model.gradient_checkpointing_disable()."
            )
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)


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
