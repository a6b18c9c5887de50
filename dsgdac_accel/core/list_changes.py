"""Another list of what is mixed: taken over by all workers together, or an error by name on all of them."""

from __future__ import annotations

from collections.abc import Iterable

from dsgdac_accel.core.agreement import Agreement
from dsgdac_accel.core.headers import CHANGE_ON_ALL
from dsgdac_accel.core.slots import Slots
from dsgdac_accel.distributed.group import WorkerGroup

_CODES = 2**16  # so that float64 holds the sum of the squares of some exactly


class ListChanges:
    """Decides when a worker takes over another list of parameters.

    A layout is collective. A process of a sharded worker that began one alone would let all others wait until the
    timeout. So these processes tell each other what they noticed, in the agreement of every step.

    Args:
        slots: what is mixed; only read.
        group: the workers.
        agreement: of the processes of this worker.
    """

    def __init__(self, slots: Slots, group: WorkerGroup, agreement: Agreement) -> None:
        self.slots = slots
        self.group = group
        self.agreement = agreement
        self.code = self.agreed_code = 0
        """Numbers for the list that is laid out, which neighbors compare, and for the one that they agreed on last."""
        self._layouts = 0
        self._known_to_all = False
        """Whether all processes of a sharded worker know of the change."""

    @property
    def pending(self) -> bool:
        """Whether this worker is to take over another list, by the last `look`; the same in all of its processes."""
        return self._differs if self.agreement.alone else self._known_to_all

    @property
    def _differs(self) -> bool:
        return self.slots.changed or self.slots.has_newcomers()

    def taken_over(self) -> None:
        """Note that the present list was laid out."""
        self.code = self.agreed_code = self.next_code()
        self._layouts += 1
        self._known_to_all = False
        self.slots.note()

    def next_code(self) -> int:
        """Return the number of the present list once it is laid out; another one than now, also for an equal list."""
        return self.slots.code(self._layouts + 1)

    # ---- the processes of one worker

    def vote(self) -> None:
        """Tell the other processes of this worker, if there are any, whether something changed, and what is trained.

        All tell one number. The sum of their squares shows whether all are equal.
        """
        if not self.agreement.alone:  # to list what is trained takes as long as to look for changes
            code = hash(self.slots.trained()) % (_CODES // 2) * 2 + self._differs
            self.agreement.vote("list", (code, code * code), self._read)

    def _read(self, sums: list[float], step: int) -> None:
        """Raise RuntimeError in all processes of this worker if they changed their parameters in different ways."""
        row = self.group.row
        total, squares = map(round, sums)
        if total * total != squares * row.size:  # they have a variance
            what = f"comparing the changed parameters of a worker at step {step}"
            self._raise(row.group.all_gather_object(self._told(), what), step)
        self._known_to_all = bool(total // row.size % 2)
        if not self._known_to_all:
            self.slots.note()

    # ---- all workers

    def compare(self, what: str, step: int) -> None:
        """Agree on the list, and on the step, before an average. Collective over all processes.

        Args:
            what: names the occasion in errors.
            step: the present one.

        Raises:
            ValueError: on all processes, if the workers have taken unequally many steps.
            RuntimeError: on all processes, if only some have changed their parameters.
        """
        everyone, row = self.group.everyone, self.group.row
        self.slots.look()
        differs = self._known_to_all = self._differs
        in_column = row.rank, differs, self.slots.code() if differs else 0
        in_row = self.group.rank, differs, self.slots.trained()
        told = everyone.all_gather_object((step, in_column, in_row, self._told()), what)
        steps, columns, rows, stories = zip(*told, strict=True)
        if len(set(steps)) > 1:
            everyone.require_equal(step, "number of optimizer steps")
        if len(set(columns)) > row.size or len(set(rows)) > self.group.size:
            self._raise(stories, step)
        if not differs:
            self.slots.note()

    def _told(self) -> str | None:
        story = self.slots.story()
        return f"{self.group.everyone.members.me} {story}" if story else None

    def _raise(self, stories: Iterable[str | None], step: int) -> None:
        told = "; ".join(story for story in stories if story) or "processes train different parameters"
        message = f"{told}, before step {step} and not on all processes alike"
        self.group.report(message)
        raise RuntimeError(f"{message}. {CHANGE_ON_ALL}")
