"""One gossip step around any torch optimizer: what every adapter calls before and after the local step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.consensus import Consensus
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.nonfinite import SkippedUpdates
from dsgdac_accel.core.parameter_guard import ModelWatch
from dsgdac_accel.core.sketch import RadiusEstimate
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
    """Drives one optimizer: `before_local_step`, then the optimizer's own step, then `after_local_step`.

    Exactly one mix happens per optimizer step, whatever happened locally: the step count alone decides the partner,
    and a worker that skips its local update still mixes, so nobody waits for it.

    Args:
        optimizer: any torch optimizer; its state stays local and is never mixed.
        group: the workers. Construction is collective.
        config: topology, gamma schedule and policies.
        watch: of the models that use the optimizer's parameters, for names in messages and to notice replacements.
        worker_of: which of the `config.workers_per_process` workers of this process a parameter belongs to.
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
        self.estimate = RadiusEstimate(group, config.sketch, config.workers_per_process) if config.sketch else None
        self.schedule = adaptive_consensus(config)
        self.gamma = 1.0
        self.lr = current_lr(optimizer)
        self.skipped = SkippedUpdates(optimizer, self.mixer, config.max_consecutive_nonfinite)
        self._first_step_checked = False
        self._planned = self._warned_of_rise = False

    def plan(self, scheduler: Any) -> None:
        """Look ahead along a fresh scheduler, so that `max_lr` is the true maximum where it can be computed."""
        self.plan_lrs(planned_lrs(scheduler, self.config.total_steps))

    def plan_lrs(self, lrs: list[float] | None) -> None:
        """Look ahead along the rate of every step of the run, if it is known; only before the first step."""
        if lrs is not None and not self._planned and self.mixer.step == 0:
            self.schedule = adaptive_consensus(self.config, lrs)
            self._planned = True

    # ---- the step

    def before_local_step(self, epoch: int | None = None, scaler: Any = None) -> bool:
        """Read the rate, finish the exchange, form the consensus update.

        Args:
            epoch: the current epoch, 0-based; only `start_epoch` needs it.
            scaler: the GradScaler of fp16 training; an overflow on any worker then skips the local update of all.

        Returns:
            Whether the local step may be taken. False: this worker's gradient is not finite and must be left out. Where
            that holds for some of several workers in this process, their gradients are set aside for the local step.

        Raises:
            NonFiniteError: too many skipped updates in a row, or parameters that are not finite.
            WorkerLostError: a neighbour did not answer.
        """
        if not self._first_step_checked:
            self._check_workers_once()
        self.watch.check(self.optimizer)
        before, self.lr = self.lr, current_lr(self.optimizer)
        was_active = self.schedule.active_since is not None
        self.gamma = self.schedule.gamma(step=self.mixer.step, lr=self.lr, epoch=epoch)
        if was_active and self.lr > before:
            self._warn_of_rise()
        self.skipped.settle()
        if scaler is None:
            finite = self.skipped.look()
        else:
            finite = self._agree_on_overflow(scaler)
            # Overflows while the loss scale is still coming down are how fp16 training finds its scale.
            everybody = range(self.mixer.per_process)
            self.skipped.count([] if finite or scaler.get_scale() > 1 else everybody, self.mixer.step)
        self.mixer.finish(self.gamma)
        self.skipped.leave_out()
        return finite

    def after_local_step(self) -> None:
        """Add the consensus update, count the step, and send the new parameters on their way."""
        self.skipped.put_back()
        self.mixer.apply()
        every = self.config.log_every
        if every and self.mixer.step % every == 0:
            self.group.require_equal(self.mixer.step, "number of optimizer steps")
            self.group.require_equal(self.lr, f"learning rate at step {self.mixer.step}", _SAME_LRS)
            self.mixer.measure_consensus()  # between two exchanges the receive buffer is free to use
        if self.config.overlap:
            self.mixer.start()
        if self.estimate is not None:
            self.estimate.post(self.mixer.flats, self.mixer.step)

    def _warn_of_rise(self) -> None:
        """Say once that gamma stays 1 because nobody knows yet how far the rate will rise."""
        looks_ahead = self._planned or isinstance(self.config.max_lr, float) or self.config.constant is not None
        if looks_ahead or self._warned_of_rise or self.config.power == 0 or self.mixer.step == 0:
            return
        if self.gamma < 1:  # it has been higher, as in a schedule that begins anew
            return
        self._warned_of_rise = True
        if self.group.rank > 0:  # all see the same rates
            return
        logger.warning(
            "the learning rate rises after adaptive consensus began, and its maximum is not known ahead: gamma is 1 "
            "until it falls. Prepare a scheduler and give total_steps, give max_lr as a number, or start after the "
            "warm-up."
        )

    def _agree_on_overflow(self, scaler: Any) -> bool:
        """Let an overflow anywhere count everywhere, so that loss scales stay equal; the scaler itself then skips."""
        if scaler._per_optimizer_states[id(self.optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(self.optimizer)
        found = list(scaler._found_inf_per_device(self.optimizer).values())
        for flag in found:
            self.group.all_reduce_max_(flag, f"comparing fp16 overflows at step {self.mixer.step}")
        return not any(bool(flag) for flag in found)

    def _check_workers_once(self) -> None:
        """What must agree, and what must differ, when training begins."""
        self._first_step_checked = True
        self.group.require_equal(self.lr, "learning rate at the first step", _SAME_LRS)
        streams = self.group.all_gather_object(
            hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), "comparing random states"
        )
        if len(set(streams)) < len(streams):
            seed_workers_differently(self.group)

    # ---- for logs and checkpoints

    @property
    def nonfinite_steps(self) -> int:
        """Local updates that the workers of this process have skipped because a gradient was not finite."""
        return self.skipped.total

    def metrics(self) -> dict[str, float]:
        """Latest figures of this worker; no communication. The radius is there once it was measured, with the step.

        An estimate of it, if `GossipConfig.sketch` asks for one, is there on process 0 only, mostly of the step before.
        """
        consensus = self.mixer.last_consensus
        measured = {}
        if consensus is not None:
            measured = {
                "radius": consensus.radius,
                "radius_step": float(consensus.step),
                "frobenius": consensus.frobenius,
            }
        estimate = None if self.estimate is None else self.estimate.latest
        if estimate is not None:
            measured |= {
                "radius_estimate": estimate.radius,
                "radius_estimate_step": float(estimate.step),
                "frobenius_estimate": estimate.frobenius,
            }
        return {
            "lr": self.lr,
            "gamma": self.gamma,
            **measured,
            "neighbor_disagreement": float(self.mixer.neighbor_disagreement),
            "wait_seconds": self.mixer.exchange.waited_seconds,
            "bytes_sent": float(self.mixer.exchange.bytes_sent),
            "nonfinite_steps": float(self.skipped.total),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values: position in the topology and in the gamma schedule, counters, and the latest figures."""
        self.skipped.settle()
        consensus = self.mixer.last_consensus
        return {
            "mixer": self.mixer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "nonfinite_steps": self.skipped.total,
            "consecutive_nonfinite": list(self.skipped.in_a_row),
            "latest": {
                "gamma": self.gamma,
                "lr": self.lr,
                "disagreement": float(self.mixer.neighbor_disagreement),
                "consensus": None if consensus is None else asdict(consensus),
                "bytes_sent": self.mixer.exchange.bytes_sent,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as if never stopped; the parameters themselves are loaded by the caller."""
        self.mixer.load_state_dict(state["mixer"])
        self.schedule.load_state_dict(state["schedule"])
        self.skipped.forget()
        self.skipped.total = state["nonfinite_steps"]
        counts = state["consecutive_nonfinite"]  # a number in checkpoints from before processes held several workers
        self.skipped.in_a_row = [counts] if isinstance(counts, int) else list(counts)
        latest = state["latest"]
        self.gamma, self.lr = latest["gamma"], latest["lr"]
        self.mixer.neighbor_disagreement = latest["disagreement"]
        self.mixer.last_consensus = None if latest["consensus"] is None else Consensus(**latest["consensus"])
        self.mixer.exchange.bytes_sent = latest["bytes_sent"]


def adaptive_consensus(config: GossipConfig, lrs: list[float] | None = None) -> AdaptiveConsensus:
    """The gamma schedule that a configuration asks for."""
    return AdaptiveConsensus(
        power=config.power,
        start_step=config.start_step,
        start_epoch=config.start_epoch,
        max_lr=config.max_lr,
        floor=config.floor,
        constant=config.constant,
        planned_lrs=lrs,
    )
