"""float32 masters of bf16 and fp16 parameters, which the optimizer steps and the workers mix.

An update of less than half a unit in the last place, 2^-9 of the value in bf16, would be rounded away. The model
computes with the rounded masters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from dsgdac_accel.core.copies import Copies, Copy, Layout
from dsgdac_accel.core.parameters import LOAD_IN_FLOAT32, as_parameter_list, memory_of, name_of, refuse_unmixable
from dsgdac_accel.core.slots import Slot, SlotSource, ties_of

LOW_PRECISION = frozenset((torch.bfloat16, torch.float16))
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


class Masters(SlotSource):
    """Keeps a float32 master of each bf16 and fp16 parameter that is or was trained.

    Gradients arrive in the model's parameters, in float32 (`Tensor.grad_dtype`), so that accumulation and clipping are
    exact, too. The optimizer has the masters only while it takes its step: scripts find the model's parameters in it
    and do not write masters, so that these can be sent as they are.

    Between two steps a master is what was sent. What a script has written into the model meanwhile is taken over by
    `read`. Memory per parameter: 4 bytes for the master, 4 to notice edits, and 4 instead of 2 for the gradient.

    Args:
        optimizer: of the parameters. Its state of a parameter with a master is float32.
        names: what to call a parameter in messages, by `id`.

    Raises:
        ValueError: a trained parameter cannot be mixed, or this torch is too old. Nothing was changed.
    """

    dtypes = LOW_PRECISION

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.names = names
        self._masters: Any = WeakTensorKeyDictionary()
        """The master of each parameter. One that leaves the optimizer for a while keeps it."""
        self._pairs: list[tuple[Parameter, Parameter]] = []
        """The parameters in the optimizer that have a master, and that."""
        self._blocks: list[_Block] = []
        self._own_load: Any = None
        """The optimizer's own `load_state_dict`, if a script has set one on it."""
        self._addresses: list[int] = []
        """Of the parameters in `_pairs`, when their ties were those of the masters."""
        refuse_untrainable([p for p in as_parameter_list(optimizer.param_groups) if p.requires_grad], names)
        if hasattr(optimizer, "check_overrides"):  # bitsandbytes looks its settings up by the model's parameters, once
            optimizer.check_overrides()

    # ---- a source of slots

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Make masters of the parameters of the optimizer that need one and have none."""
        new = [p for p in parameters if p.dtype in LOW_PRECISION and p.requires_grad and p not in self._masters]
        refuse_untrainable(new, self.names)
        if new and not self._masters:
            self._load_into_masters()
        known = {memory_of(p): master for p, master in self._masters.items() if p.numel()}
        for parameter in new:
            twin = known.get(memory_of(parameter)) if parameter.numel() else None  # tied memory stays tied
            master = Parameter(parameter.detach().float() if twin is None else twin.data)
            known[memory_of(parameter)] = self._masters[parameter] = master
            _set_gradient_dtype(parameter, torch.float32)
            self._convert_state(parameter, parameter.dtype, torch.float32)
        self._pairs = [(p, self._masters[p]) for p in parameters if p in self._masters]
        inside = {id(p) for block in self._blocks for p, _ in block.pairs}
        joined = [pair for pair in self._pairs if id(pair[0]) not in inside]
        if joined:
            tied = {master.data_ptr() for _, master in joined}
            for block in [one for one in self._blocks if not tied.isdisjoint(m.data_ptr() for _, m in one.pairs)]:
                self._blocks.remove(block)
                joined += block.pairs
            for block in self._add_blocks(joined):
                block.adopt(block.find_edits(self.names))  # of parameters that were out of the optimizer for a while

    def master_of(self, parameter: Parameter) -> Parameter | None:
        """Return the master of a parameter; None if it has none."""
        return self._masters.get(parameter)

    def arrange(self, slots: Sequence[Sequence[Slot]], copies: Copies) -> None:
        """Move the masters of these slots, [local worker], into the send buffers, where they can be in them."""
        self.read()  # a block takes what it finds in the model for what was written
        before, self._blocks = self._blocks, []
        for mine, sent in zip(slots, copies.sent, strict=False):
            if sent.holds_masters:
                for number in copies.layout.of_masters:
                    here = [mine[place] for place in copies.layout.slots[number]]
                    pairs = [(p, self._masters[p]) for slot in here for p in slot.parameters]
                    self._blocks.append(_Block(pairs, sent.buffers[number]))
        inside = {id(p) for block in self._blocks for p, _ in block.pairs}
        self._add_blocks([pair for pair in self._pairs if id(pair[0]) not in inside])
        present = {id(p) for p, _ in self._pairs}
        for parameter, master in chain.from_iterable(block.pairs for block in before):
            if id(parameter) not in present:
                master.data = master.data.clone()  # else it would keep the old buffer

    @torch.inference_mode(False)
    @torch.no_grad()
    def _add_blocks(self, pairs: Iterable[tuple[Parameter, Parameter]]) -> list[_Block]:
        alike: dict[tuple, list[tuple[Parameter, Parameter]]] = {}
        for parameter, master in pairs:
            alike.setdefault((parameter.dtype, parameter.device), []).append((parameter, master))
        added = list(map(_Block, alike.values()))
        self._blocks += added
        return added

    @torch.no_grad()
    def read(self) -> None:
        """Take over what a script has written into the model since `write`, without waiting for a GPU.

        Raises:
            RuntimeError: parameters were tied or untied since they have masters, or one has another shape.
        """
        self._require_same_ties()
        for block in self._blocks:
            block.adopt(block.find_edits(self.names))

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the model."""
        for block in self._blocks:
            block.mark_written()
            torch._foreach_copy_([*block.parameters], block.written.views[0])

    def mark_written(self) -> None:
        """Take the masters, rounded, for what was written last: what the model has other than this is an edit."""
        for block in self._blocks:
            block.mark_written()

    @torch.no_grad()
    def is_edited(self) -> bool:
        """Return whether a script has written into the model since `write`. Waits for a GPU."""
        return any(bool(block.find_edits(self.names).any()) for block in self._blocks)

    # ---- for checkpoints

    def _present(self) -> list[tuple[Parameter, Parameter]]:
        """Return the parameters that the optimizer has now and that have a master, and that."""
        self.follow(as_parameter_list(self.optimizer.param_groups))
        return self._pairs

    def values(self) -> list[Parameter]:
        """Return the masters, in the order of the optimizer's parameters, as they are now."""
        return [master for _, master in self._present()]

    @torch.no_grad()
    def edited_values(self) -> list[Tensor]:
        """Return copies of `values`, with what a script has written into the model since `write`."""
        pairs = self._present()
        found = dict(chain.from_iterable(block.edited_values(self.names) for block in self._blocks))
        return [found[id(parameter)] for parameter, _ in pairs]

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Copy `values` into the masters, and round them into the model.

        Raises ValueError if there are more or fewer masters, or of other shapes.
        """
        own = self.values()
        mine, theirs = ([tuple(value.shape) for value in each] for each in (own, values))
        if mine != theirs:
            raise ValueError(
                f"the state has {len(theirs)} masters of bf16 and fp16 parameters, and this model {len(mine)}, or of "
                f"other shapes. Build the model, and freeze parameters, as when it was saved."
            )
        for master, value in zip(own, values, strict=True):
            master.copy_(value)
        self.write()

    def by_parameter(self, values: Iterable[Tensor]) -> dict[int, Tensor]:
        """Return `values`, which are like those of `values`, by the `id` of their parameter."""
        return {id(parameter): value for (parameter, _), value in zip(self._pairs, values, strict=True)}

    def _require_same_ties(self) -> None:
        parameters, masters = ([pair[place] for pair in self._pairs] for place in (0, 1))
        addresses = list(map(Tensor.data_ptr, parameters))
        if addresses == self._addresses:
            return
        for parameter, one, other in zip(parameters, ties_of(parameters), ties_of(masters), strict=True):
            if one != other:
                raise RuntimeError(
                    f"{name_of(parameter, self.names)} ({parameter.dtype}) was tied or untied after it got its float32 "
                    f"master, which cannot follow. Tie parameters before `prepare`. {LOAD_IN_FLOAT32}"
                )
        self._addresses = addresses

    # ---- in the optimizer

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Inside, the optimizer has the masters, with the gradients and the state of their parameters."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @torch.compiler.disable
    def _enter(self) -> None:
        for parameter, master in self._pairs:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != master.dtype:  # `model.bfloat16()` converts it, too
                gradient = parameter.grad = gradient.to(master.dtype)
            master.grad = gradient
        self._swap({id(parameter): master for parameter, master in self._pairs})

    @torch.compiler.disable
    def _leave(self) -> None:
        self._swap({id(master): parameter for parameter, master in self._pairs})
        for _, master in self._pairs:
            master.grad = None

    def _swap(self, other: Mapping[int, Parameter]) -> None:
        state = self.optimizer.state
        for group in self.optimizer.param_groups if other else ():
            group["params"][:] = [other.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in [parameter for parameter in state if id(parameter) in other]:
            state[other[id(parameter)]] = state.pop(parameter)

    def release(self) -> None:
        """Forget the masters: gradients and state have the dtype of their parameters again."""
        if self._masters:
            del vars(self.optimizer)["load_state_dict"]
            if self._own_load is not None:
                vars(self.optimizer)["load_state_dict"] = self._own_load
        for parameter in self._masters:
            _set_gradient_dtype(parameter, parameter.dtype)
            self._convert_state(parameter, torch.float32, parameter.dtype)
        self._masters.clear()
        self._pairs, self._blocks = [], []

    def _load_into_masters(self) -> None:
        """Let the optimizer have the masters while it loads a state, or it rounds that to its parameters' dtypes."""
        masters, owner = weakref.ref(self), weakref.ref(self.optimizer)  # all ends with the last reference
        own = self._own_load = vars(self.optimizer).get("load_state_dict")
        of_class: Any = type(self.optimizer).load_state_dict

        @functools.wraps(of_class)
        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            found = masters()
            with nullcontext() if found is None else found.in_optimizer():
                return of_class(owner(), *args, **kwargs) if own is None else own(*args, **kwargs)

        vars(self.optimizer)["load_state_dict"] = load_state_dict

    def _convert_state(self, parameter: Parameter, before: torch.dtype, after: torch.dtype) -> None:
        """Convert what is as precise as the parameter in its state; of other optimizers than torch's also as large."""
        state = self.optimizer.state.get(parameter, {})
        of_torch = type(self.optimizer).__module__.startswith("torch.optim")  # others may mix precisions
        for name, value in state.items():
            if type(value) is not Tensor or value.dtype != before:
                continue
            if value.shape == parameter.shape or (of_torch and value.ndim > 0):
                state[name] = value.to(after)


class _Block:
    """Masters of parameters of one dtype and device, flat, so that a step takes few operations for all of them.

    Args:
        pairs: parameters and their masters, which move here. Those that share their memory still do so.
        buffer: where to; by default new memory.
    """

    def __init__(self, pairs: Sequence[tuple[Parameter, Parameter]], buffer: Tensor | None = None) -> None:
        self.pairs = pairs
        masters = [master for _, master in pairs]
        ties = ties_of(masters)
        distinct = [place for place, first in enumerate(ties) if place == first]
        self.parameters = [pairs[place][0] for place in distinct]
        """One for each memory."""
        layout = Layout([masters[place] for place in distinct])
        self.masters = Copy(layout, None if buffer is None else [buffer])
        self.masters.read([masters[place] for place in distinct])
        number_of = {first: number for number, first in enumerate(distinct)}
        self._places = [number_of[first] for first in ties]
        """The place in `parameters` of each pair."""
        for master, place in zip(masters, self._places, strict=True):
            master.data = self.masters.views[0][place]
        rounded = layout.in_dtype(self.parameters[0].dtype)
        self.written = Copy(rounded)
        """What was written into the model last."""
        self.now = Copy(rounded)
        """Room for what is in the model now."""
        self.mark_written()

    @torch.no_grad()
    def mark_written(self) -> None:
        """Take the rounded masters for what is written into the model."""
        self.written.buffers[0].copy_(self.masters.buffers[0])

    def find_edits(self, names: Mapping[int, str]) -> Tensor:
        """Read the model, and return which elements have other bits than those that were written, (D,)."""
        for parameter, place in zip(self.parameters, self.now.views[0], strict=True):
            if parameter.shape != place.shape or parameter.dtype != place.dtype:
                raise RuntimeError(
                    f"{name_of(parameter, names)} became {tuple(parameter.shape)}, {parameter.dtype}, after "
                    f"{tuple(place.shape)}, {place.dtype}, which its float32 master cannot follow. Convert the model "
                    f"before `prepare`, and give a resized parameter to the optimizer as a new one, on all workers."
                )
        self.now.read(self.parameters)
        (now,), (written,) = self.now.buffers, self.written.buffers
        return now.view(torch.int16) != written.view(torch.int16)  # other than values, -0.0 is not 0.0, NaN is NaN

    def adopt(self, edited: Tensor) -> None:
        """Take over the edits that were found."""
        (now,), (written,), (masters,) = self.now.buffers, self.written.buffers, self.masters.buffers
        torch.where(edited, now, masters, out=masters)
        written.copy_(now)

    def edited_values(self, names: Mapping[int, str]) -> list[tuple[int, Tensor]]:
        """Return the `id` of each parameter with a copy of its master that has the edits."""
        edited, (now,), (masters,) = self.find_edits(names), self.now.buffers, self.masters.buffers
        (views,) = self.masters.layout.views([torch.where(edited, now, masters)])
        return [(id(pair[0]), views[place]) for pair, place in zip(self.pairs, self._places, strict=True)]


def _set_gradient_dtype(parameter: Parameter, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
