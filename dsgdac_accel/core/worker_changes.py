"""Parameters that are added, removed, replaced, frozen or unfrozen: by all processes of a worker, or by none."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.host_copy import HostCopy, write_
from dsgdac_accel.core.parameter_guard import MixedParameters
from dsgdac_accel.distributed.group import WorkerGroup

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_MOST_NAMES = 8
_CODES = 2**16  # so that float64 holds the sum of the squares of some exactly


class WorkerChanges:
    """Decides when a worker lays out its parameters anew.

    A layout is collective. A process of a sharded worker that began one alone would let all others wait until the
    timeout. So these processes tell each other what they noticed, in the collective of every step (`ArrivalGuard`), and
    act on what came back.

    Args:
        parameters: those that are mixed; only read.
        group: the workers.
    """

    def __init__(self, parameters: MixedParameters, group: WorkerGroup) -> None:
        self.parameters = parameters
        self.group = group
        self.due = False
        """Whether a sharded worker lays out its parameters in this step; the same in all of its processes."""
        self._converted = False
        self._trained: list[Parameter] = []
        """What was trained when the processes agreed last."""
        self._agreed: list[Parameter] = []
        """The parameters of this process when it last told the others what it noticed."""
        self._unread: tuple[HostCopy, list[Parameter], int] | None = None

    @property
    def _together(self) -> bool:
        return self.group.row.size > 1

    def follows(self, converted: bool) -> bool:
        """Return whether the parameters are to be laid out now.

        Args:
            converted: whether some parameter has another dtype, shape or device than it was laid out with.
        """
        if not self._together:
            return self.parameters.changed() or converted
        self._converted |= converted
        return self.due

    def may_join(self) -> bool:
        """Return whether parameters that joined may start from equal values now, which is collective."""
        return not self._together or (self.due and self.parameters.find() is self._agreed)

    def laid_out(self) -> None:
        """Note that the parameters were laid out, as they are now."""
        self.due, self._converted, self._unread = False, False, None
        self._trained = self._trained_now()

    # ---- at every step of a sharded worker

    def words(self) -> Tensor:
        """Return what this process tells the others of its worker: the sums over them are for `agree`, (3,), float64.

        Whether something changed, and a number for what is trained and its square, which show whether all are equal.
        """
        changed = self._has_changed()
        code = hash((changed, *map(_REQUIRES_GRAD, self.parameters.find()))) % _CODES
        return write_(torch.zeros(3, dtype=torch.float64, device=self.group.device), changed, code, code * code)

    def agree(self, sums: Tensor, step: int) -> None:
        """Keep the sums of `words` over the worker for `settle`."""
        self._agreed = self.parameters.find()
        self._unread = HostCopy(sums), self._trained_now(), step

    def settle(self) -> None:
        """Read what the worker agreed on last, if it is not read yet.

        Raises:
            RuntimeError: in all processes of the worker, if they changed their parameters in different ways.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        sums, trained, step = unread
        changed, codes, squares = map(round, sums.read().tolist())
        if codes * codes != squares * self.group.row.size:  # they have a variance
            what = f"comparing the changed parameters of a worker at step {step}"
            self._raise(self.group.row.group.all_gather_object(self._story(), what), step)
        self.due, self._trained = bool(changed), trained

    # ---- outside of steps

    def compare(self, converted: bool, what: str, step: int) -> None:
        """Agree on a layout before an average. Collective over all processes.

        Args:
            converted: as for `follows`.
            what: names the occasion in errors.
            step: the present one, for messages.

        Raises:
            RuntimeError: on all processes, if only some have changed their parameters.
        """
        self._converted |= converted
        mine = (self._has_changed(), tuple(map(_REQUIRES_GRAD, self.parameters.find())) if self._together else ())
        told = (self.group.rank, *mine)
        everyone = self.group.everyone.all_gather_object((told, self._story()), what)
        self._unread = None
        rows = {worker: (changed, trained) for (worker, changed, trained), _ in everyone}
        alone = any(rows[worker] != (changed, trained) for (worker, changed, trained), _ in everyone)
        if alone or len({changed for changed, _ in rows.values()}) > 1:
            self._raise([story for _, story in everyone], step)
        self.due, self._converted = mine[0] and self._together, self._converted and self._together
        self._trained = self._trained_now()

    # ---- what has changed here

    def _has_changed(self) -> bool:
        return self._converted or self.parameters.changed() or self.parameters.has_newcomers()

    def _trained_now(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters.find() if parameter.requires_grad] if self._together else []

    def _story(self) -> str | None:
        """Return who this process is, and what it did since the processes agreed last; None if it did nothing."""
        new, gone = self.parameters.difference()
        deeds = {
            "added, unfroze or put in place of others": new,
            "froze": [p for p in self._trained if not p.requires_grad and all(p is not other for other in gone)],
            "removed or replaced": gone,
        }
        told = [f"{deed} {self._named(found)}" for deed, found in deeds.items() if found]
        if not told and self._converted:
            told = ["gave parameters another dtype, shape or device"]
        return f"{self.group.everyone.members.me} {' and '.join(told)}" if told else None

    def _named(self, parameters: Iterable[Parameter]) -> str:
        names = list(dict.fromkeys(map(self.parameters.name_of, parameters)))
        return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")

    def _raise(self, stories: Iterable[str | None], step: int) -> None:
        told = "; ".join(story for story in stories if story) or "processes train different parameters"
        message = f"{told}, before step {step} and not on all processes alike"
        self.group.report(message)
        raise RuntimeError(f"{message}. Freeze, unfreeze, add and replace parameters in the same way on all of them.")
