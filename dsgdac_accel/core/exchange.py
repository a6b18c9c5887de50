"""One exchange between processes: post the sends and receives of a round, travel in the background, and wait.

Workers of the same process read each other's copies in place; only what other processes need is sent. Most rounds
are point-to-point. A round that averages whole groups of three or more workers is an all-reduce on each group. The
round alone decides who communicates, and how, so all workers agree without asking.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures

from dsgdac_accel.core.group_all_reduce import GroupAllReduce
from dsgdac_accel.core.messages import Incoming, Messages, Outgoing
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.poster import result_within
from dsgdac_accel.distributed.transport import Works

_FEW_BYTES = 2**19


class Exchange:
    """Posts one exchange at a time and waits for it. The tensors are the caller's; this class owns none.

    Args:
        group: the processes. Construction and `connect` are collective.
        rounds: who exchanges with whom.
    """

    def __init__(self, group: WorkerGroup, rounds: Rounds) -> None:
        self.group = group
        self.rounds = rounds
        self.waited_seconds = 0.0
        """Duration of the last `wait`, or with NCCL of the one before, see `DeviceStopwatch`."""
        self.bytes_sent = 0
        """Bytes that this process sent in the last exchange."""
        self._posted: futures.Future[Works] | None = None
        self._works: Works = []
        self._what = ""
        self._only_peer: int | None = None
        self._transport = group.process_groups.transport
        self._all_reduce = GroupAllReduce(group, rounds)
        self._stopwatch = self._transport.stopwatch()
        self.channel = group.new_channel()
        """Separates the messages of this exchange from another's."""
        if self._transport.connects_late:
            group.barrier("connecting the neighbors")
        group.guarded(self.connect, "connecting the neighbors")

    def connect(self) -> None:
        """Make the connections that the rounds need, in the present process group. Collective."""
        self._messages = Messages(self.group, self.rounds, self.channel)

        def connect() -> None:
            self._all_reduce.connect()
            self._messages.connect()

        self._transport.within(self.group.timeout, connect)

    def post(
        self,
        round_: int,
        what: str,
        outgoing: Outgoing,
        incoming: Incoming,
        encode: Callable[[], None] | None = None,
    ) -> None:
        """Start sending and receiving; returns at once. No tensor may be written until `wait` returns.

        Args:
            round_: decides who exchanges with whom.
            what: names the exchange in errors.
            outgoing: the tensors that a local worker sends to a receiver.
            incoming: the tensors to fill; those of an averaging group that spans processes by `GroupAllReduce`.
            encode: fills the outgoing tensors first, in the background.
        """
        assert self._posted is None, "one exchange at a time"
        transport = self._transport
        receives, sends, busiest = self._messages.of_round(round_, outgoing, incoming)
        groups = self.rounds.all_reduce_groups(round_)
        peers = self.rounds.peers(round_)
        self._what, self._only_peer = what, peers[0] if len(peers) == 1 else None
        self.bytes_sent = sum(chunk.nbytes for chunk, _, _ in sends) + self._all_reduce.bytes_sent(groups, outgoing)

        def post() -> Works:
            if encode is not None:
                encode()
            works = self._all_reduce.post(groups, outgoing, incoming)
            handle = self.group.process_groups.exchange
            return [*works, *transport.send_and_receive(receives, sends, handle, busiest)]

        # Handing a small model to the thread takes longer than posting it.
        small = encode is None and self.bytes_sent <= _FEW_BYTES
        self._posted = self.group.poster.submit(lambda: transport.post(post, what, self._only_peer), small)

    def wait(self) -> None:
        """Wait until everything has arrived and `outgoing` may change.

        Raises WorkerLostError like `WorkerGroup.guarded`; do not use what arrived then.
        """
        deadline = time.perf_counter() + self.group.timeout
        self._stopwatch.start()
        try:
            if self._posted is not None:  # else an earlier wait was interrupted
                self._works = self.group.guarded(self._take_posted, self._what, self._only_peer)
            while self._works:
                self.group.guarded(
                    lambda: self._transport.wait(self._works[0][0], deadline - time.perf_counter()),
                    self._what,
                    self._works[0][1],
                )
                del self._works[0]
        finally:
            self._stopwatch.stop()
            self.waited_seconds = self._stopwatch.seconds

    def _take_posted(self) -> Works:
        posted = self._posted
        assert posted is not None
        try:
            return result_within(self.group.timeout, posted)
        finally:
            if posted.done():
                self._posted = None
