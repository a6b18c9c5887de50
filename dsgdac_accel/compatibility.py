"""Checks that refuse launches, models and Trainers under which workers cannot gossip, each with the way out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from dsgdac_accel.core.masters import refuse_untrainable
from dsgdac_accel.core.model_watch import wrapped_optimizers
from dsgdac_accel.devices import refuse_unsuitable
from dsgdac_accel.distributed.launcher_variables import how_to_join, launched_processes, lone_launchers
from dsgdac_accel.distributed.sharded_workers import ShardedWorkers
from dsgdac_accel.distributed.shards import has_shards, refuse_other_splits
from dsgdac_accel.features import (
    SEVERAL_POINTS,
    Setup,
    refuse_combinations,
    refuse_optimizer,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import Trainer

    from dsgdac_accel.config import GossipConfig
    from dsgdac_accel.distributed.group import WorkerGroup

logger = logging.getLogger(__name__)

_SHARDING_PLUGINS = ("torch_tp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
_SHARD_BY_MESH = (
    "To shard the model of each worker, call FSDP2's fully_shard on it and pass GossipAccelerator(device_mesh=...), as "
    "in docs/sharded.md."
)
_SHARD_IN_TRAINER = (
    "On CPUs, shard the model by fully_shard over mesh['dp_shard'] and pass GossipCallback(device_mesh=mesh); on GPUs "
    "pass TrainingArguments(parallelism_config=ParallelismConfig(dp_replicate_size=workers, dp_shard_size=shards), "
    "fsdp=True), as in docs/sharded.md."
)


def refuse_unsupported_launch(accelerator: Accelerator, workers: ShardedWorkers | None = None) -> None:
    """Raise ValueError unless every worker holds its own model, on a device where workers can gossip.

    All launched processes must see each other. `workers` is what the accelerator's config for parallelism will become;
    by default it stays as it is.
    """
    parallelism = workers or getattr(accelerator, "parallelism_config", None)
    kind = accelerator.distributed_type
    inside_workers = isinstance(parallelism, ShardedWorkers)
    splits = parallelism is not None and accelerator.torch_device_mesh is not None  # no mesh if all sizes are 1
    whole = kind is DistributedType.NO or kind.name.startswith("MULTI_")
    if not (whole or (inside_workers and accelerator.is_fsdp2)) or (splits and not inside_workers):
        raise ValueError(
            f"{kind} was configured, but DeepSpeed, Accelerate's FSDP, Megatron, tensor or context parallelism and XLA "
            f"split or re-wrap the model. Launch plain multi-process training (accelerate launch --multi_gpu "
            f"--num_processes N). {_SHARD_BY_MESH}"
        )
    refuse_combinations(Setup(processes=accelerator.num_processes, device=accelerator.device, accelerator=accelerator))
    refuse_unsuitable(accelerator.device)
    if accelerator.mixed_precision == "fp8":
        raise ValueError("mixed_precision='fp8' replaces layers and their parameters. Use 'bf16', 'fp16' or 'no'.")
    launched, variable = launched_processes()
    if launched > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"{launched} processes were launched ({variable}), but Accelerate sees one, so each would train alone. "
            f"{how_to_join(variable)}"
        )
    if lone_launchers() and accelerator.is_main_process:
        logger.warning(
            "each of the %d tasks of this Slurm step has started a launcher for one node, and these train apart from "
            "each other. To train together, give each launcher the number of nodes (--nnodes, --num_machines).",
            lone_launchers(),
        )


def refuse_sharding_arguments(arguments: Mapping[str, Any], has_mesh: bool) -> None:
    """Raise ValueError for Accelerate's own ways to shard a model, before Accelerate sets them up."""
    by_mesh = ("parallelism_config", "fsdp_plugin") if has_mesh else ()
    for name in (*by_mesh, *_SHARDING_PLUGINS):
        if arguments.get(name) is not None:
            if has_mesh:
                raise ValueError(f"{name}= is not supported beside device_mesh=, which says all of it. Leave it out.")
            raise ValueError(f"{name}= is not supported with gossip. {_SHARD_BY_MESH}")


def refuse_parallelism_beside_mesh(accelerator: Accelerator) -> None:
    """Raise ValueError if Accelerate shards models by itself, which is not possible beside `device_mesh`."""
    sharding = getattr(accelerator, "distributed_type", None) is DistributedType.FSDP
    if getattr(accelerator, "parallelism_config", None) is not None or sharding:
        raise ValueError(
            "ACCELERATE_USE_PARALLELISM_CONFIG or ACCELERATE_USE_FSDP is set, or a Trainer has parallelism_config= or "
            "fsdp=, but device_mesh= says all of it. Launch without --use_parallelism_config and --use_fsdp, and leave "
            "the arguments out."
        )


def supported_on(device_mesh: DeviceMesh | None, config: GossipConfig, accelerator: Accelerator) -> GossipConfig:
    """Return the configuration for the workers of a mesh, which are several processes each; without one, as it is.

    Raises ValueError for settings that need a worker to be one process.
    """
    if device_mesh is None:
        return config
    refuse_combinations(Setup(config=config, sharded=True, accelerator=accelerator))
    if accelerator.device.type == "cuda" and config.overlap:
        # Two NCCL communicators in flight need an order: the exchange ends before the next all-gather begins.
        logger.warning("with device_mesh on CUDA, the exchange is not hidden behind the computation (overlap=False)")
        return replace(config, overlap=False)
    return config


def warn_of_single_worker(group: WorkerGroup) -> None:
    """Log a warning that nothing gossips, since Accelerate starts one process unless it is told otherwise."""
    if group.everyone.rank > 0:
        return
    if group.everyone.size > 1:
        logger.warning(
            "all %d processes shard the model of 1 worker, so it trains as without gossip. Give dp_replicate, the "
            "number of workers, a size above 1.",
            group.everyone.size,
        )
        return
    logger.warning(
        "there is only 1 worker, so it trains as without gossip. Launch several with torchrun --nproc_per_node N, or "
        "accelerate launch --multi_gpu --num_processes N (the flag works on CPU, too, where --cpu starts one process)."
    )


def refuse_unsupported_model(model: nn.Module) -> None:
    """Raise ValueError for a model with lazy parameters, or with layers that share gradients or statistics.

    Also for one that is split in another way than by FSDP2.
    """
    refuse_other_splits(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} of a lazy module has no values yet. Run one batch through the model first.")
    for module in model.modules():
        if (
            isinstance(module, (DistributedDataParallel, DataParallel))
            or "FullyShardedDataParallel" in type(module).__name__
        ):
            advice = _SHARD_BY_MESH if "Sharded" in type(module).__name__ else "Pass the bare module to `prepare`."
            raise ValueError(
                f"the model is already wrapped in {type(module).__name__}, which shares gradients. {advice}"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "SyncBatchNorm makes every forward pass wait for all workers and ties their statistics together. "
                "Keep plain BatchNorm: the deployed model's statistics are calibrated."
            )


def refuse_unsupported_optimizer(optimizer: torch.optim.Optimizer, config: GossipConfig) -> None:
    """Raise ValueError for an optimizer that is, or wraps, one of `features.OPTIMIZERS`, or has no lr for gamma."""
    name = type(optimizer).__name__
    for each in wrapped_optimizers(optimizer):
        refuse_optimizer((kind.__name__ for kind in type(each).__mro__), type(each).__name__)
    own_rule = any(group.get("lr", 0) is None or group.get("relative_step") for group in optimizer.param_groups)
    if own_rule and config.constant is None and config.power > 0:
        raise ValueError(
            f"{name} chooses its step sizes by a rule of its own (lr=None or relative_step=True), so there is no "
            f"learning rate that gamma = (lr / max_lr)^power could follow. Give it an lr (Adafactor: lr=1e-3, "
            f"relative_step=False, scale_parameter=False), or set GossipConfig(constant=0.5), or power=0."
        )


def known_loss(loss: Any) -> Callable[[], Any]:
    """Return a closure for an optimizer that gives the loss once; it refuses to evaluate it at another point."""
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError(SEVERAL_POINTS)
        return loss

    return closure


def shards_workers(trainer: Trainer, device_mesh: DeviceMesh | None) -> bool:
    """Return whether the workers of a Trainer are several processes each. `device_mesh` as for `GossipCallback`."""
    sizes = trainer.accelerator.parallelism_config
    return device_mesh is not None or (sizes is not None and sizes.total_size > sizes.dp_replicate_size)


def refuse_unsupported_trainer(trainer: Trainer, setup: Setup) -> None:
    """Raise ValueError for a Trainer whose arguments, launch, model or optimizer do not allow gossip.

    Args:
        trainer: the Trainer.
        setup: what is known of it.
    """
    args = trainer.args
    if args.deepspeed:
        raise ValueError(
            "DeepSpeed splits the model over all processes, but each worker needs a model of its own. Leave deepspeed "
            "out of the training arguments; to shard the model of each worker, see docs/sharded.md."
        )
    if args.fsdp and not trainer.is_fsdp_enabled:
        raise ValueError(f"fsdp= has no effect on CPUs; leave it out. {_SHARD_IN_TRAINER}")
    assert trainer.model is not None
    refuse_other_splits(trainer.model)
    refuse_combinations(setup)
    if has_shards(trainer.model) and not setup.sharded:
        raise ValueError(f"the Trainer's model is sharded. {_SHARD_IN_TRAINER}")
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer would spread each batch over the {args.n_gpu} GPUs of this process (DataParallel). Launch one "
            f"process per GPU (torchrun --nproc_per_node {args.n_gpu}, or accelerate launch), or show the process one "
            f"GPU (CUDA_VISIBLE_DEVICES=0)."
        )
    launched, variable = launched_processes()
    if launched > args.world_size:
        raise ValueError(
            f"{launched} processes were launched ({variable}), but TrainingArguments sees {args.world_size}, so each "
            f"would train alone. {how_to_join(variable)}"
        )
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        raise ValueError(
            "the Trainer's model is wrapped in DistributedDataParallel, which averages gradients. Pass the bare model, "
            "and attach GossipCallback before the first train()."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    refuse_optimizer([optimizer], f"optim='{optimizer}'")
    saves_states = args.save_strategy != "no" and not args.save_only_model
    if optimizer.startswith(("galore", "apollo", "grokadamw")) and saves_states:
        raise ValueError(
            f"optim='{optimizer}' has a state that no checkpoint without pickle can hold. Set save_only_model=True or "
            f"save_strategy='no', or use an optimizer such as adamw_torch."
        )
    if trainer.optimizer is not None:
        refuse_unsupported_optimizer(trainer.optimizer, setup.config)
    named = [(name, parameter) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    refuse_untrainable([parameter for _, parameter in named], {id(parameter): name for name, parameter in named})
