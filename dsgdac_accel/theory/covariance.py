"""Covariance of the workers' disagreement in the linear model, for any topology and with momentum.

For each direction k of the Hessian, the state is (z_N, m_N): the deviations of the workers and their momentum. One step
at learning rate lr with momentum b is

    (z, m) <- A (z, m) + B xi,    A = [[I - gamma (I - W) - lr lam, -lr b], [lam, b]],    B = [-lr, 1]

and the covariance follows S <- A S A' + sigma2 B P B', where P = I - 11'/n removes the mean of the workers. Rounds need
not commute nor be symmetric. All arrays are float64.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsgdac_accel.topology import Topology

ROUNDING = 1e-12
"""A period counts as unstable if the modulus of its largest eigenvalue is at least 1 minus this."""


class Dynamics:
    """Recursion of the covariance S of all directions, shape (K, 2N, 2N).

    Args:
        topology: mixing matrix of each round.
        lam_K: curvature of each direction.
        sigma2_K: variance of one worker's gradient noise in each direction.
        momentum: b in [0, 1).
    """

    def __init__(self, topology: Topology, lam_K: Tensor, sigma2_K: Tensor, momentum: float) -> None:
        eye_NN = torch.eye(topology.num_workers, dtype=torch.float64, device="cpu")
        zero_NN = torch.zeros_like(eye_NN)
        center_NN = eye_NN - 1 / topology.num_workers
        gradient_KNN = lam_K[:, None, None] * center_NN
        momentum_KNN = (momentum * center_NN).expand_as(gradient_KNN)
        zero_KNN = torch.zeros_like(gradient_KNN)
        laplacians = [center_NN - topology.matrix(step) @ center_NN for step in range(topology.period)]
        # A = constant - gamma mixing - lr local and B = [-lr, 1], all with the mean of the workers removed.
        self.constant = _blocks([[center_NN + zero_KNN, zero_KNN], [gradient_KNN, momentum_KNN]])
        self.mixing = [_blocks([[laplacian_NN, zero_NN], [zero_NN, zero_NN]]) for laplacian_NN in laplacians]
        self.local = _blocks([[gradient_KNN, momentum_KNN], [zero_KNN, zero_KNN]])
        self.noise_in_z = torch.cat([center_NN, zero_NN])
        self.noise_in_m = torch.cat([zero_NN, center_NN])
        self.sigma2_K11 = sigma2_K[:, None, None]
        self.num_workers = topology.num_workers

    def step(self, step: int, gamma: float, lr: float) -> tuple[Tensor, Tensor]:
        """Return A and the covariance sigma2 B P B' that the noise of a step adds, each (K, 2N, 2N)."""
        A = self.constant - gamma * self.mixing[step % len(self.mixing)] - lr * self.local
        B = self.noise_in_m - lr * self.noise_in_z
        return A, self.sigma2_K11 * (B @ B.T)

    def along(self, gammas: list[float], lrs: list[float]) -> Iterator[Tensor]:
        """Yield the variance of each worker in each direction after every step, shape (N, K), from equal workers on."""
        covariance = torch.zeros_like(self.constant)
        for step, (gamma, lr) in enumerate(zip(gammas, lrs, strict=True)):
            A, added = self.step(step, gamma, lr)
            covariance = A @ covariance @ A.mT + added
            yield self._variance_of_workers(covariance)

    def periodic(self, gamma: float, lr: float) -> Tensor:
        """Return the stationary variance after every round of a period, shape (T, N, K); inf in unstable directions.

        The covariance at the end of a period solves the discrete Lyapunov equation S = F S F' + Q of the whole period.
        """
        F, Q = self.period(gamma, lr)
        stable_K11 = (self.decay(gamma, lr) < 1 - ROUNDING)[:, None, None]
        covariance = solve_lyapunov(F.where(stable_K11, 0.0), Q)
        variances = []
        for step in range(len(self.mixing)):
            A, added = self.step(step, gamma, lr)
            covariance = A @ covariance @ A.mT + added
            variances.append(self._variance_of_workers(covariance.where(stable_K11, torch.inf)))
        return torch.stack(variances)

    def decay(self, gamma: float, lr: float) -> Tensor:
        """Return the largest modulus of an eigenvalue of a whole period, shape (K,). A direction is stable below 1."""
        return torch.linalg.eigvals(self.period(gamma, lr)[0]).abs().amax(-1)

    def period(self, gamma: float, lr: float) -> tuple[Tensor, Tensor]:
        """Return F and Q of a whole period, S <- F S F' + Q, each (K, 2N, 2N)."""
        F, Q = self.step(0, gamma, lr)
        for step in range(1, len(self.mixing)):
            A, added = self.step(step, gamma, lr)
            F, Q = A @ F, A @ Q @ A.mT + added
        return F, Q

    def _variance_of_workers(self, covariance: Tensor) -> Tensor:
        variance_NK = covariance.diagonal(dim1=-2, dim2=-1)[:, : self.num_workers].T
        # Rounding can leave a variance of 0 slightly negative, and an overflow gives inf - inf.
        return variance_NK.where(variance_NK.isfinite(), torch.inf).clamp(min=0)


def solve_lyapunov(F: Tensor, Q: Tensor) -> Tensor:
    """Solve S = F S F' + Q for stable F, batched: S = sum_t F^t Q F'^t. Each pass doubles the number of terms."""
    S = Q
    while F.abs().max() > torch.finfo(F.dtype).tiny ** 0.25:
        S = S + F @ S @ F.mT
        F = F @ F
    return S


def _blocks(rows: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.cat(row, -1) for row in rows], -2)
