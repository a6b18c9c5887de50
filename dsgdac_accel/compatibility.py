"""Checks that refuse launches, models and Trainers under which workers cannot gossip, each with the way out."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from dsgdac_accel.core.asynchronous import refuse_dtypes, refuse_workers
from dsgdac_accel.core.master_parameters import refuse_untrainable
from dsgdac_accel.devices import refuse_unsuitable

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

    from dsgdac_accel.config import GossipConfig
    from dsgdac_accel.distributed.group import WorkerGroup

logger = logging.getLogger(__name__)

_SEVERAL_POINTS = (
    "this optimizer evaluates the loss at several points of one step, which does not fit one mix per step. Use an "
    "optimizer that evaluates it once, such as AdamW."
)


def refuse_unsupported_launch(accelerator: Accelerator) -> None:
    """Raise ValueError unless every process holds a whole replica, on a device where workers can gossip.

    All launched processes must see each other.
    """
    whole = accelerator.distributed_type is DistributedType.NO or accelerator.distributed_type.name.startswith("MULTI_")
    if not whole or getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            f"every worker needs a whole replica of the model in one process, but {accelerator.distributed_type} was "
            f"configured (DeepSpeed, FSDP, Megatron, tensor or context parallelism and XLA split or re-wrap the "
            f"model). Launch plain multi-process training: accelerate launch --multi_gpu --num_processes N."
        )
    refuse_unsuitable(accelerator.device, accelerator.num_processes)
    if accelerator.mixed_precision == "fp8":
        raise ValueError("mixed_precision='fp8' replaces layers and their parameters. Use 'bf16', 'fp16' or 'no'.")
    launched = _launched_processes()
    if launched > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"{launched} processes were launched (WORLD_SIZE), but Accelerate sees one, so each would train alone. "
            f"On CPU pass cpu=True or set ACCELERATE_USE_CPU=true, and launch with --multi_gpu."
        )


def warn_of_single_worker() -> None:
    """Log a warning that nothing gossips, since Accelerate starts one process unless it is told otherwise."""
    logger.warning(
        "there is only 1 worker, so it trains as without gossip. Launch several with torchrun --nproc_per_node N, or "
        "accelerate launch --multi_gpu --num_processes N (the flag works on CPU, too, where --cpu starts one process)."
    )


def refuse_unsupported_model(model: nn.Module) -> None:
    """Raise ValueError for a model with lazy parameters, or with layers that share gradients or statistics."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} of a lazy module has no values yet. Run one batch through the model first.")
    for module in model.modules():
        if (
            isinstance(module, (DistributedDataParallel, DataParallel))
            or "FullyShardedDataParallel" in type(module).__name__
        ):
            raise ValueError(
                f"the model is already wrapped in {type(module).__name__}, which shares gradients. "
                f"Pass the bare module to `prepare`."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "SyncBatchNorm makes every forward pass wait for all workers and ties their statistics together. "
                "Keep plain BatchNorm: the deployed model's statistics are calibrated."
            )


def refuse_unsupported_optimizer(optimizer: torch.optim.Optimizer, config: GossipConfig) -> None:
    """Raise ValueError for an optimizer that evaluates the loss several times a step, or has no lr for gamma."""
    name = type(optimizer).__name__
    if config.asynchronous:
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        refuse_dtypes({parameter.dtype for parameter in trained if parameter.requires_grad})
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{name}: {_SEVERAL_POINTS}")
    own_rule = any(group.get("lr", 0) is None or group.get("relative_step") for group in optimizer.param_groups)
    if own_rule and config.constant is None and config.power > 0:
        raise ValueError(
            f"{name} chooses its step sizes by a rule of its own (lr=None or relative_step=True), so there is no "
            f"learning rate that gamma = (lr / max_lr)^power could follow. Give it an lr (Adafactor: lr=1e-3, "
            f"relative_step=False, scale_parameter=False), or set GossipConfig(constant=0.5), or power=0."
        )


def refuse_asynchronous(config: GossipConfig, what: str) -> None:
    """Raise ValueError if `config` asks for asynchronous averaging, which `what` cannot do."""
    if config.asynchronous:
        raise ValueError(
            f"asynchronous=True is not possible with {what}. Write the training loop with GossipAccelerator "
            f"(docs/asynchronous.md), or leave asynchronous out."
        )


def refuse_asynchronous_launch(accelerator: Accelerator) -> None:
    """Raise ValueError for a launch that cannot average asynchronously."""
    if accelerator.scaler is not None:
        raise ValueError(
            "asynchronous=True is not possible with mixed_precision='fp16', whose overflows all workers agree on at "
            "every step. Use 'bf16' or 'no'."
        )
    refuse_workers(accelerator.num_processes, accelerator.device)


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


def refuse_unsupported_trainer(trainer: Trainer, config: GossipConfig) -> None:
    """Raise ValueError for a Trainer whose arguments, launch, model or optimizer do not allow gossip."""
    args = trainer.args
    refuse_asynchronous(config, "the Trainer, which counts the steps of its own loader")
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "DeepSpeed and FSDP split the model over the processes, but every worker needs a whole one to gossip. "
            "Leave deepspeed and fsdp out of the training arguments."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer would spread each batch over the {args.n_gpu} GPUs of this process (DataParallel). Launch one "
            f"process per GPU (torchrun --nproc_per_node {args.n_gpu}, or accelerate launch), or show the process one "
            f"GPU (CUDA_VISIBLE_DEVICES=0)."
        )
    launched = _launched_processes()
    if launched > args.world_size:
        raise ValueError(
            f"{launched} processes were launched (WORLD_SIZE), but TrainingArguments sees {args.world_size}, so each "
            f"would train alone. On CPU set use_cpu=True in TrainingArguments."
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
    bases = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(trainer).__mro__}
    of_trl = any(name.startswith("trl.") for name in bases)
    if config.workers_per_process > 1 and of_trl and "trl.SFTTrainer" not in bases:
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
    assert trainer.model is not None
    named = [(name, parameter) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    refuse_untrainable([parameter for _, parameter in named], {id(parameter): name for name, parameter in named})


def warn_of_equal_gradients(model: nn.Module, group: WorkerGroup) -> None:
    """Log a warning if the gradients are the same on all workers, as with DDP or with the same batches. Collective."""
    norms = [float(p.grad.to_dense().double().norm()) for p in model.parameters() if p.grad is not None]
    by_worker = group.all_gather_object(math.hypot(*norms), "comparing the first gradients")
    if len(by_worker) > 1 and 0 < by_worker[0] < math.inf and len(set(by_worker)) == 1:
        logger.warning(
            "the first gradients are the same on all workers: something averages them (a hook of yours, for example), "
            "or all workers read the same batches. Gossip needs local gradients of different batches."
        )


def _launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
