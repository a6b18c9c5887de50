"""The survivors of a loss and their progress, on which all of them agree in the store.

No connection between the workers can be trusted after a loss, so the survivors use the rendezvous store. Each writes
its progress, which also says that it is present. The first that finds nobody else worth waiting for proposes the
survivors. The store keeps only the first proposal, and a worker that is not in it has been given up by the others and
must end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dsgdac_accel.distributed.failure_reports import FailureReports

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 4.0
"""Seconds in which an accused worker can show that it is present after all."""


@dataclass(frozen=True)
class Progress:
    """The progress of one worker."""

    steps: Mapping[int, int]
    """Mixes done by each registered mixer, by order of registration."""
    collectives: int = 0
    """Collectives completed."""
    sections: int = 0
    """Sections completed: evaluations, saves."""


@dataclass(frozen=True)
class Agreement:
    """The workers that continue, and the furthest progress of any of them in each respect."""

    members: tuple[int, ...]
    """Original ranks of the survivors, in order."""
    furthest: Progress


def agree(
    reports: FailureReports,
    prefix: str,
    members: Sequence[int],
    progress: Progress,
    timeout: float,
    accused: Collection[int] = (),
    beats: Callable[[int], bool] = lambda worker: False,
) -> Agreement | None:
    """Agree with the other survivors on who survives.

    Args:
        reports: of this worker; has the store, and knows which workers are alive.
        prefix: of the keys; a new one for each agreement.
        members: original ranks of all workers until now, in order.
        progress: of this worker.
        timeout: seconds within which each survivor comes here; it may have been busy, and notice the loss late.
        accused: workers that this one waited for in vain. They are given up after a few seconds.
        beats: whether a worker's heartbeat is seen. Such a worker is waited for, however long it takes.

    Returns:
        The same on all survivors; None on a worker that the others have given up.
    """
    store, me = reports.store, reports.me
    for worker in accused:
        store.set(f"{prefix}/accused/{worker}", "")
    mine = [list(progress.steps.items()), progress.collectives, progress.sections]
    store.set(f"{prefix}/present/{me}", json.dumps(mine))
    started = time.monotonic()
    accused_since: dict[int, float] = {}

    def may_come(worker: int) -> bool:
        now = time.monotonic()
        if reports.is_alive(worker) is False:
            return False
        if beats(worker):
            return True
        if now > started + timeout:
            return False
        if store.check([f"{prefix}/accused/{worker}"]):
            return now < accused_since.setdefault(worker, now) + _GRACE_SECONDS
        return True

    while not store.check([f"{prefix}/decision"]):
        missing = [worker for worker in members if not store.check([f"{prefix}/present/{worker}"])]
        if not any(may_come(worker) for worker in missing):
            present = [worker for worker in members if worker not in missing]
            store.compare_set(f"{prefix}/decision", "", json.dumps(present))
            break
        time.sleep(_POLL_SECONDS)
    survivors = tuple(json.loads(store.get(f"{prefix}/decision")))
    if me not in survivors:
        return None
    steps: dict[int, int] = {}
    collectives = sections = 0
    for worker in survivors:
        of_mixers, of_collectives, of_sections = json.loads(store.get(f"{prefix}/present/{worker}"))
        steps |= {mixer: max(step, steps.get(mixer, 0)) for mixer, step in of_mixers}
        collectives, sections = max(collectives, of_collectives), max(sections, of_sections)
    return Agreement(survivors, Progress(steps, collectives, sections))
