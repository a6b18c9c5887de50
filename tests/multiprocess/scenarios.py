"""Runs scenarios on real workers and by the simulation of Algorithm 1, and compares each worker after each step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from dsgdac_accel import AdaptiveConsensus, GossipAccelerator, GossipConfig, build_topology
from dsgdac_accel import simulation as simulation_module
from dsgdac_accel.core import exchange
from dsgdac_accel.distributed.shards import gathering_modules, local_of, reshard, whole_of
from dsgdac_accel.simulation import Simulation
from dsgdac_accel.topology import Topology
from tests.held import held
from tests.rounding import Replay

STEPS, PARTS = 8, 2
MOMENT = 3
"""The step before which a parameter joins, leaves or is tied, and at which a gradient is not finite."""
SICK = 1
"""The worker whose gradient is not finite."""
DTYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "mixed": (torch.float64, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
}
"""Of the first layer, and of the others."""


@dataclass(frozen=True)
class World:
    """Processes, and how workers are laid over them.

    Args:
        processes: all of them.
        shards: processes of a worker, which shard its model by FSDP2; 0 for models that are not sharded.
        local_workers: workers of a process.
        spread: whether the processes of a worker are not neighbors.
    """

    processes: int
    shards: int = 0
    local_workers: int = 1
    spread: bool = False

    @property
    def workers(self) -> int:
        return self.processes // max(self.shards, 1) * self.local_workers

    @property
    def ranks(self) -> Tensor:
        """Ranks of the processes of each sharded worker, (workers, shards)."""
        shape = (self.workers, self.shards)
        ranks = torch.arange(self.processes, device="cpu")
        return ranks.view(shape[::-1]).T if self.spread else ranks.view(shape)

    def workers_of(self, rank: int) -> range:
        first = int((self.ranks == rank).nonzero()[0, 0]) if self.shards else rank * self.local_workers
        return range(first, first + self.local_workers)

    def last_process_of(self, worker: int) -> int:
        return int(self.ranks[worker, -1]) if self.shards else worker // self.local_workers

    def batches_of(self, worker: int) -> list[int]:
        """Numbers of the batches of a worker in a step: one for each process, or its own."""
        return self.ranks[worker].tolist() if self.shards else [worker]


@dataclass(frozen=True)
class Scenario:
    """How the workers of a world are trained; each value has a name."""

    topology: str = "one_peer_ring"
    optimizer: str = "sgd"
    dtype: str = "float64"
    comm_dtype: str = "full"
    order: str = "local_first"
    overlap: str = "yes"
    mix_every: str = "1"
    checks: str = "now"
    edit: str = "none"
    nonfinite: str = "no"


# ---- what is trained


class Net(nn.Module):
    """Four linear layers, two of them of one shape."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(*shape) for shape in ((5, 7), (7, 7), (7, 7), (7, 2))])
        first, others = DTYPES[scenario.dtype]
        self.to(others)
        self.layers[0].to(first)
        self.late.requires_grad_(scenario.edit != "added")
        self.layers[0].bias.requires_grad_(scenario.edit not in ("added", "frozen"))
        if scenario.edit == "shared":
            self.layers[2].weight = self.layers[1].weight

    @property
    def late(self) -> Tensor:
        """The parameter that joins or leaves."""
        return self.layers[3].bias

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.to(layer.weight.dtype) if number == 0 else x.tanh().to(layer.weight.dtype))
        return x.double()


def batch(number: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(1000 * number + micro)
    return tuple(torch.randn(4, n, generator=generator, dtype=torch.float64, device="cpu") for n in (5, 2))  # type: ignore[return-value]


def loss_of(model: nn.Module, numbers: Sequence[int], micro: int, device: Any = "cpu") -> Tensor:
    x, y = (torch.cat(parts).to(device) for parts in zip(*(batch(n, micro) for n in numbers), strict=True))
    return (model(x) - y).square().mean()


def make_optimizer(scenario: Scenario, net: Net, held: Callable[[Tensor], Tensor]) -> torch.optim.Optimizer:
    joins = scenario.edit == "added"
    parameters = [held(p) for p in net.parameters() if p.requires_grad or (joins and p is not net.late)]
    groups = [{"params": parameters[:3], "weight_decay": 0.05}, {"params": parameters[3:]}]
    fused = scenario.optimizer.startswith("fused")
    if scenario.optimizer.endswith("sgd"):
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=fused)
    return torch.optim.AdamW(groups, lr=0.02, fused=fused)


def make_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda t: min((t + 1) / 3, 1.0) * (1 - t / (STEPS + 3)))


def topology_of(name: str, workers: int) -> Topology:
    """Return the topology of a name; with "alone" the last worker sits out every other round, and then the first."""
    if name != "alone":
        return build_topology(name, workers)
    rounds = []
    for group in (range(workers - 1) if workers > 2 else range(2), range(1, workers)):
        matrix = np.eye(workers)
        matrix[np.ix_(group, group)] = 1 / len(group)
        rounds.append(matrix)
    return Topology.from_matrices(rounds)


def flat(tensors: Any) -> Tensor:
    return torch.cat([whole_of(tensor).detach().double().cpu().flatten() for tensor in tensors])


def parameters_of(net: nn.Module) -> Tensor:
    reshard(gathering_modules([net]))
    return flat(net.parameters())


# ---- what a script does between two steps


@torch.no_grad()
def edit(scenario: Scenario, step: int, worker: int, net: Net, groups: Any, held: Callable[[Tensor], Tensor]) -> None:
    """Edit the parameters of a worker before a step; `held` are what `groups` of the optimizer have in their place."""
    kind, sharded = scenario.edit, isinstance(net.late, DTensor)
    if kind == "undone":
        for number, p in enumerate(net.parameters()):
            kept = p.data.clone()
            if (number + step) % 2 and not sharded:  # FSDP2 gathers its own memory
                own, p.data = p.data, torch.full_like(p, 9.0)
                p.data = own
            p.fill_(7.0)
            p.copy_(kept)
    elif kind == "repointed":
        for p in net.parameters():
            p.data = p.data.clone()
    elif kind in ("lasting", "restarted"):
        generator = torch.Generator(device="cpu").manual_seed(100 * step + worker)
        for number, p in enumerate(net.parameters()):
            new = (torch.rand(p.shape, generator=generator, device="cpu") - 0.5).to(p.device, p.dtype)
            if sharded:
                new = distribute_tensor(new, p.device_mesh, p.placements, src_data_rank=None)
            (p.data if number % 2 else p).copy_(torch.where(new > 0.3, new, p))  # every fifth element
    elif kind == "frozen":  # for a while; another one is from the start
        net.layers[2].weight.requires_grad_(not MOMENT <= step < MOMENT + 2)
    elif kind == "tied" and step == MOMENT:
        net.layers[2].bias.data = net.layers[1].bias.data
    elif kind == "added" and step == MOMENT:
        net.layers[0].bias.requires_grad_()  # the optimizer holds it, but has not trained it
        net.late.fill_(float(worker)).requires_grad_()
        groups[1]["params"].append(held(net.late))
    elif kind == "removed" and step == MOMENT:
        groups[1]["params"] = [p for p in groups[1]["params"] if p is not held(net.late)]


# ---- real workers


def fresh() -> None:
    """Forget what Accelerate keeps of an earlier scenario of this process, in its classes and in the environment."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    for variable in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        if variable != "ACCELERATE_USE_CPU":  # that of the launcher
            del os.environ[variable]


def train(
    rank: int,
    world: World,
    scenario: Scenario,
    build: Callable[[Scenario], nn.Module] = Net,
    after: Callable[[GossipAccelerator, nn.Module], Any] | None = None,
    by_accelerate: Callable[[World], dict[str, Any]] | None = None,
    each_step: Callable[[GossipAccelerator, int], Any] | None = None,
) -> dict[str, Any]:
    """Train in the process of this rank, and return what `require_equal` compares. Collective.

    Args:
        rank: of this process.
        world: of all processes.
        scenario: how to train.
        build: makes the model.
        after: called at the end; what it returns is added as "after".
        by_accelerate: returns arguments of the accelerator by which it shards the model itself.
        each_step: called before each step; what it returns is listed as "each_step".
    """
    fresh()
    cuda = os.environ.get("ACCELERATE_USE_CPU") == "false"
    config = GossipConfig(
        topology=topology_of(scenario.topology, world.workers), power=2.0, start_step=3, timeout=30, log_every=3,
        workers_per_process=world.local_workers, comm_dtype=scenario.comm_dtype, order=scenario.order,
        overlap=scenario.overlap == "yes", mix_every=int(scenario.mix_every),
    )  # fmt: skip
    options: dict[str, Any] = {} if by_accelerate is None else by_accelerate(world)
    if world.shards and by_accelerate is None:
        mesh = DeviceMesh("cuda" if cuda else "cpu", world.ranks, mesh_dim_names=("dp_replicate", "dp_shard"))
        options["device_mesh"] = mesh
    accelerator = GossipAccelerator(cpu=not cuda, gossip=config, gradient_accumulation_steps=PARTS, **options)
    workers = world.workers_of(rank)
    net = build(scenario).to(accelerator.device)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(workers.start)  # worker 0's values count
    if "device_mesh" in options:
        fully_shard(next(m for m in net.modules() if isinstance(m, nn.Linear)), mesh=mesh["dp_shard"])
        fully_shard(net, mesh=mesh["dp_shard"])
        net.set_reshard_after_backward(scenario.edit != "evaluated")
    optimizer = make_optimizer(scenario, net, lambda p: p)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, make_scheduler(optimizer))
    (gossip,) = accelerator.gossip_steps
    gossip.mixer.agreement.late = scenario.checks == "late" or cuda
    nets = model.replicas if world.local_workers > 1 else [model]
    numbers = [rank] if world.shards else workers
    history: list[Tensor] = []
    seen = []
    for step in range(STEPS):
        seen.append(each_step and each_step(accelerator, step))
        for worker, net in zip(workers, nets, strict=True):
            edit(scenario, step, worker, net, optimizer.param_groups, lambda p: p)
        if scenario.edit == "restarted" and step == MOMENT:
            accelerator.restart_exchange()
        if scenario.edit == "restarted" and step == MOMENT + 2:
            with accelerator.deployed_model(model):
                pass
        for part in range(PARTS):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, numbers, PARTS * step + part, accelerator.device))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), *clipping(scenario))
                    if is_sick(scenario, step) and rank == world.last_process_of(SICK):
                        local_of(nets[SICK - workers.start].layers[1].weight.grad).fill_(torch.nan)
                    if scenario.edit == "evaluated":
                        with torch.no_grad():
                            loss_of(model, numbers, 0, accelerator.device)
                optimizer.step()
                scheduler.step()
        model.zero_grad()
        history.append(torch.stack([flat(held(accelerator, p) for p in net.parameters()) for net in nets]))
    radius = accelerator.measure_consensus()["gossip/radius"]
    own = [parameters_of(net) for net in nets]
    loss_of(model, numbers, 0, accelerator.device)  # gathers shards, as every pass below
    with accelerator.deployed_model(model) as deployed:
        losses = [loss_of(deployed, [0], 0, accelerator.device).item()]
        mean = parameters_of(deployed)
        errors = [flat(mine.values()) for mine in accelerator.consensus_errors(model)]
        loss_of(deployed, [0], 0, accelerator.device)
    losses.append(loss_of(model, numbers, 0, accelerator.device).item())
    found = {
        "x": torch.stack(history, dim=1),
        "radius": radius,
        "mean": mean,
        "errors": torch.stack(errors),
        "figures": [*losses, float(norm)],
        "kept": all(map(torch.equal, own, map(parameters_of, nets))),
        "rounded": all(
            torch.equal(p, held(accelerator, p).to(p.dtype)) for p in net.parameters() if not isinstance(p, DTensor)
        ),
        "skipped": gossip.guard.skipped,
        "each_step": seen,
        "after": after and after(accelerator, model),
    }
    accelerator.free_memory()
    return found


def clipping(scenario: Scenario) -> tuple[float, float]:
    """The largest norm of a gradient, and which norm."""
    return (0.1, math.inf) if scenario.overlap == "no" else (0.5, 2.0)


def is_sick(scenario: Scenario, step: int) -> bool:
    return scenario.nonfinite == "yes" and step == MOMENT


# ---- the oracle


class Oracle:
    """A worker of the simulation: its model, the float32 masters of its bf16 parameters, and its optimizer."""

    def __init__(self, scenario: Scenario, build: Callable[[Scenario], nn.Module]) -> None:
        self.scenario = scenario
        self.net = build(scenario)
        self.masters: dict[Tensor, Tensor] = {}
        self.parameters = [self.held(p) for p in self.net.parameters()]
        self.optimizer = make_optimizer(scenario, self.net, self.held)
        self.scheduler = make_scheduler(self.optimizer)

    def held(self, p: Tensor) -> Tensor:
        if p.dtype == torch.bfloat16 and p not in self.masters:
            self.masters[p] = nn.Parameter(p.detach().float())
            p.grad_dtype = torch.float32
        return self.masters.get(p, p)

    def backward(self, numbers: Sequence[int], step: int) -> None:
        self.net.zero_grad()
        for micro in range(PARTS * step, PARTS * (step + 1)):
            losses = torch.stack([loss_of(self.net, [number], micro) for number in numbers])
            (losses.mean() / PARTS).backward()
        for p, x in self.masters.items():
            x.grad = p.grad
        self.norm = float(nn.utils.clip_grad_norm_(self.parameters, *clipping(self.scenario)))

    @torch.no_grad()
    def read(self) -> None:
        """Adopt what the script made of the bf16 parameters."""
        for p, x in self.masters.items():
            x.copy_(torch.where(p == x.bfloat16(), x, p.float()))

    @torch.no_grad()
    def write(self) -> None:
        for p, x in self.masters.items():
            p.copy_(x)


def simulate(world: World, scenario: Scenario, build: Callable[[Scenario], nn.Module] = Net) -> dict[str, Any]:
    """The same by the simulation, for all workers."""
    workers = [Oracle(scenario, build) for _ in range(world.workers)]
    simulation = Simulation(
        [worker.parameters for worker in workers], [worker.optimizer for worker in workers],
        topology_of(scenario.topology, world.workers), AdaptiveConsensus(power=2.0, start_step=3),
        scenario.order, int(scenario.mix_every), scenario.overlap == "yes",
    )  # fmt: skip
    history = []
    replay = Replay(scenario.comm_dtype, max(world.shards, 1), world.local_workers)
    rounded = scenario.comm_dtype != "full" and world.workers > world.local_workers
    with mock.patch.object(simulation_module, "consensus_update", replay) if rounded else nullcontext():
        for step in range(STEPS):
            for number, worker in enumerate(workers):
                edit(scenario, step, number, worker.net, worker.optimizer.param_groups, worker.held)
                worker.backward(world.batches_of(number), step)
                worker.read()
            if scenario.edit == "restarted" and step in (MOMENT, MOMENT + 2):
                simulation.restart_exchange()
            simulation.step(skip={SICK} if is_sick(scenario, step) else ())
            for worker in workers:
                worker.scheduler.step()
                worker.write()
            history.append(torch.stack([flat(worker.parameters) for worker in workers]))
    x = torch.stack(history, dim=1)
    own_losses = [[loss_of(workers[w].net, [n], 0).item() for n in world.batches_of(w)] for w in range(world.workers)]
    radius, mean, net = simulation.radius(), x[:, -1].mean(0), workers[0].net
    with torch.no_grad():
        for p, values in zip(net.parameters(), mean.split([p.numel() for p in net.parameters()]), strict=True):
            p.copy_(values.view(p.shape))
    return {
        "x": x,
        "mean": mean,
        "radius": radius,
        "gammas": simulation.gammas,
        "losses": own_losses,
        "loss": loss_of(net, [0], 0).item(),
        "norms": [worker.norm for worker in workers],
    }


# ---- comparing


def train_all(rank: int, world: World, scenarios: Sequence[Scenario]) -> list[dict[str, Any] | str]:
    """What `train` returns for each scenario, or its error."""
    found: list[dict[str, Any] | str] = []
    for scenario in scenarios:
        few = -1 if scenario.optimizer == "adamw" else exchange._FEW_BYTES  # then another thread sends the small model
        try:
            with mock.patch.object(exchange, "_FEW_BYTES", few):
                found.append(train(rank, world, scenario))
        except Exception as error:
            found.append(f"rank {rank}: {type(error).__name__}: {error}")
    return found


def require_rows(run: Callable[..., list[Any]], world: World, rows: Sequence[Scenario]) -> None:
    """Raise AssertionError unless all scenarios train as the simulation says; `run` is as `run_workers`."""
    failures = []
    results = run(train_all, world.processes, world, rows, timeout=400)
    for row, found in zip(rows, zip(*results, strict=True), strict=True):
        try:
            require_equal(world, row, found)
        except AssertionError as error:
            failures.append(f"{row}\n{error}")
    assert not failures, "\n\n".join(failures)


def require_equal(
    world: World,
    scenario: Scenario,
    found: Sequence[dict[str, Any] | str],
    build: Callable[[Scenario], nn.Module] = Net,
    device: str = "cpu",
) -> None:
    """Raise AssertionError unless what the processes have found is what the simulation says."""
    errors = [result for result in found if isinstance(result, str)]
    assert not errors, "\n".join(errors)
    expected = simulate(world, scenario, build)
    x, mean = expected["x"], expected["mean"]
    assert min(expected["gammas"]) < 0.3 < max(expected["gammas"]) == 1.0, "gamma has to change in this test"
    assert world.workers == 1 or (x[:, -1] - mean).norm() > 1e-2, "the workers have to differ in this test"
    exact, rounded, low = scenario.dtype == "float64", scenario.comm_dtype != "full", scenario.dtype == "bf16"
    atol = (1e-9 if rounded else 1e-12) if exact else 2e-6
    if device == "cuda":
        atol = max(atol, 1e-9)
    later = 5e-3 if low else 1e-4 if rounded and not exact else 10 * atol
    for rank, result in enumerate(found):
        workers = world.workers_of(rank)
        mine = x[workers.start : workers.stop]
        off = (result["x"] - mine).abs()
        where = f"rank {rank}: off by {off.amax((0, 2)).tolist()} in each step"
        if low or (rounded and not exact):
            # A rounding that falls out otherwise, once in thousands, is a step of that format; others then follow.
            assert off.median() < atol, where
            assert off.max() < 1e-2, where
        else:
            assert off.max() < atol, where
        torch.testing.assert_close(result["mean"], mean, rtol=2**-8 if low else 0, atol=later)
        if not world.shards and scenario.edit not in ("frozen", "removed", "tied"):  # it has what is mixed here
            torch.testing.assert_close(result["errors"], mine[:, -1] - mean, rtol=0, atol=later)
        assert abs(result["radius"] - expected["radius"]) < len(mean) * later
        own = [expected["losses"][worker] for worker in workers]
        own_loss = own[0][world.batches_of(workers[0]).index(rank)] if world.shards else np.mean(own)
        figures = [expected["loss"], own_loss, np.mean(expected["norms"][workers.start : workers.stop])]
        torch.testing.assert_close(result["figures"], figures, rtol=2e-2 if low else 100 * later, atol=0)
        assert result["kept"], "an average that was deployed has to leave no trace"
        assert result["rounded"]
        assert result["skipped"] == (scenario.nonfinite == "yes" and SICK in workers)
