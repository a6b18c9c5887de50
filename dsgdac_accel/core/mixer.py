"""The mixing core: x_i <- x_i + gamma * sum_j W_ij (x_j - x_i), hidden behind the computation of the step.

The life of one step: the exchange of x is in flight while forward and backward run at the same x. `finish` waits for
it and forms the consensus update, the optimizer then makes its local step at x, `apply` adds the update, and `start`
posts the exchange of the new x. Together this is Algorithm 1 to the letter, for every optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.arrivals import ChecksArrivals
from dsgdac_accel.core.buckets import FlatBuffer, FlatParameters, as_parameter_list
from dsgdac_accel.core.consensus import Consensus, KnowsAverage
from dsgdac_accel.core.layout import KeepsLayout
from dsgdac_accel.core.parameter_list import ParameterList
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.topology import Topology


class Mixer(KeepsLayout, ChecksArrivals, KnowsAverage):
    """Keeps the parameters of one optimizer in flat buffers and mixes them with the neighbours'.

    Memory beyond the parameters themselves: one receive buffer per simultaneous neighbour, so one parameter copy for
    the one-peer topologies, the complete one and every other that averages whole groups. A process that holds several
    workers has these for each of them; what they need of each other is read in place. What `comm_dtype` needs instead
    says `CompressedExchange`.

    Args:
        parameters: a parameter, an iterable of them, or parameter groups; or a function that returns one of these,
            asked before every exchange, so that parameters added, replaced, frozen or unfrozen later are noticed.
        topology: who mixes with whom; built for `group.size * per_process` workers.
        group: the processes that hold the workers. Construction is collective.
        order: "local_first" adds gamma (W x - x) to the result of the local step (Algorithm 1); "mix_first" mixes
            before it, so that weight decay sees the mixed point; it saves a pass over memory.
        names: what to call a parameter in error messages, by `id`.
        per_process: how many workers this process holds, like all others: `per_process * rank` and the next ones.
        worker_of: which of them a parameter belongs to, from 0; only needed where there are several.
        comm_dtype: what is sent: "full" (the parameters), or their rounded differences in "bf16" or "int8"; see
            `compression`.
        mix_every: mix in every k-th step, the last one of k; round r of the topology is then that of steps rk to
            rk + k - 1.

    Raises:
        ValueError: the topology is for another number of workers, the workers hold different parameters, or a
            parameter cannot be mixed exactly (see `FlatParameters`).
    """

    def __init__(
        self,
        parameters: object | Callable[[], object],
        topology: Topology,
        group: WorkerGroup,
        *,
        order: str = "local_first",
        names: Mapping[int, str] | None = None,
        per_process: int = 1,
        worker_of: Callable[[Parameter], int] | None = None,
        comm_dtype: str = "full",
        mix_every: int = 1,
    ) -> None:
        self.num_workers = group.size * per_process
        if topology.num_workers != self.num_workers:
            each = f" processes of {per_process} workers each" if per_process > 1 else ""
            raise ValueError(
                f"topology '{topology.name}' is for {topology.num_workers} workers, but {group.size}{each} were "
                f"launched. Launch {topology.num_workers} workers, or build it for {self.num_workers}."
            )
        if not callable(parameters):
            listed = as_parameter_list(parameters)  # a generator can be read only once
            self.find: Callable[[], list[Parameter]] = lambda: listed
        else:
            self.find = ParameterList(parameters)
        self.topology = self._whole_topology = topology
        self.group = group
        self._numbers = list(group.original_ranks)
        self.order = order
        self.names = names or {}
        self.per_process = per_process
        self.workers = range(group.rank * per_process, (group.rank + 1) * per_process)
        """Numbers of the workers that this process holds."""
        self._worker_of = worker_of or (lambda parameter: 0)
        self.comm_dtype = comm_dtype
        self.mix_every = mix_every
        self.step = 0
        """Mixes done so far; alone decides who talks to whom."""
        self.last_consensus: Consensus | None = Consensus(0.0, 0.0, step=0) if self.num_workers == 1 else None
        self._arrived = False
        self._borrowed = False
        self._released = False
        self._backup: list[list[Tensor]] = []
        self._warned_of_edits = False
        self._updates: list[Update] = []
        self.left_out: list[int] = []
        """Steps in which this process did not mix, because a worker was lost around them."""
        self._mixes_from = 0
        group.register(self)
        self._begin_checks()
        self._begin_layout()

    # ---- one step

    def start(self) -> None:
        """Post the exchange of the parameters as they are now; the next `finish` uses it."""
        if self.group.size == 1 or self.exchange.in_flight or self._arrived:
            return  # in one process, neighbours are read when the update is formed
        if not self._mixes_now:
            self.exchange.bytes_sent = 0
            return
        self.group.require_open()
        self._refuse_while_borrowed()
        self._follow_changes()
        self._state_to_come = None  # it did not fit, and from now on the references move
        for flat in self.flats:
            flat.remember_versions()
        self.exchange.post(self._round, f"the exchange of step {self.step}")

    @property
    def _round(self) -> int:
        return self.step // self.mix_every

    @property
    def _mixes_now(self) -> bool:
        return (self.step + 1) % self.mix_every == 0 and self.step >= self._mixes_from

    def drain(self) -> None:
        """Wait for what is in flight. What arrived is kept for the next `finish`."""
        if self.exchange.in_flight and self.group.complete_exchange(self.exchange.wait):
            self._arrived = True

    @torch.no_grad()
    def finish(self, gamma: float) -> None:
        """Wait for the neighbours' parameters and form gamma * sum_j W_ij (x_j - x_i), in place, for `apply`.

        With order "mix_first" the update is added at once.

        Raises:
            WorkerLostError: a neighbour did not answer within the timeout.
            NonFiniteError: a neighbour's or this worker's parameters are not finite, or where checks are late were so
                in the step before; nothing is mixed then.
        """
        self._refuse_while_borrowed()
        self._equalise_newcomers()
        self.start()
        self.drain()
        self.settle_arrivals()
        self._arrived = False
        self._updates = []
        if not self._mixes_now:
            self.exchange.waited_seconds = 0.0
            if self.step < self._mixes_from:
                self.left_out.append(self.step)
            return
        if self.num_workers == 1:
            self.neighbor_disagreement = 0.0
            return
        if self.group.size == 1:
            self._follow_changes()
        self._warn_of_edits()
        # In a parameter that was re-pointed meanwhile, the flat buffer still holds what the neighbours received;
        # the difference to that keeps the mean of the workers exact.
        self._updates = self.exchange.updates(self.flats, self._round)
        self._check_arrivals()
        for update in self._updates:
            update.scale *= gamma
        if self.order == "mix_first":
            self._add_updates()

    @torch.no_grad()
    def apply(self) -> None:
        """Add the update that `finish` formed, after the local step, and count the step."""
        if self.order == "local_first":
            self._add_updates()
        self._updates = []
        self.step += 1
        self.group.steps_taken = self.step

    def _add_updates(self) -> None:
        for update in self._updates:
            if update.scale == 0.0:
                continue
            flat = self.flats[update.worker]
            misfits = {id(parameter) for parameter in flat.bring_back()}
            if misfits and update.left_out is not None and bool(update.left_out):
                continue
            for number, buffer in enumerate(flat.buffers):
                update.add_to(number, buffer.data)
                if misfits:  # moved to another device or dtype in mid-run: reach them there, adopt them in `start`
                    self._add_to_misfits(flat, buffer, update.dense(number), misfits, update.scale)

    def _add_to_misfits(
        self, flat: FlatParameters, buffer: FlatBuffer, difference: Tensor, misfits: set[int], scale: float
    ) -> None:
        for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
            if id(parameter) not in misfits:
                continue
            if parameter.shape != view.shape:
                raise RuntimeError(
                    f"{flat.name_of(parameter)} became {tuple(parameter.shape)} after {tuple(view.shape)} between "
                    f"two steps; give the resized parameter to the optimizer as a new one, on all workers."
                )
            update = difference.as_strided(view.shape, view.stride(), view.storage_offset())
            parameter.data.add_(update.to(parameter), alpha=scale)

    def _warn_of_edits(self) -> None:
        edited = [parameter for flat in self.flats for parameter in flat.edited()]
        if edited and not self._warned_of_edits:
            self._warned_of_edits = True
            warnings.warn(
                f"{self.flat.name_of(edited[0])} was changed in place while its exchange was in flight: its neighbour "
                f"may have received the old or the new values. To change weights between steps, set "
                f"GossipConfig(overlap=False).",
                stacklevel=2,
            )

    # ---- when a worker is lost

    def abandon(self) -> None:
        """Give up what is in flight, before connections end."""
        self.exchange.abandon()
        self._arrived = False

    def regroup(self, step: int) -> None:
        """Go on with the workers that are left, from the round after that of `step` on. Collective.

        Up to there, where the furthest of them may have got something of a lost worker already and the others have
        not, everybody keeps to itself. So all of them end with equally many steps.

        The topology is built anew for those who are left; see `Topology.of_survivors`.
        """
        here = self.per_process
        places = [self._numbers.index(number) for number in self.group.original_ranks]
        left = [here * place + worker for place in places for worker in range(here)]
        self.num_workers = len(left)
        self.topology = self._whole_topology.of_survivors(left)
        self.workers = range(self.group.rank * here, (self.group.rank + 1) * here)
        self._mixes_from = step + 1
        self._make_exchange()

    def release(self) -> None:
        """End the mixing: parameters get memory of their own, buffers are freed, and a further step is refused."""
        self.drain()
        self.settle_arrivals()
        self._refuse_while_borrowed()
        self._released = True
        for flat in self.flats:
            flat.release()
        self.exchange.release()

    def _refuse_while_borrowed(self) -> None:
        if self._released:
            raise RuntimeError(
                "gossip has ended for these parameters (`deploy` or `free_memory`); prepare model and optimizer again "
                "to train on."
            )
        if self._borrowed:
            raise RuntimeError(
                "the parameters are the deployed average now; train only after leaving `with deployed_model(...)`."
            )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Position in the topology, and what pairs refer to; waits for what is in flight."""
        self.drain()
        self.settle_arrivals()
        return {"step": self.step, "workers": self.num_workers, **self.exchange.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; the exchange of the loaded parameters is posted by the next `finish`."""
        if state["workers"] != self.num_workers:
            raise ValueError(f"the state is of {state['workers']} workers, but {self.num_workers} were launched.")
        self.drain()
        self._arrived, self._unread = False, None
        self._mixes_from = 0
        self.step = state["step"]
        self._state_to_come = None if self.exchange.load_state_dict(state) else state
