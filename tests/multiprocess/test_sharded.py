"""Workers of several processes that shard their model by FSDP2, on gloo, against the simulation of Algorithm 1."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DataLoader

from dsgdac_accel import (
    AdaptiveConsensus,
    Gossip,
    GossipAccelerator,
    GossipConfig,
    NonFiniteError,
    build_topology,
    sharded_workers,
)
from dsgdac_accel.compatibility import supported_with_shards
from dsgdac_accel.shards import local_of, whole_of
from dsgdac_accel.simulation import Simulation
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS = 8
MAX_NORM = 0.3
GRID = ("dp_replicate", "dp_shard")


class Tied(nn.Module):
    """Token ids in, logits out, by one matrix; 7 rows, so that no number of shards divides it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x.argmax(1)))).sum(1, keepdim=True) + x


def make_model(kind: str = "layers") -> nn.Module:
    torch.manual_seed(0)
    if kind == "tied":
        return Tied().double()
    if kind == "narrow":
        return nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5), nn.LayerNorm(5)).double()
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
    if kind == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["0", "2"])).double()
    return model


def batch(rank: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return tuple(torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def loss_of(model: nn.Module, *where: int) -> torch.Tensor:
    x, y = batch(*where)
    return (model(x) - y).square().mean()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-2)
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-2, fused=name == "fused adam")


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / (STEPS + 3))


def mesh_of(workers: int, shards: int) -> Any:
    return init_device_mesh("cpu", (workers, shards), mesh_dim_names=GRID)


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    stack = getattr(getattr(model, "base_model", None), "model", model)  # inside of a model with LoRA
    for layer in [*stack.children()][:1] if isinstance(stack, nn.Sequential) else []:
        fully_shard(layer, mesh=mesh["dp_shard"], **options)
    return fully_shard(model, mesh=mesh["dp_shard"], **options)


def fresh() -> None:
    """Forget what Accelerate keeps of an earlier case of this process, in its classes and in the environment."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    for variable in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        del os.environ[variable]


def launch_variables(sizes: dict[str, int]) -> dict[str, str]:
    """Return what `accelerate launch` sets for FSDP2 and a ParallelismConfig of these sizes."""
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    return variables | {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}


def worker_of(rank: int, shards: int, rows: list[list[int]] | None) -> int:
    return rank // shards if rows is None else next(worker for worker, row in enumerate(rows) if rank in row)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole(model: nn.Module) -> torch.Tensor:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return torch.cat([whole_of(p).detach().flatten() for p in model.parameters()])


def train(
    rank: int,
    workers: int,
    shards: int,
    kind: str = "layers",
    optimizer_name: str = "adam",
    parts: int = 1,
    peek: bool = False,
    keep_gathered: bool = False,
    late: bool = False,
    bad: tuple[int, int] | None = None,
    norm_type: float = 2.0,
    rows: list[list[int]] | None = None,
    by: str = "mesh",
    **gossip: Any,
) -> dict[str, Any]:
    """Train, and return what the tests compare.

    `parts`: batches accumulated in a step. `peek`: run the model without a backward pass right before each step. `by`:
    who shards, the test by a "mesh", or Accelerate by "arguments" or the "environment".
    `late`: check as on a GPU. `bad`: this rank's gradient is not finite at this step. `rows`: the ranks of each worker.
    """
    fresh()
    mesh = mesh_of(workers, shards) if by == "mesh" else None
    if rows is not None:
        mesh = DeviceMesh("cpu", rows, mesh_dim_names=GRID)
    config = GossipConfig(**{"power": 2.0, "timeout": 60, "log_every": 3, **gossip})
    options = {"device_mesh": mesh} if by == "mesh" else accelerate_options(by, workers, shards)
    accelerator = GossipAccelerator(cpu=True, gossip=config, gradient_accumulation_steps=parts, **options)
    model = make_model(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.0 if worker_of(rank, shards, rows) == 0 else 0.5)  # worker 0's values count
    if by == "mesh":
        model = sharded(model, mesh)
    if keep_gathered:
        model.set_reshard_after_backward(False)
    optimizer = make_optimizer(optimizer_name, model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make_scheduler(optimizer))
    accelerator.gossip_steps[0].mixer.agreement.late = late
    norms = []
    for step in range(STEPS):
        for part in range(parts):
            with accelerator.accumulate(model) if parts > 1 else nullcontext():
                accelerator.backward(loss_of(model, rank, step, part))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type))
                    if bad == (rank, step):
                        local_of(next(p.grad for p in model.parameters() if p.grad is not None)).fill_(torch.nan)
                    if peek:
                        with torch.no_grad():
                            model(batch(rank, step)[0])
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
    radius = accelerator.measure_consensus()["gossip/radius"]
    own = whole(model)
    loss_of(model, rank, 0)  # leaves the root gathered, as every pass below
    with accelerator.deployed_model(model) as deployed:
        loss = float(loss_of(deployed, 0, 0).detach())
        mean = whole(model)
        loss_of(deployed, 0, 0)
    next_loss = float(loss_of(model, rank, 0).detach())
    restored = torch.equal(own, whole(model))
    saved = accelerator.get_state_dict(model)
    return {
        "accelerator": accelerator,
        "model": model,
        "x": own,
        "mean": mean,
        "loss": loss,
        "restored": restored,
        "next_loss": next_loss,
        "saved": torch.cat([saved[name].flatten() for name, _ in model.named_parameters()]) if saved else None,
        "radius": radius,
        "apart": accelerator.gossip_steps[0].mixer.arrivals.disagreement,
        "norms": torch.stack(norms),
        "skipped": accelerator.gossip_steps[0].guard.skipped,
    }


def accelerate_options(by: str, workers: int, shards: int) -> dict[str, Any]:
    """Return the arguments for Accelerate's own sharding, or set its variables, on gloo in place of GPUs."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    sharded_workers.on_cpu = lambda arguments: False
    sizes = {"dp_replicate_size": workers, "dp_shard_size": shards}
    if by == "environment":
        os.environ.update(launch_variables(sizes))
        return {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return {"parallelism_config": ParallelismConfig(**sizes), "fsdp_plugin": plugin}


def simulate(
    workers: int,
    shards: int,
    kind: str = "layers",
    optimizer_name: str = "adam",
    parts: int = 1,
    bad: tuple[int, int] | None = None,
    topology: str = "one_peer_ring",
    power: float = 2.0,
    order: str = "local_first",
    mix_every: int = 1,
    norm_type: float = 2.0,
    rows: list[list[int]] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The same with one dense model per worker, whose gradient is the mean over its processes."""
    models = [make_model(kind) for _ in range(workers)]
    optimizers = [make_optimizer(optimizer_name, model) for model in models]
    schedulers = list(map(make_scheduler, optimizers))
    schedule = AdaptiveConsensus(power=power)
    simulation = Simulation(models, optimizers, build_topology(topology, workers), schedule, order, mix_every)
    norms: list[list[torch.Tensor]] = [[] for _ in models]
    apart = 0.0  # between worker 0 and the last one, before the last round
    for step in range(STEPS):
        for worker, model in enumerate(models):
            model.zero_grad()
            ranks = rows[worker] if rows else range(worker * shards, (worker + 1) * shards)
            losses = [loss_of(model, rank, step, part) for rank in ranks for part in range(parts)]
            torch.stack(losses).mean().backward()
            norms[worker].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type))
        skip = {worker_of(bad[0], shards, rows)} if bad is not None and bad[1] == step else ()
        if (step + 1) % mix_every == 0:
            apart = float((flat(models[0]) - flat(models[-1])).norm())
        simulation.step(skip=skip)
        for scheduler in schedulers:
            scheduler.step()
    x = list(map(flat, models))
    mean = make_model(kind)
    nn.utils.vector_to_parameters(torch.stack(x).mean(0), mean.parameters())
    return {
        "x": x,
        "mean": torch.stack(x).mean(0),
        "loss": float(loss_of(mean, 0, 0).detach()),
        "next_losses": [
            float(loss_of(models[worker_of(rank, shards, rows)], rank, 0).detach()) for rank in range(workers * shards)
        ],
        "rows": rows,
        "radius": simulation.radius(),
        "apart": apart if workers == 2 else None,
        "norms": norms,
    }


def require_equal(results: list[dict[str, Any]], expected: dict[str, Any], shards: int) -> None:
    assert len(expected["x"]) == 1 or expected["radius"] > 1e-3, "the workers have to differ in this test"
    for rank, result in enumerate(results):
        worker = worker_of(rank, shards, expected["rows"])
        torch.testing.assert_close(result["x"], expected["x"][worker], rtol=0, atol=1e-9)
        torch.testing.assert_close(result["mean"], expected["mean"], rtol=0, atol=1e-9)
        torch.testing.assert_close(result["norms"], torch.stack(expected["norms"][worker]), rtol=1e-9, atol=0)
        assert result["radius"] == pytest.approx(expected["radius"], abs=1e-9)
        assert expected["apart"] is None or result["apart"] == pytest.approx(expected["apart"], abs=1e-9)
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-9)
        assert result["restored"]
        assert result["next_loss"] == pytest.approx(expected["next_losses"][rank], abs=1e-9)
        if rank == 0:
            torch.testing.assert_close(result["saved"], expected["mean"], rtol=0, atol=1e-9)
        else:
            assert result["saved"] is None


def plain(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("accelerator", "model")}


def refusal(act: Any) -> str:
    try:
        act()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "not refused"


# ---- one launch of 2 x 2


def train_and_save(rank: int, folder: str) -> dict[str, Any]:
    result = train(rank, 2, 2)
    accelerator, model = result["accelerator"], result["model"]
    writes: list[int] = []
    accelerator.save_model(model, folder)
    gather = torch.distributed.tensor.DTensor.full_tensor
    torch.distributed.tensor.DTensor.full_tensor = lambda self: writes.append(1) or gather(self)
    state = accelerator.get_state_dict(model)
    torch.distributed.tensor.DTensor.full_tensor = gather
    metrics = accelerator.consensus_logger.log({}, None)
    mesh = mesh_of(2, 2)
    refused = {
        "name": refusal(lambda: new_accelerator(named_mesh("dp", "dp_shard"))),
        "pipeline": refusal(lambda: new_accelerator(named_mesh("dp_replicate", "dp_shard", "pp"))),
        "context": refusal(lambda: new_accelerator(named_mesh("dp_replicate", "dp_shard", "cp"))),
        "workers only": refusal(
            lambda: new_accelerator(init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",)))
        ),
        "sizes": refusal(lambda: new_accelerator(init_device_mesh("cpu", (1, 2), mesh_dim_names=mesh.mesh_dim_names))),
        "tensor": refusal(lambda: new_accelerator(named_mesh("dp_replicate", "tp"))),
        "deepspeed": refusal(lambda: GossipAccelerator(cpu=True, deepspeed_plugin=object())),
        "order": refusal(lambda: new_accelerator(DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=GRID))),
        "no mesh": refusal(lambda: new_accelerator([[0, 1], [2, 3]])),
        "virtual": refusal(lambda: new_accelerator(mesh, workers_per_process=2)),
        "hsdp": refusal(lambda: prepare(accelerator, fully_shard(nn.Linear(4, 4), mesh=mesh))),
        "not sharded": refusal(lambda: prepare(accelerator, nn.Linear(4, 4))),
        "fsdp 1": refusal(lambda: prepare(accelerator, type("FullyShardedDataParallel", (nn.Linear,), {})(4, 4))),
        "fsdp plugin": refusal(lambda: GossipAccelerator(cpu=True, fsdp_plugin=object(), device_mesh=mesh)),
        "parallelism on CPUs": refusal(
            lambda: GossipAccelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
        ),
        "fp16": refusal(refuse_fp16),
        "bf16": refusal(lambda: prepare(accelerator, sharded(nn.Linear(4, 4).bfloat16(), mesh))),
        "pytorch": refusal(lambda: gossip_of(sharded(nn.Linear(4, 4), mesh))),
        "one shard": refusal(lambda: deploy_with_one_other_shard(rank, mesh)),
        "batch norm": refusal(lambda: deploy_batch_norm(accelerator, mesh)),
        "replicated": refusal(lambda: prepare(accelerator, replicated(nn.Linear(4, 4), mesh))),
    }
    return plain(result) | {"refused": refused, "gathers": len(writes), "state": sorted(state), "metrics": metrics}


def new_accelerator(mesh: Any, **gossip: Any) -> GossipAccelerator:
    return GossipAccelerator(cpu=True, device_mesh=mesh, gossip=GossipConfig(timeout=30, **gossip))


def refuse_fp16() -> None:
    supported_with_shards(GossipConfig(), SimpleNamespace(mixed_precision="fp16", device=torch.device("cpu")))


def named_mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2, 1)[: len(names)], mesh_dim_names=names)


def prepare(accelerator: GossipAccelerator, model: nn.Module) -> None:
    try:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        accelerator.free_memory()


def gossip_of(model: nn.Module) -> Gossip:
    return Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), GossipConfig(timeout=30))


def replicated(model: nn.Module, mesh: Any) -> nn.Module:
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.data, mesh["dp_shard"], [Replicate()])))
    return model


def deploy_with_one_other_shard(rank: int, mesh: Any) -> None:
    accelerator = new_accelerator(mesh)
    model = accelerator.prepare(sharded(nn.Linear(4, 4), mesh))
    if rank == 3:
        local_of(model.weight).detach().add_(1.0)
    with accelerator.deployed_model(model):
        pass


def deploy_batch_norm(accelerator: GossipAccelerator, mesh: Any) -> None:
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mesh)
    model = accelerator.prepare(model)
    with accelerator.deployed_model(model, calibrate=[torch.ones(2, 4)]):
        pass


REFUSALS = {
    "name": "device_mesh must have the dimensions 'dp_replicate' .* got .*'dp'",
    "pipeline": "must have the dimensions .*'dp_shard'.* got .*'pp'",
    "context": "must have the dimensions .*'dp_shard'.* got .*'cp'",
    "workers only": "must have the dimensions 'dp_replicate' .*'dp_shard'",
    "sizes": "device_mesh has 2 processes, but 4 were launched",
    "tensor": "device_mesh splits a worker over 2 processes by 'tp'.*'dp_shard'",
    "deepspeed": "deepspeed_plugin= is not supported.*device_mesh",
    "order": r"ranks of device_mesh must ascend along each dimension; got \[3, 1\]",
    "no mesh": "device_mesh must be a DeviceMesh; got list",
    "virtual": "workers_per_process=2 .*device_mesh",
    "hsdp": "weight is sharded over a mesh with several workers",
    "not sharded": "weight is trained but not sharded",
    "fsdp 1": "already wrapped in FullyShardedDataParallel.*device_mesh",
    "fsdp plugin": "fsdp_plugin= is not supported beside device_mesh=",
    "parallelism on CPUs": "parallelism_config= and fsdp_plugin= need GPUs.*device_mesh",
    "fp16": "mixed_precision='fp16' does not work with device_mesh",
    "bf16": "weight is torch.bfloat16 and sharded",
    "pytorch": "weight is a DTensor.*device_mesh",
    "replicated": "weight is placed as .*Replicate.* on 2 of the 2 processes of a worker",
    "one shard": "all workers must have the same parameters.* no prepared optimizer mixes the workers",
    "batch norm": "calibrate= is not supported for sharded models with BatchNorm",
}


def test_two_workers_of_two_shards_follow_algorithm_1_and_save_their_average_once(tmp_path):
    folder = tmp_path / "saved"
    results = run_workers(train_and_save, 4, str(folder))
    expected = simulate(2, 2)
    require_equal(results, expected, shards=2)
    saved = load_file(folder / "model.safetensors")
    names = list(make_model().state_dict())
    assert sorted(saved) == sorted(names)
    torch.testing.assert_close(torch.cat([saved[n].flatten() for n in names]), expected["mean"], rtol=0, atol=1e-9)
    assert [result["gathers"] for result in results] == [6, 6, 0, 0], "only worker 0 gathers"
    assert [len(result["state"]) for result in results] == [6, 0, 0, 0]
    assert results[0]["metrics"]["gossip/radius"] == pytest.approx(expected["radius"], abs=1e-9)
    for result in results:
        assert {case: text for case, text in result["refused"].items() if not re.search(REFUSALS[case], text)} == {}


# ---- other worlds and settings

WORLDS = {
    (2, 2): [
        {"optimizer_name": "sgd", "power": 0.0},
        {"kind": "tied", "parts": 2},
        {"kind": "frozen", "order": "mix_first", "overlap": False, "norm_type": math.inf},
        {"peek": True, "parts": 2, "keep_gathered": True},
        {"bad": (1, 3)},
        {"bad": (1, 3), "late": True, "rows": [[0, 2], [1, 3]]},
        {"bad": (2, 3), "late": True, "optimizer_name": "fused adam"},
        {"topology": "complete"},
        {"mix_every": 5},
    ],
    (3, 2): [{"optimizer_name": "sgd"}, {"kind": "tied"}, {"topology": "ring", "bad": (5, 2)}],
    (2, 3): [  # the third process has no row of the first layer, or of any in "narrow"
        {},
        {"kind": "tied", "optimizer_name": "sgd"},
        {"kind": "narrow", "norm_type": math.inf, "bad": (1, 3)},
        {"kind": "narrow", "mix_every": 2},
    ],
    (1, 2): [{"parts": 2}],
    (2, 1): [{"kind": "tied"}],
}


def train_cases(rank: int, *world: int) -> list[dict[str, Any]]:
    return [plain(train(rank, *world, **case)) for case in WORLDS[world]]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_sharded_workers_follow_algorithm_1(world):
    workers, shards = world
    results = run_workers(train_cases, workers * shards, *world, timeout=240)
    for number, case in enumerate(WORLDS[world]):
        expected = simulate(*world, **case)
        of_case = [result[number] for result in results]
        require_equal(of_case, expected, shards)
        if "bad" in case:
            mine = [worker_of(rank, shards, case.get("rows")) for rank in range(len(of_case))]
            assert [result["skipped"] for result in of_case] == [int(w == mine[case["bad"][0]]) for w in mine]


BY_ACCELERATE = [{"by": "arguments", "parts": 2}, {"by": "environment", "optimizer_name": "sgd"}]
"""How two workers of two shards are trained."""


def train_by_accelerate(rank: int) -> list[dict[str, Any]]:
    results = []
    for case in BY_ACCELERATE:
        result = train(rank, 2, 2, **case)
        accelerator = result["accelerator"]
        mesh, parallelism = accelerator.torch_device_mesh, accelerator.parallelism_config
        of_mesh = mesh.mesh_dim_names, tuple(mesh.shape), parallelism.fsdp_dim_names, accelerator.num_workers
        results.append(plain(result) | {"mesh": of_mesh})
    return results


@pytest.mark.slow
def test_workers_that_accelerate_shards_follow_algorithm_1():
    results = run_workers(train_by_accelerate, 4, timeout=240)
    for number, case in enumerate(BY_ACCELERATE):
        of_case = [result[number] for result in results]
        require_equal(of_case, simulate(2, 2, **case), shards=2)
        assert of_case[0]["mesh"] == (GRID, (2, 2), ["dp_shard_cp"], 2)


def train_in_bf16(rank: int, policy: bool, comm_dtype: str) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    accelerator = GossipAccelerator(
        cpu=True,
        device_mesh=mesh,
        mixed_precision="no" if policy else "bf16",
        gossip=GossipConfig(power=0, timeout=60, comm_dtype=comm_dtype),
    )
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if policy else {}
    model = sharded(make_model().float(), mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    history, gradients = [whole(model)], []
    for step in range(STEPS):
        x, y = batch(rank, step)
        accelerator.backward((model(x.float()).float() - y.float()).square().mean())
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
        history.append(whole(model))
    kinds = {local_of(p).dtype for p in model.parameters()}
    return {"x": history, "gradients": gradients, "kinds": kinds}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "comm_dtype"), [(True, "full"), (False, "full"), (True, "int8"), (False, "bf16")])
def test_shards_stay_float32_in_mixed_precision_and_the_mean_follows_sgd(policy, comm_dtype):
    results = run_workers(train_in_bf16, 4, policy, comm_dtype)
    first, second = results[0], results[2]
    assert all(result["kinds"] == {torch.float32} for result in results)
    for step in range(STEPS):
        before, after = (first["x"][t].double() + second["x"][t].double() for t in (step, step + 1))
        local = first["gradients"][step].double() + second["gradients"][step].double()
        torch.testing.assert_close(after, before - 0.1 * local, rtol=0, atol=1e-6)
        if comm_dtype == "full":  # gamma is 1, so that both workers get the mean of x before their own update
            mine = before / 2 - 0.1 * first["gradients"][step].double()
            torch.testing.assert_close(first["x"][step + 1].double(), mine, rtol=0, atol=1e-6)
    assert torch.equal(results[0]["x"][-1], results[1]["x"][-1])
    assert not torch.equal(results[0]["x"][-1], results[2]["x"][-1])


# ---- decisions of whole workers


def prepared(lr: float = 0.1, *extra: nn.Module) -> tuple[GossipAccelerator, nn.Module, torch.optim.Optimizer]:
    fresh()
    mesh = mesh_of(2, 2)
    accelerator = GossipAccelerator(cpu=True, device_mesh=mesh, gossip=GossipConfig(timeout=30))
    model = sharded(nn.Sequential(make_model(), *extra).double(), mesh)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def take_step(accelerator: GossipAccelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *where: int) -> None:
    accelerator.backward(loss_of(model, *where))
    optimizer.step()
    optimizer.zero_grad()


def decide(rank: int) -> dict[str, Any]:
    accelerator, model, optimizer = prepared(0.1, nn.BatchNorm1d(5))
    take_step(accelerator, model, optimizer, rank, 0)
    own = model[1].running_mean.clone()
    with accelerator.deployed_model(model) as deployed:
        pooled = deployed[1].running_mean.clone()
    unequal = prepared(0.1 + 0.1 * (rank == 1))
    lr = refusal(lambda: take_step(*unequal, rank, 0))
    accelerator, model, optimizer = prepared()
    steps = 0
    try:
        for step in range(6):
            take_step(accelerator, model, optimizer, rank, step)
            steps += 1
            if (rank, step) == (3, 1):
                local_of(next(model.parameters())).data.fill_(torch.nan)
    except NonFiniteError as error:
        return {"own": own, "pooled": pooled, "lr": lr, "parameters": str(error), "steps": steps}
    return {}


@pytest.mark.slow
def test_what_is_not_finite_unequal_or_pooled_in_one_process_counts_in_all():
    results = run_workers(decide, 4)
    mean = torch.stack([result["own"] for result in results]).mean(0)
    for result in results:
        torch.testing.assert_close(result["pooled"], mean, rtol=0, atol=1e-12)
        assert re.search("same learning rate at the first step; rank 0 has 0.1 and rank 1 has 0.2", result["lr"])
        assert result["parameters"].startswith("the parameters of worker 1 are not finite")
        assert result["steps"] == results[0]["steps"]


# ---- data, signals, losses


def read_and_stop(rank: int) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    config = GossipConfig(timeout=30)
    accelerator = GossipAccelerator(cpu=True, device_mesh=mesh, gossip=config, scheduler_ticks="num_processes")
    model = sharded(make_model().float(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1.0)
    loader = DataLoader(torch.arange(21.0), batch_size=2, shuffle=True)
    torch.manual_seed(100 + rank // 2)  # the processes of a worker start alike
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    uneven = len(list(accelerator.equal_steps(DataLoader(torch.arange(2.0 + rank % 2)))))
    seen = [samples.tolist() for samples in loader]
    gathered = {}
    for objects in (False, True):
        found: list[float] = []
        for samples in loader:
            part = samples.tolist() if objects else samples
            found += map(float, accelerator.gather_for_metrics(part, use_gather_object=objects))
        gathered[objects] = sorted(found)
    drawn = torch.rand(4).tolist()
    torch.manual_seed(200 + rank)
    steps = 0
    with accelerator.stop_on_signals():
        while not accelerator.should_stop():
            accelerator.backward(model(torch.ones(2, 5)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if rank == 3 and steps == 2:
                signal.raise_signal(signal.SIGTERM)
    accelerator.deploy(model)
    return {
        "seen": seen,
        "gathered": gathered,
        "uneven": uneven,
        "drawn": drawn,
        "later": torch.rand(4).tolist(),
        "steps": steps,
        "ticks": scheduler.scheduler.last_epoch,
        "reason": accelerator.stop_reason,
        "deployed": whole(model),
    }


@pytest.mark.slow
def test_processes_read_their_own_data_draw_their_own_numbers_and_stop_together():
    results = run_workers(read_and_stop, 4)
    assert [len(result["seen"]) for result in results] == [3] * 4
    assert {sample for result in results for samples in result["seen"] for sample in samples} == set(range(21))
    every = [*map(float, range(21))]
    assert all(result["gathered"] == {False: every, True: every} for result in results)
    for name in ("seen", "drawn", "later"):
        assert len({str(result[name]) for result in results}) == 4
    assert [result["uneven"] for result in results] == [2] * 4
    assert [result["ticks"] for result in results] == [4 * results[0]["steps"]] * 4
    assert len({result["steps"] for result in results}) == 1
    assert all(torch.equal(result["deployed"], results[0]["deployed"]) for result in results)


def lose_a_shard(rank: int, where: str) -> None:
    mesh = mesh_of(2, 2)
    accelerator = GossipAccelerator(cpu=True, device_mesh=mesh, gossip=GossipConfig(timeout=15))
    model = sharded(make_model(), mesh)
    model, optimizer = accelerator.prepare(model, make_optimizer("sgd", model))
    for step in range(6):
        dies = rank == 3 and step == 3
        if dies and where == "forward":
            os._exit(0)
        loss = loss_of(model, rank, step)
        if dies and where == "backward":
            os._exit(0)
        accelerator.backward(loss)
        if dies and where == "step":
            os._exit(0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_killed_shard_ends_its_worker_and_the_run_by_name(where):
    outcomes = try_workers(lose_a_shard, 4, where)
    for outcome in outcomes[:3]:
        assert outcome.exit_code == 1
        assert re.search("WorkerLostError: .*(worker 1|rank 3) was lost in", outcome.error)  # or by the first report


# ---- the page of docs/


@pytest.mark.slow
def test_the_example_of_the_page_runs_and_saves_a_whole_model(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "sharded.md").read_text(encoding="utf-8")
    script, *_ = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sharded.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", "sharded.py"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(launch, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss of the average ([0-9.]+)", run.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model.load_state_dict(load_file(tmp_path / "deployed" / "model.safetensors"))
