"""A thread that posts communication, so that the training thread goes on at once, or at the latest after a timeout."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

no_fork = threading.Lock()
"""Held by a thread while it owns something that a forked child, such as a process of a DataLoader, could not destroy.

In the child, Python destroys the objects of the other threads, and no destructor may wait for a lock, or for a thread
that does not exist there. Hold it briefly: forks wait for it.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)

_LAST_SECONDS = 5.0  # for a post that is under way when the interpreter ends


class Poster:
    """Posts everything in the order of the calls, which is the same on all workers.

    gloo's isend writes to the socket until it is full: 5 to 8 ms for 10 MB, better spent on a thread. There is one
    thread only, for the order.

    Args:
        threaded: False posts everything at once, in the calling thread.
    """

    def __init__(self, threaded: bool) -> None:
        self._threaded = threaded
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._last: Future[Any] | None = None
        """Outside the thread, so that a forked child does not destroy the works in its result."""

    def submit(self, post: Callable[[], T], small: bool = False) -> Future[T]:
        """Call `post` and return its result or its RuntimeError, in the future.

        Args:
            post: posts sends and receives.
            small: whether `post` takes less time than handing it to the thread. It is then called at once, unless an
                earlier one is still waiting.
        """
        posted: Future[T] = Future()
        if self._threaded and not (small and (self._last is None or self._last.done())):
            if self._tasks is None:
                self._tasks = _start_thread(self)
            self._last = posted

            def run() -> None:
                with no_fork:
                    _fulfil(posted, post)

            self._tasks.put(run)
            return posted
        try:
            posted.set_result(post())
        except RuntimeError as error:
            posted.set_exception(error)
        return posted


def _start_thread(poster: Poster) -> queue.SimpleQueue[Callable[[], None] | None]:
    """Start a thread that ends with its poster. The interpreter does not wait for it for long: it may be blocked."""
    tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    thread = threading.Thread(target=_run, args=(tasks,), name="dsgdac-post", daemon=True)
    thread.start()
    weakref.finalize(poster, _end, tasks, thread)
    return tasks


def _run(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds tensors and works


def _end(tasks: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_LAST_SECONDS)


def run_within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`, run in a thread of its own. Raises DistBackendError after `seconds` and leaves the thread."""
    called: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(called, call), name="dsgdac-connect", daemon=True).start()
    return result_within(seconds, called)


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def result_within(seconds: float, posted: Future[T]) -> T:
    """Return the result of a post. Raises DistBackendError if it is not there after `seconds`."""
    try:
        return posted.result(seconds)
    except TimeoutError:
        if posted.done():
            return posted.result()
        raise dist.DistBackendError(f"timed out: the transport blocks for more than {seconds:.0f} s") from None
