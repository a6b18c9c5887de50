"""Local updates that are left out because a gradient is not finite. The worker mixes all the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.arrivals import NonFiniteError
from dsgdac_accel.core.gradients import nonfinite_flag, nonfinite_workers
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.mixer import Mixer

logger = logging.getLogger(__name__)


class SkippedUpdates:
    """Looks at the gradients of a step, leaves out those of workers where one is not finite, and counts.

    On a GPU the host does not wait for the answer where the optimizer takes it on the device, as torch's fused ones do:
    what was left out is then counted in the next step.

    Args:
        optimizer: whose local update is left out.
        mixer: of its parameters.
        limit: this many skipped updates of a worker in a row end the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mixer: Mixer, limit: int) -> None:
        self.optimizer = optimizer
        self.mixer = mixer
        self.limit = limit
        self.total = 0
        """Local updates that the workers of this process have skipped."""
        self.in_a_row = [0] * mixer.per_process
        """Of each worker of this process, how many of its last updates were skipped."""
        self._to_set_aside: list[Parameter] = []
        self._set_aside: list[tuple[Parameter, Tensor]] = []
        self._flag: Tensor | None = None
        self._unread: tuple[HostCopy, int] | None = None

    def look(self) -> bool:
        """Find out which gradients are not finite; whether the optimizer is to be called at all."""
        parameters = self.mixer.by_worker(self.mixer.find())
        if self.mixer.checks_late and len(parameters) == 1 and skips_on_device(self.optimizer):
            self._flag = nonfinite_flag(parameters[0])
            if self._flag is not None:
                self._unread = HostCopy(self._flag), self.mixer.step
            return True
        left_out = nonfinite_workers(parameters)
        self.count(left_out, self.mixer.step)
        if len(left_out) == len(parameters):
            return False
        self._to_set_aside = [parameter for worker in left_out for parameter in parameters[worker]]
        return True

    def leave_out(self) -> None:
        """Let the local step that follows skip what is not finite. `put_back` must follow that step."""
        for parameter in self._to_set_aside:  # optimizers leave out what has no gradient, its state included
            if parameter.grad is not None:
                self._set_aside.append((parameter, parameter.grad))
                parameter.grad = None
        self._to_set_aside = []
        if self._flag is not None:
            optimizer: Any = self.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, self._flag

    def put_back(self) -> None:
        """End what `leave_out` began."""
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient
        self._set_aside.clear()
        if self._flag is not None:
            optimizer: Any = self.optimizer
            del optimizer.grad_scale, optimizer.found_inf
            self._flag = None

    def settle(self) -> None:
        """Count what the step before left out, if it is not counted yet.

        Raises:
            NonFiniteError: too many in a row.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            self.count([0] if unread[0].is_set() else [], unread[1])

    def forget(self) -> None:
        """Drop what was not counted: the run goes on from elsewhere."""
        self._unread = None

    def count(self, left_out: Sequence[int], step: int) -> None:
        """Count, for each worker of this process, whether it skipped its update of `step`.

        Raises:
            NonFiniteError: too many in a row.
        """
        for here, worker in enumerate(self.mixer.workers):
            if here not in left_out:
                self.in_a_row[here] = 0
                continue
            self.total += 1
            self.in_a_row[here] += 1
            where = f"worker {self.mixer.number_of(worker)}, step {step}"
            logger.warning("%s: the gradient is not finite; the local update is skipped, mixing goes on", where)
            if self.in_a_row[here] >= self.limit:
                message = f"{where}: {self.in_a_row[here]} steps in a row had a gradient that is not finite"
                self.mixer.group.report(message)
                raise NonFiniteError(
                    f"{message} (max_consecutive_nonfinite={self.limit}). "
                    f"Look at this worker's data, lower the learning rate, or clip the gradients."
                )


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next `optimizer.step()` changes nothing where the tensor `optimizer.found_inf` is 1.

    So `GradScaler` lets torch's fused optimizers skip. Their SGD makes momentum buffers also in a step that it skips,
    of whatever is in memory: where it has none yet, it must not be called.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    for group in optimizer.param_groups:
        if not group.get("fused", True):  # loaded from a state dict of an optimizer that was not fused
            return False
        if group.get("momentum"):
            states = [optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None]
            if any(state.get("momentum_buffer") is None for state in states):
                return False
    return True
