"""A header travels beside the copies: optimizer, step, learning rate and list of parameters, equal on both ends.

gloo's tags tell messages apart, but NCCL ignores tags, and an all-reduce has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.host_copy import to_device

CHANGE_ON_ALL = "Freeze, unfreeze, add and replace parameters in the same way on all of them."


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
        self._mine = torch.zeros(0, device="cpu")
        """The header that was written last, (4,), in float64 on the device."""
        self._sent: dict[int, Tensor] = {}
        """[local worker] what it sends: the header, or a table with it that is summed over an averaging group."""
        self._received: dict[int, list[Tensor]] = {}
        """[local worker][k] what its k-th neighbor in another process sends; the table of an averaging group."""
        self._others: list[tuple[int, Tensor]] = []
        """Each other worker that sends a header, and where that arrives; an averaging group has one per process."""
        self._compared = self._mine, self._others
        """Those of the last `compare`."""

    def write(self, round_: int, step: int, lr: float, listed: int) -> None:
        """Write the header of a round's exchange.

        Args:
            round_: decides who sends.
            step: the optimizer step that mixes.
            lr: learning rate of the latest step.
            listed: a number for the list of what is mixed. Two that round to the same float64 are taken for equal.
        """
        rounds = self.rounds
        self._mine = to_device((self.exchange.channel, step, listed, lr), self.group.device)
        self._sent, self._received, self._others = {}, {}, []
        for local in range(rounds.local_workers):
            plan = rounds.plan(round_, local)
            senders = rounds.elsewhere(plan.weights)
            if plan.averaging_group is None and (senders or rounds.elsewhere(plan.recipients)):
                self._sent[local] = self._mine
                self._received[local] = [torch.zeros_like(self._mine) for _ in senders]
                self._others += zip(senders, self._received[local], strict=True)
        for members in rounds.all_reduce_groups(round_):
            # A sum of tables in which each process fills its own row gathers them.
            processes = rounds.processes(members)
            table, sum_ = self._mine.new_zeros(2, len(processes), len(self._mine))
            first, *others = rounds.local(members)
            self._sent |= dict.fromkeys(others, torch.zeros_like(table))
            self._sent[first], self._received[first] = table, [sum_]
            table[processes.index(self.group.rank)].copy_(self._mine)
            self._others += zip((process * rounds.local_workers for process in processes), sum_, strict=True)

    def outgoing(self, local: int) -> list[Tensor]:
        """Return what a local worker sends beside its copy."""
        return [self._sent[local]] if local in self._sent else []

    def incoming(self, received: Sequence[Sequence[Sequence[Tensor]]]) -> list[list[list[Tensor]]]:
        """Return receive buffers, [local worker][k], with room for what is sent beside the copies."""
        return [
            [[*buffers, *self._received.get(local, [])[k : k + 1]] for k, buffers in enumerate(slots)]
            for local, slots in enumerate(received)
        ]

    def compare(self) -> Tensor | None:
        """Return whether another worker's header differs from this one's, shape (), on the device; None without any.

        The host does not wait.
        """
        self._compared = mine, others = self._mine, self._others
        return (torch.stack([header for _, header in others]) != mine).any() if others else None

    def error(self) -> Exception | None:
        """Return an error that says what differs in the headers of the last `compare`; None if nothing does."""
        mine, others = self._compared
        for worker, header in others:
            if not torch.equal(header, mine):
                return self._error(worker, header.tolist(), mine.tolist())
        return None

    def _error(self, worker: int, theirs: Sequence[float], mine: Sequence[float]) -> Exception:
        me = self.rounds.workers[0]
        (their_channel, their_step, their_list, their_lr), (channel, step, listed, lr) = theirs, mine
        if their_channel != channel:
            return RuntimeError(
                f"worker {worker} and worker {me} exchanged the parameters of different optimizers at step {step:.0f}. "
                f"Prepare and step several optimizers in the same order on all workers."
            )
        if their_step != step:
            return RuntimeError(
                f"worker {worker} is at step {their_step:.0f} and worker {me} at step {step:.0f}, but their parameters "
                f"were exchanged. All workers must take every optimizer step, and continue from the same checkpoint."
            )
        if their_list != listed:
            story = self._story()
            if story:
                changed = f"worker {me} {story}, before step {step:.0f} and not as worker {worker}"
            else:
                changed = f"worker {worker} changed what it trains, before step {step:.0f} and not as worker {me}"
            return RuntimeError(f"{changed}. {CHANGE_ON_ALL}")
        return ValueError(
            f"all workers must have the same learning rate; at step {step:.0f} worker {worker} has {their_lr!r} and "
            f"worker {me} has {lr!r}, summed over parameter groups. Step schedulers alike on all workers; one that "
            f"follows a metric needs the same metric everywhere, such as one measured in `deployed_model` or "
            f"`accelerator.reduce(loss, 'mean')`."
        )
