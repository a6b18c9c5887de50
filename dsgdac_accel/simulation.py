"""DSGD-AC with all workers in one process, straight from Algorithm 1: the oracle for the tests of real processes.

    x_i <- x_i - a g_i(x_i) + gamma sum_j W_ij (x_j - x_i)

Clear before fast: every parameter is mixed by itself, and the local step is whatever the torch optimizer does.
Suffix N: one entry per worker; suffix D: the parameters of a worker, flattened.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgdac_accel.schedule import AdaptiveConsensus, current_lr
from dsgdac_accel.topology import Topology

Order = Literal["local_first", "mix_first"]
"""When the consensus update, formed from the parameters before the local step, is added: after that step, or before."""


def gossip_step(
    parameters_N: Sequence[Iterable[Tensor]],
    optimizers_N: Sequence[Optimizer],
    mixing_NN: Tensor,
    gamma: float,
    skip: Collection[int] = (),
    order: Order = "local_first",
) -> None:
    """One step of all workers in place: x_i <- x_i + local_update(x_i, g_i) + gamma sum_j W_ij (x_j - x_i).

    Gradients are in `.grad` already. A worker in `skip`, whose gradient was not finite, mixes without a local update.
    With order="mix_first" the optimizer steps from the mixed point, with the same gradient.

    >>> x = [torch.tensor([1.0]), torch.tensor([3.0])]
    >>> optimizers = [torch.optim.SGD([x_i], lr=0.1) for x_i in x]
    >>> gossip_step([[x_i] for x_i in x], optimizers, torch.full((2, 2), 0.5), gamma=0.5)
    >>> x
    [tensor([1.5000]), tensor([2.5000])]
    """
    if order not in ("local_first", "mix_first"):
        raise ValueError(f"order must be 'local_first' or 'mix_first'; got {order!r}.")
    unique_N = [unique_parameters(parameters) for parameters in parameters_N]
    update_N = consensus_update(unique_N, mixing_NN, gamma)
    if order == "mix_first":
        _add(unique_N, update_N)
    for worker, optimizer in enumerate(optimizers_N):
        if worker not in skip:
            optimizer.step()
    if order == "local_first":
        _add(unique_N, update_N)


@torch.no_grad()
def consensus_update(parameters_N: Sequence[Sequence[Tensor]], mixing_NN: Tensor, gamma: float) -> list[list[Tensor]]:
    """u_i = gamma sum_j W_ij (x_j - x_i) for each worker and parameter, in the dtype of the parameter."""
    update_N = []
    for worker, own in enumerate(parameters_N):
        update = [torch.zeros_like(x) for x in own]
        for peer, weight in enumerate(mixing_NN[worker].tolist()):
            if weight == 0 or peer == worker:
                continue  # not only to save time: 0 * (x_j - x_i) is NaN where a parameter overflowed
            for u, x_i, x_j in zip(update, own, parameters_N[peer], strict=True):
                u += gamma * weight * (x_j - x_i)
        update_N.append(update)
    return update_N


class Simulation:
    """n workers in one process: call backward for each model, then `step`.

    Args:
        models: one per worker, or its parameters; tied parameters count once.
        optimizers: one per worker, all with the same rates.
        topology: who mixes with whom.
        schedule: gamma from step and rate.
        order: see `Order`.
        mix_every: mix in the last one of every k steps only.

    >>> from dsgdac_accel.topology import build_topology
    >>> models = [nn.Linear(1, 1) for _ in range(4)]
    >>> optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    >>> workers = Simulation(models, optimizers, build_topology("complete", 4), AdaptiveConsensus())
    >>> workers.step()  # without gradients: mixing alone
    >>> workers.radius() < 1e-7, workers.gammas
    (True, [1.0])
    """

    def __init__(
        self,
        models: Sequence[nn.Module | Iterable[Tensor]],
        optimizers: Sequence[Optimizer],
        topology: Topology,
        schedule: AdaptiveConsensus,
        order: Order = "local_first",
        mix_every: int = 1,
    ) -> None:
        if not len(models) == len(optimizers) == topology.num_workers:
            raise ValueError(
                f"a simulation needs a model and an optimizer for each worker; got {len(models)} models and "
                f"{len(optimizers)} optimizers for a topology of {topology.num_workers} workers."
            )
        self.parameters_N = [unique_parameters(model) for model in models]
        self.optimizers = list(optimizers)
        self.topology = topology
        self.schedule = schedule
        self.order = order
        self.mix_every = mix_every
        self.gammas: list[float] = []
        """Gamma of each step taken so far."""

    def step(self, skip: Collection[int] = (), epoch: int | None = None) -> None:
        """Algorithm 1 once for every worker, at the rate of its optimizer, from the gradients in `.grad`."""
        step = len(self.gammas)
        gamma = self.schedule.gamma(step, current_lr(self.optimizers[0]), epoch)
        mixes = (step + 1) % self.mix_every == 0
        mixing_NN = self.topology.matrix(step // self.mix_every) if mixes else torch.eye(len(self.parameters_N))
        gossip_step(self.parameters_N, self.optimizers, mixing_NN, gamma, skip, self.order)
        self.gammas.append(gamma)

    def deployed_parameters(self) -> list[Tensor]:
        """The average of the workers, one tensor per parameter."""
        return [torch.stack([x.detach() for x in x_N]).mean(0) for x_N in zip(*self.parameters_N, strict=True)]

    def radius(self) -> float:
        """Mean distance of a worker from the average: mean_i ||x_i - x_bar||, at least 0."""
        return self._deviation_ND().norm(dim=1).mean().item()

    def frobenius(self) -> float:
        """Norm of all deviations together: sqrt(sum_i ||x_i - x_bar||^2), at least the radius."""
        return self._deviation_ND().norm().item()

    def _deviation_ND(self) -> Tensor:
        flat_ND = torch.stack([torch.cat([x.detach().double().flatten() for x in xs]) for xs in self.parameters_N])
        return flat_ND - flat_ND.mean(0)


def unique_parameters(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """The parameters of a model, or of any iterable of tensors, each once however many names it has."""
    return list(dict.fromkeys(model.parameters() if isinstance(model, nn.Module) else model))


@torch.no_grad()
def _add(parameters_N: Sequence[Sequence[Tensor]], update_N: Sequence[Sequence[Tensor]]) -> None:
    for parameters, update in zip(parameters_N, update_N, strict=True):
        for x, u in zip(parameters, update, strict=True):
            x += u
