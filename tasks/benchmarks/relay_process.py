"""The relay as its users see it: started, asked and ended."""

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
    """What the relay has carried so far."""

    bytes_sent: dict[int, int]
    """By each worker."""
    late: float
    """Seconds after its due time at which a piece was delivered, on average."""
    latest: float
    """The same of the worst piece."""


class RelayClient:
    """A worker's control connection to the relay at `port` of this machine.

    Raises ConnectionError where no relay answers.
    """

    def __init__(self, port: int) -> None:
        try:
            self._connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        except OSError as error:
            raise _no_answer(str(error)) from error
        self._answers = self._connection.makefile("r")

    def ask(self, line: str) -> str:
        """One command and its answer. Raises ConnectionError without a relay, RuntimeError for an unknown command."""
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
        """As of now."""
        found = json.loads(self.ask("counters"))
        sent = {int(rank): size for rank, size in found["bytes"].items()}
        return Counters(sent, found["late"], found["latest"])

    def close(self) -> None:
        """Hang up."""
        self._answers.close()
        self._connection.close()


def _no_answer(happened: str) -> ConnectionError:
    return ConnectionError(
        f"the relay that carries the workers' connections does not answer ({happened}). Start again."
    )


@contextlib.contextmanager
def running_relay(rate: float, delay: float, queue: float) -> Iterator[int]:
    """A relay of its own process; the port of its control connection.

    The arguments are those of `link.Network`: bytes per second, seconds, bytes. If the relay ends by itself, a line in
    the end says so. A Ctrl-C does not reach it: workers need it as long as they are there.

    Raises RuntimeError where it does not start.
    """
    command = [sys.executable, "-m", "tasks.benchmarks.relay", *map(str, (rate, delay, queue))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the relay ended at once with status {process.wait()}; see above.")
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
