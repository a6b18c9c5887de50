"""The mixing core: x_i <- x_i + gamma * sum_j W_ij (x_j - x_i), hidden behind the computation of the step.

The exchange of x is in flight while forward and backward run at the same x. `consensus_update` waits for it and forms
the update, the optimizer takes its local step at x, `add` adds the update, and `start_exchange` posts the new x.
Together this is Algorithm 1 to the letter, for every optimizer; `GossipStep` puts it in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.buckets import Buckets, Use
from dsgdac_accel.core.compression import Compressor, require_symmetric_rounds
from dsgdac_accel.core.edits import EditGuard
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.flat_parameters import changing_alike
from dsgdac_accel.core.nonfinite import ArrivalGuard
from dsgdac_accel.core.parameter_guard import MixedParameters, signature_of
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.update import Update, form_updates
from dsgdac_accel.core.worker_changes import WorkerChanges
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.topology import Topology


class Mixer:
    """Mixes the parameters of one optimizer with those of the neighbors.

    A process with several workers has buckets for each of them; they read each other's parameters in place.

    Args:
        parameters: a parameter, an iterable of them, or parameter groups; or a function that returns one of these. The
            function is called before every exchange, so that parameters added, replaced or unfrozen later are noticed.
        topology: who mixes with whom; built for `group.size * local_workers` workers.
        group: the processes that hold the workers. Construction is collective.
        order: "local_first" adds gamma (W x - x) to the result of the local step (Algorithm 1); "mix_first" adds it
            before, so that weight decay sees the mixed point.
        names: what to call a parameter in error messages, by `id`.
        local_workers: workers of each process; this one holds numbers `local_workers * rank` and up.
        worker_of: the local worker, from 0, that a parameter belongs to; only needed for several of them.
        comm_dtype: what is sent: "full" (the parameters), or their rounded differences in a format of `formats`; see
            `compression`.
        mix_every: mix in every k-th step, the last one of k; round r of the topology covers steps rk to rk + k - 1.

    Raises:
        ValueError: the topology is for another number of workers, the workers have different parameters, or a parameter
            cannot be mixed exactly.
    """

    def __init__(
        self,
        parameters: object,
        topology: Topology,
        group: WorkerGroup,
        *,
        order: str = "local_first",
        names: Mapping[int, str] | None = None,
        local_workers: int = 1,
        worker_of: Callable[[Parameter], int] | None = None,
        comm_dtype: str = "full",
        mix_every: int = 1,
    ) -> None:
        self.group = group
        self.order = order
        self.mix_every = mix_every
        self.step = 0
        """Optimizer steps so far; they alone decide who exchanges with whom."""
        compressed = comm_dtype != "full" and group.size > 1  # in one process nothing is sent
        self.rounds = Rounds(topology, group.members, local_workers, all_reduce=not compressed)
        if compressed:
            require_symmetric_rounds(topology, comm_dtype)
        self.parameters = MixedParameters(parameters, names, local_workers, worker_of)
        self.changes = WorkerChanges(self.parameters, group)
        self.buckets = Buckets()
        self.exchange = Exchange(group, self.rounds)
        self.compressor = Compressor(comm_dtype, self.exchange, self.buckets) if compressed else None
        self.edits = EditGuard(self.exchange, self.buckets, self.parameters, uncompressed=not compressed)
        self.arrivals = ArrivalGuard(group, self.rounds, self.buckets, self.edits, self.changes)
        self._lay_out()
        group.register(self)

    # ---- one step

    def start_exchange(self, watched: bool = True) -> None:
        """Post the exchange of the parameters as they are now, unless it is posted; `consensus_update` uses it.

        Args:
            watched: whether a script may run before the exchange ends.
        """
        if self.group.size == 1 or self.buckets.use in (Use.RECEIVING, Use.RECEIVED):
            return
        if not self._mixes_now:
            self.exchange.bytes_sent = 0
            return
        self.group.require_open()
        self.buckets.refuse(Use.UPDATE, Use.BACKUP, Use.RELEASED)
        self._follow_changes()
        if self.compressor is not None:
            self.compressor.start()
        self.edits.seal(self._round, self.step, watched)
        self.buckets.claim(Use.RECEIVING)
        self.group.hold(self)
        messages, encode = self.compressor.messages(self._round) if self.compressor else (self._parameters_of, None)
        self.exchange.post(
            self._round,
            f"the exchange of step {self.step}",
            lambda local, receiver: [*messages(local, receiver), *self.edits.outgoing(local)],
            self.edits.incoming(),
            encode,
            self.edits.copied,
            self.edits.confirm,
        )

    def _parameters_of(self, local: int, receiver: int | None) -> Sequence[Tensor]:
        """Return x, which is sent as it is to every receiver."""
        return self.buckets.values(local)

    def drain(self) -> None:
        """Wait for the exchange in flight. The received parameters are kept for the next `consensus_update`."""
        if self.buckets.use is not Use.RECEIVING:
            return
        arrived = False
        try:
            self.exchange.wait()
            arrived = True
        finally:
            self.group.let_go(self)
            self.buckets.claim(Use.RECEIVED if arrived else Use.FREE)

    @torch.no_grad()
    def consensus_update(self, gamma: float) -> list[Update]:
        """Wait for the neighbors' parameters and form u = gamma * sum_j W_ij (x_j - x_i), for `add`.

        With order "mix_first" the update is added at once, and `add` only completes the step.

        Args:
            gamma: the same on all workers, in [0, 1].

        Returns:
            The update of each local worker that takes part in the round.

        Raises:
            WorkerLostError: a neighbor died or did not answer within the timeout.
            NonFiniteError: a neighbor's or this worker's parameters are not finite, or on a GPU were so in the step
                before; nothing is mixed then.
            RuntimeError: parameters were changed while their exchange was in flight, or are of another step or
                optimizer than this worker's, see `EditGuard`.
        """
        self.buckets.refuse(Use.BACKUP, Use.RELEASED)
        if self.buckets.use is Use.UPDATE:
            self.buckets.drop()  # the local step before failed
        self.changes.settle()
        if self.changes.may_join():
            self.parameters.equalize_newcomers(self.group)
        self.start_exchange(watched=False)
        self.drain()
        self.arrivals.settle()
        if not self._mixes_now:
            self.exchange.waited_seconds = 0.0
            return self._checked([])
        if self.topology.num_workers == 1:
            self.arrivals.disagreement = 0.0
            return self._checked([])
        if self.group.size == 1:
            self._follow_changes()  # with several processes, `start_exchange` has done it
        self.edits.check(self._round, late=self.arrivals.checks_late)
        self.buckets.claim(Use.UPDATE)
        # A parameter that a script re-pointed meanwhile is not in its bucket any more, but the bucket still holds what
        # the neighbors received. The difference to that keeps the mean of the workers exact.
        if self.compressor is None:
            updates = form_updates(gamma, self._round, self.rounds, self.buckets, with_checksums=self.edits.watched)
        else:
            updates = self.compressor.form_updates(gamma, self._round)
        self.edits.remember(updates, self._round)
        self._checked(updates)
        if self.order == "mix_first":
            self._add(updates)
        return updates

    def _checked(self, updates: list[Update]) -> list[Update]:
        self.arrivals.check(updates, self.step, self._round)
        if self.changes.due:  # the processes of a sharded worker have just agreed on it
            self.parameters.equalize_newcomers(self.group)
        return updates

    @torch.no_grad()
    def add(self, updates: list[Update]) -> None:
        """Add the updates of `consensus_update` after the local step, and count the step."""
        if self.order == "local_first":
            self._add(updates)
        if self.order == "mix_first" or not any(update.scale for update in updates):
            self.buckets.read_in()  # what the local step made of the shards; `_add` reads them where it adds something
        self.step += 1
        self.group.steps_taken = self.step

    def _add(self, updates: list[Update]) -> None:
        if updates and self.buckets.use is not Use.UPDATE:
            raise RuntimeError("this consensus update is no longer there; add the one formed last, and only once.")
        for update in updates:
            if update.scale == 0.0:
                continue
            flat = self.buckets.flats[update.local]
            # Parameters that were converted since the last step are adopted by `start_exchange`.
            with changing_alike(flat.bring_back(), self.parameters.name_of):
                for number, bucket in enumerate(flat.buckets):
                    update.add_to(number, bucket.data)
            flat.write_back()
        self.buckets.drop()

    @property
    def _round(self) -> int:
        return self.step // self.mix_every

    @property
    def _mixes_now(self) -> bool:
        return (self.step + 1) % self.mix_every == 0

    # ---- layout

    def _lay_out(self) -> None:
        self.edits.settle()  # names parameters by their offsets in the present buckets
        self.edits.compare_meetings(f"laying out the parameters at step {self.step}")
        selected = self._select()
        self.group.require_equal(signature_of(selected[0]), "trainable parameters (shape, strides, dtype)")
        self.buckets.lay_out(selected)
        self.edits.forget_meetings()
        self.changes.laid_out()
        self._reserve()

    def _reserve(self) -> None:
        if self.compressor is None:
            self.buckets.reserve(self.rounds.slots)
        else:
            self.compressor.reserve()

    def _select(self) -> list[list[Parameter]]:
        """Return the parameters to mix. If workers are several processes, all of them raise what one has found."""
        device, row, everyone = self.group.device, self.group.row, self.group.everyone
        selected: list[list[Parameter]] = []
        problem: ValueError | None = None
        try:
            selected = self.parameters.select(device if self.topology.num_workers > 1 else None, row)
        except ValueError as error:
            problem = error
        if row.size > 1:
            what = "selecting the parameters to mix"
            refusal = everyone.first(None if problem is None else f"{everyone.members.me}: {problem}", what)
            if refusal is not None:
                raise ValueError(refusal)
            # The shards that are compared next differ between the processes of a worker.
            names = [(self.parameters.name_of(p), tuple(p.shape)) for p in selected[0]]
            everyone.require_equal(names, "trainable parameters (name, shape)")
        elif problem is not None:
            raise problem
        return selected

    def _follow_changes(self) -> None:
        """Lay out parameters anew if some were added, replaced, unfrozen or converted; costs little if none was."""
        if self.changes.follows(self._any_misfit()):
            self._lay_out()

    def _any_misfit(self) -> bool:
        """Adopt what was re-pointed, and return whether something no longer fits into its bucket."""
        misfits = [flat.bring_back() for flat in self.buckets.flats]
        return any(misfits)

    def prepare_average(self) -> None:
        """Finish the exchange in flight, so that the receive buffers are free. Collective.

        The exchange of this step is posted again by `start_exchange` or the next `consensus_update`.
        """
        self.buckets.refuse(Use.UPDATE, Use.RELEASED)
        self.arrivals.settle()
        if self.topology.num_workers > 1:
            self.group.barrier(f"averaging the workers at step {self.step}")
            self.group.require_equal(self.step, "number of optimizer steps")
            self.edits.compare_meetings(f"averaging the workers at step {self.step}")
            self.drain()
            self.buckets.drop()
        converted = self._any_misfit()
        self.changes.compare(converted, f"averaging the workers at step {self.step}", self.step)
        if self.changes.follows(converted):
            self._lay_out()

    def release(self) -> None:
        """End the mixing: parameters get memory of their own, buffers are freed, and a further step is refused."""
        self.drain()
        self.arrivals.settle()
        self.buckets.drop()
        self.buckets.release()
        if self.compressor is not None:
            self.compressor.release()

    # ---- for logs and checkpoints

    def metrics(self) -> dict[str, float]:
        """Return the distance to the neighbors in the latest round, and time and bytes of the latest exchange."""
        return {
            "neighbor_disagreement": self.arrivals.disagreement,
            "wait_seconds": self.exchange.waited_seconds,
            "bytes_sent": float(self.exchange.bytes_sent),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the topology and the references of compression. Waits for the exchange in flight."""
        self.drain()
        self.arrivals.settle()
        state: dict[str, Any] = {
            "step": self.step,
            "workers": self.topology.num_workers,
            "disagreement": self.arrivals.disagreement,
            "bytes_sent": self.exchange.bytes_sent,
        }
        return state if self.compressor is None else state | self.compressor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, like `start_at`."""
        self.rounds.require_workers(state["workers"])
        self.start_at(state["step"])
        self.arrivals.disagreement = state["disagreement"]
        self.exchange.bytes_sent = state["bytes_sent"]
        if self.compressor is not None:
            self.compressor.load_state_dict(state)

    def start_at(self, step: int) -> None:
        """Count steps from `step`; the next `consensus_update` posts the exchange of the parameters as they are."""
        self.discard_exchange()
        self.step = self.group.steps_taken = step

    def discard_exchange(self) -> None:
        """Drop received parameters, because the parameters are about to change on all workers."""
        self.drain()
        self.buckets.drop()
        self.arrivals.forget()

    @property
    def topology(self) -> Topology:
        """The topology."""
        return self.rounds.topology

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters of one worker, as they are exchanged without compression."""
        return sum(x.nbytes for x in self.buckets.values(0))
