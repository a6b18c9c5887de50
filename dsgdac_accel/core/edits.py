"""Noticing weights that a script changes while their exchange is in flight.

The transport reads the parameters at a time of its own, so a neighbor could receive a mixture of old and new values.
The bits of the parameters are summed when an exchange is posted. The sums travel with them, so that a receiver notices
even an edit that was undone before the exchange ended. The sender compares its own parameters when it ends.

A bucket of up to 1 MiB is summed whole. Of a larger one every sixteenth row of 4 KiB is, other rows at each step: three
passes over 40 MB would cost 6 % of a step. So an edit of 68 KiB or more is noticed at once, and a smaller one that is
repeated at every step within sixteen. A mere change of order inside a block of rows goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.buckets import Buckets
from dsgdac_accel.core.flat_parameters import ALIGNMENT
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.parameter_guard import MixedParameters
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed.group import WorkerGroup

_MOST_BLOCKS = 128  # of a bucket; each has a sum of its own, which tells where an edit was
_WHOLE_BYTES = 2**20
_EVERY, _ROW_BYTES = 16, 2**12


class EditGuard:
    """Compares what was posted with what was sent; only reads the parameters.

    Args:
        group: the processes.
        rounds: who exchanges with whom.
        buckets: the parameters.
        parameters: their names, for messages.
    """

    def __init__(self, group: WorkerGroup, rounds: Rounds, buckets: Buckets, parameters: MixedParameters) -> None:
        self.group = group
        self.rounds = rounds
        self.buckets = buckets
        self.parameters = parameters
        self.sent: dict[int, Tensor] = {}
        """[local worker] the sums of its parameters when they were posted, (blocks,); only of those that send."""
        self.received: dict[int, list[Tensor]] = {}
        """[local worker][k] the sums that its k-th neighbor in another process sent."""
        self._turn = 0
        self._read: dict[int, Tensor] = {}
        """The sums of parameters that were copied or rounded for sending, right after that."""
        self._unread: tuple[HostCopy, list[tuple[int, Tensor]], int] | None = None
        """Whether anything has changed; workers with, for each of their blocks, whether it has; and the step."""

    def seal(self, round_: int, step: int) -> None:
        """Sum the parameters as they are now; their exchange, for the mix of `step`, is about to be posted."""
        self._turn = step
        self.sent = {
            local: self._sums(local) for local in range(self.rounds.local_workers) if self._sends(round_, local)
        }
        self.received = {
            local: [torch.empty_like(sums) for _ in range(self.rounds.slots[local])]
            for local, sums in self.sent.items()
        }
        self._read = {}

    def outgoing(self, local: int, receiver: int | None) -> list[Tensor]:
        """Return the parameters of a local worker with their sums, or without these if there is no single receiver."""
        x = self.buckets.values(local)
        return x if receiver is None else [*x, self.sent[local]]

    def incoming(self) -> list[list[list[Tensor]]]:
        """Return the receive buffers of all local workers, with room for sums."""
        return [
            [[*slot, sums] for slot, sums in zip(slots, self.received[local], strict=True)]
            if local in self.sent
            else slots
            for local, slots in enumerate(self.buckets.received)
        ]

    def confirm(self) -> None:
        """Sum the parameters that were just copied or rounded for sending. Runs in the thread that posts."""
        self._read = {local: self._sums(local) for local in self.sent}

    def check(self, round_: int, step: int, uncompressed: bool, late: bool) -> None:
        """Raise RuntimeError if this worker's parameters, or those that a neighbor sent, are not what was posted.

        Args:
            round_: decides who sent.
            step: the present one, for messages.
            uncompressed: whether the parameters were sent as they are.
            late: leave it to a later `settle` to read and raise what was found, so that the host does not wait.
        """
        changes: list[tuple[int, Tensor]] = []
        for local, sent in self.sent.items():
            worker = self.rounds.workers[local]
            changes.append((worker, self._sums(local) != sent))
            if local in self._read:
                changes.append((worker, self._read[local] != sent))
            for k, sender in enumerate(self._senders(round_, local) if uncompressed else ()):
                arrived = block_sums(self.buckets.received[local][k], self._turn)
                changes.append((sender, arrived != self.received[local][k]))
        self.sent = {}
        if changes:
            self._unread = HostCopy(torch.cat([changed for _, changed in changes]).any()), changes, step
        if not late:
            self.settle()

    def settle(self) -> None:
        """Raise RuntimeError if the latest `check` found an edit, unless that was read already."""
        unread, self._unread = self._unread, None
        if unread is None or not unread[0].is_set():
            return
        worker, changed = next((worker, changed) for worker, changed in unread[1] if bool(changed.any()))
        self._raise(worker, changed.nonzero().flatten().tolist(), step=unread[2])

    def forget(self) -> None:
        """Drop what was posted and what was not read: the exchange is given up, or the run continues elsewhere."""
        self.sent, self._unread = {}, None

    def _sends(self, round_: int, local: int) -> bool:
        plan = self.rounds.plan(round_, local)
        return bool(self.rounds.elsewhere([*plan.weights, *plan.recipients]))

    def _senders(self, round_: int, local: int) -> list[int]:
        plan = self.rounds.plan(round_, local)
        return [] if plan.averaging_group else self.rounds.elsewhere(plan.weights)

    def _sums(self, local: int) -> Tensor:
        return block_sums(self.buckets.values(local), self._turn)

    def _raise(self, worker: int, blocks: Sequence[int], step: int) -> None:
        self.buckets.drop()
        found = [self._parameters_in(block, turn=step) for block in blocks]
        suspects = min(found, key=len)  # small parameters share a block
        where = " or ".join(map(self.parameters.name_of, suspects[:4]))
        message = (
            f"worker {self.rounds.original_number(worker)}: {where} was changed while its exchange was in flight at "
            f"step {step}"
        )
        self.group.report(message)
        raise RuntimeError(
            f"{message}, so neighbors may have received other values. Change weights inside `with deployed_model(...)` "
            f"if it is for an evaluation, or set GossipConfig(overlap=False)."
        )

    def _parameters_in(self, block: int, turn: int) -> list[Parameter]:
        """Return the parameters of the first local worker that have elements in a block, counted over all buckets."""
        for bucket in self.buckets.flats[0].buckets:
            blocks = block_places(bucket.data.nbytes, turn)
            if block < len(blocks):
                begin = bucket.data.data_ptr()
                places = zip(bucket.parameters, bucket.addresses, bucket.targets, strict=True)
                return [
                    parameter
                    for parameter, address, target in places
                    if any(
                        address < begin + last and address + target.untyped_storage().nbytes() > begin + first
                        for first, last in blocks[block]
                    )
                ]
            block -= len(blocks)
        raise AssertionError("there are as many sums as blocks")


def block_places(nbytes: int, turn: int) -> list[list[tuple[int, int]]]:
    """Return the rows of each block of a bucket: where they begin and end, in bytes. See `block_sums`."""
    row = ALIGNMENT if nbytes <= _WHOLE_BYTES else _ROW_BYTES
    rows = [(first, first + row) for first in range(0, nbytes - row + 1, row)]
    if nbytes > _WHOLE_BYTES:
        rows = rows[turn % _EVERY :: _EVERY]
    per_block = -(-len(rows) // _MOST_BLOCKS)
    blocks = [rows[first : first + per_block] for first in range(0, len(rows), max(1, per_block))]
    return blocks + [[(nbytes // row * row, nbytes)]] * bool(nbytes % row)


def block_sums(buckets: Sequence[Tensor], turn: int) -> Tensor:
    """Return sums of the bits of each block of some buckets, as int64 words modulo 2^64: exact in any order.

    Args:
        buckets: (D,) each, padded to whole rows of 128 bytes.
        turn: which rows of a large bucket are summed; the step.

    >>> len(block_sums([torch.zeros(64), torch.zeros(2**20)], turn=0))
    66
    """
    sums = []
    for bucket in buckets:
        words = bucket.view(torch.int64)
        if bucket.nbytes <= _WHOLE_BYTES:
            sums += _sums_of_rows(words.view(-1, ALIGNMENT // 8))
            continue
        count = bucket.nbytes // _ROW_BYTES
        whole = words[: count * _ROW_BYTES // 8]
        sums += _sums_of_rows(whole.view(count, -1)[turn % _EVERY :: _EVERY])
        if len(whole) < len(words):
            sums.append(words[len(whole) :].sum().view(1))
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device="cpu")  # everything is frozen


def _sums_of_rows(rows: Tensor) -> list[Tensor]:
    if not len(rows):
        return []
    per_block = -(-len(rows) // _MOST_BLOCKS)
    whole = len(rows) // per_block
    sums = [rows[: whole * per_block].unflatten(0, (whole, per_block)).sum((1, 2))]
    return sums if whole * per_block == len(rows) else [*sums, rows[whole * per_block :].sum().view(1)]
