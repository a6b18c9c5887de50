"""The exchange of two neighbors: one asks, the other answers, and neither waits for a step of the other.

On a ring of an even number of workers the even ones ask and the odd ones answer. In an exchange asker i and answerer j
each send a copy s of their parameters, and form the same d = s_j - s_i, up to its sign:

    x_i <- x_i + c d        x_j <- x_j - c d        c = (gamma_i + gamma_j) / 4

Each adds its part on top of the local steps that it has taken meanwhile; see `SharedValues`. Every part that is added
to one worker is subtracted from another, so the mean is kept.

An asker has one exchange at a time, and an answerer takes its copy for the next one after it has added its part of the
last. So averaging is never stale, which would be unstable, only gradients are. An asker asks at most once per own step
and never waits for the answer; answerers answer from threads; so nobody waits for a neighbor's step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dsgdac_accel.core.asynchronous.links import Link, Threads
from dsgdac_accel.core.asynchronous.shared_values import SharedValues
from dsgdac_accel.core.nonfinite import NonFiniteError
from dsgdac_accel.core.update import Update, pair_update

_ASK, _MARK, _HANGS, _GOODBYE = 1.0, 2.0, 3.0, 4.0
_GRACE = 5.0  # seconds: an asker that waits for a silent neighbor is silent to the other one, which must not blame it


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
        update = _checked_update(c, self._mine, self._theirs, link, shared)
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
            gamma, progress = shared.take(mine, link.neighbor, int(number))
            c = 0.25 * (their_gamma + gamma)
            hangs = self._goes_on and time.monotonic() > shared.stepped_at + shared.group.timeout
            header_out.copy_(_header(_HANGS if hangs else _ASK, c, progress, number))
            link.post([], [header_out, *mine])
            update = _checked_update(c, mine, theirs, link, shared)
            shared.apply(update, 0.5 * (their_progress - progress), link.neighbor, int(number))
        link.wait()


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _header(kind: float = 0.0, factor: float = 0.0, progress: float = 0.0, number: int = 0) -> Tensor:
    """Return the header of a message; `factor` is gamma in a question and c in an answer."""
    return torch.tensor([kind, factor, progress, float(number)], dtype=torch.float64, device="cpu")


def _checked_update(
    c: float, mine: Sequence[Tensor], theirs: Sequence[Tensor], link: Link, shared: SharedValues
) -> Update:
    """Return c (theirs - mine), formed in `theirs`, and note the norm of the difference.

    The other worker forms the negative of it, bit by bit. Raises NonFiniteError on both, unless it is finite.
    """
    update = pair_update(c, 1.0, mine, theirs, True, theirs)
    shared.disagreement = float(update.norm())
    shared.bytes_sent = sum(x.nbytes for x in mine)
    if math.isfinite(shared.disagreement):
        return update
    me, neighbor = shared.group.rank, link.neighbor
    if _finite(mine) and _finite(update.difference):
        found = f"workers {me} and {neighbor} are too far apart"
    else:
        found = f"the parameters of worker {neighbor if _finite(mine) else me} are not finite"
    message = f"{found} at step {shared.group.steps_taken}"
    shared.group.report(message)
    raise NonFiniteError(
        f"{message}. The run diverged. Lower the learning rate, lengthen the warm-up, or clip the gradients."
    )


def _finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
