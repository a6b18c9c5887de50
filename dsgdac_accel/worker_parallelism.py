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

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size")
_REFUSED_SIZES = {"cp_size": "context parallelism", "sp_size": "sequence parallelism"}
_HOW_TO_SHARD = (
    "parallelism_config=ParallelismConfig(dp_replicate_size=workers, dp_shard_size=shards) and "
    "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2); to a Trainer, TrainingArguments("
    "parallelism_config=..., fsdp=True)"
)


class WorkerParallelismConfig(ParallelismConfig):
    """`ParallelismConfig` whose `dp_replicate_size` is the number of workers, which gossip.

    `GossipAccelerator` and `GossipCallback` make one of a plain `ParallelismConfig`, and of the variables that
    `accelerate launch` sets. Construct it yourself for workers with tensor parallelism alone, which the plain class
    refuses.

    Differences from the plain class: the mesh always has `dp_replicate`, and FSDP2's has not, so that gradients are
    reduced inside a worker only; `tp_size` needs no `dp_shard_size`.

    Raises:
        ValueError: a size is not positive, or of a dimension that gossip does not support.
    """

    dp_replicate_size: Any

    def __post_init__(self) -> None:
        """Read sizes that are None from the environment, as the plain class does, and check them."""
        given = self.dp_replicate_size
        workers = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")) if given is None else given
        self.dp_replicate_size = min(workers, 1)  # several replicas need dp_shard beside tp only for DDP
        super().__post_init__()
        self.dp_replicate_size = self._sizes["dp_replicate"] = workers
        for name, meaning in _REFUSED_SIZES.items():
            if getattr(self, name, 1) > 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} ({meaning}) is not supported with gossip. Leave it out, and use "
                    f"dp_shard_size or tp_size."
                )

    @classmethod
    def of(cls, config: Any) -> WorkerParallelismConfig:
        """Return this config for a plain one."""
        if isinstance(config, cls):
            return config
        if not isinstance(config, ParallelismConfig):
            raise TypeError(
                f"parallelism_config must be a ParallelismConfig; got {type(config).__name__}. Write "
                f"ParallelismConfig(dp_replicate_size=workers, dp_shard_size=shards)."
            )
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
                f"dp_replicate_size={self.dp_replicate_size}, dp_shard_size={self.dp_shard_size} and "
                f"tp_size={self.tp_size} make {self.total_size} processes, but {launched} were launched. Launch "
                f"{self.total_size}, or change the sizes."
            )
        return super().build_device_mesh(device_type)


def with_workers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Accelerator` with `WorkerParallelismConfig` in place of a plain config.

    A config that `accelerate launch` left in the environment becomes an argument. One whose sizes are all 1 stays as
    it is: every process is a worker.

    Raises:
        TypeError: `parallelism_config` is no ParallelismConfig.
        ValueError: shards without FSDP2, or the other way round; FSDP1; or parallelism without GPUs.
    """
    config, plugin = arguments.get("parallelism_config"), arguments.get("fsdp_plugin")
    launched = _is_set("ACCELERATE_USE_PARALLELISM_CONFIG")
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
        _refuse_other(config)
        return dict(arguments)
    if config is None and launched:
        config = WorkerParallelismConfig()
    version = getattr(plugin, "fsdp_version", None) or int(os.environ.get("FSDP_VERSION", "1"))
    _refuse_unfit(1 if config is None else WorkerParallelismConfig.of(config).dp_shard_size, with_fsdp, version)
    if config is None:
        return dict(arguments)
    return {**arguments, "parallelism_config": WorkerParallelismConfig.of(config)}


def workers_in(accelerator: Any) -> WorkerParallelismConfig | None:
    """Return the `WorkerParallelismConfig` for an Accelerator that somebody else has made; None if it splits nothing.

    Its mesh is that of the accelerator. If that has no workers, since there is only one, call `build_device_mesh`.

    Raises:
        ValueError: shards without FSDP2, or the other way round; FSDP1; settings of FSDP2 that do not work with gossip;
            a dimension that gossip does not support.
    """
    config, plugin = accelerator.parallelism_config, getattr(accelerator.state, "fsdp_plugin", None)
    splits = config is not None and accelerator.torch_device_mesh is not None  # no mesh if all sizes are 1
    workers = WorkerParallelismConfig.of(config) if splits else None
    with_fsdp = accelerator.distributed_type is DistributedType.FSDP
    version = getattr(plugin, "fsdp_version", 1)
    _refuse_unfit(1 if workers is None else workers.dp_shard_size, with_fsdp, version)
    if getattr(getattr(plugin, "cpu_offload", None), "pin_memory", None) is not None:  # a CPUOffloadPolicy
        raise ValueError(
            "cpu_offload keeps parameters on the CPU, where they cannot be mixed with those of another GPU. Leave "
            "cpu_offload (fsdp_offload_params) out."
        )
    if workers is not None:
        workers.device_mesh = accelerator.torch_device_mesh
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
    """Return whether all sizes of a plain ParallelismConfig are 1, with which Accelerate trains as without one."""
    if config is None:
        return launched and WorkerParallelismConfig().total_size == 1
    plain = isinstance(config, ParallelismConfig) and not isinstance(config, WorkerParallelismConfig)
    return plain and config.total_size == 1


def _refuse_other(config: Any) -> None:
    if config is None:
        return
    kept, config = AcceleratorState._shared_state.get("parallelism_config"), WorkerParallelismConfig.of(config)
    if any(getattr(kept, name, None) != getattr(config, name) for name in _SIZES):
        raise ValueError(
            "parallelism_config= has no effect here: Accelerate keeps the settings of the first accelerator of a "
            "process. Pass it to the first one."
        )


def mesh_of_workers(accelerator: Any) -> Any:
    """Return the device mesh of an accelerator whose workers are several processes each; None for others."""
    mesh = accelerator.torch_device_mesh
    workers = isinstance(accelerator.parallelism_config, WorkerParallelismConfig)
    return mesh if workers and mesh is not None and mesh.ndim > 1 else None


def on_cpu(arguments: Mapping[str, Any]) -> bool:
    """Return whether an Accelerator with these arguments will use the CPU, and so refuse a ParallelismConfig."""
    return bool(arguments.get("cpu")) or _is_set("ACCELERATE_USE_CPU") or not is_available()


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")
