"""Eigenvalues at both ends of the spectrum from Hessian-vector products (Lanczos 1950)."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsgdac_accel.checks import check_integer

_CHUNK = 2**22  # elements per dot product, which bounds the float64 copies to 32 MiB each
_NEGLIGIBLE = 1e-6  # of the largest eigenvalue; below, residuals are judged relative to this instead of the value


class Product(Protocol):
    """v (d,) -> H v (d,) with symmetric H, such as a `HessianOperator`."""

    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, v: Tensor, /) -> Tensor: ...


class Spectrum(NamedTuple):
    """Ritz values of k Lanczos steps, largest first. They approximate eigenvalues, best at both ends of the spectrum.

    A multiple eigenvalue appears once.
    """

    values: Tensor
    """Ritz values, (k,) float64 on the CPU."""
    residuals: Tensor
    """||H y - value y|| of each unit Ritz vector y, (k,). Without rounding, an eigenvalue is at most that far away."""

    def relative_residual(self, number: int) -> float:
        """Return the residual of value `number` relative to it, or to 1e-6 of the largest magnitude if that is more."""
        scale = max(abs(float(self.values[number])), _NEGLIGIBLE * float(self.values.abs().max()))
        return float(self.residuals[number]) / scale if scale else 0.0


@torch.no_grad()
def lanczos(hvp: Product, iterations: int = 30, *, seed: int = 0) -> Spectrum:
    """Compute Ritz values with full reorthogonalization.

        beta_{j+1} q_{j+1} = H q_j - alpha_j q_j - beta_j q_{j-1},    T = tridiag(beta, alpha, beta),    T s = value s

    It stops early when the Krylov space is exhausted, so `iterations` may exceed d. It needs memory for one vector per
    iteration. The largest eigenvalue of a network usually needs 10 to 20 iterations, the smallest 80.

    Args:
        hvp: the product; collective if it is sharded, with the same result on all workers.
        iterations: maximum number of products, at least 1.
        seed: seed of the start vector, the same on all workers.

    Raises:
        ValueError: an argument is out of range, or a product is not finite.
    """
    check_integer("iterations", iterations, minimum=1)
    start = torch.randn(hvp.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    basis = [(start / start.norm()).to(hvp.device, hvp.dtype)]
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
        exhausted = betas[-1] <= 10 * torch.finfo(hvp.dtype).eps * max(map(abs, [*alphas, *betas]))
        if exhausted or len(basis) >= min(iterations, hvp.dim):
            break
        basis.append(w.div_(betas[-1]).to(hvp.dtype))
    off_diagonal = torch.tensor(betas[:-1], dtype=torch.float64, device="cpu")
    T = torch.tensor(alphas, dtype=torch.float64, device="cpu").diag() + off_diagonal.diag(1) + off_diagonal.diag(-1)
    values, coefficients = torch.linalg.eigh(T)
    return Spectrum(values.flip(0), betas[-1] * coefficients[-1].abs().flip(0))


def dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two vectors (d,), accumulated in float64."""
    parts = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return float(sum(torch.dot(x.double(), y.double()) for x, y in parts))
