"""Quadratic forms v' H v of consensus errors, random directions and gradient noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature.collective import summed
from dsgdac_accel.curvature.lanczos import Product, dot
from dsgdac_accel.curvature.operator import HessianOperator
from dsgdac_accel.distributed.group import WorkerGroup

_ROUNDING = 8  # times the machine epsilon, relative to the weights: 1e-6 in float32


class Estimate(NamedTuple):
    """A mean over random probes and its standard error, NaN for a single probe."""

    value: float
    stderr: float


@dataclass(frozen=True)
class Penalty:
    """E = sum_i delta_i' H delta_i over all workers, and the size of the consensus errors."""

    value: float
    """E. The loss envelope is n f(mean) + E / 2."""
    squared_norm: float
    """||Delta||_F^2 = sum_i ||delta_i||^2."""
    rounding: bool
    """Whether the errors are at the rounding level of the weights, so that their direction is meaningless."""

    def exposure(self, top: float) -> float:
        """Return the curvature exposure Q = E / lambda_1 (Eq. 7); NaN if lambda_1 is 0 or not finite."""
        return ratio(self.value, top)

    def alignment(self, top: float) -> float:
        """Return A = Q / ||Delta||_F^2, at most 1; NaN also if the errors are zero or at rounding level."""
        return math.nan if self.rounding else ratio(self.exposure(top), self.squared_norm)


@torch.no_grad()
def measure_penalty(deltas: Iterable[Tensor], hvp: Product, group: WorkerGroup | None = None) -> Penalty:
    """Measure E = sum_i delta_i' H delta_i and ||Delta||_F^2, with one product per worker of the run.

    Collective if a group is given, or `hvp` has one as `hvp.group`.

    Args:
        deltas: consensus errors x_i - mean of the workers of this process, each (d,) in the order of the operator's
            parameters, or one tensor (N, d).
        hvp: product with the Hessian at the mean.
        group: the processes; default `hvp.group`, if it exists.
    """
    group, deltas = group or getattr(hvp, "group", None), list(deltas)
    counts = [len(deltas)] if group is None else group.all_gather_object(len(deltas), "counting the workers")
    value = squared_norm = 0.0
    for owner, count in enumerate(counts):
        for number in range(count):

            def share_error(total: Tensor, owner: int = owner, number: int = number) -> None:
                if group is not None and owner != group.rank:
                    return
                if deltas[number].shape != total.shape:
                    got = tuple(deltas[number].shape)
                    raise ValueError(f"consensus errors must have shape ({hvp.dim},); got {got}. See `flatten`.")
                total.add_(deltas[number])

            # Every process computes its part of the product, so all need the vector.
            delta = summed(share_error, hvp.dim, hvp.device, group, "sharing a worker's consensus error").to(hvp.dtype)
            value += dot(delta, hvp(delta))
            squared_norm += dot(delta, delta)
    weights_norm = 0.0  # of unknown weights
    if isinstance(hvp, HessianOperator):
        weights_norm = math.sqrt(dot(hvp.point, hvp.point))
    rounding = _ROUNDING * torch.finfo(hvp.dtype).eps * weights_norm
    return Penalty(value, squared_norm, squared_norm <= sum(counts) * rounding**2)


@torch.no_grad()
def hutchinson_trace(hvp: Product, probes: int = 50, *, seed: int = 0) -> Estimate:
    """Estimate tr(H) = E[u' H u] from Rademacher probes u, with the standard error (Hutchinson 1990).

    It is exact for a diagonal H. On a network, 50 probes give an error of a few percent.

    Args:
        hvp: the product; collective if it is sharded.
        probes: number of products, at least 1.
        seed: seed of the probes, the same on all workers.
    """
    check_integer("probes", probes, minimum=1)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(probes):
        signs = torch.randint(0, 2, (hvp.dim,), dtype=torch.int8, generator=generator, device="cpu") * 2 - 1
        probe = signs.to(hvp.device, hvp.dtype)
        samples.append(dot(probe, hvp(probe)))
    mean = math.fsum(samples) / probes
    if probes == 1:
        return Estimate(mean, math.nan)
    return Estimate(mean, math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (probes - 1) / probes))


class NoiseAlignment(NamedTuple):
    """Alignment of the gradient noise xi_b = gradient of batch b - gradient of F with the curvature."""

    raw: float
    """A_grad as in the paper, mean_b xi_b' H xi_b / lambda_1. It depends on the size of the noise."""
    normalized: float
    """sum_b xi_b' H xi_b / (lambda_1 sum_b ||xi_b||^2), comparable with A and B; NaN if there is no noise."""


@torch.no_grad()
def gradient_noise_alignment(operator: HessianOperator, top: float, max_batches: int) -> NoiseAlignment:
    """Measure A_grad, raw and normalized, over the batches of an operator. Collective.

    Each batch takes a product over all batches, so time grows with the square of their number.

    Args:
        operator: product with the Hessian of F.
        top: largest eigenvalue lambda_1. If it is 0 or not finite, the result is NaN.
        max_batches: use at most this many batches, evenly spaced. The mean gradient is still that of all batches.

    Raises:
        ValueError: max_batches is less than 1.
    """
    numbers = batches_for_noise(operator.batches.weights, max_batches)
    mean = operator.gradient.double()
    form = norm = 0.0
    for number in numbers:
        noise = (operator.batch_gradient(number).double() - mean).to(operator.dtype)
        form += dot(noise, operator(noise))
        norm += dot(noise, noise)
    rounding = norm <= len(numbers) * (_ROUNDING * torch.finfo(operator.dtype).eps) ** 2 * dot(mean, mean)
    return NoiseAlignment(ratio(form / len(numbers), top), math.nan if rounding else ratio(form, norm * top))


def batches_for_noise(weights: Sequence[float], max_batches: int) -> list[int]:
    """Return the numbers of the batches that `gradient_noise_alignment` uses.

    Batches of less than the largest weight, such as a smaller last one, are left out: their noise is larger.
    """
    check_integer("max_batches", max_batches, minimum=1)
    largest = max(weights)
    numbers = [number for number, weight in enumerate(weights) if weight == largest]
    taken = min(len(numbers), max_batches)
    return [numbers[position * len(numbers) // taken] for position in range(taken)]


def ratio(value: float, by: float) -> float:
    """Return value / by; NaN if `by` is 0 or not finite."""
    return value / by if by and math.isfinite(by) else math.nan
