"""One step of Algorithm 1 around any torch optimizer.

    x_i <- x_i - lr g_i(x_i) + gamma(lr) * sum_j W_ij (s_j - s_i)        s_i: the copy of x_i that was sent

`GossipStep.step` is the whole algorithm. Adapters whose framework calls the optimizer itself use its two halves,
`before_local_step` and `after_local_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Parameter

from dsgdac_accel.announcements import announce
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.gamma import GammaSchedule
from dsgdac_accel.core.masters import Masters
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.model_watch import ModelWatch, OptimizerWatch
from dsgdac_accel.core.nonfinite import GradientGuard
from dsgdac_accel.core.update import Update
from dsgdac_accel.devices import refuse_capture
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.randomness import make_streams_differ
from dsgdac_accel.topology import Topology, build_topology


class GossipStep:
    """Puts the parts of one step in order: gamma, gradient guard, mixer and optimizer.

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
        self.group = group
        self.config = config
        self.watch = watch or ModelWatch(())
        topology = config.topology
        if not isinstance(topology, Topology):
            topology = build_topology(topology, group.size * config.workers_per_process)
        group.require_equal(topology.fingerprint, "topology")
        self.schedule = GammaSchedule(optimizer, group, config)
        self.masters = Masters(optimizer, self.watch.names)
        try:
            self.mixer = Mixer(
                lambda: optimizer.param_groups,
                topology,
                group,
                order=config.order,
                names=self.watch.names,
                local_workers=config.workers_per_process,
                worker_of=worker_of,
                source=self.masters,
                comm_dtype=config.comm_dtype,
                mix_every=config.mix_every,
            )
        except BaseException:
            self.masters.release()
            raise
        mixer, limit = self.mixer, config.max_consecutive_nonfinite
        self.guard = GradientGuard(optimizer, mixer.slots, mixer.rounds, group, mixer.agreement, limit)
        self.average = Average(self.mixer)
        self.optimizer_watch = OptimizerWatch(optimizer, group) if topology.num_workers > 1 else None
        self._updates: list[Update] = []
        self._workers_compared = False

    def step(self, epoch: int | None = None) -> None:
        """Take one step; the gradients are in `.grad`. See `before_local_step` for `epoch` and errors."""
        if self.before_local_step(epoch):
            with self.local_step():
                self.optimizer.step()  # x - lr g(x), or Adam's
        self.after_local_step()

    @torch.compiler.disable  # communication and the host's decisions stay outside of a compiled `optimizer.step`
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
            RuntimeError: a CUDA graph is being captured, which cannot hold a step.
        """
        refuse_capture(self.group.device)
        first, self._workers_compared = not self._workers_compared, True
        if first:
            make_streams_differ(self.group.everyone)  # a seed that was set after `prepare` made them equal
            self._announce()
        try:
            self.watch.check(self.optimizer)
        except RuntimeError as error:
            self.group.report(f"{self.group.everyone.members.me}: {error}")  # it may be the only process that raises it
            raise
        gamma = self.schedule.next_gamma(self.mixer.step, epoch)
        self.guard.find_nonfinite(self.mixer.step, scaler)
        self._updates = self.mixer.consensus_update(gamma, self.schedule.total_lr)
        allowed = self.guard.allows_step()
        gradients = (p.grad for group in self.optimizer.param_groups for p in group["params"])
        self.mixer.moves = allowed and self.schedule.lr != 0 and any(gradient is not None for gradient in gradients)
        return allowed

    @contextmanager
    def local_step(self) -> Iterator[None]:
        """Enclose the optimizer's step. If that raises, the update is dropped, so that the run can still be saved."""
        try:
            watched = nullcontext() if self.optimizer_watch is None else self.optimizer_watch.local_step(self.optimizer)
            with self.masters.in_optimizer(), watched:
                yield
        except BaseException:
            self.mixer.copies.drop()
            self.masters.write()  # the optimizer may have moved some
            raise

    @torch.compiler.disable
    def after_local_step(self) -> None:
        """Add the consensus update and send the new parameters behind the next forward and backward."""
        self.guard.put_back()
        self.mixer.add(self._updates)
        self._updates = []
        if self._is_logged():
            self.average.start_measurement()  # between two exchanges, whose buffers are free
        if self.config.overlap:
            self.mixer.start_exchange(self.schedule.total_lr)
        self.masters.write()

    def restart_exchange(self) -> None:
        """Drop the exchange, see `Mixer.restart_exchange`. Call it on all workers."""
        self.mixer.restart_exchange()
        self.mixer.moves = False

    def _announce(self) -> None:
        config, topology = self.config, self.mixer.topology
        if self.group.everyone.rank > 0 or topology.num_workers == 1:
            return
        planned = len(self.schedule.rule.planned_lrs)
        announce(
            f"{topology.num_workers} workers mix their parameters, topology {topology.name}"
            + (f", every {config.mix_every} steps" if config.mix_every > 1 else "")
            + (f", messages in {config.comm_dtype}" if config.comm_dtype != "full" else "")
            + f"; {self.schedule.rule.formula}"
            + (f"; the lr is known for {planned:,} steps" if planned else "")
        )

    def _is_logged(self) -> bool:
        every = self.config.log_every
        return every > 0 and self.mixer.step % every == 0

    @property
    def lr(self) -> float:
        """Learning rate of the latest step; before the first, of the optimizer."""
        return self.schedule.lr

    @property
    def gamma(self) -> float:
        """gamma of the latest step; 1 before the first."""
        return self.schedule.gamma

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far."""
        return self.mixer.step

    # ---- for logs and checkpoints

    def metrics(self) -> dict[str, float]:
        """Return the latest metrics of this worker; no communication.

        The radius is there once it was measured, with its step.
        """
        parts = (self.schedule, self.average, self.mixer, self.guard)
        return {name: value for part in parts for name, value in part.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the topology and in the gamma schedule, counters, and the latest figures."""
        return {
            "mixer": self.mixer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.state_dict(),
            **self.guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as if never stopped; the caller loads the parameters."""
        self.mixer.load_state_dict(state["mixer"])
        self.schedule.load_state_dict(state["schedule"])
        self.average.load_state_dict(state["average"])
        self.guard.load_state_dict(state)
