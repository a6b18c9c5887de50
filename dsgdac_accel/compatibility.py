"""Launches, models and Trainers under which workers cannot gossip: refused at once, each with the way out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer

_SUPPORTED = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def refuse_unsupported_launch(accelerator: Accelerator) -> None:
    """Raise ValueError unless every process holds one whole replica and all processes see each other."""
    if accelerator.distributed_type not in _SUPPORTED or getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            f"every worker needs a whole replica of the model in one process; got {accelerator.distributed_type} "
            f"(DeepSpeed, FSDP, Megatron, tensor or context parallelism and XLA split or re-wrap it). "
            f"Launch plain multi-process training: accelerate launch --multi_gpu --num_processes N."
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError("mixed_precision='fp8' replaces layers and their parameters; use 'bf16', 'fp16' or 'no'.")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and accelerator.num_processes == 1:
        raise ValueError(
            f"{launched} processes were launched (WORLD_SIZE) but Accelerate sees one, so each would train alone. "
            f"On CPU pass cpu=True or set ACCELERATE_USE_CPU=true, and launch with --multi_gpu."
        )


def refuse_unsupported_model(model: nn.Module) -> None:
    """Raise ValueError for a model whose gradients or statistics would be shared by other means."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} of a lazy module has no values yet; run one batch through the model first.")
    for module in model.modules():
        if (
            isinstance(module, (DistributedDataParallel, DataParallel))
            or "FullyShardedDataParallel" in type(module).__name__
        ):
            raise ValueError(
                f"the model is already wrapped in {type(module).__name__}, which shares gradients; "
                f"pass the bare module to `prepare`."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "SyncBatchNorm makes every forward pass wait for all workers and ties their statistics together. "
                "Keep plain BatchNorm: the deployed model's statistics are calibrated."
            )


def refuse_unsupported_trainer(trainer: Trainer) -> None:
    """Raise ValueError for a Trainer under whose arguments, launch or optimizer workers cannot gossip."""
    args = trainer.args
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "DeepSpeed and FSDP split the model over the processes, and every worker needs a whole one to gossip. "
            "Leave deepspeed and fsdp out of the training arguments."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer would spread each batch over {args.n_gpu} GPUs of this one process (DataParallel). Launch one "
            f"process per GPU, torchrun --nproc_per_node {args.n_gpu} or accelerate launch, or show it one GPU "
            f"(CUDA_VISIBLE_DEVICES=0)."
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > args.world_size:
        raise ValueError(
            f"{launched} processes were launched (WORLD_SIZE) but TrainingArguments sees {args.world_size}, so each "
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
            f"Use an optimizer with a step of its own, such as adamw_torch."
        )
    if optimizer.startswith("schedule_free"):
        raise ValueError(
            f"optim='{optimizer}' swaps between two sets of weights by itself, which mixing would confuse. "
            f"Use an ordinary optimizer, such as adamw_torch: the deployed model is an average already."
        )
