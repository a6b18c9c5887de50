"""`save_state` and `load_state` that keep every worker's own state, for any Accelerator."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dsgdac_accel.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    WorkerCountError,
    load_checkpoint,
    save_checkpoint,
)
from dsgdac_accel.checkpoint.dataloader_state import DataPosition, Recorded, ResumedBatches, inner_loader, recorded
from dsgdac_accel.checkpoint.manifest import MANIFEST, delete_checkpoint, is_complete, is_leftover, read_manifest
from dsgdac_accel.checkpoint.rescale import average_of_workers
from dsgdac_accel.checkpoint.worker_state import (
    gradients_of,
    load_gradients,
    load_loose_parameters,
    load_model_state,
    loose_parameters,
    model_state,
    require_same_model,
)
from dsgdac_accel.config import config_to_dict
from dsgdac_accel.randomness import random_state, seed_workers_differently, set_random_state

logger = logging.getLogger(__name__)

_FREE_TO_CHANGE = ("timeout", "on_worker_loss", "log_every", "total_steps", "on_other_worker_count")
_NAMED = re.compile(r"checkpoint_(\d+)")  # Accelerate's automatic names


class KeepsEveryWorker:
    """Mixed into an Accelerator: checkpoints with the state of each worker, from which a run goes on bit by bit.

    The Accelerator has a `group` of workers and its `gossip_steps`.
    """

    group: Any
    gossip_steps: Any
    workers_per_process: int
    _models: list[nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]
    project_configuration: Any
    _writer: CheckpointWriter | None = None
    _deletions: Callable[[], None] | None = None
    """What may be deleted once the checkpoint that is being written is complete."""

    # ---- saving

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool = True,
        facts: Mapping[str, Any] | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save the state of every worker, as `Accelerator.save_state` does for one. Collective.

        That is: models, optimizers, schedulers, gradient scaler, random streams, positions in topology, gamma schedule
        and prepared loaders, registered objects, and inside an accumulation window the gradients. Nothing is pickled.
        Training goes on as if nothing had been. Automatic naming and `total_limit` work as in Accelerate, but older
        checkpoints are deleted only after this one is complete.

        Args:
            output_dir: on a file system that all workers share. Left out with automatic naming.
            safe_serialization, save_model_func_kwargs: Accelerate's; without effect, files are always safetensors.
            wait: False writes in the background after a copy to host memory; the checkpoint is complete a little
                later, and an error comes to light in the next `save_state` or in `finish_saving`.
            facts: plain values to note in the manifest, such as the run's configuration.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: on all workers, if any of them could not write; older checkpoints are untouched.
        """
        self._refuse_while_deployed("save_state")
        self.finish_saving()
        folder = self._folder_to_save(output_dir)
        self.group.redone(lambda: self._save(folder, wait, facts))
        self.project_configuration.iteration += 1
        return folder

    def _save(self, folder: Path, wait: bool, facts: Mapping[str, Any] | None) -> None:
        state = self._training_state(self._weights_to_save(folder))
        step = max((gossip.mixer.step for gossip in self.gossip_steps), default=self.group.steps_taken)
        noted = {**self._own_facts(), **(facts or {})}
        if wait:
            save_checkpoint(folder, state, self.group, step=step, facts=noted)
            self._delete_old(folder)
        else:
            if self._writer is None:
                self._writer = CheckpointWriter(self.group)
            self._writer.save(folder, state, step=step, facts=noted)
            self._deletions = lambda: self._delete_old(folder)

    def finish_saving(self) -> Path | None:
        """Wait until the checkpoint that is written in the background is complete; nothing to do without. Collective.

        Returns:
            Its folder; None if there was none, or if a worker was lost that may not have written its part.

        Raises:
            CheckpointError: on all workers, if any of them could not write its part.
        """
        deletions, self._deletions = self._deletions, None
        if self._writer is None:
            return None
        finished = self.group.redone(self._writer.finish)
        if finished is not None and deletions is not None:
            deletions()
        return finished

    def end_training(self) -> None:
        """As `Accelerator.end_training`, after what is being saved in the background is complete."""
        self.finish_saving()
        super().end_training()  # type: ignore[misc]

    def _weights_to_save(self, folder: Path) -> dict[int, Any]:
        """The state of each model by its number, but for those that a user's hook saved by itself and took away."""
        weights = [model_state(model) for model in self._models]
        remaining = list(weights)
        hooks = self._save_model_state_pre_hook  # type: ignore[attr-defined]
        if hooks:
            self._together(lambda: folder.mkdir(parents=True, exist_ok=True), f"cannot make the folder {folder}")
        for hook in hooks.values():
            hook(self._models, remaining, str(folder))
        return {index: state for index, state in enumerate(weights) if any(state is kept for kept in remaining)}

    def _training_state(self, models: dict[int, Any]) -> dict[str, Any]:
        # The positions first: that waits for the exchange in flight, which is kept for the next step.
        gossip = [step.state_dict() for step in self.gossip_steps]
        scaler = getattr(self, "scaler", None)
        return {
            "gossip": gossip,
            "models": models,
            "loose": loose_parameters(self._models, self._optimizers),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "kinds_of_optimizers": self._kinds_of_optimizers(),
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "loaders": [_position_state(loader) for loader in self._dataloaders],
            "registered": [registered.state_dict() for registered in self._custom_objects],
            "window": None if self._at_step_boundary() else [gradients_of(model) for model in self._models],
            "micro_step": self.step,
            "steps_taken": self.group.steps_taken,
            "random": random_state(),
        }

    def _kinds_of_optimizers(self) -> list[str]:
        return [type(optimizer.optimizer).__name__ for optimizer in self._optimizers]

    def _at_step_boundary(self) -> bool:
        return bool(self.gradient_state.sync_gradients)  # type: ignore[attr-defined]

    def _own_facts(self) -> dict[str, Any]:
        gossip = getattr(self, "gossip_config", None)
        return {
            "topology": [step.mixer.topology.name for step in self.gossip_steps],
            "gossip": None if gossip is None else config_to_dict(gossip),
            "workers_per_process": self.workers_per_process,
            "lost": list(self.group.lost),
            "torch": torch.__version__,
        }

    def _refuse_while_deployed(self, what: str) -> None:
        if any(step.mixer.borrowed for step in self.gossip_steps):
            raise RuntimeError(
                f"{what} inside `with deployed_model(...)` would take the average for this worker's own weights; "
                f"call it before or after. The average itself is saved by `save_model`."
            )

    def _folder_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or "
                    "project_config=ProjectConfiguration(automatic_checkpoint_naming=True, ...)."
                )
            return Path(output_dir).expanduser()
        parent = Path(self.project_dir) / "checkpoints"  # type: ignore[attr-defined]
        folder = parent / f"checkpoint_{self.project_configuration.iteration}"
        if self.group.all_gather_object(folder.exists() and not is_leftover(folder), "naming a checkpoint")[0]:
            raise ValueError(
                f"{folder} exists already. Set accelerator.project_configuration.iteration to the number to go on with."
            )
        return folder

    def _delete_old(self, saved: Path) -> None:
        limit = self.project_configuration.total_limit
        if not self.project_configuration.automatic_checkpoint_naming or limit is None or self.group.rank != 0:
            return
        named = [folder for _, folder in _numbered(saved.parent)]
        complete = [folder for folder in named if is_complete(folder)]
        for folder in named:
            if folder in complete[: -max(1, limit)] or is_leftover(folder):
                delete_checkpoint(folder)

    # ---- loading

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        on_other_worker_count: Literal["refuse", "deployed"] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved, each worker its own, into what is prepared as it was then. Collective.

        Training then goes on bit by bit as if it had not stopped: take the batches of the pass that was broken off
        from `resumed_batches`.

        Args:
            input_dir: the checkpoint. Left out with automatic naming: the newest complete one.
            load_kwargs, load_model_func_kwargs: Accelerate's; without effect.
            on_other_worker_count: what to do with a checkpoint of more or fewer workers. "deployed" starts all workers
                from the average of the saved ones: parameters and floating optimizer states averaged, BatchNorm
                statistics pooled, everything else worker 0's, random streams seeded anew. Default: as the GossipConfig
                says.

        Raises:
            WorkerCountError: another worker count, refused.
            CheckpointError: no complete checkpoint, a damaged file, or a checkpoint of another model or setup.
        """
        if on_other_worker_count is None:
            on_other_worker_count = getattr(getattr(self, "gossip_config", None), "on_other_worker_count", "refuse")
        if on_other_worker_count not in ("refuse", "deployed"):
            raise ValueError(f"on_other_worker_count must be 'refuse' or 'deployed'; got {on_other_worker_count!r}.")
        self._refuse_while_deployed("load_state")
        self.finish_saving()
        folder = self._folder_to_load(input_dir)
        self._together(lambda: self._require_same_split(folder))
        state, averaged = self._state_to_load(folder, on_other_worker_count)
        self._warn_of_other_gossip(folder)
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():  # type: ignore[attr-defined]
            hook(models, str(folder))
        self._together(lambda: self._require_same_setup(state, models))
        self._together(lambda: self._load_training_state(state, models, averaged))
        if averaged:
            seed_workers_differently(self.group, read_manifest(folder).step)
        if self.project_configuration.automatic_checkpoint_naming:
            numbers = [number for number, _ in _numbered(Path(self.project_dir) / "checkpoints")]  # type: ignore[attr-defined]
            following = self.group.all_gather_object(1 + max(numbers, default=-1), "naming a checkpoint")[0]
            self.project_configuration.iteration = max(following, self.project_configuration.iteration)

    def _state_to_load(self, folder: Path, on_other_worker_count: str) -> tuple[dict[str, Any], bool]:
        """This worker's own state, or that of the deployed model where workers are others; which of the two it is."""
        try:
            state = load_checkpoint(folder, self.group)
            lost = read_manifest(folder).facts.get("lost", [])
            if lost == self.group.lost:
                return state, False
            if on_other_worker_count == "refuse":
                raise CheckpointError(
                    f"{folder} was saved by a run that went on without worker {', '.join(map(str, lost))}; nobody took "
                    f"its share of the data. To go on, start all workers from the average of those that were left: "
                    f"on_other_worker_count='deployed'."
                )
        except WorkerCountError:
            if on_other_worker_count == "refuse":
                raise
        return self._together(lambda: average_of_workers(folder, self.group.size)), True

    def _require_same_split(self, folder: Path) -> None:
        """Of several workers in a process one file holds the states."""
        if not (folder / MANIFEST).exists():
            return  # what is missing, `load_checkpoint` says
        manifest = read_manifest(folder)
        saved, mine = manifest.facts.get("workers_per_process", 1), self.workers_per_process
        if saved == mine and (mine == 1 or manifest.workers == self.group.size):
            return
        raise CheckpointError(
            f"{folder} was saved by {manifest.workers} process(es) of {saved} worker(s) each, and this run has "
            f"{self.group.size} of {mine}. With several workers in a process, launch the same again: "
            f"{manifest.workers} process(es), workers_per_process={saved}."
        )

    def _folder_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).expanduser()
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, or automatic_checkpoint_naming in the ProjectConfiguration.")
        parent = Path(self.project_dir) / "checkpoints"  # type: ignore[attr-defined]
        complete = [str(folder) for _, folder in _numbered(parent) if is_complete(folder)]
        newest = self.group.all_gather_object(complete[-1:], "finding the newest checkpoint")[0]
        if not newest:
            raise CheckpointError(f"{parent} holds no complete checkpoint. Give input_dir, or start anew.")
        return Path(newest[0])

    def _together(self, attempt: Callable[[], Any], what: str = "cannot go on from the checkpoint") -> Any:
        """Do it on all workers, or raise the first worker's error on all of them."""
        result = problem = None
        try:
            result = attempt()
        except Exception as error:  # an error of one worker must not leave the others waiting
            problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        problems = self.group.all_gather_object(problem, "agreeing on a checkpoint")
        for rank, found in enumerate(problems):
            if found is not None:
                raise CheckpointError(f"worker {rank} {what}: {found}")
        return result

    def _require_same_setup(self, state: Mapping[str, Any], models: list[nn.Module]) -> None:
        scaler = getattr(self, "scaler", None)
        for name, mine in (
            ("optimizers", self._optimizers), ("schedulers", self._schedulers), ("loaders", self._dataloaders),
            ("registered", self._custom_objects), ("gossip", self.gossip_steps),
        ):  # fmt: skip
            if len(state[name]) != len(mine):
                what = {"registered": "registered objects", "gossip": "gossiping optimizers"}.get(name, name)
                raise CheckpointError(
                    f"the checkpoint holds {len(state[name])} {what}, and {len(mine)} are prepared. Prepare and "
                    f"register the same objects in the same order as when it was saved."
                )
        if (state["scaler"] is None) != (scaler is None):
            raise CheckpointError(
                f"the checkpoint was saved {'without' if state['scaler'] is None else 'with'} a gradient scaler "
                f"(mixed_precision='fp16'). Train on in the same precision."
            )
        for index, model in enumerate(self._models):
            if any(model is remaining for remaining in models):
                if index not in state["models"]:
                    raise CheckpointError(
                        f"the checkpoint holds no weights of model {index}: fewer models were prepared, or a hook took "
                        f"them. Let a hook of `register_load_state_pre_hook` load the model and take it from the list."
                    )
                require_same_model(model, state["models"][index])
        kinds = state.get("kinds_of_optimizers", self._kinds_of_optimizers())  # not in older checkpoints
        for number, (saved, mine_now) in enumerate(zip(kinds, self._kinds_of_optimizers(), strict=True)):
            if saved != mine_now:
                raise CheckpointError(
                    f"the checkpoint holds the state of {saved} for optimizer {number}, and {mine_now} is prepared. "
                    f"Train on with {saved}."
                )

    def _load_training_state(self, state: Mapping[str, Any], models: list[nn.Module], averaged: bool) -> None:
        for step, saved in zip(self.gossip_steps, state["gossip"], strict=True):
            step.load_state_dict(saved)  # before the parameters change: what is in flight arrives first
        for index, model in enumerate(self._models):
            if any(model is remaining for remaining in models):
                load_model_state(model, state["models"][index])
        load_loose_parameters(self._models, self._optimizers, state["loose"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])  # type: ignore[attr-defined]
        for loader, saved in zip(self._dataloaders, state["loaders"], strict=True):
            if isinstance(loader, Recorded) and saved is not None:
                loader.load_position_state(saved, None if averaged else state["random"])
        for index, model in enumerate(self._models):
            load_gradients(model, None if state["window"] is None else state["window"][index])
        self.step = state["micro_step"]
        self.group.steps_taken = state["steps_taken"]
        self.gradient_state._set_sync_gradients(state["window"] is None)  # type: ignore[attr-defined]
        for registered, saved in zip(self._custom_objects, state["registered"], strict=True):
            registered.load_state_dict(saved)
        set_random_state(state["random"])

    def _warn_of_other_gossip(self, folder: Path) -> None:
        saved, mine = read_manifest(folder).facts.get("gossip"), self._own_facts()["gossip"]
        if not isinstance(saved, dict) or not mine or self.group.rank != 0:
            return
        names = [name for name in mine if name not in _FREE_TO_CHANGE and saved.get(name) != mine[name]]
        if names:
            changes = ", ".join(f"{name} (now {mine[name]}, was {saved.get(name)})" for name in names)
            logger.warning("this run goes on from %s under another GossipConfig: %s", folder, changes)

    # ---- going on in the middle of a pass

    def resumed_batches(self, loader: Iterable[Any], replay: bool | None = None) -> ResumedBatches:
        """What the next pass over a prepared loader has to take: after `load_state` the rest of the pass that was
        broken off, with the same batches and random numbers as if it had not been; otherwise the whole pass.

        So a loop may always be written `for batch in accelerator.resumed_batches(loader)`.

        Args:
            loader: a prepared loader.
            replay: how the batches that were taken are passed over. True fetches and drops them, which brings also
                the random streams of loader processes and of data sets to where they were; False leaves them out of
                the order, which takes no time; None replays where loader processes or an iterable data set need it.
        """
        return ResumedBatches(loader, replay)

    def _recorded(self, prepared: Any, active: Callable[[], bool]) -> Any:
        """A prepared loader that knows its position, in place of the given one."""
        own = recorded(prepared, active)
        self._dataloaders[:] = [own if loader is prepared else loader for loader in self._dataloaders]
        return own

    def _batches_taken(self, loader: Any) -> int:
        """Of the pass that was loaded and is to be gone on with."""
        inner = inner_loader(loader)
        return inner.waiting_batches if isinstance(inner, Recorded) else 0

    def data_position(self, loader: Any) -> DataPosition:
        """Where training is in a prepared loader: the epoch that is being read or comes next, and batches taken of it.

        After `load_state`: `for epoch in range(accelerator.data_position(loader).epoch, epochs): ...`.
        """
        inner = inner_loader(loader)
        if not isinstance(inner, Recorded):
            raise TypeError(
                f"positions are known of loaders that were passed through `prepare`; got a {type(loader).__name__}."
            )
        return inner.position


def _position_state(loader: Any) -> dict[str, Any] | None:
    return loader.position_state() if isinstance(loader, Recorded) else None


def _numbered(parent: Path) -> list[tuple[int, Path]]:
    """Automatically named checkpoints in order of their numbers."""
    named = [(_NAMED.fullmatch(folder.name), folder) for folder in parent.glob("checkpoint_*") if folder.is_dir()]
    return sorted((int(match[1]), folder) for match, folder in named if match)
