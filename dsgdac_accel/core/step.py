"""One step of Algorithm 1 around any torch optimizer.

    x_i <- x_i - lr g_i(x_i) + gamma(lr) * sum_j W_ij (x_j - x_i)

`GossipStep.step` is the whole algorithm. Adapters whose framework calls the optimizer itself use its two halves,
`before_local_step` and `after_local_step`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.nn import Parameter

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.consensus import Consensus
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.nonfinite import GradientGuard
from dsgdac_accel.core.parameter_guard import ModelWatch
from dsgdac_accel.core.sketch import RadiusEstimate
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import seed_workers_differently
from dsgdac_accel.schedule import AdaptiveConsensus, current_lr, planned_lrs
from dsgdac_accel.topology import Topology, build_topology

logger = logging.getLogger(__name__)

_SAME_LRS = (
    "Step schedulers alike on all workers; one that follows a metric needs the same metric everywhere, such as one "
    "measured in `deployed_model` or `accelerator.reduce(loss, 'mean')`."
)


class GossipStep:
    """Puts the parts of one step in order: schedule, gradient guard, mixer and optimizer.

    The step count alone decides when and with whom a worker mixes. A worker that skips its local update still mixes, so
    that no worker waits for it.

    Args:
        optimizer: any torch optimizer; its state stays local and is never mixed.
        group: the workers. Construction is collective.
        config: topology, gamma schedule and policies.
        watch: the models that use the optimizer's parameters, for names in messages and to notice replacements.
        worker_of: maps a parameter to the local worker that owns it, from 0 to `config.workers_per_process` - 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: WorkerGroup,
        config: GossipConfig,
        watch: ModelWatch | None = None,
        worker_of: Callable[[Parameter], int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.watch = watch or ModelWatch(())
        self.group = group
        self.config = config
        topology = config.topology
        if not isinstance(topology, Topology):
            topology = build_topology(topology, group.size * config.workers_per_process)
        group.require_equal(topology.fingerprint, "topology")
        self.mixer = Mixer(
            lambda: optimizer.param_groups,
            topology,
            group,
            order=config.order,
            names=self.watch.names,
            per_process=config.workers_per_process,
            worker_of=worker_of,
            comm_dtype=config.comm_dtype,
            mix_every=config.mix_every,
        )
        self.guard = GradientGuard(
            optimizer, self.mixer.parameters, self.mixer.arrivals, config.max_consecutive_nonfinite
        )
        self.estimate = RadiusEstimate(group, config.sketch) if config.sketch else None
        self.schedule = adaptive_consensus(config)
        self.gamma = 1.0
        self.lr = current_lr(optimizer)
        self._updates: list[Update] = []
        self._first_step_checked = False
        self._planned = self._warned_of_rise = False

    # ---- the step

    def step(self, epoch: int | None = None) -> None:
        """Take one step; the gradients are in `.grad`. See `before_local_step` for `epoch` and errors."""
        if self.before_local_step(epoch):
            self.optimizer.step()  # x - lr g(x), or Adam's
        self.after_local_step()

    def before_local_step(self, epoch: int | None = None, scaler: Any = None) -> bool:
        """Choose gamma, wait for the neighbors' parameters, and form the consensus update.

        Args:
            epoch: the current epoch, 0-based; only `start_epoch` needs it.
            scaler: the GradScaler of fp16 training; an overflow on any worker then skips the local update of all.

        Returns:
            Whether to call `optimizer.step()`. If only some of several local workers have a gradient that is not
            finite, their gradients are hidden during that call.

        Raises:
            NonFiniteError: too many skipped updates in a row, or parameters that are not finite.
            WorkerLostError: a neighbor did not answer.
        """
        self._compare_workers_once()
        self.watch.check(self.optimizer)
        before, self.lr = self.lr, current_lr(self.optimizer)
        self.gamma = self.schedule.gamma(step=self.mixer.step, lr=self.lr, epoch=epoch)
        self._warn_of_rise(before)
        finite = self.guard.gradients_are_finite(self.mixer.step, scaler)
        self._updates = self.mixer.consensus_update(self.gamma)  # at the x that the gradient was taken at
        self.guard.hide_nonfinite()
        return finite

    def after_local_step(self) -> None:
        """Add the consensus update and send the new parameters behind the next forward and backward."""
        self.guard.put_back()
        self.mixer.add(self._updates)
        self._updates = []
        self._measure_if_due()
        if self.config.overlap:
            self.mixer.start_exchange()
        if self.estimate is not None:
            self.estimate.post(self.mixer.flats, self.mixer.step)

    def _measure_if_due(self) -> None:
        every = self.config.log_every
        if every and self.mixer.step % every == 0:
            self.group.require_equal(self.mixer.step, "number of optimizer steps")
            self.group.require_equal(self.lr, f"learning rate at step {self.mixer.step}", _SAME_LRS)
            self.mixer.measure_consensus()  # between two exchanges, when the receive buffers are free

    def _compare_workers_once(self) -> None:
        """At the first step, require equal learning rates and make random streams differ."""
        if self._first_step_checked:
            return
        self._first_step_checked = True
        self.group.require_equal(current_lr(self.optimizer), "learning rate at the first step", _SAME_LRS)
        streams = self.group.all_gather_object(
            hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), "comparing random states"
        )
        if len(set(streams)) < len(streams):
            seed_workers_differently(self.group)

    # ---- gamma

    def plan(self, scheduler: Any) -> None:
        """Look ahead along a fresh scheduler, so that `max_lr` is the true maximum if it can be computed."""
        self.plan_lrs(planned_lrs(scheduler, self.config.total_steps))

    def plan_lrs(self, lrs: list[float] | None) -> None:
        """Look ahead along the learning rate of every step of the run, if it is known; only before the first step."""
        if lrs is not None and not self._planned and self.mixer.step == 0:
            self.schedule = adaptive_consensus(self.config, lrs)
            self._planned = True

    def _warn_of_rise(self, before: float) -> None:
        """Warn once that gamma stays 1 because the maximum of the learning rate is not known yet."""
        began = self.schedule.active_since
        looks_ahead = self._planned or isinstance(self.config.max_lr, float) or self.config.constant is not None
        if looks_ahead or self._warned_of_rise or began is None or began >= self.mixer.step or self.lr <= before:
            return
        if self.gamma < 1 or self.config.power == 0:  # below 1, the learning rate has been higher: it restarts
            return
        self._warned_of_rise = True
        if self.group.rank == 0:  # all workers have the same learning rates
            logger.warning(
                "the learning rate rises after adaptive consensus began, and its maximum is not known ahead: gamma is "
                "1 until it falls. Prepare a scheduler and give total_steps, give max_lr as a number, or start after "
                "the warm-up."
            )

    # ---- for logs and checkpoints

    @property
    def nonfinite_steps(self) -> int:
        """Local updates that the workers of this process have skipped because a gradient was not finite."""
        return self.guard.skipped

    def metrics(self) -> dict[str, float]:
        """Return the latest figures of this worker; no communication.

        The radius is there once it was measured, with its step. The estimate of it that `GossipConfig.sketch` asks for
        is there on process 0 only, and is mostly one step old.
        """
        figures = {"lr": self.lr, "gamma": self.gamma}
        consensus = self.mixer.last_consensus
        if consensus is not None:
            figures |= {
                "radius": consensus.radius,
                "radius_step": float(consensus.step),
                "frobenius": consensus.frobenius,
            }
        estimate = None if self.estimate is None else self.estimate.latest
        if estimate is not None:
            figures |= {
                "radius_estimate": estimate.radius,
                "radius_estimate_step": float(estimate.step),
                "frobenius_estimate": estimate.frobenius,
            }
        return figures | {
            "neighbor_disagreement": float(self.mixer.arrivals.disagreement),
            "wait_seconds": self.mixer.exchange.waited_seconds,
            "bytes_sent": float(self.mixer.exchange.bytes_sent),
            "nonfinite_steps": float(self.nonfinite_steps),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: position in the topology and in the gamma schedule, counters, and the latest figures."""
        self.guard.settle()
        consensus = self.mixer.last_consensus
        return {
            "mixer": self.mixer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "nonfinite_steps": self.guard.skipped,
            "consecutive_nonfinite": list(self.guard.in_a_row),
            "latest": {
                "gamma": self.gamma,
                "lr": self.lr,
                "disagreement": float(self.mixer.arrivals.disagreement),
                "consensus": None if consensus is None else asdict(consensus),
                "bytes_sent": self.mixer.exchange.bytes_sent,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as if never stopped; the caller loads the parameters."""
        self.mixer.load_state_dict(state["mixer"])
        self.schedule.load_state_dict(state["schedule"])
        counts = state["consecutive_nonfinite"]  # a single number in checkpoints of processes with one worker
        self.guard.load(state["nonfinite_steps"], [counts] if isinstance(counts, int) else counts)
        latest = state["latest"]
        self.gamma, self.lr = latest["gamma"], latest["lr"]
        self.mixer.arrivals.disagreement = latest["disagreement"]
        self.mixer.last_consensus = None if latest["consensus"] is None else Consensus(**latest["consensus"])
        self.mixer.exchange.bytes_sent = latest["bytes_sent"]


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
