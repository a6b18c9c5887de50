"""The copies that the library owns: what is sent to other workers, and what arrives from them.

Nothing of a script's is ever in flight. Once a step the parameters are read into the send buffer, and once a step the
consensus update is added to them. Masters of bf16 and fp16 parameters, which no script sees, live in the send buffer
themselves, unless messages are rounded.

Memory: one copy of the trained float32 parameters to send, and one of all parameters for each neighbor that a worker
receives from at once: two copies for one-peer topologies and for those that average whole groups, one with masters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from dsgdac_accel.core.kernels import add_scaled
from dsgdac_accel.core.parameters import extent

ALIGNMENT = 128  # bytes: whole cache lines and the widest vector loads
_MOST_FUSED = 2**30  # elements: torch's fused kernels count in 32 bits

T = TypeVar("T")
Values = Sequence[Tensor | None]
"""The tensors that are mixed of one worker, in the order of its slots; None where there is nothing to read or add."""


class Layout:
    """The place of each slot of a worker in flat buffers, one for each dtype and device.

    A slot keeps its shape and its strides (channels_last, transposed, sliced, 0-dim, empty).

    Args:
        values: the tensor of each slot.
        rounded_to: for each slot the dtype of its parameter, if the value is a master of it. Masters have buffers of
            their own. By default there are none.
    """

    def __init__(self, values: Sequence[Tensor], rounded_to: Sequence[torch.dtype | None] | None = None) -> None:
        alike: dict[tuple[torch.dtype, torch.device, torch.dtype | None], list[int]] = {}
        for slot, value in enumerate(values):
            kind = value.dtype, value.device, None if rounded_to is None else rounded_to[slot]
            alike.setdefault(kind, []).append(slot)
        self.slots = list(alike.values())
        """[buffer] the slots in it."""
        self._kinds = [(dtype, device) for dtype, device, _ in alike]
        self.of_masters = [number for number, (_, _, rounded) in enumerate(alike) if rounded is not None]
        """The buffers whose slots are masters."""
        self._sizes: list[int] = []
        self._places: list[list[tuple[torch.Size, tuple[int, ...], int]]] = []
        self.dense: list[bool] = []
        """[buffer] whether its slots have no gaps inside, and not too many elements for a fused kernel."""
        for (dtype, *_), slots in alike.items():
            step, total, places, dense = ALIGNMENT // dtype.itemsize, 0, [], True
            for value in map(values.__getitem__, slots):
                elements = extent(value)
                places.append((value.shape, value.stride(), total))
                dense = dense and elements == value.numel() <= _MOST_FUSED
                total += -(-elements // step) * step
            self.dense.append(dense)
            self._sizes.append(total)
            self._places.append(places)

    def in_dtype(self, dtype: torch.dtype) -> Layout:
        """Return the same places in buffers of another dtype."""
        other = copy.copy(self)
        other._kinds = [(dtype, device) for _, device in self._kinds]
        return other

    @property
    def nbytes(self) -> int:
        """Size of the buffers."""
        return sum(size * dtype.itemsize for size, (dtype, _) in zip(self._sizes, self._kinds, strict=True))

    def empty(self) -> list[Tensor]:
        """Return new buffers, (D,) each, with zeros in the gaps between slots."""
        pairs = zip(self._kinds, self._sizes, strict=True)
        return [torch.zeros(size, dtype=dtype, device=device) for (dtype, device), size in pairs]

    def views(self, buffers: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the place of each slot in buffers like those of `empty`: [buffer][slot in it]."""
        return [
            [buffer.as_strided(shape, stride, start) for shape, stride, start in places]
            for buffer, places in zip(buffers, self._places, strict=True)
        ]

    def grouped(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Return what belongs to each slot in the order of `views`."""
        if len(self.slots) == 1:
            return [values]
        return [[values[slot] for slot in slots] for slots in self.slots]


class Copy:
    """A copy of the values of one worker, in flat buffers.

    Args:
        layout: the places of the slots.
        buffers: as of `Layout.empty`, which makes them by default.
    """

    def __init__(self, layout: Layout, buffers: list[Tensor] | None = None) -> None:
        self.layout = layout
        self.buffers = layout.empty() if buffers is None else buffers
        self.holds_masters = False
        """Whether the masters are these very buffers, not copied into them."""

    @cached_property
    def views(self) -> list[list[Tensor]]:
        """The place of each slot: [buffer][slot in it]."""
        return self.layout.views(self.buffers)

    @torch.no_grad()
    def read(self, values: Values) -> None:
        """Copy the values into the buffers."""
        for number, _, places, tensors in self._present(values):
            if not (self.holds_masters and number in self.layout.of_masters):
                torch._foreach_copy_(places, tensors)

    @torch.no_grad()
    def add_to(self, values: Values, scale: float, skip: Tensor | None = None, as_laid_out: bool = False) -> None:
        """values += scale * copy, unless `skip`, shape (), is 1: decided on the device.

        Args:
            values: the tensors of the slots.
            scale: a number.
            skip: 0 or 1 on the device; None adds without asking.
            as_laid_out: whether they have the dtypes and strides that they were laid out with.
        """
        for _, dense, places, tensors in self._present(values):
            add_scaled(tensors, places, scale, skip, alike=as_laid_out and (skip is None or dense))

    def _present(self, values: Values) -> Iterator[tuple[int, bool, list[Tensor], list[Tensor]]]:
        """Yield number and density of each buffer, and views and values of its slots that have a value."""
        grouped = zip(self.layout.dense, self.views, self.layout.grouped(values), strict=True)
        for number, (dense, views, group) in enumerate(grouped):
            if any(value is None for value in group):
                pairs = [(view, value) for view, value in zip(views, group, strict=True) if value is not None]
                views, group = [view for view, _ in pairs], [value for _, value in pairs]
            if group:
                yield number, dense, views, group  # type: ignore[misc]  # a list of tensors


class Use(Enum):
    """The content of the copies at present, which decides who may write them."""

    FREE = "nothing"
    IN_FLIGHT = "an exchange that is in flight"
    RECEIVED = "what the neighbors sent"
    UPDATE = "a consensus update that was not added yet"
    KEPT = "the worker's own parameters, and the average of the workers"
    BACKUP = "the worker's own parameters, while these are the average of the workers"
    RELEASED = "nothing any more: the buffers were freed"


_REFUSALS = {
    Use.UPDATE: "the consensus update of this step is not added yet. Evaluate and save after the optimizer step.",
    Use.BACKUP: "the parameters are the deployed average now; train only after leaving `with deployed_model(...)`.",
    Use.RELEASED: "gossip has ended (`deploy` or `free_memory`); prepare model and optimizer again to train on.",
}


class Copies:
    """Owns the send and receive buffers of the workers of this process, in which updates are formed, too.

    Outgoing messages and references of a compressed exchange belong to its `Compressor`.
    """

    def __init__(self) -> None:
        self.layout = Layout(())
        """The same for all local workers."""
        self.sent: list[Copy] = []
        """[local worker] s: its parameters when they were posted."""
        self.received: list[list[list[Tensor]]] = []
        """[local worker][k] what its k-th neighbor in another process sent, a tensor for each buffer."""
        self.differences: list[Copy] = []
        """[local worker] where its update is formed: in its first receive buffer."""
        self.mean: Copy | None = None
        """The average of what the send buffers hold. A single worker, which sends nothing, is its own."""
        self.use = Use.FREE

    @torch.inference_mode(False)  # what is made in an evaluation is used in training
    def lay_out(
        self,
        values: Sequence[Sequence[Tensor]],
        counts: Sequence[int],
        empty_message: Callable[[Tensor], Tensor] | None = None,
        rounded_to: Sequence[torch.dtype | None] | None = None,
    ) -> None:
        """Make new buffers.

        Args:
            values: the tensors that are mixed of each local worker.
            counts: for each local worker, the number of neighbors that it receives from at once; empty where there is
                a single worker, which needs no buffers.
            empty_message: makes the buffer for a message about a buffer; by default it is as large as that.
            rounded_to: as for `Layout`, where masters are to live in the send buffers.
        """
        assert self.use is Use.FREE, f"the copies hold {self.use.value}"
        self.layout = layout = Layout(values[0], rounded_to)
        self.sent = [Copy(layout) for _ in counts]
        if empty_message is None:
            self.received = [[layout.empty() for _ in range(count)] for count in counts]
            self.differences = [Copy(layout, slots[0] if slots else []) for slots in self.received]
            for sent in self.sent:
                sent.holds_masters = True
        else:
            self.received = [
                [list(map(empty_message, sent.buffers)) for _ in range(count)]
                for sent, count in zip(self.sent, counts, strict=True)
            ]
            self.differences = list(self.sent)  # messages are encoded from s, which nobody needs any more then

    def refuse(self, *uses: Use) -> None:
        """Raise RuntimeError, with the way out, in one of these uses."""
        if self.use in uses and self.use in _REFUSALS:
            raise RuntimeError(_REFUSALS[self.use])

    def drop(self) -> None:
        """Drop what was received, a kept average, or an update that was never added because the local step failed."""
        if self.use in (Use.RECEIVED, Use.UPDATE, Use.KEPT):
            self.mean, self.use = None, Use.FREE

    def release(self) -> None:
        """Free all buffers, for good."""
        self.refuse(Use.BACKUP)
        self.mean, self.use = None, Use.RELEASED
        self.layout, self.sent, self.received, self.differences = Layout(()), [], [], []
