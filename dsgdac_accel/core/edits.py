"""Noticing weights that a script changes while their exchange is in flight, and workers that are not in step.

The transport reads the parameters at a time of its own, so a neighbor could receive a mixture of old and new values.
Four looks, each for what the others cannot see:

- A parameter whose version counter moved was written in place. Writes through `.data` leave no such trace.
- Checksums (sums of the bits) of the parameters are taken when an exchange is posted, and when it ends. They travel
  along, so that a receiver notices even an edit that was undone before the end. An all-reduce sends a copy, so the copy
  is summed when it is made, and compared with the parameters at the end.
- Two workers that are a pair must form the same difference, bit for bit. They sum it while it is in the cache, and
  compare when they next meet, or all workers are averaged or saved. So they sum parameters of more than 1 MiB in no
  other way: three passes over 40 MB would cost 6 % of a step.
- Channel and step travel, too: NCCL ignores tags, and an all-reduce has none.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.buckets import Buckets
from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.flat_parameters import ALIGNMENT, Bucket
from dsgdac_accel.core.host_copy import HostCopy, write_
from dsgdac_accel.core.kernels import CHECKSUM_BYTES
from dsgdac_accel.core.parameter_guard import MixedParameters
from dsgdac_accel.core.update import Update

_MOST_BLOCKS = 128  # of a bucket; each has a sum of its own, which tells where an edit was
_FEW_BYTES = 2**20
_HEAD = 4  # words: channel, step, whether checksums of parameters follow, and the step of the last difference
_MOST_NAMES = 8
_VERSION = operator.attrgetter("_version")
T = TypeVar("T")


@dataclass(frozen=True)
class ChecksumBlocks:
    """The blocks into which a bucket of some bytes is cut, each with a checksum of its own."""

    size: Callable[[int], int]
    """Bytes of a bucket -> bytes of a block; the last ones are shorter."""
    count: Callable[[int], int]


def _block_bytes(nbytes: int) -> int:
    return -(-max(1, nbytes) // (ALIGNMENT * _MOST_BLOCKS)) * ALIGNMENT


OF_PARAMETERS = ChecksumBlocks(_block_bytes, lambda nbytes: nbytes // _block_bytes(nbytes) + 1)
OF_DIFFERENCES = ChecksumBlocks(lambda nbytes: CHECKSUM_BYTES, lambda nbytes: -(-nbytes // CHECKSUM_BYTES))


@dataclass
class _Change:
    """Tells which blocks of a worker's parameters may have changed, by one flag for each."""

    workers: Sequence[int]
    """The one that changed it, or the two that may have."""
    step: int
    changed: Tensor
    blocks: ChecksumBlocks = OF_PARAMETERS


@dataclass
class _Findings:
    found: HostCopy | None
    """Whether there is anything; None until the processes of a worker agree on it."""
    heads: list[tuple[int, Tensor]]
    """Workers, with the channel and step that they sent."""
    expected: list[int]
    changes: list[_Change]
    written: tuple[str, str] | None = None
    """Message about parameters of this process that were written, see `EditGuard._changed`."""


class EditGuard:
    """Compares what was posted with what was sent; only reads the parameters.

    Args:
        exchange: sends what `outgoing` returns beside the parameters, or their messages.
        buckets: the parameters.
        parameters: their names, for messages.
        uncompressed: whether the parameters are sent as they are.
    """

    def __init__(self, exchange: Exchange, buckets: Buckets, parameters: MixedParameters, uncompressed: bool) -> None:
        self.exchange = exchange
        self.group = exchange.group
        self.rounds = exchange.rounds
        self.buckets = buckets
        self.parameters = parameters
        self.uncompressed = uncompressed
        self.watched = False
        """Whether a script may run between the posting of this exchange and its end."""
        self._step = 0
        self._sent: dict[int, Tensor] = {}
        """[local worker] the words that travel with its parameters."""
        self._received: dict[int, list[Tensor]] = {}
        """[local worker][k] the words of its k-th neighbor in another process; those of a whole averaging group."""
        self._posted: dict[int, Tensor] = {}
        """[local worker] the checksums of its parameters when they were posted, (blocks,); only of those that send."""
        self._read: dict[int, Tensor] = {}
        """[local worker] checksums of the copy for an all-reduce, or of parameters right after rounding read them."""
        self._versions: dict[int, list[int]] = {}
        """[local worker] the version of each of its parameters then."""
        self._met: dict[tuple[int, int], tuple[int, Tensor]] = {}
        """[local worker, partner] the step of their last difference, and its checksums."""
        self._unread: _Findings | None = None
        self._flag: Tensor | None = None
        """Whether the latest `check` found something, for the other processes of this worker."""

    # ---- before

    def seal(self, round_: int, step: int, watched: bool) -> None:
        """Sum the parameters as they are now; their exchange, for the mix of `step`, is about to be posted.

        Args:
            round_: decides who sends.
            step: the present one.
            watched: whether a script may run before the exchange ends.
        """
        self.watched, self._step = watched, step
        senders = [local for local in range(self.rounds.local_workers) if watched and self._sends(round_, local)]
        copied = [self.rounds.local(members)[0] for members in self.rounds.all_reduce_groups(round_)]
        summed = [local for local in senders if self._is_summed(round_, local) and local not in copied]
        self._posted = {local: self._checksums(self.buckets.values(local)) for local in summed}
        self._versions = {local: list(map(_VERSION, self.buckets.flats[local].parameters)) for local in senders}
        self._sent, self._received, self._read = {}, {}, {}
        for local in range(self.rounds.local_workers):
            if self.rounds.plan(round_, local).averaging_group is None and self._sends(round_, local):
                words = self._sent[local] = self._words(round_, local)
                self._received[local] = [torch.zeros_like(words) for _ in range(self.rounds.slots[local])]
        for members in self.rounds.all_reduce_groups(round_):
            # A sum of tables in which each process fills its own row gathers them.
            processes = self.rounds.processes(members)
            table = torch.zeros((len(processes), 2), dtype=torch.int64, device=self.group.device)
            first, *others = self.rounds.local(members)
            self._sent |= dict.fromkeys(others, table)
            self._sent[first], self._received[first] = table.clone(), [torch.zeros_like(table)]
            write_(self._sent[first][processes.index(self.group.rank)], self.exchange.channel, step)

    def outgoing(self, local: int) -> list[Tensor]:
        """Return what a local worker sends beside its parameters."""
        return [self._sent[local]] if local in self._sent else []

    def incoming(self) -> list[list[list[Tensor]]]:
        """Return the receive buffers of all local workers, with room for what is sent beside the parameters."""
        return [
            [[*slot, words] for slot, words in zip(slots, self._received[local], strict=False)]
            if local in self._received
            else slots
            for local, slots in enumerate(self.buckets.received)
        ]

    def copied(self, local: int) -> None:
        """Sum the copy that an all-reduce is about to send, in its receive buffer. Runs in the thread that posts."""
        if self.watched:
            self._read[local] = self._checksums(self.buckets.received[local][0])

    def confirm(self) -> None:
        """Sum the parameters that were just rounded for sending, or added to a copy. Runs in the thread that posts."""
        self._read |= {local: self._checksums(self.buckets.values(local)) for local in self._posted}

    def _words(self, round_: int, local: int) -> Tensor:
        head = torch.zeros(_HEAD, dtype=torch.int64, device=self.group.device)
        values = [self.exchange.channel, self._step, int(self.watched)]
        if not self.uncompressed:
            return write_(head, *values)
        partner = self.rounds.partner(round_, local)
        parts = [head]
        if self._is_summed(round_, local):
            parts.append(self._posted.get(local, head.new_zeros(self._count(OF_PARAMETERS))))
        if partner is not None:
            step, checksums = self._met.get((local, partner), (-1, head.new_zeros(self._count(OF_DIFFERENCES))))
            parts.append(checksums)
            values.append(step)
        write_(head, *values)
        return torch.cat(parts)

    # ---- after

    def check(self, round_: int, late: bool) -> None:
        """Raise RuntimeError if this worker's parameters, or those that a neighbor sent, are not what was posted.

        Also if a neighbor sent those of another step or optimizer. If workers are several processes, nothing is raised
        until these have summed what `flag` returns, and `agree` got it.

        Args:
            round_: decides who sent.
            late: leave it to a later `settle` to read and raise what was found, so that the host does not wait.
        """
        written = self._find_written()
        if written is not None and not self._together:
            self._raise(*written)
        heads, changes = [], []
        for local in sorted({*self._posted, *self._read}):
            checksums = self._checksums(self.buckets.values(local))
            sent = [then[local] for then in (self._posted, self._read) if local in then]
            changes += [_Change([self.rounds.workers[local]], self._step, checksums != then) for then in sent]
        for local, received in self._received.items():
            members = self.rounds.plan(round_, local).averaging_group
            if members:
                firsts = [process * self.rounds.local_workers for process in self.rounds.processes(members)]
                heads += list(zip(firsts, received[0], strict=True))
                continue
            senders = self.rounds.elsewhere(self.rounds.plan(round_, local).weights)
            for k, sender in enumerate(senders):
                heads.append((sender, received[k][:2]))
                if self.uncompressed:
                    changes += self._changes_by(sender, local, k, round_)
        self._posted, self._read, self._versions, self._received = {}, {}, {}, {}
        expected = [self.exchange.channel, self._step]
        if heads or changes or self._together:
            mine = write_(torch.zeros(2, dtype=torch.int64, device=self.group.device), *expected)
            flags = [change.changed for change in changes] + [theirs != mine for _, theirs in heads]
            own = torch.full((1,), written is not None, device=self.group.device)
            self._flag = torch.cat([own, *flags]).any()
            known = None if self._together else HostCopy(self._flag)
            self._unread = _Findings(known, heads, expected, changes, written)
        if not (late or self._together):
            self.settle()

    @property
    def _together(self) -> bool:
        return self.group.row.size > 1

    def flag(self) -> Tensor:
        """Return 1 if the latest `check` found something in this process of a worker, else 0, ()."""
        flag, self._flag = self._flag, None
        return torch.zeros((), device=self.group.device) if flag is None else flag

    def agree(self, found: Tensor) -> None:
        """Take over the sum of the flags of all processes of the worker, which `settle` reads."""
        if self._unread is not None:
            self._unread.found = HostCopy(found)

    def _changes_by(self, sender: int, local: int, k: int, round_: int) -> list[_Change]:
        """Compare what a sender sent with its words; of a partner, the last difference, too."""
        words, changes = self._received[local][k], []
        count = self._count(OF_PARAMETERS) if self._is_summed(round_, local) else 0
        if self.watched and count:
            arrived = self._checksums(self.buckets.received[local][k])
            changed = (arrived != words[_HEAD : _HEAD + count]) & (words[2] != 0)
            changes.append(_Change([sender], self._step, changed))
        if self.rounds.partner(round_, local) == sender and (local, sender) in self._met:
            step, checksums = self._met[local, sender]
            changed = (checksums != words[_HEAD + count :]) & (words[3] == step)
            pair = sorted([self.rounds.workers[local], sender])
            changes.append(_Change(pair, step, changed, OF_DIFFERENCES))
        return changes

    def remember(self, updates: Sequence[Update], round_: int) -> None:
        """Keep the checksums of the differences that were just formed, until the same workers meet again."""
        for update in updates:
            partner = self.rounds.partner(round_, update.local)
            if partner is not None and update.checksums is not None:
                self._met[update.local, partner] = self._step, update.checksums
            elif partner is not None:
                self._met.pop((update.local, partner), None)

    def settle(self) -> None:
        """Raise RuntimeError if the latest `check` found something, unless that was read already.

        All processes of a worker raise what one of them has found.
        """
        unread, self._unread = self._unread, None
        if unread is None or unread.found is None or not unread.found.is_set():
            return
        error = self.group.row.first(self._error(unread), f"comparing the edits of shards at step {self._step}")
        assert error is not None, "something was found"
        self._raise(*error)

    def _error(self, unread: _Findings) -> tuple[str, str] | None:
        """Return message and detail of the error that this process has found; None if another one has."""
        if unread.written is not None:
            return unread.written
        for worker, theirs in unread.heads:
            if theirs.tolist() != unread.expected:
                return self._not_in_step(worker, theirs.tolist(), unread.expected)
        change = next((change for change in unread.changes if bool(change.changed.any())), None)
        return None if change is None else self._changed(change.workers, self._suspects(change), change.step)

    def compare_meetings(self, what: str) -> None:
        """Raise RuntimeError on all workers if those of a pair formed different last differences. Collective.

        If workers are several processes, it is raised on all of them although only one shard differs.

        Args:
            what: names the occasion in errors.
        """
        steps = {(self.rounds.workers[local], partner): step for (local, partner), (step, _) in self._met.items()}
        copies = HostCopy(torch.stack([checksums for _, checksums in self._met.values()])).read() if steps else ()
        mine = dict(zip(steps, copies, strict=True))
        found = {pair: (steps[pair], sha256(words.numpy().tobytes()).digest()) for pair, words in mine.items()}
        everyone = self._gathered(found, what)
        error: tuple[str, str] | None = None
        for (i, j), (step, digest) in sorted(everyone.items()):
            other_step, other_digest = everyone.get((j, i), (None, None))
            if step == other_step and digest != other_digest:
                both = self._gathered({pair: words for pair, words in mine.items() if set(pair) == {i, j}}, what)
                change = _Change((i, j), step, both[i, j] != both[j, i], OF_DIFFERENCES)
                error = self._changed(change.workers, self._suspects(change), step)
                break
        error = self.group.row.first(error, what)
        if error is not None:
            self._raise(*error)

    def _gathered(self, values: dict[tuple[int, int], T], what: str) -> dict[tuple[int, int], T]:
        """Return the values of all workers' meetings."""
        return dict(itertools.chain.from_iterable(map(dict.items, self.group.all_gather_object(values, what))))

    def _suspects(self, change: _Change) -> list[Parameter]:
        blocks = change.changed.nonzero().flatten().tolist()
        return min((self._parameters_in(block, change) for block in blocks), key=len)  # small ones share a block

    def forget(self) -> None:
        """Drop what was posted and what was not read: the exchange is given up, or the run continues elsewhere."""
        self._posted, self._read, self._versions, self._received, self._unread = {}, {}, {}, {}, None
        self.forget_meetings()

    def forget_meetings(self) -> None:
        """Drop the checksums of differences: the parameters are laid out anew, on all workers."""
        self._met = {}

    # ---- errors

    def _find_written(self) -> tuple[str, str] | None:
        """Return the error about parameters of this process that were written in place since they were posted."""
        for local, versions in self._versions.items():
            flat = self.buckets.flats[local]
            if list(map(_VERSION, flat.parameters)) == versions:
                continue
            elsewhere = {id(parameter) for parameter, _ in flat.moved()}  # the bucket keeps what was posted
            pairs = zip(flat.parameters, versions, strict=True)
            written = [p for p, version in pairs if p._version != version and id(p) not in elsewhere]
            if written:
                return self._changed([self.rounds.workers[local]], written, self._step)
        return None

    def _changed(self, workers: Sequence[int], suspects: Sequence[Parameter], step: int) -> tuple[str, str]:
        """Return a message that names who changed parameters, and what to do about it."""
        names = list(dict.fromkeys(map(self.parameters.name_of, suspects)))
        more = f" or {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
        who = " or ".join(f"worker {worker}" for worker in workers)
        what = f"{' or '.join(names[:_MOST_NAMES])}{more}"
        return (
            f"{who}: {what} was changed while its exchange was in flight at step {step}",
            ", so neighbors may have received other values. Change weights inside `with deployed_model(...)` if it is "
            "for an evaluation, in a step post-hook of the optimizer if it belongs to the step, or set "
            "GossipConfig(overlap=False).",
        )

    def _not_in_step(self, worker: int, theirs: list[int], mine: list[int]) -> tuple[str, str]:
        them, me = (f"worker {w}" for w in (worker, self.rounds.workers[0]))
        if theirs[1] != mine[1]:
            return (
                f"{them} is at step {theirs[1]} and {me} at step {mine[1]}",
                ", but their parameters were exchanged. All workers must take every optimizer step, and continue from "
                "the same checkpoint.",
            )
        return (
            f"{them} and {me} exchanged the parameters of different optimizers at step {mine[1]}",
            ". Prepare and step several optimizers in the same order on all workers.",
        )

    def _raise(self, message: str, detail: str) -> None:
        self.buckets.drop()
        self.group.report(message)
        raise RuntimeError(f"{message}{detail}")

    # ---- blocks

    def _sends(self, round_: int, local: int) -> bool:
        plan = self.rounds.plan(round_, local)
        return bool(self.rounds.elsewhere([*plan.weights, *plan.recipients]))

    def _is_summed(self, round_: int, local: int) -> bool:
        """Return whether the parameters are summed, and not only their difference to a single neighbor."""
        paired = self.uncompressed and self.rounds.partner(round_, local) is not None
        return not paired or sum(x.nbytes for x in self.buckets.values(local)) <= _FEW_BYTES

    def _checksums(self, buckets: Sequence[Tensor]) -> Tensor:
        return block_checksums(buckets).to(self.group.device)

    def _count(self, blocks: ChecksumBlocks) -> int:
        return sum(blocks.count(x.nbytes) for x in self.buckets.values(0))

    def _parameters_in(self, block: int, change: _Change) -> list[Parameter]:
        """Return the parameters in a block, counted over all buckets: those of the worker, or of one like it here."""
        here = [worker for worker in change.workers if worker in self.rounds.workers]
        for bucket in self.buckets.flats[self.rounds.local(here)[0] if here else 0].buckets:
            size, nbytes = change.blocks.size(bucket.data.nbytes), bucket.data.nbytes
            if block < change.blocks.count(nbytes):
                first = min(block, nbytes // size) * size
                return parameters_between(bucket, first, first + size)
            block -= change.blocks.count(nbytes)
        raise AssertionError("there are as many checksums as blocks")


def parameters_between(bucket: Bucket, first: int, last: int) -> list[Parameter]:
    """Return the parameters with elements between two places of a bucket, in bytes."""
    begin = bucket.data.data_ptr()
    return [
        parameter
        for parameter, address, target in zip(bucket.parameters, bucket.addresses, bucket.targets, strict=True)
        if address < begin + last and address + target.untyped_storage().nbytes() > begin + first
    ]


def block_checksums(buckets: Sequence[Tensor]) -> Tensor:
    """Return checksums of each block of some buckets, as int64 words modulo 2^64: exact in any order.

    Args:
        buckets: (D,) each, padded to whole rows of 128 bytes.

    Returns:
        (blocks,); of each bucket the last one is the sum of what is less than a block.

    >>> len(block_checksums([torch.zeros(64), torch.zeros(2**20)]))
    132
    """
    checksums = []
    for bucket in buckets:
        words, size = bucket.view(torch.int64), _block_bytes(bucket.nbytes) // 8
        whole = len(words) // size * size
        checksums += [words[:whole].view(-1, size).sum(1), words[whole:].sum().view(1)]
    if not checksums:  # everything is frozen
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat(checksums)
