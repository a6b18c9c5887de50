"""The parameters that are mixed: which ones, whether they can be mixed exactly, and whether they have changed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from dsgdac_accel.devices import is_on
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.row import Row
from dsgdac_accel.shards import gathering_modules, is_sharded, local_of, reshard

MIXED_DTYPES = (torch.float32, torch.float64)
LOAD_IN_FLOAT32 = (
    "Load the model with from_pretrained(..., dtype=torch.float32) and compute in low precision, with bf16=True "
    "(Trainer) or mixed_precision='bf16' (Accelerate)."
)
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def as_parameter_list(parameters: object) -> list[Parameter]:
    """Return every distinct parameter in a single one, an iterable of them, or optimizer-style parameter groups.

    >>> weight = Parameter(torch.ones(2))
    >>> len(as_parameter_list(weight)), len(as_parameter_list([{"params": [weight, weight]}]))
    (1, 1)
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(
            f"expected parameters, an iterable of them, or parameter groups; got {type(parameters).__name__}."
        )
    found: dict[int, Parameter] = {}
    for item in parameters:
        if isinstance(item, Tensor):
            found.setdefault(id(item), item)  # type: ignore[arg-type]
        elif isinstance(item, Mapping) and "params" in item:
            inner = item["params"]
            if not (isinstance(inner, list) and set(map(type, inner)) <= {Parameter, Tensor}):
                inner = as_parameter_list(inner)
            found.update(zip(map(id, inner), inner, strict=True))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
            found.setdefault(id(item[1]), item[1])  # type: ignore[arg-type]  # ("name", parameter)
        else:
            raise TypeError(f"expected a parameter or a parameter group; got {type(item).__name__}.")
    return list(found.values())


def extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory, gaps included.

    >>> extent(torch.zeros(3, 4).T), extent(torch.zeros(10)[::2]), extent(torch.tensor(1.0)), extent(torch.zeros(0, 3))
    (12, 9, 1, 0)
    """
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# ---- what can be mixed exactly


def name_of(parameter: Parameter, names: Mapping[int, str]) -> str:
    """Return the parameter's name from `names` (by `id`), or its shape if it has none."""
    if id(parameter) in names:
        return names[id(parameter)]
    lazy = isinstance(parameter, UninitializedParameter)  # its shape cannot be read
    return "a parameter" if lazy else f"a parameter of shape {tuple(parameter.shape)}"


def refuse_unmixable(
    parameters: Sequence[Parameter], names: Mapping[int, str], by_masters: Collection[torch.dtype] = ()
) -> None:
    """Raise ValueError, with the parameter's name, unless every parameter can be mixed exactly.

    Low precision, complex, expanded, overlapping, uninitialized and sharded parameters cannot.

    Args:
        parameters: those to mix.
        names: what to call them, by `id`.
        by_masters: dtypes of parameters that are mixed by float32 masters.
    """
    for parameter in parameters:
        _refuse_kind(parameter, name_of(parameter, names), by_masters)
    _refuse_overlap(parameters, names)


def _refuse_kind(parameter: Parameter, name: str, by_masters: Collection[torch.dtype]) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"{name} of a lazy module has no values yet; run one batch through the model before `prepare`."
        )
    if type(local_of(parameter).data) is not Tensor:
        raise ValueError(
            f"{name} is a {type(local_of(parameter).data).__name__}; trained parameters must be ordinary tensors. "
            f"Switch quantization off."
        )
    if is_sharded(parameter) and parameter.dtype not in MIXED_DTYPES:
        raise ValueError(
            f"{name} is {parameter.dtype} and sharded; shards must be float32 or float64. Load the model in float32, "
            f"and compute in bf16: fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
        )
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load the model before `prepare`.")
    if parameter.dtype in (torch.float16, torch.bfloat16) and parameter.dtype not in by_masters:
        raise ValueError(
            f"{name} is {parameter.dtype}: small consensus updates would be rounded away. Train it by "
            f"`GossipAccelerator` or `GossipCallback`, which mix a float32 master of it, or: {LOAD_IN_FLOAT32}"
        )
    if parameter.dtype not in (*MIXED_DTYPES, *by_masters) or parameter.layout != torch.strided:
        raise ValueError(
            f"{name} is {parameter.dtype} ({parameter.layout}); trainable parameters must be dense float32 or float64, "
            f"or bfloat16 or float16 with a float32 master. Freeze it (`requires_grad_(False)`), or: {LOAD_IN_FLOAT32}"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(f"{name} is expanded: several of its elements share one value in memory. Store a `.clone()`.")


def _refuse_overlap(parameters: Sequence[Parameter], names: Mapping[int, str]) -> None:
    """Refuse parameters that share only part of their memory; interleaved slices of one tensor are fine."""
    by_storage: dict[tuple, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.numel() and not is_sharded(parameter):  # FSDP2 gives each shard memory of its own
            memory = parameter.untyped_storage().data_ptr(), parameter.dtype, parameter.device
            by_storage.setdefault(memory, []).append(parameter)
    for sharers in by_storage.values():
        distinct = list({(p.storage_offset(), tuple(p.shape), p.stride()): p for p in sharers}.values())
        if len(distinct) == 1:
            continue
        owner_at = torch.full(
            (max(p.storage_offset() + extent(p) for p in distinct),), -1, dtype=torch.int32, device="cpu"
        )
        for number, parameter in enumerate(distinct):
            mine = owner_at.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
            if (mine >= 0).any():
                other = distinct[int(mine.max())]
                raise ValueError(
                    f"{name_of(parameter, names)} and {name_of(other, names)} share part of their memory. Tie whole "
                    f"parameters (the same Parameter under two names), or store a `.clone()` of one."
                )
            mine.fill_(number)


# ---- which parameters are mixed


def _in_groups(found: object) -> list[Parameter] | None:
    """Return the parameters of ordinary parameter groups one after the other; None for anything else."""
    if not isinstance(found, list):
        return None
    inner = [group["params"] for group in found if isinstance(group, Mapping) and "params" in group]
    ordinary = len(inner) == len(found) and all(type(parameters) is list for parameters in inner)
    return list(chain.from_iterable(inner)) if ordinary else None


def _same(one: Sequence[Parameter], other: Sequence[Parameter]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


class MixedParameters:
    """Selects the parameters to mix and notices when they change.

    A parameter is mixed if it is trained or was mixed before: parameters that were frozen from the start are equal on
    all workers and stay equal, parameters that are frozen later are not.

    Args:
        parameters: a parameter, an iterable of them or parameter groups; or a function that returns one of these.
        names: what to call a parameter in messages, by `id`.
        local_workers: workers of this process.
        worker_of: the local worker, from 0, that a parameter belongs to; needed for several local workers.
    """

    def __init__(
        self,
        parameters: object,
        names: Mapping[int, str] | None = None,
        local_workers: int = 1,
        worker_of: Callable[[Parameter], int] | None = None,
    ) -> None:
        listed = None if callable(parameters) else as_parameter_list(parameters)  # a generator can be read only once
        self._find: Callable[[], object] = parameters if callable(parameters) else lambda: listed
        self._found: tuple[list[Parameter] | None, list[Parameter]] = None, []
        """The parameters in the groups that were found last, and the distinct ones among them."""
        self.names = names or {}
        self.local_workers = local_workers
        self._worker_of = worker_of or (lambda parameter: 0)
        self._mixed: list[list[Parameter]] = [[] for _ in range(local_workers)]
        """The parameters of each local worker that are mixed now, in order."""
        self._unchanged: tuple[list[Parameter], list[bool]] | None = None
        """The list in which nothing had changed, and which of its parameters were trained."""
        self._equalized = self.find()
        """The list of which all parameters have started from equal values."""
        self._known = {id(parameter): weakref.ref(parameter) for parameter in self._equalized}

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter for messages."""
        return name_of(parameter, self.names)

    def find(self) -> list[Parameter]:
        """Return every distinct parameter: the same list object as long as nothing has changed. Do not modify it.

        To list 400 parameters costs as much as to mix them; to see that they are still the same costs a fifth of that.
        """
        found = self._find()
        seen = _in_groups(found)
        if seen is None or self._found[0] is None or not _same(seen, self._found[0]):
            self._found = seen, as_parameter_list(found)
        return self._found[1]

    def by_worker(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        """Split parameters by the local worker that they belong to."""
        if self.local_workers == 1:
            return [list(parameters)]
        split: list[list[Parameter]] = [[] for _ in range(self.local_workers)]
        for parameter in parameters:
            split[self._worker_of(parameter)].append(parameter)
        return split

    def _selected(self) -> list[list[Parameter]]:
        mixed = {id(parameter) for mine in self._mixed for parameter in mine}
        return self.by_worker(p for p in self.find() if p.requires_grad or id(p) in mixed)

    def changed(self) -> bool:
        """Return whether parameters were added, removed, replaced or unfrozen; costs little if none was."""
        listed = self.find()
        trained = list(map(_REQUIRES_GRAD, listed))
        if self._unchanged is not None and listed is self._unchanged[0] and trained == self._unchanged[1]:
            return False
        if not all(map(_same, self._selected(), self._mixed)):
            return True
        self._unchanged = listed, trained
        return False

    def difference(self) -> tuple[list[Parameter], list[Parameter]]:
        """Return the parameters that joined the optimizer or would be mixed from now on, and those that would not."""
        mixed, selected = list(chain.from_iterable(self._mixed)), list(chain.from_iterable(self._selected()))
        joining = {id(p): p for p in [*_without(selected, mixed), *self._newcomers()]}
        return list(joining.values()), _without(mixed, selected)

    def select(self, device: torch.device | None, row: Row | None = None) -> list[list[Parameter]]:
        """Return the parameters to mix, for each local worker, and remember them.

        Args:
            device: where parameters must be to be sent; None if none is sent.
            row: the processes of this worker, which hold the parameters together; by default a single one.

        Raises:
            ValueError: a parameter cannot be mixed exactly, is on another device, or the local workers train different
                parameters.
        """
        selected, row = self._selected(), row or Row()
        for mine in selected:
            refuse_unmixable(mine, self.names)
            for parameter in mine:
                row.require_own(parameter, self.name_of(parameter))
                if device is not None and not is_on(parameter.device, device):
                    advice = "Prepare the model before, or together with, its optimizer."
                    if parameter.device.type == device.type:
                        advice = "Keep all trained parameters of a process on one device."
                    raise ValueError(
                        f"{self.name_of(parameter)} is on {parameter.device}, but this run communicates on {device}. "
                        f"{advice}"
                    )
        if any(signature_of(mine) != signature_of(selected[0]) for mine in selected):
            raise ValueError(
                "the workers of this process train different parameters. Freeze, unfreeze, add and replace parameters "
                "in all replicas of the model alike (`model.replicas`)."
            )
        self._mixed = selected
        return selected

    def equalize_newcomers(self, group: WorkerGroup) -> None:
        """Let parameters that joined the optimizer during training start from worker 0's values, as all others did."""
        if not self.has_newcomers():
            return
        newcomers = self._newcomers()
        for replicas in zip(*self.by_worker(newcomers), strict=False):  # `select` refuses replicas that differ
            first = replicas[0]
            group.require_equal(tuple(first.shape), "shape of the parameter added to the optimizer")
            what = f"starting from equal values of {self.name_of(first)}"
            group.broadcast_(local_of(first), what)
            for other in replicas[1:]:
                if other.shape == first.shape:
                    other.detach().copy_(first.detach())
        self._known |= {id(parameter): weakref.ref(parameter) for parameter in newcomers}
        self._equalized = self.find()

    def has_newcomers(self) -> bool:
        """Return whether the optimizer has another list of parameters than `equalize_newcomers` has seen last."""
        return self.find() is not self._equalized

    def _newcomers(self) -> list[Parameter]:
        return [parameter for parameter in self.find() if not self._knows(parameter)]

    def _knows(self, parameter: Parameter) -> bool:
        """A new parameter may have the `id` of a deleted one, on one worker and not on another."""
        reference = self._known.get(id(parameter))
        return reference is not None and reference() is parameter


def _without(parameters: Iterable[Parameter], others: Iterable[Parameter]) -> list[Parameter]:
    left_out = set(map(id, others))
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def signature_of(parameters: Sequence[Parameter]) -> list[tuple]:
    """Return what must agree on all workers before anything is sent: shape, strides and dtype, in order.

    If a process has shards, also those of its shard, and the placement.
    """
    return [(tuple(p.shape), p.stride(), str(p.dtype), *_shard_of(p)) for p in parameters]


def _shard_of(parameter: Any) -> tuple:
    if not is_sharded(parameter):
        return ()
    local = local_of(parameter)
    return tuple(local.shape), local.stride(), str(parameter.placements)


# ---- parameters replaced in the model


class ModelWatch:
    """Remembers where in the models each parameter and submodule is, and looks there again before every step.

    `load_state_dict(assign=True)`, `module.weight = nn.Parameter(...)` and `model.head = nn.Linear(...)` put new
    parameters into a model. The optimizer keeps the old ones, so training silently stops and the new ones are not
    mixed.

    Args:
        models: the prepared models; the list may grow later.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.frozen: list[nn.Module] = []
        """BatchNorm layers that were in eval mode when the models last trained."""
        self.names: dict[int, str] = {}
        """Name of each parameter in its model, by `id`; others refer to this dictionary."""
        self._look()

    def _look(self) -> None:
        self._models_seen = len(self.models)
        self._sites: list[tuple[dict[str, Any], str, str, Any]] = []
        """Dictionary of a module, key in it, full name, and the parameter or submodule that was there."""
        self._gathering = gathering_modules(self.models)
        reshard(self._gathering)  # names and sites are those of the shards
        self._batch_norms = [(model, batch_norm_layers(model)) for model in self.models]
        for model in self.models:
            self.names.update((id(parameter), name) for name, parameter in model.named_parameters())
            for path, module in model.named_modules():
                for slots in (module._parameters, module._modules):
                    found = [(key, value) for key, value in slots.items() if value is not None]
                    self._sites += [(slots, key, f"{path}.{key}" if path else key, value) for key, value in found]

    def check(
        self, optimizer: torch.optim.Optimizer, parameter_of: Callable[[Parameter], Parameter] = lambda master: master
    ) -> None:
        """Raise RuntimeError if a parameter of `optimizer` was replaced in its model by one that it does not have.

        Args:
            optimizer: the optimizer.
            parameter_of: maps what it trains to the model's parameter, where it trains masters.
        """
        if len(self.models) != self._models_seen:
            self._look()
        reshard(self._gathering)
        if any(model.training for model in self.models):
            training = [layer for model, layers in self._batch_norms if model.training for layer in layers]
            self.frozen = [layer for layer in training if not layer.training]
        replaced = [site for site in self._sites if site[0].get(site[1]) is not site[3]]
        if not replaced:
            return
        trained = {id(parameter_of(p)) for group in optimizer.param_groups for p in group["params"]}
        still_there = {id(parameter) for model in self.models for parameter in model.parameters()}
        for slots, key, name, old in replaced:
            orphans = (trained - still_there) & set(map(id, _parameters_of(old)))
            untrained = [p for p in _parameters_of(slots.get(key)) if p.requires_grad and id(p) not in trained]
            if orphans and untrained:
                raise RuntimeError(
                    f"{name} was replaced in the model (by load_state_dict(assign=True) or an assignment), but the "
                    f"optimizer still has the old parameters and would train those. Load with assign=False, or put the "
                    f"new parameters into the optimizer, on all workers."
                )
        self._look()


def _parameters_of(value: Any) -> list[Parameter]:
    """Return the parameters of a module, or the parameter itself."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [] if value is None else [value]


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Return all BatchNorm layers of a model."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
