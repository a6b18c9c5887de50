"""Notes requests to stop: signals, also while the main thread is busy outside of Python, and those of the program."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import select
import signal
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""The signals that batch systems and launchers send before they kill."""

_INSISTENCE = 3  # the first asks, the second may come from another sender (batch system and launcher both send)

_receivers: weakref.WeakSet[SignalReceiver] = weakref.WeakSet()


class SignalReceiver:
    """Notes the given signals and `request` between `open` and `close`. Existing handlers are suspended meanwhile.

    The third signal of a kind takes its usual effect. Launchers and batch systems often signal all processes at once,
    and a run whose DataLoader has lost its processes cannot stop cleanly. So processes that `multiprocessing` forks
    between `open` and `close` end by SIGTERM only from their parent, and ignore the other signals.

    Args:
        signals: which signals; None for `request` alone, which works in any thread.

    Raises ValueError or TypeError if no signal is given, or something that is no signal or cannot be caught.
    """

    def __init__(self, signals: Iterable[int] | None = STOP_SIGNALS) -> None:
        self.signals = () if signals is None else _checked(signals)
        self.first: signal.Signals | None = None
        """The signal that came first, if one came."""
        self.requested: str | None = None
        """Why the program asked to stop, if it did."""
        self.deaf = False
        """Whether signals take their usual effect again, since nobody acts on `first` any more."""
        self._counts: Counter[int] = Counter()
        self._previous: dict[int, Any] = {}

    def open(self) -> None:
        """Start noting signals.

        Raises ValueError outside of the main thread, the only one in which Python allows handlers to be set.
        """
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"signal handlers can be set in the main thread only; this is {threading.current_thread().name}. Use "
                f"`stop_on_request` in place of `stop_on_signals`, and call `request_stop` when it is time to stop."
            )
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        if not self.signals:
            return
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._note)
        # Handlers run once the main thread is back in Python, which may take long. This descriptor is written at once.
        self._previous_descriptor = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        if self._previous_descriptor != -1:  # an event loop's
            signal.set_wakeup_fd(self._previous_descriptor)
        _receivers.add(self)
        multiprocessing.util.register_after_fork(self, SignalReceiver._in_multiprocessing_child)

    def close(self) -> None:
        """Restore the previous handlers."""
        if self.signals:
            _receivers.discard(self)
            signal.set_wakeup_fd(self._previous_descriptor)
            self._restore()
        self._near.close()
        self._far.close()

    @property
    def reason(self) -> str | None:
        """The signal or request to stop, as in "SIGTERM"; None if there was none."""
        return self.requested if self.first is None else self.first.name

    def request(self, reason: str) -> None:
        """Ask to stop, as a signal does."""
        self.requested = self.requested or reason
        self.wake()

    def wait(self, seconds: float) -> None:
        """Wait in another thread for a signal or `wake`, at most `seconds`."""
        ready, _, _ = select.select([self._near], [], [], seconds)
        if ready:
            for number in self._near.recv(4096):
                if number in self.signals and self.first is None:
                    self.first = signal.Signals(number)

    def wake(self) -> None:
        """End a `wait`."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes up anyway
            self._far.send(b"\0")

    def _note(self, number: int, frame: Any) -> None:
        # Nothing here may wait: it runs between any two lines of the main thread, which may hold any lock.
        self._counts[number] += 1
        if self.deaf or self._counts[number] >= _INSISTENCE:
            self._restore()
            signal.raise_signal(number)
        elif self.first is None:
            self.first = signal.Signals(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not Python's

    def in_forked_process(self) -> None:
        """Stop noting signals in a forked process, which is not a worker."""
        signal.set_wakeup_fd(-1)  # or its signals would count as the worker's
        self._restore()
        for number in self.signals:
            if number != signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)

    def _in_multiprocessing_child(self) -> None:
        """In a process that `multiprocessing` has forked: let only its parent end it."""
        if self in _receivers and signal.SIGTERM in self.signals:
            # Blocked here and in all future threads, since only `sigwaitinfo` tells who sent a signal.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_by_parent, name="dsgdac-signals", daemon=True).start()


def _end_by_parent() -> None:
    parent = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as a DataLoader's process does: another status is an error to its parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: list(map(SignalReceiver.in_forked_process, list(_receivers))))


def _checked(signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        raise TypeError(f"signals must be a sequence such as (signal.SIGTERM,); got {signals!r}.")
    found = tuple(signals)
    if not found or not {*found} <= signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        raise ValueError(
            f"signals must name at least one signal that a process can catch, such as signal.SIGTERM; got {found!r}."
        )
    return tuple(map(signal.Signals, found))
