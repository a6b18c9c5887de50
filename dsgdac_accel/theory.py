"""Predictions of the workers' disagreement by the paper's linear model (arXiv 2602.02899, Section 3.4).

Near the deployed model, the loss is approximated by a quadratic with a fixed Hessian. The consensus error then splits
into modes, one for each pair of an eigenvalue mu of the graph Laplacian I - W and an eigenvalue lam of the Hessian.
With learning rate alpha, gradient noise xi and momentum b, a mode z follows (Lemma 1)

    z <- (1 - gamma mu - alpha lam) z - alpha xi                       without momentum
    m <- b m + lam z + xi,   z <- (1 - gamma mu) z - alpha m           with momentum, as in torch.optim.SGD

`modal_variance` is the closed form of one mode. `predicted_radius` and `radius_along` solve the recursion of all
workers, in the stationary state or along a schedule, for rounds that need not commute nor be symmetric. Weight decay
acts as curvature: add it to lam. All tensors are float64.

Suffixes of shapes: N workers, K directions of the Hessian, T rounds of a period.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import TOLERANCE, Topology

ROUNDING = 1e-12
"""A period counts as unstable if the modulus of its largest eigenvalue is at least 1 minus this."""


def modal_variance(alpha: Any, gamma: Any, mu: Any, lam: Any, sigma2: Any, momentum: Any = 0.0) -> Tensor:
    """Return the stationary variance E[z^2] of a mode; inf where the mode is unstable.

    Without momentum this is Theorem 1, with the damping d = gamma mu + alpha lam:

        E[z^2] = alpha^2 sigma2 / (d (2 - d)),       stable for 0 < d < 2

    With momentum b (heavy ball, not in the paper), eliminating m from the two recursions gives a second-order one,
    z[t+1] = (c + b - alpha lam) z[t] - b c z[t-1] - alpha xi with c = 1 - gamma mu. Its Yule-Walker equations give

        E[z^2] = alpha^2 sigma2 (1 + b c) / ((1 - b c) s r),       stable for s > 0 and r > 0
        s = (1 - b) gamma mu + alpha lam,    r = (1 + b) (2 - gamma mu) - alpha lam

    s and r are the characteristic polynomial of the recursion at 1 and -1. (The third side of the stability triangle,
    b |c| < 1, holds for all arguments in range.)

    Args:
        alpha: learning rate > 0. Like all arguments, a number or an array that broadcasts against the others.
        gamma: consensus factor in [0, 1].
        mu: eigenvalue of I - W in [0, 2].
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
    alpha, gamma, mu = _numbers("alpha", alpha), _numbers("gamma", gamma), _numbers("mu", mu)
    lam, sigma2, b = _numbers("lam", lam), _numbers("sigma2", sigma2), _numbers("momentum", momentum)
    mixing, curvature = gamma * mu.clamp(0, 2), alpha * lam
    s, r = (1 - b) * mixing + curvature, (1 + b) * (2 - mixing) - curvature
    bc = b * (1 - mixing)
    variance = alpha**2 * sigma2 * (1 + bc) / ((1 - bc) * s * r)
    # Even without noise, a mode that is not damped has no unique stationary state.
    return torch.where((s > 0) & (r > 0), variance, torch.inf)


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

    The covariance at the end of a period of rounds solves the discrete Lyapunov equation S = F S F' + Q of the whole
    period. For a single symmetric round, the variances are those of `modal_variance`.

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
    gamma, lr, momentum = _scalar("gamma", gamma), _scalar("lr", lr), _scalar("momentum", momentum)
    lam_K, sigma2_K, counts_K = _spectrum(lam, sigma2, counts)
    rounds = [
        _recursion(topology.matrix(step), gamma, lr, lam_K, sigma2_K, momentum) for step in range(topology.period)
    ]
    F, Q = rounds[0]
    for A, added in rounds[1:]:
        F, Q = A @ F, A @ Q @ A.mT + added
    stable_K11 = (torch.linalg.eigvals(F).abs().amax(-1) < 1 - ROUNDING)[:, None, None]
    covariance, F = Q, F.where(stable_K11, 0.0)
    while F.abs().max() > torch.finfo(F.dtype).tiny ** 0.25:  # S = sum_t F^t Q F'^t, in each pass twice the terms
        covariance, F = covariance + F @ covariance @ F.mT, F @ F
    variances = []
    for A, added in rounds:
        covariance = A @ covariance @ A.mT + added
        variances.append(_variance_of_workers(covariance.where(stable_K11, torch.inf)))
    return Disagreement(torch.stack(variances), lam_K, counts_K)


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
    lrs_T = torch.atleast_1d(_numbers("lrs", lrs)).tolist()
    if isinstance(gammas, AdaptiveConsensus):
        schedule = copy.deepcopy(gammas)  # gamma() changes the state of a schedule
        gammas = [schedule.gamma(step=step, lr=lr) for step, lr in enumerate(lrs_T)]
    gammas_T = torch.atleast_1d(_numbers("gammas", gammas)).tolist()
    if len(gammas_T) != len(lrs_T):
        raise ValueError(
            f"gammas and lrs must have one entry for each step; got {len(gammas_T)} gammas and {len(lrs_T)} lrs. "
            f"Pass an AdaptiveConsensus to compute gamma from the lrs."
        )
    lam_K, sigma2_K, counts_K = _spectrum(lam, sigma2, counts)
    momentum = _scalar("momentum", momentum)
    size = 2 * topology.num_workers
    covariance = torch.zeros(len(lam_K), size, size, dtype=torch.float64, device="cpu")
    errors = []
    for step, (gamma, lr) in enumerate(zip(gammas_T, lrs_T, strict=True)):
        A, added = _recursion(topology.matrix(step), gamma, lr, lam_K, sigma2_K, momentum)
        covariance = A @ covariance @ A.mT + added
        errors.append(Disagreement(_variance_of_workers(covariance)[None], lam_K, counts_K))
    return errors


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


def _recursion(
    mixing_NN: Tensor, gamma: float, lr: float, lam_K: Tensor, sigma2_K: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return A and the noise B B' of one step of the covariance, S <- A S A' + B B', each (K, 2N, 2N).

    For each direction of the Hessian, the state is (z_N, m_N): the deviations of the workers and their momentum.

        (z, m) <- P [[I - gamma (I - W) - lr lam, -lr b], [lam, b]] (z, m) + sigma P [-lr, 1] xi

    where P = I - 11'/n removes the mean of the workers.
    """
    eye_NN = torch.eye(len(mixing_NN), dtype=torch.float64, device="cpu")
    center_NN = eye_NN - 1 / len(mixing_NN)
    m_row = torch.cat([lam_K[:, None, None] * eye_NN, (momentum * eye_NN).expand(len(lam_K), -1, -1)], -1)
    z_row = torch.cat([eye_NN - gamma * (eye_NN - mixing_NN), torch.zeros_like(eye_NN)], -1) - lr * m_row
    B = torch.cat([-lr * center_NN, center_NN])
    return torch.cat([center_NN @ z_row, center_NN @ m_row], -2), sigma2_K[:, None, None] * (B @ B.T)


def _variance_of_workers(covariance: Tensor) -> Tensor:
    variance_NK = covariance.diagonal(dim1=-2, dim2=-1)[:, : covariance.shape[-1] // 2].T
    # Rounding can leave a variance of 0 slightly negative, and an overflow gives inf - inf.
    return variance_NK.where(variance_NK.isfinite(), torch.inf).clamp(min=0)


# ---- range checks

_NO_STEP = "Without a local step there is no noise and nothing to predict"
_FACTOR = "Algorithm 1 uses (lr / max_lr)^p"
RANGES: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "alpha": ("> 0", lambda x: x > 0, _NO_STEP),
    "lr": ("> 0", lambda x: x > 0, _NO_STEP),
    "lrs": (">= 0", lambda x: x >= 0, "Local steps go against the gradient"),
    "gamma": ("in [0, 1]", lambda x: (x >= 0) & (x <= 1), _FACTOR),
    "gammas": ("in [0, 1]", lambda x: (x >= 0) & (x <= 1), _FACTOR),
    "mu": ("in [0, 2]", lambda x: (x - 1).abs() <= 1 + TOLERANCE, "It is 1 minus an eigenvalue of the mixing matrix"),
    "sigma2": (">= 0", lambda x: x >= 0, "It is a variance, the square of the noise"),
    "momentum": ("in [0, 1)", lambda x: (x >= 0) & (x < 1), "Use 0 for plain SGD"),
    "counts": (">= 0", lambda x: x >= 0, "It is the number of directions that share a curvature"),
}
"""Range of each argument: its name in messages, the check and the advice. Curvature may have any sign."""


def _numbers(name: str, value: Any) -> Tensor:
    """Convert finite real numbers in the range of the argument to a float64 tensor on the CPU."""
    # Through NumPy, because torch converts Python floats to float32.
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be a real number or an array of them; got {value!r}. Convert it first.")
    numbers = torch.from_numpy(array.astype(np.float64))
    finite = ("finite", torch.isfinite, "Leave out directions that were not measured")
    for rule, holds, advice in (finite, RANGES.get(name, finite)):
        if not holds(numbers).all():
            raise ValueError(f"{name} must be {rule}; got {numbers[~holds(numbers)][0].item()!r}. {advice}.")
    return numbers


def _scalar(name: str, value: Any) -> float:
    number = _numbers(name, value)
    if number.numel() != 1:
        raise ValueError(f"{name} must be one number; got shape {tuple(number.shape)}. Call once for each value.")
    return float(number)


def _spectrum(lam: Any, sigma2: Any, counts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return curvature, noise variance and number of directions, each of shape (K,). One number is repeated K times."""
    arguments = {"lam": lam, "sigma2": sigma2, "counts": 1.0 if counts is None else counts}
    given = {name: _numbers(name, value) for name, value in arguments.items()}
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    lists = set(shapes.values()) - {(), (1,)}
    if len(lists) > 1 or any(len(shape) > 1 or 0 in shape for shape in lists):
        raise ValueError(
            f"lam, sigma2 and counts must be lists with one entry per direction, or single numbers; got shapes "
            f"{shapes}. Flatten them to one length."
        )
    lam_K, sigma2_K, counts_K = torch.broadcast_tensors(*(torch.atleast_1d(value) for value in given.values()))
    return lam_K, sigma2_K, counts_K
