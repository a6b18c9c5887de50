"""Who is left when workers are lost, and where they stand: one answer for all survivors, agreed on in the store.

No connection between the workers can be trusted any more, so they meet in the rendezvous store. Each survivor says that
it is there and how far it is. Whoever first finds that nobody else is to be waited for proposes the answer; the store
keeps the first proposal alone, and a worker that is not in it has been given up by the others and must end.

Then they connect to each other. For one that dies meanwhile torch and gloo wait until their timeouts, several of them
one after the other; so every wait in the store is watched here. And each shows signs of life until all are connected:
one that is only slow is waited for, however long it takes, and one that hangs is not.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 10.0
"""Without a sign of life from a worker, after which it counts as hanging; far longer than a busy machine needs."""
_GRACE_SECONDS = 4.0
"""How long a worker that kept another waiting in vain has to say that it is there after all."""


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
    shows_life: Callable[[int], bool] = lambda number: False,
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
        shows_life: whether a worker is known to be on its way here; it is waited for, however long it takes.

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
        if lives(worker) is False:
            return False
        if shows_life(worker):
            return True
        if now > started + timeout:
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


class SignsOfLife:
    """Inside, this worker shows the others that it is meeting them, and it sees which of them do.

    A thread changes a value in the store again and again. It runs on while the worker waits in the transport, and
    stands still with its process, so that slow workers can be told from those that hang, on other machines, too.

    Args:
        store: the rendezvous store.
        number: of this worker.
    """

    def __init__(self, store: Any, number: int) -> None:
        self._store = store
        self._number = number
        self._ended = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}

    def __enter__(self) -> SignsOfLife:
        threading.Thread(target=self._show, name="dsgdac-life", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _show(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # without a store nobody meets, which is said elsewhere
            while not self._ended.is_set():
                self._store.set(_sign_of(self._number), str(time.monotonic_ns()))
                self._ended.wait(_BEAT_SECONDS)

    def shown_by(self, worker: int) -> bool:
        """Whether this worker has lately shown a sign of life; what was there at the first look may be an old one."""
        key, now = _sign_of(worker), time.monotonic()
        value = self._store.get(key) if self._store.check([key]) else b""
        before, changed = self._seen.setdefault(worker, (value, -float("inf")))
        if value != before:
            changed = now
            self._seen[worker] = (value, now)
        return now < changed + _SILENCE_SECONDS

    def missed_since(self, began: float, worker: int) -> bool:
        """Whether this worker has shown none for too long, of which none is counted before the time `began`."""
        return not self.shown_by(worker) and time.monotonic() > began + _SILENCE_SECONDS


class WatchedStore(dist.Store):
    """A store in which a wait ends by an error as soon as it is in vain.

    Args:
        store: the rendezvous store.
        prefix: of the keys.
        in_vain: why those that are waited for cannot all come any more; empty while they can.
        patience: seconds after which a wait ends in any case, in place of the timeouts it is called with.
    """

    def __init__(self, store: Any, prefix: str, in_vain: Callable[[], str], patience: float) -> None:
        super().__init__()
        self._store = dist.PrefixStore(prefix, store)
        self._in_vain = in_vain
        self._patience = patience

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until these are there. Raises DistStoreError if they do not come."""
        deadline, next_look = time.monotonic() + self._patience, 0.0
        while not self._store.check(keys):
            now = time.monotonic()
            if now > next_look:
                next_look = now + _POLL_SECONDS
                reason = self._in_vain() or ("timed out" if now > deadline else "")
                if reason:
                    raise dist.DistStoreError(f"connection failed: {reason}")
            time.sleep(_POLL_SECONDS / 4)

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        """As of any store; so are those below."""
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Count up."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        """Set unless somebody else has."""
        return self._store.compare_set(key, expected, wanted)

    def check(self, keys: list[str]) -> bool:
        """Whether these are there."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        """No: several keys are read one by one."""
        return False


def _sign_of(number: int) -> str:
    return f"dsgdac_accel/life/{number}"


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
