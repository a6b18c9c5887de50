"""`VirtualWorkers`: several workers inside one process, so that 8, 16 or 32 of them run on one GPU or CPU."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dsgdac_accel.data.batch_parts import batch_size, cut, even_sizes, join, requires_grad, with_scaled_gradient
from dsgdac_accel.randomness import StreamsOfWorkers

logger = logging.getLogger(__name__)


class VirtualWorkers(nn.Module):
    """`num_workers` replicas of a model behind the interface of one, computed one after another.

    Not in one call by `torch.func.vmap`, which restricts what a model may do. Measured on a CPU with 8 workers
    (`tasks/benchmark_virtual.py`), it takes 1.2 to 1.35 times as long for convolutions, and up to 1.2 for Transformers
    with usual batches; it wins by a tenth for layers that are all linear, and by a quarter for replicas so small that
    starting operations is what takes time.

    A batch is cut into one part per worker along the first dimension, in order, and each replica computes its own part
    with its own parameters, BatchNorm statistics and stream of torch's random numbers (dropout). Outputs are joined.
    The loss is taken as a mean over the batch, as data-parallel training takes it; what flows back into each replica is
    then the gradient of the mean over its OWN part, exactly what its own process would compute.

    `GossipAccelerator(gossip=GossipConfig(workers_per_process=8))` makes one in `prepare`, completes the optimizer
    with the parameters of all replicas, clips each worker's gradient by itself, and mixes the replicas with each other
    and with those of other processes.

    Args:
        model: becomes worker 0 of this process as it is; the others are copies.
        num_workers: how many workers this process holds.
        shared: let the workers share one set of parameters and buffers, for synchronous baselines: each part of the
            batch still has its own BatchNorm statistics, and gradients are those of the mean over the whole batch.

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
        self.streams = StreamsOfWorkers(torch.initial_seed(), range(num_workers))
        """The random streams of the replicas."""
        self.training = model.training
        self._whole = 0
        self._sizes: list[int] | None = None
        self._seen_full_batch = self._warned = False
        self._named: set[str] = set()

    @property
    def num_workers(self) -> int:
        """How many workers this process holds."""
        return len(self.replicas)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Each worker's output for its part of the batch, joined. See the class."""
        if self._whole:
            return self.replicas[0](*args, **kwargs)
        sizes = even_sizes(batch_size(args, kwargs), self.num_workers) if self._sizes is None else self._sizes
        self._check_sizes(sizes)
        self._follow_the_first()
        outputs, total = [], sum(sizes)
        parts = [size for size in sizes if size]
        even = len(set(parts)) == 1  # then all are scaled alike, and joined outputs can be scaled at once
        trains_inputs = not self.shared and requires_grad((args, kwargs))
        with self._own_streams() as use:
            for worker, (part_args, part_kwargs) in enumerate(cut(args, kwargs, sizes)):
                if sizes[worker] == 0:
                    continue
                use(worker)
                if trains_inputs:  # what flows back to the inputs is part of the mean over the batch again
                    part_args, part_kwargs = with_scaled_gradient((part_args, part_kwargs), sizes[worker] / total)
                output = self._run(worker, part_args, part_kwargs)
                outputs.append(output if self.shared or even else with_scaled_gradient(output, total / sizes[worker]))
        joined = join(outputs, parts)
        return with_scaled_gradient(joined, total / parts[0]) if even and not self.shared else joined

    def _follow_the_first(self) -> None:
        """Modes and frozen parameters are set on the model that everybody knows, the first replica."""
        if self.shared:
            return
        first, *others = map(_modules_of, self.replicas)
        trained = [parameter.requires_grad for parameter in _parameters_of(first)]
        for modules in others:
            for module, followed in zip(modules, first, strict=True):
                if module.training != followed.training:
                    module.training = followed.training
            for parameter, wanted in zip(_parameters_of(modules), trained, strict=True):
                if parameter.requires_grad != wanted:
                    parameter.requires_grad_(wanted)

    def _own_streams(self) -> AbstractContextManager[Callable[[int], None]]:
        """Shared parameters are one worker's, with one stream: that of the process."""
        return nullcontext(lambda worker: None) if self.shared else self.streams.swapped()

    def _run(self, worker: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return self.replicas[worker](*args, **kwargs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"BatchNorm needs more than one sample, and this process's worker {worker} of {self.num_workers} got "
                f"one ({error}). Use larger batches, fewer workers_per_process, or drop_last=True in the DataLoader."
            ) from error

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        if all(sizes) or not self.training:
            self._seen_full_batch = self._seen_full_batch or self.training
            return
        if not self._seen_full_batch:
            raise ValueError(
                f"a batch is cut into one part per worker: {sum(sizes)} samples are too few for {self.num_workers} "
                f"workers in this process. Use batches of at least {self.num_workers}, or fewer workers_per_process."
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                "a last batch of %d samples leaves some of %d workers without any: they mix without a local update. "
                "Set drop_last=True in the DataLoader to leave such batches out.",
                sum(sizes),
                self.num_workers,
            )

    @contextmanager
    def cut_at(self, sizes: Sequence[int]) -> Iterator[None]:
        """Inside, batches are cut into parts of these sizes, one per worker, instead of into even ones."""
        if len(sizes) != self.num_workers:
            raise ValueError(f"there are {self.num_workers} workers in this process; got {len(sizes)} sizes.")
        self._sizes = list(sizes)
        try:
            yield
        finally:
            self._sizes = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, worker 0 of this process alone computes whole batches: for the deployed model, when all are equal."""
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1

    # ---- parameters

    def by_worker(self) -> list[list[Parameter]]:
        """The parameters of each replica, in the same order."""
        return [list(replica.parameters()) for replica in self.replicas]

    def complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the parameters of all replicas beside those of the first one, with their settings and any state."""
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
        """Let Accelerate know that it need not prepare this model again."""
        self.__dict__["_is_accelerate_prepared"] = True

    # ---- as if it were the model

    def __getattr__(self, name: str) -> Any:
        """What a wrapper does not have is the first replica's, such as `config` or `generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "replicas":
                raise
            value = getattr(self.replicas[0], name)
            self._warn_of_first_only(name, value)
            return value

    def _warn_of_first_only(self, name: str, value: Any) -> None:
        computes = isinstance(value, nn.Module) or (callable(value) and not hasattr(nn.Module, name))
        if computes and self.training and not self._whole and torch.is_grad_enabled() and name not in self._named:
            self._named.add(name)
            logger.warning(
                "%s was asked of several workers in one process and is that of the first one only; the others neither "
                "compute nor learn by it. Let the model's forward do it.",
                name,
            )

    def get_extra_state(self) -> dict[str, Tensor]:
        """The random streams, for checkpoints."""
        return self.streams.state_dict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Go on with random streams from a checkpoint."""
        self.streams.load_state_dict(state)


class _LoadIntoOthers:
    """Hook of the model that everybody knows: what is loaded into it is what all replicas go on with.

    A copy of the model, or one that was pickled, is nobody's replica.
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


def values_of(model: nn.Module) -> list[Tensor]:
    """All that a model is made of, tied tensors once."""
    return [*model.parameters(), *model.buffers()]


def replicas_of(model: nn.Module) -> list[nn.Module]:
    """The models that `VirtualWorkers` hold, a shared one once; of any other model itself alone."""
    return list(dict.fromkeys(model.replicas)) if isinstance(model, VirtualWorkers) else [model]


def first_replica(model: nn.Module) -> nn.Module:
    """The model itself, or of `VirtualWorkers` the one that stands for all when they are equal."""
    return model.replicas[0] if isinstance(model, VirtualWorkers) else model


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, shared ones as often as they occur; `model.modules()` takes ten times as long."""
    found = [model]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def _parameters_of(modules: Sequence[nn.Module]) -> list[Parameter]:
    return [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"each worker of a process needs a copy of the model, and it cannot be copied: {error}. Remove what "
            f"`copy.deepcopy(model)` fails on, or launch a process for each worker (workers_per_process=1)."
        ) from error
