"""Which parameters are mixed and in which buffers, and how a run goes on when they change."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from dsgdac_accel.core.buckets import FlatParameters
from dsgdac_accel.core.compressed_exchange import CompressedExchange, Place
from dsgdac_accel.core.compression import CODECS
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.topology import Topology

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class KeepsLayout:
    """Mixed into `Mixer`: finds the parameters before every exchange, and lays them out anew where they changed."""

    find: Callable[[], list[Parameter]]
    names: Mapping[int, str]
    group: WorkerGroup
    topology: Topology
    num_workers: int
    per_process: int
    workers: range
    comm_dtype: str
    exchange: Exchange
    _worker_of: Callable[[Parameter], int]

    def _begin_layout(self) -> None:
        self._once_mixed: set[int] = set()
        self._laid_out: list[Parameter] | None = None
        self._trained: list[bool] = []
        self._known = {id(parameter): weakref.ref(parameter) for parameter in self.find()}
        self._equalised = self.find()
        self.flats: list[FlatParameters] = []
        self._state_to_come: Mapping[str, Any] | None = None
        """Of buffers unlike those of now: parameters may have been unfrozen or added later in the run that saved it."""
        self._lay_out()

    def _selected(self) -> list[Parameter]:
        """What to mix: all that training changes, or once changed.

        Parameters that were frozen from the start are equal on all workers and stay so; those frozen later are not.
        """
        return [p for p in self.find() if p.requires_grad or id(p) in self._once_mixed]

    def _selects_others(self) -> bool:
        """Whether parameters were added, replaced, frozen or unfrozen; costs little where they were not."""
        listed = self.find()
        trained = list(map(_REQUIRES_GRAD, listed))
        if listed is self._laid_out and trained == self._trained:
            return False
        split = self.by_worker(self._selected())
        if not all(flat.holds(mine) for flat, mine in zip(self.flats, split, strict=True)):
            return True
        self._laid_out, self._trained = listed, trained
        return False

    def by_worker(self, parameters: Iterable[Parameter]) -> list[list[Parameter]]:
        """Parameters of each worker of this process."""
        if self.per_process == 1:
            return [list(parameters)]
        split: list[list[Parameter]] = [[] for _ in self.workers]
        for parameter in parameters:
            split[self._worker_of(parameter)].append(parameter)
        return split

    def _lay_out(self) -> None:
        before, old = self.flats, getattr(self, "exchange", None)
        self.flats = [FlatParameters(mine, self.names) for mine in self.by_worker(self._selected())]
        for flat in self.flats:
            for parameter in flat.parameters:
                if self.num_workers > 1 and parameter.device.type != self.group.device.type:
                    raise ValueError(
                        f"{flat.name_of(parameter)} is on {parameter.device}, but this run communicates on "
                        f"{self.group.device}. Prepare the model before, or together with, its optimizer."
                    )
        self._once_mixed = {id(parameter) for flat in self.flats for parameter in flat.parameters}
        signatures = [flat.signature() for flat in self.flats]
        if any(signature != signatures[0] for signature in signatures):
            raise ValueError(
                "the workers of this process train different parameters. Freeze, unfreeze, add and replace parameters "
                "in all replicas of the model alike (`model.replicas`)."
            )
        self.group.require_equal(signatures[0], "trainable parameters (shape, strides, dtype)")
        self._make_exchange()
        if self._state_to_come is not None:
            if self.exchange.load_state_dict(self._state_to_come):
                self._state_to_come = None
        elif isinstance(old, CompressedExchange) and isinstance(self.exchange, CompressedExchange):
            self.exchange.continue_from(old, self._kept_places(before))

    def _kept_places(self, before: Sequence[FlatParameters]) -> list[list[tuple[Place, Place]]]:
        """Old and new place of every parameter that all workers have kept, for each worker here. Collective.

        They must agree, since a parameter may be the old one here and a new one with its values elsewhere.
        """
        kept: list[set[tuple[int, int]]] = []
        for old, new in zip(before, self.flats, strict=True):
            at = {id(parameter): index for index, parameter in enumerate(old.parameters)}
            shapes = [view.shape for _, view in old.places()]
            kept.append(
                {
                    (at[id(p)], index)
                    for index, p in enumerate(new.parameters)
                    if id(p) in at and shapes[at[id(p)]] == p.shape
                }
            )
        everywhere = self.group.all_gather_object(set.intersection(*kept), "keeping what pairs of workers refer to")
        pairs = sorted(set.intersection(*everywhere))
        places = [(old.places(), new.places()) for old, new in zip(before, self.flats, strict=True)]
        return [[(old[i], new[j]) for i, j in pairs] for old, new in places]

    def _make_exchange(self) -> None:
        sent = [[buffer.data for buffer in flat.buffers] for flat in self.flats]
        if self.comm_dtype == "full" or self.group.size == 1:  # in one process nothing is sent
            self.exchange = Exchange(self.group, self.topology, sent)
        else:
            self.exchange = CompressedExchange(self.group, self.topology, sent, CODECS[self.comm_dtype]())

    @property
    def flat(self) -> FlatParameters:
        """The parameters of this process's first worker, mostly its only one."""
        return self.flats[0]

    def _follow_changes(self) -> None:
        """Adopt again what was added, replaced, frozen, unfrozen or re-pointed; in an undisturbed step, only looks."""
        misfits = [parameter for flat in self.flats for parameter in flat.bring_back()]
        if self._selects_others() or misfits:
            self._lay_out()

    def _equalise_newcomers(self) -> None:
        """Parameters that joined the optimizer during training start from worker 0's values, as all others did."""
        listed = self.find()
        if listed is self._equalised:
            return
        newcomers = [parameter for parameter in listed if not self._knows(parameter)]
        for replicas in zip(*self.by_worker(newcomers), strict=False):  # unlike ones are refused by the layout
            first = replicas[0]
            self.group.require_equal(tuple(first.shape), "shape of the parameter added to the optimizer")
            self.group.broadcast_(first, f"starting from equal values of {self.flat.name_of(first)}")
            for other in replicas[1:]:
                if other.shape == first.shape:
                    other.detach().copy_(first.detach())
        self._known |= {id(parameter): weakref.ref(parameter) for parameter in newcomers}
        self._equalised = listed

    def _knows(self, parameter: Parameter) -> bool:
        """A new parameter may have the `id` of one that is gone, on one worker and not on another."""
        reference = self._known.get(id(parameter))
        return reference is not None and reference() is parameter

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters of one worker, as they are exchanged."""
        return sum(buffer.data.numel() * buffer.data.element_size() for buffer in self.flat.buffers)
