"""float32 masters of bf16 and fp16 parameters, which the optimizer steps and the workers mix.

An update of less than half a unit in the last place, 2^-9 of the value in bf16, would be rounded away. The model
computes with the rounded masters.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.parameters import LOAD_IN_FLOAT32, as_parameter_list, name_of, refuse_unmixable

T = TypeVar("T")
LOW_PRECISION = frozenset((torch.bfloat16, torch.float16))
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
WIDE_GRADIENTS = hasattr(Tensor, "grad_dtype")
"""Whether this torch can keep a gradient in another dtype than its parameter's."""


def refuse_untrainable(parameters: Sequence[Parameter], names: Mapping[int, str]) -> None:
    """Raise ValueError, with the parameter's name, unless each can be mixed, itself or by a float32 master.

    Args:
        parameters: the trained ones.
        names: what to call them, by `id`.
    """
    refuse_unmixable(parameters, names, by_masters=LOW_PRECISION)
    if WIDE_GRADIENTS:
        return
    for parameter in parameters:
        if parameter.dtype in LOW_PRECISION:
            raise ValueError(
                f"{name_of(parameter, names)} is {parameter.dtype}: its gradient is kept in float32, which needs torch "
                f"2.10 or newer, and this is {torch.__version__}. {LOAD_IN_FLOAT32}"
            )


class MasterParameters:
    """Puts float32 masters into an optimizer, in place of its trained bf16 and fp16 parameters.

    Gradients arrive in the model's parameters, in float32 (`Tensor.grad_dtype`), so that accumulation and clipping are
    exact, too; the masters refer to the same tensors. Frozen parameters stay as they are, until they are unfrozen.

    Owns the masters. May also set gradients and values of the parameters that they replace, and what the optimizer has
    of these. Memory per parameter: 4 bytes for the master, and 4 instead of 2 for the gradient.

    Args:
        optimizer: its `param_groups` and `state` then hold the masters.
        names: what to call a parameter in messages, by `id`; gets the names of the masters.

    Raises:
        ValueError: a trained parameter cannot be mixed, or this torch is too old. Nothing was changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: MutableMapping[int, str]) -> None:
        self.optimizer = optimizer
        self.names = names
        self.checks_late = False
        """Whether edits through `.data` are reported a step later, as on an accelerator."""
        self._written = _fingerprints([])
        """Fingerprints of the model's parameters at the last `write_back`."""
        self._unread: tuple[HostCopy, list[bool]] | None = None
        """Flags: the parameters that were changed before the last step, and those of them that left a trace."""
        self._seen: list[Parameter] = []
        """The parameters of the optimizer at the last look."""
        self._frozen: list[Parameter] = []
        """Those in low precision without a master."""
        self._pairs: list[_Pair] = []
        self._parameter_of: dict[int, Parameter] = {}
        """The model's parameter of each master, by its `id`."""
        self._master_of: dict[int, Parameter] = {}
        refuse_untrainable([p for p in as_parameter_list(optimizer.param_groups) if p.requires_grad], names)
        if hasattr(optimizer, "check_overrides"):  # bitsandbytes looks its settings up by the model's parameters, once
            optimizer.check_overrides()
        self._follow()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the parameters that have masters."""
        return {pair.parameter.dtype for pair in self._pairs}

    def master_of(self, parameter: Parameter) -> Parameter:
        """Return the master of a parameter of the model, or the parameter itself if it has none."""
        return self._master_of.get(id(parameter), parameter)

    def parameter_of(self, master: Parameter) -> Parameter:
        """Return the model's parameter of a master, or the parameter itself if it is none."""
        return self._parameter_of.get(id(master), master)

    def of_masters(self, function: Callable[[Parameter], T]) -> Callable[[Parameter], T]:
        """Return a function of a parameter of the model as a function of its master."""
        return lambda master: function(self.parameter_of(master))

    def name_by(self, names: MutableMapping[int, str]) -> None:
        """Use these names, by `id`, and add those of the masters."""
        self.names = names
        for pair in self._pairs:
            self._name(pair)

    # ---- the order of a step

    def read_model(self) -> None:
        """Take over new parameters, gradients, and values that a script wrote from the model."""
        self._follow()
        self.take_gradients()
        self.adopt_edits()

    def write_model(self) -> None:
        """Round the masters into the model, and leave the gradients to it: it alone decides how long they stay."""
        self.write_back()
        for pair in self._pairs:
            pair.master.grad = None

    # ---- making masters

    def _follow(self) -> None:
        """Make masters of the parameters that were added to the optimizer, or unfrozen, since the last call."""
        if self._is_unchanged():
            return
        low = [
            (group["params"], place, parameter)
            for group in self.optimizer.param_groups
            for place, parameter in enumerate(group["params"])
            if parameter.dtype in LOW_PRECISION
        ]
        new = [entry for entry in low if entry[2].requires_grad]
        refuse_untrainable([parameter for _, _, parameter in new], self.names)
        if new:
            self._make(new)
        self._frozen = [parameter for _, _, parameter in low if not parameter.requires_grad]
        self._seen = self._listed()

    def _listed(self) -> list[Parameter]:
        return list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))

    def _is_unchanged(self) -> bool:
        """Return whether nothing was added to the optimizer or unfrozen; costs little if nothing was."""
        listed = self._listed()
        same = len(listed) == len(self._seen) and all(map(operator.is_, listed, self._seen))
        return same and not any(map(_REQUIRES_GRAD, self._frozen))

    def _make(self, new: list[tuple[list[Parameter], int, Parameter]]) -> None:
        """Put masters in place of parameters, given with their list and place in it."""
        if not self._pairs:
            self._clear_both()
        shared = {_memory(pair.parameter): pair.master.data for pair in self._pairs if pair.parameter.numel()}
        for parameters, place, parameter in new:
            if id(parameter) in self._master_of:  # it was out of the optimizer for a while
                parameters[place] = self._master_of[id(parameter)]
                continue
            data = shared.get(_memory(parameter))
            if data is None:
                data = parameter.detach().float()
                if parameter.numel():
                    shared[_memory(parameter)] = data  # tied memory stays tied
            parameters[place] = self._replace(parameter, Parameter(data))
        made = self.memory()[len(self._written) :]
        if made:
            self._written = torch.cat([self._written.to(made[0].device), _fingerprints(made)])

    def _add(self, parameter: Parameter, master: Parameter) -> _Pair:
        pair = _Pair(parameter, master)
        self._pairs.append(pair)
        self._master_of[id(parameter)], self._parameter_of[id(master)] = master, parameter
        self._name(pair)
        return pair

    def _name(self, pair: _Pair) -> None:
        if id(pair.parameter) in self.names:
            self.names[id(pair.master)] = self.names[id(pair.parameter)]

    def _replace(self, parameter: Parameter, master: Parameter) -> Parameter:
        self._add(parameter, master)
        state = self.optimizer.state
        if parameter in state:
            state[master] = {
                name: _in_dtype(value, parameter, torch.float32) for name, value in state.pop(parameter).items()
            }
        return master

    def release(self) -> None:
        """Give the optimizer the model's parameters back, and its state in their dtype."""
        for group in self.optimizer.param_groups:
            group["params"] = [self.parameter_of(parameter) for parameter in group["params"]]
        for pair in self._pairs:
            if pair.master in self.optimizer.state:
                state = self.optimizer.state.pop(pair.master)
                self.optimizer.state[pair.parameter] = {
                    name: _in_dtype(value, pair.master, pair.parameter.dtype) for name, value in state.items()
                }
            pair.release()
        if self._pairs:
            vars(self.optimizer).pop("zero_grad", None)
        self._pairs, self._master_of, self._parameter_of = [], {}, {}
        self._written, self._unread = _fingerprints([]), None
        self._seen, self._frozen = [], []

    # ---- gradients

    def take_gradients(self) -> None:
        """Let the masters refer to the gradients of the model's parameters."""
        for pair in self._pairs:
            gradient = pair.parameter.grad
            if gradient is not None and gradient.dtype != pair.master.dtype:  # `model.bfloat16()` converts it, too
                gradient = pair.parameter.grad = gradient.to(pair.master.dtype)
            pair.master.grad = gradient

    def _clear_both(self) -> None:
        """Let the optimizer's `zero_grad` also clear the gradients of the model's parameters."""
        clear = self.optimizer.zero_grad

        @functools.wraps(clear)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self.take_gradients()
            clear(*args, **kwargs)
            for pair in self._pairs:
                pair.parameter.grad = pair.master.grad

        vars(self.optimizer)["zero_grad"] = zero_grad

    # ---- values

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        if not self._pairs:
            return
        torch._foreach_copy_([pair.parameter for pair in self._pairs], [pair.master for pair in self._pairs])
        self._remember(self.memory())

    def _remember(self, memory: Sequence[Tensor]) -> None:
        for pair, data in zip(self._pairs, memory, strict=True):
            pair.remember(data)
        self._written = _fingerprints(memory)

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Write the values that a script wrote into the model since `write_back` into the masters.

        Raises:
            RuntimeError: a parameter has another shape; or, on an accelerator, was written through `.data` before the
                last step. There the host does not wait to learn of that.
        """
        self._raise_for_unseen_edits()
        edited = [pair.was_touched() for pair in self._pairs]
        if not all(edited):
            changed = _fingerprints(self.memory()) != self._written
            if changed.device.type == "cpu" and not self.checks_late:
                edited = [touched or other for touched, other in zip(edited, changed.tolist(), strict=True)]
            else:
                self._unread = HostCopy(changed), edited
        found = [pair for pair, touched in zip(self._pairs, edited, strict=True) if touched]
        distinct = {pair.master.data_ptr(): pair for pair in found}  # tied memory is edited once
        for pair in distinct.values():
            pair.adopt_edit(self.names)

    def _raise_for_unseen_edits(self) -> None:
        unread, self._unread = self._unread, None
        if unread is None:
            return
        copy, traced = unread
        # Newer masters come last.
        for pair, changed, touched in zip(self._pairs, copy.read().tolist(), traced, strict=False):
            if changed and not touched:
                raise RuntimeError(
                    f"{name_of(pair.master, self.names)} was changed through `.data`, and the float32 master that is "
                    f"trained did not follow. Change weights between steps under `torch.no_grad()` instead."
                )

    # ---- checkpoints

    def values(self) -> list[Parameter]:
        """Return the masters, in the order in which they were made."""
        return [pair.master for pair in self._pairs]

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Copy the values of `values` into the masters, and round them into the model.

        Raises ValueError if there are more or fewer masters, or of other shapes.
        """
        mine, theirs = ([tuple(value.shape) for value in each] for each in (self.values(), values))
        if mine != theirs:
            raise ValueError(
                f"the state has {len(theirs)} masters of bf16 and fp16 parameters, and this model {len(mine)}, or of "
                f"other shapes. Build the model, and freeze parameters, as when it was saved."
            )
        self._unread = None  # an edit of values that are replaced now
        for master, value in zip(self.values(), values, strict=True):
            master.copy_(value)
        self.write_back()

    # ---- the average of the workers in the model

    def memory(self) -> list[Tensor]:
        """Return the memory of the model's parameters, for `write_into`."""
        return [pair.parameter.data for pair in self._pairs]

    @torch.no_grad()
    def write_into(self, memory: Sequence[Tensor]) -> None:
        """Round the masters into the tensors of `memory`; the parameters may point elsewhere meanwhile."""
        for pair, data in zip(self._pairs, memory, strict=True):
            data.copy_(pair.master)
        self._remember(memory)


class _Pair:
    """A parameter of the model and its master."""

    def __init__(self, parameter: Parameter, master: Parameter) -> None:
        self.parameter = parameter
        self.master = master
        self._set_grad_dtype(master.dtype)
        # Whoever reads the optimizer's parameters between backward and step finds the gradients there, too.
        self._hook = parameter.register_post_accumulate_grad_hook(
            functools.partial(_share_gradient, weakref.ref(master))
        )
        self.remember(parameter.data)

    def _set_grad_dtype(self, dtype: torch.dtype) -> None:
        gradient, self.parameter.grad = self.parameter.grad, None
        self.parameter.grad_dtype = dtype
        self.parameter.grad = None if gradient is None else gradient.to(dtype)

    def remember(self, data: Tensor) -> None:
        """Note that `data`, the memory of the parameter, holds the rounded master."""
        self._dtype, self._address, self._version = data.dtype, data.data_ptr(), self.parameter._version

    def forget(self) -> None:
        """Compare every value at the next look."""
        self._version = -1

    def was_touched(self) -> bool:
        """Return whether the parameter was written in place, or points elsewhere; writes to `.data` leave no trace."""
        return self.parameter._version != self._version or self.parameter.data_ptr() != self._address

    def adopt_edit(self, names: Mapping[int, str]) -> None:
        """Write the elements of the parameter that a script has changed into the master."""
        if self.parameter.shape != self.master.shape:
            raise RuntimeError(
                f"{name_of(self.master, names)} became {tuple(self.parameter.shape)} after {tuple(self.master.shape)} "
                f"between two steps; give the resized parameter to the optimizer as a new one, on all workers."
            )
        rounded = self.master.to(self._dtype).to(self.parameter.dtype)
        own = self.parameter.to(self.master.device)
        self.master.copy_(torch.where(rounded != own, own.to(self.master.dtype), self.master))

    def release(self) -> None:
        """Forget the master."""
        self._hook.remove()
        self._set_grad_dtype(self.parameter.dtype)


def _share_gradient(reference: weakref.ref[Parameter], parameter: Tensor) -> None:
    master = reference()
    if master is not None:  # the model may outlive its training
        master.grad = parameter.grad


def _memory(parameter: Parameter) -> tuple:
    return parameter.data_ptr(), tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device


def _fingerprints(memory: Sequence[Tensor]) -> Tensor:
    """Return the sum of the bits of each tensor, read as integers: (number of tensors,), on the device of the first."""
    sums = [_bits(data).sum(dtype=torch.int64) for data in memory]
    if not sums:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.stack([each.to(sums[0].device) for each in sums])


def _bits(data: Tensor) -> Tensor:
    """Return the memory of a tensor as integers, as wide as possible: that is several times as fast."""
    aligned = data.nbytes % 8 == data.data_ptr() % 8 == data.storage_offset() * data.element_size() % 8 == 0
    if aligned and data.is_contiguous():
        return data.view(-1).view(torch.int64)
    return data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])


def _in_dtype(value: Any, parameter: Parameter, dtype: torch.dtype) -> Any:
    """Return a value of the optimizer's state in `dtype` if it is as large and as precise as its parameter."""
    alike = type(value) is Tensor and value.dtype == parameter.dtype and value.shape == parameter.shape
    return value.to(dtype) if alike else value


# ---- the deployed model


class SwapsAverage(Protocol):
    """Overwrites parameters by their average over the workers for a while, as `Average` does."""

    def swap_in(self) -> None:
        """Overwrite the parameters by their average. Collective."""

    def restore(self) -> None:
        """Give the worker its own parameters back, every byte; does nothing without an average."""


class AverageInModel:
    """The average of the workers: in the masters, which `Average` overwrites, and rounded in the model."""

    def __init__(self, average: Average, masters: MasterParameters) -> None:
        self.average = average
        self.masters = masters
        self._own: list[Tensor] | None = None

    def swap_in(self) -> None:
        """Overwrite masters and model by the average of the workers. Collective."""
        self.masters.adopt_edits()
        self.average.swap_in()
        self._own = self.masters.memory()
        self.masters.write_back()

    def restore(self) -> None:
        """Give the worker its own parameters back, every byte; does nothing without an average."""
        self.average.restore()
        if self._own is not None:
            self.masters.write_into(self._own)
            self._own = None
