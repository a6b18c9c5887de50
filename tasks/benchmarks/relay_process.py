"""The relay as its users see it: started, asked and ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TASKS = Path(__file__).resolve().parents[1]
_PATIENCE = 30.0


@dataclass(frozen=True)
class Counters:
    """What the relay has carried so far."""

    bytes_sent: dict[int, int]
    """By each worker."""
    late: float
    """Seconds after its due time at which a piece was delivered, on average."""
    latest: float
    """The same of the worst piece."""


class RelayClient:
    """A worker's control connection to the relay at `port` of this machine."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        self._answers = self._connection.makefile("r")

    def ask(self, line: str) -> str:
        """One command and its answer. Raises RuntimeError where the relay has ended or did not understand."""
        try:
            self._connection.sendall(f"{line}\n".encode())
            answer = self._answers.readline().strip()
        except OSError as error:
            answer = str(error)
        if not answer or answer.startswith("not understood"):
            raise RuntimeError(f"the relay did not carry out {line!r} ({answer or 'it has ended'}). Start again.")
        return answer

    def counters(self) -> Counters:
        """As of now."""
        found = json.loads(self.ask("counters"))
        sent = {int(rank): size for rank, size in found["bytes"].items()}
        return Counters(sent, found["late"], found["latest"])

    def close(self) -> None:
        """Hang up."""
        self._answers.close()
        self._connection.close()


@contextlib.contextmanager
def running_relay(rate: float, delay: float, queue: float) -> Iterator[int]:
    """A relay of its own process; the port of its control connection.

    The arguments are those of `link.Network`: bytes per second, seconds, bytes.
    """
    command = [sys.executable, "-m", "benchmarks.relay", *map(str, (rate, delay, queue))]
    variables = os.environ | {"PYTHONPATH": str(_TASKS)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the relay ended at once with status {process.wait()}; see above.")
        yield int(port)
    finally:
        process.stdin.close()
        process.wait(_PATIENCE)
        process.stdout.close()
