"""Range checks of the theory's arguments. Each returns a float64 tensor or raises a ValueError with the name."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import TOLERANCE


def positive_lr(name: str, lr: Any) -> Tensor:
    """Check learning rates > 0."""
    lr = _finite(name, lr)
    _refuse(name, lr, lr <= 0, "> 0", "Without a local step there is no noise and nothing to predict")
    return lr


def nonnegative_lr(name: str, lr: Any) -> Tensor:
    """Check learning rates >= 0."""
    lr = _finite(name, lr)
    _refuse(name, lr, lr < 0, ">= 0", "Local steps go against the gradient")
    return lr


def consensus_factor(gamma: Any, name: str = "gamma") -> Tensor:
    """Check values of gamma in [0, 1]."""
    gamma = _finite(name, gamma)
    _refuse(name, gamma, (gamma < 0) | (gamma > 1), "in [0, 1]", "Algorithm 1 uses (lr / max_lr)^p")
    return gamma


def laplacian_eigenvalue(mu: Any) -> Tensor:
    """Check eigenvalues of I - W in [0, 2]. Values that rounding moved outside are clamped to the range."""
    mu = _finite("mu", mu)
    outside = (mu < -TOLERANCE) | (mu > 2 + TOLERANCE)
    _refuse("mu", mu, outside, "in [0, 2]", "It is an eigenvalue of I - W: 1 minus an eigenvalue of the mixing matrix")
    return mu.clamp(0, 2)


def noise_variance(sigma2: Any) -> Tensor:
    """Check variances >= 0."""
    sigma2 = _finite("sigma2", sigma2)
    _refuse("sigma2", sigma2, sigma2 < 0, ">= 0", "It is a variance, the square of the noise")
    return sigma2


def curvature(lam: Any) -> Tensor:
    """Check eigenvalues of the Hessian, which may have any sign."""
    return _finite("lam", lam)


def momentum_factor(momentum: Any) -> Tensor:
    """Check values of momentum in [0, 1)."""
    momentum = _finite("momentum", momentum)
    _refuse("momentum", momentum, (momentum < 0) | (momentum >= 1), "in [0, 1)", "Use 0 for plain SGD")
    return momentum


def scalar(name: str, value: Tensor) -> float:
    """Return the only number in `value`; refuse several."""
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number; got shape {tuple(value.shape)}. Call once for each value.")
    return float(value)


def spectrum(lam: Any, sigma2: Any, counts: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return curvature, noise variance and number of directions, each of shape (K,). One number is repeated K times."""
    counts = _finite("counts", 1.0 if counts is None else counts)
    _refuse("counts", counts, counts < 0, ">= 0", "It is the number of directions that share a curvature")
    given = {"lam": curvature(lam), "sigma2": noise_variance(sigma2), "counts": counts}
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    lists = set(shapes.values()) - {(), (1,)}
    if len(lists) > 1 or any(len(shape) > 1 or 0 in shape for shape in lists):
        raise ValueError(
            f"lam, sigma2 and counts must be lists with one entry per direction, or single numbers; got shapes "
            f"{shapes}. Flatten them to one length."
        )
    lam_K, sigma2_K, counts_K = torch.broadcast_tensors(*(torch.atleast_1d(value) for value in given.values()))
    return lam_K, sigma2_K, counts_K


def scheduled(gammas: AdaptiveConsensus | Sequence[float], lrs: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return gamma and lr of every step. An lr may be 0, as at the start of a warm-up or the end of a decay."""
    lrs_T = _one_per_step("lrs", nonnegative_lr("lrs", lrs))
    if isinstance(gammas, AdaptiveConsensus):
        schedule = copy.deepcopy(gammas)  # gamma() changes the state of a schedule
        gammas = [schedule.gamma(step=step, lr=lr) for step, lr in enumerate(lrs_T)]
    gammas_T = _one_per_step("gammas", consensus_factor(gammas, name="gammas"))
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
