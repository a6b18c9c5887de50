"""The consensus error of the workers, and their average in place of their own parameters for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.copies import Copy, Use
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.distributed.shards import is_sharded


@dataclass(frozen=True)
class Consensus:
    """The consensus error. Delta has the rows x_i - x_bar, each distinct value counted once."""

    radius: float
    """mean_i ||x_i - x_bar||."""
    frobenius: float
    """||Delta||_F = sqrt(sum_i ||x_i - x_bar||^2)."""
    step: int
    """Optimizer steps done when it was measured."""

    def metrics(self) -> dict[str, float]:
        """Return it for logs."""
        return {"radius": self.radius, "radius_step": float(self.step), "frobenius": self.frobenius}


class Average:
    """Measures how far apart the workers are, and swaps in their average.

    Every method that reduces over the workers is collective and costs a reduction of the size of the model.

    Args:
        mixer: of the parameters; this class changes them between `swap_in` and `restore`.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.group = mixer.group
        self.copies = mixer.copies
        self._own: list[Copy] = []
        """[local worker] its own parameters while they are the average: the backup."""
        self._mean: Copy | None = None
        self._places: list[list[tuple[Parameter, Tensor]]] = []
        """[local worker] the parameter of each slot when the average was swapped in, and its memory then."""
        self._latest = Consensus(0.0, 0.0, step=0) if mixer.topology.num_workers == 1 else None
        self._arriving: tuple[HostCopy, int, int] | None = None
        """Means over the workers of ||x_i - x_bar|| and its square, number of workers, and step of a measurement that
        the host has not looked at yet."""

    @property
    def latest(self) -> Consensus | None:
        """The latest exact measurement; None before the first. On a GPU, asking waits until it is done."""
        if self._arriving is not None:
            (means, workers, step), self._arriving = self._arriving, None
            distance, square = means.read().tolist()
            self._latest = Consensus(distance, (workers * square) ** 0.5, step)
        return self._latest

    @property
    def latest_step(self) -> int | None:
        """Step of the latest measurement; never waits."""
        if self._arriving is not None:
            return self._arriving[2]
        return None if self._latest is None else self._latest.step

    def measure(self) -> Consensus:
        """Measure the exact consensus error and return it. Collective."""
        self.start_measurement()
        assert self.latest is not None
        return self.latest

    @torch.no_grad()
    def start_measurement(self) -> None:
        """Measure the exact consensus error, for `latest`, without waiting for a GPU. Collective.

        Drops the exchange in flight, in whose buffers the mean is formed.
        """
        if self.mixer.topology.num_workers == 1:
            self._latest, self._arriving = Consensus(0.0, 0.0, self.mixer.step), None
            return
        self.mixer.prepare_measurement()
        self._form_mean(f"measuring the consensus radius at step {self.mixer.step}")

    def _form_mean(self, what: str) -> tuple[list[Copy], Copy]:
        """Return the workers' own parameters and their mean, in copies; also measures the consensus. Collective."""
        own = self.copies.sent
        for copy, values in zip(own, self.mixer.slots.values(), strict=True):
            copy.read(values)
        received = self.copies.received[0]
        mean = Copy(own[0].layout, received[0] if received and self.mixer.compressor is None else None)
        squares: list[list[Tensor]] = [[] for _ in own]
        for number, total in enumerate(mean.buffers):
            first, *others = (copy.buffers[number] for copy in own)
            total.copy_(first)
            self.group.all_reduce_mean_(total, what, others=others)
            for mine, x in zip(squares, (first, *others), strict=True):
                mine.append(_squared_distance(total, x))
        self._measured(squares)
        return own, mean

    @torch.no_grad()
    def swap_in(self) -> None:
        """Overwrite the parameters by their mean over the workers until `restore`; also measures the consensus.

        Collective. `restore` must follow, also after an exception.
        """
        if self.swapped_in:
            return
        self.mixer.prepare_average()
        slots = self.mixer.slots
        self._places = [[(slot.parameters[0], slot.shown().detach()) for slot in mine] for mine in slots.of_workers]
        if self.mixer.topology.num_workers == 1:
            self._own = [Copy(self.copies.layout)]
            self._own[0].read([value for _, value in self._places[0]])
            self._mean = self._own[0]
        else:
            self._own, self._mean = self._form_mean(f"averaging the workers at step {self.mixer.step}")
            for places in self._places:
                self._mean.write([value for _, value in places])
        self.copies.use = Use.BACKUP

    @torch.no_grad()
    def restore(self) -> None:
        """Give the workers of this process their own parameters back, every byte; does nothing without an average.

        They get them in the memory that they had, also where a script has re-pointed them since.
        """
        if not self.swapped_in:
            return
        for copy, places in zip(self._own, self._places, strict=True):
            for parameter, value in places:
                if not is_sharded(parameter) and parameter.data_ptr() != value.data_ptr():
                    parameter.data = value
            copy.write([value for _, value in places])
        self._own, self._mean, self._places = [], None, []
        self.copies.use = Use.FREE

    @property
    def swapped_in(self) -> bool:
        """Whether the parameters are the average of the workers at the moment."""
        return self.copies.use is Use.BACKUP

    @torch.no_grad()
    def errors(self) -> list[dict[int, Tensor]]:
        """Return x_i - x_bar of each local worker while the average is swapped in; no communication.

        Returns:
            A dictionary for each local worker, with a tensor for the `id` of each parameter of the FIRST local worker.

        Raises:
            RuntimeError: the average is not swapped in.
        """
        if not self.swapped_in:
            raise RuntimeError(
                "consensus errors are differences to the average: ask inside `with deployed_model(...)`."
            )
        assert self._mean is not None
        errors: list[dict[int, Tensor]] = []
        slots = self.copies.layout.grouped(self.mixer.slots.of_workers[0])
        for copy in self._own:
            of_worker: dict[int, Tensor] = {}
            for group, own, mean in zip(slots, copy.views, self._mean.views, strict=True):
                for slot, x, x_bar in zip(group, own, mean, strict=True):
                    of_worker |= dict.fromkeys(map(id, slot.parameters), x - x_bar)
            errors.append(of_worker)
        return errors

    def metrics(self) -> dict[str, float]:
        """Return the latest measurement, with its step; empty before the first."""
        return {} if self.latest is None else self.latest.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the latest measurement."""
        return {"latest": None if self.latest is None else asdict(self.latest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved measurement."""
        self._latest, self._arriving = None if state["latest"] is None else Consensus(**state["latest"]), None

    def _measured(self, squared_distances: list[list[Tensor]]) -> None:
        """Reduce the squared distances of the local workers, [worker][buffer], over all workers."""
        step = self.mixer.step
        nothing = torch.zeros((), dtype=torch.float64, device="cpu")  # everything may be frozen
        squares = torch.stack([torch.stack(mine or [nothing]).sum() for mine in squared_distances])
        squares = self.group.row.sum(squares, f"measuring the consensus radius at step {step}")
        means = torch.stack([squares.sqrt().mean(), squares.mean()])
        self.group.all_reduce_mean_(means, f"measuring the consensus radius at step {step}")
        self._arriving = HostCopy(means), self.mixer.topology.num_workers, step


def _squared_distance(a: Tensor, b: Tensor, chunk: int = 2**22) -> Tensor:
    """Return ||a - b||^2 of flat tensors, shape (), without a temporary of their size."""
    parts = zip(a.split(chunk), b.split(chunk), strict=True)
    return torch.stack([torch.linalg.vector_norm(x - y, dtype=torch.float64) for x, y in parts]).square().sum()
