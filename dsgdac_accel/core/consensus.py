"""The consensus error of the workers, and their average."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.core.copies import Copy, Use
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.shown import Place

logger = logging.getLogger(__name__)


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
    """Forms the average of the workers in the copies, and measures how far they are from it.

    Every method that reduces over the workers is collective and costs a reduction of the size of the model. Nothing of
    a model changes; what was formed is kept until the next step.

    Args:
        mixer: of the parameters.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.group = mixer.group
        self.copies = mixer.copies
        self._latest = Consensus(0.0, 0.0, step=0) if mixer.topology.num_workers == 1 else None
        self._arriving: tuple[HostCopy, int, int] | None = None
        """Means over the workers of ||x_i - x_bar|| and its square, number of workers, and step of a measurement that
        the host has not looked at yet."""
        self._expected = self._warned = False
        """Whether the latest measurement should have found workers apart; whether that it did not was warned of."""

    @property
    def latest(self) -> Consensus | None:
        """The latest exact measurement; None before the first. On a GPU, asking waits until it is done."""
        if self._arriving is not None:
            (means, workers, step), self._arriving = self._arriving, None
            distance, square = means.read().tolist()
            self._latest = Consensus(distance, (workers * square) ** 0.5, step)
            if distance == 0.0 and self._expected and not self._warned and self.group.everyone.rank == 0:
                self._warned = True
                logger.warning(
                    "the workers are equal to the last bit after step %d, so something averages their gradients or "
                    "weights (DistributedDataParallel around the model, an all_reduce of the script or of a hook), or "
                    "all read the same batches. Gossip needs local gradients of different batches.",
                    step,
                )
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
        self._form(f"measuring the consensus radius at step {self.mixer.step}")

    @torch.no_grad()
    def form(self) -> list[Place]:
        """Form the average of the workers, and measure the consensus. Collective.

        Returns:
            The parameters of all local workers with their own values and their mean, for `Shown`.
        """
        self.mixer.prepare_average()
        self._form(f"averaging the workers at step {self.mixer.step}")
        return self.places()

    def places(self) -> list[Place]:
        """Return what `form` returned, while it is kept or shown."""
        mean, grouped = self.copies.mean, self.copies.layout.grouped
        assert mean is not None, "no average is kept"
        return [
            (slot.shown(), x, x_bar)
            for own, mine in zip(self.copies.sent or [mean], self.mixer.slots.of_workers, strict=True)
            for buffers in zip(grouped(mine), own.views, mean.views, strict=True)
            for slot, x, x_bar in zip(*buffers, strict=True)
        ]

    def _form(self, what: str) -> None:
        for copy, values in zip(self.copies.sent, self.mixer.slots.values(), strict=False):
            copy.read(values)
        if self.mixer.topology.num_workers == 1:
            self.copies.mean, self.copies.use = Copy(self.copies.layout), Use.KEPT
            self.copies.mean.read(self.mixer.slots.values()[0])
            return
        own, received = self.copies.sent, self.copies.received[0]
        mean = Copy(self.copies.layout, received[0] if received and self.mixer.compressor is None else None)
        squares: list[list[Tensor]] = [[] for _ in own]
        for number, total in enumerate(mean.buffers):
            first, *others = (copy.buffers[number] for copy in own)
            total.copy_(first)
            self.group.all_reduce_mean_(total, what, others=others)
            for mine, x in zip(squares, (first, *others), strict=True):
                mine.append(_squared_distance(total, x))
        self.copies.mean, self.copies.use = mean, Use.KEPT
        self._measured(squares)

    @property
    def swapped_in(self) -> bool:
        """Whether the parameters are the average of the workers at the moment."""
        return self.copies.use is Use.BACKUP

    @torch.no_grad()
    def errors(self) -> list[dict[int, Tensor]]:
        """Return x_i - x_bar of each local worker while the average is shown; no communication.

        Returns:
            A dictionary for each local worker, with a tensor for the `id` of each parameter of the FIRST local worker.

        Raises:
            RuntimeError: the average is not shown.
        """
        if not self.swapped_in:
            raise RuntimeError(
                "consensus errors are differences to the average: ask inside `with deployed_model(...)`."
            )
        workers = self.mixer.slots.of_workers
        slots, places = list(chain.from_iterable(self.copies.layout.grouped(workers[0]))), iter(self.places())
        return [
            {id(parameter): x - x_bar for slot, (_, x, x_bar) in mine for parameter in slot.parameters}
            for mine in (zip(slots, islice(places, len(slots)), strict=True) for _ in workers)
        ]

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
        self._arriving, self._expected = (HostCopy(means), self.mixer.topology.num_workers, step), self.mixer.moves


def _squared_distance(a: Tensor, b: Tensor, chunk: int = 2**22) -> Tensor:
    """Return ||a - b||^2 of flat tensors, shape (), without a temporary of their size."""
    parts = zip(a.split(chunk), b.split(chunk), strict=True)
    return torch.stack([torch.linalg.vector_norm(x - y, dtype=torch.float64) for x, y in parts]).square().sum()
