"""Where in the data a run is, and going on from exactly there: same batches, same random numbers.

A pass over a prepared loader is described by the state at its beginning (samplers, generators, random streams) and by
how many batches were handed out. Accelerate's loaders fetch one batch ahead, so the random streams just before that
fetch belong to it, too: a data set that augments in this process draws from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import IterableDataset

from dsgdac_accel.data.equal_steps import EqualSteps
from dsgdac_accel.data.order import order_state, set_order_state
from dsgdac_accel.randomness import random_state, set_random_state

_NOTHING = object()


@dataclass(frozen=True)
class DataPosition:
    """Where a run is in the data of one loader."""

    epoch: int
    """The pass that is being read, or that comes next; counted from 0."""
    batches: int
    """How many batches of it this worker has taken."""


# ---- recorded passes


@dataclass(eq=False)
class _Pass:
    """A pass of training over a loader, as far as it has come."""

    order: list[dict[str, Any]]
    """Of samplers and generators when it began."""
    random: dict[str, Any]
    """The random streams when it began."""
    taken: int = 0
    fetched_at: dict[str, Any] | None = None
    """The random streams before the fetch of the batch that is not handed out yet."""
    going_on_at: dict[str, Any] | None = None
    """The random streams when it was saved, while a resumed pass catches up."""
    first: int = 1
    """The number of the first batch that is fetched; above 1 where earlier ones are skipped in the order."""
    looked_ahead: int = 0
    passes: int = 0
    """Passes that had begun before this one."""

    def state(self) -> dict[str, Any]:
        return {
            "order": self.order, "random": self.random, "taken": self.taken, "fetched_at": self.fetched_at,
            "passes": self.passes,
        }  # fmt: skip


class Recorded:
    """Mixed into Accelerate's loaders: knows how far the pass of training is, and can go on in the middle of one."""

    active: Callable[[], bool]
    base_dataloader: Any
    iteration: int
    end_of_dataloader: bool
    passes_begun: int
    _current: _Pass | None = None
    """The pass that is being advanced at this moment."""
    _latest: weakref.ref[_Pass] | None = None
    """A weak reference to the pass of training: it dies with its iterator, when a loop is left by `break`."""
    _waiting: _Pass | None = None
    """A loaded pass that was not gone on with yet."""
    _goes_on = False
    _replays: bool | None = None

    batches_per_fetch = 1
    """Of the base loader."""

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        inner = super().__iter__()  # type: ignore[misc]
        if not self.active():
            yield from self._advanced(inner, None)
            return
        waiting, self._waiting = self._waiting, None
        goes_on, self._goes_on = self._goes_on, False
        if waiting is None or not goes_on:
            began = _Pass(order_state(self), random_state(), passes=getattr(self, "passes_begun", 0))
            self._latest = weakref.ref(began)
            yield from self._advanced(inner, began)
            return
        self._latest = weakref.ref(waiting)
        if waiting.going_on_at is None:
            waiting.random = random_state()
        else:
            set_random_state(waiting.random)
        yield from self._advanced(self._rest_of(inner, waiting), waiting)

    def _advanced(self, inner: Iterator[Any], pass_: _Pass | None) -> Iterator[Any]:
        while True:
            # A pass of evaluation may run while one of training over the same loader waits between two batches.
            outer, self._current = self._current, pass_
            try:
                batch = next(inner, _NOTHING)
            finally:
                self._current = outer
            if batch is _NOTHING:
                return
            if pass_ is not None:
                pass_.taken += 1
            yield batch

    def _rest_of(self, inner: Iterator[Any], pass_: _Pass) -> Iterator[Any]:
        """The batches of a loaded pass that were not taken."""
        skipping = self._skipped_in_order(pass_) if self._can_skip() else None
        try:
            if skipping is None:
                for _ in range(pass_.taken):
                    next(inner, None)
            batch = next(inner, _NOTHING)
        finally:
            if skipping is not None:
                skipping.undo()
        if batch is _NOTHING:
            return
        if pass_.going_on_at is not None:  # there was no further fetch
            self._go_on(pass_)
        yield batch
        yield from inner

    def _can_skip(self) -> bool:
        """Whether the taken batches can be left out of the order, instead of being fetched again and dropped."""
        base = self.base_dataloader
        if self._replays or base.batch_sampler is None or isinstance(base.dataset, IterableDataset):
            return False
        # Loader processes have random streams of their own, which must come as far as they were.
        return base.num_workers == 0 or self._replays is False

    def _skipped_in_order(self, pass_: _Pass) -> _Skipping:
        pass_.first = pass_.taken + 1

        def fetch_first() -> None:
            if pass_.fetched_at is not None:
                set_random_state(pass_.fetched_at)

        return _Skipping(self.base_dataloader, pass_.taken * self.batches_per_fetch, fetch_first)

    def _before_fetch(self, number: int) -> None:
        """Called before batch `number` of those that are fetched in the pass that is being advanced."""
        pass_ = self._current
        if pass_ is None:
            return
        number += pass_.first - 1
        if pass_.going_on_at is not None:
            if number == pass_.taken + 1 and pass_.first == 1 and pass_.fetched_at is not None:
                set_random_state(pass_.fetched_at)
            elif number == pass_.taken + 2:
                self._go_on(pass_)
            else:
                return
        if self.base_dataloader.num_workers == 0:
            pass_.fetched_at = random_state()

    def _go_on(self, pass_: _Pass) -> None:
        assert pass_.going_on_at is not None
        set_random_state(pass_.going_on_at)
        pass_.going_on_at = None

    # ---- position

    def _running(self) -> _Pass | None:
        """The pass that a loop is in the middle of, or that was loaded and is to be gone on with."""
        if self._waiting is not None:
            return self._waiting
        latest = self._last_pass()
        return latest if latest is not None and latest.taken and not self.end_of_dataloader else None

    def _last_pass(self) -> _Pass | None:
        return None if self._latest is None else self._latest()

    @property
    def position(self) -> DataPosition:
        """Where training is in this loader."""
        running = self._running()
        if running is not None:
            return DataPosition(max(running.order[0]["counters"]["iteration"], running.passes), running.taken)
        return DataPosition(max(self._next_iteration(), getattr(self, "passes_begun", 0)), 0)

    def _next_iteration(self) -> int:
        """Accelerate counts the pass after its last batch; who holds that batch has finished the pass, too."""
        latest = self._last_pass()
        return self.iteration + (latest is not None and latest.taken > 0 and self.end_of_dataloader)

    def position_state(self) -> dict[str, Any]:
        """As plain values."""
        running = self._running()
        if running is not None:
            return {"running": running.state(), "global_batches": self._global_batches()}
        order = order_state(self)
        order[0]["counters"]["iteration"] = self._next_iteration()
        return {"running": None, "order": order, "passes": getattr(self, "passes_begun", 0)}

    def _global_batches(self) -> bool:
        """Whether a batch is split over the workers, so that their number does not change how much one batch takes."""
        sampler = getattr(self.base_dataloader, "batch_sampler", None)
        return bool(getattr(self, "split_batches", False) or getattr(sampler, "split_batches", False))

    def load_position_state(self, state: Mapping[str, Any], random: dict[str, Any] | None) -> None:
        """Take a saved position; `go_on` then makes the next pass the rest of the saved one.

        Without it, the next pass is the saved one from its beginning.

        Args:
            state: as `position_state` gave it.
            random: the random streams when it was saved; None for a state of another number of workers: streams then
                stay as they are, and the order is kept as far as samplers are alike.
        """
        running = state["running"]
        set_order_state(self, state["order"] if running is None else running["order"], lenient=random is None)
        if hasattr(self, "passes_begun"):
            self.passes_begun = state["passes"] if running is None else running["passes"]
        self._latest = None
        self._waiting = None if running is None else _Pass(**running, going_on_at=random)
        self._goes_on = False

    def go_on(self, replay: bool | None) -> None:
        """Let the next pass be the rest of the loaded one; see `ResumedBatches`."""
        self._goes_on, self._replays = self._waiting is not None, replay

    @property
    def waiting_batches(self) -> int:
        """How many batches of the loaded pass were taken, until a pass begins."""
        return 0 if self._waiting is None else self._waiting.taken

    @property
    def batches_left_out(self) -> int:
        """How many batches the next pass will not hand out because they were taken before."""
        return self.waiting_batches if self._goes_on else 0


class RecordedShard(Recorded, DataLoaderShard):
    """A `DataLoaderShard` that knows its position."""

    def _update_state_dict(self) -> None:
        super()._update_state_dict()
        pass_ = self._current  # Accelerate calls this before it fetches the batch after the one it will hand out
        if pass_ is not None:
            pass_.looked_ahead += 1
            self._before_fetch(pass_.looked_ahead + 1)


class RecordedDispatcher(Recorded, DataLoaderDispatcher):
    """A `DataLoaderDispatcher` that knows its position."""

    def _fetch_batches(self, iterator: Any) -> Any:
        pass_ = self._current
        if pass_ is not None:
            pass_.looked_ahead += 1
            self._before_fetch(pass_.looked_ahead)
        return super()._fetch_batches(iterator)

    @property
    def batches_per_fetch(self) -> int:  # type: ignore[override]
        """Batches of the base loader that make up one batch of each worker."""
        return 1 if self.split_batches else self.state.num_processes


_RECORDED: dict[type, type] = {DataLoaderShard: RecordedShard, DataLoaderDispatcher: RecordedDispatcher}


def recorded(prepared: Any, active: Callable[[], bool]) -> Any:
    """The prepared loader, of a class that records its passes while `active`; other kinds as they are."""
    kind = _RECORDED.get(type(prepared))
    if kind is None:
        return prepared
    own: Any = object.__new__(kind)
    vars(own).update(vars(prepared), active=active)
    return own


class _Skipping:
    """For the time in which a loader begins a pass, its batch sampler leaves out the first `count` batches, once."""

    def __init__(self, base: Any, count: int, then: Callable[[], None]) -> None:
        self.base = base
        self.original = base.batch_sampler
        # A DataLoader guards its samplers: a running pass would not follow. Ours has not begun.
        object.__setattr__(base, "batch_sampler", _SkippingSampler(self.original, count, then))

    def undo(self) -> None:
        object.__setattr__(self.base, "batch_sampler", self.original)


class _SkippingSampler:
    def __init__(self, batch_sampler: Any, count: int, then: Callable[[], None]) -> None:
        self._sampler = batch_sampler
        self._count = count
        self._then = then

    def __getattr__(self, name: str) -> Any:  # set_epoch, batch_size, sampler, ...
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        # Persistent loader processes keep this object for all later passes.
        count, self._count = self._count, 0
        for _ in range(count):
            next(batches, None)
        if count:
            self._then()
        yield from batches


# ---- for the user's loop


class ResumedBatches:
    """The batches that the next pass over `loader` has to take; see `GossipAccelerator.resumed_batches`."""

    def __init__(self, loader: Any, replay: bool | None = None) -> None:
        self.loader = loader
        self.replay = replay

    def __iter__(self) -> Iterator[Any]:
        inner = inner_loader(self.loader)
        if isinstance(inner, Recorded):
            inner.go_on(self.replay)
        return iter(self.loader)

    def __len__(self) -> int:
        inner = inner_loader(self.loader)
        return len(self.loader) - (inner.waiting_batches if isinstance(inner, Recorded) else 0)

    def __getattr__(self, name: str) -> Any:  # dataset, batch_size, set_epoch, ...: those of the loader
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def inner_loader(loader: Any) -> Any:
    """The loader that Accelerate prepared, out of what cuts it to equal lengths."""
    return loader.loader if isinstance(loader, EqualSteps) else loader
