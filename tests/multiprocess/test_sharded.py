"""Workers of several processes that shard their model by FSDP2, on gloo, against the simulation of Algorithm 1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.data import DataLoader

from dsgdac_accel import Gossip, GossipAccelerator, GossipConfig, NonFiniteError
from dsgdac_accel.compatibility import supported_on
from dsgdac_accel.distributed import sharded_workers
from dsgdac_accel.distributed.shards import local_of, whole_of
from tests.multiprocess.scenarios import Net, Scenario, World, fresh, require_equal, train
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS = 8
GRID = ("dp_replicate", "dp_shard")


def make_model(kind: str = "layers") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5), nn.LayerNorm(5)).double()
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
    return model


def batch(rank: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return tuple(torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def loss_of(model: nn.Module, *where: int) -> torch.Tensor:
    x, y = batch(*where)
    return (model(x) - y).square().mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-2)


def mesh_of(workers: int, shards: int) -> Any:
    return init_device_mesh("cpu", (workers, shards), mesh_dim_names=GRID)


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    stack = getattr(getattr(model, "base_model", None), "model", model)  # inside of a model with LoRA
    for layer in [*stack.children()][:1] if isinstance(stack, nn.Sequential) else []:
        fully_shard(layer, mesh=mesh["dp_shard"], **options)
    return fully_shard(model, mesh=mesh["dp_shard"], **options)


def launch_variables(sizes: dict[str, int]) -> dict[str, str]:
    """Return what `accelerate launch` sets for FSDP2 and a ParallelismConfig of these sizes."""
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    return variables | {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole(model: nn.Module) -> torch.Tensor:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return torch.cat([whole_of(p).detach().flatten() for p in model.parameters()])


def accelerate_options(by: str, world: World) -> dict[str, Any]:
    """Return the arguments for Accelerate's own sharding, or set its variables, on gloo in place of GPUs."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    sharded_workers.on_cpu = lambda arguments: False
    sizes = {"dp_replicate_size": world.workers, "dp_shard_size": world.shards}
    if by == "environment":
        os.environ.update(launch_variables(sizes))
        return {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return {"parallelism_config": ParallelismConfig(**sizes), "fsdp_plugin": plugin}


def refusal(act: Any) -> str:
    try:
        act()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "not refused"


# ---- one launch of 2 x 2


WORLD = World(4, shards=2)


def train_and_save(rank: int, folder: str) -> dict[str, Any]:
    return train(rank, WORLD, Scenario(), after=partial(save_and_refuse, rank, folder))


def save_and_refuse(rank: int, folder: str, accelerator: GossipAccelerator, model: nn.Module) -> dict[str, Any]:
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
    return {"refused": refused, "gathers": len(writes), "state": sorted(state), "metrics": metrics}


def new_accelerator(mesh: Any, **gossip: Any) -> GossipAccelerator:
    return GossipAccelerator(cpu=True, device_mesh=mesh, gossip=GossipConfig(timeout=30, **gossip))


def refuse_fp16() -> None:
    accelerator = SimpleNamespace(mixed_precision="fp16", device=torch.device("cpu"))
    supported_on(SimpleNamespace(), GossipConfig(), accelerator)


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
    "fp16": "mixed_precision='fp16' does not work with .*device_mesh",
    "bf16": "weight is torch.bfloat16 and sharded",
    "pytorch": "weight is a DTensor.*device_mesh",
    "replicated": "weight is placed as .*Replicate.* on 2 of the 2 processes of a worker",
    "one shard": "all workers must have the same parameters.* no prepared optimizer mixes the workers",
    "batch norm": "calibrate= of a model with BatchNorm does not work with sharded workers",
}


def test_two_workers_of_two_shards_follow_algorithm_1_and_save_their_average_once(tmp_path):
    folder = tmp_path / "saved"
    results = run_workers(train_and_save, 4, str(folder))
    require_equal(WORLD, Scenario(), results)
    mean, found = results[0]["mean"], [result["after"] for result in results]
    saved = load_file(folder / "model.safetensors")
    names = list(Net(Scenario()).state_dict())
    assert sorted(saved) == sorted(names)
    torch.testing.assert_close(torch.cat([saved[n].flatten() for n in names]), mean, rtol=0, atol=1e-12)
    assert [each["gathers"] for each in found] == [8, 8, 0, 0], "only worker 0 gathers"
    assert [len(each["state"]) for each in found] == [8, 0, 0, 0]
    assert found[0]["metrics"]["gossip/radius"] == pytest.approx(results[0]["radius"], abs=1e-9)
    before = results[0]["x"][0, -2], results[2]["x"][0, -2]
    apart = float(torch.sub(*before).norm())
    for each in found:
        assert each["metrics"]["gossip/neighbor_disagreement"] == pytest.approx(apart, abs=1e-9)
        assert {case: text for case, text in each["refused"].items() if not re.search(REFUSALS[case], text)} == {}


# ---- other ways to shard


def train_by_accelerate(rank: int) -> list[dict[str, Any]]:
    ways = [partial(accelerate_options, by) for by in ("arguments", "environment")]
    return [train(rank, WORLD, Scenario(), after=mesh_names, by_accelerate=way) for way in ways]


def mesh_names(accelerator: GossipAccelerator, model: nn.Module) -> tuple:
    mesh, parallelism = accelerator.torch_device_mesh, accelerator.parallelism_config
    return mesh.mesh_dim_names, tuple(mesh.shape), parallelism.fsdp_dim_names, accelerator.num_workers


@pytest.mark.slow
def test_workers_that_accelerate_shards_follow_algorithm_1():
    for found in zip(*run_workers(train_by_accelerate, 4, timeout=240), strict=True):
        require_equal(WORLD, Scenario(), found)
        assert found[0]["after"] == (GRID, (2, 2), ["dp_shard_cp"], 2)


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
        assert re.search("same learning rate; at step 0 worker . has 0.[12] and worker . has 0.[12]", result["lr"])
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
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
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
