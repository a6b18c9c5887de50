"""A header travels beside the copies: optimizer, step, learning rate and list of parameters, equal on both ends.

gloo's tags tell messages apart, but NCCL ignores tags, and an all-reduce has none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.host_copy import write_

CHANGE_ON_ALL = "Freeze, unfreeze, add and replace parameters in the same way on all of them."
_WORDS = 4
_CHANNEL, _STEP, _LIST, _LR = range(_WORDS)


class Headers:
    """Writes the header of an exchange, and compares it with those of the neighbors.

    Args:
        exchange: the exchange, of which it is a part.
        story: returns what this process has changed in the list of what is mixed; empty if nothing.
    """

    def __init__(self, exchange: Exchange, story: Callable[[], str]) -> None:
        self.exchange = exchange
        self.group = exchange.group
        self.rounds = exchange.rounds
        self._story = story
        self._mine: list[int] = []
        self._words = torch.zeros(0, dtype=torch.int64, device="cpu")
        """The same on the device, (4,)."""
        self._sent: dict[int, Tensor] = {}
        """[local worker] the words that it sends."""
        self._received: dict[int, list[Tensor]] = {}
        """[local worker][k] the words of its k-th neighbor in another process; those of a whole averaging group."""
        self._compared: tuple[list[int], list[tuple[int, Tensor]]] = [], []
        """The words of this worker in the last `compare`, and those that other workers sent."""

    def write(self, round_: int, step: int, lr: float, listed: int) -> None:
        """Write the header of a round's exchange.

        Args:
            round_: decides who sends.
            step: the optimizer step that mixes.
            lr: learning rate of the latest step.
            listed: a number for the list of what is mixed.
        """
        rounds, device = self.rounds, self.group.device
        self._mine = [self.exchange.channel, step, listed, _bits(lr)]
        self._words = self._on_device(self._mine)
        self._sent, self._received = {}, {}
        for local in range(rounds.local_workers):
            plan = rounds.plan(round_, local)
            if plan.averaging_group is None and rounds.elsewhere([*plan.weights, *plan.recipients]):
                self._sent[local] = self._words
                self._received[local] = [torch.zeros_like(self._words) for _ in range(rounds.slots[local])]
        for members in rounds.all_reduce_groups(round_):
            # A sum of tables in which each process fills its own row gathers them.
            processes = rounds.processes(members)
            table = torch.zeros((len(processes), _WORDS), dtype=torch.int64, device=device)
            first, *others = rounds.local(members)
            self._sent |= dict.fromkeys(others, table)
            self._sent[first], self._received[first] = table.clone(), [torch.zeros_like(table)]
            self._sent[first][processes.index(self.group.rank)].copy_(self._words)

    def _on_device(self, words: list[int]) -> Tensor:
        device = self.group.device
        if device.type == "cpu":
            return torch.tensor(words, dtype=torch.int64, device=device)
        return write_(torch.zeros(_WORDS, dtype=torch.int64, device=device), *words)  # a list would wait for the device

    def outgoing(self, local: int) -> list[Tensor]:
        """Return what a local worker sends beside its copy."""
        return [self._sent[local]] if local in self._sent else []

    def incoming(self, received: Sequence[Sequence[Sequence[Tensor]]]) -> list[list[list[Tensor]]]:
        """Return receive buffers, [local worker][k], with room for what is sent beside the copies."""
        return [
            [
                [*buffers, words] if words is not None else list(buffers)
                for buffers, words in zip(slots, self._received.get(local, [None] * len(slots)), strict=False)
            ]
            for local, slots in enumerate(received)
        ]

    def compare(self, round_: int) -> Tensor | None:
        """Return whether a neighbor's header is another than this worker's, shape (), on the device.

        None where nothing was received. The host does not wait.
        """
        heads: list[tuple[int, Tensor]] = []
        for local, received in self._received.items():
            plan = self.rounds.plan(round_, local)
            if plan.averaging_group:
                firsts = [
                    process * self.rounds.local_workers for process in self.rounds.processes(plan.averaging_group)
                ]
                heads += zip(firsts, received[0], strict=True)
            else:
                heads += zip(self.rounds.elsewhere(plan.weights), received, strict=False)
        self._compared, self._received = (self._mine, heads), {}
        if not heads:
            return None
        return (torch.stack([words for _, words in heads]) != self._words).any()

    def error(self) -> Exception | None:
        """Return an error that says what differs in the headers of the last `compare`; None if nothing does."""
        mine, heads = self._compared
        for worker, words in heads:
            theirs = words.tolist()
            if theirs != mine:
                return self._error(worker, theirs, mine)
        return None

    def _error(self, worker: int, theirs: list[int], mine: list[int]) -> Exception:
        me = self.rounds.workers[0]
        if theirs[_CHANNEL] != mine[_CHANNEL]:
            return RuntimeError(
                f"worker {worker} and worker {me} exchanged the parameters of different optimizers at step "
                f"{mine[_STEP]}. Prepare and step several optimizers in the same order on all workers."
            )
        if theirs[_STEP] != mine[_STEP]:
            return RuntimeError(
                f"worker {worker} is at step {theirs[_STEP]} and worker {me} at step {mine[_STEP]}, but their "
                f"parameters were exchanged. All workers must take every optimizer step, and continue from the same "
                f"checkpoint."
            )
        if theirs[_LIST] != mine[_LIST]:
            story = self._story()
            if story:
                changed = f"worker {me} {story}, before step {mine[_STEP]} and not as worker {worker}"
            else:
                changed = f"worker {worker} changed what it trains, before step {mine[_STEP]} and not as worker {me}"
            return RuntimeError(f"{changed}. {CHANGE_ON_ALL}")
        return ValueError(
            f"all workers must have the same learning rate; at step {mine[_STEP]} worker {worker} has "
            f"{_number(theirs[_LR])!r} and worker {me} has {_number(mine[_LR])!r}. Step schedulers alike on all "
            f"workers; one that follows a metric needs the same metric everywhere, such as one measured in "
            f"`deployed_model` or `accelerator.reduce(loss, 'mean')`."
        )


def _bits(number: float) -> int:
    """Return the bits of a number, as an integer.

    >>> _number(_bits(0.1))
    0.1
    """
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
