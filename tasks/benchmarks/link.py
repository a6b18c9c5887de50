"""When data arrives that workers send each other over a slow network: the arithmetic of the relay."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Network:
    """Workers that each have one full-duplex line to a switch; time is whatever clock the caller uses, in seconds.

    What worker i sends to worker j leaves i at `rate`, one piece after the other, travels for `delay`, and enters j at
    `rate`. The second line is used while the first still sends (cut-through), so a single message of S bytes takes
    S / rate + delay. A line that has `queue` bytes waiting takes no more; the sender then has to wait, as it does when
    TCP fills a router's queue.

    >>> network = Network(rate=1e6, delay=0.01, queue=512 * 1024)
    >>> network.send(0.0, 0, 1, 500_000), network.send(0.0, 0, 2, 500_000)
    (0.51, 1.01)
    """

    rate: float
    """Bytes per second in each direction."""
    delay: float
    """Seconds one way."""
    queue: float
    """Bytes."""
    _leaving: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """When the line out of a worker is free again."""
    _entering: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """When the line into a worker is free again."""

    def room_at(self, now: float, sender: int, receiver: int) -> float:
        """When the next piece may be sent: `now`, or as soon as no line on the way has more than `queue` waiting."""
        waiting = self.queue / self.rate
        return max(now, self._leaving[sender] - waiting, self._entering[receiver] - self.delay - waiting)

    def send(self, now: float, sender: int, receiver: int, size: int) -> float:
        """Put a piece of `size` bytes on the line; when its last byte arrives."""
        seconds = size / self.rate
        left = self._leaving[sender] = max(now, self._leaving[sender]) + seconds
        arrived = self._entering[receiver] = max(left + self.delay, self._entering[receiver] + seconds)
        return arrived
