"""Averaging the last few deployed models, as is usual for this benchmark (Vaswani et al. 2017, section 6.1)."""

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

PATTERN = "deployed-*.safetensors"


class LastModels:
    """Keeps the last `count` deployed models as files of `folder`. For the main worker alone.

    Files that an earlier run left there are removed: they would be averaged with those of this run. Of a run that is
    resumed, those up to step `keep_to` stay.
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
        """The kept ones, the oldest first."""
        return sorted(self.folder.glob(PATTERN))

    def add(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Write the model of `step`, then delete what is too old."""
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
    """Mean of every tensor over files of the same model, summed in float64, in the tensors' own dtypes.

    Raises ValueError without files, and for files that are not of one model.
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
            raise ValueError(f"models to average must have the same tensors; {file} differs from the first.")
        for name, tensor in state.items():
            sums[name] += tensor.double()
    if not count:
        raise ValueError("the average of models needs at least one; got none.")
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


@torch.no_grad()
def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained parameters by name, tied ones once."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write the values of `trained_state` into the parameters, in place."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(state[name])


@contextmanager
def averaged_parameters(model: nn.Module, files: Sequence[Path], group: WorkerGroup) -> Iterator[int]:
    """Inside, `model` holds the average of `files`, which worker 0 reads for all; yields how many those are.

    On exit the parameters are what they were. Collective; only worker 0's `files` count.
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
