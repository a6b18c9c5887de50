"""Keeping parameters that are not finite out of the mixing."""

from __future__ import annotations

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import FlatParameters
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup

_DIVERGED = "The run diverged. Lower the learning rate, lengthen the warm-up, or clip the gradients."


class NonFiniteError(RuntimeError):
    """A worker's parameters or gradients are not finite, so the run cannot go on."""


class ChecksArrivals:
    """Mixed into `Mixer`: measures how far the neighbours are, and stops the run where that is not finite.

    On a GPU the host does not wait for the answer: the update is then left out on the device, and the run stops in the
    next step, or when parameters are saved, averaged or released before it.
    """

    group: WorkerGroup
    step: int
    mix_every: int
    per_process: int
    workers: range
    flats: list[FlatParameters]
    exchange: Exchange
    _updates: list[Update]

    def _begin_checks(self) -> None:
        self.checks_late = self.group.device.type == "cuda"
        """Whether to look a step later at what was found of the parameters that arrived."""
        self.neighbor_disagreement: Tensor | float = 0.0
        """||sum_j W_ij x_j / (1 - W_ii) - x_i|| of the last round in which this worker took part: its distance to the
        mean of its neighbours; of several workers in this process their mean."""
        self._unread: tuple[HostCopy, int] | None = None
        """Whether an update was left out, and the step."""

    def _check_arrivals(self) -> None:
        """Keep a neighbour's NaN out."""
        norms = [update.norm() for update in self._updates if update]
        if not self._updates:  # nobody here takes part in the round: what was found in the last one stays
            return
        if not norms:  # everything is frozen
            self.neighbor_disagreement = 0.0
            return
        total = norms[0] if self.per_process == 1 else torch.stack(norms).sum() / self.per_process
        self.neighbor_disagreement = total
        if self.checks_late:
            left_out = torch.isfinite(total).logical_not_().float()
            for update in self._updates:
                update.left_out = left_out
            self._unread = HostCopy(left_out), self.step
        elif not bool(torch.isfinite(total)):
            self._raise_too_far() if self._all_arrived_finite() else self._raise_non_finite(self.step)

    def settle_arrivals(self) -> None:
        """Look at what was found in the step before, if nobody has yet.

        Raises:
            NonFiniteError: the parameters of a neighbour, or of this worker, were not finite; nothing was mixed.
        """
        unread, self._unread = self._unread, None
        if unread is not None and unread[0].is_set():
            self._raise_non_finite(unread[1], perhaps=", or too far away for the square of the distance")

    def number_of(self, worker: int) -> int:
        """What messages call a worker: its number before any was lost."""
        process, here = divmod(worker, self.per_process)
        return self.group.original_ranks[process] * self.per_process + here

    def _all_arrived_finite(self) -> bool:
        numbers = range(len(self.flats[0].buffers))
        return all(bool(torch.isfinite(update.dense(number)).all()) for update in self._updates for number in numbers)

    def _raise_non_finite(self, step: int, perhaps: str = "") -> None:
        mine = [
            self.number_of(worker)
            for worker, flat in zip(self.workers, self.flats, strict=True)
            if any(not bool(torch.isfinite(buffer.data).all()) for buffer in flat.buffers)
        ]
        plans = [self.exchange.plan(step // self.mix_every, here) for here in range(self.per_process)]
        peers = {peer for plan in plans for peer in plan.weights}
        suspects = mine or sorted(map(self.number_of, self.exchange.elsewhere(peers)))
        who = f"worker {suspects[0]}" if len(suspects) == 1 else f"one of workers {suspects}"
        self._raise(f"the parameters of {who} are not finite at step {step}{'' if mine else perhaps}")

    def _raise_too_far(self) -> None:
        me, dtype = self.number_of(self.workers[0]), self.flats[0].buffers[0].data.dtype
        message = f"worker {me} and its neighbours are too far apart at step {self.step}"
        self._raise(message, f": the square of their distance is beyond {dtype}")

    def _raise(self, message: str, detail: str = "") -> None:
        self.group.report(message)
        raise NonFiniteError(f"{message}{detail}. {_DIVERGED}")
