"""gamma of each step, from the optimizer's learning rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.schedule import AdaptiveConsensus, current_lr, lr_group, lr_of, planned_lrs

logger = logging.getLogger(__name__)


class GammaSchedule:
    """Follows the learning rate of an optimizer and returns gamma(lr).

    Args:
        optimizer: the learning rate of the parameter group with the largest base learning rate counts.
        group: the workers, which must have equal learning rates.
        config: the gamma schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: WorkerGroup, config: GossipConfig) -> None:
        self.optimizer = optimizer
        self.group = group
        self.config = config
        self.rule = adaptive_consensus(config)
        self.lr = current_lr(optimizer)
        """Learning rate of the latest step."""
        self.total_lr = self.lr
        """Learning rates of the latest step, summed over the parameter groups; neighbors compare them."""
        self.gamma = 1.0
        """gamma of the latest step."""
        self._steps = 0
        self._planned = self._warned = False
        self._said_that_it_waits = False

    def next_gamma(self, step: int, epoch: int | None = None) -> float:
        """Return gamma for a step, counted from 0, at the optimizer's present learning rate.

        Reading a learning rate that is a tensor on an accelerator waits for it, which is said once.
        """
        group = lr_group(self.optimizer)
        self._say_if_it_waits(group["lr"])
        before, self.lr, self._steps = self.lr, lr_of(group), step + 1
        self.total_lr = self.lr + sum(lr_of(other) for other in self.optimizer.param_groups if other is not group)
        self.gamma = self.rule.gamma(step=step, lr=self.lr, epoch=epoch)
        self._warn_of_rise(step, before)
        return self.gamma

    def plan(self, scheduler: Any, ticks: int = 1) -> None:
        """Look ahead along a fresh scheduler that ticks `ticks` times in an optimizer step.

        Then `max_lr` is the true maximum, if it can be computed.
        """
        self.plan_lrs(planned_lrs(scheduler, self.config.total_steps, ticks))

    def plan_lrs(self, lrs: list[float] | None) -> None:
        """Look ahead along the learning rate of every step of the run, if it is known; only before the first step."""
        if lrs is not None and self._steps == 0:
            self.rule = adaptive_consensus(self.config, lrs)
            self._planned = True

    def _say_if_it_waits(self, lr: Any) -> None:
        if not self._said_that_it_waits and isinstance(lr, Tensor) and lr.device.type != "cpu":
            self._said_that_it_waits = True
            if self.group.everyone.rank == 0:
                logger.warning(
                    "the learning rate is a tensor on %s, so at every step the host waits there to choose gamma. Give "
                    "the optimizer the lr as a number, or as a tensor on the CPU.",
                    lr.device,
                )

    def _warn_of_rise(self, step: int, lr_before: float) -> None:
        """Warn once that gamma stays 1 because the maximum of the learning rate is not known yet."""
        began = self.rule.active_since
        looks_ahead = self._planned or isinstance(self.config.max_lr, float) or self.config.constant is not None
        if looks_ahead or self._warned or began is None or began >= step or self.lr <= lr_before:
            return
        if self.gamma < 1 or self.config.power == 0:  # below 1, the learning rate has been higher: it restarts
            return
        self._warned = True
        if self.group.everyone.rank == 0:  # all workers have the same learning rates
            logger.warning(
                "the learning rate rises after adaptive consensus began, and its maximum is not known ahead: gamma is "
                "1 until it falls. Prepare a scheduler and give total_steps, give max_lr as a number, or start after "
                "the warm-up."
            )

    def metrics(self) -> dict[str, float]:
        """Return lr and gamma of the latest step."""
        return {"lr": self.lr, "gamma": self.gamma}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule and the latest figures."""
        return {"rule": self.rule.state_dict(), "lr": self.lr, "gamma": self.gamma, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position."""
        self.rule.load_state_dict(state["rule"])
        self.lr = self.total_lr = state["lr"]
        self.gamma, self._steps = state["gamma"], state["steps"]


def adaptive_consensus(config: GossipConfig, lrs: list[float] | None = None) -> AdaptiveConsensus:
    """Return the gamma schedule that a configuration asks for."""
    return AdaptiveConsensus(
        power=config.power,
        start_step=config.start_step,
        start_epoch=config.start_epoch,
        max_lr=config.max_lr,
        floor=config.floor,
        constant=config.constant,
        planned_lrs=lrs,
    )
