"""Accelerate's own collectives, done again by the survivors where a worker is lost in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from dsgdac_accel.distributed.group import WorkerGroup

T = TypeVar("T")


class RepeatsCollectives:
    """Mixed into `GossipAccelerator`. Only under `on_worker_loss="continue"` anything is other than in Accelerate.

    There, what the lost worker would have brought is missing: `gather` returns fewer rows, `reduce` the sum or mean of
    those that are left. All survivors get the same, with the lost worker's part only if it was lost after bringing it.
    Inside `deployed_model` and other sections all of them get WorkersChangedError instead, as with everything that is
    done together there.

    The functions of `accelerate.utils` (`broadcast`, `gather_object`, ...) are not covered: they end the survivors.
    """

    group: WorkerGroup
    _repeating = False
    """Whether a collective is under way that is done again as a whole, and of which another one may be a part."""

    def _repeated(self, communicate: Callable[[], T], what: str) -> T:
        group = getattr(self, "group", None)  # Accelerate may communicate before there is one
        if group is None or group.size == 1 or group.on_loss == "stop" or group.closed or self._repeating:
            return communicate()
        self._repeating = True
        try:
            return group.together(communicate, what, strict=True)
        finally:
            self._repeating = False

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`; after a loss, of the workers that are left."""
        return self._repeated(partial(super().gather, tensor), "`gather`")  # type: ignore[misc]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `Accelerator.gather_for_metrics`; after a loss, of the workers that are left.

        How many samples of the last batch are there twice is Accelerate's count for all workers that the loader was
        prepared for: prepare loaders of evaluation again after a loss.
        """
        return self._repeated(
            partial(super().gather_for_metrics, input_data, use_gather_object),  # type: ignore[misc]
            "`gather_for_metrics`",
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As `Accelerator.reduce`; after a loss, over the workers that are left."""
        return self._repeated(partial(super().reduce, tensor, reduction, scale), "`reduce`")  # type: ignore[misc]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """As `Accelerator.pad_across_processes`; after a loss, to the longest of the workers that are left."""
        return self._repeated(
            partial(super().pad_across_processes, tensor, dim, pad_index, pad_first),  # type: ignore[misc]
            "`pad_across_processes`",
        )

    def wait_for_everyone(self) -> None:
        """As `Accelerator.wait_for_everyone`; lost workers are not waited for."""
        self._repeated(super().wait_for_everyone, "`wait_for_everyone`")  # type: ignore[misc]

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """As `Accelerator.main_process_first`; if the main process is lost in it, the others go on at once."""
        with self._goes_first(self.is_main_process):  # type: ignore[attr-defined]
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """As `Accelerator.local_main_process_first`; if that process is lost in it, the others go on at once."""
        with self._goes_first(self.is_local_main_process):  # type: ignore[attr-defined]
            yield

    @contextmanager
    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        yield
        if first:  # as it was on entry, for others may have become the main process since
            self.wait_for_everyone()
