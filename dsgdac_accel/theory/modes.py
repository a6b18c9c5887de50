"""Closed forms for one mode of the disagreement: its stationary variance, when it is stable, its bounds.

Every argument may be a number or an array that broadcasts against the others; results are float64 tensors, 0-d for
numbers. An unstable mode is an answer and no error: its variance is inf.
"""

from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.theory import arguments
from dsgdac_accel.topology import TOLERANCE, Topology


def modal_variance(alpha: Any, gamma: Any, mu: Any, lam: Any, sigma2: Any, momentum: Any = 0.0) -> Tensor:
    """Stationary variance E[z^2] of a mode, at least 0; inf where the mode is unstable.

    Without momentum this is Theorem 1: with the damping d = gamma mu + alpha lam,

        E[z^2] = alpha^2 sigma2 / (d (2 - d)).

    With momentum b (heavy ball, not in the paper) eliminating m from the two recursions leaves one of second order,
    z[t+1] = (c + b - alpha lam) z[t] - b c z[t-1] - alpha xi with c = 1 - gamma mu, whose Yule-Walker equations give

        E[z^2] = alpha^2 sigma2 (1 + b c) / ((1 - b c) s r),
        s = (1 - b) gamma mu + alpha lam,    r = (1 + b) (2 - gamma mu) - alpha lam.

    Args:
        alpha: learning rate > 0.
        gamma: consensus factor in [0, 1].
        mu: eigenvalue of I - W in [0, 2]; see `graph_modes`.
        lam: eigenvalue of the Hessian, of any sign.
        sigma2: variance >= 0 of the gradient noise in this mode, in units of the squared gradient.
        momentum: b in [0, 1), without dampening.

    Raises ValueError for an argument out of range.

    >>> modal_variance(alpha=0.5, gamma=1.0, mu=0.5, lam=1.0, sigma2=4.0)
    tensor(1., dtype=torch.float64)

    Momentum 0.9 is like a tenfold rate where mixing is slow, 100 times the variance:

    >>> print(*(f"{modal_variance(1e-3, 1e-3, 0.5, 0.0, 1.0, momentum=b).item():.3g}" for b in (0.0, 0.9)))
    0.001 0.0996
    >>> modal_variance(0.1, 0.1, mu=0.5, lam=[0.0, -1.0], sigma2=1.0)
    tensor([0.1026,    inf], dtype=torch.float64)
    """
    alpha, momentum = arguments.positive_lr("alpha", alpha), arguments.momentum_factor(momentum)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    to_1, to_minus_1 = _margins(mixing, curvature, momentum)
    carried = momentum * (1 - mixing)
    noise = alpha**2 * arguments.noise_variance(sigma2)
    variance = noise * (1 + carried) / ((1 - carried) * to_1 * to_minus_1)
    # Also without noise: a mode that is not damped has no stationary state that would be its own.
    return torch.where((to_1 > 0) & (to_minus_1 > 0), variance, torch.inf)


def is_stable(alpha: Any, gamma: Any, mu: Any, lam: Any, momentum: Any = 0.0) -> Tensor:
    """Whether a mode forgets its past: both eigenvalues of its recursion lie inside the unit circle.

    That is so if and only if, with momentum b,

        -(1 - b) gamma mu < alpha lam < (1 + b) (2 - gamma mu),

    edges excluded; b = 0 is Theorem 1's 0 < d < 2 for d = gamma mu + alpha lam. At the lower edge an eigenvalue is 1
    and the mode is a random walk; at the upper edge one is -1. (The third side of the stability triangle,
    b |1 - gamma mu| < 1, holds for all arguments in range.) So momentum widens the upper side but narrows the lower
    one: a negative curvature is unstable from |alpha lam| = (1 - b) gamma mu on, at b = 0.9 already at a tenth of what
    plain SGD bears.

    Arguments as in `modal_variance`, but alpha may be 0. Raises ValueError for an argument out of range.

    >>> is_stable(alpha=0.1, gamma=0.1, mu=0.5, lam=[-0.51, -0.5, -0.49, 19.0, 19.5]).tolist()
    [False, False, True, True, False]
    >>> is_stable(alpha=0.1, gamma=0.1, mu=0.5, lam=[-0.49, -0.049, 19.5, 37.0], momentum=0.9).tolist()
    [False, True, True, True]
    """
    alpha, momentum = arguments.nonnegative_lr("alpha", alpha), arguments.momentum_factor(momentum)
    to_1, to_minus_1 = _margins(*_mixing_and_curvature(alpha, gamma, mu, lam), momentum)
    return (to_1 > 0) & (to_minus_1 > 0)


def modal_variance_bounds(
    alpha: Any, gamma: Any, mu: Any, lam: Any, sigma2: Any, d_max: float | None = None
) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on the stationary variance, without momentum (Remark 1); inf where the mode is unstable.

        alpha^2 sigma2 / (2 d)  <=  E[z^2]  <=  alpha^2 sigma2 / ((2 - d_max) d),       d = gamma mu + alpha lam

    `d_max` < 2 bounds the damping of all stable modes given; by default it is the largest of theirs. Other arguments
    as in `modal_variance`. Raises ValueError for an argument out of range, and for a d_max that a mode exceeds.

    >>> lower, upper = modal_variance_bounds(0.5, 0.5, mu=[0.25, 1.0], lam=0.0, sigma2=1.0)
    >>> lower.tolist(), upper.tolist()
    ([1.0, 0.25], [1.3333333333333333, 0.3333333333333333])
    """
    alpha = arguments.positive_lr("alpha", alpha)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    damping = mixing + curvature
    stable = (damping > 0) & (damping < 2)
    largest = damping[stable].max().item() if stable.any() else 0.0
    d_max = largest if d_max is None else d_max
    if not largest <= d_max < 2:
        raise ValueError(
            f"d_max must be < 2 and at least the largest damping of a stable mode, {largest:g}; got {d_max!r}. "
            f"Leave it out to use that one."
        )
    noise = alpha**2 * arguments.noise_variance(sigma2)
    bounds = noise / (2 * damping), noise / ((2 - d_max) * damping)
    lower, upper = (torch.where(stable, bound, torch.inf) for bound in bounds)
    return lower, upper


def mixing_dominated_variance(alpha: Any, gamma: Any, mu: Any, sigma2: Any, momentum: Any = 0.0) -> Tensor:
    """What the variance of a mode tends to where mixing is weak and curvature weaker still:

        E[z^2] -> alpha^2 sigma2 / (2 gamma mu (1 - b)^2)            for gamma mu -> 0, alpha lam / (gamma mu) -> 0

    This is the alpha^2 / (gamma mu) of Remark 1 with its constant; hence alpha^(2 - p) under gamma ~ alpha^p
    (Corollary 2). Momentum b acts as a rate of alpha / (1 - b). inf without mixing. Arguments as in `modal_variance`.

    >>> mixing_dominated_variance(alpha=0.5, gamma=0.25, mu=0.5, sigma2=1.0)
    tensor(1., dtype=torch.float64)
    >>> modal_variance(alpha=0.5, gamma=0.25, mu=0.5, lam=0.0, sigma2=1.0)
    tensor(1.0667, dtype=torch.float64)
    """
    alpha, momentum = arguments.positive_lr("alpha", alpha), arguments.momentum_factor(momentum)
    mixing, _ = _mixing_and_curvature(alpha, gamma, mu, 0.0)
    noise = (alpha / (1 - momentum)) ** 2 * arguments.noise_variance(sigma2)
    return torch.where(mixing > 0, noise / (2 * mixing), torch.inf)


def is_mixing_dominated(alpha: Any, gamma: Any, mu: Any, lam: Any, rho: float = 0.5, momentum: Any = 0.0) -> Tensor:
    """Whether the graph damps a mode more than the curvature does: |alpha lam| <= rho gamma mu (1 - b).

    These are the low-curvature modes of Corollary 1, for a fixed rho in [0, 1). With gamma ~ alpha^p they become fewer
    as the rate falls: what disagreement is left turns to flat directions. Other arguments as in `modal_variance`.

    >>> is_mixing_dominated(alpha=0.1, gamma=0.1, mu=0.5, lam=[0.0, 0.2, 1.0]).tolist()
    [True, True, False]
    """
    if not 0 <= rho < 1:
        raise ValueError(f"rho must be in [0, 1); got {rho!r}. It bounds curvature relative to mixing.")
    alpha, momentum = arguments.positive_lr("alpha", alpha), arguments.momentum_factor(momentum)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    return curvature.abs() <= rho * mixing * (1 - momentum)


def graph_modes(topology: Topology) -> tuple[Tensor, Tensor]:
    """Eigenvalues mu of I - W but the consensus one, largest first, shape (J,) with J = n - 1, and vectors (N, J).

    Raises ValueError unless the topology is one symmetric round: others have no modes that never mix.

    >>> from dsgdac_accel.topology import build_topology
    >>> graph_modes(build_topology("ring", 4))[0]
    tensor([1.3333, 0.6667, 0.6667], dtype=torch.float64)
    """
    if not has_modes(topology):
        raise ValueError(
            f"graph modes exist for a single symmetric round; got {topology!r}. "
            f"Use predicted_radius, which solves for a whole period."
        )
    mu_N, vectors_NN = torch.linalg.eigh(torch.eye(topology.num_workers, dtype=torch.float64) - topology.matrix(0))
    # Ascending, so the consensus mode, mu = 0, is first; all workers are connected, so it is the only one.
    return mu_N[1:].flip(0).clamp(0, 2), vectors_NN[:, 1:].flip(1)


def has_modes(topology: Topology) -> bool:
    """Whether the topology is one symmetric round, up to rounding."""
    mixing_NN = topology.matrix(0)
    return topology.period == 1 and bool((mixing_NN - mixing_NN.T).abs().max() <= TOLERANCE)


def consensus_penalty(x_ND: Tensor, mixing_NN: Tensor, gamma: float, alpha: float) -> Tensor:
    """Consensus regularizer of the surrogate objective J (Eq. 5), with the weight that DSGD-AC gives it, shape ().

        gamma / (4 alpha) sum_ij W_ij ||x_i - x_j||^2,        at least 0

    For a symmetric W, a gradient step of length alpha on it is the consensus update gamma sum_j W_ij (x_j - x_i). Plain
    DSGD is gamma = 1: its weight diverges as the rate falls, that of gamma ~ alpha^p does not for p >= 1.

    Args:
        x_ND: parameters of the workers, one row each; autograd goes through.
        mixing_NN: mixing matrix W.
        gamma: in [0, 1].
        alpha: learning rate > 0.

    >>> consensus_penalty(torch.tensor([[1.0], [3.0]]), torch.full((2, 2), 0.5), gamma=0.5, alpha=0.1)
    tensor(5.)
    """
    weight = arguments.consensus_factor(gamma) / (4 * arguments.positive_lr("alpha", alpha))
    mixing_NN = mixing_NN.to(x_ND)
    if mixing_NN.shape != (len(x_ND), len(x_ND)):
        raise ValueError(
            f"mixing_NN must have a row and a column for each row of x_ND; got {tuple(mixing_NN.shape)} for "
            f"{len(x_ND)} workers."
        )
    # Row by row: all differences at once would take n copies of all workers.
    rows = [row @ (x_ND - x_D).square().sum(1) for row, x_D in zip(mixing_NN, x_ND, strict=True)]
    return float(weight) * torch.stack(rows).sum()


def _mixing_and_curvature(alpha: Tensor, gamma: Any, mu: Any, lam: Any) -> tuple[Tensor, Tensor]:
    """The two parts of the damping d: gamma mu and alpha lam."""
    return arguments.consensus_factor(gamma) * arguments.laplacian_eigenvalue(mu), alpha * arguments.curvature(lam)


def _margins(mixing: Tensor, curvature: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """The recursion's characteristic polynomial at 1 and at -1: positive where no eigenvalue has crossed them."""
    return (1 - momentum) * mixing + curvature, (1 + momentum) * (2 - mixing) - curvature
