"""BatchNorm statistics of the deployed model.

The workers' averaged running statistics do not describe the activations of the averaged model: two workers with weights
+1 and -1 average to 0, but their running variances do not. One pass over training data, sharded over the workers,
measures the statistics exactly: every sample counts once, and the variance is that of all activations together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dsgdac_accel.core.model_watch import batch_norm_layers
from dsgdac_accel.core.nonfinite import NonFiniteError
from dsgdac_accel.data.equal_steps import EqualSteps
from dsgdac_accel.data.loaders import batch_sampler_of, new_generator, preserved_loaders
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import random_state, set_random_state

Forward = Callable[[nn.Module, Any], Any]

_ORDER_SEED = 0
"""Seed of the fixed sample order of a calibration pass."""


def calibrated_layers(model: nn.Module, frozen: Collection[nn.Module] = ()) -> list[_BatchNorm]:
    """Return the BatchNorm layers that have running statistics and are not in `frozen`, in the model's order."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer not in frozen
    ]


def frozen_layers(model: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers in eval mode inside a model in train mode: the user keeps their statistics fixed."""
    if not model.training:
        return []
    return [layer for layer in batch_norm_layers(model) if not layer.training]


class _Moments:
    """Count, mean and sum of squared deviations of a layer's input, per channel, in float64.

    Args:
        channels: number of channels C.
        device: where they are kept; the host does not wait for it.
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        self.count = 0
        self.mean = torch.zeros(channels, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, activations: Tensor) -> None:
        """Add a batch of activations, shape (N, C, ...)."""
        values = activations.detach()
        values = values if values.dtype == torch.float64 else values.float()
        count = values.numel() // max(1, values.shape[1])
        others = [dimension for dimension in range(values.ndim) if dimension != 1]
        variance, mean = torch.var_mean(values, dim=others, correction=0)
        self.merge(count, mean.double(), variance.double() * count)

    def merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Add the moments of another set of samples (Chan, Golub and LeVeque's pairwise update)."""
        total = self.count + count
        if count == 0:
            return
        delta = mean - self.mean
        self.squares += squares + delta**2 * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count = total


@torch.no_grad()
def calibrate_batch_norm(
    model: nn.Module,
    batches: Iterable[Any],
    group: WorkerGroup,
    *,
    layers: Sequence[_BatchNorm] | None = None,
    forward: Forward | None = None,
) -> None:
    """Set the running means and (unbiased) variances of `layers` to those of all workers' batches. Collective.

    During the pass each of these layers normalizes with its batch's own statistics, as in training. Everything else,
    dropout included, is in eval mode.

    Args:
        model: the model; may be wrapped for autocast or compiled. It is left in eval mode.
        batches: this worker's share: tensors, tuples or mappings (see `sharded_batches`).
        layers: the layers to calibrate. Default: `calibrated_layers(model)`.
        forward: called as `forward(model, batch)`. Default: `run_model`.

    Raises:
        ValueError: no worker had a batch, or a batch has one sample.
        NonFiniteError: an activation is not finite.
    """
    layers = calibrated_layers(model) if layers is None else list(layers)
    if not layers:
        return
    forward = forward or run_model
    moments = {layer: _Moments(layer.num_features, _device_of(layer)) for layer in layers}
    model.eval()
    tracked = [layer.track_running_stats for layer in layers]
    hooks = []
    for layer in layers:
        layer.train()
        layer.track_running_stats = False  # normalize with the batch's statistics and leave the buffers alone
        hooks.append(layer.register_forward_pre_hook(lambda module, inputs: moments[module].add(inputs[0])))
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code ignores hooks that are added later
            for batch in batches:
                forward(model, batch)
    except Exception as error:
        group.report(f"worker {group.rank} failed in BatchNorm calibration: {error}")
        if "more than 1 value per channel" in str(error):
            raise ValueError(
                f"BatchNorm is undefined for a batch of one sample ({error}). Calibrate on larger batches."
            ) from error
        raise
    finally:
        for layer, hook, flag in zip(layers, hooks, tracked, strict=True):
            hook.remove()
            layer.track_running_stats = flag
        model.eval()
    _merge_over_workers(layers, [moments[layer] for layer in layers], group)


def _merge_over_workers(layers: Sequence[_BatchNorm], mine: Sequence[_Moments], group: WorkerGroup) -> None:
    counts = [moments.count for moments in mine]
    values = _joined([(moments.mean, moments.squares) for moments in mine]).cpu()  # the only wait for the device
    shares = group.all_gather_object((counts, values), "calibrating BatchNorm")
    totals = [_Moments(layer.num_features, torch.device("cpu")) for layer in layers]
    for counts, values in shares:  # in rank order, so that all workers get the same bits
        for total, count, (mean, squares) in zip(totals, counts, _of_layers(values, layers), strict=True):
            total.merge(count, mean, squares)
    if not all(total.count for total in totals):
        raise ValueError(
            "BatchNorm calibration saw no samples: the calibration loader is empty on every worker. "
            "Pass a loader with data, or calibrate=None to pool the workers' running statistics."
        )
    if not all(bool(torch.isfinite(total.mean).all() and torch.isfinite(total.squares).all()) for total in totals):
        raise NonFiniteError(
            "BatchNorm calibration saw activations that are not finite: the deployed model has diverged. Train with a "
            "lower learning rate, or deploy an earlier checkpoint."
        )
    statistics = [(total.mean, total.squares / max(1, total.count - 1)) for total in totals]
    for buffer, value in _with_buffers([layers], statistics):
        buffer.data.copy_(value)


def _device_of(layer: _BatchNorm) -> torch.device:
    return layer.running_mean.device  # type: ignore[union-attr]


def _joined(of_layers: Sequence[tuple[Any, Any]]) -> Tensor:
    """Return two tensors (C,) of each layer as one in float64, (sum of 2 C,)."""
    return torch.cat([part.double() for parts in of_layers for part in parts])


def _of_layers(values: Tensor, layers: Sequence[_BatchNorm]) -> Iterator[tuple[Tensor, Tensor]]:
    """Undo `_joined`, for values (..., sum of 2 C)."""
    parts = iter(values.split([layer.num_features for layer in layers for _ in range(2)], dim=-1))
    return zip(parts, parts, strict=True)


def _with_buffers(
    layers_of: Sequence[Sequence[_BatchNorm]], statistics: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Any, Tensor]]:
    """Return the buffers of each worker's layers with mean and variance; all are moved to the device at once."""
    everything, pairs = _joined(statistics).to(_device_of(layers_of[0][0])), []
    for layers in layers_of:
        for layer, (mean, variance) in zip(layers, _of_layers(everything, layers), strict=True):
            pairs += [(layer.running_mean, mean), (layer.running_var, variance)]
    return pairs


@torch.no_grad()
def pooled_batch_norm(layers_of: Sequence[Sequence[_BatchNorm]], group: WorkerGroup) -> list[tuple[Tensor, Tensor]]:
    """Return the layers' buffers with the workers' statistics, pooled by the law of total variance. Collective.

    A worker whose running statistics are not finite is left out, unless that holds for all of them.

    Args:
        layers_of: the layers of each worker of this process, in the same order.
        group: the processes.
    """
    first = layers_of[0]
    if not first:
        return []
    mine = [_joined([(layer.running_mean, layer.running_var) for layer in layers]) for layers in layers_of]
    gathered = group.all_gather_object(torch.stack(mine).cpu(), "pooling BatchNorm statistics")
    pooled = []
    for means, variances in _of_layers(torch.cat(gathered), first):  # (workers, C)
        # One batch that is not finite makes a worker's running statistics useless for good.
        finite = torch.isfinite(means).all(1) & torch.isfinite(variances).all(1)
        used = finite if bool(finite.any()) else ~finite
        pooled.append((means[used].mean(0), variances[used].mean(0) + means[used].var(0, correction=0)))
    return _with_buffers(layers_of, pooled)


class StatisticsCache:
    """Keeps the BatchNorm statistics of one step's average, so that several uses at one step calibrate once."""

    def __init__(self) -> None:
        self._kept: tuple[int, list[Tensor]] | None = None

    def has(self, step: int) -> bool:
        """Return whether the statistics of this step are kept."""
        return self._kept is not None and self._kept[0] == step

    @torch.no_grad()
    def apply(self, model: nn.Module, step: int) -> None:
        """Overwrite the statistics of `model` by those kept for `step`; if there are none, keep those of `model`."""
        layers = calibrated_layers(model)
        both = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
        current = [tensor for tensor in both if tensor is not None]
        if self._kept is None or self._kept[0] != step:
            self._kept = step, [tensor.clone() for tensor in current]
            return
        for tensor, kept in zip(current, self._kept[1], strict=True):
            tensor.data.copy_(kept)


# ---- batches of any form


def run_model(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch as training loops do.

    A mapping is passed as keyword arguments, without the keys that `forward` does not accept (labels, for example). The
    first entry of a tuple or list, or the tensor itself, is passed as the only argument.

    Raises:
        ValueError: `forward` accepts none of the mapping's keys.
    """
    if isinstance(batch, Mapping):
        return model(**_accepted(model, batch))
    if isinstance(batch, (tuple, list)):
        return model(batch[0])
    return model(batch)


def _accepted(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    forward = inspect.unwrap(getattr(model, "_orig_mod", model).forward)
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(batch)
    accepted = {name: value for name, value in batch.items() if name in parameters}
    if not accepted:
        raise ValueError(
            f"none of the batch's keys {sorted(batch)} is an argument of forward ({', '.join(parameters)}). "
            f"Pass calibration_forward=lambda model, batch: ..."
        )
    return accepted


def sharded_batches(
    data: Iterable[Any], group: WorkerGroup, device: torch.device, *, local_workers: int = 1
) -> Iterator[Any]:
    """Yield this worker's share of the batches of `data`, moved to `device`. Collective.

    If Accelerate prepared the loader and all workers hold the same samples, the batches are shared out. Any other
    loader or iterable counts as this worker's own data. Map-style data sets are read through a separate loader: the
    sampler, epoch, generators and loader processes of the given one stay untouched, each sample is read as often as a
    pass draws it, and the shared batches are the same for any number of workers.

    Args:
        data: the loader or iterable.
        group: the processes.
        device: the device to move batches to.
        local_workers: workers per process. A training batch serves all of them, so calibration batches are smaller by
            this factor: the size of one worker's part.
    """
    # Under EqualSteps: read all of the data, not only as many batches as the shortest worker has.
    source: Any = data.loader if isinstance(data, EqualSteps) else data
    readable = (
        isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset) and _batch_size(source)
    )
    rows = _rows(source) if readable else []
    what = (len(source.dataset), hash(tuple(rows))) if readable else None
    contents = group.all_gather_object(what, "comparing the calibration data")
    shared = len(set(contents)) == 1 and hasattr(source, "base_dataloader")
    if readable:
        share, shares = (group.rank, group.size) if shared else (0, 1)
        source = _fresh_loader(source, rows, share, shares, local_workers)
    for batch in source:
        yield send_to_device(batch, device)


def _rows(loader: Any) -> list[int]:
    """Return the row numbers that a pass draws, ascending, as often as it does. Its sampler is not disturbed."""
    batch_sampler = batch_sampler_of(loader)
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    if type(batch_sampler) is BatchSampler and isinstance(batch_sampler.sampler, SequentialSampler | RandomSampler):
        return list(range(len(loader.dataset)))
    randomness = random_state()
    with preserved_loaders([loader]):
        rows = sorted(row for batch in batch_sampler for row in batch)
    set_random_state(randomness)
    return rows


def _batch_size(loader: Any) -> int | None:
    """Return the samples per batch of one process, also where Accelerate wraps the batch sampler; None if unknown."""
    sampler = batch_sampler_of(loader)
    size = getattr(sampler, "batch_size", None)
    if isinstance(size, int) and getattr(sampler, "split_batches", False):
        return max(1, size // sampler.num_processes)
    return size if isinstance(size, int) else None


def _fresh_loader(loader: Any, rows: list[int], share: int, shares: int, local_workers: int) -> DataLoader:
    """Return a loader of every `shares`-th batch of `rows`, starting with batch number `share`."""
    loaded = _batch_size(loader)
    assert loaded is not None
    size = max(1, loaded // local_workers)
    # Shuffle: in file order, batches of a single class would distort the statistics of deeper layers.
    shuffle = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_ORDER_SEED), device="cpu").tolist()
    batches = list(BatchSampler([rows[number] for number in shuffle], size, drop_last=False))
    if len(batches) > 1 and len(batches[-1]) == 1 < size:  # BatchNorm is undefined for shape (1, C)
        batches[-2:] = [batches[-2] + batches[-1]]
    processes: dict[str, Any] = {"num_workers": loader.num_workers, "worker_init_fn": loader.worker_init_fn}
    if loader.num_workers:
        processes |= {name: getattr(loader, name) for name in ("multiprocessing_context", "timeout", "prefetch_factor")}
    mine: Any = batches[share::shares]
    order = {"batch_size": None, "sampler": mine} if loader.batch_sampler is None else {"batch_sampler": mine}
    return DataLoader(
        loader.dataset,
        **order,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=new_generator().manual_seed(_ORDER_SEED + share),
        **processes,
    )
