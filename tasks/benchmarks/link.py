"""A model of a slow network: computes when data arrives. The relay carries it out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Network:
    """Workers that each have one full-duplex line to a switch. Times are in seconds, on any clock of the caller.

    Data from worker i to worker j leaves i at `rate`, one piece after the other, travels for `delay`, and enters j at
    `rate`. The second line starts while the first still sends (cut-through), so a single message of S bytes takes
    S / rate + delay. A line accepts no more data while `queue` bytes wait for it, and the sender has to wait, as when
    TCP fills a router's queue.

    >>> network = Network(rate=1e6, delay=0.01, queue=512 * 1024)
    >>> network.send(0.0, 0, 1, 500_000), network.send(0.0, 0, 2, 500_000)
    (0.51, 1.01)
    """

    rate: float
    """Bytes per second in each direction."""
    delay: float
    """Seconds from one worker to another."""
    queue: float
    """Most bytes that wait for a line."""
    _leaving: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """For each worker, when its outgoing line is free again."""
    _entering: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """For each worker, when its incoming line is free again."""

    def room_at(self, now: float, sender: int, receiver: int) -> float:
        """When the next piece may be sent: `now`, or once no line on the way has more than `queue` bytes waiting."""
        waiting = self.queue / self.rate
        return max(now, self._leaving[sender] - waiting, self._entering[receiver] - self.delay - waiting)

    def send(self, now: float, sender: int, receiver: int, size: int) -> float:
        """Put a piece of `size` bytes on the line. Returns when its last byte arrives."""
        seconds = size / self.rate
        left = self._leaving[sender] = max(now, self._leaving[sender]) + seconds
        arrived = self._entering[receiver] = max(left + self.delay, self._entering[receiver] + seconds)
        return arrived
