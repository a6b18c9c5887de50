"""A process that carries the connections between workers at the speed of an emulated network.

    python -m tasks.benchmarks.relay RATE DELAY QUEUE      bytes per second, seconds, bytes

It prints the port of its control connection, on which workers send commands, one per line:

    owner RANK PORT      worker RANK listens at PORT                                  -> "ok"
    route RANK PORT      where worker RANK connects to reach the owner of PORT        -> a port
    counters             bytes sent by each worker so far, and how late they arrived  -> JSON

The relay ends after its standard input does, which happens when its parent process ends. Before that it waits up to 10
seconds until all workers have closed their connections. It needs neither privileges nor a compiler: `relayed_store`
makes gloo connect to the relay instead of to its peers.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

from tasks.benchmarks.link import Network

_PIECE_SECONDS = 0.005
"""Time of a piece on the line: much shorter than a full queue takes, and long enough for pieces to be few."""
_SMALLEST_PIECE, _LARGEST_PIECE = 4096, 65536  # bytes; Linux, too, hands on what came in by up to 64 KiB at a time
_LAST_SECONDS = 10.0
"""Longest time for data on its way after standard input ended."""
_KERNEL_BUFFER = 128 * 1024
"""Small, so that data waits at the sender."""


class Relay:
    """Event loop over all connections, in one thread."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.piece = int(min(_LARGEST_PIECE, max(_SMALLEST_PIECE, network.rate * _PIECE_SECONDS)))
        self.owners: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.late_seconds = self.latest_seconds = 0.0
        self.pieces = 0
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.connections = 0
        """Open connections of workers, counted at both ends."""

    def run(self) -> None:
        """Serve until standard input ends."""
        control = self._listen(self._accept_control)
        print(control, flush=True)
        self.watch(sys.stdin.fileno(), select.EPOLLIN, lambda events: None)
        last = math.inf
        while (self.connections or last == math.inf) and time.monotonic() < last:
            first = min(last, self._timers[0][0] if self._timers else math.inf)
            wait = None if first == math.inf else max(0.0, first - time.monotonic())
            # epoll rounds timeouts up to milliseconds; select does not.
            select.select([self._poll.fileno()], [], [], wait)
            for descriptor, events in self._poll.poll(0):
                if descriptor == sys.stdin.fileno():
                    if not os.read(descriptor, 4096):
                        self.forget(descriptor)
                        last = time.monotonic() + _LAST_SECONDS
                elif descriptor in self._handlers:
                    self._handlers[descriptor](events)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2](now)

    def at(self, when: float, call: Callable[[float], None]) -> None:
        """Call `call` at `when`, with the time of the call."""
        heapq.heappush(self._timers, (when, next(self._numbers), call))

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        """Call the handler on these events of a descriptor."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def change(self, descriptor: int, events: int) -> None:
        """Change the events to watch for."""
        self._poll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def _listen(self, accepted: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.watch(listener.fileno(), select.EPOLLIN, lambda events: accepted(listener.accept()[0]))
        return listener.getsockname()[1]

    # ---- control

    def _accept_control(self, connection: socket.socket) -> None:
        text = b""

        def answer(events: int) -> None:
            nonlocal text
            try:
                received = connection.recv(4096)
            except OSError:
                received = b""
            if not received:
                self.forget(connection.fileno())
                connection.close()
                return
            text += received
            while b"\n" in text:
                line, text = text.split(b"\n", 1)
                connection.sendall(f"{self.command(line.decode())}\n".encode())

        self.watch(connection.fileno(), select.EPOLLIN, answer)

    def command(self, line: str) -> str:
        """Carry out one line of a worker. Returns the answer."""
        match line.split():
            case ["owner", rank, port]:
                self.owners[int(port)] = int(rank)
                return "ok"
            case ["route", rank, port]:
                sender, receiver, target = int(rank), self.owners[int(port)], int(port)
                return str(self._listen(lambda connection: self._connect(connection, sender, receiver, target)))
            case ["counters"]:
                mean = self.late_seconds / max(1, self.pieces)
                return json.dumps({"bytes": self.sent, "late": mean, "latest": self.latest_seconds})
        return f"not understood: {line}"

    # ---- connections of workers

    def _connect(self, near: socket.socket, sender: int, receiver: int, port: int) -> None:
        far = socket.create_connection(("127.0.0.1", port))
        for connection in (near, far):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
        one, other = End(self, near), End(self, far)
        one.reads = other.writes = Direction(self, one, other, sender, receiver)
        other.reads = one.writes = Direction(self, other, one, receiver, sender)

    def count(self, sender: int, size: int, late: float) -> None:
        """Count a delivered piece."""
        self.sent[sender] = self.sent.get(sender, 0) + size
        self.pieces += 1
        self.late_seconds += late
        self.latest_seconds = max(self.latest_seconds, late)


class End:
    """A connection to one worker, which one direction reads and the other writes."""

    reads: Direction
    writes: Direction

    def __init__(self, relay: Relay, connection: socket.socket) -> None:
        self.relay, self.socket = relay, connection
        self.events = select.EPOLLIN
        self.open = True
        relay.connections += 1
        relay.watch(connection.fileno(), self.events, self._handle)

    def _handle(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self.writes.deliver(time.monotonic())
        if self.open and events & ~select.EPOLLOUT:
            self.reads.read()

    def want(self, event: int, wanted: bool) -> None:
        """Start or stop watching for an event."""
        events = self.events | event if wanted else self.events & ~event
        if events != self.events and self.open:
            self.events = events
            self.relay.change(self.socket.fileno(), events)

    def close(self) -> None:
        """Close the connection for both directions; workers close theirs only when they are done."""
        if self.open:
            self.open = False
            self.relay.connections -= 1
            self.relay.forget(self.socket.fileno())
            self.socket.close()


class Direction:
    """The data that one worker sends to another over one connection."""

    def __init__(self, relay: Relay, source: End, target: End, sender: int, receiver: int) -> None:
        self.relay, self.source, self.target = relay, source, target
        self.sender, self.receiver = sender, receiver
        self._pieces: deque[tuple[float, memoryview]] = deque()
        self._over = False

    def read(self) -> None:
        """Read a piece from the sender, or wait until the network has room for it."""
        network, now = self.relay.network, time.monotonic()
        room = network.room_at(now, self.sender, self.receiver)
        if room > now:
            self.source.want(select.EPOLLIN, False)
            self.relay.at(room, lambda now: self.source.want(select.EPOLLIN, True))
            return
        try:
            data = self.source.socket.recv(self.relay.piece)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._over = True
            self.source.want(select.EPOLLIN, False)
            self.deliver(now)
            return
        due = network.send(now, self.sender, self.receiver, len(data))
        self._pieces.append((due, memoryview(data)))
        self.relay.at(due, self.deliver)

    def deliver(self, now: float) -> None:
        """Write the pieces that have arrived by now to the receiver."""
        while self._pieces and self._pieces[0][0] <= now and self.target.open:
            due, data = self._pieces.popleft()
            try:
                written = self.target.socket.send(data)
            except BlockingIOError:
                written = 0
            except OSError:
                self._end()
                return
            if written < len(data):
                self._pieces.appendleft((due, data[written:]))
                self.target.want(select.EPOLLOUT, True)
                return
            self.relay.count(self.sender, len(data), now - due)
        self.target.want(select.EPOLLOUT, False)
        if self._over and not self._pieces:  # close only after all data has arrived
            self._end()

    def _end(self) -> None:
        self.source.close()
        self.target.close()


if __name__ == "__main__":
    rate, delay, queue = map(float, sys.argv[1:4])
    Relay(Network(rate, delay, queue)).run()
