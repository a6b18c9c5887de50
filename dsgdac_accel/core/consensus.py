"""The consensus error of the workers, and their average in place of their own parameters for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import Use
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.spare_buffers import SpareBuffers


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
        self.buckets = mixer.buckets
        self.spare = SpareBuffers(mixer.buckets)
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

        The mean is formed in the receive buffers if they are free, or else in new memory of the size of a bucket.
        """
        if self.mixer.topology.num_workers == 1:
            self._latest, self._arriving = Consensus(0.0, 0.0, self.mixer.step), None
            return
        self.buckets.refuse(Use.BACKUP, Use.RELEASED)
        self.mixer.drain()
        self.buckets.read_in()
        what = f"measuring the consensus radius at step {self.mixer.step}"
        squares: list[list[Tensor]] = [[] for _ in self.buckets.flats]
        for number, (first, *others) in enumerate(zip(*self._values(), strict=True)):
            with self.spare.scratch(number) as mean:
                mean.copy_(first)
                self.group.all_reduce_mean_(mean, what, others=others)
                for mine, x in zip(squares, (first, *others), strict=True):
                    mine.append(_squared_distance(mean, x))
        self._measured(squares)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Overwrite the parameters by their mean over the workers until `restore`; also measures the consensus.

        Collective. `restore` must follow, also after an exception.
        """
        if self.swapped_in:
            return
        self.mixer.prepare_average()
        self.spare.back_up()
        if self.mixer.topology.num_workers == 1:
            return
        squares: list[list[Tensor]] = [[] for _ in self.buckets.flats]
        for number, mean in enumerate(self.buckets.values(0)):
            own = [kept[number] for kept in self.spare.backup]
            self.group.all_reduce_mean_(mean, f"averaging the workers at step {self.mixer.step}", others=own[1:])
            for worker, x in enumerate(own):
                squares[worker].append(_squared_distance(mean, x))
                if worker > 0:
                    self.buckets.values(worker)[number].copy_(mean)
        self.buckets.write_back()
        self._measured(squares)

    def restore(self) -> None:
        """Give the workers of this process their own parameters back, every byte."""
        self.spare.restore()

    @property
    def swapped_in(self) -> bool:
        """Whether the parameters are the average of the workers at the moment."""
        return self.buckets.use is Use.BACKUP

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
        errors: list[dict[int, Tensor]] = []
        for kept in self.spare.backup:
            of_worker: dict[int, Tensor] = {}
            for bucket, own in zip(self.buckets.flats[0].buckets, kept, strict=True):
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    of_worker[id(parameter)] = own.as_strided(view.shape, view.stride(), view.storage_offset()) - view
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

    def _values(self) -> list[list[Tensor]]:
        return [self.buckets.values(worker) for worker in range(len(self.buckets.flats))]

    def _measured(self, squared_distances: list[list[Tensor]]) -> None:
        """Reduce the squared distances of the local workers, [worker][bucket], over all workers."""
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
