"""Covariance of the workers' disagreement in the linear model, for any topology, with momentum.

For each direction k of the Hessian the state is (z_N, m_N): where the workers are, and their momentum. One step is

    (z, m) <- A (z, m) + B xi,    A = [[I - gamma (I - W) - a lam, -a b], [lam, b]],    B = [-a, 1],

and the covariance follows S <- A S A' + sigma2 B P B', where P = I - 11'/n takes the mean of the workers out. Rounds
need not commute nor be symmetric. All arrays are float64.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsgdac_accel.topology import Topology

ROUNDING = 1e-12
"""A period whose largest eigenvalue is this close to 1, or beyond, counts as unstable."""


class Dynamics:
    """How the covariance of all directions moves, shape (K, 2N, 2N).

    Args:
        topology: who mixes with whom.
        lam_K: curvature of each direction.
        sigma2_K: variance of a worker's gradient noise in each direction.
        momentum: b in [0, 1).
    """

    def __init__(self, topology: Topology, lam_K: Tensor, sigma2_K: Tensor, momentum: float) -> None:
        n = topology.num_workers
        self.topology = topology
        self.eye_NN = torch.eye(n, dtype=torch.float64)
        self.centre_NN = self.eye_NN - 1 / n
        self.lam_K11 = lam_K[:, None, None]
        self.sigma2_K11 = sigma2_K[:, None, None]
        self.momentum = momentum

    def step(self, step: int, gamma: float, rate: float) -> tuple[Tensor, Tensor]:
        """A, shape (K, 2N, 2N), with the mean of the workers taken out, and the covariance sigma2 B P B' added."""
        n, b = len(self.eye_NN), self.momentum
        mixed_NN = self.centre_NN - gamma * (self.centre_NN - self.topology.matrix(step) @ self.centre_NN)
        A = torch.empty(len(self.lam_K11), 2 * n, 2 * n, dtype=torch.float64)
        A[:, :n, :n] = mixed_NN - rate * self.lam_K11 * self.centre_NN
        A[:, :n, n:] = -rate * b * self.centre_NN
        A[:, n:, :n] = self.lam_K11 * self.centre_NN
        A[:, n:, n:] = b * self.centre_NN
        B = torch.cat([-rate * self.centre_NN, self.centre_NN])
        return A, self.sigma2_K11 * (B @ B.T)

    def along(self, gammas: list[float], rates: list[float]) -> Iterator[Tensor]:
        """The variance of each worker in each direction after every step, shape (N, K), from equal workers on."""
        n = len(self.eye_NN)
        covariance = torch.zeros(len(self.lam_K11), 2 * n, 2 * n, dtype=torch.float64)
        for step, (gamma, rate) in enumerate(zip(gammas, rates, strict=True)):
            A, added = self.step(step, gamma, rate)
            covariance = A @ covariance @ A.mT + added
            yield _of_workers(covariance, n)

    def periodic(self, gamma: float, rate: float) -> Tensor:
        """The stationary variance after every round of a period, shape (T, N, K); inf in unstable directions.

        The covariance S at the end of a period solves the discrete Lyapunov equation S = F S F' + Q of a whole period.
        """
        F, Q = self.period(gamma, rate)
        stable_K11 = (self.decay(gamma, rate) < 1 - ROUNDING)[:, None, None]
        covariance = solve_lyapunov(F.where(stable_K11, 0.0), Q)
        variances = []
        for step in range(self.topology.period):
            A, added = self.step(step, gamma, rate)
            covariance = A @ covariance @ A.mT + added
            variances.append(_of_workers(covariance.where(stable_K11, torch.inf), len(self.eye_NN)))
        return torch.stack(variances)

    def decay(self, gamma: float, rate: float) -> Tensor:
        """The largest modulus of an eigenvalue of a whole period, shape (K,): below 1 where it is stable."""
        return torch.linalg.eigvals(self.period(gamma, rate)[0]).abs().amax(-1)

    def period(self, gamma: float, rate: float) -> tuple[Tensor, Tensor]:
        """F and Q of a whole period: S <- F S F' + Q, each (K, 2N, 2N)."""
        F, Q = self.step(0, gamma, rate)
        for step in range(1, self.topology.period):
            A, added = self.step(step, gamma, rate)
            F, Q = A @ F, A @ Q @ A.mT + added
        return F, Q


def solve_lyapunov(F: Tensor, Q: Tensor) -> Tensor:
    """S = F S F' + Q for stable F, batched: the sum of F^t Q F'^t, whose number of terms doubles in each pass."""
    S = Q
    while F.abs().max() > torch.finfo(F.dtype).tiny ** 0.25:
        S = S + F @ S @ F.mT
        F = F @ F
    return S


def _of_workers(covariance: Tensor, num_workers: int) -> Tensor:
    # Rounding can leave a variance of 0 a little below it.
    return covariance.diagonal(dim1=-2, dim2=-1)[:, :num_workers].T.clamp(min=0)
