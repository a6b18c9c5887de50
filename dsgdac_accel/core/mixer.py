"""The mixing core: x_i <- x_i + gamma * sum_j W_ij (s_j - s_i), hidden behind the computation of the step.

s_i is the copy of x_i that was sent. Its exchange is in flight while forward and backward run. `consensus_update`
waits for it and forms the update, the optimizer takes its local step, `add` adds the update, and `start_exchange` sends
the new x. Without edits between steps s_i = x_i, and this is Algorithm 1 to the letter, for every optimizer.
`GossipStep` puts it in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.agreement import Agreement
from dsgdac_accel.core.compression import Compressor
from dsgdac_accel.core.copies import Copies, Use
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.headers import Headers
from dsgdac_accel.core.list_changes import ListChanges
from dsgdac_accel.core.nonfinite import ParameterGuard
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.slots import Slots, SlotSource
from dsgdac_accel.core.update import Update, form_updates
from dsgdac_accel.devices import follow
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.features import Setup, refuse_combinations
from dsgdac_accel.topology import Topology


class Mixer:
    """Mixes the parameters of one optimizer with those of the neighbors.

    A process with several workers has copies of each of them; they read each other's copies in place.

    Args:
        parameters: a parameter, an iterable of them, or parameter groups; or a function that returns one of these. The
            function is called in every step, so that parameters added, replaced or unfrozen later are noticed.
        topology: who mixes with whom; built for `group.size * local_workers` workers.
        group: the processes that hold the workers. Construction is collective.
        order: "local_first" adds the update to the result of the local step (Algorithm 1); "mix_first" adds it before,
            so that weight decay sees the mixed point.
        names: what to call a parameter in error messages, by `id`.
        local_workers: workers of each process; this one holds numbers `local_workers * rank` and up.
        worker_of: the local worker, from 0, that a parameter belongs to; only needed for several of them.
        source: where the values are that are mixed; by default in the parameters.
        comm_dtype: what is sent: "full" (the copies), or their rounded differences in a format of `formats`; see
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
        source: SlotSource | None = None,
        comm_dtype: str = "full",
        mix_every: int = 1,
    ) -> None:
        self.group = group
        self.order = order
        self.mix_every = mix_every
        self.step = 0
        """Optimizer steps so far; they alone decide who exchanges with whom."""
        self.moves = False
        """Whether the latest step had gradients and an lr above 0, after which workers with their own data differ."""
        compressed = comm_dtype != "full" and group.size > 1  # in one process nothing is sent
        self.rounds = Rounds(topology, group.members, local_workers, all_reduce=not compressed)
        if compressed:
            refuse_combinations(Setup(config=GossipConfig(comm_dtype=comm_dtype), topology=topology))  # type: ignore[arg-type]
        self.slots = Slots(parameters, names, local_workers, worker_of, source)
        self.copies = Copies()
        self.exchange = Exchange(group, self.rounds)
        self.compressor = Compressor(comm_dtype, self.exchange, self.copies) if compressed else None
        self.agreement = Agreement(group)
        self.headers = Headers(self.exchange, self.slots.story)
        self.changes = ListChanges(self.slots, group, self.agreement)
        self.parameter_guard = ParameterGuard(group, self.rounds, self.slots, self.copies, self.agreement)
        self._sent_before: list[list[Tensor]] | None = None
        """s of a saved run, where a script had edited x since it was sent; for the next exchange."""
        self._was_sent: list[list[int]] | None = None
        """Sizes of the send buffers of a saved run that had sent its copy; None if it had not."""
        self._mixed_first: int | None = None
        """The step whose update was added before the local step: it is not mixed again if that is retried."""
        self._looked = False
        """Whether `consensus_update` has looked at the slots. What changes after it shows in the next step."""
        self._stream: Any = None
        """The stream that used the copies last."""
        self._lay_out(first=True)
        group.register(self)

    # ---- one step

    def start_exchange(self, lr: float = 0.0) -> None:
        """Copy the parameters as they are now and send them, unless that is done; `consensus_update` uses it.

        Args:
            lr: learning rate of the latest step, summed over parameter groups; must be equal on all workers.
        """
        if self.copies.use in (Use.IN_FLIGHT, Use.RECEIVED):
            return
        self._stream = follow(self._stream, self.group.device)
        self.copies.refuse(Use.UPDATE, Use.BACKUP, Use.RELEASED)
        self.copies.drop()
        self._follow_changes(lr)
        if not self._mixes_now or self.topology.num_workers == 1:
            self.exchange.bytes_sent = 0
            return
        self.group.require_open()
        self._copy()
        if self.group.size == 1:
            self.copies.use = Use.RECEIVED
            return
        if self.compressor is not None:
            self.compressor.start()
        self._post(self._round, self.changes.code, lr)

    def _follow_changes(self, lr: float) -> None:
        """Take over another list of what is mixed, before anything of it is sent."""
        if not self._looked:
            self.slots.look()
        self._looked = False
        if self.changes.pending:
            self._agree_with_neighbors(lr)
            self._lay_out()

    @torch.no_grad()
    def _copy(self) -> None:
        """s <- x."""
        for sent, values in zip(self.copies.sent, self.slots.values(), strict=True):
            sent.read(values)
        before, self._sent_before = self._sent_before, None
        if before is not None and [[len(s) for s in each] for each in before] == self._sizes():
            for sent, saved in zip(self.copies.sent, before, strict=True):
                for s, value in zip(sent.buffers, saved, strict=True):
                    s.copy_(value)
            self.slots.source.mark_written()

    def _post(
        self, round_: int, list_code: int, lr: float, received: Sequence[Sequence[Sequence[Tensor]]] | None = None
    ) -> None:
        step = (round_ + 1) * self.mix_every - 1
        self.headers.write(round_, step, lr, list_code)
        self.group.hold(self)
        messages, encode = self.compressor.messages(round_) if self.compressor else (self._copies_of, None)
        self.exchange.post(
            round_,
            f"the exchange of step {step}",
            lambda local, receiver: [*messages(local, receiver), *self.headers.outgoing(local)],
            self.headers.incoming(self.copies.received if received is None else received),
            encode,
        )
        if received is None:
            self.copies.use = Use.IN_FLIGHT

    def _copies_of(self, local: int, receiver: int | None) -> Sequence[Tensor]:
        """Return s, which is sent as it is to every receiver."""
        return self.copies.sent[local].buffers

    def drain(self) -> None:
        """Wait for the exchange in flight. What was received is kept for the next `consensus_update`."""
        self._stream = follow(self._stream, self.group.device)  # in NCCL's `wait`, only the current stream waits
        if self.copies.use is not Use.IN_FLIGHT:
            return
        try:
            self.exchange.wait()
        except Exception:  # after an interrupt by the user it is still in flight
            self.group.let_go(self)
            self.copies.use = Use.FREE
            raise
        self.group.let_go(self)
        self.copies.use = Use.RECEIVED

    def restart_exchange(self) -> None:
        """Drop the exchange: the next step sends the parameters as they are then. Call it on all workers.

        After a script has given the workers other weights, they mix these, and not what was sent before.
        """
        self.drain()
        self.copies.drop()
        self._sent_before = self._was_sent = None

    def resume_exchange(self, lr: float = 0.0) -> None:
        """Send what the saved run had sent, once its parameters are loaded. Call it on all workers.

        Otherwise the next step sends the parameters as they are then, with what a script has changed meanwhile.
        """
        was_sent, self._was_sent = self._was_sent, None
        if was_sent is not None:
            self._follow_changes(lr)
        if was_sent == self._sizes():  # else the saved run had thawed other parameters
            self.start_exchange(lr)

    @torch.no_grad()
    def consensus_update(self, gamma: float, lr: float = 0.0) -> list[Update]:
        """Wait for the neighbors' copies and form u = gamma * sum_j W_ij (s_j - s_i), for `add`.

        With order "mix_first" the update is added at once, and `add` only completes the step.

        Args:
            gamma: the same on all workers, in [0, 1].
            lr: as for `start_exchange`.

        Returns:
            The update of each local worker that takes part in the round.

        Raises:
            WorkerLostError: a neighbor died or did not answer within the timeout.
            NonFiniteError: what a neighbor or this worker sent is not finite, or on a GPU was so in the step before;
                nothing is mixed then.
            RuntimeError: a neighbor is at another step or optimizer, or trains other parameters.
            ValueError: a neighbor has another learning rate.
        """
        self.copies.refuse(Use.BACKUP, Use.RELEASED)
        self._looked = False
        if self.copies.use is Use.UPDATE:
            self.copies.drop()  # the local step before failed
        self.agreement.resolve()
        sent_earlier = self.copies.use in (Use.IN_FLIGHT, Use.RECEIVED) or self._sent_before is not None
        if not sent_earlier:
            self.slots.source.read()
        self.start_exchange(lr)
        self.drain()
        updates: list[Update] = []
        if not self._mixes_now:
            self.exchange.waited_seconds = 0.0
        elif self.topology.num_workers > 1:
            differs = self.headers.compare()
            if differs is not None:
                self.agreement.vote("header", differs, self._raise_for_header)
            self.copies.use = Use.UPDATE
            if self.compressor is None:
                updates = form_updates(gamma, self._round, self.rounds, self.copies)
            else:
                updates = self.compressor.form_updates(gamma, self._round)
        if sent_earlier:  # what a script has written since then is added to what is mixed
            self.slots.source.read()
        self.slots.look()
        self._looked = True
        self.changes.vote()
        self.parameter_guard.vote(updates, self._round)
        self.agreement.close(self.step)
        self.parameter_guard.let_skip(updates)
        if self.changes.pending:
            self._agree_with_neighbors(lr)
        if self.order == "mix_first":
            self._add(updates)
            self._mixed_first = self.step
        return updates

    def _raise_for_header(self, differs: Sequence[float], step: int) -> None:
        """Raise an error if a neighbor of this worker, in any of its processes, is not in step with it."""
        if not any(differs):
            return
        error = self.group.row.first(self.headers.error(), f"comparing the neighbors at step {step}")
        assert error is not None, "a header differs"
        self.copies.drop()
        self.group.report(str(error))
        raise error

    @torch.no_grad()
    def add(self, updates: list[Update]) -> None:
        """Add the updates of `consensus_update` after the local step, and count the step."""
        if self.order == "local_first":
            self._add(updates)
        self.step += 1
        self.group.steps_taken = self.step

    def _add(self, updates: list[Update]) -> None:
        if updates and self.copies.use is not Use.UPDATE:
            raise RuntimeError("this consensus update is no longer there; add the one formed last, and only once.")
        updates = [update for update in updates if update.scale != 0.0]
        if updates:
            values = self.slots.values()
            for update in updates:
                difference = self.copies.differences[update.formed_by]
                difference.add_to(values[update.local], update.scale, update.skip, not self.slots.changed)
        self.copies.drop()

    @property
    def _round(self) -> int:
        return self.step // self.mix_every

    @property
    def _mixes_now(self) -> bool:
        return (self.step + 1) % self.mix_every == 0 and self._mixed_first != self.step

    # ---- layout

    def _lay_out(self, first: bool = False) -> None:
        """Make copies for the present list of what is mixed, which is equal on all workers."""
        self._select()
        if first:
            self.group.require_equal(self.slots.signature(), "trainable parameters (shape, strides, dtype)")
        self.copies.drop()
        values: list[list[Any]] = self.slots.values()
        counts = self.rounds.slots if self.topology.num_workers > 1 else []
        if self.compressor is None:
            self.copies.lay_out(values, counts, rounded_to=[slot.rounded_to for slot in self.slots.of_workers[0]])
        else:
            self.copies.lay_out(values, counts, self.compressor.format.message)
        self.slots.arrange(self.copies)
        if self.compressor is not None:
            self.compressor.reserve()
        self.changes.taken_over()

    def _select(self) -> None:
        """List the parameters to mix. If workers are several processes, all of them raise what one has found."""
        device, row, everyone = self.group.device, self.group.row, self.group.everyone
        mixers = (mixer for mixer in self.group.communicators() if isinstance(mixer, Mixer) and mixer is not self)
        problem: ValueError | None = None
        try:
            self.slots.select(
                device if self.topology.num_workers > 1 else None,
                row,
                [mixer.slots for mixer in mixers if mixer.copies.use is not Use.RELEASED],
            )
        except ValueError as error:
            problem = error
        if row.size > 1:
            told = None if problem is None else f"{everyone.members.me}: {problem}"
            refusal = everyone.first(told, "selecting the parameters to mix")
            if refusal is not None:
                raise ValueError(refusal)
            everyone.require_equal(self.slots.named_shapes(), "trainable parameters (name, shape)")
        elif problem is not None:
            raise problem

    def _agree_with_neighbors(self, lr: float) -> None:
        """Tell the neighbors of a whole period that the list changed, and let newcomers start from equal values.

        A worker that changed nothing goes on to send its next copy, and a collective would wait for it until the
        timeout. So the others send copies of the old layout once more, for the rounds to come, with another number for
        the list. A worker that changed and one that did not meet within a period, and both end by name. Where all have
        changed alike, all are here.

        Raises:
            RuntimeError: a neighbor did not change its list, or in another way.
        """
        list_code = self.changes.next_code()
        if list_code == self.changes.agreed_code:
            return
        if self.group.size > 1:
            self.agreement.resolve()
            first = self._round + (self._mixes_now and self.copies.use is Use.UPDATE)
            received = [[list(map(torch.empty_like, buffers)) for buffers in slots] for slots in self.copies.received]
            for round_ in range(first, first + self.topology.period):
                self._post(round_, list_code, lr, received)
                try:
                    self.exchange.wait()
                finally:
                    self.group.let_go(self)
                differs = self.headers.compare()
                wrong = differs is not None and bool(differs)
                if self.group.row.any(wrong, "comparing the neighbors of a worker"):
                    self._raise_for_header([1.0], self.step)
        self.slots.equalize_newcomers(self.group)
        self.changes.agreed_code = self.changes.next_code()

    def prepare_average(self) -> None:
        """Prepare a measurement, and raise what the last step has found. Collective."""
        self.copies.refuse(Use.UPDATE, Use.RELEASED)
        self.agreement.resolve()
        if self.topology.num_workers > 1:
            self.group.barrier(f"averaging the workers at step {self.step}")
        self.prepare_measurement()

    def prepare_measurement(self) -> None:
        """Drop the exchange, so that the copies are free, and take over another list of parameters. Collective.

        The next `consensus_update` sends the parameters as they are then. The host does not wait for a GPU.
        """
        self.copies.refuse(Use.UPDATE, Use.BACKUP, Use.RELEASED)
        if self.topology.num_workers > 1:
            self.restart_exchange()
        self.slots.source.read()
        self.changes.compare(f"averaging the workers at step {self.step}", self.step)
        if self.changes.pending:
            self.slots.equalize_newcomers(self.group)
            self._lay_out()

    def release(self) -> None:
        """End the mixing: buffers are freed, and a further step is refused."""
        self.drain()
        self.agreement.resolve()
        self.copies.release()
        if self.compressor is not None:
            self.compressor.release()

    # ---- for logs and checkpoints

    def metrics(self) -> dict[str, float]:
        """Return the distance to the neighbors in the latest round, and time and bytes of the latest exchange."""
        return {
            "neighbor_disagreement": self.parameter_guard.disagreement,
            "wait_seconds": self.exchange.waited_seconds,
            "bytes_sent": float(self.exchange.bytes_sent),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the topology, the references of compression, and s where it is no longer x.

        Waits for the exchange in flight, which goes on afterwards.

        Raises:
            RuntimeError: the update of this step is not added yet, as in a hook of the optimizer.
        """
        self.copies.refuse(Use.UPDATE)
        self.drain()
        self.agreement.resolve()
        if self.copies.use is not Use.RECEIVED:
            self.slots.source.read()  # edits become those of the saved masters, here as in the resumed run
        state: dict[str, Any] = {
            "step": self.step,
            "workers": self.topology.num_workers,
            "disagreement": self.parameter_guard.disagreement,
            "bytes_sent": self.exchange.bytes_sent,
            "mixed": self.slots.mixed_places(),
            "mixed_first": self._mixed_first,
            "was_sent": self._sizes() if self.copies.use is Use.RECEIVED else None,
        }
        if self.copies.use is Use.RECEIVED and self._is_edited():
            state["sent"] = [[s.clone() for s in sent.buffers] for sent in self.copies.sent]
        return state if self.compressor is None else state | self.compressor.state_dict()

    def _is_edited(self) -> bool:
        """Return whether x is another one than s, because a script has changed it since it was sent. Waits once."""
        self.slots.look()
        differ = [
            (view != value).any() if value is not None else torch.ones((), dtype=torch.bool, device=view.device)
            for sent, values in zip(self.copies.sent, self.slots.values(), strict=True)
            for views, group in zip(sent.views, sent.layout.grouped(values), strict=True)
            for view, value in zip(views, group, strict=True)
        ]
        return self.slots.source.is_edited() or (bool(differ) and bool(torch.stack(differ).any()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, like `start_at`."""
        self.rounds.require_workers(state["workers"])
        self.start_at(state["step"])
        self.parameter_guard.disagreement = state["disagreement"]
        self.exchange.bytes_sent = state["bytes_sent"]
        self._sent_before, self._was_sent = state.get("sent"), state.get("was_sent")
        self._mixed_first = state.get("mixed_first")
        self.slots.mix_places(state["mixed"])
        if self.compressor is not None:
            self.compressor.load_state_dict(state)

    def start_at(self, step: int) -> None:
        """Count steps from `step`; the next `consensus_update` sends the parameters as they are then."""
        self.restart_exchange()
        self.agreement.forget()
        self.step = self.group.steps_taken = step
        self.moves = False
        self._mixed_first = None

    def _sizes(self) -> list[list[int]]:
        return [[len(s) for s in sent.buffers] for sent in self.copies.sent]

    @property
    def topology(self) -> Topology:
        """The topology."""
        return self.rounds.topology

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters of one worker, as they are exchanged without compression."""
        return self.copies.layout.nbytes
