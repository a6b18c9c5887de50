"""Closed forms for one mode of the disagreement: stationary variance, stability and bounds.

Each argument is a number or an array that broadcasts against the others. Results are float64 tensors, 0-d for numbers.
An unstable mode is not an error: its variance is inf.
"""

from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.theory import arguments
from dsgdac_accel.topology import TOLERANCE, Topology


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
    alpha, momentum = arguments.positive_lr("alpha", alpha), arguments.momentum_factor(momentum)
    mixing, curvature = _mixing_and_curvature(alpha, gamma, mu, lam)
    s, r = _margins(mixing, curvature, momentum)
    bc = momentum * (1 - mixing)
    variance = alpha**2 * arguments.noise_variance(sigma2) * (1 + bc) / ((1 - bc) * s * r)
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
    alpha, momentum = arguments.nonnegative_lr("alpha", alpha), arguments.momentum_factor(momentum)
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
    alpha = arguments.positive_lr("alpha", alpha)
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
    noise = alpha**2 * arguments.noise_variance(sigma2)
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
    alpha, momentum = arguments.positive_lr("alpha", alpha), arguments.momentum_factor(momentum)
    mixing, _ = _mixing_and_curvature(alpha, gamma, mu, 0.0)
    noise = (alpha / (1 - momentum)) ** 2 * arguments.noise_variance(sigma2)
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
    alpha, momentum = arguments.positive_lr("alpha", alpha), arguments.momentum_factor(momentum)
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
    weight = arguments.consensus_factor(gamma) / (4 * arguments.positive_lr("alpha", alpha))
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
    return arguments.consensus_factor(gamma) * arguments.laplacian_eigenvalue(mu), alpha * arguments.curvature(lam)


def _margins(mixing: Tensor, curvature: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """Return s = (1 - b) gamma mu + alpha lam and r = (1 + b) (2 - gamma mu) - alpha lam.

    They are the characteristic polynomial of the recursion at 1 and -1; both are positive if the mode is stable.
    """
    return (1 - momentum) * mixing + curvature, (1 + momentum) * (2 - mixing) - curvature
