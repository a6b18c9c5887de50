"""Keeping gradients and parameters that are not finite out of the run, without waiting for a GPU.

A worker whose gradient is not finite skips its local update and mixes all the same (`GradientGuard`). Parameters that
are not finite are never mixed and end the run (`ParameterGuard`). On a GPU both are decided on the device; the host
reads the outcome a step later. An optimizer that cannot skip a step on the device must be left uncalled: the host then
reads the flags once the whole mix is queued, so that the device still has work when the host goes on.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

from dsgdac_accel.core.agreement import Agreement, Vote
from dsgdac_accel.core.copies import Copies, Use
from dsgdac_accel.core.gradients import nonfinite, nonfinite_flags, skips_on_device
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.slots import Slots
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A worker's parameters or gradients are not finite, so the run cannot continue."""


class ParameterGuard:
    """Measures how far the neighbors are, and ends the run if that is not finite.

    May only set `Update.skip`, and drop the update before it ends the run.
    """

    def __init__(self, group: WorkerGroup, rounds: Rounds, slots: Slots, copies: Copies, agreement: Agreement) -> None:
        self.group = group
        self.rounds = rounds
        self.slots = slots
        self.copies = copies
        self.agreement = agreement
        self._disagreement = 0.0
        self._vote: Vote | None = None
        """That of the last round in which this worker took part, until it is resolved."""
        self._round = 0

    @property
    def disagreement(self) -> float:
        """||sum_j W_ij s_j / (1 - W_ii) - s_i|| of the last round in which this worker took part.

        It is the distance of the worker to the mean of its neighbors, averaged over several local workers. On a GPU,
        reading it waits until the mix of that round is done.
        """
        return self._disagreement if self._vote is None else _mean_distance(self._vote.read())

    @disagreement.setter
    def disagreement(self, value: float) -> None:
        self._disagreement, self._vote = value, None

    def vote(self, updates: Sequence[Update], round_: int) -> None:
        """Vote with the squared distances to the neighbors, unless every local worker sits the round out."""
        self._round = round_
        if updates:
            squares = torch.stack([update.square() for update in updates])
            self._vote = self.agreement.vote("distance", squares, self._read)

    def let_skip(self, updates: Iterable[Update]) -> None:
        """Let the device skip the updates if a distance is not finite, where the host looks at it later."""
        if self._vote is not None:
            skip = nonfinite(self._vote.sums.amax())
            for update in updates:
                update.skip = skip

    def _read(self, squares: list[float], step: int) -> None:
        """Keep the distance that was voted on. Raises NonFiniteError if it is not finite; nothing was mixed then."""
        self.disagreement = _mean_distance(squares)
        if math.isfinite(self._disagreement):
            return
        perhaps = ", or too far away for the square of the distance"
        if self.copies.use is Use.UPDATE:  # the differences are still there
            parts = [part for copy in self.copies.differences for part in copy.buffers]
            perhaps = ""
            if not self._any_nonfinite(parts):
                message = f"worker {self.rounds.workers[0]} and its neighbors are too far apart at step {step}"
                self._raise(message, f": the square of their distance is beyond {parts[0].dtype}")
        values = self.slots.values()
        mine = [worker for worker, own in zip(self.rounds.workers, values, strict=True) if self._any_nonfinite(own)]
        plans = [self.rounds.plan(self._round, local) for local in range(self.rounds.local_workers)]
        suspects = sorted(mine or self.rounds.elsewhere({neighbor for plan in plans for neighbor in plan.weights}))
        who = f"worker {suspects[0]}" if len(suspects) == 1 else f"one of workers {suspects}"
        self._raise(f"the parameters of {who} are not finite at step {step}{'' if mine else perhaps}")

    def _any_nonfinite(self, values: Iterable[Tensor | None]) -> bool:
        """Return whether some of the values are not finite, in any process of this worker."""
        finite = all(bool(torch.isfinite(value).all()) for value in values if value is not None)
        return self.group.row.any(not finite, "looking for the shard that is not finite")

    def _raise(self, message: str, detail: str = "") -> None:
        self.copies.drop()
        self.group.report(message)
        advice = "The run diverged. Lower the learning rate, lengthen the warm-up, or clip the gradients."
        raise NonFiniteError(f"{message}{detail}. {advice}")


def _mean_distance(squares: Sequence[float]) -> float:
    return sum(map(math.sqrt, squares)) / len(squares)


class GradientGuard:
    """Skips the local updates of workers whose gradient is not finite, and counts them.

    `find_nonfinite` begins before the mix, `allows_step` and `put_back` enclose the optimizer's step. May only hide
    gradients and set the optimizer's `found_inf`.

    Args:
        optimizer: takes the local step.
        slots: the parameters that it trains.
        rounds: the workers of this process.
        group: the workers.
        agreement: of the same mixer.
        limit: this many skipped updates of one worker in a row end the run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Slots,
        rounds: Rounds,
        group: WorkerGroup,
        agreement: Agreement,
        limit: int,
    ) -> None:
        self.optimizer = optimizer
        self.slots = slots
        self.rounds = rounds
        self.group = group
        self.agreement = agreement
        self.limit = limit
        self.skipped = 0
        """Local updates that the workers of this process have skipped."""
        self.in_a_row = [0] * slots.local_workers
        """[local worker] the number of its last updates that were skipped in a row."""
        self._by_worker: list[list[Parameter]] = []
        self._vote: Vote | None = None
        """[local worker] in how many of its processes a gradient is not finite."""
        self._scaler: Any = None
        self._hidden: list[tuple[Parameter, Tensor]] = []
        self._sets_found_inf = False
        """Whether this guard lets the optimizer skip its step on the device, without the host."""

    def find_nonfinite(self, step: int, scaler: Any = None) -> None:
        """Begin to find the gradients that are not finite. On a GPU the host does not wait for them here.

        Args:
            step: the present one, for messages.
            scaler: the GradScaler of fp16 training; an overflow on any worker then counts on all workers.
        """
        self._hidden.clear()  # the last local step raised if `put_back` was not called, and there are new gradients now
        self.put_back()
        self._by_worker = self.slots.by_worker(self.slots.find())
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is None:
            flags = nonfinite_flags(self._by_worker, self.group.device)
        else:
            flags = self._agree_on_overflow(step).expand(len(self._by_worker))
        self._vote = self.agreement.vote("gradient", flags, self._count)

    def allows_step(self) -> bool:
        """Return whether to call the optimizer at all, and hide the gradients that it must skip until `put_back`.

        Raises:
            NonFiniteError: too many skipped updates in a row.
        """
        vote = self._vote
        assert vote is not None, "`find_nonfinite` comes first"
        may_skip = not vote.resolved and self._scaler is None and len(self._by_worker) == 1
        if may_skip and skips_on_device(self.optimizer):
            optimizer: Any = self.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, vote.sums[0].clamp(max=1.0).float()
            self._sets_found_inf = True
            return True
        vote.resolve()
        found = list(itertools.compress(self._by_worker, vote.read()))
        if len(found) == len(self._by_worker):
            return False
        for parameter in itertools.chain(*found):  # optimizers skip a parameter without a gradient, and its state
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
        return True

    def _agree_on_overflow(self, step: int) -> Tensor:
        """Return 1 if any worker overflowed, (1,), so that loss scales stay equal; the scaler then skips by itself."""
        if self._scaler._per_optimizer_states[id(self.optimizer)]["stage"] is OptState.READY:
            self._scaler.unscale_(self.optimizer)
        flags = list(self._scaler._found_inf_per_device(self.optimizer).values())  # of each device with gradients
        found = torch.zeros(1, device=self.group.device)
        for flag in flags:
            found = torch.maximum(found, flag.to(found.device).view(1))
        self.group.all_reduce_max_(found, f"comparing fp16 overflows at step {step}")
        for flag in flags:
            flag.copy_(found.view(flag.shape))
        return found

    def put_back(self) -> None:
        """Undo `allows_step`, after the local step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        if self._sets_found_inf:
            for name in ("grad_scale", "found_inf"):
                vars(self.optimizer).pop(name, None)
            self._sets_found_inf = False

    def metrics(self) -> dict[str, float]:
        """Return the number of local updates that were skipped."""
        return {"nonfinite_steps": float(self.skipped)}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; once the mixer has read what the last step has found, they are complete."""
        return {"nonfinite_steps": self.skipped, "consecutive_nonfinite": list(self.in_a_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved counts."""
        self.skipped, self.in_a_row = state["nonfinite_steps"], list(state["consecutive_nonfinite"])

    def _count(self, flags: list[float], step: int) -> None:
        # Overflows while the loss scale is still falling are how fp16 training finds its scale.
        is_search = self._scaler is not None and any(flags) and self._scaler.get_scale() > 1
        for local, (worker, flag) in enumerate(zip(self.rounds.workers, flags, strict=True)):
            if not flag or is_search:
                self.in_a_row[local] = 0
                continue
            self.skipped += 1
            self.in_a_row[local] += 1
            where = f"worker {worker}, step {step}"
            if self.group.row.rank == 0:  # a sharded worker says it once
                logger.warning("%s: the gradient is not finite; the local update is skipped, mixing goes on", where)
            if self.in_a_row[local] >= self.limit:
                message = f"{where}: {self.in_a_row[local]} steps in a row had a gradient that is not finite"
                self.group.report(message)
                raise NonFiniteError(
                    f"{message} (max_consecutive_nonfinite={self.limit}). "
                    f"Look at this worker's data, lower the learning rate, or clip the gradients."
                )
