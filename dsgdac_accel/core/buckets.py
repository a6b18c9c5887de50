"""Parameters as views of a few flat buffers, so that mixing is a handful of long, contiguous passes.

Each parameter keeps its shape and its strides (channels_last, transposed, sliced, 0-dim, empty); parameters that
share their memory keep sharing it and are stored, sent and counted once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

ALIGNMENT = 128  # bytes: whole cache lines and the widest vector loads
MIXED_DTYPES = (torch.float32, torch.float64)
_VERSION = operator.attrgetter("_version")


def as_parameter_list(parameters: object) -> list[Parameter]:
    """Every distinct parameter in a bare one, an iterable of them, or optimizer-style parameter groups.

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
    """Elements from the first to the last one in memory, gaps included.

    >>> extent(torch.zeros(3, 4).T), extent(torch.zeros(10)[::2]), extent(torch.tensor(1.0)), extent(torch.zeros(0, 3))
    (12, 9, 1, 0)
    """
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass
class FlatBuffer:
    """One contiguous buffer and the parameters that live in it."""

    data: Tensor
    """(D,) all values, zero in the gaps between parameters."""
    parameters: list[Parameter] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    """The view of `data` behind each parameter, in the same order."""
    addresses: list[int] = field(default_factory=list)
    """Where each view begins in memory."""


class FlatParameters:
    """Moves parameters into flat buffers, one per dtype and device, and keeps watch over them.

    Args:
        parameters: the parameters to adopt.
        names: what to call a parameter in error messages, by `id`.

    Raises:
        ValueError: a parameter cannot be mixed exactly: low precision, complex, expanded, overlapping another one,
            not materialised, or a subclass such as DTensor.
    """

    def __init__(self, parameters: Iterable[Parameter], names: Mapping[int, str] | None = None) -> None:
        self.names = names or {}
        self.parameters = list(parameters)
        for parameter in self.parameters:
            self._refuse_unmixable(parameter)
        self.buffers = [self._adopt(group) for group in self._by_dtype_and_device()]
        self._versions: list[int] = []

    # ---- adoption

    def name_of(self, parameter: Parameter) -> str:
        """The name for messages; falls back to the shape."""
        if id(parameter) in self.names:
            return self.names[id(parameter)]
        lazy = isinstance(parameter, UninitializedParameter)  # has no shape to ask for
        return "a parameter" if lazy else f"a parameter of shape {tuple(parameter.shape)}"

    def _refuse_unmixable(self, parameter: Parameter) -> None:
        name = self.name_of(parameter)
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name} of a lazy module has no values yet; run one batch through the model before `prepare`."
            )
        if type(parameter.data) is not Tensor:
            raise ValueError(
                f"{name} is a {type(parameter.data).__name__}; every worker must hold whole, ordinary tensors. "
                f"Switch sharding, tensor parallelism or quantization off."
            )
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; load the model before `prepare`.")
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} is {parameter.dtype}: small consensus updates would be rounded away. Keep parameters in "
                f"float32 (`model.float()`) and compute in low precision with mixed_precision='bf16' or 'fp16'."
            )
        if parameter.dtype not in MIXED_DTYPES or parameter.layout != torch.strided:
            raise ValueError(
                f"{name} is {parameter.dtype} ({parameter.layout}); trainable parameters must be dense float32 or "
                f"float64. Freeze it (`requires_grad_(False)`) or convert it."
            )
        if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ValueError(
                f"{name} is expanded: several of its elements are one value in memory. Store a `.clone()`."
            )

    def _by_dtype_and_device(self) -> list[list[Parameter]]:
        groups: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        return list(groups.values())

    def _adopt(self, parameters: list[Parameter]) -> FlatBuffer:
        step = ALIGNMENT // parameters[0].element_size()
        places, total = [], 0
        place_of: dict[tuple, int] = {}  # memory already adopted: a second parameter there shares the place
        for parameter in parameters:
            memory = (parameter.data_ptr(), tuple(parameter.shape), parameter.stride())
            if parameter.numel() and memory in place_of:
                places.append(place_of[memory])
                continue
            places.append(total)
            place_of[memory] = total
            total += -(-extent(parameter) // step) * step
        self._refuse_overlap(parameters)
        buffer = FlatBuffer(torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device))
        with torch.no_grad():
            for parameter, place in zip(parameters, places, strict=True):
                view = buffer.data.as_strided(parameter.shape, parameter.stride(), place)
                view.copy_(parameter)
                buffer.views.append(view)
                buffer.addresses.append(view.data_ptr())
            # All values are copied before the first one moves: sharers still read their old memory above.
            for parameter, view in zip(parameters, buffer.views, strict=True):
                parameter.data = view
        buffer.parameters = parameters
        return buffer

    def _refuse_overlap(self, parameters: Sequence[Parameter]) -> None:
        """Slices of one tensor may interleave; parameters that share only SOME memory cannot each be mixed once."""
        by_storage: dict[int, list[Parameter]] = {}
        for parameter in parameters:
            if parameter.numel():
                by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for sharers in by_storage.values():
            places = {(p.storage_offset(), tuple(p.shape), p.stride()): p for p in sharers}
            owners = list(places.values())
            if len(owners) == 1:
                continue
            owner_at = torch.full((max(p.storage_offset() + extent(p) for p in owners),), -1, dtype=torch.int32)
            for number, parameter in enumerate(owners):
                mine = owner_at.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
                if (mine >= 0).any():
                    other = owners[int(mine.max())]
                    raise ValueError(
                        f"{self.name_of(parameter)} and {self.name_of(other)} share part of their memory. Tie whole "
                        f"parameters (the same Parameter under two names), or store a `.clone()` of one."
                    )
                mine.fill_(number)

    def places(self) -> list[tuple[int, Tensor]]:
        """Of each parameter, in order: the number of its buffer, and its view there."""
        place_of = {
            id(parameter): (number, view)
            for number, buffer in enumerate(self.buffers)
            for parameter, view in zip(buffer.parameters, buffer.views, strict=True)
        }
        return [place_of[id(parameter)] for parameter in self.parameters]

    # ---- keeping watch: all checks are a few attribute reads per parameter

    def signature(self) -> list[tuple]:
        """What must agree on all workers before anything is sent: shape, strides and dtype in order."""
        return [(tuple(p.shape), p.stride(), str(p.dtype)) for p in self.parameters]

    def holds(self, parameters: Sequence[Parameter]) -> bool:
        """Whether exactly these parameters are adopted, in this order."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))

    def moved(self) -> list[tuple[Parameter, Tensor]]:
        """Parameters that somebody re-pointed to other memory, each with the view that it left.

        `.to()`, `load_state_dict(assign=True)` and `parameter.data = ...` do that.
        """
        return [
            (parameter, view)
            for buffer in self.buffers
            if list(map(Tensor.data_ptr, buffer.parameters)) != buffer.addresses  # a look at all of them at once
            for parameter, view, address in zip(buffer.parameters, buffer.views, buffer.addresses, strict=True)
            if parameter.data_ptr() != address
        ]

    @torch.no_grad()
    def bring_back(self) -> list[Parameter]:
        """Copy re-pointed values into the buffers and point the parameters there again.

        Returns those that no longer fit (another shape, dtype, device or other strides) and so need a new layout.
        """
        misfits = []
        for parameter, view in self.moved():
            if _kind(parameter) == _kind(view):
                view.copy_(parameter)
                parameter.data = view
            else:
                misfits.append(parameter)
        return misfits

    def repoint(self) -> None:
        """Point every parameter at its view again, whatever was done to it meanwhile; its values there are dropped."""
        for parameter, view in self.moved():
            parameter.data = view

    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter memory of its own again, with its values and strides; tied memory stays tied."""
        copies: dict[tuple, Tensor] = {}
        for buffer in self.buffers:
            for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
                if parameter.data_ptr() == view.data_ptr():
                    place = (view.data_ptr(), view.shape, view.stride())
                    parameter.data = copies.setdefault(place, view.clone(memory_format=torch.preserve_format))
        self.parameters, self.buffers = [], []

    def remember_versions(self) -> None:
        """Note the state from which `edited` counts."""
        self._versions = list(map(_VERSION, self.parameters))

    def edited(self) -> list[Parameter]:
        """Parameters written in place since `remember_versions` (writes through `.data` leave no trace)."""
        versions = list(map(_VERSION, self.parameters))
        if versions == self._versions:
            return []
        pairs = zip(self.parameters, versions, self._versions, strict=False)
        return [parameter for parameter, now, before in pairs if now != before]


def _kind(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
