"""The ranges of the theory's arguments, each refused by name."""

import copy
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import TOLERANCE


def positive_lr(name: str, lr: Any) -> Tensor:
    """A learning rate > 0, or several."""
    lr = _finite(name, lr)
    _refuse(name, lr, lr <= 0, "> 0", "Without a local step there is no noise and nothing to predict")
    return lr


def nonnegative_lr(name: str, lr: Any) -> Tensor:
    """A learning rate >= 0, or several."""
    lr = _finite(name, lr)
    _refuse(name, lr, lr < 0, ">= 0", "Local steps go against the gradient")
    return lr


def scheduled(gammas: AdaptiveConsensus | Sequence[float], lrs: Sequence[float]) -> tuple[list[float], list[float]]:
    """Gamma and rate of every step; rates of 0 are allowed, as warm-ups start and decays end there."""
    rates_T = _one_per_step("lrs", nonnegative_lr("lrs", lrs))
    if isinstance(gammas, AdaptiveConsensus):
        schedule = copy.deepcopy(gammas)  # asking for gamma moves the schedule on
        gammas = [schedule.gamma(step, lr) for step, lr in enumerate(rates_T)]
    gammas_T = _one_per_step("gammas", consensus_factor(gammas, name="gammas"))
    if len(gammas_T) != len(rates_T):
        raise ValueError(
            f"gammas and rates must be for the same steps; got {len(gammas_T)} gammas and {len(rates_T)} rates. "
            f"Pass an AdaptiveConsensus to have gamma computed from the rates."
        )
    return gammas_T, rates_T


def consensus_factor(gamma: Any, name: str = "gamma") -> Tensor:
    """Gamma in [0, 1]."""
    gamma = _finite(name, gamma)
    _refuse(name, gamma, (gamma < 0) | (gamma > 1), "in [0, 1]", "Algorithm 1 uses (rate / a_max)^p")
    return gamma


def laplacian_eigenvalue(mu: Any) -> Tensor:
    """Eigenvalues of I - W in [0, 2]; what rounding leaves outside is moved to the border."""
    mu = _finite("mu", mu)
    outside = (mu < -TOLERANCE) | (mu > 2 + TOLERANCE)
    _refuse("mu", mu, outside, "in [0, 2]", "It is an eigenvalue of I - W: 1 minus an eigenvalue of the mixing matrix")
    return mu.clamp(0, 2)


def noise_variance(sigma2: Any) -> Tensor:
    """Variances >= 0."""
    sigma2 = _finite("sigma2", sigma2)
    _refuse("sigma2", sigma2, sigma2 < 0, ">= 0", "It is a variance, the square of the noise")
    return sigma2


def curvature(lam: Any) -> Tensor:
    """Eigenvalues of the Hessian, of any sign."""
    return _finite("lam", lam)


def momentum_factor(momentum: Any) -> Tensor:
    """Momentum in [0, 1)."""
    momentum = _finite("momentum", momentum)
    _refuse("momentum", momentum, (momentum < 0) | (momentum >= 1), "in [0, 1)", "Use 0 for plain SGD")
    return momentum


def scalar(name: str, value: Tensor) -> float:
    """The only number in `value`; refuses several."""
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number; got shape {tuple(value.shape)}. Call once for each value.")
    return float(value)


def spectrum(lam: Any, sigma2: Any, counts: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Curvature, noise variance and number of directions alike, each of shape (K,); one number stands for all K."""
    counts = _finite("counts", 1.0 if counts is None else counts)
    _refuse("counts", counts, counts < 0, ">= 0", "It tells how many directions share a curvature")
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


def whole_number(name: str, value: Any, at_least: int) -> int:
    """A whole number >= `at_least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise ValueError(f"{name} must be a whole number >= {at_least}; got {value!r}.")
    return int(value)


def _finite(name: str, value: Any) -> Tensor:
    """The value as a float64 tensor on the CPU, or a ValueError."""
    # Through NumPy: torch would read Python's floats in float32.
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be a real number or an array of them; got {value!r}. Convert it first.")
    number = torch.from_numpy(array.astype(np.float64))
    _refuse(name, number, ~number.isfinite(), "finite", "Leave out directions that were not measured")
    return number


def _refuse(name: str, value: Tensor, bad: Tensor, rule: str, way_out: str) -> None:
    if bad.any():
        raise ValueError(f"{name} must be {rule}; got {value[bad].flatten()[0].item()!r}. {way_out}.")


def _one_per_step(name: str, value: Tensor) -> list[float]:
    if value.ndim != 1 or not len(value):
        raise ValueError(
            f"{name} must be a list with one entry per step, at least one; got shape {tuple(value.shape)}. "
            f"Repeat a constant: [0.1] * steps."
        )
    return value.tolist()
