"""DSGD-AC with all workers in one process, directly from Algorithm 1. Tests of real processes compare against it.

    x_i <- x_i - lr g_i(x_i) + gamma sum_j W_ij (s_j - s_i)

s_i is the copy of x_i that was sent. It equals x_i unless a script edits its parameters between two steps.
Clarity comes before speed: each parameter is mixed separately, and the local step is that of any torch optimizer.
Suffix N: one entry per worker. Suffix D: the parameters of a worker, flattened.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgdac_accel.checks import check_choice
from dsgdac_accel.schedule import AdaptiveConsensus, current_lr
from dsgdac_accel.topology import Topology

Order = Literal["local_first", "mix_first"]
"""Whether the consensus update is added after the local step or before it. It is always computed before the step."""


def gossip_step(
    parameters_N: Sequence[Iterable[Tensor]],
    optimizers_N: Sequence[Optimizer],
    mixing_NN: Tensor,
    gamma: float,
    skip: Collection[int] = (),
    order: Order = "local_first",
    sent_N: Sequence[Mapping[Tensor, Tensor]] | None = None,
) -> None:
    """Take one step of Algorithm 1 for all workers, in place.

        u_i = gamma sum_j W_ij (s_j - s_i)
        x_i <- x_i + local_update(x_i, g_i) + u_i

    Args:
        parameters_N: parameters of each worker, with their gradients in `.grad`; tied parameters count once.
        optimizers_N: local optimizer of each worker.
        mixing_NN: mixing matrix W of this step.
        gamma: consensus factor in [0, 1].
        skip: workers with a nonfinite gradient. They mix without a local update.
        order: with "mix_first", x_i <- x_i + u_i comes first, and the optimizer steps from there with the same
            gradient.
        sent_N: s_i of each worker, by parameter. The default is x_i. A parameter that was not sent is not mixed.

    Raises:
        ValueError: the order is unknown.

    >>> x = [torch.tensor([1.0]), torch.tensor([3.0])]
    >>> optimizers = [torch.optim.SGD([x_i], lr=0.1) for x_i in x]
    >>> gossip_step([[x_i] for x_i in x], optimizers, torch.full((2, 2), 0.5), gamma=0.5)
    >>> x
    [tensor([1.5000]), tensor([2.5000])]
    """
    check_choice("order", order, ("local_first", "mix_first"))
    x_N = [unique_parameters(parameters) for parameters in parameters_N]
    sent_N = [{x: x for x in x_i} for x_i in x_N] if sent_N is None else sent_N
    u_N = consensus_update([[*s_i.values()] for s_i in sent_N], mixing_NN, gamma)
    if order == "mix_first":
        _add(x_N, sent_N, u_N)
    for worker, optimizer in enumerate(optimizers_N):
        if worker not in skip:
            optimizer.step()  # x_i <- x_i - lr g_i, or Adam's update
    if order == "local_first":
        _add(x_N, sent_N, u_N)


@torch.no_grad()
def consensus_update(x_N: Sequence[Sequence[Tensor]], mixing_NN: Tensor, gamma: float) -> list[list[Tensor]]:
    """Return u_i = gamma sum_j W_ij (x_j - x_i) for each worker and parameter, in the dtype of the parameter."""
    u_N = []
    for worker, x_i in enumerate(x_N):
        u_i = [torch.zeros_like(x) for x in x_i]
        for neighbor, weight in enumerate(mixing_NN[worker].tolist()):
            if weight == 0 or neighbor == worker:
                continue  # 0 * (x_j - x_i) would be NaN if a parameter of worker j is infinite
            for u, own, received in zip(u_i, x_i, x_N[neighbor], strict=True):
                u += gamma * weight * (received - own)
        u_N.append(u_i)
    return u_N


class Simulation:
    """DSGD-AC with n workers in one process: run backward for each model, then call `step`.

    Args:
        models: one model per worker, or a list of its parameters; tied parameters count once.
        optimizers: one optimizer per worker, all with the same learning rate. The parameters that they hold are mixed;
            one that is added later starts from worker 0's values.
        topology: mixing matrix W of each round.
        schedule: gamma of each step.
        order: see `Order`.
        mix_every: number of steps k per round. Only the last of every k steps mixes.
        overlap: whether s_i is copied at the end of the step before, and not at the beginning of the step that mixes.

    Raises:
        ValueError: the numbers of models, optimizers and workers of the topology differ.

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
        overlap: bool = True,
    ) -> None:
        if not len(models) == len(optimizers) == topology.num_workers:
            raise ValueError(
                f"a simulation needs one model and one optimizer per worker; got {len(models)} models and "
                f"{len(optimizers)} optimizers for a topology of {topology.num_workers} workers."
            )
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.topology = topology
        self.schedule = schedule
        self.order = order
        self.mix_every = mix_every
        self.overlap = overlap
        self.sent_N: list[dict[Tensor, Tensor]] | None = None
        """s_i of each worker, by parameter; None takes it at the beginning of the next step."""
        self._known = set(self.parameters_N[0])
        self.gammas: list[float] = []
        """Gamma of each step so far."""

    def step(self, skip: Collection[int] = (), epoch: int | None = None) -> None:
        """Take one step of Algorithm 1 for all workers, from the gradients in `.grad`.

        Args:
            skip: workers with a nonfinite gradient. They mix without a local update.
            epoch: epoch of this step, for a schedule with start_epoch.
        """
        t = len(self.gammas)
        gamma = self.schedule.gamma(step=t, lr=current_lr(self.optimizers[0]), epoch=epoch)
        x_N = self.parameters_N
        self._start_newcomers_equal(x_N)
        if self.sent_N is None:
            self.sent_N = _copies(x_N)
        mixing_NN = self.topology.matrix(t // self.mix_every) if self._mixes(t) else torch.eye(len(x_N), device="cpu")
        gossip_step(x_N, self.optimizers, mixing_NN, gamma, skip, self.order, self.sent_N)
        self.sent_N = _copies(x_N) if self.overlap and self._mixes(t + 1) else None
        self.gammas.append(gamma)

    def restart_exchange(self) -> None:
        """Drop what was sent, as after an edit that is to be mixed at once; the next step sends at its beginning."""
        self.sent_N = None

    @property
    def parameters_N(self) -> list[list[Tensor]]:
        """Parameters of each worker's model that its optimizer holds now, each once."""
        held_N = [{x for group in optimizer.param_groups for x in group["params"]} for optimizer in self.optimizers]
        return [
            [x for x in unique_parameters(model) if x in held] for model, held in zip(self.models, held_N, strict=True)
        ]

    def _mixes(self, t: int) -> bool:
        return (t + 1) % self.mix_every == 0

    @torch.no_grad()
    def _start_newcomers_equal(self, x_N: Sequence[Sequence[Tensor]]) -> None:
        for first, *others in zip(*x_N, strict=True):
            if first not in self._known:
                for x in others:
                    x.copy_(first)
        self._known = set(x_N[0])

    def deployed_parameters(self) -> list[Tensor]:
        """Return the average x_bar of the workers, one tensor per parameter."""
        return [torch.stack([x.detach() for x in x_N]).mean(0) for x_N in zip(*self.parameters_N, strict=True)]

    def radius(self) -> float:
        """Return the mean distance of a worker from the average, mean_i ||x_i - x_bar||."""
        return self._deviation_ND().norm(dim=1).mean().item()

    def frobenius(self) -> float:
        """Return the norm of all deviations together, sqrt(sum_i ||x_i - x_bar||^2)."""
        return self._deviation_ND().norm().item()

    def _deviation_ND(self) -> Tensor:
        flat_ND = torch.stack([torch.cat([x.detach().double().flatten() for x in xs]) for xs in self.parameters_N])
        return flat_ND - flat_ND.mean(0)


def unique_parameters(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a model, or the tensors of an iterable, each once even if it has several names.

    Two parameters on the same memory count once, as the first of them.
    """
    by_memory: dict[int, Tensor] = {}
    for x in model.parameters() if isinstance(model, nn.Module) else model:
        by_memory.setdefault(x.data_ptr() or id(x), x)  # an empty tensor has no memory
    return list(by_memory.values())


def _copies(x_N: Sequence[Sequence[Tensor]]) -> list[dict[Tensor, Tensor]]:
    """s_i <- x_i"""
    return [{x: x.detach().clone() for x in x_i} for x_i in x_N]


@torch.no_grad()
def _add(
    x_N: Sequence[Sequence[Tensor]], sent_N: Sequence[Mapping[Tensor, Tensor]], u_N: Sequence[Sequence[Tensor]]
) -> None:
    """x_i <- x_i + u_i"""
    for x_i, s_i, u_i in zip(x_N, sent_N, u_N, strict=True):
        updates = dict(zip(s_i, u_i, strict=True))
        for x in x_i:
            if x in updates:
                x += updates[x]
