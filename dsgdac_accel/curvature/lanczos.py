"""Eigenvalues at both ends of the spectrum from Hessian-vector products (Lanczos 1950)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsgdac_accel.checks import check_choice, check_integer

Matvec = Callable[[Tensor], Tensor]
"""v (d,) -> H v (d,) with symmetric H, such as a `HessianOperator`."""

Which = Literal["both", "largest", "smallest"]

_CHUNK = 2**22  # elements per dot product, which bounds the float64 copies to 32 MiB each
_NEGLIGIBLE = 1e-6  # of the largest eigenvalue; below, residuals are judged relative to this instead of the value


@dataclass(frozen=True)
class Spectrum:
    """Ritz values of k Lanczos steps, largest first. They approximate eigenvalues, best at both ends of the spectrum.

    Unpacks as `values, vectors`. A multiple eigenvalue appears once.
    """

    values: Tensor
    """Ritz values, (k,) float64 on the CPU."""
    residuals: Tensor
    """||H y - value y|| of each Ritz vector y, (k,). Without rounding, an eigenvalue is at most that far away."""
    basis: tuple[Tensor, ...]
    """k orthonormal vectors (d,)."""
    coefficients: Tensor
    """(k, k) float64; column j combines the basis to the Ritz vector of value j."""

    def vector(self, number: int) -> Tensor:
        """Return the unit Ritz vector (d,) of value `number`: 0 is the largest, -1 the smallest."""
        vector = torch.zeros_like(self.basis[0])
        for coefficient, basis_vector in zip(self.coefficients[:, number].tolist(), self.basis, strict=True):
            vector.add_(basis_vector, alpha=coefficient)
        return vector

    @property
    def vectors(self) -> Tensor:
        """All Ritz vectors as columns, (d, k). Computed on access, with as much memory as the basis."""
        return torch.stack([self.vector(number) for number in range(len(self.values))], dim=1)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))

    def relative_residual(self, number: int) -> float:
        """Return the residual of value `number` relative to it, or to 1e-6 of the largest magnitude if that is more."""
        scale = max(abs(float(self.values[number])), _NEGLIGIBLE * float(self.values.abs().max()))
        return float(self.residuals[number]) / scale if scale else 0.0


@torch.no_grad()
def lanczos(
    hvp: Matvec,
    iterations: int = 30,
    *,
    seed: int = 0,
    which: Which = "both",
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    stacklevel: int = 2,
) -> Spectrum:
    """Compute Ritz values and vectors with full reorthogonalization.

        beta_{j+1} q_{j+1} = H q_j - alpha_j q_j - beta_j q_{j-1},    T = tridiag(beta, alpha, beta),    T s = value s

    It stops early when the Krylov space is exhausted, so `iterations` may exceed d. It needs memory for one vector per
    iteration. It warns if the residual at a requested end of the spectrum is above 1e-3 of the value. The largest
    eigenvalue of a network usually needs 10 to 20 iterations, the smallest 80.

    Args:
        hvp: the product; collective if it is sharded, with the same result on all workers.
        iterations: maximum number of products, at least 1.
        seed: seed of the start vector, the same on all workers.
        which: ends of the spectrum that the warning covers.
        dim, dtype, device: of the vectors. The defaults are the attributes of `hvp`; without those, float32 on the CPU.
            `dim` is required if `hvp` has no such attribute.
        stacklevel: of the warning, as in `warnings.warn`.

    Raises:
        ValueError: an argument is out of range, or a product is not finite.

    >>> values, vectors = lanczos(lambda v: v * torch.tensor([3.0, 3.0, -5.0]), dim=3)
    >>> values.round(decimals=5).tolist()
    [3.0, -5.0]
    """
    check_choice("which", which, ("both", "largest", "smallest"))
    check_integer("iterations", iterations, minimum=1)
    dim, dtype, device = space_of(hvp, dim, dtype, device)
    start = torch.randn(dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    basis = [(start / start.norm()).to(device, dtype)]
    alphas: list[float] = []
    betas: list[float] = []  # the last one belongs to a vector that is not in the basis
    while True:
        w = hvp(basis[-1]).double()
        alphas.append(dot(w, basis[-1]))
        for _ in range(2):  # a single pass leaves errors of the size of what it subtracts
            for vector in basis:
                w.sub_(vector.double(), alpha=dot(w, vector))
        betas.append(float(w.norm()))
        if not math.isfinite(alphas[-1] + betas[-1]):
            raise ValueError(f"the product of Lanczos iteration {len(alphas)} is not finite. The model diverged.")
        exhausted = betas[-1] <= 10 * torch.finfo(dtype).eps * max(map(abs, [*alphas, *betas]))
        if exhausted or len(basis) >= min(iterations, dim):
            break
        basis.append(w.div_(betas[-1]).to(dtype))
    off_diagonal = torch.tensor(betas[:-1], dtype=torch.float64, device="cpu")
    T = (
        torch.diag(torch.tensor(alphas, dtype=torch.float64, device="cpu"))
        + off_diagonal.diag(1)
        + off_diagonal.diag(-1)
    )
    values, coefficients = torch.linalg.eigh(T)
    values, coefficients = values.flip(0), coefficients.flip(1)
    spectrum = Spectrum(values, betas[-1] * coefficients[-1].abs(), tuple(basis), coefficients)
    for end, number in {"largest": 0, "smallest": -1}.items():
        if which in ("both", end):
            _warn_unless_converged(spectrum, number, stacklevel + 2)  # through this function and no_grad's wrapper
    return spectrum


def _warn_unless_converged(spectrum: Spectrum, number: int, stacklevel: int, tolerance: float = 1e-3) -> None:
    relative = spectrum.relative_residual(number)
    if relative > tolerance:
        warnings.warn(
            f"{'largest' if number == 0 else 'smallest'} eigenvalue {float(spectrum.values[number]):.4g} has a "
            f"relative residual of {relative:.1e} after {len(spectrum.values)} Lanczos iterations. "
            f"Increase `iterations`.",
            stacklevel=stacklevel,
        )


def dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two vectors (d,), accumulated in float64."""
    parts = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return float(sum(torch.dot(x.double(), y.double()) for x, y in parts))


def space_of(
    hvp: Any, dim: int | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[int, torch.dtype, torch.device]:
    """Return dimension, dtype and device of the vectors of a product: the arguments, or else attributes of `hvp`."""
    dim = getattr(hvp, "dim", None) if dim is None else dim
    if dim is None:
        raise ValueError(f"the dimension is unknown: {type(hvp).__name__} has no attribute `dim`. Pass dim=...")
    dim = check_integer("dim", dim, minimum=1)
    dtype = dtype or getattr(hvp, "dtype", torch.float32)
    device = device or getattr(hvp, "device", torch.device("cpu"))
    assert isinstance(dtype, torch.dtype)
    assert isinstance(device, torch.device)
    return dim, dtype, device
