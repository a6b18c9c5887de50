"""The consensus error that a topology, a gamma and a rate lead to: in stationary state, and along a schedule."""

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
    """What the linear model expects of the deviations delta_i = x_i - x_bar; inf where a mode is unstable.

    The names are those of the logs. `frobenius`, `envelope` and `exposure` need nothing of the noise but its variance;
    `radius` holds for Gaussian noise.
    """

    variance_TNK: Tensor
    """E[(u_k' delta_i)^2] after each round of a period (T = 1 for a static topology, and along a schedule), float64."""

    lam_K: Tensor
    """Curvature of each direction."""

    counts_K: Tensor
    """How many directions of the model each entry stands for."""

    @cached_property
    def frobenius(self) -> float:
        """Root mean square of ||Delta||_F = sqrt(sum_i ||delta_i||^2) over the rounds of a period."""
        return math.sqrt(self._summed(self.counts_K))

    @cached_property
    def radius(self) -> float:
        """Mean distance of a worker from the average, mean_i E||delta_i||, over the rounds of a period.

        At most frobenius / sqrt(n), and close to that where many directions share in the disagreement.
        """
        return float(gaussian_norm(self.variance_TNK, self.counts_K).mean())

    @cached_property
    def envelope(self) -> float:
        """Expected loss of the workers beyond the deployed model's: sum_i E f(x_i) - n E f(x_bar) (Eq. 6)."""
        return 0.5 * self._summed(self.counts_K * self.lam_K)

    @cached_property
    def exposure(self) -> float:
        """Curvature exposure Q = sum_i E[delta_i' H delta_i] / lambda_1 (Eq. 7); NaN unless a curvature is positive."""
        top = float(self.lam_K.max())
        return 2 * self.envelope / top if top > 0 else math.nan

    def __repr__(self) -> str:
        return f"Disagreement(radius={self.radius:.4g}, frobenius={self.frobenius:.4g}, exposure={self.exposure:.4g})"

    def _summed(self, weight_K: Tensor) -> float:
        """sum_ik weight_k E[(u_k' delta_i)^2], averaged over the rounds; a weight of 0 silences infinite variance."""
        variance_K = self.variance_TNK.mean(0).sum(0)
        return float(torch.where(weight_K == 0, 0.0, weight_K * variance_K).sum())


def predicted_radius(
    topology: Topology, gamma: float, lr: float, lam: Any, sigma2: Any, momentum: float = 0.0, counts: Any = None
) -> Disagreement:
    """The stationary consensus error at a constant gamma and rate: Theorem 1 summed over all modes (Corollary 1).

    A single symmetric round splits into modes, each with its closed form. For all others, such as the one-peer ring,
    whose rounds do not commute and so have no common modes, the covariance that repeats after a period is solved for.

    Args:
        topology: who mixes with whom.
        gamma: consensus factor in [0, 1].
        rate: learning rate > 0.
        lam: curvature of each direction, shape (K,), or one number for all; of any sign. Weight decay adds to it.
        sigma2: variance >= 0 of ONE worker's gradient noise in each direction, independent between workers.
        momentum: of the local optimizer, in [0, 1), without dampening.
        counts: how many directions each entry stands for, 1 by default: a flat loss of a million parameters is
            lam=0, counts=1e6.

    An unstable mode makes the results inf. Raises ValueError for an argument out of range.

    >>> from dsgdac_accel.topology import build_topology
    >>> predicted_radius(build_topology("one_peer_ring", 8), gamma=1.0, rate=0.1, lam=0.0, sigma2=1.0, counts=100)
    Disagreement(radius=1.222, frobenius=3.464, exposure=nan)
    >>> predicted_radius(build_topology("complete", 8), gamma=0.1, rate=0.1, lam=[5.0, 0.0, -2.0], sigma2=1.0).frobenius
    inf
    """
    gamma = arguments.scalar("gamma", arguments.consensus_factor(gamma))
    lr = arguments.scalar("lr", arguments.positive_lr("lr", lr))
    momentum = arguments.scalar("momentum", arguments.momentum_factor(momentum))
    lam_K, sigma2_K, counts_K = arguments.spectrum(lam, sigma2, counts)
    if has_modes(topology):
        mu_J, vectors_NJ = graph_modes(topology)
        variance_JK = modal_variance(lr, gamma, mu_J[:, None], lam_K, sigma2_K, momentum)
        # As in the periodic solution, so near to instability counts as unstable: mu is known up to rounding only.
        unstable_K = (variance_JK > lr**2 * sigma2_K / ROUNDING).any(0)
        # Apart, because 0 * inf is NaN where a worker has no part in an unstable mode.
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
    """The expected consensus error after each step of a run that starts with equal workers; no randomness involved.

    The recursion behind Theorem 1 with a rate and a gamma of its own in every step; what Corollary 2 says of
    gamma = (a / a_max)^p can be read off at the end of a decay.

    Args:
        topology: who mixes with whom; step t uses its round t.
        gammas: gamma of every step in [0, 1], or the schedule that computes it from the rates (a copy of it runs; give
            it planned_lrs if the library will know them).
        rates: learning rate >= 0 of every step.
        lam, sigma2, momentum, counts: as in `predicted_radius`.

    Raises ValueError for an argument out of range.

    >>> from dsgdac_accel.topology import build_topology
    >>> halving = [0.5**step for step in range(6)]
    >>> errors = radius_along(build_topology("complete", 4), AdaptiveConsensus(power=2), halving, lam=0.0, sigma2=1.0)
    >>> print(*(f"{error.frobenius:.3f}" for error in errors))
    1.732 1.561 1.526 1.518 1.516 1.515
    """
    gammas_T, rates_T = arguments.scheduled(gammas, lrs)
    momentum = arguments.scalar("momentum", arguments.momentum_factor(momentum))
    lam_K, sigma2_K, counts_K = arguments.spectrum(lam, sigma2, counts)
    variances = Dynamics(topology, lam_K, sigma2_K, momentum).along(gammas_T, rates_T)
    return [Disagreement(variance_NK[None], lam_K, counts_K) for variance_NK in variances]


def gaussian_norm(variance_K: Tensor, counts_K: Tensor) -> Tensor:
    """E||g|| of independent Gaussians g_k, shape (...) from variances (..., K), counts_k of each; to about 1e-14.

    With q = ||g||^2: E sqrt(q) = integral over t > 0 of (1 - E exp(-t q)) t^(-3/2) dt / (2 sqrt(pi)), where
    E exp(-t q) = prod_k (1 + 2 t variance_k)^(-counts_k / 2).
    """
    variance_K = variance_K.where(counts_K > 0, 0.0)  # 0 * inf is NaN
    total = (counts_K * variance_K).sum(-1)
    share_K = (variance_K / total[..., None]).nan_to_num(0.0)
    # In log t the integrand is analytic and falls like exp(-|log t| / 2), so the trapezoidal rule converges fast.
    spacing, integral = 0.25, torch.zeros_like(total)
    for log_t in torch.arange(-80.0, 80.0, spacing, dtype=torch.float64):
        exponent = -0.5 * (counts_K * torch.log1p(2 * log_t.exp() * share_K)).sum(-1)
        integral -= spacing * torch.expm1(exponent) * torch.exp(-log_t / 2)
    norm = total.sqrt() * integral / (2 * math.sqrt(math.pi))
    return torch.where(total.isinf(), torch.inf, norm.nan_to_num(0.0))
