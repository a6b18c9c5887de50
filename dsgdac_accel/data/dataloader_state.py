"""The state of a prepared data loader: the order of its passes, and the position in the running one.

A resumed run reads the same batches with the same random numbers as an unbroken one. A pass follows from the state at
its start (samplers, generators, global random streams) and from the number of batches taken. Accelerate's loaders
fetch one batch ahead, so the random streams before that fetch are part of the state, too: a dataset that augments in
this process draws from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import IterableDataset

from dsgdac_accel.data.loaders import (
    batch_sampler_of,
    generator_state,
    is_generator,
    keep_order,
    new_generator,
    number_passes,
    own_processes,
    parts_of,
    set_generator_state,
)
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import random_state, set_random_state

_COUNTERS = ("iteration", "epoch", "seed", "initial_seed")
"""Attributes from which samplers and loaders derive an order."""

_NOTHING = object()

AroundPass = Callable[[Any], AbstractContextManager["OpenPass"]]


@dataclass(eq=False)
class OpenPass:
    """A pass that a loop is in the middle of."""

    loader: weakref.ref[Any]
    fresh: bool = False
    """Whether it has handed out a batch since this was last set to False."""
    last: bool = False
    """Whether the batch that it handed out is its last."""
    steps: int = 0
    """Optimizer steps for which it handed out at least one batch, after the step before."""
    evaluation: bool = False
    """Whether it counted as one of evaluation when it began."""
    trained_in: bool = False
    """Whether an optimizer step belongs to it."""


def unwatched_pass(loader: Any) -> AbstractContextManager[OpenPass]:
    """Return the context for a pass of which nobody takes notice."""
    return nullcontext(OpenPass(weakref.ref(loader)))


@dataclass(frozen=True)
class DataPosition:
    """Position of a run in the data of one loader."""

    epoch: int
    """The running pass, or the next one between passes; counted from 0."""
    batches: int
    """Batches of it that this worker has taken."""


# ---- order of the next pass


def order_state(loader: Any) -> list[dict[str, Any]]:
    """Return counters, seeds and generators of a loader and its chain of samplers, as plain values."""
    return [
        {
            "kind": type(part).__name__,
            "counters": {name: vars(part)[name] for name in _COUNTERS if type(vars(part).get(name)) is int},
            "generators": {name: generator_state(v) for name, v in vars(part).items() if is_generator(v)},
        }
        for part in _stateful_parts(loader)
    ]


def set_order_state(loader: Any, state: list[dict[str, Any]], lenient: bool = False) -> None:
    """Restore what `order_state` returned.

    Args:
        loader: the loader to set.
        state: of a loader built the same way.
        lenient: skip samplers that differ from the saved ones.

    Raises:
        ValueError: the loader is built of other samplers than the saved one.
    """
    parts = _stateful_parts(loader)
    kinds, saved_kinds = [type(part).__name__ for part in parts], [part["kind"] for part in state]
    if kinds != saved_kinds and not lenient:
        raise ValueError(
            f"the checkpoint is of a loader made of {', '.join(saved_kinds)}, and this one is made of "
            f"{', '.join(kinds)}. Prepare the loader as it was when saved."
        )
    remaining = list(state)
    for part in parts:
        match = next((saved for saved in remaining if saved["kind"] == type(part).__name__), None)
        if match is None:
            continue
        remaining.remove(match)
        for name, value in match["counters"].items():
            if type(vars(part).get(name)) is int:
                setattr(part, name, value)
        for name, value in match["generators"].items():
            generator = vars(part).get(name)
            if generator is None and isinstance(value, torch.Tensor):
                generator = new_generator(part)
                setattr(part, name, generator)
            if generator is not None:
                set_generator_state(generator, value)


def _stateful_parts(loader: Any) -> list[Any]:
    return [part for part in parts_of(loader) if hasattr(part, "__dict__")]


# ---- recorded passes


@dataclass(eq=False)
class _Pass:
    """Progress of one training pass. The first five fields go into checkpoints."""

    order: list[dict[str, Any]]
    """`order_state` at its start."""
    random: dict[str, Any]
    """Global random streams at its start."""
    taken: int = 0
    """Batches handed out."""
    fetched_at: dict[str, Any] | None = None
    """Global random streams before the fetch of the batch that is not handed out yet."""
    passes: int = 0
    """Passes begun before this one."""

    fetches: int = 0
    """Fetches begun, those included that are skipped or not reported."""
    saved_random: dict[str, Any] | None = None
    """Global random streams when the checkpoint was saved, until a resumed pass has caught up with it."""
    skips_in_order: bool = False
    """Whether a resumed pass skips the batches taken before in the sampler, without fetching them."""
    open: Any = None
    """Its `OpenPass`."""
    end: Any = None
    """Ends it, see `keep_order`."""
    looked: bool = False
    """Whether it only took a sample: another pass went on since."""

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("order", "random", "taken", "fetched_at", "passes")}


class PassRecorder:
    """Records the training passes over one prepared loader, and resumes one in its middle.

    The loader owns it and calls it around each pass and each fetch. The recorder reads the loader; on resuming it also
    sets the loader's samplers and generators, and the global random streams.

    Args:
        loader: a `RecordedShard` or `RecordedDispatcher`.
        active: whether a pass that begins now may be one of training. Others are not recorded.
        around: returns a context for a pass over the given loader, which is entered when the pass begins. It gives the
            `OpenPass` in which the batches are noted.
        number: returns the number by which a pass is ordered, from that of the training passes before it; None if the
            order is set elsewhere.
        group: the workers, if worker 0 reads the batches of all of them.
    """

    def __init__(
        self,
        loader: Any,
        active: Callable[[], bool],
        around: AroundPass = unwatched_pass,
        number: Callable[[int], int | None] = lambda ended: None,
        group: WorkerGroup | None = None,
    ) -> None:
        self.loader = loader
        self.active = active
        self.around = around
        self.number = number
        self.group = group
        self._passes = 0
        """Training passes that have ended or were left."""
        self._begun = 0
        """Passes begun, also those that only took a sample."""
        self._open: list[_Pass] = []  # recorded ones, the outermost first
        self._advancing: _Pass | None = None  # the pass whose next batch is being fetched
        self._handed_out: OpenPass | None = None  # the pass of the batch that was handed out last
        self._loaded: _Pass | None = None  # from a checkpoint, until it is trained in
        self._resumes = False
        self._replay: bool | None = None

    @property
    def loader(self) -> Any:
        """The loader that owns this recorder. Held weakly: it must end with its last reference."""
        return self._loader()

    @loader.setter
    def loader(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loader, which sets itself, and the running pass: a copy begins a pass of its own."""
        return {name: value for name, value in vars(self).items() if name != "_loader"} | {
            "group": None,
            "_open": [],
            "_advancing": None,
            "_handed_out": None,
        }

    # ---- iteration

    def iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield from `batches`, the loader's own iteration, and record the pass.

        A pass counts if it was trained in, or reached its end and was none of evaluation. Others, such as a look at a
        sample, leave the order and the position as they were.
        """
        loader, active, handed_out = self.loader, self.active(), self._handed_out
        inside_another = any(outer is not None for outer in loader.gradient_state.dataloader_references)
        self._begun += 1
        end, ended, loaded = keep_order([loader]), False, self._loaded
        for earlier in reversed(self._open):
            if earlier.taken == 1 and not earlier.open.trained_in:  # maybe a look at a sample, whose iterator lives on
                earlier.end(False)
                keep_order([loader])  # new copies
        resumed = loaded if self._resumes and active else None
        self._resumes = self._resumes and not active
        if loaded is None:
            self._number_next()
        with self.around(loader) as open_pass, own_processes(loader) if self._open else nullcontext():
            pass_ = None
            if active:
                pass_ = _Pass(order_state(loader), random_state()) if resumed is None else self._resumed(resumed)
                pass_.open, pass_.end = open_pass, end
                pass_.passes, pass_.fetches = self.passes_begun, loader.unreported_fetches
                self._open.append(pass_)
                batches = batches if resumed is None else self._rest_of(batches, pass_)
            try:
                for batch in self._advance(batches, open_pass, pass_):
                    open_pass.fresh, open_pass.last = True, loader.end_of_dataloader
                    self._handed_out = open_pass
                    yield batch
                ended = active and not open_pass.evaluation
            except BaseException:  # left in its middle: Accelerate still counts the loader as the one being read
                if inside_another or not active or open_pass.evaluation:
                    _end_one_pass(loader)
                raise
            finally:
                looked = pass_ is not None and pass_.looked
                counts = (ended or open_pass.trained_in or open_pass.steps > 1) and not looked
                if pass_ is not None and counts:
                    self._end_looks(pass_)
                self._open = [other for other in self._open if other is not pass_]
                if counts:
                    end(True)
                    self._passes += 1
                    self._loaded = None
                elif self._handed_out in (open_pass, handed_out) and not looked:
                    end(False)
                    self._handed_out, self._loaded = handed_out, loaded

    def _end_looks(self, pass_: _Pass) -> None:
        """Let a pass go on: what others have drawn that took one sample of the loader leaves no trace."""
        if pass_.taken and pass_.looked:
            self._open, pass_.looked = [pass_, *self._open], False
        for other in reversed(self._open):
            if pass_.taken and other is not pass_ and other.taken == 1:
                if self._open.index(other) > self._open.index(pass_):
                    other.end(False)
                other.looked, other.open.fresh = True, False
        self._open = [other for other in self._open if not other.looked]

    @property
    def passes_begun(self) -> int:
        """Training passes begun, including those left by `break`."""
        return self._passes + sum(pass_.open.trained_in for pass_ in self._open)

    @property
    def trained_in(self) -> bool:
        """Whether an optimizer step belongs to the pass that handed out a batch last."""
        return self._handed_out is not None and self._handed_out.trained_in

    def end_here(self) -> None:
        """Make the batch that was handed out last the last one of its pass."""
        self.loader.end_of_dataloader = True
        if self._handed_out is not None:
            self._handed_out.last = True

    def _number_next(self) -> None:
        number = self.number(self.passes_begun)
        if number is not None:
            number_passes(self.loader, number)

    def begin_elsewhere(self) -> None:
        """Give a copy of the loader, such as of Accelerate's `skip_first_batches`, the order of the next pass."""
        if self._loaded is None:
            self._number_next()
        self._loaded = None

    def _resumed(self, loaded: _Pass) -> _Pass:
        self._loaded = None
        if loaded.saved_random is None:
            return replace(loaded, random=random_state())
        set_random_state(loaded.random)
        return replace(loaded)

    def _agree(self) -> None:
        """Raise RuntimeError if the workers are in different passes, where worker 0 reads for all. Then collective."""
        what = "reading a batch of a stream for all workers (one worker alone reads the loader's `dataset`)"
        begun = [] if self.group is None else self.group.all_gather_object(self._begun, what)
        other = next((rank for rank, count in enumerate(begun) if count != begun[0]), None)
        if self.group is not None and other is not None:
            first, second = self.group.members.named([0]), self.group.members.named([other])
            raise RuntimeError(
                f"worker 0 reads this loader for all workers (dispatch_batches), so all must begin every pass over it; "
                f"{first} is in pass {begun[0]}, {second} in pass {begun[other]}. To look at a sample on one worker, "
                f"read the loader's `dataset`."
            )

    def _advance(self, batches: Iterator[Any], open_pass: OpenPass, pass_: _Pass | None) -> Iterator[Any]:
        while True:
            # An evaluation may read the same loader while a training pass waits between two batches.
            outer, self._advancing = self._advancing, pass_
            try:
                if not open_pass.last:
                    self._agree()
                if pass_ is not None:
                    self._end_looks(pass_)
                batch = next(batches, _NOTHING)
            finally:
                self._advancing = outer
            if batch is _NOTHING:
                return
            if pass_ is not None:
                pass_.taken += 1
            yield batch

    def _rest_of(self, batches: Iterator[Any], pass_: _Pass) -> Iterator[Any]:
        """Yield the batches of a loaded pass that were not taken."""
        if self._can_skip_in_order():
            pass_.skips_in_order = True
            pass_.fetches += pass_.taken
            count = pass_.taken * self.loader.batches_per_fetch
            with _first_batches_skipped(self.loader.base_dataloader, count, pass_.fetched_at):
                batch = next(batches, _NOTHING)
        else:
            for _ in range(pass_.taken):
                next(batches, None)
            batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            return
        self._catch_up(pass_)  # unless the fetch of a further batch has done it
        yield batch
        yield from batches

    def _can_skip_in_order(self) -> bool:
        base = self.loader.base_dataloader
        if self._replay or batch_sampler_of(base) is None or isinstance(base.dataset, IterableDataset):
            return False
        # Loader processes have random streams of their own, which only replaying brings to the same state.
        return base.num_workers == 0 or self._replay is False

    def before_fetch(self) -> None:
        """Keep the random streams as they are before a fetch.

        A resumed pass draws from the streams at its start while it fetches the batches that it skips, and nothing is
        kept. The streams are set to the saved ones at the fetch whose batch had not been handed out, and at the next.
        """
        pass_ = self._advancing
        if pass_ is None:
            return
        pass_.fetches += 1
        if pass_.saved_random is not None:
            if pass_.fetches == pass_.taken + 1 and not pass_.skips_in_order and pass_.fetched_at is not None:
                set_random_state(pass_.fetched_at)
            elif pass_.fetches == pass_.taken + 2:
                self._catch_up(pass_)
            else:
                return
        if self.loader.base_dataloader.num_workers == 0:
            pass_.fetched_at = random_state()

    @staticmethod
    def _catch_up(pass_: _Pass) -> None:
        if pass_.saved_random is not None:
            set_random_state(pass_.saved_random)
            pass_.saved_random = None

    # ---- position

    def _running(self) -> _Pass | None:
        """Return the pass that a loop is in the middle of, or that was loaded and not resumed yet."""
        trained = [pass_ for pass_ in self._open if pass_.open.trained_in]
        if not trained and self._loaded is not None:
            return self._loaded
        return next((pass_ for pass_ in trained or self._open if pass_.taken and not pass_.open.last), None)

    def _next_iteration(self) -> int:
        # Accelerate counts a pass after its last batch was taken and used; here it ends with the taking.
        return self.loader.iteration + any(pass_.taken and pass_.open.last for pass_ in self._open)

    @property
    def position(self) -> DataPosition:
        """Position of training in the loader."""
        running = self._running()
        if running is not None:
            return DataPosition(max(running.order[0]["counters"]["iteration"], running.passes), running.taken)
        return DataPosition(max(self._next_iteration(), self.passes_begun), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and order as plain values."""
        running = self._running()
        if running is not None:
            return {"running": running.state(), "global_batches": self._splits_batches()}
        order = order_state(self.loader)
        order[0]["counters"]["iteration"] = self._next_iteration()
        return {"running": None, "order": order, "passes": self.passes_begun}

    def _splits_batches(self) -> bool:
        """Return whether one batch is split over all workers, so that their number does not change batches per pass."""
        sampler = batch_sampler_of(self.loader.base_dataloader)
        return bool(getattr(self.loader, "split_batches", False) or getattr(sampler, "split_batches", False))

    def load_state_dict(self, state: Mapping[str, Any], random: dict[str, Any] | None) -> None:
        """Take a saved position. After `resume` the next pass is the rest of the saved one, otherwise all of it.

        Args:
            state: from `state_dict`.
            random: global random streams when it was saved. None for a state that was rescaled to another number of
                workers: the streams then stay as they are, and samplers that differ from the saved ones are skipped.

        Raises:
            ValueError: the loader is built of other samplers than the saved one.
        """
        running = state["running"]
        now = state if running is None else running
        set_order_state(self.loader, now["order"], lenient=random is None)
        self._passes = now["passes"]
        self._loaded = None if running is None else _Pass(**running, saved_random=random)
        # As Accelerate's stateful loaders do, over which a script writes its resumed loop like any other.
        self._resumes = self._loaded is not None and self.loader.use_stateful_dataloader

    def resume(self, replay: bool | None) -> None:
        """Let the next pass be the rest of the loaded one. See `GossipAccelerator.resumed_batches` for `replay`."""
        self._resumes, self._replay = self._loaded is not None, replay

    @property
    def loaded_batches(self) -> int:
        """Batches taken of the loaded pass; 0 once a pass is trained in."""
        trained = any(pass_.open.trained_in for pass_ in self._open)
        return 0 if self._loaded is None or trained else self._loaded.taken

    @property
    def skipped_batches(self) -> int:
        """Batches that the next pass does not hand out because they were taken before."""
        return self.loaded_batches if self._resumes else 0


def _end_one_pass(loader: Any) -> None:
    """Take the newest pass over `loader` out of the ones that Accelerate counts as being read."""
    references = loader.gradient_state.dataloader_references
    newest = max((number for number, outer in enumerate(references) if outer is loader), default=None)
    if newest is not None:
        del references[newest]
        loader.gradient_state.dataloader_references = references


def _blank(kind: type) -> Any:
    return object.__new__(kind)


def _reduce(loader: Any) -> tuple:
    return _blank, (type(loader),), vars(loader)  # `__class__` claims to be that of the loader inside


def _set_state(loader: Any, state: dict[str, Any]) -> None:
    vars(loader).update(state)
    loader.recorder.loader = loader


class RecordedShard(DataLoaderShard):
    """A `DataLoaderShard` with a `recorder` of its passes."""

    recorder: PassRecorder
    __reduce__ = _reduce
    __setstate__ = _set_state
    batches_per_fetch = 1
    unreported_fetches = 1  # Accelerate reports a fetch by `_update_state_dict`, except the first of a pass

    def __iter__(self) -> Iterator[Any]:
        return self.recorder.iterate(super().__iter__())

    def _update_state_dict(self) -> None:
        super()._update_state_dict()
        self.recorder.before_fetch()


class RecordedDispatcher(DataLoaderDispatcher):
    """A `DataLoaderDispatcher` with a `recorder` of its passes."""

    recorder: PassRecorder
    __reduce__ = _reduce
    __setstate__ = _set_state
    unreported_fetches = 0

    @property
    def batches_per_fetch(self) -> int:
        """Batches of the base loader that make up one batch of each worker."""
        return 1 if self.split_batches else self.state.num_processes

    def __iter__(self) -> Iterator[Any]:
        return self.recorder.iterate(super().__iter__())

    def _fetch_batches(self, iterator: Any) -> Any:
        self.recorder.before_fetch()
        return super()._fetch_batches(iterator)


_RECORDED: dict[type, type] = {DataLoaderShard: RecordedShard, DataLoaderDispatcher: RecordedDispatcher}


def record_passes(
    prepared: Any,
    loaders: list[Any],
    active: Callable[[], bool],
    around: AroundPass = unwatched_pass,
    number: Callable[[int], int | None] = lambda ended: None,
    group: WorkerGroup | None = None,
) -> Any:
    """Return a prepared loader that records its passes while `active`, and put it in place of `prepared` in `loaders`.

    Further arguments as for `PassRecorder`. Returns loaders of other classes as they are.
    """
    kind = _RECORDED.get(type(prepared))
    if kind is None:
        return prepared
    # A new object, because Accelerate's loaders do not allow assigning `__class__`.
    own: Any = object.__new__(kind)
    vars(own).update(vars(prepared), recorder=PassRecorder(own, active, around, number, group))
    if own.use_stateful_dataloader:
        own.base_dataloader.load_state_dict({})  # Accelerate has begun a pass, whose order is drawn already
    loaders[:] = [own if loader is prepared else loader for loader in loaders]
    return own


def recorder_of(loader: Any) -> PassRecorder | None:
    """Return the recorder of a prepared loader, also through `EqualSteps`; None for other loaders."""
    recorder = getattr(loader, "recorder", None)
    return recorder if isinstance(recorder, PassRecorder) else None


@contextmanager
def _first_batches_skipped(base: Any, count: int, random: dict[str, Any] | None) -> Iterator[None]:
    """Make a pass that begins inside skip the first `count` batches in the sampler, then set the random streams."""
    original = batch_sampler_of(base)
    place = "sampler" if base.batch_sampler is None else "batch_sampler"
    # A DataLoader forbids changing its sampler, since a running pass would not follow; this pass has not begun.
    object.__setattr__(base, place, _SkippingSampler(original, count, random))
    try:
        yield
    finally:
        object.__setattr__(base, place, original)


class _SkippingSampler:
    def __init__(self, batch_sampler: Any, count: int, random: dict[str, Any] | None) -> None:
        self._sampler = batch_sampler
        self._count = count
        self._random = random

    def __getattr__(self, name: str) -> Any:  # set_epoch, batch_size, sampler, ...
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        # Only once: persistent loader processes keep this object for all later passes.
        count, self._count = self._count, 0
        for _ in range(count):
            next(batches, None)
        if count and self._random is not None:
            set_random_state(self._random)
        yield from batches


# ---- for loops


def epoch_of(loader: Any) -> int | None:
    """Return the epoch (0-based) of the running pass over a prepared loader; None for `loader` None."""
    if loader is None:
        return None
    recorder = recorder_of(loader)
    return max(getattr(loader, "iteration", 0), 0 if recorder is None else recorder.passes_begun - 1)


class ResumedBatches:
    """The batches that the next pass over `loader` has to take.

    After loading a checkpoint from the middle of a pass, these are the rest of that pass; otherwise the whole pass.

    Args:
        loader: a prepared loader.
        replay: how to skip the batches taken before, see `GossipAccelerator.resumed_batches`.
    """

    def __init__(self, loader: Any, replay: bool | None = None) -> None:
        self.loader = loader
        self.replay = replay

    def __iter__(self) -> Iterator[Any]:
        recorder = recorder_of(self.loader)
        if recorder is not None:
            recorder.resume(self.replay)
        return iter(self.loader)

    def __len__(self) -> int:
        recorder = recorder_of(self.loader)
        return len(self.loader) - (0 if recorder is None else recorder.loaded_batches)

    def __getattr__(self, name: str) -> Any:  # dataset, batch_size, set_epoch, ... of the loader
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def data_position(loader: Any) -> DataPosition:
    """Return the position of training in a prepared loader.

    Raises:
        TypeError: the loader was not prepared.
    """
    recorder = recorder_of(loader)
    if recorder is None:
        raise TypeError(
            f"positions are known for loaders that were passed through `prepare`; got a {type(loader).__name__}."
        )
    return recorder.position
