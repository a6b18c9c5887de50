"""The mixing core: x_i <- x_i + gamma * sum_j W_ij (x_j - x_i), hidden behind the computation of the step.

The life of one step: the exchange of x is in flight while forward and backward run at the same x. `finish` waits for
it and forms the consensus update, the optimizer then makes its local step at x, `apply` adds the update, and `start`
posts the exchange of the new x. Together this is Algorithm 1 to the letter, for every optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.exchange import Exchange
from dsgdac_accel.flat import FlatBuffer, FlatParameters, as_parameter_list
from dsgdac_accel.group import WorkerGroup
from dsgdac_accel.topology import Topology


class NonFiniteError(RuntimeError):
    """A worker's parameters or gradients are not finite, so the run cannot go on."""


@dataclass(frozen=True)
class Consensus:
    """How far the workers are apart: Delta has the rows x_i - x_bar, each distinct value counted once."""

    radius: float
    """mean_i ||x_i - x_bar||."""
    frobenius: float
    """||Delta||_F = sqrt(sum_i ||x_i - x_bar||^2)."""
    step: int
    """Mixes done when it was measured."""


class Mixer:
    """Keeps the parameters of one optimizer in flat buffers and mixes them with the neighbours'.

    Memory beyond the parameters themselves: one receive buffer per simultaneous neighbour, so one parameter copy for
    the one-peer topologies, the complete one and every other that averages whole groups.

    Args:
        parameters: a parameter, an iterable of them, or parameter groups; or a function that returns one of these,
            asked before every exchange, so that parameters added, replaced, frozen or unfrozen later are noticed.
        topology: who mixes with whom; built for `group.size` workers.
        group: the workers. Construction is collective.
        order: "local_first" adds gamma (W x - x) to the result of the local step (Algorithm 1); "mix_first" mixes
            before it, so that weight decay sees the mixed point; it saves a pass over memory.
        names: what to call a parameter in error messages, by `id`.

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
    ) -> None:
        if topology.num_workers != group.size:
            raise ValueError(
                f"topology '{topology.name}' is for {topology.num_workers} workers, but {group.size} were launched. "
                f"Launch {topology.num_workers}, or build it for {group.size}."
            )
        if not callable(parameters):
            listed = as_parameter_list(parameters)  # a generator can be read only once
            self._find = lambda: listed
        else:
            self._find = lambda: as_parameter_list(parameters())
        self.topology = topology
        self.group = group
        self.order = order
        self.names = names or {}
        self.step = 0
        """Mixes done so far; alone decides who talks to whom."""
        self.neighbor_disagreement: Tensor | float = 0.0
        """||sum_j W_ij x_j / (1 - W_ii) - x_i|| of the last step: from this worker to the mean of its neighbours."""
        self.last_consensus: Consensus | None = Consensus(0.0, 0.0, step=0) if group.size == 1 else None
        self._once_mixed: set[int] = set()
        self._known = {id(parameter) for parameter in self._find()}
        self._arrived = False
        self._borrowed = False
        self._released = False
        self._backup: list[Tensor] = []
        self._warned_of_edits = False
        self._update_scale = 0.0
        group.on_silence(self)
        self._lay_out()

    # ---- layout

    def _selected(self) -> list[Parameter]:
        """What to mix: all that training changes, or once changed.

        Parameters that were frozen from the start are equal on all workers and stay so; those frozen later are not.
        """
        return [p for p in self._find() if p.requires_grad or id(p) in self._once_mixed]

    def _lay_out(self) -> None:
        self.flat = FlatParameters(self._selected(), self.names)
        self._once_mixed = {id(parameter) for parameter in self.flat.parameters}
        for parameter in self.flat.parameters:
            if self.group.size > 1 and parameter.device.type != self.group.device.type:
                raise ValueError(
                    f"{self.flat.name_of(parameter)} is on {parameter.device}, but this run communicates on "
                    f"{self.group.device}. Prepare the model before, or together with, its optimizer."
                )
        self.group.require_equal(self.flat.signature(), "trainable parameters (shape, strides, dtype)")
        self.exchange = Exchange(self.group, self.topology, [buffer.data for buffer in self.flat.buffers])

    def _follow_changes(self) -> None:
        """Adopt again what was added, replaced, frozen, unfrozen or re-pointed; in an undisturbed step, only looks."""
        misfits = self.flat.bring_back()
        if misfits or not self.flat.holds(self._selected()):
            self._lay_out()

    def _equalise_newcomers(self) -> None:
        """Parameters that joined the optimizer during training start from worker 0's values, as all others did."""
        for parameter in self._find():
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                self.group.require_equal(tuple(parameter.shape), "shape of the parameter added to the optimizer")
                self.group.broadcast_(parameter, f"starting from equal values of {self.flat.name_of(parameter)}")

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters as they are exchanged."""
        return sum(buffer.data.numel() * buffer.data.element_size() for buffer in self.flat.buffers)

    # ---- one step

    def start(self) -> None:
        """Post the exchange of the parameters as they are now; the next `finish` uses it."""
        if self.group.size == 1 or self.exchange.in_flight or self._arrived:
            return
        self.group.require_open()
        self._refuse_while_borrowed()
        self._follow_changes()
        self.flat.remember_versions()
        self.exchange.post(self.step)

    def drain(self) -> None:
        """Wait for what is in flight. What arrived is kept for the next `finish`."""
        if self.exchange.in_flight:
            self.exchange.wait()
            self._arrived = True

    @torch.no_grad()
    def finish(self, gamma: float) -> None:
        """Wait for the neighbours' parameters and form gamma * sum_j W_ij (x_j - x_i), in place, for `apply`.

        With order "mix_first" the update is added at once.

        Raises:
            WorkerLostError: a neighbour did not answer within the timeout.
            NonFiniteError: a neighbour's or this worker's parameters are not finite; nothing is mixed then.
        """
        self._refuse_while_borrowed()
        self._equalise_newcomers()
        self.start()
        self.drain()
        self._arrived = False
        plan = self.exchange.plan(self.step)
        if self.group.size == 1 or not plan.weights:  # alone, or sitting this round out: the receive buffer is stale
            self.neighbor_disagreement, self._update_scale = 0.0, 0.0
            return
        self._warn_of_edits()
        weight = plan.total_weight
        # In a parameter that was re-pointed meanwhile, the flat buffer still holds what the neighbours received;
        # the difference to that keeps the mean of the workers exact.
        self._form_difference(plan.weights, weight, plan.averaging_group)
        self._check_arrived_finite()
        self._update_scale = gamma * weight
        if self.order == "mix_first":
            self._add_update()

    @torch.no_grad()
    def apply(self) -> None:
        """Add the update that `finish` formed, after the local step, and count the step."""
        if self.order == "local_first":
            self._add_update()
        self.step += 1
        self.group.steps_taken = self.step

    def _form_difference(self, weights: dict[int, float], weight: float, averaging_group: tuple | None) -> None:
        """received[0] <- (mean of the neighbours' x, weighted by W_ij) - x_i."""
        for number, buffer in enumerate(self.flat.buffers):
            first = self.exchange.received[0][number]
            if averaging_group:  # the sum over the m members, ourselves included: (sum - m x) / (m - 1)
                members = len(averaging_group)
                first.sub_(buffer.data, alpha=members).div_(members - 1)
                continue
            if len(weights) > 1:
                slots = [slot[number] for slot in self.exchange.received]
                shares = [w / weight for w in weights.values()]
                first.mul_(shares[0])
                for share, slot in zip(shares[1:], slots[1:], strict=False):
                    first.add_(slot, alpha=share)
            first.sub_(buffer.data)

    def _check_arrived_finite(self) -> None:
        """Keep a neighbour's NaN out."""
        norms = [torch.linalg.vector_norm(difference) for difference in self.exchange.received[0]]
        if not norms:  # everything is frozen
            return
        total = norms[0] if len(norms) == 1 else torch.stack([norm.double() for norm in norms]).norm()
        self.neighbor_disagreement = total
        if not bool(torch.isfinite(total)):
            self._raise_non_finite()

    def _raise_non_finite(self) -> None:
        mine = any(not bool(torch.isfinite(buffer.data).all()) for buffer in self.flat.buffers)
        peers = sorted(self.exchange.plan(self.step).weights)
        suspects = [self.group.rank] if mine else peers
        who = f"worker {suspects[0]}" if len(suspects) == 1 else f"one of workers {suspects}"
        message = f"the parameters of {who} are not finite at step {self.step}"
        self.group.report(message)
        raise NonFiniteError(
            f"{message}: the run diverged. Lower the learning rate, lengthen the warm-up, or clip the gradients."
        )

    def _add_update(self) -> None:
        if self._update_scale == 0.0:
            return
        misfits = {id(parameter) for parameter in self.flat.bring_back()}
        for buffer, difference in zip(self.flat.buffers, self.exchange.received[0], strict=True):
            buffer.data.add_(difference, alpha=self._update_scale)
            if misfits:  # moved to another device or dtype in mid-run: reach them where they are, adopt them in `start`
                self._add_to_misfits(buffer, difference, misfits)

    def _add_to_misfits(self, buffer: FlatBuffer, difference: Tensor, misfits: set[int]) -> None:
        for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
            if id(parameter) not in misfits:
                continue
            if parameter.shape != view.shape:
                raise RuntimeError(
                    f"{self.flat.name_of(parameter)} became {tuple(parameter.shape)} after {tuple(view.shape)} between "
                    f"two steps; give the resized parameter to the optimizer as a new one, on all workers."
                )
            update = difference.as_strided(view.shape, view.stride(), view.storage_offset())
            parameter.data.add_(update.to(parameter), alpha=self._update_scale)

    def _warn_of_edits(self) -> None:
        edited = self.flat.edited()
        if edited and not self._warned_of_edits:
            self._warned_of_edits = True
            warnings.warn(
                f"{self.flat.name_of(edited[0])} was changed in place while its exchange was in flight: its neighbour "
                f"may have received the old or the new values. To change weights between steps, set "
                f"GossipConfig(overlap=False).",
                stacklevel=2,
            )

    # ---- the average of the workers

    @torch.no_grad()
    def measure_consensus(self) -> Consensus:
        """Exact consensus error by a reduction of the size of the model. Collective; uses no memory of its own if
        called between `apply` and `start`."""
        if self.group.size == 1:
            return self._consensus_from(0.0)
        self._refuse_while_borrowed()
        self.drain()
        busy = self._arrived
        squared = 0.0
        for buffer, scratch in zip(self.flat.buffers, self.exchange.received[0], strict=True):
            mean = buffer.data.clone() if busy else scratch.copy_(buffer.data)
            self.group.mean_(mean, f"measuring the consensus radius at step {self.step}")
            squared += float(torch.linalg.vector_norm(mean.sub_(buffer.data), dtype=torch.float64)) ** 2
        return self._consensus_from(squared)

    def _consensus_from(self, squared_distance: float) -> Consensus:
        squares = self.group.gather(squared_distance, f"measuring the consensus radius at step {self.step}")
        radius = sum(square**0.5 for square in squares) / len(squares)
        measured = self.last_consensus = Consensus(radius, sum(squares) ** 0.5, self.step)
        return measured

    @torch.no_grad()
    def swap_in_average(self) -> None:
        """Overwrite the parameters by their mean over the workers; the receive buffer keeps this worker's own.

        Collective. `restore` must follow, also after an exception.
        """
        if self._borrowed:
            return
        if self.group.size == 1:
            self._follow_changes()
            self._backup = [buffer.data.clone() for buffer in self.flat.buffers]
            self._borrowed = True
            return
        self.group.meet(f"averaging the workers at step {self.step}")
        self.group.require_equal(self.step, "number of optimizer steps")
        self.drain()
        self._arrived = False  # the receive buffer becomes the backup: the exchange is posted again afterwards
        self._follow_changes()
        self._backup = self.exchange.received[0]
        for buffer, backup in zip(self.flat.buffers, self._backup, strict=True):
            backup.copy_(buffer.data)
        self._borrowed = True
        squared = 0.0
        for buffer, backup in zip(self.flat.buffers, self._backup, strict=True):
            self.group.mean_(buffer.data, f"averaging the workers at step {self.step}")
            squared += _squared_distance(buffer.data, backup)
        self._consensus_from(squared)

    @torch.no_grad()
    def restore(self) -> None:
        """Give this worker its own parameters back, every byte."""
        if not self._borrowed:
            return
        self._borrowed = False
        self.flat.repoint()
        for buffer, backup in zip(self.flat.buffers, self._backup, strict=True):
            buffer.data.copy_(backup)
        self._backup = []

    def release(self) -> None:
        """End the mixing: parameters get memory of their own, buffers are freed, and a further step is refused."""
        self.drain()
        self._refuse_while_borrowed()
        self._released = True
        self.flat.release()
        self.exchange.release()

    @property
    def borrowed(self) -> bool:
        """Whether the parameters hold the average of the workers at the moment."""
        return self._borrowed

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

    def state_dict(self) -> dict[str, int]:
        """Position in the topology; waits for what is in flight."""
        self.drain()
        return {"step": self.step, "workers": self.group.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position; the exchange of the loaded parameters is posted by the next `finish`."""
        if state["workers"] != self.group.size:
            raise ValueError(f"the state is of {state['workers']} workers, but {self.group.size} were launched.")
        self.drain()
        self._arrived = False
        self.step = state["step"]


def _squared_distance(a: Tensor, b: Tensor, chunk: int = 2**22) -> float:
    """||a - b||^2 of flat tensors without a temporary of their size."""
    parts = zip(a.split(chunk), b.split(chunk), strict=True)
    return sum(float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in parts)
