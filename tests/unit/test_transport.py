"""The two transports without workers: NCCL groups that fit together, posts that block, late figures."""

from __future__ import annotations

import time
from collections import Counter, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dsgdac_accel.core.exchange import Exchange
from dsgdac_accel.core.rounds import Rounds
from dsgdac_accel.distributed import watchdog as watchdog_module
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.poster import Poster, result_within
from dsgdac_accel.distributed.transport import DeviceStopwatch, Nccl
from dsgdac_accel.distributed.watchdog import HostFlags, Watchdog, wait_until
from dsgdac_accel.topology import Topology, build_topology
from tests.workers import fork

# ---- NCCL groups

Operation = namedtuple("Operation", "call tensor group tag group_peer")


class Connected(Nccl):
    host_waits = True

    def within(self, seconds, connect):
        return connect()


def groups_of(topology: Topology, local_workers: int, monkeypatch) -> list[list[list[tuple[str, int, int]]]]:
    """[rank][NCCL group] -> its operations: what, with whom, and the size of the message."""
    size = topology.num_workers // local_workers
    posted: list[list[list[tuple[str, int, int]]]] = [[] for _ in range(size)]
    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    for rank in range(size):

        def batch(operations, rank=rank):
            posted[rank].append([(op.call.__name__, op.group_peer, len(op.tensor)) for op in operations])
            return []

        monkeypatch.setattr(dist, "batch_isend_irecv", batch)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        members = Members(rank, size)
        groups = SimpleNamespace(transport=Connected(torch.device("cpu")), exchange=None)
        group = SimpleNamespace(
            rank=rank, members=members, process_groups=groups, timeout=1.0, poster=Poster(False),
            guarded=lambda call, *_: call(), new_channel=lambda: 0, stream="group 0",
        )  # fmt: skip
        rounds = Rounds(topology, members, local_workers, all_reduce=False)

        def message(sender: int) -> list[torch.Tensor]:
            return [torch.empty(2 * sender + 1), torch.empty(2 * sender + 2)]

        incoming = [[message(s) for s in rounds.elsewhere(plan.weights)] for plan in rounds.plans[0]]
        exchange = Exchange(group, rounds)
        exchange.post(0, "a test", lambda local, _, rounds=rounds: message(rounds.workers[local]), incoming)
    return posted


def unfinished(posted: list[list[list[tuple[str, int, int]]]]) -> list[int]:
    """Run the groups of each rank one after the other; a message travels once both of its groups have begun."""
    place: dict[tuple[str, int, int, int], tuple[int, int]] = {}  # (what, from, to, number) -> group and size
    for rank, groups in enumerate(posted):
        count: Counter[tuple[str, int]] = Counter()
        for number, group in enumerate(groups):
            for what, peer, size in group:
                ends = (rank, peer) if what == "isend" else (peer, rank)
                place[what, *ends, count[what, peer]] = number, size
                count[what, peer] += 1
    assert {key[1:]: size for key, (_, size) in place.items() if key[0] == "isend"} == {
        key[1:]: size for key, (_, size) in place.items() if key[0] == "irecv"
    }, "a message is received as another one"
    done = [0] * len(posted)
    moved = True
    while moved:
        moved = False
        for rank, groups in enumerate(posted):
            mine = [key for key, (number, _) in place.items() if number == done[rank] and _owner(key) == rank]
            partners = [("irecv" if key[0] == "isend" else "isend", *key[1:]) for key in mine]
            if done[rank] < len(groups) and all(done[_owner(other)] >= place[other][0] for other in partners):
                done[rank] += 1
                moved = True
    return [rank for rank, groups in enumerate(posted) if done[rank] < len(groups)]


def _owner(key: tuple[str, int, int, int]) -> int:
    return key[1] if key[0] == "isend" else key[2]


def directed(num_workers: int) -> Topology:
    generator = np.random.default_rng(0)
    shuffled = [np.eye(num_workers)[generator.permutation(num_workers)] for _ in range(20)]
    return Topology.from_matrices([(np.eye(num_workers) + sum(shuffled)) / 21])


def star(num_workers: int) -> Topology:
    matrix = np.eye(num_workers)
    matrix[0, 1:] = matrix[1:, 0] = 1 / num_workers
    np.fill_diagonal(matrix, 0)
    return Topology.from_matrices([matrix + np.diag(1 - matrix.sum(0))])


@pytest.mark.parametrize(
    ("topology", "local_workers"),
    [
        (build_topology("complete", 40), 1),
        (build_topology("complete", 24), 4),
        (build_topology("exponential", 16), 1),
        (directed(24), 2),
        (directed(17), 1),
        (star(70), 1),
    ],
    ids=lambda x: str(x),
)
def test_nccl_groups_are_small_and_fit_together_on_all_workers(topology, local_workers, monkeypatch):
    posted = groups_of(topology, local_workers, monkeypatch)
    sizes = [len(group) for groups in posted for group in groups]
    assert max(sizes) <= 128
    if topology.name == "exponential":
        assert set(map(len, posted)) == {1}, "what fits into one group is posted at once"
    assert not unfinished(posted), "groups wait for each other"


def test_a_group_that_cannot_send_and_receive_at_once_is_refused(monkeypatch):
    class Backend:
        supports_coalescing = False

    class Wrapped:
        def _get_backend(self, device):
            return Backend

    monkeypatch.setattr(dist, "ProcessGroup", Wrapped)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: Wrapped())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(Nccl, "options", lambda *_: None)
    monkeypatch.setattr(Nccl, "mark", lambda nccl: None)  # which takes pinned memory
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        Nccl(torch.device("cpu")).new_group([0, 1], limit=dist.distributed_c10d.default_pg_timeout)
    Backend.supports_coalescing = True
    Nccl(torch.device("cpu")).new_group([0, 1], limit=dist.distributed_c10d.default_pg_timeout)


# ---- posts that block


def post_for_ever() -> None:
    poster = Poster(threaded=True)
    with pytest.raises(RuntimeError, match="timed out"):
        result_within(0.1, poster.submit(lambda: time.sleep(3600)))


def test_a_process_whose_post_blocks_ends():
    process = fork(post_for_ever)
    process.join(40.0)
    hangs = process.is_alive()
    process.kill()
    assert not hangs
    assert process.exitcode == 0


@pytest.mark.parametrize("threaded", [True, False])
def test_an_error_of_a_post_arrives(threaded):
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    poster = Poster(threaded)
    with pytest.raises(RuntimeError, match="closed by peer"):
        result_within(10.0, poster.submit(fail))
    assert result_within(10.0, poster.submit(lambda: 3)) == 3


# ---- figures of a device


class Event:
    now = 0.0

    def __init__(self) -> None:
        self.at: float | None = None

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


def test_a_wait_of_the_device_is_measured_once_it_is_over():
    events: list[Event] = []

    def event() -> Event:
        events.append(Event())
        return events[-1]

    stopwatch, seen = DeviceStopwatch(event), []
    for number in range(4):
        stopwatch.start()
        stopwatch.stop()
        seen.append(stopwatch.seconds)
        if number > 0:  # the device is a step behind at first, and not at all in the end
            events[2 * number - 2].at, events[2 * number - 1].at = 10.0 * number, 10.0 * number + number
        if number == 2:
            events[4].at, events[5].at = 30.0, 33.0
    assert seen == [0.0, 0.0, 1.0, 3.0]


class Work:
    done = False

    def is_completed(self) -> bool:
        return self.done


class Queue:
    """The queue of a device, which comes to all marks before `reached`."""

    def __init__(self) -> None:
        self.marks, self.reached = 0, 0

    def mark(self):
        self.marks += 1
        return lambda place=self.marks: place <= self.reached


def wait_for(watchdog: Watchdog, work: Work) -> None:
    with watchdog.waiting(work):
        pass


def test_only_what_the_device_waits_for_is_overdue(monkeypatch):
    queue, first, second = Queue(), Work(), Work()
    watchdog = Watchdog(queue.mark)
    watchdog.post(lambda: [first], "the exchange of step 1", 2)
    watchdog.post(lambda: [second], "the exchange of step 2", 3)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5)
    assert watchdog.overdue(2.0) is None, "a worker may do something else between posting and waiting"
    wait_for(watchdog, first)
    wait_for(watchdog, second)
    assert watchdog.overdue(2.0) is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    assert watchdog.overdue(2.0) is None, "the device still computes, and has not come to the first wait"
    queue.reached = 1
    assert watchdog.overdue(2.0) is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 13)
    assert watchdog.overdue(4.0) is None
    assert watchdog.overdue(2.0).what == "the exchange of step 1"
    queue.reached = 3
    assert watchdog.overdue(2.0) is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 16)
    assert watchdog.overdue(2.0).peer == 3
    queue.reached = 4
    assert watchdog.overdue(2.0) is None


def test_works_of_one_communication_are_waited_for_as_one():
    queue, works = Queue(), [Work(), Work()]
    watchdog = Watchdog(queue.mark)
    watchdog.post(lambda: works, "the exchange of step 1", 2)
    wait_for(watchdog, works[0])
    queue.reached = 2
    assert watchdog.overdue(-1.0).what == "the exchange of step 1", "the second is still to be waited for"
    wait_for(watchdog, works[1])
    assert watchdog.overdue(-1.0) is None
    assert queue.marks == 2


def test_a_flag_that_is_used_again_is_cleared_first(monkeypatch):
    monkeypatch.setattr(watchdog_module, "pinned", lambda size, dtype: torch.zeros(size, dtype=dtype))
    flags = HostFlags(torch.device("cpu"))
    assert all(reached() for reached in [flags.mark() for _ in range(4096)])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **options: None)  # the device is not there yet
    assert not flags.mark()()


def test_a_post_that_fails_is_never_overdue():
    watchdog = Watchdog(Queue().mark)

    def post() -> list:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        watchdog.post(post, "the exchange of step 1", None)
    assert watchdog.overdue(-1.0) is None
    watchdog.post(lambda: [Work()], "the exchange of step 2", None)
    assert len(watchdog._pending) == 1


def test_a_device_that_hangs_in_something_else_is_not_waited_for_either():
    watchdog, ready = Watchdog(Queue().mark), Work()
    watchdog.start(str, 0.05)
    watchdog.post(lambda: [Work()], "the exchange of step 1", 2)
    assert wait_until(ready.is_completed, [watchdog])[1].what == "waiting for the device"
    ready.done = True
    assert wait_until(ready.is_completed, [watchdog]) is None
    assert wait_until(Work().is_completed, []) is None, "nobody else is there"


def test_a_post_that_blocks_is_overdue_too(monkeypatch):
    watchdog, found = Watchdog(Queue().mark), []

    def post() -> list:
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        found.append(watchdog.overdue(2.0))
        return []

    watchdog.post(post, "the exchange of step 1", None)
    assert found[0].what == "the exchange of step 1"
    assert watchdog.overdue(0.0) is None
