"""Another list of what is mixed: taken over by all workers together, or an error by name on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        self._due = False
        """Whether all processes of a sharded worker know of the change."""

    @property
    def due(self) -> bool:
        """Whether this worker is to take over another list, by the last `look`; the same in all of its processes."""
        return self._due if self.agreement.together else self._differs

    @property
    def _differs(self) -> bool:
        return self.slots.changed or self.slots.has_newcomers()

    def taken_over(self) -> None:
        """Note that the present list was laid out."""
        self.code = self.agreed_code = self.next_code()
        self._layouts += 1
        self._due = False
        self.slots.note()

    def next_code(self) -> int:
        """Return the number of the present list once it is laid out; another one than now, also for an equal list."""
        return self.slots.code(self._layouts + 1)

    # ---- the processes of one worker

    def vote(self) -> None:
        """Tell the other processes of this worker whether something changed, and a number for what is trained.

        The sum of the squares of these numbers shows whether all are equal.
        """
        if self.agreement.together:
            seen = self._differs
            code = hash((seen, *self.slots.trained())) % _CODES
            for name, value in (("changed", seen), ("code", code), ("code squared", code * code)):
                self.agreement.vote(name, float(value))

    def read(self, sums: Mapping[str, float], step: int) -> None:
        """Take what the processes of this worker have voted.

        Raises:
            RuntimeError: in all of them, if they changed their parameters in different ways.
        """
        if "code" not in sums:
            return
        changed, code, squares = (round(sums[name]) for name in ("changed", "code", "code squared"))
        if code * code != squares * self.agreement.row.size:  # they have a variance
            what = f"comparing the changed parameters of a worker at step {step}"
            self._raise(self.agreement.row.group.all_gather_object(self._told(), what), step)
        self._due = bool(changed)
        if not changed:
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
        everyone = self.group.everyone
        self.slots.look()
        trained = self.slots.trained() if self.agreement.together else ()
        mine = (self._differs, self.agreement.row.rank, self.slots.code() if self._differs else 0)
        told = everyone.all_gather_object((step, self.group.rank, trained, mine, self._told()), what)
        if len({their_step for their_step, *_ in told}) > 1:
            everyone.require_equal(step, "number of optimizer steps")
        changed = {seen for _, _, _, (seen, _, _), _ in told}
        codes = {(column, code) for _, _, _, (_, column, code), _ in told}
        rows = {(worker, trained) for _, worker, trained, *_ in told}
        alike = len(changed) == 1 and len(codes) == self.agreement.row.size and len(rows) == self.group.size
        if not alike:
            self._raise([story for *_, story in told], step)
        self._due = self._differs and self.agreement.together
        if not self._due:
            self.slots.note()

    def _told(self) -> str | None:
        story = self.slots.story()
        return f"{self.group.everyone.members.me} {story}" if story else None

    def _raise(self, stories: Iterable[str | None], step: int) -> None:
        told = "; ".join(story for story in stories if story) or "processes train different parameters"
        message = f"{told}, before step {step} and not on all processes alike"
        self.group.report(message)
        raise RuntimeError(f"{message}. {CHANGE_ON_ALL}")
