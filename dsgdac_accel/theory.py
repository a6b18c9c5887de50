"""Predictions of the workers' disagreement by the paper's linear model (arXiv 2602.02899, Section 3.4).

Near the deployed model, the loss is approximated by a quadratic with a fixed Hessian. The consensus error then splits
into modes, one for each pair of an eigenvalue mu of the graph Laplacian I - W and an eigenvalue lam of the Hessian.
With learning rate alpha, gradient noise xi and momentum b, a mode z follows (Lemma 1)

    z <- (1 - gamma mu - alpha lam) z - alpha xi                       without momentum
    m <- b m + lam z + xi,   z <- (1 - gamma mu) z - alpha m           with momentum, as in torch.optim.SGD

The closed forms of one mode are in the paper's letters. `predicted_radius` and `radius_along` sum them over a topology,
in the stationary state or along a schedule. `simulate_quadratic` runs the algorithm to check the predictions. Weight
decay acts as curvature: add it to lam. All arrays are float64.

Suffixes of shapes: N workers, J modes of the graph, K directions of the Hessian, C chains of a simulation, T rounds of
a period.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsgdac_accel.checks import check_integer
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import TOLERANCE, Topology

ROUNDING = 1e-12
"""A period counts as unstable if the modulus of its largest eigenvalue is at least 1 minus this."""


# ---- one mode: stationary variance, stability and bounds
#
# Each argument is a number or an array that broadcasts against the others. Results are float64 tensors, 0-d for
# numbers. An unstable mode is not an error: its variance is inf.


def modal_variance(alpha: Any, gamma: Any, mu: Any, lam: Any, sigma2: Any, momentum: Any = 0.0) -> Tensor:
    """Return the stationary variance E[z^2] of a mode; inf where the mode is unstable.

    Without momentum this is Theorem 1, with the damping d = gamma mu + alpha lam:

        E[z^2] = alpha^2 sigma2 / (d (2 - d))

    With momentum b (heavy ball, not in the paper), eliminating m from the two recursions gives a second-order one,
    z[t+1] = (c + b - alpha lam) z[t] - b c z[t-1] - alpha xi with c = 1 - gamma mu. Its Yule-Walker equations give

        E[z^2] = alpha^2 sigma2 (1 + b c) / ((1 - b c) s r)
        s = (1 - b) gamma mu + alpha lam,    r = (1 + b) (2 - gamma mu) - alpha lam

    Args:
        alpha: learning rate > 0.
        gamma: consensus factor in [0, 1].
        mu: eigenvalue of I - W in [0, 2]; see `graph_modes`.
        lam: eigenvalue of the Hessian, of any sign.
        sigma2: variance >= 0 of the gradient noise in this mode, in units of the squared gradient.
        momentum: b in [0, 1), without dampening.

    Raises:
        ValueError: an argument is out of range.

    >>> modal_variance(alpha=0.5, gamma=1.0, mu=0.5, lam=1.0, sigma2=4.0)
    tensor(1., dtype=torch.float64)

    Where mixing is slow, momentum 0.9 acts as a tenfold learning rate, which gives 100 times the variance:

    >>> print(*(f"{modal_variance(1e-3, 1e-3, 0.5, 0.0, 1.0, momentum=b).item():.3g}" for b in (0.0, 0.9)))
    0.001 0.0996
    >>> modal_variance(0.1, 0.1, mu=0.5, lam=[0.0, -1.0], sigma2=1.0)
    tensor([0.1026,    inf], dtype=torch.float64)
    """
    alpha, momentum = _positive_lr("alpha", alpha), _momentum_factor(momentum)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    s, r = _margins(mixing, curvature, momentum)
    bc = momentum * (1 - mixing)
    variance = alpha**2 * _noise_variance(sigma2) * (1 + bc) / ((1 - bc) * s * r)
    # Even without noise, a mode that is not damped has no unique stationary state.
    return torch.where((s > 0) & (r > 0), variance, torch.inf)


def is_stable(alpha: Any, gamma: Any, mu: Any, lam: Any, momentum: Any = 0.0) -> Tensor:
    """Return whether a mode is stable: both eigenvalues of its recursion lie inside the unit circle.

    With momentum b, this holds if and only if

        -(1 - b) gamma mu < alpha lam < (1 + b) (2 - gamma mu)

    With b = 0 this is Theorem 1's 0 < d < 2 for d = gamma mu + alpha lam. At the lower edge an eigenvalue is 1 and the
    mode is a random walk; at the upper edge an eigenvalue is -1. (The third side of the stability triangle,
    b |1 - gamma mu| < 1, holds for all arguments in range.)

    Momentum widens the upper side and narrows the lower one: a negative curvature is unstable from
    |alpha lam| = (1 - b) gamma mu on, which at b = 0.9 is a tenth of the limit of plain SGD.

    Args:
        alpha: learning rate >= 0.
        gamma, mu, lam, momentum: see `modal_variance`.

    Raises:
        ValueError: an argument is out of range.

    >>> is_stable(alpha=0.1, gamma=0.1, mu=0.5, lam=[-0.51, -0.5, -0.49, 19.0, 19.5]).tolist()
    [False, False, True, True, False]
    >>> is_stable(alpha=0.1, gamma=0.1, mu=0.5, lam=[-0.49, -0.049, 19.5, 37.0], momentum=0.9).tolist()
    [False, True, True, True]
    """
    alpha, momentum = _nonnegative_lr("alpha", alpha), _momentum_factor(momentum)
    s, r = _margins(*_mixing_and_curvature(alpha, gamma, mu, lam), momentum)
    return (s > 0) & (r > 0)


def modal_variance_bounds(
    alpha: Any, gamma: Any, mu: Any, lam: Any, sigma2: Any, d_max: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return a lower and an upper bound of the stationary variance without momentum (Remark 1).

        alpha^2 sigma2 / (2 d)  <=  E[z^2]  <=  alpha^2 sigma2 / ((2 - d_max) d),       d = gamma mu + alpha lam

    Both are inf where the mode is unstable.

    Args:
        alpha, gamma, mu, lam, sigma2: see `modal_variance`.
        d_max: upper bound < 2 of the damping of the stable modes. By default, the largest damping of a stable mode.

    Raises:
        ValueError: an argument is out of range, or the damping of a stable mode exceeds d_max.

    >>> lower, upper = modal_variance_bounds(0.5, 0.5, mu=[0.25, 1.0], lam=0.0, sigma2=1.0)
    >>> lower.tolist(), upper.tolist()
    ([1.0, 0.25], [1.3333333333333333, 0.3333333333333333])
    """
    alpha = _positive_lr("alpha", alpha)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    damping = mixing + curvature
    stable = (damping > 0) & (damping < 2)
    largest = damping[stable].max().item() if stable.any() else 0.0
    d_max = largest if d_max is None else d_max
    if not largest <= d_max < 2:
        raise ValueError(
            f"d_max must be < 2 and at least the largest damping of a stable mode, {largest:g}; got {d_max!r}. "
            f"Leave it out to use that value."
        )
    noise = alpha**2 * _noise_variance(sigma2)
    bounds = noise / (2 * damping), noise / ((2 - d_max) * damping)
    lower, upper = (torch.where(stable, bound, torch.inf) for bound in bounds)
    return lower, upper


def mixing_dominated_variance(alpha: Any, gamma: Any, mu: Any, sigma2: Any, momentum: Any = 0.0) -> Tensor:
    """Return the limit of the variance of a mode for weak mixing and even weaker curvature.

        E[z^2] -> alpha^2 sigma2 / (2 gamma mu (1 - b)^2)            for gamma mu -> 0, alpha lam / (gamma mu) -> 0

    This is the alpha^2 / (gamma mu) of Remark 1 with its constant. With gamma ~ alpha^p it is ~ alpha^(2 - p)
    (Corollary 2). Momentum b acts as a learning rate of alpha / (1 - b). Without mixing the limit is inf. For the
    arguments see `modal_variance`.

    >>> mixing_dominated_variance(alpha=0.5, gamma=0.25, mu=0.5, sigma2=1.0)
    tensor(1., dtype=torch.float64)
    >>> modal_variance(alpha=0.5, gamma=0.25, mu=0.5, lam=0.0, sigma2=1.0)
    tensor(1.0667, dtype=torch.float64)
    """
    alpha, momentum = _positive_lr("alpha", alpha), _momentum_factor(momentum)
    mixing, _ = _mixing_and_curvature(alpha, gamma, mu, 0.0)
    noise = (alpha / (1 - momentum)) ** 2 * _noise_variance(sigma2)
    return torch.where(mixing > 0, noise / (2 * mixing), torch.inf)


def is_mixing_dominated(alpha: Any, gamma: Any, mu: Any, lam: Any, rho: float = 0.5, momentum: Any = 0.0) -> Tensor:
    """Return whether mixing damps a mode more than curvature does.

        |alpha lam| <= rho gamma mu (1 - b)

    These are the low-curvature modes of Corollary 1, for a fixed rho in [0, 1). With gamma ~ alpha^p and p > 1, there
    are fewer of them as alpha falls, so the remaining disagreement turns to flat directions. For the other arguments
    see `modal_variance`.

    >>> is_mixing_dominated(alpha=0.1, gamma=0.1, mu=0.5, lam=[0.0, 0.2, 1.0]).tolist()
    [True, True, False]
    """
    if not 0 <= rho < 1:
        raise ValueError(f"rho must be in [0, 1); got {rho!r}. It bounds the curvature relative to mixing.")
    alpha, momentum = _positive_lr("alpha", alpha), _momentum_factor(momentum)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    return curvature.abs() <= rho * mixing * (1 - momentum)


def graph_modes(topology: Topology) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of I - W without the consensus mode mu = 0.

    Returns:
        mu, largest first, shape (J,) with J = n - 1; and the unit eigenvectors as columns, shape (N, J).

    Raises:
        ValueError: the topology is not a single symmetric round. Other topologies have no common modes.

    >>> from dsgdac_accel.topology import build_topology
    >>> graph_modes(build_topology("ring", 4))[0]
    tensor([1.3333, 0.6667, 0.6667], dtype=torch.float64)
    """
    if not has_modes(topology):
        raise ValueError(
            f"graph modes exist for a single symmetric round; got {topology!r}. "
            f"Use predicted_radius, which solves for a whole period."
        )
    mu_N, vectors_NN = torch.linalg.eigh(
        torch.eye(topology.num_workers, dtype=torch.float64, device="cpu") - topology.matrix(0)
    )
    # eigh sorts ascending, so the consensus mode mu = 0 is first. It is the only one, as all workers are connected.
    return mu_N[1:].flip(0).clamp(0, 2), vectors_NN[:, 1:].flip(1)


def has_modes(topology: Topology) -> bool:
    """Return whether the topology is a single symmetric round, up to rounding."""
    mixing_NN = topology.matrix(0)
    return topology.period == 1 and bool((mixing_NN - mixing_NN.T).abs().max() <= TOLERANCE)


def consensus_penalty(x_ND: Tensor, mixing_NN: Tensor, gamma: float, alpha: float) -> Tensor:
    """Return the consensus regularizer of the surrogate objective J (Eq. 5) with the weight of DSGD-AC, shape ().

        gamma / (4 alpha) sum_ij W_ij ||x_i - x_j||^2

    For a symmetric W, a gradient step of length alpha on it is the consensus update gamma sum_j W_ij (x_j - x_i). The
    weight of plain DSGD (gamma = 1) diverges as alpha falls; the weight of gamma ~ alpha^p with p >= 1 does not.

    Args:
        x_ND: parameters of the workers, one row each. Autograd works through it.
        mixing_NN: mixing matrix W.
        gamma: consensus factor in [0, 1].
        alpha: learning rate > 0.

    Raises:
        ValueError: an argument is out of range, or the shapes do not match.

    >>> consensus_penalty(torch.tensor([[1.0], [3.0]]), torch.full((2, 2), 0.5), gamma=0.5, alpha=0.1)
    tensor(5.)
    """
    weight = _consensus_factor(gamma) / (4 * _positive_lr("alpha", alpha))
    mixing_NN = mixing_NN.to(x_ND)
    if mixing_NN.shape != (len(x_ND), len(x_ND)):
        raise ValueError(
            f"mixing_NN must have one row and one column per row of x_ND; got {tuple(mixing_NN.shape)} for "
            f"{len(x_ND)} workers."
        )
    # Row by row, because all differences at once would need n copies of all workers.
    rows = [row @ (x_ND - x_D).square().sum(1) for row, x_D in zip(mixing_NN, x_ND, strict=True)]
    return float(weight) * torch.stack(rows).sum()


def _mixing_and_curvature(alpha: Tensor, gamma: Any, mu: Any, lam: Any) -> tuple[Tensor, Tensor]:
    """Return the two parts of the damping d: gamma mu and alpha lam."""
    return _consensus_factor(gamma) * _laplacian_eigenvalue(mu), alpha * _curvature(lam)


def _margins(mixing: Tensor, curvature: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """Return s = (1 - b) gamma mu + alpha lam and r = (1 + b) (2 - gamma mu) - alpha lam.

    They are the characteristic polynomial of the recursion at 1 and -1; both are positive if the mode is stable.
    """
    return (1 - momentum) * mixing + curvature, (1 + momentum) * (2 - mixing) - curvature


# ---- the consensus error of a topology


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
    gamma = _scalar("gamma", _consensus_factor(gamma))
    lr = _scalar("lr", _positive_lr("lr", lr))
    momentum = _scalar("momentum", _momentum_factor(momentum))
    lam_K, sigma2_K, counts_K = _spectrum(lam, sigma2, counts)
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
    gammas_T, lrs_T = _scheduled(gammas, lrs)
    momentum = _scalar("momentum", _momentum_factor(momentum))
    lam_K, sigma2_K, counts_K = _spectrum(lam, sigma2, counts)
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


# ---- the covariance of the disagreement, for any topology


class Dynamics:
    """Recursion of the covariance S of all directions, shape (K, 2N, 2N).

    For each direction k of the Hessian, the state is (z_N, m_N): the deviations of the workers and their momentum. One
    step at learning rate lr with momentum b is

        (z, m) <- A (z, m) + B xi,    A = [[I - gamma (I - W) - lr lam, -lr b], [lam, b]],    B = [-lr, 1]

    and the covariance follows S <- A S A' + sigma2 B P B', where P = I - 11'/n removes the mean of the workers. Rounds
    need not commute nor be symmetric.

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


# ---- the algorithm on a quadratic, to check the predictions; it uses nothing of them


class Estimate(NamedTuple):
    """A mean over independent chains."""

    value: Tensor
    standard_error: Tensor


@dataclass(frozen=True, eq=False)
class QuadraticRun:
    """Measurements of `simulate_quadratic`.

    The steps of a chain are correlated, but the chains are independent. The standard errors therefore come from the
    spread of the chains' time averages.
    """

    topology: Topology

    moments_CTKNN: Tensor
    """Time average of (u_k' delta_i) (u_k' delta_j) after each round of a period, for every chain."""

    radius_C: Tensor
    """Time average of mean_i ||delta_i||, for every chain."""

    def modal_variance(self) -> Estimate:
        """Return E[z_jk^2] of each mode of a single symmetric round, shape (J, K), in the order of `graph_modes`."""
        _, vectors_NJ = graph_modes(self.topology)
        moments_CKNN = self.moments_CTKNN[:, 0]
        return _over_chains(torch.einsum("nj,cknm,mj->cjk", vectors_NJ, moments_CKNN, vectors_NJ))

    def variance(self) -> Estimate:
        """Return E[(u_k' delta_i)^2] after each round of a period, shape (T, N, K)."""
        return _over_chains(self.moments_CTKNN.diagonal(dim1=-2, dim2=-1).mT)

    def frobenius(self) -> Estimate:
        """Return the root mean square of ||Delta||_F, shape ()."""
        square = _over_chains(self.moments_CTKNN.diagonal(dim1=-2, dim2=-1).sum((-2, -1)).mean(-1))
        root = square.value.sqrt()
        return Estimate(root, square.standard_error / (2 * root))

    def radius(self) -> Estimate:
        """Return the mean distance of a worker from the average, shape ()."""
        return _over_chains(self.radius_C)


def simulate_quadratic(
    topology: Topology,
    gamma: float,
    lr: float,
    lam: Any,
    sigma2: Any,
    momentum: float = 0.0,
    steps: int = 2000,
    burn_in: int | None = None,
    chains: int = 64,
    seed: int = 0,
) -> QuadraticRun:
    """Run DSGD-AC at constant gamma and lr on f(x) = sum_k lam_k x_k^2 / 2 and measure the disagreement.

    Args:
        topology, gamma, lr, lam, sigma2, momentum: see `predicted_radius`; the noise is Gaussian.
        steps: measured steps of each chain, rounded up to whole periods of the topology.
        burn_in: steps before the measurement, rounded up likewise. By default, enough to bring the variance to within
            1e-6 of its limit.
        chains: number of independent runs, at least 2. Their spread gives the standard errors.
        seed: seed of the noise.

    Raises:
        ValueError: an argument is out of range, or the settings are unstable and have no stationary state.

    >>> from dsgdac_accel.topology import build_topology
    >>> ring = build_topology("one_peer_ring", 8)
    >>> settings = dict(gamma=0.5, lr=0.1, lam=[5.0, 0.0], sigma2=1.0, momentum=0.9)
    >>> measured, error = simulate_quadratic(ring, **settings, steps=500).frobenius()
    >>> bool(abs(measured - predicted_radius(ring, **settings).frobenius) < 4 * error)
    True
    """
    gamma = _scalar("gamma", _consensus_factor(gamma))
    lr = _scalar("lr", _positive_lr("lr", lr))
    momentum = _scalar("momentum", _momentum_factor(momentum))
    lam_K, sigma2_K, _ = _spectrum(lam, sigma2)
    chains = check_integer("chains", chains, minimum=2)
    period = topology.period
    memory = slowest_decay(topology, gamma, lr, lam_K, momentum)
    if burn_in is None:
        burn_in = math.ceil(math.log(1e-6) / (2 * math.log(memory))) if memory > 0 else 1
    kept = math.ceil(check_integer("steps", steps, minimum=1) / period)
    skipped = math.ceil(check_integer("burn_in", burn_in, minimum=0) / period) * period
    num_steps = skipped + kept * period
    run = quadratic_chains(topology, [gamma] * num_steps, [lr] * num_steps, lam_K, sigma2_K, momentum, chains, seed)
    moments_CTKNN = torch.zeros(
        chains, period, len(lam_K), topology.num_workers, topology.num_workers, device="cpu"
    ).double()
    radius_C = torch.zeros(chains, dtype=torch.float64, device="cpu")
    for step, delta_NCK in enumerate(islice(run, skipped, None)):
        moments_CTKNN[:, step % period] += torch.einsum("nck,mck->cknm", delta_NCK, delta_NCK)
        radius_C += delta_NCK.norm(dim=-1).mean(0)
    return QuadraticRun(topology, moments_CTKNN / kept, radius_C / (kept * period))


def quadratic_chains(
    topology: Topology,
    gammas: AdaptiveConsensus | Sequence[float],
    lrs: Sequence[float],
    lam: Any,
    sigma2: Any,
    momentum: float = 0.0,
    chains: int = 64,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield the deviations of all workers after each step of many independent runs, float64, shape (N, C, K).

    All workers start equal. The expectation of these samples is `radius_along`. Unstable settings run as well.

    Args:
        topology, gammas, lrs, lam, sigma2, momentum: see `radius_along`.
        chains: number of independent runs, at least 1.
        seed: seed of the noise.

    Raises:
        ValueError: an argument is out of range.

    >>> from dsgdac_accel.topology import build_topology
    >>> pair = build_topology("complete", 2)
    >>> for delta_NCK in quadratic_chains(pair, gammas=[1.0] * 3, lrs=[0.1] * 3, lam=[2.0, 0.0], sigma2=[0.0, 1.0]):
    ...     print(delta_NCK.shape, delta_NCK[..., 0].abs().max().item())
    torch.Size([2, 64, 2]) 0.0
    torch.Size([2, 64, 2]) 0.0
    torch.Size([2, 64, 2]) 0.0
    """
    lam_K, sigma2_K, _ = _spectrum(lam, sigma2)
    momentum = _scalar("momentum", _momentum_factor(momentum))
    chains = check_integer("chains", chains, minimum=1)
    generator = torch.Generator().manual_seed(seed)
    schedule = zip(*_scheduled(gammas, lrs), strict=True)
    return _chains(topology, schedule, lam_K, sigma2_K, momentum, chains, generator)


def _chains(
    topology: Topology,
    schedule: Iterable[tuple[float, float]],
    lam_K: Tensor,
    sigma2_K: Tensor,
    momentum: float,
    chains: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    x_NCK = torch.zeros(topology.num_workers, chains, len(lam_K), dtype=torch.float64, device="cpu")
    momentum_NCK = torch.zeros_like(x_NCK)
    for step, (gamma, lr) in enumerate(schedule):
        noise_NCK = sigma2_K.sqrt() * torch.randn(x_NCK.shape, dtype=torch.float64, generator=generator, device="cpu")
        x_NCK, momentum_NCK = quadratic_step(
            x_NCK, momentum_NCK, lam_K * x_NCK + noise_NCK, topology.matrix(step), gamma, lr, momentum
        )
        # Remove the mean of the workers. With negative curvature it grows without bound, and its rounding errors would
        # exceed the bounded deviations. They do not depend on it: mixing ignores the mean, and the gradient is linear.
        x_NCK, momentum_NCK = x_NCK - x_NCK.mean(0), momentum_NCK - momentum_NCK.mean(0)
        yield x_NCK


def quadratic_step(
    x_NCK: Tensor,
    momentum_NCK: Tensor,
    gradient_NCK: Tensor,
    mixing_NN: Tensor,
    gamma: float,
    lr: float,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """Return x and the momentum buffers of all chains after one step of Algorithm 1 with torch.optim.SGD's momentum.

    m_i <- b m_i + g_i,     x_i <- x_i - lr m_i + gamma sum_j W_ij (x_j - x_i)
    """
    momentum_NCK = momentum * momentum_NCK + gradient_NCK
    mixed_NCK = (mixing_NN @ x_NCK.flatten(1)).view_as(x_NCK)
    return x_NCK - lr * momentum_NCK + gamma * (mixed_NCK - x_NCK), momentum_NCK


def slowest_decay(topology: Topology, gamma: float, lr: float, lam_K: Tensor, momentum: float) -> float:
    """Return the factor per step by which the slowest disagreement decays; raise ValueError if one does not decay."""
    decay_K = Dynamics(topology, lam_K, torch.zeros_like(lam_K), momentum).decay(gamma, lr)
    worst = int(decay_K.argmax())
    if decay_K[worst] >= 1 - ROUNDING:
        raise ValueError(
            f"a stationary state needs stable modes; with gamma={gamma:g}, lr={lr:g} and momentum={momentum:g} the "
            f"direction of curvature {lam_K[worst].item():g} grows by {decay_K[worst].item():g} per period. "
            f"Raise gamma if the curvature is <= 0, lower lr if it is large; see is_stable."
        )
    return float(decay_K[worst]) ** (1 / topology.period)


def _over_chains(value_C: Tensor) -> Estimate:
    return Estimate(value_C.mean(0), value_C.std(0) / math.sqrt(len(value_C)))


# ---- range checks of arguments: each returns a float64 tensor or raises a ValueError with the name


def _positive_lr(name: str, lr: Any) -> Tensor:
    """Check learning rates > 0."""
    lr = _finite(name, lr)
    _refuse(name, lr, lr <= 0, "> 0", "Without a local step there is no noise and nothing to predict")
    return lr


def _nonnegative_lr(name: str, lr: Any) -> Tensor:
    """Check learning rates >= 0."""
    lr = _finite(name, lr)
    _refuse(name, lr, lr < 0, ">= 0", "Local steps go against the gradient")
    return lr


def _consensus_factor(gamma: Any, name: str = "gamma") -> Tensor:
    """Check values of gamma in [0, 1]."""
    gamma = _finite(name, gamma)
    _refuse(name, gamma, (gamma < 0) | (gamma > 1), "in [0, 1]", "Algorithm 1 uses (lr / max_lr)^p")
    return gamma


def _laplacian_eigenvalue(mu: Any) -> Tensor:
    """Check eigenvalues of I - W in [0, 2]. Values that rounding moved outside are clamped to the range."""
    mu = _finite("mu", mu)
    outside = (mu < -TOLERANCE) | (mu > 2 + TOLERANCE)
    _refuse("mu", mu, outside, "in [0, 2]", "It is an eigenvalue of I - W: 1 minus an eigenvalue of the mixing matrix")
    return mu.clamp(0, 2)


def _noise_variance(sigma2: Any) -> Tensor:
    """Check variances >= 0."""
    sigma2 = _finite("sigma2", sigma2)
    _refuse("sigma2", sigma2, sigma2 < 0, ">= 0", "It is a variance, the square of the noise")
    return sigma2


def _curvature(lam: Any) -> Tensor:
    """Check eigenvalues of the Hessian, which may have any sign."""
    return _finite("lam", lam)


def _momentum_factor(momentum: Any) -> Tensor:
    """Check values of momentum in [0, 1)."""
    momentum = _finite("momentum", momentum)
    _refuse("momentum", momentum, (momentum < 0) | (momentum >= 1), "in [0, 1)", "Use 0 for plain SGD")
    return momentum


def _scalar(name: str, value: Tensor) -> float:
    """Return the only number in `value`; refuse several."""
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number; got shape {tuple(value.shape)}. Call once for each value.")
    return float(value)


def _spectrum(lam: Any, sigma2: Any, counts: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return curvature, noise variance and number of directions, each of shape (K,). One number is repeated K times."""
    counts = _finite("counts", 1.0 if counts is None else counts)
    _refuse("counts", counts, counts < 0, ">= 0", "It is the number of directions that share a curvature")
    given = {"lam": _curvature(lam), "sigma2": _noise_variance(sigma2), "counts": counts}
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    lists = set(shapes.values()) - {(), (1,)}
    if len(lists) > 1 or any(len(shape) > 1 or 0 in shape for shape in lists):
        raise ValueError(
            f"lam, sigma2 and counts must be lists with one entry per direction, or single numbers; got shapes "
            f"{shapes}. Flatten them to one length."
        )
    lam_K, sigma2_K, counts_K = torch.broadcast_tensors(*(torch.atleast_1d(value) for value in given.values()))
    return lam_K, sigma2_K, counts_K


def _scheduled(gammas: AdaptiveConsensus | Sequence[float], lrs: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return gamma and lr of every step. An lr may be 0, as at the start of a warm-up or the end of a decay."""
    lrs_T = _one_per_step("lrs", _nonnegative_lr("lrs", lrs))
    if isinstance(gammas, AdaptiveConsensus):
        schedule = copy.deepcopy(gammas)  # gamma() changes the state of a schedule
        gammas = [schedule.gamma(step=step, lr=lr) for step, lr in enumerate(lrs_T)]
    gammas_T = _one_per_step("gammas", _consensus_factor(gammas, name="gammas"))
    if len(gammas_T) != len(lrs_T):
        raise ValueError(
            f"gammas and lrs must have one entry for each step; got {len(gammas_T)} gammas and {len(lrs_T)} lrs. "
            f"Pass an AdaptiveConsensus to compute gamma from the lrs."
        )
    return gammas_T, lrs_T


def _one_per_step(name: str, value: Tensor) -> list[float]:
    if value.ndim != 1 or not len(value):
        raise ValueError(
            f"{name} must be a list with one entry per step, at least one; got shape {tuple(value.shape)}. "
            f"Repeat a constant: [0.1] * steps."
        )
    return value.tolist()


def _finite(name: str, value: Any) -> Tensor:
    """Convert finite real numbers to a float64 tensor on the CPU."""
    # Through NumPy, because torch converts Python floats to float32.
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be a real number or an array of them; got {value!r}. Convert it first.")
    number = torch.from_numpy(array.astype(np.float64))
    _refuse(name, number, ~number.isfinite(), "finite", "Leave out directions that were not measured")
    return number


def _refuse(name: str, value: Tensor, bad: Tensor, rule: str, advice: str) -> None:
    if bad.any():
        raise ValueError(f"{name} must be {rule}; got {value[bad].flatten()[0].item()!r}. {advice}.")
