"""Accelerate's `ParallelismConfig` for gossip: its replicas are workers, and FSDP2 stays inside each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.accelerator import is_available

from dsgdac_accel.distributed.shards import refuse_other_dimensions

_SIZES = ("dp_replicate_size", "dp_shard_size")
_OTHER_DIMENSIONS = ("tp", "cp", "sp")
_HOW_TO_SHARD = (
    "parallelism_config=ParallelismConfig(dp_replicate_size=workers, dp_shard_size=shards) and "
    "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2); to a Trainer, TrainingArguments("
    "parallelism_config=..., fsdp=True)"
)


class ShardedWorkers(ParallelismConfig):
    """`ParallelismConfig` whose `dp_replicate_size` is the number of workers, which FSDP2 shards.

    Differences from the plain class: the mesh always has `dp_replicate`, and FSDP2's has not, so that gradients are
    reduced inside a worker only.
    """

    @classmethod
    def of(cls, config: Any) -> ShardedWorkers:
        """Return this config for a plain one.

        Raises:
            TypeError: it is no ParallelismConfig.
            ValueError: it splits a worker over another dimension than `dp_shard`.
        """
        if not isinstance(config, ParallelismConfig):
            raise TypeError(
                f"parallelism_config must be a ParallelismConfig; got {type(config).__name__}. Write "
                f"ParallelismConfig(dp_replicate_size=workers, dp_shard_size=shards)."
            )
        sizes = {name: getattr(config, f"{name}_size", 1) for name in _OTHER_DIMENSIONS}
        refuse_other_dimensions(sizes, "parallelism_config")
        if isinstance(config, cls):
            return config
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def dp_replicate_enabled(self) -> bool:
        """Always True: also one worker is a dimension of the mesh."""
        return True

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the dimensions that FSDP2 shards over, which lie inside a worker."""
        return ["dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> Any:
        """As the plain class, for exactly the launched processes.

        Raises:
            ValueError: the sizes do not multiply to the number of processes.
        """
        launched = dist.get_world_size() if dist.is_initialized() else 1
        if self.total_size != launched:
            raise ValueError(
                f"dp_replicate_size={self.dp_replicate_size} and dp_shard_size={self.dp_shard_size} make "
                f"{self.total_size} processes, but {launched} were launched. Launch {self.total_size}, or change the "
                f"sizes."
            )
        return super().build_device_mesh(device_type)


def with_workers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator` with `ShardedWorkers` in place of a plain config.

    A config that `accelerate launch` left in the environment becomes an argument. One whose sizes are all 1 stays as
    it is: every process is a worker.

    Raises:
        TypeError: `parallelism_config` is no ParallelismConfig.
        ValueError: shards without FSDP2, or the other way round; FSDP1; another dimension than `dp_shard` inside a
            worker; or parallelism without GPUs.
    """
    config, plugin = arguments.get("parallelism_config"), arguments.get("fsdp_plugin")
    launched = _is_set("ACCELERATE_USE_PARALLELISM_CONFIG")
    if launched:
        variables = {name: f"PARALLELISM_CONFIG_{name.upper()}_SIZE" for name in _OTHER_DIMENSIONS}
        sizes = {name: int(os.environ.get(variable, "1")) for name, variable in variables.items()}
        refuse_other_dimensions(sizes, "accelerate launch --use_parallelism_config")
    with_fsdp = plugin is not None or (not on_cpu(arguments) and _is_set("ACCELERATE_USE_FSDP"))
    if not with_fsdp and _splits_nothing(config, launched):
        return dict(arguments)
    if on_cpu(arguments):
        if config is not None or plugin is not None or launched:
            raise ValueError(
                "Accelerate's parallelism_config= and fsdp_plugin= need GPUs. On CPUs, shard the model yourself and "
                "pass GossipAccelerator(device_mesh=...), as in docs/sharded.md."
            )
        return dict(arguments)  # there, Accelerate does not look at variables for FSDP
    if AcceleratorState._shared_state:  # Accelerate keeps what the first accelerator of the process was told
        kept = AcceleratorState._shared_state.get("parallelism_config")
        given = kept if config is None else ShardedWorkers.of(config)
        if any(getattr(kept, name, None) != getattr(given, name, None) for name in _SIZES):
            raise ValueError(
                "parallelism_config= has no effect here: Accelerate keeps the settings of the first accelerator of a "
                "process. Pass it to the first one."
            )
        return dict(arguments)
    if config is None and launched:
        config = ShardedWorkers()
    version = getattr(plugin, "fsdp_version", None) or int(os.environ.get("FSDP_VERSION", "1"))
    _refuse_unfit(1 if config is None else ShardedWorkers.of(config).dp_shard_size, with_fsdp, version)
    if config is None:
        return dict(arguments)
    return {**arguments, "parallelism_config": ShardedWorkers.of(config)}


def workers_in(accelerator: Any) -> ShardedWorkers | None:
    """Return the `ShardedWorkers` for an Accelerator that somebody else has made; None if it splits nothing.

    Its mesh is that of the accelerator, or a new one if that has no workers, since there is only one.

    Raises:
        ValueError: shards without FSDP2, or the other way round; FSDP1; another dimension than `dp_shard` inside a
            worker.
    """
    config, plugin = accelerator.parallelism_config, getattr(accelerator.state, "fsdp_plugin", None)
    splits = config is not None and accelerator.torch_device_mesh is not None  # no mesh if all sizes are 1
    workers = ShardedWorkers.of(config) if splits else None
    with_fsdp = accelerator.distributed_type is DistributedType.FSDP
    version = getattr(plugin, "fsdp_version", 1)
    _refuse_unfit(1 if workers is None else workers.dp_shard_size, with_fsdp, version)
    if workers is not None:
        workers.device_mesh = accelerator.torch_device_mesh
        if "dp_replicate" not in workers.device_mesh.mesh_dim_names:
            workers.device_mesh = workers.build_device_mesh(accelerator.device.type)
    return workers


def _refuse_unfit(shards: int, with_fsdp: bool, version: int) -> None:
    """Raise ValueError unless FSDP2 shards where there are shards."""
    if with_fsdp and version != 2:
        raise ValueError(
            f"fsdp_version={version} averages the gradients of all processes, so that no worker has its own. Pass "
            f"{_HOW_TO_SHARD}."
        )
    if with_fsdp and shards == 1:
        raise ValueError(f"FSDP2 needs dp_shard_size > 1, the number of shards of a worker. Pass {_HOW_TO_SHARD}.")
    if shards > 1 and not with_fsdp:
        raise ValueError(f"dp_shard_size={shards} needs FSDP2 to shard the model. Pass {_HOW_TO_SHARD}.")


def _splits_nothing(config: Any, launched: bool) -> bool:
    """Return whether all sizes of a ParallelismConfig are 1, with which Accelerate trains as without one."""
    if config is None:
        return launched and ShardedWorkers().total_size == 1
    return isinstance(config, ParallelismConfig) and config.total_size == 1


def mesh_of_workers(config: Any, mesh: Any) -> Any:
    """Return `mesh`, which Accelerate made for `config`, if the workers are several processes each; else None."""
    return mesh if isinstance(config, ShardedWorkers) and mesh is not None and mesh.ndim > 1 else None


def on_cpu(arguments: Mapping[str, Any]) -> bool:
    """Return whether an Accelerator with these arguments will use the CPU, and so refuse a ParallelismConfig."""
    return bool(arguments.get("cpu")) or _is_set("ACCELERATE_USE_CPU") or not is_available()


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")
