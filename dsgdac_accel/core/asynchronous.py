"""Asynchronous pairwise averaging on the one-peer ring: no worker waits for one that is slower.

On a ring of an even number of workers the even ones ask and the odd ones answer. Call v = x + pending. In an exchange
asker i and answerer j each take a copy s of their v, send it, and both form d = s_j - s_i, with the same bits:

    x_i <- x_i + c d        x_j <- x_j - c d        c = (gamma_i + gamma_j) / 4

Each adds its part to `pending` when it has it, and to x at its next step boundary, on top of the local steps that it
has taken meanwhile. Every part that is added to one worker is subtracted from another, so the mean is kept.

An asker has one exchange at a time, and an answerer takes its copy for the next one after it has added its part of the
last. So averaging is never stale, which would be unstable, only gradients are. An asker asks at most once per own step
and never waits for the answer; answerers answer from threads; so nobody waits for a neighbor's step.

A count of the own steps is averaged in the same exchanges, always with c = 1/2. Its mean over the workers is the exact
mean of their steps, so it stands for the samples that all have seen. Schedules and the end of a run follow `progress`,
the largest value that it had at an own step.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgdac_accel.core.buckets import Buckets, Use
from dsgdac_accel.core.flat_parameters import FlatParameters
from dsgdac_accel.core.nonfinite import NonFiniteError
from dsgdac_accel.core.parameter_guard import MixedParameters, signature_of
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.core.update import Update, pair_update
from dsgdac_accel.distributed.fork_lock import no_fork
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.transport import Works
from dsgdac_accel.topology import Topology

_ASK, _MARK, _HANGS, _GOODBYE = 1.0, 2.0, 3.0, 4.0
_GRACE = 5.0  # seconds: an asker that waits for a silent neighbor is silent to the other one, which must not blame it
_JOIN_SECONDS = 5.0

Event = tuple[str] | tuple[str, int, int]
"""("step",), ("settle",), ("take", asker, number) or ("apply", asker, number)."""


class AsynchronousMixer:
    """Mixes the parameters of one optimizer with those of the two neighbors while training goes on.

    It has those methods of `Mixer` that a step, the average and checkpoints use. `drain` and all that calls it
    (`prepare_average`, `state_dict`, `load_state_dict`, `discard_exchange`, `release`) are collective here.

    Memory beyond the parameters: 3 parameter copies for an asker, 5 for an answerer.

    Args:
        parameters: a parameter, an iterable of them, or parameter groups; or a function that returns one of these.
        topology: the one-peer ring.
        group: the processes, one worker in each, on the CPU. Construction is collective.
        names: what to call a parameter in error messages, by `id`.

    Raises:
        ValueError: the number of workers is odd, they are not on the CPU, they have different parameters, or a
            parameter cannot be mixed exactly.
    """

    def __init__(
        self, parameters: object, topology: Topology, group: WorkerGroup, *, names: Mapping[int, str] | None = None
    ) -> None:
        refuse_workers(group.size, group.device)
        self.group = group
        self.rounds = Rounds(topology, group.members)
        self.step = 0
        """Own optimizer steps so far."""
        self.progress = 0.0
        """Estimate of the mean number of steps of all workers, as of the latest own step. It never goes back."""
        self.parameters = MixedParameters(parameters, names)
        self.buckets = Buckets()
        selected = self.parameters.select(group.device)
        group.require_equal(signature_of(selected[0]), "trainable parameters (shape, strides, dtype)")
        self.buckets.lay_out(selected)
        self.buckets.reserve([1])
        self.arrivals = self.exchange = self.shared = SharedValues(self)
        self._writes = False  # whether this thread holds the lock of the shared values, for its local step
        self._side: Asker | Answerer | None = None
        if group.size > 1:
            self._side = (Answerer if group.rank % 2 else Asker)(self.shared, _links(group))
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
        if self.parameters.changed() or self.flats[0].bring_back():
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
        self.shared.settle("step")
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
            self.shared.settle("settle")
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

    # ---- state

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
        if state["workers"] != self.topology.num_workers:
            raise ValueError(
                f"the state is of {state['workers']} workers, but {self.topology.num_workers} were launched."
            )
        self.discard_exchange()
        self.step = self.group.steps_taken = state.get("own_steps", state["step"])
        self.progress = float(state.get("progress", state["step"]))
        self.shared.progress, self.shared.pending_progress = state.get("averaged_progress", self.progress), 0.0
        self.shared.disagreement = state["disagreement"]

    @property
    def topology(self) -> Topology:
        """The one-peer ring."""
        return self.rounds.topology

    @property
    def flats(self) -> list[FlatParameters]:
        """The parameters of this worker, in a list of one."""
        return self.buckets.flats


class SharedValues:
    """What the training thread and the threads that communicate share. Whoever reads or writes it holds `lock`.

    `pending` are the receive buffers of the mixer.
    """

    checks_late = False
    """Whether a gradient that is not finite is found a step later, as on a GPU."""

    def __init__(self, mixer: AsynchronousMixer) -> None:
        self.group, self.rounds = mixer.group, mixer.rounds
        self.lock = threading.Lock()
        self.x = mixer.buckets.values(0)
        self.pending = mixer.buckets.received[0][0]
        self.pending_progress = 0.0
        self.gamma = 1.0
        self.progress = 0.0
        self.disagreement = 0.0
        """||s_j - s_i|| of the last exchange."""
        self.bytes_sent = 0
        """Of the last exchange, by this worker."""
        self.waited_seconds = 0.0
        """How long the last step waited for a thread that had the lock."""
        self.history: list[Event] | None = None
        """A list here records all events in their order, for `simulation.AsynchronousSimulation.replay`."""
        self.stepped_at = time.monotonic()
        """When this worker took its latest step."""
        self._is_pending = False

    def take(self, copy: Sequence[Tensor], asker: int, number: int) -> tuple[float, float]:
        """Copy v = x + pending into `copy`; return gamma and the progress that belongs to v."""
        with self.lock:
            for x, pending, target in zip(self.x, self.pending, copy, strict=True):
                torch.add(x, pending, out=target) if self._is_pending else target.copy_(x)
            self._record("take", asker, number)
            return self.gamma, self.progress + self.pending_progress

    def apply(self, update: Update, progress: float, asker: int, number: int) -> None:
        """Add a part of an exchange to `pending`, to be added to x and progress at the next step boundary."""
        for difference in update.difference:
            difference.mul_(update.scale)
        with self.lock:
            for pending, part in zip(self.pending, update.difference, strict=True):
                pending.add_(part) if self._is_pending else pending.copy_(part)
            self._is_pending = True
            self.pending_progress += progress
            self._record("apply", asker, number)

    def settle(self, why: str) -> None:
        """Add `pending` to x. The caller holds the lock.

        Args:
            why: "step" at the end of a local step, which also moves progress on; otherwise "settle".
        """
        if self._is_pending:
            for x, pending in zip(self.x, self.pending, strict=True):
                x.add_(pending)
        self._is_pending = False
        if why == "step":
            self.progress += 1.0 + self.pending_progress
            self.pending_progress = 0.0
            self.stepped_at = time.monotonic()
        self._record(why)

    def _record(self, kind: str, *exchange: int) -> None:
        if self.history is not None:
            self.history.append((kind, *exchange))  # type: ignore[arg-type]


class Link:
    """The connection to one neighbor: a process group of two, so that no two threads share one.

    It keeps what is in flight, so that a forked child does not destroy it, see `fork_lock`.
    """

    def __init__(self, group: WorkerGroup, peer: int, handle: Any) -> None:
        self.group = group
        self.peer = peer
        self.handle = handle
        self._works: Works = []

    def post(self, receives: Sequence[Tensor], sends: Sequence[Tensor], first_tag: int = 0) -> None:
        """Start receiving and sending tensors, in order."""
        transport = self.group.process_groups.transport
        cut = [[piece for tensor in tensors for piece in transport.pieces(tensor)] for tensors in (receives, sends)]
        messages = [[(piece, self.peer, first_tag + k) for k, piece in enumerate(pieces)] for pieces in cut]
        with no_fork:
            self._works += transport.send_and_receive(messages[0], messages[1], self.handle, lambda: 0)

    def wait(self, grace: float = 0.0) -> None:
        """Wait until all that was posted has arrived and was sent. Raises RuntimeError after the timeout."""
        deadline = time.monotonic() + self.group.timeout + grace
        while self._works:
            self.group.process_groups.transport.wait(self._works[0][0], deadline - time.monotonic())
            with no_fork:
                del self._works[0]


def _links(group: WorkerGroup) -> list[Link]:
    """Connect each pair of neighbors. Collective. Returns the links of this worker, that to the right one first."""
    pairs = [(left, (left + 1) % group.size) for left in range(group.size if group.size > 2 else 1)]

    def connect() -> list[Any]:
        return [group.process_groups.new("gloo", sorted(pair)) for pair in pairs]

    handles = group.guarded(connect, "connecting the neighbors")
    links = [
        Link(group, sum(pair) - group.rank, handle)
        for pair, handle in zip(pairs, handles, strict=True)
        if group.rank in pair
    ]
    return sorted(links, key=lambda link: (link.peer - group.rank) % group.size)


class Threads:
    """The threads of one worker that communicate. An error in one of them is raised in the training thread.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.changed = threading.Condition()
        """Guards the orders of the training thread to the other threads, and their answers."""
        self.stopped = False
        self._error: BaseException | None = None
        self._running: list[threading.Thread] = []

    def start(self, work: Callable[[], None], current: Callable[[], Link]) -> None:
        """Run `work` in a thread; `current()` is the link that it waits for."""
        thread = threading.Thread(target=self._watched, args=(work, current), name="dsgdac-asynchronous", daemon=True)
        self._running.append(thread)
        thread.start()

    def _watched(self, work: Callable[[], None], current: Callable[[], Link]) -> None:
        try:
            work()
        except BaseException as error:
            if self.stopped:
                return
            found = self._named(error, current().peer)
            with self.changed:
                self._error = self._error or found
                self.changed.notify_all()

    def _named(self, error: BaseException, peer: int) -> BaseException:
        """Return the error that names the lost worker, if one was lost."""

        def fail() -> None:
            raise error

        try:
            self.group.guarded(fail, "an asynchronous exchange", peer)
        except BaseException as found:
            return found
        return error

    def raise_error(self) -> None:
        """Raise the first error of a thread."""
        if self._error is not None:
            raise self._error

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait in the training thread, which holds `changed`. The threads notice by themselves what takes too long."""
        self.changed.wait_for(lambda: is_so() or self._error is not None)
        self.raise_error()

    def stop(self) -> None:
        """End the threads, and wait for that for some seconds.

        Without a drain before, as when a script just ends, askers say goodbye and answerers wait for it. A thread that
        returned from the transport while the interpreter ends would abort the process.
        """
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))


class Asker:
    """Asks the neighbors in turn, each time that it is told to and no question is open."""

    def __init__(self, shared: SharedValues, links: list[Link]) -> None:
        self.shared, self.links = shared, links
        self.rank = shared.group.rank
        self.asked = 0
        """Questions so far."""
        self.threads = Threads(shared.group)
        self._asks = False
        self._paused = True  # until the first step after a drain
        self._drains = self._marked = 0
        self._mine, self._theirs = [_like(shared.x) for _ in range(2)]
        self._header_out, self._header_in = [_header() for _ in range(2)]
        self.threads.start(self._run, lambda: self.links[self.asked % len(self.links)])

    def go_on(self) -> None:
        """Ask, unless a question is open."""
        with self.threads.changed:
            self._asks, self._paused = True, False
            self.threads.changed.notify_all()

    def drain(self) -> None:
        """Wait until no question is open and the neighbors were sent marks."""
        with self.threads.changed:
            self._drains += 1
            self.threads.changed.notify_all()
            self.threads.wait_until(lambda: self._marked == self._drains)

    def _run(self) -> None:
        threads = self.threads
        while True:
            with threads.changed:
                threads.changed.wait_for(lambda: threads.stopped or self._asks or self._marked < self._drains)
                if threads.stopped:
                    break
                asks = self._asks
            if asks:
                self._ask(self.links[self.asked % len(self.links)])
            else:
                self._send_to_both(_MARK)
            with threads.changed:
                if asks:
                    self._asks = False
                else:
                    self._marked, self._paused = self._marked + 1, True
                threads.changed.notify_all()
        if not self._paused:
            self._send_to_both(_GOODBYE)

    @torch.no_grad()
    def _ask(self, link: Link) -> None:
        shared, number = self.shared, self.asked
        gamma, progress = shared.take(self._mine, self.rank, number)
        self._header_out.copy_(_header(_ASK, gamma, progress, number))
        link.post([self._header_in, *self._theirs], [self._header_out, *self._mine])
        link.wait()
        kind, c, their_progress, _ = self._header_in.tolist()
        if kind == _HANGS:
            raise RuntimeError("timed out: it answers, but takes no step")
        update = _checked(pair_update(c, 1.0, self._mine, self._theirs, True, self._theirs), self._mine, link, shared)
        shared.apply(update, 0.5 * (their_progress - progress), self.rank, number)
        self.asked += 1

    def _send_to_both(self, kind: float) -> None:
        self._header_out.copy_(_header(kind))
        for link in self.links:
            link.post([], [self._header_out])
            link.wait()


class Answerer:
    """Answers the questions of both neighbors, from a thread for each, from the first step after a drain on."""

    def __init__(self, shared: SharedValues, links: list[Link]) -> None:
        self.shared, self.links = shared, links
        self.threads = Threads(shared.group)
        self._goes_on = False
        self._drains = 0
        self._marks = [0] * len(links)
        self._one_at_a_time = threading.Lock()
        """Held from the copy for an answer until its part is applied."""
        for number, link in enumerate(links):
            self.threads.start(lambda number=number: self._run(number), lambda link=link: link)  # type: ignore[misc]

    def go_on(self) -> None:
        """Answer from now on."""
        if not self._goes_on:
            with self.threads.changed:
                self._goes_on = True
                self.threads.changed.notify_all()

    def drain(self) -> None:
        """Answer until both neighbors have sent their marks."""
        with self.threads.changed:
            self._goes_on = False
            self._drains += 1
            self.threads.changed.notify_all()
            self.threads.wait_until(lambda: min(self._marks) == self._drains)

    def _reads(self, number: int) -> bool:
        """Return whether a question or mark may be read from a neighbor: not between its mark and the next step."""
        return self._marks[number] < self._drains or (self._goes_on and self._marks[number] == self._drains)

    def _run(self, number: int) -> None:
        threads, link = self.threads, self.links[number]
        mine, theirs = _like(self.shared.x), _like(self.shared.x)
        header_out, header_in = _header(), _header()
        while True:
            with threads.changed:
                threads.changed.wait_for(lambda: threads.stopped or self._reads(number))
                if not self._reads(number):
                    return
            link.post([header_in], [])
            link.wait(_GRACE)
            kind = header_in[0].item()
            if kind == _GOODBYE:
                if threads.stopped:
                    return
                raise RuntimeError("connection closed: it has ended without the others")
            if kind == _ASK:
                self._answer(link, header_in, header_out, theirs, mine)
            else:
                with threads.changed:
                    self._marks[number] += 1
                    threads.changed.notify_all()

    @torch.no_grad()
    def _answer(
        self, link: Link, header_in: Tensor, header_out: Tensor, theirs: Sequence[Tensor], mine: Sequence[Tensor]
    ) -> None:
        shared = self.shared
        link.post(theirs, [], first_tag=1)
        link.wait()
        _, their_gamma, their_progress, number = header_in.tolist()
        with self._one_at_a_time:
            gamma, progress = shared.take(mine, link.peer, int(number))
            c = 0.25 * (their_gamma + gamma)
            hangs = self._goes_on and time.monotonic() > shared.stepped_at + shared.group.timeout
            header_out.copy_(_header(_HANGS if hangs else _ASK, c, progress, number))
            link.post([], [header_out, *mine])
            update = _checked(pair_update(c, 1.0, mine, theirs, False, theirs), mine, link, shared)
            shared.apply(update, 0.5 * (their_progress - progress), link.peer, int(number))
        link.wait()


def refuse_workers(size: int, device: torch.device) -> None:
    """Raise ValueError unless so many workers on this device can average asynchronously."""
    if device.type != "cpu":
        raise ValueError(f"asynchronous=True needs workers on the CPU; they are on {device}. Pass cpu=True.")
    if size > 1 and size % 2:
        raise ValueError(
            f"asynchronous=True needs an even number of workers, half of which ask the others; got {size}. Launch one "
            f"more or one less."
        )


def refuse_dtypes(dtypes: Collection[torch.dtype]) -> None:
    """Raise ValueError unless trained parameters of these dtypes can be averaged asynchronously."""
    others = sorted(str(dtype) for dtype in dtypes if dtype not in (torch.float32, torch.float64))
    if others:
        raise ValueError(
            f"asynchronous=True needs float32 or float64 parameters; got {', '.join(others)}. Load the model in "
            f"float32, or leave asynchronous out."
        )


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _header(kind: float = 0.0, factor: float = 0.0, progress: float = 0.0, number: int = 0) -> Tensor:
    """Return what travels before the values; `factor` is gamma in a question and c in an answer."""
    return torch.tensor([kind, factor, progress, float(number)], dtype=torch.float64, device="cpu")


def _checked(update: Update, mine: Sequence[Tensor], link: Link, shared: SharedValues) -> Update:
    """Return an update that is finite, and note its norm. Raises NonFiniteError, on both workers of the pair."""
    shared.disagreement = float(update.norm())
    shared.bytes_sent = sum(x.nbytes for x in mine)
    if math.isfinite(shared.disagreement):
        return update
    group = shared.group
    blamed = [group.rank] if not _finite(mine) else [] if _finite(update.difference) else [link.peer]
    who = (
        "the parameters of worker {} are not finite".format(*blamed)
        if blamed
        else (f"workers {group.rank} and {link.peer} are too far apart")
    )
    message = f"{who} at step {group.steps_taken}"
    group.report(message)
    raise NonFiniteError(
        f"{message}. The run diverged. Lower the learning rate, lengthen the warm-up, or clip the gradients."
    )


def _finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
