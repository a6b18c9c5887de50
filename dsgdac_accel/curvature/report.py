"""All curvature figures of one point in training, in one call."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import find_batch_size
from torch import Tensor, nn

from dsgdac_accel.checks import check_integer
from dsgdac_accel.curvature.lanczos import lanczos
from dsgdac_accel.curvature.measures import (
    batches_for_noise,
    gradient_noise_alignment,
    hutchinson_trace,
    measure_penalty,
    ratio,
)
from dsgdac_accel.curvature.operator import HessianOperator, LossFunction
from dsgdac_accel.distributed.group import WorkerGroup


@dataclass(frozen=True)
class CurvatureCost:
    """Work of a measurement, known before it starts."""

    products: int
    """Hessian products over all batches, at most."""
    seconds: float
    """Estimate from the time of one batch."""
    computations: int
    """Products and gradients of single batches on this process, at most."""


ShowProgress = Callable[[CurvatureCost], Callable[[], object]]
"""Called once, before the first product. It returns a function to call after each of the `computations`."""


@dataclass(frozen=True)
class CurvatureReport:
    """Curvature at the deployed model and the workers' disagreement relative to it. Undefined figures are NaN."""

    lambda_1: float
    """Largest eigenvalue of the Hessian."""
    lambda_1_residual: float
    """An eigenvalue is at most this far from `lambda_1`."""
    lambda_min: float
    """Smallest eigenvalue. After 30 iterations, its residual is usually a few percent of it."""
    lambda_min_residual: float
    trace: float
    trace_stderr: float
    Q: float
    """Curvature exposure sum_i delta_i' H delta_i / lambda_1."""
    A: float
    """Alignment Q / ||Delta||_F^2; NaN if the consensus errors are at rounding level."""
    B: float
    """Alignment of random directions, tr(H) / (d lambda_1)."""
    B_stderr: float
    A_grad: float
    """Alignment of the gradient noise, normalized like A."""
    A_grad_raw: float
    """Alignment of the gradient noise as in the paper, mean_b xi_b' H xi_b / lambda_1."""
    penalty: float
    """E = Q lambda_1, not normalized."""
    batches: int
    """Number of batches."""
    batch_size: float
    """Samples in the first batch, NaN if unknown. With BatchNorm, eigenvalues depend on it."""

    def as_dict(self) -> dict[str, float]:
        """Return the figures by name, for a logger."""
        return {name: float(value) for name, value in dataclasses.asdict(self).items()}


def measure_curvature(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    deltas: Iterable[Tensor] = (),
    *,
    weights: Sequence[float] | None = None,
    group: WorkerGroup | None = None,
    seed: int = 0,
    frozen: Collection[nn.Module] = (),
    iterations: int = 30,
    probes: int = 50,
    noise_batches: int = 32,
    graph_memory: float = 2**30,
    progress: ShowProgress | None = None,
) -> CurvatureReport:
    """Measure eigenvalues, trace, Q, A, B and A_grad at a model. Collective if a group is given.

    It costs iterations + probes + workers + noise_batches products over all batches. It warns if `lambda_1`, by which
    the other figures are divided, is not accurate to 1e-3.

    Args:
        model: the average of the workers, so call this inside `deployed_model`. The model does not change.
        loss_fn: called as `loss_fn(model, batch)`; returns the mean loss of the batch, shape ().
        batches: fixed list of training batches, the same on all processes, which share the work. It may be a `Sequence`
            that makes each batch when it is read; see `HessianOperator`.
        deltas: consensus errors of the workers of this process, each (d,), or one tensor (N, d); see
            `consensus_errors`. Empty if all workers are equal; then Q is 0 and A is NaN.
        weights: weight of each batch in the loss, such as its number of samples; None weighs all equally.
        group: the processes; None for this one alone.
        seed: seed of dropout, start vector and probes.
        frozen, graph_memory: see `HessianOperator`.
        iterations: iterations of Lanczos, at least 1.
        probes: random probes of the trace; 0 leaves trace and B out, as NaN.
        noise_batches: maximum number of batches for A_grad; 0 leaves it out, as NaN.
        progress: shows the cost and the progress. Give it on all processes or on none, because the time of a batch is
            measured on all.

    Raises:
        ValueError: an argument is out of range; for model, loss and batches see `HessianOperator`.
    """
    for name, value in (("probes", probes), ("noise_batches", noise_batches)):
        check_integer(name, value, minimum=0)
    hvp = HessianOperator(
        model, loss_fn, batches, weights=weights, group=group, seed=seed, frozen=frozen, graph_memory=graph_memory
    )
    deltas = list(deltas)
    if progress is not None:
        hvp.on_batch = progress(_cost(hvp, len(deltas), iterations, probes, noise_batches))
    spectrum = lanczos(hvp, iterations, seed=seed)
    top = float(spectrum.values[0])
    if spectrum.relative_residual(0) > 1e-3:
        warnings.warn(
            f"largest eigenvalue {top:.4g} has a relative residual of {spectrum.relative_residual(0):.1e} after "
            f"{len(spectrum.values)} Lanczos iterations. Increase `iterations`.",
            stacklevel=2,
        )
    trace, trace_stderr = hutchinson_trace(hvp, probes, seed=seed) if probes else (math.nan, math.nan)
    penalty = measure_penalty(deltas, hvp)
    noise = gradient_noise_alignment(hvp, top, noise_batches) if noise_batches else None
    return CurvatureReport(
        lambda_1=top,
        lambda_1_residual=float(spectrum.residuals[0]),
        lambda_min=float(spectrum.values[-1]),
        lambda_min_residual=float(spectrum.residuals[-1]),
        trace=trace,
        trace_stderr=trace_stderr,
        Q=penalty.exposure(top),
        A=penalty.alignment(top),
        B=ratio(trace, hvp.dim * top),
        B_stderr=abs(ratio(trace_stderr, hvp.dim * top)),
        A_grad=noise.normalized if noise else math.nan,
        A_grad_raw=noise.raw if noise else math.nan,
        penalty=penalty.value,
        batches=len(batches),
        batch_size=_batch_size(batches[0]),
    )


def _cost(hvp: HessianOperator, deltas: int, iterations: int, probes: int, noise_batches: int) -> CurvatureCost:
    workers = deltas
    if hvp.group is not None:
        workers = sum(hvp.group.all_gather_object(deltas, "counting the workers for curvature"))
    noise = batches_for_noise(hvp.batches.weights, noise_batches) if noise_batches else []
    products = min(iterations, hvp.dim) + probes + workers + len(noise)
    passes = products + bool(noise)  # the mean gradient takes one more
    own_noise = len(set(noise).intersection(hvp.share))
    return CurvatureCost(products, passes * hvp.seconds_per_product(), passes * len(hvp.share) + own_noise)


def _batch_size(batch: Any) -> float:
    try:
        return float(find_batch_size(batch))
    except (TypeError, ValueError, IndexError):  # the batch has no tensor with samples
        return math.nan
