"""A rendezvous store that makes gloo connect its workers through the relay.

gloo's workers publish in the store where they listen, and between two workers the one with the higher address connects.
This store therefore shows each worker a lower address for lower ranks, 0.0.0.0 (this machine) with a port of the relay,
and a higher address for higher ranks, which is never used since those connect themselves. Processes of the same worker
get their own ports in place of the relay's. This needs neither privileges nor changes to torch.
"""

from __future__ import annotations

import re
import struct
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tasks.benchmarks.relay_process import RelayClient

_ADDRESS = re.compile(rb"\x02\x00(?P<port>..)\x7f\x00\x00\x01\x00{8}", re.DOTALL)
"""A sockaddr_in of 127.0.0.1 in the bytes that gloo publishes for a worker."""
_LOWER, _HIGHER = bytes((0, 0, 0, 0)), bytes((127, 0, 0, 2))


class RelayedStore(dist.Store):
    """Wraps `store` for process `rank`, and replaces the addresses of other workers by those of the relay.

    Each `shards` processes in a row are a worker, and the relay counts workers.

    >>> announced = b"vm" + b"\\x02\\x00" + struct.pack(">H", 40000) + bytes((127, 0, 0, 1)) + bytes(8)
    >>> port_in(announced)
    40000
    """

    def __init__(self, store: dist.Store, rank: int, relay: RelayClient, shards: int = 1) -> None:
        super().__init__()
        self._store: Any = store
        self._rank, self._relay, self._shards = rank, relay, shards
        self.routes = 0
        """Number of connections that this process makes through the relay."""

    def set(self, key: str, value: Any) -> None:
        """Set a value; an address is also reported to the relay."""
        port = port_in(value if isinstance(value, bytes) else b"")
        if port is not None:
            self._relay.ask(f"owner {self._rank // self._shards} {port}")
            self._store.set(_owner_key(port), str(self._rank))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Get a value, with an address replaced by the one to connect to."""
        value = self._store.get(key)
        port = port_in(value)
        if port is None:
            return value
        owner = int(self._store.get(_owner_key(port)))
        if owner < self._rank:
            worker = self._rank // self._shards
            if owner // self._shards == worker:
                return replaced(value, _LOWER, port)
            self.routes += 1
            return replaced(value, _LOWER, int(self._relay.ask(f"route {worker} {port}")))
        return replaced(value, _HIGHER, port) if owner > self._rank else value

    def has_extended_api(self) -> bool:
        """False makes gloo read every address by `get`."""
        return False

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def append(self, key: str, value: str) -> None:
        self._store.append(key, value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout


def port_in(value: bytes) -> int | None:
    """The port in a published address, or None if the value is no address."""
    found = _ADDRESS.search(value)
    return None if found is None else struct.unpack(">H", found["port"])[0]


def replaced(value: bytes, host: bytes, port: int) -> bytes:
    """The value with another address in it."""
    address = b"\x02\x00" + struct.pack(">H", port) + host + bytes(8)
    return _ADDRESS.sub(lambda found: address, value, count=1)


def _owner_key(port: int) -> str:
    return f"benchmark/owner/{port}"
