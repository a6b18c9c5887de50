"""Accelerate's own arguments for workers of several processes: what is taken over, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from dsgdac_accel import GossipAccelerator, WorkerParallelismConfig, worker_parallelism
from dsgdac_accel.compatibility import refuse_parallelism_beside_mesh
from dsgdac_accel.worker_parallelism import with_workers

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
    monkeypatch.setattr(worker_parallelism, "on_cpu", lambda arguments: False)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    for variable in LAUNCHED:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize("launched", [False, True])
def test_replicas_become_workers_and_fsdp_stays_inside_them(on_gpus, launched):
    given = {} if launched else {"parallelism_config": shards(tp_size=2), "fsdp_plugin": FSDP2}
    for variable, value in (LAUNCHED | {"PARALLELISM_CONFIG_TP_SIZE": "2"}).items() if launched else ():
        on_gpus.setenv(variable, value)
    arguments = with_workers(given | {"log_with": "all"})
    config = arguments.pop("parallelism_config")
    assert arguments == {name: given[name] for name in given if name == "fsdp_plugin"} | {"log_with": "all"}
    assert isinstance(config, WorkerParallelismConfig)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.total_size) == (3, 2, 2, 12)
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]


def test_workers_may_have_tensor_parallelism_alone_and_be_a_single_one(on_gpus):
    config = WorkerParallelismConfig(dp_replicate_size=3, tp_size=2)
    assert with_workers({"parallelism_config": config})["parallelism_config"] is config
    assert config.active_mesh_dims == ["dp_replicate", "tp"]
    assert WorkerParallelismConfig(dp_shard_size=2).active_mesh_dims == ["dp_replicate", "dp_shard"]
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
        ({"parallelism_config": shards(cp_size=2), "fsdp_plugin": FSDP2}, {}, ValueError, "cp_size=2 .context"),
        ({"parallelism_config": shards(sp_size=2), "fsdp_plugin": FSDP2}, {}, ValueError, "sp_size=2 .sequence"),
        ({}, LAUNCHED | {"PARALLELISM_CONFIG_CP_SIZE": "2"}, ValueError, "cp_size=2 .context"),
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
    on_gpus.setattr(AcceleratorState, "_shared_state", {"parallelism_config": WorkerParallelismConfig.of(shards())})
    same = {"parallelism_config": shards(), "fsdp_plugin": FSDP2}
    assert with_workers(same) == same
    with pytest.raises(ValueError, match="keeps the settings of the first accelerator"):
        with_workers({"parallelism_config": shards(tp_size=2), "fsdp_plugin": FSDP2})


def test_sizes_must_be_those_of_the_launch():
    with pytest.raises(ValueError, match="dp_shard_size=2 and tp_size=1 make 6 processes, but 1 were launched"):
        WorkerParallelismConfig.of(shards()).build_device_mesh("cpu")
