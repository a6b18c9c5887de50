"""The tensors of one optimizer that are mixed, looked up anew in every step.

This file alone knows which parameters those are, where their values lie in this process (in the parameter, in its
shard, or in its float32 master), which local worker they belong to, and which of them share their memory.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.copies import Copies
from dsgdac_accel.core.parameters import as_parameter_list, memory_of, name_of, refuse_unmixable
from dsgdac_accel.devices import is_on
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.row import Row
from dsgdac_accel.shards import is_sharded, local_of

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_SHAPE = operator.attrgetter("shape")
_MOST_NAMES = 8


@dataclass(frozen=True)
class Slot:
    """Memory that is mixed: of a parameter, or of several that are tied."""

    parameters: tuple[Parameter, ...]
    """Those that have this memory; the first one stands for all."""
    shape: torch.Size
    """Of the part of the parameter that is in this process."""
    master: Tensor | None = None
    """Its values that are mixed, if these are not the parameter's own."""

    def value(self) -> Tensor:
        """Return the tensor that is mixed, where it is now."""
        return self.shown() if self.master is None else self.master

    def shown(self) -> Tensor:
        """Return the tensor that the model computes with, where it is now."""
        return local_of(self.parameters[0])

    @property
    def rounded_to(self) -> torch.dtype | None:
        """The dtype of the parameter, if a master is mixed."""
        return None if self.master is None else self.parameters[0].dtype


class SlotSource:
    """Where the values are that are mixed: here in the parameters themselves, or in their shards."""

    dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes of parameters that cannot be mixed themselves, for which it has masters."""

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Make masters of the parameters of the optimizer that need one."""

    def master_of(self, parameter: Parameter) -> Tensor | None:
        """Return the values that are mixed for a parameter; None if they are its own."""
        return None

    def arrange(self, slots: Sequence[Sequence[Slot]], copies: Copies) -> None:
        """Move the masters into the copies, which were laid out for these slots, [local worker]."""

    def read(self) -> None:
        """Take over what a script has written into the model."""

    def write(self) -> None:
        """Write the masters into the model."""

    def note(self) -> None:
        """Take the masters for what was written last: what the model has other than this is an edit."""

    def is_edited(self) -> bool:
        """Return whether a script has written into the model since `write`."""
        return False


class Slots:
    """Lists what is mixed of each local worker, and notices when that changes.

    A parameter is mixed if it is trained or was mixed before: parameters that were frozen from the start are equal on
    all workers and stay equal, parameters that are frozen later are not.

    Args:
        parameters: a parameter, an iterable of them or parameter groups; or a function that returns one of these.
        names: what to call a parameter in messages, by `id`.
        local_workers: workers of this process.
        worker_of: the local worker, from 0, that a parameter belongs to; needed for several local workers.
        source: where the values are that are mixed; by default in the parameters.
    """

    def __init__(
        self,
        parameters: object,
        names: Mapping[int, str] | None = None,
        local_workers: int = 1,
        worker_of: Callable[[Parameter], int] | None = None,
        source: SlotSource | None = None,
    ) -> None:
        self.source = source or SlotSource()
        listed = None if callable(parameters) else as_parameter_list(parameters)  # a generator can be read only once
        self._find: Callable[[], object] = parameters if callable(parameters) else lambda: listed
        self._found: tuple[list[Parameter] | None, list[Parameter]] = None, []
        """The parameters in the groups that were found last, and the distinct ones among them."""
        self.names = names or {}
        self.local_workers = local_workers
        self._worker_of = worker_of or (lambda parameter: 0)
        self.of_workers: list[list[Slot]] = [[] for _ in range(local_workers)]
        """The slots of each local worker, as they were laid out last."""
        self._mixed: list[list[Parameter]] = [[] for _ in range(local_workers)]
        """The parameters of each local worker in these slots."""
        self._kinds: list[list[tuple]] = [[] for _ in range(local_workers)]
        self._fixed: list[list[Tensor]] | None = None
        """The values of all slots, if none of them is a shard, which FSDP replaces."""
        self._seen: tuple[list[Parameter], list[bool], list[list[Any]]] | None = None
        self.changed = False
        """Whether another list is mixed at the last `look` than was laid out, or a tensor of another kind: parameters
        were added, removed, replaced or unfrozen; or one has another shape, dtype, device, strides or tie."""
        self._last_list = self.find()
        """The list that the last `look` has found."""
        self.source.follow(self._last_list)
        self._equal_list = self._last_list
        """The list of which all parameters have started from equal values."""
        self._started_equal = Known(self._equal_list)
        self._mixed_once = Known()
        """What was mixed once: it stays mixed, frozen or not, also if it was out of the optimizer for a while."""
        self._trained: list[Parameter] = []
        """What was trained at the last `note`."""

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
            listed = as_parameter_list(found)
            self._found = seen, self._found[1] if _same(listed, self._found[1]) else listed
        return self._found[1]

    def value_of(self, parameter: Parameter) -> Tensor:
        """Return the values of a parameter that are mixed, or would be."""
        master = self.source.master_of(parameter)
        return local_of(parameter) if master is None else master

    def by_worker(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        """Split parameters by the local worker that they belong to."""
        if self.local_workers == 1:
            return [list(parameters)]
        split: list[list[Parameter]] = [[] for _ in range(self.local_workers)]
        for parameter in parameters:
            split[self._worker_of(parameter)].append(parameter)
        return split

    def _selected(self) -> list[list[Parameter]]:
        return self.by_worker(p for p in self.find() if p.requires_grad or p in self._mixed_once)

    def mixed_places(self) -> list[int]:
        """Return the places of the parameters that are mixed in the list of the optimizer, for checkpoints."""
        return [place for place, parameter in enumerate(self.find()) if parameter in self._mixed_once]

    def mix_places(self, places: Sequence[int]) -> None:
        """Mix what was mixed in a saved run, from the next step on, also if it is frozen now."""
        listed = self.find()
        self._mixed_once.add(listed[place] for place in places if place < len(listed))
        self._seen = None

    # ---- layout

    def select(self, device: torch.device | None, row: Row | None = None, others: Iterable[Slots] = ()) -> None:
        """List what is mixed from now on in `of_workers`.

        Args:
            device: where parameters must be to be sent; None if none is sent.
            row: the processes of this worker, which hold the parameters together; by default a single one.
            others: those of other optimizers.

        Raises:
            ValueError: a parameter cannot be mixed exactly, is on another device or in two optimizers, or the local
                workers train different parameters.
        """
        row = row or Row()
        self.source.follow(self.find())
        selected = self._selected()
        for mine in selected:
            refuse_unmixable(mine, self.names, self.source.dtypes)
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
        theirs = [slot for other in others for slots in other.of_workers for slot in slots]
        taken = {id(parameter) for slot in theirs for parameter in slot.parameters}
        memory = {memory_of(slot.value()) for slot in theirs}
        for parameter in chain.from_iterable(selected):
            if id(parameter) in taken or (parameter.numel() and memory_of(self.value_of(parameter)) in memory):
                raise ValueError(
                    f"{self.name_of(parameter)} is in two optimizers and would be mixed twice. Give it to one of them."
                )
        first, *rest = map(self._signature, selected)
        if any(other != first for other in rest):
            raise ValueError(
                "the workers of this process train different parameters. Freeze, unfreeze, add and replace parameters "
                "in all replicas of the model alike (`model.replicas`)."
            )
        self._mixed = selected
        self._mixed_once.add(chain.from_iterable(selected))
        self._kinds = list(map(self._kinds_of, selected))
        self.of_workers = list(map(self._slots, selected))
        ordinary = not any(is_sharded(parameter) for mine in selected for parameter in mine)
        self._fixed = None
        if ordinary:
            self._fixed = [
                [slot.parameters[0] if slot.master is None else slot.master for slot in slots]
                for slots in self.of_workers
            ]
        self._seen, self.changed = None, False
        self.look()

    def arrange(self, copies: Copies) -> None:
        """Let the source move into these copies, which were laid out for the slots."""
        self.source.arrange(self.of_workers, copies)
        self.look()

    def signature(self) -> list[tuple]:
        """Return what must agree on all workers before anything is sent, of the parameters that are mixed from now on.

        Shape, strides, dtype, and which earlier one a parameter is tied to, in order; with shards also those of this
        process's shard, and the placement.
        """
        return self._signature(self._selected()[0])

    def _signature(self, parameters: Sequence[Parameter]) -> list[tuple]:
        values = list(map(self.value_of, parameters))
        return [
            (tuple(p.shape), _strides(p, x), str(x.dtype), *_shard(p), *([] if tie == place else [f"tied to {tie}"]))
            for place, (p, x, tie) in enumerate(zip(parameters, values, ties_of(values), strict=True))
        ]

    def _kinds_of(self, parameters: Sequence[Parameter]) -> list[tuple]:
        values = list(map(self.value_of, parameters))
        return [(v.shape, v.stride(), v.dtype, v.device, tie) for v, tie in zip(values, ties_of(values), strict=True)]

    def _slots(self, parameters: Sequence[Parameter]) -> list[Slot]:
        """Return a slot for each distinct memory."""
        values = list(map(self.value_of, parameters))
        sharers: dict[int, list[Parameter]] = {}
        for parameter, first in zip(parameters, ties_of(values), strict=True):
            sharers.setdefault(first, []).append(parameter)
        return [
            Slot(tuple(tied), values[first].shape, self.source.master_of(tied[0])) for first, tied in sharers.items()
        ]

    def code(self, *more: object) -> int:
        """Return 63 bits for the signature, the shapes of newcomers and `more`: equal in all processes if these are."""
        newcomers = self._newcomers()
        tied = self._tied_to_known(newcomers)
        told = self.signature(), [(tuple(p.shape), id(p) in tied) for p in newcomers], more
        return int.from_bytes(sha256(repr(told).encode()).digest()[:8], "little") >> 1

    # ---- now

    def look(self) -> None:
        """Look at the parameters now, for `changed`, `has_newcomers` and `values`. Costs little if nothing was touched.

        Of 400 parameters, the lists of addresses, shapes and strides take 22, 38 and 31 us.
        """
        listed = self._last_list = self.find()
        trained = list(map(_REQUIRES_GRAD, listed))
        if self._seen is None or self._seen[0] is not listed or self._seen[1] != trained:
            self.source.follow(listed)
        values = list(chain.from_iterable(self._now()))
        memory = [list(map(ask, values)) for ask in (Tensor.data_ptr, _SHAPE, Tensor.stride)]
        if self._seen is None or self._seen[0] is not listed or self._seen[1:] != (trained, memory):
            selected = self._selected()
            self.changed = (
                not all(map(_same, selected, self._mixed)) or list(map(self._kinds_of, selected)) != self._kinds
            )
            self._seen = listed, trained, memory

    def values(self) -> list[list[Tensor | None]]:
        """Return the tensors that are mixed, of each local worker, in the order of its slots.

        None stands for what is no longer mixed, has another shape than was laid out, or shares the memory of an earlier
        slot; only if `changed`.
        """
        now: list[list[Any]] = self._now()
        if not self.changed:
            return now
        selected = {id(parameter) for mine in self._selected() for parameter in mine}
        return [
            [
                value if id(slot.parameters[0]) in selected and value.shape == slot.shape and tie == place else None
                for place, (slot, value, tie) in enumerate(zip(slots, values, ties_of(values), strict=True))
            ]
            for slots, values in zip(self.of_workers, now, strict=True)
        ]

    def _now(self) -> list[list[Any]]:
        if self._fixed is not None:
            return self._fixed
        return [[slot.value() for slot in slots] for slots in self.of_workers]

    # ---- what has changed

    def named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the parameters of the first local worker that were laid out."""
        return [(self.name_of(parameter), tuple(parameter.shape)) for parameter in self._mixed[0]]

    def trained(self) -> tuple[bool, ...]:
        """Return which parameters of the optimizer are trained now."""
        return tuple(map(_REQUIRES_GRAD, self.find()))

    def note(self) -> None:
        """Remember what is trained now, for the next `story`."""
        self._trained = [parameter for parameter in self.find() if parameter.requires_grad]

    def story(self) -> str:
        """Return what this process did to its parameters since the last `note` and `select`; empty if nothing."""
        mixed, selected = list(chain.from_iterable(self._mixed)), list(chain.from_iterable(self._selected()))
        joined = {id(p): p for p in [*_without(selected, mixed), *self._newcomers()]}
        gone = _without(mixed, selected)
        deeds = {
            "added, unfroze or put in place of others": joined.values(),
            "froze": [p for p in _without(self._trained, gone) if not p.requires_grad],
            "removed or replaced": gone,
        }
        told = [f"{deed} {self._named(found)}" for deed, found in deeds.items() if found]
        if not told and self.changed:
            told = ["gave parameters another dtype, shape, device or tie"]
        return " and ".join(told)

    def _named(self, parameters: Iterable[Parameter]) -> str:
        names = list(dict.fromkeys(map(self.name_of, parameters)))
        return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")

    # ---- parameters that join

    def equalize_newcomers(self, group: WorkerGroup) -> None:
        """Let parameters that joined the optimizer during training start from worker 0's values, as all others did.

        Collective; `signature` is the same on all workers.
        """
        if not self.has_newcomers():
            return
        newcomers = self._newcomers()
        tied = self._tied_to_known(newcomers)  # their memory is mixed already, and differs between the workers
        apart = [parameter for parameter in newcomers if id(parameter) not in tied]
        for replicas in zip(*self.by_worker(apart), strict=False):  # `select` refuses replicas that differ
            first = replicas[0]
            value = self.value_of(first)
            group.broadcast_(value, f"starting from equal values of {self.name_of(first)}")
            for other in replicas[1:]:
                if other.shape == first.shape:
                    self.value_of(other).detach().copy_(value.detach())
        self._started_equal.add(newcomers)
        self._last_list = self._equal_list = self.find()

    def has_newcomers(self) -> bool:
        """Return whether the optimizer has another list at the last `look` than `equalize_newcomers` has seen last."""
        return self._last_list is not self._equal_list

    def _newcomers(self) -> list[Parameter]:
        return [parameter for parameter in self.find() if parameter not in self._started_equal]

    def _tied_to_known(self, newcomers: Sequence[Parameter]) -> set[int]:
        """Return the `id` of the newcomers that share the memory of parameters that are mixed."""
        plain = [p for p in newcomers if type(local_of(p).data) is Tensor]
        if not plain:
            return set()
        mixed = [p for mine in self._selected() for p in mine if p in self._started_equal]
        ties = ties_of([*mixed, *plain])[len(mixed) :]
        return {id(parameter) for parameter, tie in zip(plain, ties, strict=True) if tie < len(mixed)}


class Known:
    """A set of parameters, by identity, which does not keep them alive.

    A new parameter may have the `id` of a deleted one, on one worker and not on another.
    """

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        self._references: dict[int, weakref.ref[Parameter]] = {}
        self.add(parameters)

    def add(self, parameters: Iterable[Parameter]) -> None:
        self._references |= {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def __contains__(self, parameter: Parameter) -> bool:
        reference = self._references.get(id(parameter))
        return reference is not None and reference() is parameter


def ties_of(parameters: Sequence[Tensor]) -> list[int]:
    """Return for each parameter the place of the first one with the same memory."""
    firsts: dict[tuple, int] = {}
    ties = []
    for place, parameter in enumerate(parameters):
        value = local_of(parameter)
        ties.append(firsts.setdefault(memory_of(value) if value.numel() else (place,), place))
    return ties


def _strides(parameter: Any, value: Tensor) -> tuple[int, ...]:
    return parameter.stride() if is_sharded(parameter) else value.stride()


def _shard(parameter: Any) -> tuple:
    if not is_sharded(parameter):
        return ()
    local = local_of(parameter)
    return tuple(local.shape), local.stride(), str(parameter.placements)


def _in_groups(found: object) -> list[Parameter] | None:
    """Return the parameters of ordinary parameter groups one after the other; None for anything else."""
    if not isinstance(found, list):
        return None
    inner = [group["params"] for group in found if isinstance(group, Mapping) and "params" in group]
    ordinary = len(inner) == len(found) and all(type(parameters) is list for parameters in inner)
    return list(chain.from_iterable(inner)) if ordinary else None


def _same(one: Sequence[Parameter], other: Sequence[Parameter]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _without(parameters: Iterable[Parameter], others: Iterable[Parameter]) -> list[Parameter]:
    left_out = set(map(id, others))
    return [parameter for parameter in parameters if id(parameter) not in left_out]
