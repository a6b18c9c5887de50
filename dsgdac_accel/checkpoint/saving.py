"""Saving and loading the state of every worker of an Accelerator, so that a run resumes bit by bit."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.checkpoint.common import take_common, tensors_of, untrained_digests
from dsgdac_accel.checkpoint.errors import on_all
from dsgdac_accel.checkpoint.local_shards import KeyPath, placed
from dsgdac_accel.checkpoint.manifest import (
    Manifest,
    WorkerCountError,
    delete_old,
    is_complete,
    is_leftover,
    newest_readable,
)
from dsgdac_accel.checkpoint.reader import load_state, shared_manifest
from dsgdac_accel.checkpoint.rescale import average_of_workers, fit_to_processes
from dsgdac_accel.checkpoint.resharding import Targets, leaves
from dsgdac_accel.checkpoint.serialization import CheckpointError
from dsgdac_accel.checkpoint.worker_state import (
    gradients_of,
    load_gradients,
    load_loose_parameters,
    load_model_state,
    loose_parameters,
    model_state,
    require_same_model,
)
from dsgdac_accel.checkpoint.writer import CheckpointWriter, save_checkpoint
from dsgdac_accel.config import GossipConfig, config_to_dict
from dsgdac_accel.core.parameters import as_parameter_list
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.dataloader_state import recorder_of
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.processes import Processes
from dsgdac_accel.distributed.shards import gathering_modules, has_unreduced_gradients, reshard
from dsgdac_accel.randomness import random_state, seed_workers_differently, set_random_state

logger = logging.getLogger(__name__)

_FREE_TO_CHANGE = ("timeout", "log_every", "total_steps", "on_other_worker_count")
_AUTOMATIC_NAME = re.compile(r"checkpoint_(\d+)")  # Accelerate's


class AcceleratorCheckpoints:
    """Saves and loads every worker's own state: what `save_state` and `load_state` of an Accelerator call.

    Saving reads what the accelerator has prepared and registered, and loading changes it in place.

    Args:
        accelerator: any `accelerate.Accelerator`.
        group: its workers; if they are several processes each, the column of this one.
        gossip_steps: the accelerator's list of them, read at each save and load. Empty for synchronous training.
        gossip: the configuration that goes into the manifest; None for synchronous training.
        workers_per_process: workers in each process.
    """

    def __init__(
        self,
        accelerator: Any,
        group: WorkerGroup,
        gossip_steps: Sequence[GossipStep] = (),
        gossip: GossipConfig | None = None,
        workers_per_process: int = 1,
    ) -> None:
        self._accelerator = weakref.ref(accelerator)
        self.group = group
        self.gossip_steps = gossip_steps
        self.gossip = gossip
        self.workers_per_process = workers_per_process
        self.shards = 0 if group.row.mesh is None else group.row.size
        """Ranks of each worker; 0 if a worker is one process without a device mesh."""
        self.everyone = Processes(group)
        self._writer = CheckpointWriter(self.everyone, self.shards)

    @property
    def accelerator(self) -> Any:
        """The accelerator, which owns this object. Held weakly: it must end with its last reference."""
        return self._accelerator()

    # ---- saving

    def save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        wait: bool = True,
        facts: Mapping[str, Any] | None = None,
        elsewhere: Mapping[KeyPath, str] | None = None,
    ) -> Path:
        """Save the state of every worker and return the folder. Collective. See `GossipAccelerator.save_state`.

        Args:
            output_dir, wait, facts: as for `save_state`.
            elsewhere: digests of frozen tensors that are loaded from somewhere else before `load` is called, as of
                `frozen_digests`. The checkpoint does not hold those that still have this digest on all workers.
        """
        self._refuse_while_deployed("save_state")
        self.finish()
        folder = self._folder_to_save(output_dir)
        self._require_shards()
        state = self._training_state(self._weights_to_save(folder))
        common = take_common(state["models"], self.everyone, elsewhere or {}, self.shards)
        step = max((gossip["mixer"]["step"] for gossip in state["gossip"]), default=self.group.steps_taken)
        noted = {**self._own_facts(), **(facts or {})}
        if wait:
            save_checkpoint(folder, state, self.everyone, step=step, facts=noted, common=common, shards=self.shards)
            self._delete_old(folder)
        else:
            self._writer.save(folder, state, step=step, facts=noted, common=common)
        self.accelerator.project_configuration.iteration += 1
        return folder

    def frozen_digests(self) -> dict[KeyPath, str]:
        """Return the digests of the frozen tensors of the prepared models as they are now.

        Of sharded models none: each process reads its own shards, which only the states of workers hold.
        """
        return {} if self.shards else untrained_digests(self._models_by_index())

    def _models_by_index(self) -> dict[int, Any]:
        return {index: model_state(model) for index, model in enumerate(self.accelerator._models)}

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written. Collective. See `GossipAccelerator.finish_saving`."""
        finished = self._writer.finish()
        if finished is not None:
            self._delete_old(finished)
        return finished

    def _require_shards(self) -> None:
        """Let sharded models hold their shards alone, which are what is saved and loaded. Collective.

        Raises:
            CheckpointError: on all processes, if FSDP2 has gradients that are not summed over the shards yet.
        """
        modules = gathering_modules(self.accelerator._models)
        reshard(modules)

        def require_reduced() -> None:
            if has_unreduced_gradients(modules):
                raise CheckpointError(
                    "a model has gradients that set_requires_gradient_sync(False) keeps whole on every process, and "
                    "that no checkpoint holds. Save and load after an optimizer step."
                )

        if self.shards:
            on_all(self.everyone, require_reduced, "cannot save or load a checkpoint")

    def _weights_to_save(self, folder: Path) -> dict[int, Any]:
        """Return the state of each model by its index, without the models that a user's hook saved by itself."""
        models = self.accelerator._models
        weights = [model_state(model) for model in models]
        remaining = list(weights)
        hooks = self.accelerator._save_model_state_pre_hook
        if hooks:
            on_all(self.everyone, lambda: folder.mkdir(parents=True, exist_ok=True), f"cannot make the folder {folder}")
        for hook in hooks.values():
            hook(models, remaining, str(folder))
            left = self.everyone.all_gather_object(len(remaining), "comparing the weights that a hook has left to save")
            if len(set(left)) > 1:
                raise CheckpointError(
                    f"{getattr(hook, '__qualname__', hook)} of register_save_state_pre_hook leaves {left} models to "
                    f"save on the processes, and the weights of some workers would be lost. Let it pop weights on all "
                    f"processes or on none, so that each worker saves its own."
                )
        return {index: state for index, state in enumerate(weights) if any(state is kept for kept in remaining)}

    def _prepared(self) -> dict[str, tuple[str, Sequence[Any]]]:
        """Return what saves and loads itself, by its part of a state, and with the word of messages for it."""
        accelerator = self.accelerator
        return {
            "gossip": ("gossiping optimizers", self.gossip_steps),
            "optimizers": ("optimizers", accelerator._optimizers),
            "schedulers": ("schedulers", accelerator._schedulers),
            "registered": ("registered objects", accelerator._custom_objects),
        }

    def _training_state(self, models: dict[int, Any]) -> dict[str, Any]:
        accelerator = self.accelerator
        # The gossip steps first: this waits for the exchange in flight, whose result is kept for the next step.
        own = {part: [item.state_dict() for item in items] for part, (_, items) in self._prepared().items()}
        recorders = [recorder_of(loader) for loader in accelerator._dataloaders]
        at_step_boundary = accelerator.gradient_state.sync_gradients
        return own | {
            "models": models,
            "loose": self._loose(edited=True),
            "kinds_of_optimizers": self._kinds_of_optimizers(),
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "loaders": [None if recorder is None else recorder.state_dict() for recorder in recorders],
            "window": None if at_step_boundary else [gradients_of(model) for model in accelerator._models],
            "micro_step": accelerator.step,
            "steps_taken": self.group.steps_taken,
            "random": random_state(),
        }

    def _loose(self, edited: bool = False) -> list[list[Tensor]]:
        """Return the parameters outside of models, and the masters; `edited` as copies with what a script has written.

        Returns:
            A list for each optimizer.
        """
        masters: dict[int, Tensor] = {}
        for source in (step.masters for step in self.gossip_steps):
            masters |= source.by_parameter(source.edited_values() if edited else source.values())
        return loose_parameters(self.accelerator._models, self.accelerator._optimizers, masters)

    def _kinds_of_optimizers(self) -> list[str]:
        return [type(optimizer.optimizer).__name__ for optimizer in self.accelerator._optimizers]

    def _own_facts(self) -> dict[str, Any]:
        return {
            "topology": [step.mixer.topology.name for step in self.gossip_steps],
            "gossip": None if self.gossip is None else config_to_dict(self.gossip),
            "workers_per_process": self.workers_per_process,
            "torch": torch.__version__,
        }

    def _refuse_while_deployed(self, what: str) -> None:
        if any(step.average.swapped_in for step in self.gossip_steps):
            raise RuntimeError(
                f"{what} inside `with deployed_model(...)` would take the average for this worker's own weights. Call "
                f"it before or after; `save_model` saves the average itself."
            )

    # ---- loading

    @torch.inference_mode(False)  # what is loaded, such as the state of an optimizer, is trained on afterwards
    def load(
        self, input_dir: str | os.PathLike[str] | None = None, *, on_other_worker_count: str | None = None
    ) -> Path | None:
        """Load each worker's own state. Collective. See `GossipAccelerator.load_state`."""
        if on_other_worker_count is None:
            on_other_worker_count = "refuse" if self.gossip is None else self.gossip.on_other_worker_count
        if on_other_worker_count not in ("refuse", "deployed"):
            raise ValueError(f"on_other_worker_count must be 'refuse' or 'deployed'; got {on_other_worker_count!r}.")
        self._refuse_while_deployed("load_state")
        self.finish()
        self._require_shards()
        folder = self._folder_to_load(input_dir)
        if folder is None:
            return None
        manifest = shared_manifest(folder, self.everyone)
        on_all(self.everyone, lambda: self._require_same_split(folder, manifest))
        if manifest.workers != self.group.size and on_other_worker_count == "refuse":
            raise WorkerCountError(folder, manifest.workers, self.group.size)
        state = on_all(self.everyone, lambda: self._state_to_load(folder, manifest))
        # The state of a worker that is sharded in another way, or the average of all saved workers.
        moved = (manifest.workers, manifest.ranks) != (self.group.size, self.group.row.size)
        if moved:
            fit_to_processes(state, manifest, self.group.size, self.group.row.size)
        self._warn_of_other_gossip(folder, manifest)
        models = list(self.accelerator._models)
        for hook in self.accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
        on_all(self.everyone, lambda: self._require_same_setup(state, models))
        on_all(self.everyone, lambda: self._load_training_state(state, models, moved))
        if moved:
            seed_workers_differently(self.group.everyone, manifest.step)
        self._continue_numbering()
        return folder

    def _targets(self) -> Targets:
        """Return this rank's place in its worker, and the tensors to load into by their paths in a state."""
        accelerator = self.accelerator
        own = tensors_of(self._models_by_index())
        own |= {("window", path[1], path[3]): tensor for path, tensor in own.items() if path[2] == "parameters"}
        for number, loose in enumerate(self._loose()):
            own.update({("loose", number, place): tensor for place, tensor in enumerate(loose)})
        for number, optimizer in enumerate(accelerator._optimizers):
            parameters = as_parameter_list(optimizer.param_groups)
            own.update({("optimizers", number, "state", place): tensor for place, tensor in enumerate(parameters)})
        if self.shards:
            registered = [mine.state_dict() for mine in accelerator._custom_objects]
            own.update({("registered", *path): tensor for path, tensor in leaves(registered)})
        return Targets(own, self.group.row.rank, self.group.row.size)

    def _state_to_load(self, folder: Path, manifest: Manifest) -> dict[str, Any]:
        targets = self._targets()
        if manifest.workers == self.group.size:
            return load_state(folder, manifest, self.group.rank, targets)
        return average_of_workers(folder, manifest, self.everyone.rank == 0, targets)

    def _require_same_split(self, folder: Path, manifest: Manifest) -> None:
        """Refuse another split of workers over processes: one file holds the state of all workers of a process."""
        saved, mine = manifest.facts.get("workers_per_process", 1), self.workers_per_process
        if saved != mine or (mine > 1 and manifest.workers != self.group.size):
            raise CheckpointError(
                f"{folder} was saved by {manifest.workers} process(es) of {saved} worker(s) each, and this run has "
                f"{self.group.size} of {mine}. With several workers in a process, launch the same again: "
                f"{manifest.workers} process(es), workers_per_process={saved}."
            )

    def _require_same_setup(self, state: Mapping[str, Any], models: list[nn.Module]) -> None:
        accelerator = self.accelerator
        counted = self._prepared() | {"loaders": ("loaders", accelerator._dataloaders)}
        for name, (what, mine) in counted.items():
            if len(state[name]) != len(mine):
                raise CheckpointError(
                    f"the checkpoint holds {len(state[name])} {what}, and {len(mine)} are prepared. Prepare and "
                    f"register the same objects in the same order as when it was saved."
                )
        if (state["scaler"] is None) != (accelerator.scaler is None):
            raise CheckpointError(
                f"the checkpoint was saved {'without' if state['scaler'] is None else 'with'} a gradient scaler "
                f"(mixed_precision='fp16'). Train on in the same precision."
            )
        for index, model in enumerate(accelerator._models):
            if any(model is remaining for remaining in models):
                if index not in state["models"]:
                    raise CheckpointError(
                        f"the checkpoint holds no weights of model {index}: fewer models were prepared, or a hook took "
                        f"them. Load the model in a hook of `register_load_state_pre_hook` that removes it from the "
                        f"list."
                    )
                require_same_model(model, state["models"][index])
        kinds = zip(state["kinds_of_optimizers"], self._kinds_of_optimizers(), strict=True)
        for number, (saved_kind, kind) in enumerate(kinds):
            if saved_kind != kind:
                raise CheckpointError(
                    f"the checkpoint holds the state of {saved_kind} for optimizer {number}, and {kind} is prepared. "
                    f"Train on with {saved_kind}."
                )

    def _load_training_state(self, state: Mapping[str, Any], models: list[nn.Module], moved: bool) -> None:
        accelerator = self.accelerator
        prepared = self._prepared()
        _, steps = prepared.pop("gossip")
        for step, saved in zip(steps, state["gossip"], strict=True):
            step.load_state_dict(saved)  # before the parameters change: this waits for the exchange in flight
        for index, model in enumerate(accelerator._models):
            if any(model is remaining for remaining in models):
                load_model_state(model, state["models"][index])
            load_gradients(model, None if state["window"] is None else state["window"][index])
        load_loose_parameters(self._loose(), state["loose"])
        for step in steps:
            step.masters.write()
        if state["scaler"] is not None:
            accelerator.scaler.load_state_dict(state["scaler"])
        for loader, saved in zip(accelerator._dataloaders, state["loaders"], strict=True):
            recorder = recorder_of(loader)
            if recorder is not None and saved is not None:
                try:
                    recorder.load_state_dict(saved, None if moved else state["random"])
                except ValueError as error:
                    raise CheckpointError(str(error)) from error
        accelerator.step = state["micro_step"]
        self.group.steps_taken = state["steps_taken"]
        accelerator.gradient_state._set_sync_gradients(state["window"] is None)
        for part, (_, items) in prepared.items():
            for item, saved in zip(items, state[part], strict=True):
                item.load_state_dict(placed(saved))
        set_random_state(state["random"])

    def _warn_of_other_gossip(self, folder: Path, manifest: Manifest) -> None:
        saved, mine = manifest.facts.get("gossip"), self._own_facts()["gossip"]
        if not isinstance(saved, dict) or not mine or self.everyone.rank != 0:
            return
        names = [name for name in mine if name not in _FREE_TO_CHANGE and saved.get(name) != mine[name]]
        if names:
            changes = ", ".join(f"{name} (now {mine[name]}, was {saved.get(name)})" for name in names)
            logger.warning("resuming %s with another GossipConfig: %s", folder, changes)

    # ---- folders, with Accelerate's automatic names

    @property
    def _names_itself(self) -> bool:
        return self.accelerator.project_configuration.automatic_checkpoint_naming

    @property
    def _project_folder(self) -> Path:
        return Path(self.accelerator.project_dir) / "checkpoints"

    def _folder_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        if not self._names_itself:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or "
                    "project_config=ProjectConfiguration(automatic_checkpoint_naming=True, ...)."
                )
            return Path(output_dir).expanduser()
        folder = self._project_folder / f"checkpoint_{self.accelerator.project_configuration.iteration}"
        if self.everyone.all_gather_object(folder.exists() and not is_leftover(folder), "naming a checkpoint")[0]:
            raise ValueError(
                f"{folder} exists already. Set accelerator.project_configuration.iteration to the next free number."
            )
        return folder

    def _folder_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path | None:
        if input_dir not in (None, "auto"):
            return Path(input_dir).expanduser()
        if not self._names_itself:
            raise ValueError(
                f"load_state({input_dir!r}) needs automatic names of checkpoints; got none. Give the folder of a "
                f"checkpoint, or project_config=ProjectConfiguration(project_dir, automatic_checkpoint_naming=True)."
            )
        own = _numbered(self._project_folder) if self.everyone.rank == 0 else []
        folders = [folder for _, folder in own]
        newest = on_all(self.everyone, lambda: newest_readable(folders), "cannot find a checkpoint")
        newest = self.everyone.all_gather_object(newest, "finding the newest checkpoint")[0]
        if newest is None and input_dir is None:
            raise CheckpointError(
                f"{self._project_folder} holds no complete checkpoint. Give input_dir, or start a new run."
            )
        return newest

    def _continue_numbering(self) -> None:
        if self._names_itself:
            numbers = [number for number, _ in _numbered(self._project_folder)]
            following = self.everyone.all_gather_object(1 + max(numbers, default=-1), "naming a checkpoint")[0]
            configuration = self.accelerator.project_configuration
            configuration.iteration = max(following, configuration.iteration)

    def _delete_old(self, saved: Path) -> None:
        limit = self.accelerator.project_configuration.total_limit
        if not self._names_itself or limit is None or self.everyone.rank != 0:
            return
        folders = [folder for _, folder in _numbered(saved.parent)]
        delete_old([folder for folder in folders if is_complete(folder)], folders, max(1, limit))


def _numbered(parent: Path) -> list[tuple[int, Path]]:
    """Return the numbers and folders of the automatically named checkpoints, the oldest first."""
    matches = [(_AUTOMATIC_NAME.fullmatch(folder.name), folder) for folder in parent.glob("checkpoint_*")]
    return sorted((int(match[1]), folder) for match, folder in matches if match and folder.is_dir())
