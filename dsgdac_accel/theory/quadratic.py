"""DSGD-AC on a quadratic with Gaussian noise, in many independent chains at once, to check the theory.

The chains run Algorithm 1 with the momentum of torch.optim.SGD. They use nothing of the theory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsgdac_accel.checks import check_integer
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.theory import arguments
from dsgdac_accel.theory.covariance import ROUNDING, Dynamics
from dsgdac_accel.theory.modes import graph_modes
from dsgdac_accel.topology import Topology


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
    >>> from dsgdac_accel.theory import predicted_radius
    >>> ring = build_topology("one_peer_ring", 8)
    >>> settings = dict(gamma=0.5, lr=0.1, lam=[5.0, 0.0], sigma2=1.0, momentum=0.9)
    >>> measured, error = simulate_quadratic(ring, **settings, steps=500).frobenius()
    >>> bool(abs(measured - predicted_radius(ring, **settings).frobenius) < 4 * error)
    True
    """
    gamma = arguments.scalar("gamma", arguments.consensus_factor(gamma))
    lr = arguments.scalar("lr", arguments.positive_lr("lr", lr))
    momentum = arguments.scalar("momentum", arguments.momentum_factor(momentum))
    lam_K, sigma2_K, _ = arguments.spectrum(lam, sigma2)
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
    lam_K, sigma2_K, _ = arguments.spectrum(lam, sigma2)
    momentum = arguments.scalar("momentum", arguments.momentum_factor(momentum))
    chains = check_integer("chains", chains, minimum=1)
    generator = torch.Generator().manual_seed(seed)
    schedule = zip(*arguments.scheduled(gammas, lrs), strict=True)
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
