"""The mixer of workers that do not wait for each other: its step, its pauses and its state."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from dsgdac_accel.core.asynchronous.links import connect_neighbors
from dsgdac_accel.core.asynchronous.protocol import Answerer, Asker
from dsgdac_accel.core.asynchronous.shared_values import SharedValues
from dsgdac_accel.core.buckets import Buckets, Use
from dsgdac_accel.core.parameter_guard import MixedParameters, signature_of
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.update import Update
from dsgdac_accel.core.worker_changes import WorkerChanges
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.topology import Topology


class AsynchronousMixer:
    """Mixes the parameters of one optimizer with those of the two neighbors while training goes on.

    It has the methods of `Mixer` that a step, the average and checkpoints use. `drain` and all that calls it
    (`prepare_average`, `state_dict`, `load_state_dict`, `discard_exchange`, `release`) are collective here.

    Memory beyond the parameters: 3 parameter copies for an asker, 5 for an answerer.

    Args:
        parameters: a parameter, an iterable of them, or parameter groups; or a function that returns one of these.
        topology: the one-peer ring of an even number of workers.
        group: the processes, one worker in each, on the CPU. Construction is collective.
        names: what to call a parameter in error messages, by `id`.

    Raises:
        ValueError: the workers have different parameters, or a parameter cannot be mixed exactly.
    """

    def __init__(
        self, parameters: object, topology: Topology, group: WorkerGroup, *, names: Mapping[int, str] | None = None
    ) -> None:
        self.group = group
        self.rounds = Rounds(topology, group.members)
        self.step = 0
        """Own optimizer steps so far."""
        self.progress = 0.0
        """The largest value of the averaged clock at an own step, which schedules and the end of a run follow."""
        self.parameters = MixedParameters(parameters, names)
        self.changes = WorkerChanges(self.parameters, group)
        self.buckets = Buckets()
        selected = self.parameters.select(group.device)
        group.require_equal(signature_of(selected[0]), "trainable parameters (shape, strides, dtype)")
        self.buckets.lay_out(selected)
        self.buckets.reserve([1])
        self.arrivals = self.shared = SharedValues(group, self.rounds, self.buckets)
        self._writes = False  # whether this thread holds the lock of the shared values, for its local step
        self._side: Asker | Answerer | None = None
        if group.size > 1:
            self._side = (Answerer if group.rank % 2 else Asker)(self.shared, connect_neighbors(group))
            weakref.finalize(self, self._side.threads.stop)

    # ---- one step

    @torch.no_grad()
    def consensus_update(self, gamma: float) -> list[Update]:
        """Begin a step boundary: until `add`, only the local step may write the parameters. Returns no update.

        Args:
            gamma: that of this worker, in [0, 1], for exchanges until the next step.

        Raises:
            WorkerLostError: a neighbor died or did not answer within the timeout.
            NonFiniteError: a neighbor's or this worker's parameters are not finite; they were not mixed.
            RuntimeError: parameters were added, removed, replaced, resized or unfrozen.
        """
        self.buckets.refuse(Use.BACKUP, Use.RELEASED)
        self.group.require_open()
        if self._side is not None:
            self._side.threads.raise_error()
        began = time.perf_counter()
        self._begin_writing()
        self.shared.waited_seconds = time.perf_counter() - began
        if self.parameters.changed() or self.buckets.flats[0].bring_back():
            self._end_writing()
            raise RuntimeError(
                "parameters were added, removed, replaced, resized or unfrozen since the last step, which "
                "asynchronous=True cannot follow. Call `free_memory()`, and prepare model and optimizer again."
            )
        self.shared.gamma = gamma
        return []

    @torch.no_grad()
    def add(self, updates: list[Update]) -> None:
        """End the step boundary: add what was averaged since the last step, and count the step.

        Args:
            updates: what `consensus_update` returned.
        """
        self.shared.end_step()
        self.step += 1
        self.progress = max(self.progress, self.shared.progress)
        self.group.steps_taken = self.step
        self._end_writing()

    def start_exchange(self) -> None:
        """Ask the next neighbor, unless the answer to the last question is still on its way. Answerers go on."""
        if self._side is not None:
            if self.buckets.use is Use.FREE:
                self.buckets.claim(Use.RECEIVING)
            self._side.go_on()

    def _begin_writing(self) -> None:
        if not self._writes:  # otherwise the local step before failed
            self.shared.lock.acquire()
            self._writes = True

    def _end_writing(self) -> None:
        self._writes = False
        self.shared.lock.release()

    # ---- pauses

    def drain(self) -> None:
        """Finish all exchanges. Afterwards the parameters of all workers have their exact mean. Collective.

        An asker sends a mark behind its last question, and an answerer answers until it has the marks of both askers.
        Nobody exchanges again before the next step.
        """
        if self._writes:  # the local step failed
            self._end_writing()
        if self._side is None or self.buckets.use is Use.RELEASED:
            return
        self._side.drain()
        with self.shared.lock:
            self.shared.settle()
        if self.buckets.use is Use.RECEIVING:
            self.buckets.claim(Use.FREE)

    def prepare_average(self) -> None:
        """Finish all exchanges, so that the parameters have their exact mean. Collective."""
        self.buckets.refuse(Use.RELEASED)
        self.group.barrier(f"averaging the workers at step {self.step}")
        self.drain()

    def discard_exchange(self) -> None:
        """Finish all exchanges, because the parameters are about to change on all workers. Collective."""
        self.drain()

    def release(self) -> None:
        """End the mixing: parameters get memory of their own, and a further step is refused. Collective."""
        self.drain()
        if self._side is not None:
            self._side.threads.stop()
        self.buckets.release()

    # ---- for logs and checkpoints

    def metrics(self) -> dict[str, float]:
        """Return the progress, the distance to the neighbor in the latest exchange, and its time and bytes."""
        return {
            "progress": self.progress,
            "neighbor_disagreement": self.shared.disagreement,
            "wait_seconds": self.shared.waited_seconds,
            "bytes_sent": float(self.shared.bytes_sent),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run. Collective.

        "step", the mean number of steps, rounded down, is the same on all workers.
        """
        self.drain()
        steps = self.group.all_gather_object(self.step, "counting the steps of all workers")
        return {
            "step": sum(steps) // len(steps),
            "own_steps": self.step,
            "progress": self.progress,
            "averaged_progress": self.shared.progress + self.shared.pending_progress,
            "workers": self.topology.num_workers,
            "disagreement": self.shared.disagreement,
            "bytes_sent": self.shared.bytes_sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, that of a synchronous run included. Collective."""
        self.rounds.require_workers(state["workers"])
        self.discard_exchange()
        self.step = self.group.steps_taken = state.get("own_steps", state["step"])
        self.progress = float(state.get("progress", state["step"]))
        self.shared.progress, self.shared.pending_progress = state.get("averaged_progress", self.progress), 0.0
        self.shared.disagreement = state["disagreement"]

    @property
    def topology(self) -> Topology:
        """The one-peer ring."""
        return self.rounds.topology
