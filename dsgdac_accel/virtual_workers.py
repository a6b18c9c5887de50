"""`VirtualWorkers`: several workers inside one process, so that 8, 16 or 32 of them fit on one GPU or CPU."""

from __future__ import annotations

import copy
import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.nn import Parameter

from dsgdac_accel.data.batch_parts import batch_size, cut, even_sizes, join, requires_grad, with_scaled_gradient
from dsgdac_accel.randomness import WorkerStreams
from dsgdac_accel.tensor_bytes import version_of

logger = logging.getLogger(__name__)


class VirtualWorkers(nn.Module):
    """`num_workers` replicas of a model behind the interface of one model, computed one after another.

    A batch is split along the first dimension into one part per worker, in order. Each replica computes its part with
    its own parameters, BatchNorm statistics and torch random stream (dropout), and the outputs are joined. The loss is
    taken as a mean over the batch, as in data-parallel training; each replica's gradient is then that of the mean over
    its OWN part, exactly what a process of its own would compute.

    `GossipAccelerator(gossip=GossipConfig(workers_per_process=8))` creates one in `prepare`, adds the parameters of all
    replicas to the optimizer, clips each worker's gradient separately, and mixes the replicas with each other and with
    those of other processes. Attributes and buffers that a script sets on the prepared model, or on the first replica,
    reach all replicas at the next forward pass.

    The replicas run in a loop, because `torch.func.vmap` restricts what a model may do. Measured on a CPU with 8
    workers, vmap takes 1.2 to 1.35 times as long for convolutions and up to 1.2 times for Transformers with usual
    batches. It is faster by a tenth for purely linear models, and by a quarter for replicas so small that launching
    operations dominates.

    Args:
        model: becomes worker 0 of this process, unchanged; the other workers get copies.
        num_workers: workers in this process, at least 1.
        shared: all workers share one set of parameters and buffers, for synchronous baselines. Each part of the batch
            still has its own BatchNorm statistics, and gradients are those of the mean over the whole batch.

    Raises:
        ValueError: `num_workers` < 1, or the model cannot be copied.
    """

    def __init__(self, model: nn.Module, num_workers: int, *, shared: bool = False) -> None:
        super().__init__()
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1; got {num_workers}.")
        copies = [model if shared else _copy(model) for _ in range(num_workers - 1)]
        self.replicas = nn.ModuleList([model, *copies])
        self.shared = shared
        if not shared:
            model.register_load_state_dict_post_hook(_LoadIntoOthers(self))
        self.streams = WorkerStreams(torch.initial_seed(), range(num_workers))
        """One random stream per replica."""
        self.training = model.training
        self._first_only = 0  # open `whole` contexts
        self._sizes: list[int] | None = None  # set inside `cut_at`
        self._seen_full_batch = self._warned_of_small_batch = False
        self._warned_attributes: set[str] = set()
        self._settings = _Settings()
        self._note_settings()

    @property
    def num_workers(self) -> int:
        """Workers in this process."""
        return len(self.replicas)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every replica on its part of the batch and join the outputs; see the class."""
        if self._first_only:
            return self.replicas[0](*args, **kwargs)
        sizes = even_sizes(batch_size(args, kwargs), self.num_workers) if self._sizes is None else self._sizes
        self._check_sizes(sizes)
        self.follow_the_first()
        outputs, total = [], sum(sizes)
        parts = [size for size in sizes if size]
        even = len(set(parts)) == 1  # one scale for all replicas: scale the joined outputs instead of each one
        trains_inputs = not self.shared and requires_grad((args, kwargs))
        with self._own_streams() as use:
            for worker, (part_args, part_kwargs) in enumerate(cut(args, kwargs, sizes)):
                if sizes[worker] == 0:
                    continue
                use(worker)
                if trains_inputs:  # inputs get the gradient of the mean over the whole batch
                    part_args, part_kwargs = with_scaled_gradient((part_args, part_kwargs), sizes[worker] / total)
                output = self._run(worker, part_args, part_kwargs)
                outputs.append(output if self.shared or even else with_scaled_gradient(output, total / sizes[worker]))
        self._note_settings()
        joined = join(outputs, parts)
        return with_scaled_gradient(joined, total / parts[0]) if even and not self.shared else joined

    def follow_the_first(self) -> None:
        """Copy modes, `requires_grad`, and what a script has set on the first replica, the one that it refers to.

        Raises:
            RuntimeError: the first replica has other modules than the others.
        """
        if self.shared:
            return
        first, *others = replicas = self._modules_by_replica()
        if len({len(modules) for modules in replicas}) > 1:
            raise RuntimeError(
                "modules were added to a prepared model, or taken out of it, so that only the first of this process's "
                "workers has changed. Change the model before `prepare`."
            )
        self._settings.follow(*replicas)
        trained = [parameter.requires_grad for parameter in _parameters_of(first)]
        for modules in others:
            for module, followed in zip(modules, first, strict=True):
                if module.training != followed.training:
                    module.training = followed.training
            for parameter, wanted in zip(_parameters_of(modules), trained, strict=True):
                if parameter.requires_grad != wanted:
                    parameter.requires_grad_(wanted)

    def _note_settings(self) -> None:
        if not self.shared:
            self._settings.note(*self._modules_by_replica())

    def _modules_by_replica(self) -> list[list[nn.Module]]:
        return [_modules_of(replica) for replica in self.replicas]

    def _own_streams(self) -> AbstractContextManager[Callable[[int], None]]:
        """Return `WorkerStreams.swapped()`; with shared parameters, leave the process's own stream in place."""
        return nullcontext(lambda worker: None) if self.shared else self.streams.swapped()

    def _run(self, worker: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return self.replicas[worker](*args, **kwargs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"BatchNorm needs more than one sample per worker, but this process's worker {worker} of "
                f"{self.num_workers} got one ({error}). Use larger batches, fewer workers_per_process, or "
                f"drop_last=True in the DataLoader."
            ) from error

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        if all(sizes) or not self.training:
            self._seen_full_batch = self._seen_full_batch or self.training
            return
        if not self._seen_full_batch:
            raise ValueError(
                f"a batch is split into one part per worker: {sum(sizes)} samples are too few for {self.num_workers} "
                f"workers in this process. Use batches of at least {self.num_workers}, or fewer workers_per_process."
            )
        if not self._warned_of_small_batch:
            self._warned_of_small_batch = True
            logger.warning(
                "a last batch of %d samples leaves some of %d workers without any: they mix without a local update. "
                "Set drop_last=True in the DataLoader to skip such batches.",
                sum(sizes),
                self.num_workers,
            )

    @contextmanager
    def cut_at(self, sizes: Sequence[int]) -> Iterator[None]:
        """Inside, batches are split into parts of these sizes, one per worker, instead of even parts.

        Raises ValueError unless there is one size per worker.
        """
        if len(sizes) != self.num_workers:
            raise ValueError(
                f"there are {self.num_workers} workers in this process; got {len(sizes)} sizes. Give one size each."
            )
        self._sizes = list(sizes)
        try:
            yield
        finally:
            self._sizes = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the first replica computes whole batches: for the deployed model, when all replicas are equal.

        Attributes that are set inside reach all replicas; the caller restores buffers.
        """
        self.follow_the_first()
        self._first_only += 1
        try:
            yield
        finally:
            self._first_only -= 1
            if not self.shared:
                self._settings.follow(*self._modules_by_replica(), buffers=False)
            self._note_settings()

    # ---- parameters

    def by_worker(self) -> list[list[Parameter]]:
        """Return the parameters of each replica, in the same order."""
        return [list(replica.parameters()) for replica in self.replicas]

    def complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the other replicas' parameters to the optimizer, with the settings and state of the first replica's."""
        if self.shared:
            return
        first, *others = self.by_worker()
        twins = {id(p): [mine[index] for mine in others] for index, p in enumerate(first)}
        present = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for group in optimizer.param_groups:
            own, names = list(group["params"]), list(group.get("param_names", ()))
            for number in range(len(others)):
                added = [(i, p, twins[id(p)][number]) for i, p in enumerate(own) if id(p) in twins]
                for index, parameter, twin in added:
                    if id(twin) in present:
                        continue
                    group["params"].append(twin)
                    if names:
                        group["param_names"].append(f"replicas.{number + 1}.{names[index]}")
                    if parameter in optimizer.state:
                        optimizer.state[twin] = copy.deepcopy(optimizer.state[parameter])

    def mark_prepared(self) -> None:
        """Set the mark by which Accelerate skips a model that is prepared already."""
        self.__dict__["_is_accelerate_prepared"] = True

    # ---- what the first replica answers

    def __getattr__(self, name: str) -> Any:
        """Return the first replica's attribute, such as `config` or `generate`, where this wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "replicas":
                raise
            value = getattr(self.replicas[0], name)
            self._warn_of_first_only(name, value)
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of all replicas, unless it is one of this wrapper.

        Raises:
            RuntimeError: the value is a module or a parameter, of which each replica needs its own.
        """
        of_wrapper = name in self.__dict__ or name.startswith("_") or hasattr(type(self), name)
        if of_wrapper or "_settings" not in self.__dict__:  # which `__init__` sets last
            super().__setattr__(name, value)
            return
        if isinstance(value, nn.Module | Parameter):
            raise RuntimeError(
                f"model.{name} is set to a {type(value).__name__} after `prepare`, but each of the {self.num_workers} "
                f"workers in this process needs one of its own. Set it before `prepare`."
            )
        for replica in self.replicas:
            setattr(replica, name, value.clone() if isinstance(value, Tensor) else value)

    def _warn_of_first_only(self, name: str, value: Any) -> None:
        computes = isinstance(value, nn.Module) or (callable(value) and not hasattr(nn.Module, name))
        if (
            computes
            and self.training
            and not self._first_only
            and torch.is_grad_enabled()
            and name not in self._warned_attributes
        ):
            self._warned_attributes.add(name)
            logger.warning(
                "%s runs on the first of this process's workers only, so the others do not train on it. Call it from "
                "the model's forward.",
                name,
            )

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the random streams, for checkpoints."""
        return self.streams.state_dict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the random streams of a checkpoint."""
        self.streams.load_state_dict(state)


class _LoadIntoOthers:
    """Hook of the first replica that copies a loaded state dict to the other replicas.

    Deep copies and pickles of the model carry an inactive hook.
    """

    def __init__(self, workers: VirtualWorkers | None) -> None:
        self._workers = None if workers is None else weakref.ref(workers)

    @torch.no_grad()
    def __call__(self, model: nn.Module, keys: Any) -> None:
        workers = None if self._workers is None else self._workers()
        for replica in () if workers is None else workers.replicas[1:]:
            for mine, loaded in zip(values_of(replica), values_of(model), strict=True):
                mine.copy_(loaded)

    def __deepcopy__(self, memo: dict) -> _LoadIntoOthers:
        return _LoadIntoOthers(None)

    def __reduce__(self) -> tuple:
        return _LoadIntoOthers, (None,)


class _Settings:
    """Gives the other replicas what a script sets on the modules of the first one between two forward passes.

    That is attributes that are bound anew, except for functions of a module, and buffers that are written or put in
    place of others. Another replica that has changed as well, such as by loading a state of its own, keeps its own.
    """

    def __init__(self) -> None:
        self._first: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of each module of the first replica, and `_versions` of its buffers."""
        self._held: list[Any] = []
        """The buffers, so that no other one gets the `id` of one of them."""
        self._others: list[int] = []
        """Of each other replica, what changes if one of its buffers is written or put in place of another."""

    def __reduce__(self) -> tuple:
        return _Settings, ()

    def note(self, first: Sequence[nn.Module], *others: Sequence[nn.Module]) -> None:
        """Remember the present state of the modules of each replica."""
        self._first = [(vars(module).copy(), _versions(module)) for module in first]
        self._others = list(map(_hash_of_versions, others))
        self._held = [
            buffer for modules in (first, *others) for module in modules for buffer in module._buffers.values()
        ]

    @torch.no_grad()
    def follow(self, first: Sequence[nn.Module], *others: Sequence[nn.Module], buffers: bool = True) -> None:
        """Copy what has changed since `note` on the first replica alone to the others."""
        if len(first) != len(self._first):
            return  # modules were added to all replicas, or this is a copy
        unloaded = [m for m, seen in zip(others, self._others, strict=True) if _hash_of_versions(m) == seen]
        for number, (module, (noted, versions)) in enumerate(zip(first, self._first, strict=True)):
            present = vars(module)
            for name in [name for name in present if present[name] is not noted.get(name) and name not in _OF_MODULES]:
                for other in [modules[number] for modules in others if not _is_bound(present[name])]:
                    _set_attribute(other, name, noted.get(name), present[name])
            if buffers and module._buffers:
                for name in [name for name, seen in _versions(module).items() if seen != versions.get(name)]:
                    for modules in unloaded:
                        _copy_buffer(module, modules[number], name)


_OF_MODULES = frozenset(vars(nn.Module()))


def _versions(module: nn.Module) -> dict[str, Any]:
    """Return what changes if a buffer of a module, not of its children, is written or put in place of another."""
    return {name: (id(b), None if b is None else version_of(b)) for name, b in module._buffers.items()}


def _is_bound(value: Any) -> bool:
    """Return whether a value may compute with the parameters of one replica."""
    plain = isinstance(value, type | functools.partial) or (
        isinstance(value, types.FunctionType | types.BuiltinFunctionType) and not getattr(value, "__closure__", None)
    )
    return isinstance(value, nn.Module) or (callable(value) and not plain)


def _hash_of_versions(modules: Sequence[nn.Module]) -> int:
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    return hash((*map(id, buffers), *map(version_of, buffers)))


def _set_attribute(module: nn.Module, name: str, before: Any, value: Any) -> None:
    """Set an attribute of another replica, unless it is a plain value that differed before."""
    own = vars(module).get(name)
    if not (isinstance(own, bool | int | float | str) and own != before):
        setattr(module, name, value.clone() if isinstance(value, Tensor) else value)


def _copy_buffer(first: nn.Module, other: nn.Module, name: str) -> None:
    value, theirs = first._buffers[name], other._buffers.get(name)
    if value is None or theirs is None or (value.shape, value.dtype) != (theirs.shape, theirs.dtype):
        other._buffers[name] = None if value is None else value.clone()
    else:
        theirs.copy_(value)


class ParameterOwners:
    """Looks up which of this process's workers owns a parameter, and the other workers' counterparts of it.

    Args:
        models: the prepared models. Only `VirtualWorkers` among them matter; the list may grow.
        local_workers: workers per process.
    """

    def __init__(self, models: Sequence[nn.Module], local_workers: int) -> None:
        self.models = models
        self.local_workers = local_workers
        self._places: dict[int, tuple[weakref.ref[Parameter], tuple[int, int]]] = {}
        """By `id`: the parameter, its worker, and its position among the parameters of that worker."""

    @property
    def virtual_models(self) -> list[VirtualWorkers]:
        """The prepared `VirtualWorkers`."""
        return [model for model in self.models if isinstance(model, VirtualWorkers)]

    def wrapper_of(self, model: nn.Module) -> nn.Module:
        """Return the `VirtualWorkers` whose first replica is `model`; otherwise `model` itself."""
        for virtual in self.virtual_models:
            if model is virtual or model is extract_model_from_parallel(first_replica(virtual)):
                return virtual
        return model

    def worker_of(self, parameter: Parameter) -> int:
        """Return the index of the worker, among this process's, that owns a parameter.

        Raises ValueError for a parameter of no prepared model.
        """
        place = self._place_of(parameter)
        if place is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is in no prepared model, but "
                f"each of the {self.local_workers} workers in this process needs its own. Make it part of the model, "
                f"prepare the model before or together with its optimizer, or set workers_per_process=1."
            )
        return place[0]

    def by_worker(self, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
        """Return the given parameters and their counterparts in the other workers' models, one list per worker.

        Parameters of no prepared model go to the first worker.
        """
        if not self.virtual_models:
            return [list(parameters)]
        places = {id(parameter): self._place_of(parameter) for parameter in parameters}
        positions = {place[1] for place in places.values() if place is not None}
        if not positions:
            return [list(parameters)]
        split = [
            [p for position, p in enumerate(self._parameters_of_worker(worker)) if position in positions]
            for worker in range(self.local_workers)
        ]
        split[0] += [parameter for parameter in parameters if places[id(parameter)] is None]
        return split

    def _place_of(self, parameter: Parameter) -> tuple[int, int] | None:
        """Return the worker of a parameter and its position in that worker's models; None if it has none."""
        found = self._places.get(id(parameter))
        if found is None or found[0]() is not parameter:  # a new parameter may have the `id` of a deleted one
            self._places = {
                id(own): (weakref.ref(own), (worker, position))
                for worker in range(self.local_workers)
                for position, own in enumerate(self._parameters_of_worker(worker))
            }
            found = self._places.get(id(parameter))
        return None if found is None else found[1]

    def _parameters_of_worker(self, worker: int) -> list[Parameter]:
        return [p for model in self.virtual_models for p in model.replicas[worker].parameters()]


def values_of(model: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of a model, tied ones once."""
    return [*model.parameters(), *model.buffers()]


def replicas_of(model: nn.Module) -> list[nn.Module]:
    """Return the distinct replicas of `VirtualWorkers`, or a list with the model itself."""
    return list(dict.fromkeys(model.replicas)) if isinstance(model, VirtualWorkers) else [model]


def first_replica(model: nn.Module) -> nn.Module:
    """Return the first replica of `VirtualWorkers`, or the model itself."""
    return model.replicas[0] if isinstance(model, VirtualWorkers) else model


def split_by_worker(batches: Iterable[Mapping[str, Any]], num_workers: int) -> list[list[dict[str, Any]]]:
    """Split batches as `VirtualWorkers` does, and return the parts of each worker in the order of the batches."""
    parts = [cut((), batch, even_sizes(batch_size((), batch), num_workers)) for batch in batches]
    return [[part[worker][1] for part in parts] for worker in range(num_workers)]


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules, shared ones as often as they occur. `model.modules()` takes ten times as long."""
    found = [model]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def _parameters_of(modules: Sequence[nn.Module]) -> list[Parameter]:
    return [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]


_SHARED = ("config", "generation_config", "cfg", "args", "hparams")
"""Attributes with the settings of a module, which all replicas share: a script may change one after `prepare`."""


def _copy(model: nn.Module) -> nn.Module:
    settings = [vars(module)[name] for module in model.modules() for name in _SHARED if name in vars(module)]
    try:
        return copy.deepcopy(model, {id(value): value for value in settings})
    except Exception as error:
        raise ValueError(
            f"each worker of a process needs a copy of the model, but it cannot be copied: {error}. Remove what "
            f"`copy.deepcopy(model)` fails on, or launch one process per worker (workers_per_process=1)."
        ) from error
