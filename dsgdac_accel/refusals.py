"""Launches and models under which workers cannot gossip: refused at once, each with the way out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from accelerate import Accelerator

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
