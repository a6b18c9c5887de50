"""float32 masters of bf16 and fp16 parameters, which the optimizer steps and the workers mix.

An update of less than half a unit in the last place, 2^-9 of the value in bf16, would be rounded away. The model
computes with the rounded masters.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.copies import Copy, Layout
from dsgdac_accel.core.parameters import LOAD_IN_FLOAT32, as_parameter_list, memory_of, name_of, refuse_unmixable
from dsgdac_accel.core.slots import ties_of

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
    of these. Memory per parameter: 4 bytes for the master, 4 to notice edits, and 4 instead of 2 for the gradient.

    Args:
        optimizer: its `param_groups` and `state` then hold the masters.
        names: what to call a parameter in messages, by `id`; gets the names of the masters.

    Raises:
        ValueError: a trained parameter cannot be mixed, or this torch is too old. Nothing was changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: MutableMapping[int, str]) -> None:
        self.optimizer = optimizer
        self.names = names
        self._seen: list[Parameter] = []
        """The parameters of the optimizer at the last look."""
        self._frozen: list[Parameter] = []
        """Those in low precision without a master."""
        self._pairs: list[_Pair] = []
        self._blocks: list[_Block] = []
        self._addresses: list[int] = []
        """Of the parameters with masters, when their ties were those of the masters."""
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
        """Take over new parameters, gradients, and values that a script wrote from the model.

        Raises:
            RuntimeError: parameters were tied or untied since they have masters, or one has another shape.
        """
        self._follow()
        self._require_same_ties()
        self.take_gradients()
        self.adopt_edits()

    def write_model(self) -> None:
        """Round the masters into the model, and leave the gradients to it: it alone decides how long they stay."""
        self.write_back()
        for pair in self._pairs:
            pair.master.grad = None

    def _require_same_ties(self) -> None:
        parameters = [pair.parameter for pair in self._pairs]
        addresses = list(map(Tensor.data_ptr, parameters))
        if addresses == self._addresses:
            return
        made = ties_of([pair.master for pair in self._pairs])
        for place, (one, other) in enumerate(zip(ties_of(parameters), made, strict=True)):
            if one != other:
                raise RuntimeError(
                    f"{name_of(parameters[place], self.names)} ({parameters[place].dtype}) was tied or untied after it "
                    f"got its float32 master, which cannot follow. Tie parameters before `prepare`. {LOAD_IN_FLOAT32}"
                )
        self._addresses = addresses

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
        known = {memory_of(p.parameter): (p.master.data, p.rounded) for p in self._pairs if p.parameter.numel()}
        fresh = [p for _, _, p in new if id(p) not in self._master_of and memory_of(p) not in known]
        distinct = list({memory_of(p) if p.numel() else (number,): p for number, p in enumerate(fresh)}.values())
        data = {id(p): places for block in self._add_blocks(distinct) for p, *places in block.items()}
        known |= {memory_of(p): data[id(p)] for p in distinct if p.numel()}
        for parameters, place, parameter in new:
            if id(parameter) not in self._master_of:  # else it was out of the optimizer for a while
                # Tied memory stays tied.
                master, rounded = known[memory_of(parameter)] if parameter.numel() else data[id(parameter)]
                self._replace(parameter, Parameter(master), rounded)
            parameters[place] = self._master_of[id(parameter)]

    @torch.inference_mode(False)
    def _add_blocks(self, parameters: Sequence[Parameter]) -> list[_Block]:
        """Return new blocks for parameters with memory of their own."""
        alike: dict[tuple, list[Parameter]] = {}
        for parameter in parameters:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        added = list(map(_Block, alike.values()))
        self._blocks += added
        return added

    def _name(self, pair: _Pair) -> None:
        if id(pair.parameter) in self.names:
            self.names[id(pair.master)] = self.names[id(pair.parameter)]

    def _replace(self, parameter: Parameter, master: Parameter, rounded: Tensor) -> None:
        pair = _Pair(parameter, master, rounded)
        self._pairs.append(pair)
        self._master_of[id(parameter)], self._parameter_of[id(master)] = master, parameter
        self._name(pair)
        state = self.optimizer.state
        if parameter in state:
            state[master] = {
                name: _in_dtype(value, parameter, torch.float32) for name, value in state.pop(parameter).items()
            }

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
        self._blocks = []
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

    def write_back(self) -> None:
        """Round the masters into the model."""
        self.write_into(self.memory())

    @torch.no_grad()
    def write_into(self, memory: Sequence[Tensor]) -> None:
        """Round the masters into the tensors of `memory`; the parameters may point elsewhere meanwhile."""
        for block in self._blocks:
            block.round()
        if self._pairs:
            torch._foreach_copy_(list(memory), [pair.rounded for pair in self._pairs])

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Write the values that a script wrote into the model since `write_back` into the masters.

        Compares the bits of all values with those that were written, without waiting for a GPU.

        Raises:
            RuntimeError: a parameter has another shape.
        """
        for block in self._blocks:
            block.adopt_edits(self.names)

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
        for master, value in zip(self.values(), values, strict=True):
            master.copy_(value)
        self.write_back()

    # ---- the average of the workers in the model

    def memory(self) -> list[Tensor]:
        """Return the memory of the model's parameters, for `write_into`."""
        return [pair.parameter.data for pair in self._pairs]


class _Block:
    """Masters of parameters of one dtype and device, flat, so that a step takes few operations for all of them.

    Args:
        parameters: of the model, each with memory of its own.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters
        layout = Layout([parameter.data for parameter in parameters])
        self.masters = Copy(layout.in_dtype(torch.float32))
        self.masters.read(parameters)
        self.written = Copy(layout)
        """What `write_back` wrote into the model last."""
        self.written.read(parameters)
        self.now = Copy(layout)
        """Room for what is in the model now."""

    def items(self) -> Iterator[tuple[Parameter, Tensor, Tensor]]:
        """Yield each parameter with the memory of its master, and of the rounded one."""
        return zip(self.parameters, self.masters.views[0], self.written.views[0], strict=True)

    def round(self) -> None:
        """Note the rounded masters as what is written into the model."""
        (rounded,), (masters,) = self.written.buffers, self.masters.buffers
        rounded.copy_(masters)

    def adopt_edits(self, names: Mapping[int, str]) -> None:
        """Take over the elements of the parameters whose bits are not those that were written."""
        for parameter, place in zip(self.parameters, self.now.views[0], strict=True):
            if parameter.shape != place.shape:
                raise RuntimeError(
                    f"{name_of(parameter, names)} became {tuple(parameter.shape)} after {tuple(place.shape)} between "
                    f"two steps; give the resized parameter to the optimizer as a new one, on all workers."
                )
        self.now.read(self.parameters)
        (now,), (written,), (masters,) = self.now.buffers, self.written.buffers, self.masters.buffers
        edited = now.view(torch.int16) != written.view(torch.int16)  # other than values, -0.0 is not 0.0, NaN is NaN
        torch.where(edited, now, masters, out=masters)
        written.copy_(now)


class _Pair:
    """A parameter of the model and its master."""

    def __init__(self, parameter: Parameter, master: Parameter, rounded: Tensor) -> None:
        self.parameter = parameter
        self.master = master
        self.rounded = rounded
        """What was written into the parameter last."""
        self._set_grad_dtype(master.dtype)
        # Whoever reads the optimizer's parameters between backward and step finds the gradients there, too.
        self._hook = parameter.register_post_accumulate_grad_hook(
            functools.partial(_share_gradient, weakref.ref(master))
        )

    def _set_grad_dtype(self, dtype: torch.dtype) -> None:
        gradient, self.parameter.grad = self.parameter.grad, None
        self.parameter.grad_dtype = dtype
        self.parameter.grad = None if gradient is None else gradient.to(dtype)

    def release(self) -> None:
        """Forget the master."""
        self._hook.remove()
        self._set_grad_dtype(self.parameter.dtype)


def _share_gradient(reference: weakref.ref[Parameter], parameter: Tensor) -> None:
    master = reference()
    if master is not None:  # the model may outlive its training
        master.grad = parameter.grad


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
