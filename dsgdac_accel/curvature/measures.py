"""Quadratic forms v' H v of consensus errors, random directions and gradient noise.

If a group is given, or `hvp` has one as `hvp.group`, sums over workers include all processes, and the functions are
collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature.collective import summed
from dsgdac_accel.curvature.lanczos import Matvec, dot, space_of
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
    workers: int
    rounding: bool
    """Whether the errors are at the rounding level of the weights, so that their direction is meaningless."""

    def exposure(self, top: float) -> float:
        """Return Q = E / lambda_1; NaN if lambda_1 is 0 or not finite."""
        return _ratio(self.value, top)

    def alignment(self, top: float) -> float:
        """Return A = Q / ||Delta||_F^2; NaN also if the errors are zero or at rounding level."""
        return math.nan if self.rounding else _ratio(self.exposure(top), self.squared_norm)


@torch.no_grad()
def measure_penalty(deltas: Iterable[Tensor], hvp: Matvec, group: WorkerGroup | None = None) -> Penalty:
    """Measure E = sum_i delta_i' H delta_i and ||Delta||_F^2, with one product per worker of the run.

    Args:
        deltas: consensus errors x_i - mean of the workers of this process, each (d,) in the order of the operator's
            parameters, or one tensor (N, d).
        hvp: product with the Hessian at the mean.
        group: the processes; default `hvp.group`, if it exists.
    """
    group, deltas = group or getattr(hvp, "group", None), list(deltas)
    space = (len(deltas), *((deltas[0].numel(), deltas[0].dtype) if deltas else (None, None)))
    spaces = [space] if group is None else group.all_gather_object(space, "counting the workers for curvature")
    value = squared_norm = 0.0
    for owner, (count, dim, dtype) in enumerate(spaces):
        for number in range(count):
            mine = deltas[number] if group is None or owner == group.rank else None
            delta = _from_owner(mine, dim, dtype, hvp, group)
            value += dot(delta, hvp(delta))
            squared_norm += dot(delta, delta)
    workers = sum(count for count, *_ in spaces)
    return Penalty(value, squared_norm, workers, squared_norm <= workers * _rounding_of(hvp) ** 2)


def _from_owner(mine: Tensor | None, dim: int, dtype: torch.dtype, hvp: Any, group: WorkerGroup | None) -> Tensor:
    """Share a vector of one process with all others: every process computes its part of the product."""
    if group is None or group.size == 1:
        assert mine is not None
        return mine

    def contribute(total: Tensor) -> None:
        if mine is not None:
            total.add_(mine)

    device = getattr(hvp, "device", group.device if mine is None else mine.device)
    return summed(contribute, dim, device, group, "sharing a worker's consensus error").to(dtype)


def _rounding_of(hvp: Any) -> float:
    """Return the norm of one worker's error that rounding alone would give; 0 if the weights are unknown."""
    if not isinstance(hvp, HessianOperator):
        return 0.0
    point = hvp.point
    return _ROUNDING * torch.finfo(hvp.dtype).eps * math.sqrt(dot(point, point))


def curvature_exposure(
    deltas: Iterable[Tensor], hvp: Matvec, top: float | Tensor, group: WorkerGroup | None = None
) -> float:
    """Measure the curvature exposure Q = sum_i delta_i' H delta_i / lambda_1 over all workers (Eq. 7).

    Args:
        deltas, hvp, group: see `measure_penalty`.
        top: largest eigenvalue lambda_1. If it is 0 or not finite, Q is NaN.

    >>> hvp = lambda v: v * torch.tensor([-7.0, 4.0, 1.0])
    >>> delta = torch.tensor([1.0, 1.0, 0.0])
    >>> curvature_exposure([delta, -delta], hvp, top=4.0)
    -1.5
    """
    return measure_penalty(deltas, hvp, group).exposure(float(top))


def alignment(deltas: Iterable[Tensor], hvp: Matvec, top: float | Tensor, group: WorkerGroup | None = None) -> float:
    """Measure the alignment A = Q / ||Delta||_F^2 of the consensus errors with the curvature, at most 1.

    It is NaN if `top` is 0 or not finite, and if the errors are zero or at rounding level: below 8 machine epsilons of
    the weights, about 1e-6 in float32. Rounding is only detected with a `HessianOperator`.

    Args:
        deltas, hvp, top, group: see `curvature_exposure`.
    """
    return measure_penalty(deltas, hvp, group).alignment(float(top))


@torch.no_grad()
def hutchinson_trace(
    hvp: Matvec,
    probes: int = 50,
    *,
    seed: int = 0,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Estimate:
    """Estimate tr(H) = E[u' H u] from Rademacher probes u, with the standard error (Hutchinson 1990).

    It is exact for a diagonal H. On a network, 50 probes give an error of a few percent.

    Args:
        hvp: the product; collective if it is sharded.
        probes: number of products, at least 1.
        seed: seed of the probes, the same on all workers.
        dim, dtype, device: see `lanczos`.

    >>> hutchinson_trace(lambda v: v * torch.tensor([-7.0, 4.0, 1.0]), probes=1, dim=3)
    Estimate(value=-2.0, stderr=nan)
    """
    check_integer("probes", probes, minimum=1)
    dim, dtype, device = space_of(hvp, dim, dtype, device)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(probes):
        signs = torch.randint(0, 2, (dim,), dtype=torch.int8, generator=generator, device="cpu") * 2 - 1
        probe = signs.to(device, dtype)
        samples.append(dot(probe, hvp(probe)))
    return _estimate(samples)


def random_direction_baseline(hvp: Matvec, top: float | Tensor, probes: int = 50, **options: Any) -> Estimate:
    """Estimate B = tr(H) / (d lambda_1), the alignment of a random direction, with its standard error.

    Args:
        hvp, probes, options: see `hutchinson_trace`.
        top: largest eigenvalue lambda_1. If it is 0 or not finite, B is NaN.

    >>> random_direction_baseline(lambda v: v * torch.tensor([-7.0, 4.0, 1.0]), top=4.0, probes=2, dim=3)
    Estimate(value=-0.16666666666666666, stderr=0.0)
    """
    trace = hutchinson_trace(hvp, probes, **options)
    return baseline_of(trace, space_of(hvp, options.get("dim"))[0], float(top))


def baseline_of(trace: Estimate, dim: int, top: float) -> Estimate:
    """Return B = tr(H) / (d lambda_1) for a known trace."""
    return Estimate(_ratio(trace.value, dim * top), abs(_ratio(trace.stderr, dim * top)))


@dataclass(frozen=True)
class NoiseAlignment:
    """Alignment of the gradient noise xi_b = gradient of batch b - gradient of F with the curvature."""

    raw: float
    """A_grad as in the paper, mean_b xi_b' H xi_b / lambda_1. It depends on the size of the noise."""
    normalized: float
    """sum_b xi_b' H xi_b / (lambda_1 sum_b ||xi_b||^2), comparable with A and B."""
    raw_stderr: float
    """Standard error of `raw` over the batches; NaN for a single batch."""
    batches: int
    """Number of batches used."""


@torch.no_grad()
def gradient_noise_alignment(
    operator: HessianOperator, top: float | Tensor, max_batches: int | None = None
) -> NoiseAlignment:
    """Measure A_grad, raw and normalized, over the batches of an operator. Collective.

    Each batch takes a product over all batches, so time grows with the square of their number. Batches of less than
    the largest weight, such as a smaller last one, are left out: their noise is larger.

    Args:
        operator: product with the Hessian of F.
        top: largest eigenvalue lambda_1. If it is 0 or not finite, the result is NaN.
        max_batches: use at most this many batches, evenly spaced. The mean gradient is still that of all batches.

    Returns:
        The alignment. `normalized` is NaN if there is no noise.

    Raises:
        ValueError: max_batches is less than 1.
    """
    numbers = batches_for_noise(operator, max_batches)
    taken = len(numbers)
    mean = operator.gradient.double()
    forms, squared_norms = [], []
    for number in numbers:
        noise = (operator.batch_gradient(number).double() - mean).to(operator.dtype)
        forms.append(dot(noise, operator(noise)))
        squared_norms.append(dot(noise, noise))
    form, norm, top = _estimate(forms), sum(squared_norms), float(top)
    rounding = norm <= taken * (_ROUNDING * torch.finfo(operator.dtype).eps) ** 2 * dot(mean, mean)
    normalized = math.nan if rounding else _ratio(sum(forms), norm * top)
    return NoiseAlignment(_ratio(form.value, top), normalized, abs(_ratio(form.stderr, top)), taken)


def batches_for_noise(operator: HessianOperator, max_batches: int | None) -> list[int]:
    """Numbers of the batches that `gradient_noise_alignment` uses."""
    weights = operator.batches.weights
    largest = max(weights)
    numbers = [number for number, weight in enumerate(weights) if weight == largest]
    count = len(numbers)
    taken = count if max_batches is None else min(count, check_integer("max_batches", max_batches, minimum=1))
    return [numbers[position * count // taken] for position in range(taken)]


def _estimate(samples: Sequence[float]) -> Estimate:
    count = len(samples)
    mean = math.fsum(samples) / count
    if count == 1:
        return Estimate(mean, math.nan)
    return Estimate(mean, math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (count - 1) / count))


def _ratio(value: float, by: float) -> float:
    return value / by if by and math.isfinite(by) else math.nan
