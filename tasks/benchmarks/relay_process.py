"""Starts the relay, and lets workers send commands to it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_PATIENCE = 30.0


@dataclass(frozen=True)
class Counters:
    """Counters of the relay."""

    bytes_sent: dict[int, int]
    """Bytes sent so far by each worker."""
    late: float
    """Seconds from the due time of a piece to its delivery, on average."""
    latest: float
    """The longest such delay."""


class RelayClient:
    """A worker's control connection to the relay at `port` of this machine.

    Raises ConnectionError if no relay answers.
    """

    def __init__(self, port: int) -> None:
        try:
            self._connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        except OSError as error:
            raise _no_answer(str(error)) from error
        self._answers = self._connection.makefile("r")

    def ask(self, line: str) -> str:
        """Send a command and return its answer.

        Raises ConnectionError if the relay is gone, RuntimeError for an unknown command.
        """
        try:
            self._connection.sendall(f"{line}\n".encode())
            answer = self._answers.readline().strip()
        except OSError as error:
            raise _no_answer(f"{line!r}: {error}") from error
        if not answer:
            raise _no_answer(f"{line!r}: it has hung up")
        if answer.startswith("not understood"):
            raise RuntimeError(f"the relay did not carry out {line!r}.")
        return answer

    def counters(self) -> Counters:
        """The counters as of now."""
        found = json.loads(self.ask("counters"))
        sent = {int(rank): size for rank, size in found["bytes"].items()}
        return Counters(sent, found["late"], found["latest"])

    def close(self) -> None:
        """Close the connection."""
        self._answers.close()
        self._connection.close()


def _no_answer(happened: str) -> ConnectionError:
    return ConnectionError(
        f"the relay that carries the workers' connections does not answer ({happened}). Start again."
    )


@contextlib.contextmanager
def running_relay(rate: float, delay: float, queue: float) -> Iterator[int]:
    """Run a relay in a process of its own inside the context. Yields the port of its control connection.

    If the relay ends by itself, a line on stderr says so at the end. A Ctrl-C does not reach it, since the workers need
    it until they have ended.

    Args:
        rate: bytes per second of a line.
        delay: seconds from one worker to another.
        queue: most bytes that wait for a line.

    Raises RuntimeError if the relay does not start.
    """
    command = [sys.executable, "-m", "tasks.benchmarks.relay", *map(str, (rate, delay, queue))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the relay ended at once with status {process.wait()}. Its error is printed above.")
        try:
            yield int(port)
        finally:
            process.stdin.close()
            try:
                status = process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                print(f"the relay that carries the workers' connections {how}", file=sys.stderr, flush=True)
