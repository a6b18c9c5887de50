"""How survivors agree on who is left, with threads in place of workers; their topology; and failure reports."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dsgdac_accel import WorkerGroup
from dsgdac_accel.distributed.failure_reports import FailureReports, this_machine
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.elastic.heartbeat import Heartbeat
from dsgdac_accel.elastic.membership import Progress, agree
from dsgdac_accel.elastic.watched_store import WatchedStore
from dsgdac_accel.topology import TOPOLOGIES, Topology, build_topology


def reports_of(number, store, is_alive=lambda number: True):
    reports = FailureReports(number)
    reports.store, reports.is_alive = store, is_alive
    return reports


def meet(progress, members, is_alive=lambda number: None, timeout=30.0, accused=(), delays=(), last=None):
    """What each survivor agrees to. `progress` is that of the workers that come; `last` comes after all others."""
    store, found = dist.HashStore(), {}
    store.set_timeout(timedelta(seconds=5))

    def come(number):
        time.sleep(dict(delays).get(number, 0.0))
        for other in threads if number == last else ():
            if other is not threading.current_thread():
                other.join(20)
        found[number] = agree(reports_of(number, store, is_alive), "here", members, progress[number], timeout, accused)

    threads = [threading.Thread(target=come, args=(number,)) for number in progress]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_all_survivors_agree_on_the_members_and_on_the_furthest_progress():
    progress = {0: Progress({0: 4, 1: 9}, 7, 1), 2: Progress({0: 6, 1: 8}, 7, 2), 5: Progress({0: 5}, 8, 2)}
    found = meet(progress, [0, 1, 2, 5], is_alive=lambda number: number != 1)
    assert len({repr(agreement) for agreement in found.values()}) == 1
    assert found[0].members == (0, 2, 5)
    assert found[0].furthest == Progress({0: 6, 1: 9}, 8, 2)


def test_a_late_worker_is_waited_for_and_a_dead_one_is_not():
    started = time.monotonic()
    found = meet({0: Progress({}), 1: Progress({})}, [0, 1, 2], is_alive=lambda number: number != 2, delays=[(1, 0.4)])
    assert found[0].members == found[1].members == (0, 1)
    assert time.monotonic() - started < 5


def test_a_worker_on_another_machine_is_waited_for_until_the_timeout():
    found = meet({0: Progress({}), 1: Progress({})}, [0, 1, 2], timeout=0.5)
    assert found[0].members == (0, 1)


def test_an_accused_worker_has_a_few_seconds_to_show_up(monkeypatch):
    progress = dict.fromkeys((0, 1, 2), Progress({}))
    monkeypatch.setattr("dsgdac_accel.elastic.membership._GRACE_SECONDS", 10.0)
    found = meet(progress, [0, 1, 2], accused=[1], delays=[(1, 0.2)])
    assert found[1].members == (0, 1, 2)
    monkeypatch.setattr("dsgdac_accel.elastic.membership._GRACE_SECONDS", 0.5)
    found = meet(progress, [0, 1, 2], timeout=300.0, accused=[1], last=1)
    assert found[0].members == found[2].members == (0, 2)
    assert found[1] is None  # it comes after the others have given it up


def test_a_worker_with_a_heartbeat_is_waited_for_beyond_the_timeout():
    store, found = dist.HashStore(), []

    def come_late():
        with Heartbeat(store, 1):
            time.sleep(1.5)
            found.append(agree(reports_of(1, store), "here", [0, 1], Progress({}), 0.3))

    late = threading.Thread(target=come_late)
    late.start()
    with Heartbeat(store, 0) as heartbeat:
        while not heartbeat.seen_from(
            1
        ):  # the first one seen may be an old one, and the next takes longer than the timeout
            time.sleep(0.01)
        assert not heartbeat.missed_since(0.0, 1)
        # Not even an accused worker is given up then.
        found.append(agree(reports_of(0, store), "here", [0, 1], Progress({}), 0.3, [1], heartbeat.seen_from))
    late.join(20)
    assert [agreement.members for agreement in found] == [(0, 1)] * 2


def test_heartbeats_of_an_earlier_loss_do_not_count(monkeypatch):
    monkeypatch.setattr("dsgdac_accel.elastic.heartbeat._SILENCE_SECONDS", 0.2)
    store, began = dist.HashStore(), time.monotonic()
    with Heartbeat(store, 1):
        while not store.check(["dsgdac_accel/heartbeat/1"]):
            time.sleep(0.01)
    heartbeat = Heartbeat(store, 0)
    assert not heartbeat.seen_from(1)
    assert not heartbeat.missed_since(time.monotonic(), 1)
    time.sleep(0.3)
    assert heartbeat.missed_since(began, 1)


def test_a_wait_in_the_store_ends_when_it_is_in_vain_or_times_out():
    reasons = ["", "", "worker 3 was lost"]
    watched = WatchedStore(dist.HashStore(), "here", lambda: reasons.pop(0), timeout=60)
    watched.set("there", b"value")
    assert watched.get("there") == b"value"
    with pytest.raises(dist.DistStoreError, match="worker 3 was lost"):
        watched.wait(["not there"], timedelta(seconds=0.01))
    assert not reasons
    with pytest.raises(dist.DistStoreError, match="timed out"):
        WatchedStore(dist.HashStore(), "here", lambda: "", timeout=0.1).get("not there")


def test_continuing_is_for_cpu_workers(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"on_worker_loss='continue' is for CPU workers \(gloo\)"):
        WorkerGroup(torch.device("cuda"), on_loss="continue")


@st.composite
def losses(draw):
    """A topology, built in or custom, and the survivors."""
    name = draw(st.sampled_from(sorted(TOPOLOGIES)))
    count = draw(st.sampled_from([2, 4, 8])) if name == "one_peer_exponential" else draw(st.integers(2, 9))
    topology = build_topology(name, count)
    if draw(st.booleans()):
        topology = Topology.from_matrices([topology.matrix(step) for step in range(topology.period)])
    return topology, sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))


@given(losses())
@settings(max_examples=200, deadline=None)
def test_survivors_always_have_a_topology_that_keeps_the_mean_and_connects_them(loss):
    topology, left = loss
    fewer = topology.of_survivors(left)  # refuses matrices that are not doubly stochastic or connected
    assert fewer.num_workers == len(left)
    if len(left) == topology.num_workers:
        assert fewer == topology
    if topology.name in TOPOLOGIES and topology.name != "one_peer_exponential":
        assert fewer == build_topology(topology.name, len(left))
    if topology.name == "custom" and fewer.name == "custom":
        for step in range(topology.period):
            weights, whole = fewer.matrix(step), topology.matrix(step)
            for row, worker in enumerate(left):
                for column, peer in enumerate(left):
                    if peer != worker:
                        assert weights[row, column] == whole[worker, peer]


def test_a_custom_topology_keeps_its_weights_whatever_its_name():
    slow_ring = [[0.8, 0.1, 0.0, 0.1], [0.1, 0.8, 0.1, 0.0], [0.0, 0.1, 0.8, 0.1], [0.1, 0.0, 0.1, 0.8]]
    fewer = Topology.from_matrices([slow_ring], name="ring").of_survivors([0, 1, 2])
    assert fewer.matrix(0).tolist() == [[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]]


def test_without_a_loss_the_weights_stay_to_the_bit():
    sevenths = Topology.from_matrices([[[1 / 7] * 7] * 7])  # the rows sum to 1 only up to rounding
    assert sevenths.of_survivors(range(7)) == sevenths


def test_a_directed_topology_is_replaced_since_cutting_it_would_move_the_mean():
    cycle = torch.eye(4).roll(1, 0) / 2 + torch.eye(4) / 2
    assert Topology.from_matrices([cycle]).of_survivors([0, 1, 3]) == build_topology("base_graph", 3)


@pytest.fixture
def ended():
    """A process that has ended and is not reaped yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_only_processes_of_this_machine_are_seen(ended):
    here = this_machine()
    reports = FailureReports(0, 4)
    reports.processes = [(here, os.getpid()), (here, ended), (here, 2**22 + 1), ("elsewhere", os.getpid())]
    assert [reports.is_alive(worker) for worker in range(4)] == [True, False, False, None]  # 2**22 is the largest id


def test_a_worker_that_does_not_answer_the_roll_call_is_gone_if_its_process_is_known_to_be(ended, monkeypatch):
    monkeypatch.setattr(f"{FailureReports.__module__}._ROLL_CALL_SECONDS", 0.3)
    here = this_machine()
    reports, other = FailureReports(0, 5), FailureReports(4, 5)
    reports.store = other.store = dist.HashStore()
    processes = [(here, os.getpid()), (here, ended), (here, os.getppid()), ("elsewhere", 1), (here, os.getpid())]
    reports.processes = other.processes = processes
    other.missing()
    assert reports.missing() == ([1], [2, 3])  # 3 may compute, on another machine


def test_the_local_rank_counts_the_workers_of_ones_machine():
    group = WorkerGroup(torch.device("cpu"))
    group.members = Members(3, 5)
    group.detector.reports.processes = [("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5)]
    assert group.local_rank == 1
    group.members.original_ranks = [0, 2, 3, 4]  # worker 1 was lost
    assert group.local_rank == 0


def test_the_launcher_reads_keys_without_the_prefixes_of_a_workers_store():
    store = dist.HashStore()
    reports = FailureReports(0, 2)
    reports.store = dist.PrefixStore("worker", dist.PrefixStore("attempt_0", store))
    reports.tell_launcher("one", "two")
    assert store.check(["one", "two"])
    assert not store.check(["three"])
