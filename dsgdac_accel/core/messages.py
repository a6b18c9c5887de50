"""The messages of a round between processes, with their tags, and the connections that they need."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.transport import Message

_CHANNELS, _ROUNDS, _MAX_CHUNKS = 2**7, 2**12, 2**12  # how many get tags of their own; 31 bits in all

Outgoing = Callable[[int, int | None], Sequence[Tensor]]
"""(local worker, receiver) -> the tensors to send; if the receiver is None, those to sum over an averaging group."""
Incoming = Sequence[Sequence[Sequence[Tensor]]]
"""[local worker][k] -> the tensors to fill with those that its k-th neighbor in another process sends."""


class Messages:
    """Lists the tensors that travel to and from this process in a round, and connects it to its neighbors.

    Args:
        group: the processes, by their present process groups.
        rounds: who exchanges with whom. After it has changed, make new messages.
        channel: separates these messages from those of another exchange.
    """

    def __init__(self, group: WorkerGroup, rounds: Rounds, channel: int) -> None:
        self.group = group
        self.rounds = rounds
        self.channel = channel
        self._transport = group.process_groups.transport

    def of_round(
        self, round_: int, outgoing: Outgoing, incoming: Incoming
    ) -> tuple[list[Message], list[Message], Callable[[], int]]:
        """Return receives, sends, and a function that returns the most messages that any process has in a round.

        Both ends of a message derive its tag alike.
        """
        rounds = self.rounds
        receives: list[Message] = []
        sends: list[Message] = []
        # A worker that is a round off must not be taken for one in step, nor one optimizer's parameters for another's.
        base = (self.channel % _CHANNELS * _ROUNDS + round_ % _ROUNDS) * _MAX_CHUNKS
        count: Counter[tuple[int, int]] = Counter()  # messages from one process to another so far
        per_pair = 0
        for sender, receiver in self._pairs(round_):
            source, target = sender // rounds.local_workers, receiver // rounds.local_workers
            if source == self.group.rank:
                tensors = outgoing(sender - rounds.workers.start, receiver)
            else:
                local = receiver - rounds.workers.start
                tensors = incoming[local][rounds.elsewhere(rounds.plan(round_, local).weights).index(sender)]
            per_pair = len(tensors)  # the same for every pair
            for chunk in itertools.chain.from_iterable(map(self._transport.pieces, tensors)):
                tag = base + count[source, target]
                count[source, target] += 1
                if source == self.group.rank:
                    sends.append((chunk, target, tag))
                else:
                    receives.append((chunk, source, tag))
        return receives, sends, lambda: per_pair * self._busiest

    def _pairs(self, round_: int) -> list[tuple[int, int]]:
        """Return (sender, receiver), one of which is here and one elsewhere, in an order that both ends share."""
        rounds = self.rounds
        pairs: list[tuple[int, int]] = []
        for local, worker in enumerate(rounds.workers):
            plan = rounds.plan(round_, local)
            if not plan.averaging_group:
                pairs += [(sender, worker) for sender in rounds.elsewhere(plan.weights)]
                pairs += [(worker, receiver) for receiver in rounds.elsewhere(plan.recipients)]
        return sorted(pairs)

    @cached_property
    def _busiest(self) -> int:
        """The most parameter sets that any process sends and receives in a round."""
        rounds = self.rounds
        counts: Counter[tuple[int, int]] = Counter()  # by round and process
        for round_ in range(rounds.topology.period):
            for worker in range(rounds.topology.num_workers):
                plan = rounds.plan_of(round_, worker)
                there = worker // rounds.local_workers
                for sender in () if plan.averaging_group else plan.weights:
                    here = sender // rounds.local_workers
                    if here != there:
                        counts.update([(round_, here), (round_, there)])
        return max(counts.values(), default=0)

    # ---- connections

    def connect(self) -> None:
        """Connect this process to all that it exchanges messages with, if the transport does not. Collective."""
        if self._transport.connects_late:
            for round_ in range(self.rounds.topology.period):
                self._connect_neighbors(round_)
            self._transport.synchronize()

    def _connect_neighbors(self, round_: int) -> None:
        """Exchange one number with each neighbor of the round that is new. Both ends know alike which ones are."""
        groups, rank, local_workers = self.group.process_groups, self.group.rank, self.rounds.local_workers
        pairs = {(sender // local_workers, receiver // local_workers) for sender, receiver in self._pairs(round_)}
        new = pairs - groups.connected
        messages = [(torch.zeros(1, device=self.group.device), source, target) for source, target in sorted(new)]
        receives = [(one, source, 0) for one, source, _ in messages if source != rank]
        sends = [(one, target, 0) for one, _, target in messages if target != rank]
        works = self._transport.send_and_receive(receives, sends, groups.exchange, lambda: self._busiest)
        for work, _ in works:
            self._transport.wait(work, self.group.timeout)
        groups.connected |= new
