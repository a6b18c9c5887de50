"""One exchange between processes: post what travels in a round, go on, and wait for it.

Workers of the same process read each other's copies in place; only what other processes need is sent. Most rounds are
point-to-point; averaging groups of three or more workers that span processes are summed by an all-reduce.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent import futures

import torch
import torch.distributed as dist

from dsgdac_accel.core.rounds import Incoming, Outgoing, Rounds
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.poster import result_within
from dsgdac_accel.distributed.transport import Works
from dsgdac_accel.distributed.watchdog import WAITS

_FEW_BYTES = 2**19


class Exchange:
    """Posts one exchange at a time and waits for it. The tensors are the caller's; this class owns none.

    Args:
        group: the processes. Construction is collective.
        rounds: who exchanges with whom.
    """

    def __init__(self, group: WorkerGroup, rounds: Rounds) -> None:
        self.group = group
        self.rounds = rounds
        self.channel = group.new_channel()
        """Separates the messages of this exchange from another's."""
        self.waited_seconds = 0.0
        """Duration of the last `wait`, or with NCCL of the one before, see `DeviceStopwatch`."""
        self.bytes_sent = 0
        """Bytes that this process sent in the last exchange."""
        self._posted: futures.Future[Works] | None = None
        self._works: Works = []
        self._what = ""
        self._only_peer: int | None = None
        self._stream = f"exchange {self.channel} of {group.stream}"
        self._needs: list[int] = []
        self._transport = group.process_groups.transport
        self._stopwatch = self._transport.stopwatch()
        if not self._transport.host_waits:
            group.barrier("connecting the neighbors")
        group.guarded(lambda: self._transport.within(group.timeout, self._connect), "connecting the neighbors")

    def _connect(self) -> None:
        """Make a process group for every all-reduce of a period, member or not, and connect all pairs of neighbors."""
        rounds, groups, transport = self.rounds, self.group.process_groups, self._transport
        for workers in itertools.chain.from_iterable(rounds.all_reduces):
            groups.subgroup(rounds.processes(workers))
        if transport.host_waits:
            return
        one = [torch.zeros(1, device=self.group.device)]
        incoming = [[list(map(torch.zeros_like, one)) for _ in range(count)] for count in rounds.slots]
        for round_ in range(rounds.topology.period):
            messages = rounds.messages(round_, self.channel, lambda local, receiver: one, incoming, transport.pieces)
            for work, _ in transport.send_and_receive(groups.exchange, *messages):
                transport.wait(work, self.group.timeout)
        transport.synchronize()

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
            incoming: the tensors to fill.
            encode: fills the outgoing tensors first, in the background.
        """
        assert self._posted is None, "one exchange at a time"
        rounds, groups, transport = self.rounds, self.group.process_groups, self._transport
        receives, sends, busiest = rounds.messages(round_, self.channel, outgoing, incoming, transport.pieces)
        averaging = rounds.all_reduce_groups(round_)
        peers = rounds.peers(round_)
        self._what, self._only_peer = what, peers[0] if len(peers) == 1 else None
        self._needs = [self.group.members.launched[peer] for peer in peers]
        WAITS.enter(self._stream, round_)
        self.bytes_sent = sum(tensor.nbytes for tensor, _, _ in sends)
        for workers in averaging:
            # An all-reduce by ring sends 2 (m - 1) / m of its input: once to reduce, once to spread.
            m, totals = len(rounds.processes(workers)), incoming[rounds.local(workers)[0]][0]
            self.bytes_sent += round(2 * (m - 1) / m * sum(total.nbytes for total in totals))

        def post() -> Works:
            if encode is not None:
                encode()
            works: Works = []
            for workers in averaging:
                works += self._all_reduce(workers, outgoing, incoming)
            return works + transport.send_and_receive(groups.exchange, receives, sends, busiest)

        # Handing a small model to the thread takes longer than posting it.
        small = encode is None and self.bytes_sent <= _FEW_BYTES
        self._posted = self.group.poster.submit(lambda: transport.post(post, what, self._only_peer), small)

    def _all_reduce(self, workers: Sequence[int], outgoing: Outgoing, incoming: Incoming) -> Works:
        """Sum the copies of the local workers of a group, and begin to sum the result over its processes."""
        first, *others = self.rounds.local(workers)
        totals = incoming[first][0]
        for total, own in zip(totals, outgoing(first, None), strict=True):
            total.copy_(own)
        for other in others:
            for total, own in zip(totals, outgoing(other, None), strict=True):
                total.add_(own)
        handle = self.group.process_groups.subgroup(self.rounds.processes(workers))
        return [(dist.all_reduce(total, group=handle, async_op=True), None) for total in totals]

    def wait(self) -> None:
        """Wait until everything has arrived and `outgoing` may change.

        Raises WorkerLostError like `WorkerGroup.guarded`; do not use what arrived then.
        """
        group, posted = self.group, self._posted
        deadline = time.perf_counter() + group.timeout
        self._stopwatch.start()
        try:
            with WAITS.waiting(self._what, self._stream, self._needs):
                if posted is not None:  # else an earlier wait was interrupted
                    try:
                        self._works = group.guarded(
                            lambda: result_within(group.timeout, posted), self._what, self._only_peer
                        )
                    finally:
                        if posted.done():
                            self._posted = None
                while self._works:
                    work, peer = self._works[0]
                    # gloo completes a message in the first `wait`, and an interrupt may come right after that. A second
                    # one would time out.
                    if peer is None or not work.is_completed():
                        group.guarded(
                            lambda: self._transport.wait(self._works[0][0], deadline - time.perf_counter()),
                            self._what,
                            peer,
                        )
                    del self._works[0]
        finally:
            self._stopwatch.stop()
            self.waited_seconds = self._stopwatch.seconds
