"""A Trainer whose workers are several processes: its methods, token counts and model files for shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, is_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from dsgdac_accel.checkpoint import CheckpointError
from dsgdac_accel.checkpoint.local_shards import fill_
from dsgdac_accel.checkpoint.manifest import MANIFEST
from dsgdac_accel.distributed.shards import gather_for, gathering_modules, has_shards, reshard
from dsgdac_accel.features import Setup, refuse_combinations
from dsgdac_accel.wrappers import eager_name


class ShardsInTrainer:
    """Each method stands in for the one of its name of one Trainer, and gets the original first.

    Args:
        trainer: a Trainer with a GossipAccelerator whose workers are several processes each.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:  # otherwise a Trainer with FSDP saves no model at all
            plugin.set_state_dict_type("FULL_STATE_DICT")
        gather_for(trainer.model, "generate")

    def create_accelerator_and_postprocess(self, original: Callable[..., Any]) -> None:
        """Refuse a hyperparameter search, which creates an Accelerator for each trial."""
        refuse_combinations(Setup(sharded=True, call="hyperparameter_search"))

    def _get_num_items_in_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the mean number of tokens per process of the worker; None if one does not know its own. Collective.

        The worker's gradient is the mean over its processes. Each divides its sum over tokens by this number, so that
        the mean is the worker's sum over tokens divided by its tokens. An evaluation counts for itself.
        """
        items, trainer, accelerator = original(*args, **kwargs), self.trainer, self.trainer.accelerator
        trains = bool(accelerator.gossip_steps) and not accelerator.deployment.active
        if not trains or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
            return items
        mine = torch.tensor([0.0, 0.0] if items is None else [float(items), 1.0], dtype=torch.float64, device="cpu")
        mean, known = accelerator.group.row.mean(mine, "counting tokens").tolist()
        return torch.tensor(mean, dtype=torch.float32, device=trainer.args.device) if known == 1 else None

    def evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Refuse to evaluate or predict where the model is to be sharded later."""
        if self.trainer.is_fsdp_enabled and not has_shards(self.trainer.model):
            raise ValueError(
                "FSDP2 shards the model in train(), so it cannot be evaluated before. Set eval_on_start=True to "
                "evaluate it at the beginning of training."
            )
        return original(*args, **kwargs)

    predict = evaluate

    def _save(
        self, original: Callable[..., Any], output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> Any:
        """Save the whole model, gathered in worker 0. Collective."""
        if state_dict is None:
            state_dict = self.trainer.accelerator.get_state_dict(self.trainer.model)
        return original(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, original: Callable[..., Any], output_dir: str) -> None:
        """Leave optimizer and scheduler to the states of workers: the Trainer's files would hold worker 0's shards."""

    def _load_from_checkpoint(
        self, original: Callable[..., Any], checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load this process's part of the deployed model, unless the workers' states follow or all is refused."""
        starts_anew = self.trainer.accelerator.gossip_config.on_other_worker_count != "refuse"
        if starts_anew and not (Path(checkpoint) / MANIFEST).exists():
            load_deployed(self.trainer.model, checkpoint)

    def _load_optimizer_and_scheduler(self, original: Callable[..., Any], checkpoint: str | None) -> None:
        """Continue the lr schedule that a Trainer without gossip has saved, if there is one, without an optimizer."""
        if checkpoint is None or not (file := Path(checkpoint) / SCHEDULER_NAME).is_file():
            return
        groups, saved = self.trainer.optimizer.param_groups, torch.load(file, map_location="cpu", weights_only=True)
        if len(saved["_last_lr"]) != len(groups):
            raise CheckpointError(
                f"{file} has the lr of {len(saved['_last_lr'])} parameter groups, and the optimizer has {len(groups)}. "
                f"Make the optimizer as it was when saved, or remove the file to begin the schedule anew."
            )
        self.trainer.lr_scheduler.load_state_dict(saved)
        for group, lr in zip(groups, saved["_last_lr"], strict=True):
            group["lr"] = lr  # the schedule itself sets it only after the next step

    def _load_best_model(self, original: Callable[..., Any]) -> None:
        """Load this process's part of the best model. Collective."""
        self.trainer.accelerator.group.everyone.barrier("loading the best model")
        load_deployed(self.trainer.model, self.trainer.state.best_model_checkpoint)


# ---- the deployed model of a checkpoint


def is_renamed(model: nn.Module) -> bool:
    """Return whether Transformers saves the model under other names than it has, as mixtures of experts.

    `load_deployed` cannot read it then.
    """
    revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if revert is None or not isinstance(model, PreTrainedModel):  # older versions rename nothing
        return False
    state = model.state_dict().items()
    names = {name: torch.empty(value.shape, device="meta") for name, value in state if isinstance(value, Tensor)}
    return revert(model, dict(names)).keys() != names.keys()


@torch.no_grad()
def load_deployed(model: nn.Module, folder: str | Path) -> None:
    """Load the deployed model that a Trainer has saved; of sharded tensors this process's part.

    Of a `PeftModel` only the adapters are saved, and loaded.

    Raises:
        CheckpointError: the folder has no such model, or it is another one.
    """
    reshard(gathering_modules([model]))
    state = model.state_dict(keep_vars=True)
    own = {eager_name(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not is_peft_model(model):
        _load(own, _files_in(Path(folder)), tuple(getattr(model, "_keys_to_ignore_on_save", None) or ()))
        return
    from peft import get_peft_model_state_dict  # optional

    for adapter in cast(Any, model).peft_config:
        file = (Path(folder) if adapter == "default" else Path(folder) / adapter) / ADAPTER_SAFE_WEIGHTS_NAME
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist, which has the deployed adapter. Choose another checkpoint.")
        # By the names that PEFT saves them under.
        _load(get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter), [file])


def _load(own: dict[str, Tensor], files: list[Path], dropped: tuple[str, ...] = ()) -> None:
    """Copy what the files have into the tensors; those whose names end with one of `dropped` may be missing."""
    filled: set[int] = set()
    for file in files:
        with safe_open(file, framework="pt") as saved:
            for name in saved.keys():  # noqa: SIM118 - no mapping
                whole, tensor = saved.get_tensor(name), own.get(name)
                if tensor is None or tensor.shape != whole.shape:
                    raise CheckpointError(
                        f"{file} has {name} of shape {list(whole.shape)}, and the model "
                        f"{'has none' if tensor is None else f'one of shape {list(tensor.shape)}'}. Build the model as "
                        f"it was when saved."
                    )
                fill_(tensor, whole)
                filled.add(id(tensor))
    missing = [name for name, tensor in own.items() if id(tensor) not in filled and not name.endswith(dropped)]
    if missing:
        raise CheckpointError(f"{files[0].parent} has no values of {missing[0]}. Build the model as it was when saved.")


def _files_in(folder: Path) -> list[Path]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        return [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    if not (folder / SAFE_WEIGHTS_NAME).is_file():
        raise CheckpointError(f"{folder} has no {SAFE_WEIGHTS_NAME}, the deployed model. Choose another checkpoint.")
    return [folder / SAFE_WEIGHTS_NAME]
