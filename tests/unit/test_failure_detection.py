"""Which errors mean a lost worker, which worker the message names, and what it advises."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from dsgdac_accel import WorkerGroup
from dsgdac_accel.distributed import failure_detection, failure_reports
from dsgdac_accel.distributed.failure_detection import Failure, FailureDetector
from dsgdac_accel.distributed.failure_reports import FailureReports, this_machine
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.model_state import gathered_state
from dsgdac_accel.distributed.poster import Poster, result_within
from dsgdac_accel.distributed.transport import Gloo

CLOSED = "[/gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1. This is typically due to a crash"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("_ROLL_CALL_SECONDS", "_CHAIN_SECONDS"):
        monkeypatch.setattr(failure_reports, name, 0.2)


def detector(me=0, launched=4, store=None, dead=()):
    """Of one worker; all are on other machines, so that nothing is known of their processes, but for the `dead`."""
    found = FailureDetector(Members(me, launched), 3.0)
    found.reports.store = dist.HashStore() if store is None else store
    found.reports.is_alive = lambda worker: False if worker in dead else None
    return found


# ---- whose error it is


@pytest.fixture
def groups():
    """The process groups of two workers, in one process."""
    store, limit = dist.HashStore(), timedelta(seconds=10)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))


def receive_from_the_dead(groups):
    work = groups[0].recv([torch.ones(2)], 1, 0)
    del groups[1]
    work.wait()


SOON = timedelta(milliseconds=50)
LOSSES = {
    "dead": receive_from_the_dead,
    "all-reduce": lambda groups: Gloo().wait(groups[0].allreduce([torch.ones(2)]), 0.05),
    "silent": lambda groups: groups[0].recv([torch.ones(2)], 1, 0).wait(SOON),
    "barrier": lambda groups: groups[0].monitored_barrier(SOON, wait_all_ranks=True),
    "store": lambda _: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).wait(["never"], SOON),
    "blocked post": lambda _: result_within(0.05, Future()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_errors_of_the_transport_mean_a_lost_worker(loss, groups):
    with pytest.raises(RuntimeError) as caught:
        LOSSES[loss](groups)
    assert detector().failure_in(caught.value, "evaluating", 7) is not None


def test_a_mistake_in_the_settings_of_gloo_is_told_to_the_others():
    found = detector()
    with pytest.raises(RuntimeError) as caught:
        dist.ProcessGroupGloo.create_device(interface="eth99")
    assert found.failure_in(caught.value, "connecting", 0) is None
    assert found.reports.first() == f"worker 0 failed in connecting: {failure_detection.short_cause(caught.value)}"


def fail(*_):
    raise RuntimeError(f"{CLOSED}: NCCL error, timed out")


def gather(group):
    model = torch.nn.Linear(2, 1)
    model.register_state_dict_post_hook(fail)
    gathered_state(model, group)


def load(_):
    """Raise what a DataLoader raises where the data fails in one of its processes."""
    try:
        fail()
    except RuntimeError:
        found = ExceptionWrapper(where="in DataLoader worker process 0")
    found.reraise()


USERS = {
    "hook": (gather, "fail"),
    "thread": (lambda _: result_within(10.0, Poster(threaded=True).submit(fail)), "fail"),
    "DataLoader": (load, "reraise"),
    "C++": (lambda _: torch._assert_async(torch.tensor(False), "NCCL error: connection timed out"), "<lambda>"),
}


@pytest.mark.parametrize("place", USERS)
def test_an_error_of_the_user_stays_itself_whatever_it_says(place):
    group, (call, raised_in) = WorkerGroup(torch.device("cpu")), USERS[place]
    with pytest.raises(RuntimeError, match="NCCL error") as caught:
        group.guarded(lambda: call(group), "evaluating")
    assert caught.type is RuntimeError
    assert caught.traceback[-1].name == raised_in


def test_a_failure_names_what_was_going_on_with_its_step_once():
    members, error = detector(launched=3), dist.DistBackendError(CLOSED)
    failure = members.failure_in(error, "evaluating", 7, peer=2)
    assert failure == Failure("evaluating at step 7", "Connection closed by peer [127.0.0.1]:1", 2)
    assert members.failure_in(error, "the exchange of step 6", 7).what == "the exchange of step 6"


# ---- which worker is named, and what is advised


def test_the_only_peer_is_named_with_the_step():
    message = str(detector().worker_lost(Failure("the exchange of step 4", "Connection closed by peer", 2)))
    assert message.startswith("worker 0: worker 2 was lost in the exchange of step 4 (Connection closed by peer).")
    assert "Look at that worker's own output" in message
    assert "raise `timeout`" not in message


def test_silence_is_told_from_death_and_has_a_way_out_of_its_own():
    failure = Failure("the exchange of step 4", "Timed out waiting", 2)
    message = str(detector().worker_lost(failure))
    assert "worker 2 did not answer within 3 s" in message
    assert all(word in message for word in ("raise `timeout`", "`equal_steps`", "`optimizer.step()`"))
    assert "worker 2 was lost" in str(detector(dead=[2]).worker_lost(failure))
    saving = Failure("saving the checkpoint of step 4", "Timed out waiting", 2)
    assert str(detector().worker_lost(saving)).endswith(
        "Call `save_state` and `load_state` on all workers, not on rank 0 alone. If all of them do, look at that "
        "worker's own output, and raise `timeout` if it was only slow."
    )


def test_a_barrier_names_the_workers_that_did_not_come():
    failure = Failure("averaging the workers at step 5", "Ranks 2, 3 failed to pass monitoredBarrier in 3000 ms")
    message = str(detector().worker_lost(failure))
    assert "workers 2, 3 did not answer within 3 s in averaging the workers at step 5" in message
    assert "enter `deployed_model`, `save_model` and evaluation on all workers" in message


def test_without_a_peer_the_roll_call_finds_the_lost_worker():
    store = dist.HashStore()
    for other in (1, 3):
        detector(other, store=store).reports.missing()
    message = str(detector(store=store).worker_lost(Failure("evaluating at step 7", "Connection reset")))
    assert "worker 0: worker 2, which does not answer, was lost in evaluating at step 7" in message


@pytest.mark.parametrize(
    ("dead", "who"), [([3], "worker 3 was lost"), ([], "one of workers 1, 2, 3, which do not answer, was lost")]
)
def test_workers_on_other_machines_may_still_compute_and_are_not_all_lost(dead, who):
    failure = Failure("evaluating at step 7", "Connection reset")
    assert f"worker 0: {who} in evaluating" in str(detector(dead=dead).worker_lost(failure))


def test_a_worker_that_is_alive_but_silent_is_not_called_lost():
    one = detector(launched=2)
    one.reports.is_alive = lambda worker: True
    message = str(one.worker_lost(Failure("evaluating at step 7", "Connection reset")))
    assert "worker 1, which does not answer, was lost" in message


def test_a_worker_that_is_gone_is_named_rather_than_one_that_has_not_noticed_yet():
    one = detector(launched=3, dead=[1])
    alive = one.reports.is_alive
    one.reports.is_alive = lambda worker: True if worker == 2 else alive(worker)
    message = str(one.worker_lost(Failure("evaluating at step 7", "Connection reset")))
    assert "worker 0: worker 1 was lost in evaluating at step 7" in message


def test_later_errors_quote_the_first_report_and_that_of_the_peer():
    store = dist.HashStore()
    first = detector(1, store=store)
    first.worker_lost(Failure("the exchange of step 4", "Connection closed", 2))
    message = str(detector(0, store=store).worker_lost(Failure("the exchange of step 5", "Connection closed", 1)))
    assert "First report of this run: worker 2 was lost in the exchange of step 4, as worker 1 saw it." in message
    assert "worker 1 was lost in the exchange of step 5" in message
    store = dist.HashStore()
    detector(3, store=store).reports.write("a report")
    detector(1, store=store).reports.write("the reason of worker 1")
    message = str(detector(0, store=store).worker_lost(Failure("the exchange of step 5", "Connection closed", 1)))
    assert "First report of this run: a report. Worker 1 reports: the reason of worker 1." in message


@pytest.fixture
def ended():
    """A process that has ended and is not reaped yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_only_processes_of_this_machine_are_seen(ended):
    here = this_machine()
    reports = FailureReports(Members(0, 4))
    reports.processes = [(here, os.getpid()), (here, ended), (here, 2**22 + 1), ("elsewhere", os.getpid())]
    assert [reports.is_alive(worker) for worker in range(4)] == [True, False, False, None]  # 2**22 is the largest id


def test_a_worker_that_does_not_answer_the_roll_call_is_gone_if_its_process_is_known_to_be(ended):
    here = this_machine()
    reports, other = FailureReports(Members(0, 5)), FailureReports(Members(4, 5))
    reports.store = other.store = dist.HashStore()
    processes = [(here, os.getpid()), (here, ended), (here, os.getppid()), ("elsewhere", 1), (here, os.getpid())]
    reports.processes = other.processes = processes
    other.missing()
    assert reports.missing() == ([1], [2, 3])  # 3 may compute, on another machine


def test_the_cause_is_the_transports_first_sentence():
    assert failure_detection.short_cause(RuntimeError(CLOSED)) == "Connection closed by peer [127.0.0.1]:1"
