"""Products of the Hessian of the training loss with vectors, without forming the Hessian."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature.batch_derivatives import BatchDerivatives, LossFunction
from dsgdac_accel.curvature.batches import FixedBatches, checksum
from dsgdac_accel.curvature.collective import summed
from dsgdac_accel.curvature.measurement_context import measurement_context, training_modes
from dsgdac_accel.curvature.parameters import ParameterLayout
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.virtual_workers import VirtualWorkers
from dsgdac_accel.wrappers import unwrapped


class HessianOperator:
    """v -> H v, with H the Hessian of F(x) = sum_b w_b f(x; s_b) / sum_b w_b, the mean loss of B fixed batches.

    The weights w_b are 1 unless given. With the numbers of samples as weights, F is the mean over all samples, also if
    the last batch is smaller.

    The model is measured as it trains: BatchNorm normalizes with the statistics of each batch, and dropout draws the
    same mask for a batch in every product. Autocast, TF32, compilation and fused attention kernels, which cannot be
    differentiated twice, are off during a product. Autocast that `loss_fn` or the model's code enables itself stays on.
    Gradients, buffers, training modes and random states of the model do not change.

    With a group, batch b is computed by process b mod n, and all processes get the same bits. Construction, products,
    `gradient` and `loss` are then collective, and all processes must pass the same batches. F does not depend on n.

    A product costs about three times a forward and backward pass of training. The graphs of the gradients are kept
    between products up to `graph_memory`, which saves a fifth to a half of that, most for small networks. A graph takes
    several times the activations of its batch. Batches beyond the limit are recomputed in every product, one at a time.
    A `Sequence` that makes a batch when it is read, as a map-style data set does, keeps only that one in memory, so
    memory does not grow with B.

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
        self.group = group
        self.layout = ParameterLayout.of(self.model)
        self.batches = FixedBatches(batches, weights)
        self.on_batch = on_batch
        seed = check_integer("seed", seed, minimum=0)
        self.derivatives = BatchDerivatives(self.model, loss_fn, self.batches, self.device, seed, graph_memory)
        self._modes = training_modes(self.model, frozen)
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        self.share = range(rank, len(self.batches), size)
        """Numbers of the batches that this process computes."""
        self._checksum = checksum(self.derivatives.parameters)
        self._gradient: Tensor | None = None
        self._loss = 0.0
        if group is not None:
            group.require_equal((self.layout.names, self.layout.shapes), "parameters to differentiate by")
            group.require_equal(self._checksum, "values of the parameters", "Measure inside `deployed_model`.")
            advice = "Pass the whole list on every process; the work is shared."
            group.require_equal((self.batches.checksums, self.batches.weights), "batches", advice)

    @property
    def dim(self) -> int:
        """Number d of trainable values. Unused parameters count, frozen ones do not."""
        return self.layout.dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the vectors: float64 if any parameter is, else float32."""
        return self.layout.dtype

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""
        return self.layout.device

    @property
    def point(self) -> Tensor:
        """A copy of the parameters, (d,)."""
        return self.layout.flatten(self.derivatives.parameters)

    def __call__(self, v: Tensor) -> Tensor:
        """Return H v = sum_b w_b H_b v / sum_b w_b, (d,), summed in float64.

        Collective, with the same `v` on all processes.
        """

        def add_products(total: Tensor) -> None:
            self._require_vector(v)
            vectors = self._split(v)
            with self._measuring():
                for number in self.share:
                    product = self.derivatives.hessian_product(number, vectors)
                    self._add(product, total, self.batches.weights[number])
                    self.on_batch()

        total = summed(add_products, self.dim, self.device, self.group, "a Hessian product")
        return total.div_(sum(self.batches.weights)).to(self.dtype)

    @property
    def gradient(self) -> Tensor:
        """Gradient of F, sum_b w_b g_b / sum_b w_b, (d,). Collective on first access."""
        if self._gradient is None:

            def add_gradients_and_losses(total: Tensor) -> None:
                with self._measuring():
                    for number in self.share:
                        graph = self.derivatives.gradient(number)
                        weight = self.batches.weights[number]
                        self._add(graph.gradients, total[:-1], weight)
                        total[-1] += weight * graph.loss
                        self.on_batch()

            what = "the gradient for curvature"
            total = summed(add_gradients_and_losses, self.dim + 1, self.device, self.group, what)
            total.div_(sum(self.batches.weights))
            self._gradient, self._loss = total[:-1].to(self.dtype), float(total[-1])
        return self._gradient

    @property
    def loss(self) -> float:
        """F, the weighted mean of the batches' losses. Collective on first access."""
        _ = self.gradient  # computes both
        return self._loss

    def batch_gradient(self, number: int) -> Tensor:
        """Return the gradient g_b of the loss of batch `number` alone, (d,). Collective."""

        def add_gradient(total: Tensor) -> None:
            if number in self.share:
                with self._measuring():
                    self._add(self.derivatives.gradient(number).gradients, total)
                    self.on_batch()

        what = f"the gradient of batch {number}"
        return summed(add_gradient, self.dim, self.device, self.group, what).to(self.dtype)

    def seconds_per_product(self) -> float:
        """Estimate the seconds of a product from those of one batch, with its graph built anew. Collective."""

        def add_seconds(total: Tensor) -> None:
            if not self.share:
                return
            vectors = self._split(torch.ones(self.dim, dtype=self.dtype, device=self.device))
            times = []
            with self._measuring():
                for _ in range(3):  # the first one includes what happens only once, such as the choice of kernels
                    self.release()
                    began = time.perf_counter()
                    product = self.derivatives.hessian_product(self.share[0], vectors)
                    self._add(product, torch.zeros(self.dim, dtype=torch.float64, device=self.device))
                    if self.device.type != "cpu":
                        torch.accelerator.synchronize(self.device)
                    times.append(time.perf_counter() - began)
            total += torch.tensor([min(times), 1.0], dtype=torch.float64, device=self.device)

        total = summed(add_seconds, 2, self.device, self.group, "timing a Hessian product")
        largest_share = math.ceil(len(self.batches) / (1 if self.group is None else self.group.size))
        return float(total[0] / total[1]) * largest_share

    def release(self) -> None:
        """Free the memory of the kept graphs. The next product builds them again."""
        self.derivatives.release()

    def _measuring(self) -> AbstractContextManager[None]:
        """Return the context of a measurement, after a check that batches and parameters are unchanged."""
        self.batches.require_unchanged(number for number in self.share if number in self.derivatives.kept)
        if checksum(self.derivatives.parameters) != self._checksum:
            raise RuntimeError(
                "the parameters changed between products (training continued, or `deployed_model` was left). Make a "
                "new HessianOperator at the new parameters."
            )
        return measurement_context(self.model, self._modes, self.device)

    def _split(self, v: Tensor) -> list[Tensor]:
        vectors = self.layout.unflatten(v.detach()).values()
        return [part.to(parameter.dtype) for part, parameter in zip(vectors, self.derivatives.parameters, strict=True)]

    def _add(self, values: Sequence[Tensor | None], total: Tensor, weight: float = 1.0) -> None:
        """Add tensors in the shapes of the parameters, times a weight, to a flat vector (d,), in place."""
        for value, part in zip(values, self.layout.unflatten(total).values(), strict=True):
            if value is not None:
                part.add_(value.detach(), alpha=weight)

    def _require_vector(self, v: Tensor) -> None:
        got = (tuple(v.shape), v.dtype, v.device)
        if got != ((self.dim,), self.dtype, self.device):
            raise ValueError(
                f"expected a vector of shape ({self.dim},), {self.dtype} on {self.device}; got {got[0]}, {got[1]} on "
                f"{got[2]}. `dsgdac_accel.curvature.flatten` makes one from values by name."
            )
