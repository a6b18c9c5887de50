"""A rendezvous store whose waits end early when a worker that they wait for is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL_SECONDS = 0.02


class WatchedStore(dist.Store):
    """A store in which a wait fails as soon as it is in vain: once `in_vain()` returns a reason.

    torch and gloo would wait for a worker that dies while connecting until their timeouts, several in a row. `timeout`,
    in seconds, replaces the timeouts that waits are called with.
    """

    def __init__(self, store: Any, prefix: str, in_vain: Callable[[], str], timeout: float) -> None:
        super().__init__()
        self._store = dist.PrefixStore(prefix, store)
        self._in_vain = in_vain
        self._timeout_seconds = timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until these keys exist. Raises DistStoreError if they will not."""
        deadline, next_look = time.monotonic() + self._timeout_seconds, 0.0
        while not self._store.check(keys):
            now = time.monotonic()
            if now > next_look:
                next_look = now + _POLL_SECONDS
                reason = self._in_vain() or ("timed out" if now > deadline else "")
                if reason:
                    raise dist.DistStoreError(f"connection failed: {reason}")
            time.sleep(_POLL_SECONDS / 4)

    def get(self, key: str) -> bytes:
        """The value, once it exists. All other methods are the store's own."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        return self._store.compare_set(key, expected, wanted)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        return False  # keys are read one by one
