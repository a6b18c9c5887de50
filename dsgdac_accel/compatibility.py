"""Checks that refuse launches, models and Trainers under which workers cannot gossip, each with the way out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from dsgdac_accel.core.master_parameters import refuse_untrainable
from dsgdac_accel.devices import refuse_unsuitable
from dsgdac_accel.distributed.launcher_variables import how_to_join, launched_processes, lone_launchers
from dsgdac_accel.sharded_workers import ShardedWorkers
from dsgdac_accel.shards import has_shards, local_of, refuse_other_splits

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
_SEVERAL_POINTS = (
    "this optimizer evaluates the loss at several points of one step, which does not fit one mix per step. Use an "
    "optimizer that evaluates it once, such as AdamW."
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
    refuse_unsuitable(accelerator.device, accelerator.num_processes)
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


def supported_with_shards(config: GossipConfig, accelerator: Accelerator) -> GossipConfig:
    """Return the configuration for workers that are several processes each.

    Raises ValueError for settings that need a worker to be one process.
    """
    if config.workers_per_process > 1:
        raise ValueError(
            f"workers_per_process={config.workers_per_process} puts several workers into a process, but device_mesh "
            f"or parallelism_config makes a worker of several processes. Leave one of them out."
        )
    if accelerator.mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision='fp16' does not work with device_mesh, whose shards have no common loss scale. Use 'bf16'."
        )
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
    """Raise ValueError for an optimizer that evaluates the loss several times a step, or has no lr for gamma."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{name}: {_SEVERAL_POINTS}")
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
            raise ValueError(_SEVERAL_POINTS)
        return loss

    return closure


def shards_workers(trainer: Trainer, device_mesh: DeviceMesh | None) -> bool:
    """Return whether the workers of a Trainer are several processes each. `device_mesh` as for `GossipCallback`."""
    sizes = trainer.accelerator.parallelism_config
    return device_mesh is not None or (sizes is not None and sizes.total_size > sizes.dp_replicate_size)


def refuse_unsupported_trainer(
    trainer: Trainer,
    config: GossipConfig,
    device_mesh: DeviceMesh | None = None,
    calibrates: bool = False,
    renamed: bool = False,
) -> None:
    """Raise ValueError for a Trainer whose arguments, launch, model or optimizer do not allow gossip.

    Args:
        trainer: the Trainer.
        config: topology, gamma schedule and policies.
        device_mesh: as for `GossipCallback`.
        calibrates: whether the model has BatchNorm statistics, which are to be measured; matters for sharded workers.
        renamed: whether its best checkpoint, to be loaded at the end, has other names than the model; likewise.
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
    if shards_workers(trainer, device_mesh):
        _refuse_unsupported_shards(trainer, calibrates, renamed)
    elif has_shards(trainer.model):
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
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise ValueError(
            f"optim='{optimizer}' updates parameters during the backward pass, before the workers can mix. "
            f"Use an optimizer with a separate step, such as adamw_torch."
        )
    if optimizer.startswith("schedule_free"):
        raise ValueError(
            f"optim='{optimizer}' swaps between two sets of weights, which mixing would confuse. "
            f"Use an ordinary optimizer, such as adamw_torch: the deployed model is an average already."
        )
    bases = _bases(trainer)
    if config.workers_per_process > 1 and _is_of_trl(bases) and "trl.SFTTrainer" not in bases:
        raise ValueError(
            f"{type(trainer).__name__} compares rows of a batch (chosen with rejected answers, completions of one "
            f"prompt), but several workers in a process get parts of the batch. Set workers_per_process=1, and launch "
            f"one process per worker."
        )
    saves_states = args.save_strategy != "no" and not args.save_only_model
    if optimizer.startswith(("galore", "apollo", "grokadamw")) and saves_states:
        raise ValueError(
            f"optim='{optimizer}' has a state that no checkpoint without pickle can hold. Set save_only_model=True or "
            f"save_strategy='no', or use an optimizer such as adamw_torch."
        )
    if trainer.optimizer is not None:
        refuse_unsupported_optimizer(trainer.optimizer, config)
    named = [(name, parameter) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    refuse_untrainable([parameter for _, parameter in named], {id(parameter): name for name, parameter in named})


def _refuse_unsupported_shards(trainer: Trainer, calibrates: bool, renamed: bool) -> None:
    """Raise ValueError for what a Trainer whose workers are several processes each cannot do, or was not tried with."""
    args: Any = trainer.args
    model: Any = trainer.model
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True does not work with sharded workers: a process that runs out of memory leaves "
            "the others waiting. Set per_device_train_batch_size."
        )
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True does not work with sharded workers, whose average is gathered on the main process "
            "only. Save to a file system that all nodes share."
        )
    if not args.accelerator_config.even_batches:
        raise ValueError(
            "even_batches=False would give the processes of a worker unequal numbers of batches to evaluate, and they "
            "gather its shards together. Leave it out of accelerator_config."
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":  # only newer Transformers have it
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' deals batches to processes, but sharded workers need them dealt "
            "by the mesh. Use 'group_by_length'."
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "the model was sharded when it was loaded (DistributedConfig), over processes of several workers. Load it "
            f"without. {_SHARD_IN_TRAINER}"
        )
    if calibrates:
        raise ValueError(
            "calibrate= is not supported for sharded models with BatchNorm, whose processes would need equally many "
            "batches. Set GossipCallback(calibrate=False), so that the statistics are pooled, or use LayerNorm."
        )
    if renamed:
        raise ValueError(
            "load_best_model_at_end=True does not work with a sharded model that Transformers saves under other names "
            "than it has in memory, such as a mixture of experts. Leave it out, and load the best checkpoint by "
            "from_pretrained afterwards."
        )
    if getattr(model, "is_loaded_in_8bit", False):
        raise ValueError(
            "8-bit layers of bitsandbytes cannot compute with sharded weights. Load the model in 4 bits or unquantized."
        )
    if hasattr(model, "peft_config"):
        _refuse_unsupported_adapters(trainer, model)
    bases = _bases(trainer)
    if _is_of_trl(bases) and "trl.SFTTrainer" not in bases:
        raise ValueError(
            f"{type(trainer).__name__} was not tried with sharded workers. Use SFTTrainer, or workers of one process."
        )


def _refuse_unsupported_adapters(trainer: Trainer, model: Any) -> None:
    """Raise ValueError for adapters of PEFT in sharded workers that could not be saved or loaded."""
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in model.peft_config.values()):
        raise ValueError(
            "PEFT computes the prompts that it saves from whole parameters, which no process of a sharded worker has. "
            "Use LoRA or another adapter that is not prompt learning, or workers of one process."
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    wrapped = any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    if wrapped or getattr(plugin, "activation_checkpointing", False):
        raise ValueError(
            "PEFT does not find its adapters in layers wrapped for activation_checkpointing, and would save none. "
            "Set gradient_checkpointing=True in place of fsdp_config={'activation_checkpointing': True}."
        )
    if trainer.args.load_best_model_at_end and not is_peft_model(model):
        raise ValueError(
            "load_best_model_at_end=True does not load adapters of `add_adapter` into shards. Use get_peft_model of "
            "PEFT, or leave it out."
        )


def _bases(trainer: Trainer) -> set[str]:
    """Return the classes of a Trainer, as in "trl.SFTTrainer"."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(trainer).__mro__}


def _is_of_trl(bases: set[str]) -> bool:
    return any(name.startswith("trl.") for name in bases)


@torch.no_grad()
def warn_of_equal_gradients(model: nn.Module, group: WorkerGroup) -> None:
    """Log a warning if the gradients are the same on all workers, as with DDP or with the same batches. Collective."""
    counted = [p.grad for p in model.parameters() if p.grad is not None]
    own = math.hypot(*(float(local_of(gradient).to_dense().double().norm()) for gradient in counted))
    what = "comparing the first gradients"
    squares = group.row.sum(torch.tensor([own**2], dtype=torch.float64, device="cpu"), what)
    by_worker = group.all_gather_object(math.sqrt(float(squares)), what)
    if len(by_worker) > 1 and 0 < by_worker[0] < math.inf and len(set(by_worker)) == 1:
        logger.warning(
            "the first gradients are the same on all workers: something averages them (a hook of yours, for example), "
            "or all workers read the same batches. Gossip needs local gradients of different batches."
        )
