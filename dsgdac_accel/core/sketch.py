"""The consensus radius at every step, estimated from a few numbers per worker instead of a reduction of the model.

Every worker projects its parameters x_i (D,) onto the same k random directions, s_i = P x_i (k,), and sends these few
numbers to worker 0. P is linear, so s_i - mean_j s_j = P (x_i - x_bar), and E ||P d||^2 = ||d||^2 for every d.

Accuracy. The variance of ||P d||^2 is at most (2/k) ||d||^4, plus a little for its first stage, see `Projection`. To
first order, each distance then has a relative standard error of at most sqrt(1 / (2k)), and so have the radius (their
mean) and the Frobenius norm. If the differences of n workers to the average are nearly orthogonal, their errors
are nearly independent, and the radius is more accurate by about sqrt(n). The random numbers stay the same for the whole
run, so the curve of the radius is smoother than that. Distances below about 1e-6 ||x|| are lost in float32 rounding.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.core.consensus import Consensus
from dsgdac_accel.core.flat_parameters import Layout
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.watchdog import is_ready_within

logger = logging.getLogger(__name__)

LENGTH = {"cpu": 2**17 - 1, "cuda": 2**21 - 1}
"""L: on a CPU small enough for its cache, on a GPU long enough for its kernels. Odd, see `Projection`."""
_SEED = 2602_02899  # arbitrary, but the same for all workers and after resuming
_MOST_AT_ONCE = 16  # steps whose numbers are in flight


def relative_error(numbers: int, length: int = LENGTH["cpu"]) -> float:
    """Return a bound of the relative standard error of a distance, and so of the radius, for `numbers` per worker.

    >>> round(relative_error(1024), 4), round(relative_error(200), 2)
    (0.0223, 0.05)
    """
    return (2 / numbers * (1 + 4 / length) + 4 / length) ** 0.5 / 2


class Projection:
    """A random linear map P from D to `numbers` numbers with E ||P x||^2 = ||x||^2, in one pass over x.

    Two stages. First, x is cut into rows of L numbers, and the rows are added up, each with a random sign and rolled by
    a random offset: z_b = sum_r a_r t_(b - o_r) x_(r, b - o_r), with the same L signs t for all rows. Two elements of
    different rows collide with probability 1/L, those of one row never, so Var ||z||^2 <= (4/L) ||x||^4 for every x if
    L is odd: were it even, rolls by L/2 would pair the same signs twice. Then z is dealt out at random to k bins of
    equal size, and each bin is added up with random signs (a count sketch): Var(||s||^2 | z) <= (2/k) ||z||^4.

    Adding up rows reads x once and keeps 2 L numbers in the cache. A random bin for each element of x takes more than
    twice as long and an index of twice the size of x; dense random signs take k passes. The random numbers are drawn
    once, from generators that nothing else uses.

    Args:
        numbers: k. A model with at most k parameters is not projected: the numbers are the parameters themselves.
        length: L, odd.
        seed: for all random signs, offsets and bins.
    """

    def __init__(self, numbers: int, length: int = LENGTH["cpu"], seed: int = _SEED) -> None:
        assert length % 2 == 1, "see the class"
        self.numbers = numbers
        self.length = length
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._signs = _random_signs(length, self._generator)
        self._rows: list[tuple[float, int]] = []
        """Sign and offset of each row, drawn when a model first needs them."""
        self._tables: dict[tuple, Tensor] = {}

    @torch.no_grad()
    def __call__(self, buffers: Sequence[Tensor]) -> Tensor:
        """Project flat tensors of any dtypes and devices, taken as one vector.

        Returns (numbers,), or fewer for a smaller model; float64 if any buffer is, else float32.
        """
        total = sum(map(len, buffers))
        device = buffers[0].device if buffers else torch.device("cpu")
        dtype = torch.float64 if any(buffer.dtype == torch.float64 for buffer in buffers) else torch.float32
        if total <= self.numbers:
            return torch.cat([torch.empty(0, dtype=dtype, device=device), *(b.to(device, dtype) for b in buffers)])
        return self._fold(self._add_rows(buffers, total, dtype, device)).to(dtype)

    def _add_rows(self, buffers: Sequence[Tensor], total: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return z (L,); or (D,) if one row holds everything."""
        length = min(self.length, total)
        sums: dict[tuple, Tensor] = {}
        for buffer, begin in zip(buffers, accumulate(map(len, buffers), initial=0), strict=False):
            signs, z = self._signs_like(buffer), sums.setdefault(_kind(buffer), buffer.new_zeros(length))
            for row in range(begin // length, -(-(begin + len(buffer)) // length)):
                first = max(begin, row * length)
                part = buffer[first - begin : (row + 1) * length - begin]
                place = first - row * length
                sign, offset = self._row(row) if total > length else (1.0, 0)
                _add_rolled(z, part, signs[place : place + len(part)], sign, (place + offset) % length)
        return torch.stack([z.to(device, dtype) for z in sums.values()]).sum(0)

    def _fold(self, z: Tensor) -> Tensor:
        """Return s (k,)."""
        padded = -(-len(z) // self.numbers) * self.numbers
        order, signs = self._bins(padded, z)
        dealt = torch.nn.functional.pad(z, (0, padded - len(z)))[order].mul_(signs)
        return dealt.view(-1, self.numbers).sum(0, dtype=torch.float64)

    def _row(self, number: int) -> tuple[float, int]:
        while len(self._rows) <= number:
            offset = int(torch.randint(self.length, (1,), generator=self._generator, device="cpu"))
            self._rows.append((float(_random_signs(1, self._generator)), offset))
        return self._rows[number]

    def _signs_like(self, buffer: Tensor) -> Tensor:
        kind = ("signs", *_kind(buffer))
        if kind not in self._tables:
            self._tables[kind] = self._signs.to(buffer)
        return self._tables[kind]

    def _bins(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return an order of `count` numbers, in which place p belongs to bin p mod k, and a sign for each place."""
        order, signs = ("order", count, *_kind(like)), ("bin signs", count, *_kind(like))
        if order not in self._tables:
            generator = torch.Generator().manual_seed(self._seed + count)
            self._tables[order] = torch.randperm(count, generator=generator, device="cpu").to(like.device)
            self._tables[signs] = _random_signs(count, generator).to(like)
        return self._tables[order], self._tables[signs]


def _random_signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (count,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _add_rolled(z: Tensor, part: Tensor, signs: Tensor, sign: float, place: int) -> None:
    """z[place : ...] += sign * signs * part, wrapping around at the end of z."""
    fits = min(len(part), len(z) - place)
    z[place : place + fits].addcmul_(part[:fits], signs[:fits], value=sign)
    if fits < len(part):
        z[: len(part) - fits].addcmul_(part[fits:], signs[fits:], value=sign)


class RadiusEstimate:
    """Estimates the consensus radius of a step while the next one computes, on process 0, which logs.

    A thread sends and receives through a process group that nothing else uses, over gloo even if mixing uses NCCL, so
    nothing waits for it. Each process of a sharded worker projects its own shard, with random numbers of its own, so
    that the squares of the shards add up. A late worker delays an estimate, not a
    step. A step around which a worker is lost has no estimate.

    Args:
        group: the processes. Construction is collective.
        numbers: k, numbers per worker and step; see `relative_error`.
    """

    def __init__(self, group: WorkerGroup, numbers: int) -> None:
        self.group = group
        length = LENGTH["cpu" if group.device.type == "cpu" else "cuda"]
        self.projection = Projection(numbers, length, _SEED + group.row.rank)
        self.step = 0
        """The last step that was posted."""
        self._posts_from = 0
        self._latest: Consensus | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[Consensus | None]] = deque()
        group.register(self)
        self._connect()

    def _connect(self) -> None:
        self._handle: Any = None
        self._closing: Any = None
        if self.group.size > 1:
            process_groups = self.group.everyone.process_groups
            self._handle = process_groups.new("gloo")
            # A training that is dropped without `release` closes them, too. Each process does it when it collects this
            # object: closing is not collective, and the thread that uses the connections keeps the object until then.
            self._closing = weakref.finalize(self, process_groups.end, self._handle)
            self._closing.atexit = False

    @property
    def latest(self) -> Consensus | None:
        """The newest estimate that has arrived; None before the first, and on processes other than 0. Never waits."""
        while self._under_way and self._under_way[0].done():
            self._latest = self._under_way.popleft().result() or self._latest
        return self._latest

    def metrics(self) -> dict[str, float]:
        """Return the newest estimate, with its step; empty without one."""
        latest = self.latest
        return {} if latest is None else latest.metrics("_estimate")

    def post(self, flats: Sequence[Layout], step: int) -> None:
        """Project the parameters as they are after `step` steps, and post the result.

        Args:
            flats: the parameters of each local worker.
            step: the same on all workers, each of which calls this once per step.
        """
        self.step = step
        if step < self._posts_from:
            return
        if self.group.size == len(flats) == 1:
            self._latest = Consensus(0.0, 0.0, step)
            return
        counted = [[bucket.data for bucket in flat.buckets] for flat in flats]
        sketches = torch.stack(list(map(self.projection, counted)))
        if self.group.row.size > 1:  # a small shard has fewer numbers
            sketches = torch.nn.functional.pad(sketches, (0, self.projection.numbers - sketches.shape[1]))
        copied = HostCopy(sketches)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "dsgdac-sketch")
        if len(self._under_way) >= _MOST_AT_ONCE and not self._under_way[0].done():
            wait([self._under_way[0]], self.group.timeout)
        _ = self.latest  # collect what has arrived, even if nobody reads it
        self._under_way.append(self._thread.submit(self._estimate, self._handle, copied, step))

    def _estimate(self, handle: Any, copied: HostCopy, step: int) -> Consensus | None:
        """Runs in the thread."""
        if not is_ready_within(self.group.timeout, copied.is_ready):  # a worker was lost, which mixing will notice
            return None
        sketches = copied.read()
        if handle is None:
            return consensus_of(sketches, step)
        try:
            gathered = self._gather(handle, sketches, step)
        except (RuntimeError, ValueError) as error:  # a worker was lost, which mixing will notice
            logger.debug("no estimate of the consensus radius at step %d: %s", step, error)
            return None
        if gathered is None:
            return None
        mesh = self.group.row.mesh
        if mesh is not None:  # the numbers of a worker's shards, one after the other
            gathered = gathered[torch.tensor(mesh.rows, device="cpu")].flatten(1)
        return consensus_of(gathered, step)

    def _gather(self, handle: Any, mine: Tensor, step: int) -> Tensor | None:
        patience = timedelta(seconds=self.group.timeout)
        if dist.get_rank(handle) > 0:
            sending: Any = dist.isend(mine, 0, group=handle, tag=step)
            sending.wait(patience)
            return None
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size(handle) - 1)]
        works: list[Any] = [
            dist.irecv(theirs, rank, group=handle, tag=step) for rank, theirs in enumerate(others, start=1)
        ]
        for work in works:
            work.wait(patience)
        return torch.cat([mine, *others])

    # ---- called by the `WorkerGroup`

    def drain(self) -> None:
        """Do nothing: no other communication uses these connections."""

    def abandon(self) -> None:
        """Give up the messages in flight; the thread ends when its connections do."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._let_go()
        self._under_way.clear()

    def release(self) -> None:
        """Close the connections, once the estimates under way have arrived. Nothing is posted any more."""
        end, handle, thread = self.group.everyone.process_groups.end, self._handle, self._thread
        self._let_go()
        if thread is None:
            end(handle)
        else:
            thread.submit(end, handle)
            thread.shutdown(wait=False)

    def _let_go(self) -> None:
        if self._closing is not None:
            self._closing.detach()  # it would keep the connections open, which survivors of a loss wait to see closed
        self._thread, self._handle, self._closing = None, None, None

    def regroup(self, step: int) -> None:
        """Continue with the survivors after `step`, which some of them have posted already. Collective."""
        self._posts_from = step + 1
        self._connect()


def consensus_of(sketches: Tensor, step: int) -> Consensus:
    """Return radius and Frobenius norm of n workers whose parameters, or projections of them, are the rows (n, k).

    >>> consensus_of(torch.tensor([[0.0, 3.0], [0.0, -3.0]]), step=7)
    Consensus(radius=3.0, frobenius=4.242640687119285, step=7)
    """
    wide = sketches.double()
    distances = torch.linalg.vector_norm(wide - wide.mean(0), dim=1)
    return Consensus(float(distances.mean()), float(distances.norm()), step)
