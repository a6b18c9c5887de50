"""Who is left when workers are lost, and where they stand: one answer for all survivors, agreed on in the store.

No connection between the workers can be trusted any more, so they meet in the rendezvous store. Each survivor says that
it is there and how far it is. Whoever first finds that nobody else is to be waited for proposes the answer; the store
keeps the first proposal alone, and a worker that is not in it has been given up by the others and must end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 4.0
"""How long a worker that kept another waiting in vain has to say that it is there after all."""


class WorkersChangedError(RuntimeError):
    """A worker was lost in the middle of something that all do together, and the others go on without it.

    They all get this error there. Everything is in order again: do the same once more, with the workers that are left.
    """


@dataclass(frozen=True)
class Standing:
    """How far one worker is."""

    steps: Mapping[int, int]
    """Mixes done, by the channel of the mixer."""
    collectives: int = 0
    """Collectives completed."""
    sections: int = 0
    """Sections completed: evaluations, saves."""


@dataclass(frozen=True)
class Agreement:
    """Who goes on, and how far the furthest of them is in each respect."""

    members: tuple[int, ...]
    """Numbers of the survivors, in order."""
    furthest: Standing


def agree(
    store: Any,
    prefix: str,
    number: int,
    members: Sequence[int],
    standing: Standing,
    lives: Callable[[int], bool | None],
    timeout: float,
    accused: Collection[int] = (),
) -> Agreement | None:
    """Agree with the other survivors on who is left.

    Args:
        store: the rendezvous store.
        prefix: of the keys; another one for each agreement.
        number: of this worker.
        members: numbers of all workers until now, in order.
        standing: of this worker.
        lives: whether the process of a worker is there; None where that cannot be seen from here.
        timeout: seconds within which each survivor comes here: it may have been busy, and notices late.
        accused: workers that this one waited for in vain; they are given up after a few seconds already.

    Returns:
        The same on all survivors; None on a worker that the others have given up.
    """
    for worker in accused:
        store.set(f"{prefix}/accused/{worker}", "")
    store.set(f"{prefix}/present/{number}", json.dumps(asdict(standing)))
    decision = f"{prefix}/decision"
    started = time.monotonic()
    accused_since: dict[int, float] = {}

    def waited_for(worker: int) -> bool:
        now = time.monotonic()
        if lives(worker) is False or now > started + timeout:
            return False
        if store.check([f"{prefix}/accused/{worker}"]):
            return now < accused_since.setdefault(worker, now) + _GRACE_SECONDS
        return True

    while not store.check([decision]):
        missing = [worker for worker in members if not store.check([f"{prefix}/present/{worker}"])]
        if not any(waited_for(worker) for worker in missing):
            present = [worker for worker in members if worker not in missing]
            standings = [_read(store.get(f"{prefix}/present/{worker}")) for worker in present]
            store.compare_set(decision, "", json.dumps({"members": present, "furthest": asdict(_furthest(standings))}))
            break
        time.sleep(_POLL_SECONDS)
    decided = json.loads(store.get(decision))
    agreed = Agreement(tuple(decided["members"]), _read(json.dumps(decided["furthest"])))
    return agreed if number in agreed.members else None


def _furthest(standings: Sequence[Standing]) -> Standing:
    channels = {channel for standing in standings for channel in standing.steps}
    return Standing(
        {channel: max(standing.steps.get(channel, 0) for standing in standings) for channel in sorted(channels)},
        max(standing.collectives for standing in standings),
        max(standing.sections for standing in standings),
    )


def _read(text: str | bytes) -> Standing:
    values = json.loads(text)
    values["steps"] = {int(channel): step for channel, step in values["steps"].items()}
    return Standing(**values)
