"""The connections of one worker to its neighbors, and the threads that wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dsgdac_accel.distributed.fork_lock import no_fork
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.transport import Works

_JOIN_SECONDS = 5.0


class Link:
    """The connection to one neighbor: a process group of two, so that no two threads share one.

    It keeps what is in flight, so that a forked child does not destroy it, see `fork_lock`.
    """

    def __init__(self, group: WorkerGroup, neighbor: int, handle: Any) -> None:
        self.group = group
        self.neighbor = neighbor
        self.handle = handle
        self._works: Works = []

    def post(self, receives: Sequence[Tensor], sends: Sequence[Tensor], first_tag: int = 0) -> None:
        """Start receiving and sending tensors, in order."""
        transport = self.group.process_groups.transport
        cut = [[piece for tensor in tensors for piece in transport.pieces(tensor)] for tensors in (receives, sends)]
        its_rank = int(self.neighbor > self.group.rank)  # in the group of two
        messages = [[(piece, its_rank, first_tag + k) for k, piece in enumerate(pieces)] for pieces in cut]
        with no_fork:
            self._works += transport.send_and_receive(messages[0], messages[1], self.handle, lambda: 0)

    def wait(self, grace: float = 0.0) -> None:
        """Wait until all that was posted has arrived and was sent. Raises RuntimeError after the timeout."""
        deadline = time.monotonic() + self.group.timeout + grace
        while self._works:
            self.group.process_groups.transport.wait(self._works[0][0], deadline - time.monotonic())
            with no_fork:
                del self._works[0]


def connect_neighbors(group: WorkerGroup) -> list[Link]:
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
    return sorted(links, key=lambda link: (link.neighbor - group.rank) % group.size)


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
            found = self._named(error, current().neighbor)
            with self.changed:
                self._error = self._error or found
                self.changed.notify_all()

    def _named(self, error: BaseException, neighbor: int) -> BaseException:
        """Return the error that names the lost worker, if one was lost."""

        def fail() -> None:
            raise error

        try:
            self.group.guarded(fail, "an asynchronous exchange", neighbor)
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
