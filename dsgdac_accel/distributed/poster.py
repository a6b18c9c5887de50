"""A thread that posts communication, so that the training thread goes on at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dsgdac_accel.distributed.fork_lock import no_fork

T = TypeVar("T")


class Poster:
    """Posts everything in the order of the calls, which is the same on all workers.

    gloo's isend writes to the socket until it is full: 5 to 8 ms for 10 MB, better spent on a thread. There is one
    thread only, for the order.

    Args:
        threaded: False posts everything at once, in the calling thread.
    """

    def __init__(self, threaded: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "dsgdac-post") if threaded else None
        self._last: Future[Any] | None = None
        self._result: Any = None

    def submit(self, post: Callable[[], T], small: bool = False) -> Future[T]:
        """Call `post` and return its result or its RuntimeError, in the future.

        Args:
            post: posts sends and receives.
            small: `post` takes less time than handing it to the thread. It is then called at once, unless something is
                waiting that was submitted before.
        """
        if self._thread is not None and not (small and (self._last is None or self._last.done())):
            self._last = self._thread.submit(self._in_thread, post)
            return self._last
        posted: Future[T] = Future()
        try:
            posted.set_result(post())
        except RuntimeError as error:
            posted.set_exception(error)
        return posted

    def _in_thread(self, post: Callable[[], T]) -> T:
        with no_fork:
            # Keep a reference outside the thread, so that a forked child does not destroy the works in the result.
            self._result = post()
        return self._result

    def forget(self) -> None:
        """Drop the latest result, whose works hold connections open."""
        self._last = self._result = None
