"""Keeping gradients and parameters that are not finite out of the run, without waiting for a GPU.

A worker whose gradient is not finite skips its local update and mixes all the same (`GradientGuard`). Parameters that
are not finite are never mixed and end the run (`ArrivalGuard`). On a GPU both are decided on the device; the host reads
the outcome a step later. An optimizer that cannot skip a step on the device must be left uncalled: the host then reads
the flags once the whole mix is queued, so that the device still has work when the host goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

from dsgdac_accel.core.agreement import Agreement
from dsgdac_accel.core.copies import Copies
from dsgdac_accel.core.gradients import (
    nonfinite,
    nonfinite_flag,
    nonfinite_flags,
    nonfinite_workers,
    skips_on_device,
)
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.slots import Slots
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A worker's parameters or gradients are not finite, so the run cannot continue."""


class ArrivalGuard:
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
        self._updates: Sequence[Update] = ()
        """Those whose distance was voted on; only kept where the host reads the sums at once."""
        self._round = 0
        self._takes_part = False

    @property
    def disagreement(self) -> float:
        """||sum_j W_ij s_j / (1 - W_ii) - s_i|| of the last round in which this worker took part.

        It is the distance of the worker to the mean of its neighbors, averaged over several local workers. On a GPU,
        reading it waits until the mix of that round is done.
        """
        distance = self._distance(self.agreement.peek())
        return self._disagreement if distance is None else distance

    @disagreement.setter
    def disagreement(self, value: float) -> None:
        self._disagreement = value

    def vote(self, updates: Sequence[Update], round_: int) -> None:
        """Vote with the distance to the neighbors, unless every local worker sits the round out."""
        self._updates, self._round = () if self.agreement.late else updates, round_
        self._takes_part = bool(updates)
        if not updates:
            if self.agreement.together:
                self.agreement.vote("square", 0.0)
            return
        norms = [update.norm() for update in updates]
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).mean()
        if self.agreement.together:
            self.agreement.vote("square", norm.double().square())
        else:
            self.agreement.vote("distance", norm)

    def let_skip(self, updates: Sequence[Update], sums: Mapping[str, Tensor]) -> None:
        """Let the device skip the updates if the distance is not finite, where the host looks at it later."""
        if self.agreement.late and updates:
            skip = nonfinite(sums["square"] if self.agreement.together else sums["distance"])
            for update in updates:
                update.skip = skip

    def read(self, sums: Mapping[str, float], step: int) -> None:
        """Keep the distance that was voted on. Raises NonFiniteError if it is not finite; nothing was mixed then."""
        updates, self._updates = self._updates, ()
        distance = self._distance(sums)
        if distance is None:
            return
        self._disagreement = distance
        if math.isfinite(distance):
            return
        if self.agreement.late:
            self._raise_nonfinite(step, perhaps=", or too far away for the square of the distance")
        elif self._all_finite(updates):
            me, dtype = self.rounds.workers[0], self.copies.sent[0].buffers[0].dtype
            message = f"worker {me} and its neighbors are too far apart at step {step}"
            self._raise(message, f": the square of their distance is beyond {dtype}")
        else:
            self._raise_nonfinite(step)

    def _distance(self, sums: Mapping[str, float]) -> float | None:
        """Return the distance that was voted on; None where every local worker sits the round out."""
        if "square" not in sums or not self._takes_part:
            return sums.get("distance")
        return math.sqrt(sums["square"]) if sums["square"] >= 0.0 else math.nan

    def _all_finite(self, updates: Sequence[Update]) -> bool:
        finite = all(bool(torch.isfinite(part).all()) for update in updates for part in update.difference)
        return not self.group.row.any(not finite, "looking for a shard that is not finite")

    def _raise_nonfinite(self, step: int, perhaps: str = "") -> None:
        local_workers = range(self.rounds.local_workers)
        mine = [self.rounds.workers[local] for local in local_workers if self._has_nonfinite(local)]
        neighbors = {neighbor for local in local_workers for neighbor in self.rounds.plan(self._round, local).weights}
        suspects = sorted(mine or self.rounds.elsewhere(neighbors))
        who = f"worker {suspects[0]}" if len(suspects) == 1 else f"one of workers {suspects}"
        self._raise(f"the parameters of {who} are not finite at step {step}{'' if mine else perhaps}")

    def _has_nonfinite(self, local: int) -> bool:
        """Return whether the parameters of a local worker are not finite, in any of its shards."""
        values = [value for value in self.slots.values()[local] if value is not None]
        finite = all(bool(torch.isfinite(value).all()) for value in values)
        return self.group.row.any(not finite, "looking for the shard that is not finite")

    def _raise(self, message: str, detail: str = "") -> None:
        self.copies.drop()
        self.group.report(message)
        advice = "The run diverged. Lower the learning rate, lengthen the warm-up, or clip the gradients."
        raise NonFiniteError(f"{message}{detail}. {advice}")


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
        self._step = 0
        self._by_worker: list[list[Parameter]] = []
        self._found: HostCopy | list[int] = []
        """The local workers with a gradient that is not finite, or a flag for each; for fp16 training a single flag."""
        self._scaler: Any = None
        self._hidden: list[tuple[Parameter, Tensor]] = []
        self._found_inf: Tensor | None = None
        """Makes the optimizer skip the step on the device, without the host."""
        self._unread: tuple[HostCopy, int] | None = None

    def find_nonfinite(self, step: int, scaler: Any = None) -> None:
        """Begin to find the gradients that are not finite. On a GPU the host does not wait for them here.

        Args:
            step: the present one, for messages.
            scaler: the GradScaler of fp16 training; an overflow on any worker then counts on all workers.

        Raises:
            NonFiniteError: too many skipped updates in a row, if the device has skipped them by itself.
        """
        self._unhide()  # the last local step raised if `put_back` was not called, and there are new gradients now
        self._hidden.clear()
        self.settle()
        self._step, self._scaler, self._found = step, None, []
        if scaler is not None and scaler.is_enabled():
            self._scaler, self._found = scaler, HostCopy(self._agree_on_overflow(step, scaler))
            return
        parameters = self._by_worker = self.slots.by_worker(self.slots.find())
        late = self.agreement.late
        if self.agreement.together:  # the row decides in the agreement of the step
            flag = nonfinite_flag(parameters[0]) if late else bool(nonfinite_workers(parameters))
            self.agreement.vote("skip", 0.0 if flag is None else flag)
        elif not late:
            self._found = nonfinite_workers(parameters)
        elif self._skips_on_device:
            self._found_inf = nonfinite_flag(parameters[0])
        else:
            self._found = HostCopy(nonfinite_flags(parameters))

    @property
    def _skips_on_device(self) -> bool:
        return self.agreement.late and len(self._by_worker) == 1 and skips_on_device(self.optimizer)

    def _take_decision(self) -> None:
        """Take what the processes of a sharded worker have decided together."""
        skip = self.agreement.sums.get("skip")
        if skip is None:
            return
        if self._skips_on_device:
            self._found_inf = skip.ne(0.0).float()
        elif self.agreement.late:
            self._found = HostCopy(skip.view(1))
        else:
            self._found = [0] * bool(skip)

    def allows_step(self) -> bool:
        """Return whether to call the optimizer at all, and hide the gradients that it must skip until `put_back`.

        Raises:
            NonFiniteError: too many skipped updates in a row.
        """
        self._take_decision()
        if self._found_inf is not None:
            self._unread = HostCopy(self._found_inf), self._step
            optimizer: Any = self.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, self._found_inf
            return True
        found = self._found
        if isinstance(found, HostCopy):
            found = [number for number, flag in enumerate(found.read().tolist()) if flag]
        if self._scaler is not None:
            # Overflows while the loss scale is still falling are how fp16 training finds its scale.
            self._count(range(len(self.in_a_row)) if found and self._scaler.get_scale() <= 1 else (), self._step)
            return not found
        self._count(found, self._step)
        if found and len(found) == len(self._by_worker):
            return False
        for worker in found:
            for parameter in self._by_worker[worker]:  # optimizers skip a parameter without a gradient, and its state
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None
        return True

    def _agree_on_overflow(self, step: int, scaler: Any) -> Tensor:
        """Return 1 if any worker overflowed, (1,), so that loss scales stay equal; the scaler then skips by itself."""
        if scaler._per_optimizer_states[id(self.optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(self.optimizer)
        flags = list(scaler._found_inf_per_device(self.optimizer).values())  # one for each device with gradients
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
        self._unhide()

    def _unhide(self) -> None:
        """Let the optimizer step normally again."""
        if self._found_inf is not None:
            for name in ("grad_scale", "found_inf"):
                vars(self.optimizer).pop(name, None)
            self._found_inf = None

    def settle(self) -> None:
        """Count the update that the device skipped in the step before, if it did. Raises NonFiniteError."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._count([0] if unread[0].is_set() else [], unread[1])

    def metrics(self) -> dict[str, float]:
        """Return the number of local updates that were skipped."""
        return {"nonfinite_steps": float(self.skipped)}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        self.settle()
        return {"nonfinite_steps": self.skipped, "consecutive_nonfinite": list(self.in_a_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved counts."""
        self._unread = None
        self.skipped, self.in_a_row = state["nonfinite_steps"], list(state["consecutive_nonfinite"])

    def _count(self, nonfinite: Sequence[int], step: int) -> None:
        for local, worker in enumerate(self.rounds.workers):
            if local not in nonfinite:
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
