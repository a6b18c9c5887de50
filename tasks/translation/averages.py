"""Averages the last few deployed models, as is usual for WMT14 (Vaswani et al. 2017, section 6.1)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsgdac_accel import WorkerGroup
from tasks.common.output_dir import AnyAccelerator
from tasks.translation.config import TranslationConfig

PATTERN = "deployed-*.safetensors"


class DeployedAverage:
    """Keeps the last `average_last` deployed models of a run and averages them for the final one.

    Args:
        config: settings of the run.
        accelerator: accelerator of the run.
        kept_to: step at which the run of this output folder goes on; models up to it stay. None: a new run.
    """

    def __init__(self, config: TranslationConfig, accelerator: AnyAccelerator, kept_to: int | None) -> None:
        self.config = config
        self.accelerator = accelerator
        self._models: LastModels | None = None
        self._open(kept_to)

    def keep_if_due(self, model: nn.Module, step: int, last_of_epoch: bool, last_of_run: bool) -> None:
        """Write the deployed model to disk if it is due after this optimizer step. Collective.

        It is due every `average_every` steps, or else at the end of every epoch, and after the last step of the run.

        Args:
            model: the prepared model.
            step: the optimizer step.
            last_of_epoch: whether it is the last step of its epoch.
            last_of_run: whether it is the last step of the run.
        """
        if self.config.average_last == 1:
            return
        every = self.config.average_every
        if last_of_run or (last_of_epoch if every is None else step % every == 0):
            self.accelerator.group.retry_after_loss(lambda: self._keep(model, step))

    def _keep(self, model: nn.Module, step: int) -> None:
        with self.accelerator.deployed_model(model) as deployed:
            models = self._open(step)
            if models is not None:
                models.add(step, trained_state(self.accelerator.unwrap_model(deployed, keep_torch_compile=False)))

    @contextmanager
    def averaged(self, model: nn.Module, step: int) -> Iterator[int]:
        """Put the average into `model` inside the context, after the last step. Collective.

        Yields how many models were averaged; 1 if the run averages none.
        """
        if self.config.average_last == 1:
            yield 1
            return
        models = self._open(step)
        with averaged_parameters(model, [] if models is None else models.files(), self.accelerator.group) as count:
            yield count

    def _open(self, kept_to: int | None) -> LastModels | None:
        """The models on disk, on the main worker. If the main worker was lost, the next one opens them."""
        if self._models is None and self.config.average_last > 1 and self.accelerator.is_main_process:
            self._models = LastModels(self.config.output_dir / "averages", self.config.average_last, kept_to)
        return self._models


class LastModels:
    """Keeps the last `count` deployed models as files in `folder`. Only the main worker uses it.

    Files of an earlier run are removed, since they would be averaged as well; those up to step `keep_to` stay.
    """

    def __init__(self, folder: Path, count: int, keep_to: int | None = None) -> None:
        self.folder = folder
        self.count = count
        folder.mkdir(parents=True, exist_ok=True)
        kept = [] if keep_to is None else [file for file in self.files() if file <= self._file(keep_to)]
        for stale in set(folder.glob(f"{PATTERN}*")).difference(kept):
            stale.unlink()

    def _file(self, step: int) -> Path:
        return self.folder / f"deployed-{step:09d}.safetensors"

    def files(self) -> list[Path]:
        """The files, oldest first."""
        return sorted(self.folder.glob(PATTERN))

    def add(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Write the model of `step`, then delete the oldest ones.

        Raises OSError, naming the file, if it cannot be written.
        """
        file = self._file(step)
        partial = file.with_name(f"{file.name}.partial")
        try:
            save_file(dict(state), partial)
            os.replace(partial, file)
        except (SafetensorError, OSError) as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"cannot write {file}: {error}. Free space, or choose another output_dir.") from error
        for old in self.files()[: -self.count]:
            old.unlink()


def average_files(files: Iterable[Path]) -> dict[str, Tensor]:
    """Average every tensor over files of the same model: summed in float64, returned in the tensors' dtypes.

    Raises ValueError without files, and for files of different models.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for count, file in enumerate(files, start=1):
        state = load_file(file)
        if count == 1:
            dtypes = {name: tensor.dtype for name, tensor in state.items()}
            sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
        if {name: tensor.shape for name, tensor in state.items()} != {name: s.shape for name, s in sums.items()}:
            raise ValueError(f"models to average must have the same tensors; {file} differs from the first file.")
        for name, tensor in state.items():
            sums[name] += tensor.double()
    if not count:
        raise ValueError("an average needs at least one model; got none.")
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


@torch.no_grad()
def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained parameters by name, on the CPU; tied ones once."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy what `trained_state` returned into the parameters, in place."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(state[name])


@contextmanager
def averaged_parameters(model: nn.Module, files: Sequence[Path], group: WorkerGroup) -> Iterator[int]:
    """Put the average of `files` into `model` inside the context, then restore its parameters. Collective.

    Worker 0 reads its `files` and broadcasts the average; those of other workers are ignored. Yields their number.
    """
    count = group.all_gather_object(len(files), "averaging the last models")[0]
    before = trained_state(model)
    if group.rank == 0:
        load_trained_state(model, average_files(files))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group.broadcast_(parameter, f"sharing the average of {name}")
    try:
        yield count
    finally:
        load_trained_state(model, before)
