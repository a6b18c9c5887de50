"""The workers that train together: their process groups, their collectives, and what happens when one is lost.

Everything the library says to other workers goes through a `WorkerGroup`. The groups are its own, so a user's
collectives never interleave with ours, and every wait ends within `timeout` with an error that names the worker.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_FIRST_FAILURE = "dsgdac_accel/first_failure"  # key in the rendezvous store
_REPORT_OF = "dsgdac_accel/report_of"
_TRANSPORT_ERRORS = re.compile(
    r"timed? ?out|connection|read error|write error|broken pipe|socket|monitoredBarrier|nccl|gloo/transport",
    re.IGNORECASE,
)
_SURELY_TRANSPORT = re.compile(r"gloo/|monitoredBarrier|NCCL")
_MEAN_CHUNK = 2**22  # elements summed at a time, which bounds the float64 copy to 32 MiB
_STORE_PATIENCE = 3.0  # seconds: the store may live in the very process that was lost
_CHAIN_SECONDS = 2.5  # two waits that began in one step run out about as far apart
_ROLL_CALL_SECONDS = 4.0  # survivors notice a loss at different moments; longer than they are apart


class WorkerLostError(RuntimeError):
    """Another worker did not answer: it was killed, raised an error, hangs, or ran out of data."""


class WorkerGroup:
    """All workers of a run, numbered 0 to `size` - 1; `rank` is this one.

    Without a process group, or with a single process, it is a group of one and every method is local.
    Construction is collective: every worker must build its groups in the same order.

    Args:
        device: where the parameters live; decides the backend (gloo on CPU, NCCL on CUDA).
        timeout: seconds after which a silent worker counts as lost.
    """

    def __init__(self, device: torch.device, timeout: float = 600.0) -> None:
        self.device = device
        self.timeout = timeout
        launched = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if launched else 0
        self.size = dist.get_world_size() if launched else 1
        self.backend = "gloo"
        self.steps_taken = 0
        """Optimizer steps so far, for error messages; kept by the mixer."""
        self._channels = itertools.count()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.closed = False
        self._world = dist.group.WORLD if launched else None
        self._processes: list[tuple[str, int]] = [("", 0)] * self.size
        """Machine and process of each worker."""
        if self.size == 1:
            return
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"gossip between processes needs CPU (gloo) or CUDA (NCCL); got device '{device}'. "
                f"Launch one process, or train on CPU or CUDA."
            )
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        # Every rank creates every group, in the same order: new_group is itself collective.
        self._control = self._new_group("gloo")
        self.exchange_group = self._new_group(self.backend)
        self._reduction = self._control if self.backend == "gloo" else self._new_group(self.backend)
        self._subgroups: dict[tuple[int, ...], Any] = {}
        # gloo's isend writes to the socket until it is full: 5 to 8 ms for 10 MB, better spent on a thread of its own.
        # ONE thread, so that everything is posted in the order of the calls, which is the same on all workers.
        self.poster = ThreadPoolExecutor(1, "dsgdac-post") if self.backend == "gloo" else None
        self._processes = self.gather((_machine(), os.getpid()), "meeting the workers")

    def _new_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        options: dict[str, Any] = (
            {"device_id": self.device} if backend == "nccl" and self.device.index is not None else {}
        )
        members = list(range(self.size)) if ranks is None else list(ranks)
        handle = dist.new_group(members, backend=backend, timeout=timedelta(seconds=self.timeout), **options)
        if backend == "nccl" and self.rank in members:
            # Point-to-point as a communicator's very first call is undefined where some rank has nothing to send.
            dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
        return handle

    def new_channel(self) -> int:
        """A number that tells the messages of one user of the group from those of another, alike on all workers."""
        return next(self._channels)

    def subgroup(self, members: tuple[int, ...]) -> Any:
        """Handle of the group of `members`; collective over ALL workers at its first call for these members."""
        if len(members) == self.size:
            return self.exchange_group
        if members not in self._subgroups:
            self._subgroups[members] = self._new_group(self.backend, members)
        return self._subgroups[members]

    def on_silence(self, owner: Any) -> None:
        """Call `owner.drain()` before reductions and broadcasts: beside point-to-point in flight NCCL may hang."""
        self._owners.add(owner)

    def _silence(self) -> None:
        for owner in list(self._owners):
            owner.drain()

    def limit_default_group(self) -> None:
        """Let collectives of others, on the default group, give up on a silent worker after `timeout`, too."""
        if self.size > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout), dist.group.WORLD)

    def close(self) -> None:
        """Refuse further use: the process group is about to end."""
        self.closed = True

    def serves(self, device: torch.device, timeout: float) -> bool:
        """Whether this group can be used again, for another training in the same process and process group."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        return not self.closed and self._world is world and (self.device, self.timeout) == (device, timeout)

    def require_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError("training has ended (`end_training`); make a new accelerator to train on.")

    # ---- collectives: synchronous, on groups of their own, each with a name for the error message

    def meet(self, what: str) -> None:
        """Wait until every worker is here; otherwise the error names those that are missing."""
        if self.size > 1:
            self.guarded(
                lambda: dist.monitored_barrier(
                    group=self._control, timeout=timedelta(seconds=self.timeout), wait_all_ranks=True
                ),
                what,
            )

    def mean_(self, tensor: Tensor, what: str, others: Sequence[Tensor] = ()) -> Tensor:
        """Replace contiguous `tensor` (D,) by its mean over the workers, the same bits on all of them.

        Summed in float64, so that workers which are equal have exactly themselves as their mean.

        Args:
            tensor: this process's first worker's.
            what: names the collective in errors.
            others: those of further workers in this process, as many in every process; left as they are.
        """
        count = self.size * (1 + len(others))
        if count == 1:
            return tensor
        if self.size > 1:
            self._silence()
        for start in range(0, len(tensor), _MEAN_CHUNK):
            part = tensor[start : start + _MEAN_CHUNK]
            wide = part.double()
            for other in others:
                wide.add_(other[start : start + _MEAN_CHUNK])
            if self.size > 1:
                self.guarded(lambda wide=wide: dist.all_reduce(wide, group=self._reduction), what)  # type: ignore[misc]
            part.copy_(wide.div_(count))
        return tensor

    def max_(self, tensor: Tensor, what: str) -> Tensor:
        """Replace `tensor` by its maximum over the workers."""
        if self.size > 1:
            self._silence()
            self.guarded(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._reduction), what)
        return tensor

    def broadcast_(self, tensor: Tensor, what: str) -> Tensor:
        """Overwrite `tensor` on every worker by worker 0's, bit by bit, whatever its dtype and strides."""
        if self.size > 1 and tensor.numel():
            self._silence()
            # As contiguous bytes: gloo sends strided tensors wrongly without an error, and knows few dtypes.
            values = tensor.detach().contiguous()
            payload = values.reshape(-1).view(torch.uint8)
            self.guarded(lambda: dist.broadcast(payload, 0, group=self._reduction), what)
            if self.rank != 0:
                tensor.detach().copy_(values)
        return tensor

    def gather(self, value: T, what: str) -> list[T]:
        """The small picklable `value` of every worker, in order of rank, on every worker."""
        if self.size == 1:
            return [value]
        answers: list[Any] = [None] * self.size
        self.guarded(lambda: dist.all_gather_object(answers, (what, value), group=self._control), what)
        for rank, (where, _) in enumerate(answers):
            if where != answers[0][0]:
                raise RuntimeError(
                    f"the workers are at different places: worker 0 in {answers[0][0]}, worker {rank} in {where}. All "
                    f"of them must take every optimizer step and enter every `prepare` and `deployed_model`."
                )
        return [answer for _, answer in answers]

    def require_equal(self, value: T, what: str, advice: str = "") -> None:
        """Raise on every worker unless all hold the same `value`; `advice` says what to do about it."""
        values = self.gather(value, f"comparing the {what} of all workers")
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"all workers must have the same {what}; worker 0 has {_short(values[0])} and worker {rank} "
                    f"has {_short(other)}.{advice and ' '}{advice}"
                )

    # ---- failures

    def guarded(self, communicate: Callable[[], T], what: str, peer: int | None = None, strict: bool = False) -> T:
        """Run `communicate`; turn the transport's error into one that names the lost worker and what was going on.

        Args:
            communicate: posts or waits for something that needs other workers.
            what: names it in the error, with the step.
            peer: the only other worker involved, where there is but one.
            strict: others' code runs in it, whose own timeouts and connections are none of ours.
        """
        self.require_open()
        try:
            return communicate()
        except RuntimeError as error:
            own = type(error).__module__.startswith("dsgdac_accel")  # said already, closer to where it happened
            pattern = _SURELY_TRANSPORT if strict else _TRANSPORT_ERRORS
            if own or not (isinstance(error, dist.DistError) or pattern.search(str(error))):
                raise  # a mistake of ours or of the caller, not a lost worker
            where = what if re.search(r"step \d", what) else f"{what} at step {self.steps_taken}"
            raise self._lost(where, _short_cause(error), peer) from error

    def _lost(self, what: str, cause: str, peer: int | None) -> WorkerLostError:
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", cause)
        silent = "timed out" in cause.lower() or "failed to pass" in cause
        if named:
            who = f"worker {named[1].strip(' ,')}"
        elif peer is not None:
            who = f"worker {peer}"
        else:
            who = "a worker" if self._first_report() else self._roll_call(silent)
        happened = f"did not answer within {self.timeout:g} s" if silent else "was lost"
        mine = f"{who} {happened} in {what}, as worker {self.rank} saw it"
        first = self.report(mine)
        news = "" if first == mine else f" First report of this run: {first}."
        if peer is not None and not first.endswith(f"as worker {peer} saw it"):
            # The peer may itself have waited in vain for another worker: then that one is to blame.
            reported = self._report_of(peer)
            news += f" Worker {peer} reports: {reported}." if reported else ""
        return WorkerLostError(
            f"worker {self.rank}: {who} {happened} in {what}.{news} Look at that worker's own output for its error. "
            f"If it only was slow (a long evaluation, a long save), raise `timeout`; if it ran out of data, pass its "
            f"loader through `prepare` or `equal_steps`; if it left out an `optimizer.step()`, let it take every step, "
            f"since each one mixes. ({cause})"
        )

    def _roll_call(self, silent: bool) -> str:
        """Who is missing, where everybody takes part: those that do not sign within a few seconds.

        A connection that broke may be noticed by some long before others, so a process that is still there is not
        missing, unless it is silence that was noticed.
        """
        missing = [rank for rank in range(self.size) if rank != self.rank]

        def call(store: Any) -> None:
            prefix = "dsgdac_accel/roll_call"  # one for all: survivors may notice the loss in different places
            store.set(f"{prefix}/{self.rank}", "present")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            while missing and time.monotonic() < deadline:
                missing[:] = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
                time.sleep(0.05)

        self._ask_store(call, _ROLL_CALL_SECONDS + _STORE_PATIENCE)
        if not silent:
            missing = [rank for rank in missing if not self._lives(rank)]
        return f"worker {', '.join(map(str, missing))}" if missing else "a worker"

    def _lives(self, rank: int) -> bool | None:
        """Whether the process of a worker on this machine is there; None for one on another machine."""
        machine, process = self._processes[rank]
        if machine != _machine():
            return None
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"  # killed, and only not collected yet by whoever started it

    def _report_of(self, rank: int) -> str:
        """What this worker wrote before it ended, or writes within a few seconds; empty if nothing."""
        found = [""]

        def read(store: Any) -> None:
            key = f"{_REPORT_OF}/{rank}"
            deadline = time.monotonic() + _CHAIN_SECONDS
            while not store.check([key]) and time.monotonic() < deadline and self._lives(rank) is not False:
                time.sleep(0.05)
            if store.check([key]):
                found[0] = store.get(key).decode()

        self._ask_store(read, _CHAIN_SECONDS + _STORE_PATIENCE)
        return found[0]

    def _first_report(self) -> str:
        """What the first worker that noticed a failure wrote; empty if none did yet."""
        found = [""]

        def read(store: Any) -> None:
            if store.check([_FIRST_FAILURE]):
                found[0] = store.get(_FIRST_FAILURE).decode()

        self._ask_store(read, _STORE_PATIENCE)
        return found[0]

    def report(self, message: str) -> str:
        """Tell the other workers why this run ends; returns the first message that any worker wrote."""
        first = [message]

        def write(store: Any) -> None:
            # compare_set answers with the value that is there now: ours, or an earlier worker's.
            first[0] = store.compare_set(_FIRST_FAILURE, "", message).decode() or message
            store.set(f"{_REPORT_OF}/{self.rank}", message)

        self._ask_store(write, _STORE_PATIENCE)
        return first[0]

    def _ask_store(self, ask: Callable[[Any], None], patience: float) -> None:
        """Use the rendezvous store, unless it is gone with the worker that kept it."""
        if self.size == 1:
            return

        def attempt() -> None:
            with contextlib.suppress(Exception):
                ask(dist.distributed_c10d._get_default_store())

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(patience)


def _machine() -> str:
    """What tells machines, and containers with processes of their own, apart."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc here
        return f"{socket.gethostname()} {uuid.uuid4()}"


def _short_cause(error: BaseException) -> str:
    """The transport's first sentence, without the place in its source."""
    return re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". This is typically")[0]


def _short(value: object, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
