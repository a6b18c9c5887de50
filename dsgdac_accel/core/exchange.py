"""One exchange between processes: post the sends and receives of a round, travel in the background, and wait.

Workers of the same process read each other's parameters in place; only what other processes need is sent. Most rounds
are point-to-point. A round that averages whole groups of three or more workers is an all-reduce on each group. The
round alone decides which of the two, and with whom, so all workers agree without asking.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures

import torch
import torch.distributed as dist
from torch import Tensor

from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed.failure_detection import WorkerLostError
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.poster import result_within
from dsgdac_accel.distributed.transport import Message, Works

_FEW_BYTES = 2**19
_ABANDON_SECONDS = 10.0
_CHANNELS, _ROUNDS, _MAX_CHUNKS = 2**7, 2**12, 2**12  # how many get tags of their own; 31 bits in all

Outgoing = Callable[[int, int | None], Sequence[Tensor]]
"""(local worker, receiver) -> the tensors to send it; without a receiver, those to sum over an averaging group."""
Incoming = Sequence[Sequence[Sequence[Tensor]]]
"""[local worker][k] -> the tensors to fill with what its k-th neighbor in another process sends."""


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
        """By this process in the last exchange."""
        self._posted: futures.Future[Works] | None = None
        self._works: Works = []
        self._what = ""
        self._only_peer: int | None = None
        self._transport = group.process_groups.transport
        self._stopwatch = self._transport.stopwatch()
        self.channel = group.new_channel()
        """Separates the messages of this exchange from another's. It stays the same after a loss: survivors may need
        several attempts to connect, and not all of them equally many."""
        if self._transport.connects_late:
            group.barrier("connecting the neighbors")
        group.guarded(self.connect, "connecting the neighbors")

    def connect(self) -> None:
        """Make what the rounds need in the present process group. Collective."""
        self._transport.within(self.group.timeout, self._connect)

    def _connect(self) -> None:
        for processes in self.rounds.all_sums():  # every process creates every subgroup, member or not
            self.group.process_groups.subgroup(processes)
        if self._transport.connects_late:
            for round_ in range(self.rounds.topology.period):
                self._connect_neighbors(round_)
            self._transport.synchronize()

    def _connect_neighbors(self, round_: int) -> None:
        """Exchange one number with each neighbor of the round that is new. Both ends know alike which ones are."""
        groups, rank = self.group.process_groups, self.group.rank
        new = self.rounds.messages(round_) - groups.connected
        messages = [(torch.zeros(1, device=self.group.device), source, target) for source, target in sorted(new)]
        receives = [(one, source, 0) for one, source, _ in messages if source != rank]
        sends = [(one, target, 0) for one, _, target in messages if target != rank]
        busiest = self.rounds.busiest
        for work, _ in self._transport.send_and_receive(receives, sends, groups.exchange, busiest):
            self._transport.wait(work, self.group.timeout)
        groups.connected |= new

    def _messages(
        self, round_: int, outgoing: Outgoing, incoming: Incoming
    ) -> tuple[list[Message], list[Message], int]:
        """Return what to receive and what to send, with tags that both sides derive alike, and tensors per pair."""
        rounds = self.rounds
        pairs: list[tuple[int, int, Sequence[Tensor]]] = []
        for local, worker in enumerate(rounds.workers):
            plan = rounds.plan(round_, local)
            if plan.averaging_group:
                continue
            pairs += [(sender, worker, incoming[local][k]) for k, sender in enumerate(rounds.elsewhere(plan.weights))]
            pairs += [(worker, receiver, outgoing(local, receiver)) for receiver in rounds.elsewhere(plan.recipients)]
        receives: list[Message] = []
        sends: list[Message] = []
        # A worker that is a round off must not be taken for one in step, nor one optimizer's parameters for another's.
        base = (self.channel % _CHANNELS * _ROUNDS + round_ % _ROUNDS) * _MAX_CHUNKS
        count: Counter[tuple[int, int]] = Counter()  # messages from one process to another so far
        for sender, receiver, tensors in sorted(pairs, key=operator.itemgetter(0, 1)):
            source, target = sender // rounds.local_workers, receiver // rounds.local_workers
            for chunk in itertools.chain.from_iterable(map(self._transport.pieces, tensors)):
                tag = base + count[source, target]
                count[source, target] += 1
                if source == self.group.rank:
                    sends.append((chunk, target, tag))
                else:
                    receives.append((chunk, source, tag))
        return receives, sends, len(pairs[0][2]) if pairs else 0

    # ---- post and wait

    def post(
        self,
        round_: int,
        what: str,
        outgoing: Outgoing,
        incoming: Incoming,
        encode: Callable[[], None] | None = None,
        copied: Callable[[int], None] | None = None,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        """Start sending and receiving; returns at once. No tensor may be touched until `wait` returns.

        Args:
            round_: decides who exchanges with whom.
            what: names the exchange in errors.
            outgoing: the tensors that a local worker sends to a receiver.
            incoming: the tensors to fill. `incoming[i][0]` gets the SUM over an averaging group that spans processes,
                where i is its first local member.
            encode: fills the outgoing tensors first, in the background.
            copied: called in the background with a local worker whose parameters were copied for an all-reduce.
            confirm: called in the background once the parameters need not be read any more, if that is before `wait`.
        """
        assert self._posted is None, "one exchange at a time"
        transport = self._transport
        receives, sends, per_pair = self._messages(round_, outgoing, incoming)
        sums = self.rounds.sums(round_)
        peers = self.rounds.peers(round_)
        self._what, self._only_peer = what, peers[0] if len(peers) == 1 else None
        self.bytes_sent = sum(chunk.nbytes for chunk, _, _ in sends)
        for members in sums:
            count = len(self.rounds.processes(members))
            # An all-reduce by ring sends 2 (m - 1) / m of its input (once to reduce, once to spread).
            self.bytes_sent += round(2 * (count - 1) / count * sum(tensor.nbytes for tensor in outgoing(0, None)))

        def post() -> Works:
            if encode is not None:
                encode()
            works = self._average(sums, outgoing, incoming, copied)
            if confirm is not None and (sums or encode is not None):
                confirm()
            handle = self.group.process_groups.exchange
            return [*works, *transport.send_and_receive(receives, sends, handle, busiest)]

        def busiest() -> int:
            return per_pair * self.rounds.busiest()

        # Handing a small model to the thread takes longer than posting it.
        small = encode is None and self.bytes_sent <= _FEW_BYTES
        self._posted = self.group.poster.submit(lambda: transport.post(post, what, self._only_peer), small)

    def wait(self) -> None:
        """Wait until everything has arrived and `outgoing` may change.

        Raises WorkerLostError or WorkersChangedError like `WorkerGroup.guarded`; do not use what arrived then.
        """
        assert self._posted is not None, "nothing was posted"
        deadline = time.perf_counter() + self.group.timeout
        self._stopwatch.start()
        try:
            self._works = self.group.guarded(self._take_posted, self._what, self._only_peer)
            while self._works:
                # No local variable for the work: it would keep open the connection that survivors wait to see closed.
                self.group.guarded(lambda: self._wait_for_first(deadline), self._what, self._works[0][1])
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

    def _wait_for_first(self, deadline: float) -> None:
        self._transport.wait(self._works[0][0], deadline - time.perf_counter())

    def abandon(self) -> None:
        """Give up what is in flight: a worker was lost, and the connections are about to end.

        Raises WorkerLostError if the transport blocks, so that nobody can end them.
        """
        posted, self._posted = self._posted, None
        if posted is not None and not futures.wait([posted], _ABANDON_SECONDS).done:
            raise WorkerLostError(f"{self._what} cannot be given up, since the transport blocks. Start again.")
        self._works.clear()  # each work holds the connections open

    def _average(
        self,
        sums: list[tuple[int, ...]],
        outgoing: Outgoing,
        incoming: Incoming,
        copied: Callable[[int], None] | None,
    ) -> Works:
        works: Works = []
        for members in sums:
            handle = self.group.process_groups.subgroup(self.rounds.processes(members))
            first, *others = self.rounds.local(members)
            totals = incoming[first][0]
            for total, own in zip(totals, outgoing(first, None), strict=True):
                total.copy_(own)
            if copied is not None:
                copied(first)
            for other in others:
                for total, own in zip(totals, outgoing(other, None), strict=True):
                    total.add_(own)
            works += [(dist.all_reduce(total, group=handle, async_op=True), None) for total in totals]
        return works
