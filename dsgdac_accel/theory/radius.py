"""Predicted consensus error of a topology: in the stationary state, and along a schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.theory import arguments
from dsgdac_accel.theory.covariance import ROUNDING, Dynamics
from dsgdac_accel.theory.modes import graph_modes, has_modes, modal_variance
from dsgdac_accel.topology import Topology


@dataclass(frozen=True, eq=False, repr=False)
class Disagreement:
    """Predicted sizes of the deviations delta_i = x_i - x_bar; inf where a mode is unstable.

    The names match those in the logs. `frobenius`, `envelope` and `exposure` depend on the variance of the noise only;
    `radius` assumes Gaussian noise.
    """

    variance_TNK: Tensor
    """E[(u_k' delta_i)^2] after each round of a period, float64. T = 1 for a static topology and along a schedule."""

    lam_K: Tensor
    """Curvature of each direction."""

    counts_K: Tensor
    """Number of directions of the model that each entry stands for."""

    @cached_property
    def frobenius(self) -> float:
        """Root mean square of ||Delta||_F = sqrt(sum_i ||delta_i||^2), over the rounds of a period."""
        return math.sqrt(self._summed(self.counts_K))

    @cached_property
    def radius(self) -> float:
        """Mean distance of a worker from the average, mean_i E||delta_i||, over the rounds of a period.

        It is at most frobenius / sqrt(n), and close to that if the disagreement is spread over many directions.
        """
        return float(gaussian_norm(self.variance_TNK, self.counts_K).mean())

    @cached_property
    def envelope(self) -> float:
        """Expected excess loss of the workers over the deployed model, sum_i E f(x_i) - n E f(x_bar) (Eq. 6)."""
        return 0.5 * self._summed(self.counts_K * self.lam_K)

    @cached_property
    def exposure(self) -> float:
        """Curvature exposure Q = sum_i E[delta_i' H delta_i] / lambda_1 (Eq. 7); NaN if no curvature is positive."""
        top = float(self.lam_K.max())
        return 2 * self.envelope / top if top > 0 else math.nan

    def __repr__(self) -> str:
        return f"Disagreement(radius={self.radius:.4g}, frobenius={self.frobenius:.4g}, exposure={self.exposure:.4g})"

    def _summed(self, weight_K: Tensor) -> float:
        """sum_ik weight_k E[(u_k' delta_i)^2], averaged over the rounds. A weight of 0 drops infinite variances."""
        variance_K = self.variance_TNK.mean(0).sum(0)
        return float(torch.where(weight_K == 0, 0.0, weight_K * variance_K).sum())


def predicted_radius(
    topology: Topology, gamma: float, lr: float, lam: Any, sigma2: Any, momentum: float = 0.0, counts: Any = None
) -> Disagreement:
    """Predict the stationary consensus error at constant gamma and lr: Theorem 1 summed over all modes (Corollary 1).

    A single symmetric round splits into modes, each with its closed form. Other topologies have no common modes: the
    rounds of the one-peer ring, for example, do not commute. For these, the covariance that repeats after a period is
    computed from a discrete Lyapunov equation.

    Args:
        topology: mixing matrix of each round.
        gamma: consensus factor in [0, 1].
        lr: learning rate > 0.
        lam: curvature of each direction, shape (K,), or one number for all; any sign. Add weight decay to it.
        sigma2: variance >= 0 of ONE worker's gradient noise in each direction, independent between workers.
        momentum: momentum of the local optimizer in [0, 1), without dampening.
        counts: number of directions that each entry stands for, 1 by default. A flat loss of a million parameters is
            lam=0, counts=1e6.

    Returns:
        The predicted error. An unstable mode makes it inf.

    Raises:
        ValueError: an argument is out of range.

    >>> from dsgdac_accel.topology import build_topology
    >>> predicted_radius(build_topology("one_peer_ring", 8), gamma=1.0, lr=0.1, lam=0.0, sigma2=1.0, counts=100)
    Disagreement(radius=1.222, frobenius=3.464, exposure=nan)
    >>> predicted_radius(build_topology("complete", 8), gamma=0.1, lr=0.1, lam=[5.0, 0.0, -2.0], sigma2=1.0).frobenius
    inf
    """
    gamma = arguments.scalar("gamma", arguments.consensus_factor(gamma))
    lr = arguments.scalar("lr", arguments.positive_lr("lr", lr))
    momentum = arguments.scalar("momentum", arguments.momentum_factor(momentum))
    lam_K, sigma2_K, counts_K = arguments.spectrum(lam, sigma2, counts)
    if has_modes(topology):
        mu_J, vectors_NJ = graph_modes(topology)
        variance_JK = modal_variance(lr, gamma, mu_J[:, None], lam_K, sigma2_K, momentum)
        # Modes this close to instability count as unstable, as in `periodic`: mu is only known up to rounding.
        unstable_K = (variance_JK > lr**2 * sigma2_K / ROUNDING).any(0)
        # Unstable modes are set afterwards: 0 * inf is NaN for a worker that has no part in one.
        variance_NK = vectors_NJ**2 @ variance_JK.where(~unstable_K, 0.0)
        variance_TNK = variance_NK.where(~unstable_K, torch.inf)[None]
    else:
        variance_TNK = Dynamics(topology, lam_K, sigma2_K, momentum).periodic(gamma, lr)
    return Disagreement(variance_TNK, lam_K, counts_K)


def radius_along(
    topology: Topology,
    gammas: AdaptiveConsensus | Sequence[float],
    lrs: Sequence[float],
    lam: Any,
    sigma2: Any,
    momentum: float = 0.0,
    counts: Any = None,
) -> list[Disagreement]:
    """Compute the expected consensus error after each step of a run that starts with equal workers.

    This is the recursion behind Theorem 1 with the lr and gamma of each step, without randomness. The end of a decay
    shows Corollary 2 for gamma = (lr / max_lr)^p.

    Args:
        topology: mixing matrix of each round; step t uses round t.
        gammas: gamma of every step in [0, 1], or a schedule that computes it from `lrs`. A copy of the schedule runs.
            Build it with planned_lrs if the run will have them.
        lrs: learning rate >= 0 of every step.
        lam, sigma2, momentum, counts: see `predicted_radius`.

    Raises:
        ValueError: an argument is out of range.

    >>> from dsgdac_accel.topology import build_topology
    >>> halving = [0.5**step for step in range(6)]
    >>> errors = radius_along(build_topology("complete", 4), AdaptiveConsensus(power=2), halving, lam=0.0, sigma2=1.0)
    >>> print(*(f"{error.frobenius:.3f}" for error in errors))
    1.732 1.561 1.526 1.518 1.516 1.515
    """
    gammas_T, lrs_T = arguments.scheduled(gammas, lrs)
    momentum = arguments.scalar("momentum", arguments.momentum_factor(momentum))
    lam_K, sigma2_K, counts_K = arguments.spectrum(lam, sigma2, counts)
    variances = Dynamics(topology, lam_K, sigma2_K, momentum).along(gammas_T, lrs_T)
    return [Disagreement(variance_NK[None], lam_K, counts_K) for variance_NK in variances]


def gaussian_norm(variance_K: Tensor, counts_K: Tensor) -> Tensor:
    """Return E||g|| for independent Gaussian entries, counts_k of them with variance_k; accurate to about 1e-14.

    With q = ||g||^2,

        E sqrt(q) = integral over t > 0 of (1 - E exp(-t q)) t^(-3/2) dt / (2 sqrt(pi))
        E exp(-t q) = prod_k (1 + 2 t variance_k)^(-counts_k / 2)

    Args:
        variance_K: variances, shape (..., K).
        counts_K: number of entries with each variance, shape (K,).
    """
    variance_K = variance_K.where(counts_K > 0, 0.0)  # 0 * inf is NaN
    total = (counts_K * variance_K).sum(-1)
    share_K = (variance_K / total[..., None]).nan_to_num(0.0)
    # In log t, the integrand is analytic and decays like exp(-|log t| / 2), so the trapezoidal rule converges fast.
    spacing, integral = 0.25, torch.zeros_like(total)
    for log_t in torch.arange(-80.0, 80.0, spacing, dtype=torch.float64, device="cpu"):
        exponent = -0.5 * (counts_K * torch.log1p(2 * log_t.exp() * share_K)).sum(-1)
        integral -= spacing * torch.expm1(exponent) * torch.exp(-log_t / 2)
    norm = total.sqrt() * integral / (2 * math.sqrt(math.pi))
    return torch.where(total.isinf(), torch.inf, norm.nan_to_num(0.0))
