"""Accelerate's own arguments for workers of several processes: what is taken over, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from dsgdac_accel import GossipAccelerator
from dsgdac_accel.compatibility import refuse_parallelism_beside_mesh, refuse_unsupported_model
from dsgdac_accel.distributed import sharded_workers
from dsgdac_accel.distributed.sharded_workers import ShardedWorkers, with_workers, workers_in
from dsgdac_accel.distributed.worker_mesh import WorkerMesh
from tests.llm.tiny import build_model

FSDP1, FSDP2 = SimpleNamespace(fsdp_version=1), SimpleNamespace(fsdp_version=2)
LAUNCHED = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "3",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
}


def shards(**sizes):
    return ParallelismConfig(dp_replicate_size=3, dp_shard_size=2, **sizes)


@pytest.fixture
def on_gpus(monkeypatch):
    """Nothing of an earlier accelerator, and a GPU in the eyes of the module."""
    monkeypatch.setattr(sharded_workers, "on_cpu", lambda arguments: False)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize("launched", [False, True])
def test_replicas_become_workers_and_fsdp_stays_inside_them(on_gpus, launched):
    given = {} if launched else {"parallelism_config": shards(), "fsdp_plugin": FSDP2}
    for variable, value in LAUNCHED.items() if launched else ():
        on_gpus.setenv(variable, value)
    arguments = with_workers(given | {"log_with": "all"})
    config = arguments.pop("parallelism_config")
    assert arguments == {name: given[name] for name in given if name == "fsdp_plugin"} | {"log_with": "all"}
    assert isinstance(config, ShardedWorkers)
    assert (config.dp_replicate_size, config.dp_shard_size, config.total_size) == (3, 2, 6)
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard"]


def test_a_single_worker_is_a_dimension_of_the_mesh(on_gpus):
    assert ShardedWorkers(dp_shard_size=2).active_mesh_dims == ["dp_replicate", "dp_shard"]
    assert with_workers({"log_with": None}) == {"log_with": None}


@pytest.mark.parametrize(
    ("arguments", "launched", "error", "message"),
    [
        ({"parallelism_config": shards()}, {}, ValueError, "dp_shard_size=2 needs FSDP2.*fsdp_version=2"),
        (
            {"parallelism_config": shards(), "fsdp_plugin": FSDP1},
            {},
            ValueError,
            "fsdp_version=1 averages.*fsdp_version=2",
        ),
        ({}, LAUNCHED | {"FSDP_VERSION": "1"}, ValueError, "fsdp_version=1 averages"),
        ({"fsdp_plugin": FSDP2}, {}, ValueError, "FSDP2 needs dp_shard_size > 1.*dp_replicate_size=workers"),
        ({"fsdp_plugin": FSDP2, "parallelism_config": ParallelismConfig()}, {}, ValueError, "needs dp_shard_size > 1"),
        ({"parallelism_config": 4}, {}, TypeError, "must be a ParallelismConfig; got int"),
        (
            {},
            LAUNCHED | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "0"},
            ValueError,
            "dp_replicate_size must be at least 1",
        ),
    ],
)
def test_what_cannot_be_sharded_inside_workers_is_refused(on_gpus, arguments, launched, error, message):
    for variable, value in launched.items():
        on_gpus.setenv(variable, value)
    with pytest.raises(error, match=message):
        with_workers(arguments)


@pytest.mark.parametrize("in_variables", [False, True])
def test_a_config_whose_sizes_are_all_1_changes_nothing(on_gpus, in_variables):
    given = {} if in_variables else {"parallelism_config": ParallelismConfig()}
    if in_variables:
        on_gpus.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert with_workers(given) == given
    on_gpus.undo()
    if in_variables:
        on_gpus.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    accelerator = GossipAccelerator(cpu=True, **given)
    assert accelerator.num_workers == 1
    assert not accelerator.prepare(DataLoader(range(4))).dataset[0]


def test_a_config_in_variables_is_refused_beside_a_mesh():
    accelerator = SimpleNamespace(parallelism_config=ParallelismConfig())
    with pytest.raises(ValueError, match=r"is set.* but device_mesh= says all of it"):
        refuse_parallelism_beside_mesh(accelerator)


def test_a_later_accelerator_cannot_have_other_workers(on_gpus):
    on_gpus.setattr(AcceleratorState, "_shared_state", {"parallelism_config": ShardedWorkers.of(shards())})
    same = {"parallelism_config": shards(), "fsdp_plugin": FSDP2}
    assert with_workers(same) == same
    other = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3)
    with pytest.raises(ValueError, match="keeps the settings of the first accelerator"):
        with_workers({"parallelism_config": other, "fsdp_plugin": FSDP2})


def test_sizes_must_be_those_of_the_launch():
    with pytest.raises(ValueError, match="dp_shard_size=2 make 6 processes, but 1 were launched"):
        ShardedWorkers.of(shards()).build_device_mesh("cpu")


# ---- splits of a worker that are not FSDP2's


@pytest.fixture
def eight_processes():
    """Rank 0 of 8, without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def of_mesh(*names):
    return lambda on_gpus: WorkerMesh(init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names))


def of_arguments(name):
    def build(on_gpus):
        config = shards(**{f"{name}_size": 2})
        with_workers({"parallelism_config": config, "fsdp_plugin": FSDP2})

    return build


def of_variables(name, **sizes):
    def build(on_gpus):
        for variable, value in (LAUNCHED | {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": "2"} | sizes).items():
            on_gpus.setenv(variable, value)
        with_workers({})

    return build


def of_trainer(name):
    """What `GossipCallback` takes over of a Trainer with `TrainingArguments(parallelism_config=...)`."""

    def build(on_gpus):
        config = ParallelismConfig(dp_shard_size=2, **{f"{name}_size": 2})
        workers_in(SimpleNamespace(parallelism_config=config, torch_device_mesh=object(), state=None))

    return build


def of_parameters(*names):
    """A frozen parameter is cut over the last dimension of a mesh."""

    def build(on_gpus):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=names)
        model = nn.Linear(4, 4)
        cut = distribute_tensor(model.weight.detach(), mesh[names[-1]], [Shard(0)], src_data_rank=None)
        model.weight = nn.Parameter(cut, requires_grad=False)
        refuse_unsupported_model(nn.Sequential(model))

    return build


def of_plan(on_gpus):
    model = build_model(LlamaForCausalLM)
    model._tp_size = 2  # as tp_plan="auto" sets it
    refuse_unsupported_model(model)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *((name, of_mesh("dp_replicate", "dp_shard", name)) for name in ("tp", "cp", "sp", "pp")),
        ("tp", of_mesh("dp_replicate", "tp", "other")),
        ("tp", of_mesh("tp", "dp_replicate", "dp_shard")),
        *((name, of_arguments(name)) for name in ("tp", "cp", "sp")),
        *((name, of_variables(name)) for name in ("tp", "cp", "sp")),
        ("tp", of_variables("tp", PARALLELISM_CONFIG_DP_SHARD_SIZE="1")),  # refused by the plain class itself
        *((name, of_trainer(name)) for name in ("tp", "cp", "sp")),
        ("tp", of_parameters("dp_replicate", "tp")),
        ("fsdp", of_parameters("dp_replicate", "fsdp")),
        ("tp", of_plan),
    ],
)
def test_whatever_splits_a_worker_but_fsdp_is_refused_with_the_way_out(on_gpus, eight_processes, name, build):
    with pytest.raises(ValueError, match=f"over 2 processes by '{name}', .*'dp_shard'.*fully_shard.*dp_shard_size"):
        build(on_gpus)


def test_what_fsdp_shards_along_another_name_is_left_to_the_comparison_with_the_workers(eight_processes):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicas", "fsdp"))
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].tp_size = "its own"  # not Transformers' mark
    fully_shard(model, mesh=mesh["fsdp"])
    refuse_unsupported_model(model)
