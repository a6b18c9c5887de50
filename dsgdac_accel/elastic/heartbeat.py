"""Heartbeats of survivors while they reconnect: a slow worker keeps beating, a hanging one stops."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 10.0
"""A worker without a heartbeat for this long counts as hanging; far longer than a busy machine needs."""


class Heartbeat:
    """Inside the context, this worker beats; `seen_from` says whether another one does.

    A thread changes a value in the store again and again. It keeps running while the worker waits in the transport, and
    stops with the process, so that a slow worker can be told from a hanging one, on another machine too.
    """

    def __init__(self, store: Any, me: int) -> None:
        self._store = store
        self._me = me
        self._ended = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}  # last value of each worker, and when it changed

    def __enter__(self) -> Heartbeat:
        threading.Thread(target=self._beat, name="dsgdac-heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # without a store no agreement is possible, which is an error
            while not self._ended.is_set():
                self._store.set(_key(self._me), str(time.monotonic_ns()))
                self._ended.wait(_BEAT_SECONDS)

    def seen_from(self, worker: int) -> bool:
        """Whether this worker's heartbeat has changed lately. The first value seen may be an old one, so it is none."""
        key, now = _key(worker), time.monotonic()
        value = self._store.get(key) if self._store.check([key]) else b""
        before, changed = self._seen.setdefault(worker, (value, -float("inf")))
        if value != before:
            changed = now
            self._seen[worker] = (value, now)
        return now < changed + _SILENCE_SECONDS

    def missed_since(self, began: float, worker: int) -> bool:
        """Whether this worker's heartbeat has been missing for too long, counted from `began` at the earliest."""
        return not self.seen_from(worker) and time.monotonic() > began + _SILENCE_SECONDS


def _key(worker: int) -> str:
    return f"dsgdac_accel/heartbeat/{worker}"
