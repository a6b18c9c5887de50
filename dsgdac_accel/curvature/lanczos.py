"""Eigenvalues at both ends of the spectrum, from products alone (Lanczos 1950)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsgdac_accel.checks import check_choice, check_integer

Matvec = Callable[[Tensor], Tensor]
"""v (d,) -> H v (d,), H symmetric; a `HessianOperator`, for example."""

Which = Literal["both", "largest", "smallest"]

_CHUNK = 2**22  # elements of a dot product at a time, which bounds the float64 copies to 32 MiB each
_NEGLIGIBLE = 1e-6  # of the largest eigenvalue: smaller ones are not judged relative to themselves


@dataclass(frozen=True)
class Spectrum:
    """Ritz values of k Lanczos steps, largest first: approximations of eigenvalues, best at both ends.

    Unpacks as `values, vectors`. A multiple eigenvalue appears once.
    """

    values: Tensor
    """(k,) float64 on the CPU."""
    residuals: Tensor
    """(k,) ||H y - value y||: an eigenvalue is at most that far from the value (for a product without rounding)."""
    basis: tuple[Tensor, ...]
    """k orthonormal vectors (d,)."""
    coefficients: Tensor
    """(k, k) float64: column j combines the basis to the vector of value j."""

    def vector(self, number: int) -> Tensor:
        """The unit Ritz vector (d,) of value `number`: 0 of the largest, -1 of the smallest."""
        vector = torch.zeros_like(self.basis[0])
        for coefficient, basis_vector in zip(self.coefficients[:, number].tolist(), self.basis, strict=True):
            vector.add_(basis_vector, alpha=coefficient)
        return vector

    @property
    def vectors(self) -> Tensor:
        """(d, k) all Ritz vectors, made when asked for: as much memory as the basis once more."""
        return torch.stack([self.vector(number) for number in range(len(self.values))], dim=1)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))

    def relative_residual(self, number: int) -> float:
        """Residual of value `number` relative to it, or to 1e-6 of the largest magnitude if that is more."""
        scale = max(abs(float(self.values[number])), _NEGLIGIBLE * float(self.values.abs().max()))
        return float(self.residuals[number]) / scale if scale else 0.0


def lanczos(
    hvp: Matvec,
    iterations: int = 30,
    *,
    seed: int = 0,
    which: Which = "both",
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Spectrum:
    """Ritz values and vectors after `iterations` products, with full reorthogonalisation (two passes each).

    It ends early where the Krylov space is exhausted, so `iterations` may exceed d. Needs memory for one vector per
    iteration. Warns where an end of the spectrum that was asked for has a residual above 1e-3 of its value; the
    largest eigenvalue of a network mostly needs 10 to 20 iterations, the smallest 80.

    Args:
        hvp: the product; collective if it is sharded, with the same result on all workers.
        iterations: at most so many products.
        seed: of the start vector, the same on all workers.
        which: the ends that are needed, for the warning.
        dim: d, where `hvp` does not say so by `hvp.dim`; likewise `dtype` and `device`, by default float32, CPU.

    Raises:
        ValueError: fewer than one iteration, or a product that is not finite.

    >>> values, vectors = lanczos(lambda v: v * torch.tensor([3.0, 3.0, -5.0]), dim=3)
    >>> values.round(decimals=5).tolist()
    [3.0, -5.0]
    """
    check_choice("which", which, ("both", "largest", "smallest"))
    spectrum = run_lanczos(hvp, iterations, seed=seed, dim=dim, dtype=dtype, device=device)
    for end, number in {"largest": 0, "smallest": -1}.items():
        if which in ("both", end):
            warn_unless_converged(spectrum, number, stacklevel=3)
    return spectrum


def warn_unless_converged(spectrum: Spectrum, number: int, stacklevel: int, tolerance: float = 1e-3) -> None:
    """Warn if the residual of value `number` is above `tolerance` of the value."""
    relative = spectrum.relative_residual(number)
    if relative > tolerance:
        warnings.warn(
            f"{'largest' if number == 0 else 'smallest'} eigenvalue {float(spectrum.values[number]):.4g} has a "
            f"relative residual of {relative:.1e} after {len(spectrum.values)} Lanczos iterations; it needs more.",
            stacklevel=stacklevel,
        )


@torch.no_grad()
def run_lanczos(
    hvp: Matvec,
    iterations: int,
    *,
    seed: int,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Spectrum:
    """`lanczos` without its warning."""
    if iterations < 1:
        raise ValueError(f"Lanczos needs at least one iteration; got {iterations}.")
    check_integer("iterations", iterations, minimum=1)
    dim, dtype, device = space_of(hvp, dim, dtype, device)
    start = torch.randn(dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = [(start / start.norm()).to(device, dtype)]
    diagonal: list[float] = []
    beside: list[float] = []  # the last one couples to a vector that is not in the basis
    while True:
        w = hvp(basis[-1]).double()
        diagonal.append(dot(w, basis[-1]))
        for _ in range(2):  # once leaves errors of the size of what was subtracted
            for vector in basis:
                w.sub_(vector.double(), alpha=dot(w, vector))
        beside.append(float(w.norm()))
        _require_finite(diagonal[-1] + beside[-1], len(diagonal))
        scale = max(map(abs, [*diagonal, *beside]))
        exhausted = beside[-1] <= 10 * torch.finfo(dtype).eps * scale
        if exhausted or len(basis) >= min(iterations, dim):
            break
        basis.append(w.div_(beside[-1]).to(dtype))
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off_diagonal = torch.tensor(beside[:-1], dtype=torch.float64)
    tridiagonal += torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    values, coefficients = torch.linalg.eigh(tridiagonal)
    values, coefficients = values.flip(0), coefficients.flip(1)
    return Spectrum(values, beside[-1] * coefficients[-1].abs(), tuple(basis), coefficients)


def dot(a: Tensor, b: Tensor) -> float:
    """Inner product of two vectors (d,), accumulated in float64."""
    parts = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return float(sum(torch.dot(x.double(), y.double()) for x, y in parts))


def space_of(
    hvp: Any, dim: int | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[int, torch.dtype, torch.device]:
    """Dimension, dtype and device of the vectors of a product: as given, else by its attributes."""
    dim = getattr(hvp, "dim", None) if dim is None else dim
    if dim is None:
        raise ValueError(f"the dimension is unknown: {type(hvp).__name__} has no attribute `dim`. Pass dim=...")
    dim = check_integer("dim", dim, minimum=1)
    dtype = dtype or getattr(hvp, "dtype", torch.float32)
    device = device or getattr(hvp, "device", torch.device("cpu"))
    assert isinstance(dtype, torch.dtype)
    assert isinstance(device, torch.device)
    return dim, dtype, device


def _require_finite(value: float, iteration: int) -> None:
    if value != value or abs(value) == float("inf"):
        raise ValueError(f"the Hessian product of Lanczos iteration {iteration} is not finite: the model diverged.")
