"""The same number of steps on all workers, even if their data differ in length."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dsgdac_accel.data.dataloader_state import recorder_of
from dsgdac_accel.distributed.group import WorkerGroup


def known_length(loader: Any) -> int | None:
    """Return the number of batches in `loader`, or None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def inner_loader(loader: Any) -> Any:
    """Return the loader inside `EqualSteps`; other loaders as they are."""
    return loader.loader if isinstance(loader, EqualSteps) else loader


def _always(loader: Any) -> bool:
    return True


class EqualSteps:
    """An iterable of this worker's batches that ends each pass after the same number of steps on all workers.

    Every mix needs all workers, so all must take the same number of steps. If all lengths are known, the workers agree
    on the shortest once, at construction. Otherwise they ask each other before every batch whether it is the last one
    of any worker, which costs a small collective per batch. Construction and iteration are collective.

    Args:
        loader: this worker's batches.
        group: the workers.
        active: whether a pass over the given loader that begins now is cut. Evaluation must see all its data. Others
            are cut once an optimizer step was taken in them. Default: always.
    """

    def __init__(self, loader: Iterable[Any], group: WorkerGroup, active: Callable[[Any], bool] = _always) -> None:
        self.loader = loader
        self.group = group
        self.active = active
        self.lengths = group.all_gather_object(known_length(loader), "comparing the lengths of data loaders")
        known = [length for length in self.lengths if length is not None]
        self.steps = min(known) if len(known) == group.size else None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the workers, whose connections belong to this process; a copy still ends after `steps`."""
        return vars(self) | {"group": None, "_warned": True}

    @property
    def needed(self) -> bool:
        """Whether the workers' lengths differ or are unknown. If not, the loader can be used as it is."""
        return self.steps is None or len(set(self.lengths)) > 1

    def __len__(self) -> int:
        if not self.active(self.loader):
            return len(self.loader)  # type: ignore[arg-type]
        if self.steps is None:
            raise TypeError("the number of batches is unknown on some worker")
        return self.steps

    def __getattr__(self, name: str) -> Any:  # dataset, batch_size, set_epoch, ... of the loader
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        recorder = recorder_of(self.loader)
        active = self.active(self.loader)
        if recorder is None and not active:
            yield from self.loader
            return
        batches = iter(self.loader)
        pairs = self._with_last(batches)
        # A resumed pass starts after the batches that were taken before.
        last, taken = False, 0 if recorder is None else recorder.skipped_batches
        while not last:
            batch, last_here = next(pairs, (None, None))
            # A script that trains in eval mode shows at its first step that this is no evaluation.
            active = active or (recorder is not None and recorder.trained_in)
            last_of_all = self._last_of_all(taken + 1, last_here) if active else last_here
            if last_of_all is None:  # some worker has no batch at all
                break
            last = last_of_all
            taken += 1
            if last and active:
                self._mark_end()
            yield batch
        if last_here:
            next(pairs, None)  # lets the loader end its pass by itself
        elif last_here is not None:
            self._warn_of_rest(taken)
            self._end_early(batches)

    def _with_last(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield each batch and whether it is this worker's last. Accelerate's loaders know; for others, look ahead."""
        if hasattr(self.loader, "end_of_dataloader"):
            for batch in batches:
                yield batch, self.loader.end_of_dataloader
            return
        nothing = object()
        batch = next(batches, nothing)
        while batch is not nothing:
            following = next(batches, nothing)
            yield batch, following is nothing
            batch = following

    def _last_of_all(self, number: int, last_here: bool | None) -> bool | None:
        """Return whether batch `number` is the last that all workers have; None if some worker lacks this one."""
        if self.steps is not None:
            return number == self.steps if number <= self.steps else None
        if len(self.lengths) == 1:
            return last_here
        if self.group is None:
            raise RuntimeError(
                "a copy of a prepared loader without a length cannot ask the other workers where a pass ends. Prepare "
                "another loader on all workers."
            )
        what = "asking whether every worker has another batch (one worker alone reads the loader's `dataset`)"
        states = self.group.all_gather_object(last_here, what)
        return None if None in states else any(states)

    def _warn_of_rest(self, taken: int) -> None:
        longest = self.lengths.index(max(self.lengths, key=lambda length: length or 0))
        if self._warned or (self.steps is not None and self.group.rank != longest):
            return
        self._warned = True
        if self.steps is None:
            message = f"{self.group.members.me} has more batches than another; this pass stops after {taken}."
        else:
            message = (
                f"the workers have different numbers of batches ({', '.join(map(str, self.lengths))}); "
                f"every pass stops at the shortest, {self.steps}."
            )
        warnings.warn(message, stacklevel=3)

    def _mark_end(self) -> None:
        """Mark this batch as the last for Accelerate, so that all workers step an incomplete accumulation window."""
        recorder = recorder_of(self.loader)
        if recorder is not None:
            recorder.end_here()
        elif hasattr(self.loader, "end_of_dataloader"):
            self.loader.end_of_dataloader = True

    def _end_early(self, batches: Iterator[Any]) -> None:
        """End a pass before its loader does, and count the epoch as an Accelerate loader does at its end."""
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        if hasattr(self.loader, "iteration"):
            self.loader.iteration += 1
        if hasattr(self.loader, "end"):
            self.loader.end()
