"""What a loss means: the default stops, and continuing repeats exactly what is not complete; without processes."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dsgdac_accel
from dsgdac_accel import WorkerGroup, WorkerLostError, WorkersChangedError
from dsgdac_accel.distributed.failure_detection import Failure
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.elastic.collectives import repeat_collectives
from dsgdac_accel.elastic.membership import Progress
from dsgdac_accel.elastic.recovery import ContinueWithSurvivors

CPU = torch.device("cpu")
CHANGE = WorkersChangedError("worker 1 was lost")


def group_of(workers, monkeypatch):
    """The group of worker 0, whose collectives over the transport do nothing; also the list of those."""
    group, done = WorkerGroup(CPU), []
    group.members = Members(0, workers)
    monkeypatch.setattr(dist, "barrier", lambda group=None: done.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None, group=None: done.append("all_reduce"))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, group_src, group=None: done.append("broadcast"))
    return group, done


class Work:
    """Raises each of `errors` once, then succeeds; also what it did in `done`."""

    def __init__(self, *errors, done=None):
        self.errors, self.done = list(errors), [] if done is None else done

    def __call__(self, *args, **kwargs):
        self.done.append("work")
        if self.errors:
            raise self.errors.pop(0)
        return len(self.done)


# ---- stopping, the default


def test_by_default_everything_is_done_once_and_a_loss_ends_the_run():
    group = WorkerGroup(CPU)
    assert group.policy.name == "stop"
    assert group.collective(Work(), "a test") == 1
    assert group.retry_after_loss(Work()) == 1
    assert group.policy.complete_exchange(Work()) is True
    with group.policy.section():
        pass
    for call in (lambda work: group.collective(work, "a test"), lambda work: group.guarded(work, "a test", peer=0)):
        with pytest.raises(WorkerLostError, match="in a test at step 0"):
            call(Work(RuntimeError("Connection closed by peer")))
    work = Work(CHANGE, CHANGE)
    for call in (group.retry_after_loss, group.policy.complete_exchange):
        with pytest.raises(WorkersChangedError):
            call(work)


def test_what_communicates_in_the_background_is_drained_before_every_reduction_and_broadcast(monkeypatch):
    group, done = group_of(2, monkeypatch)

    class Mixer:
        def drain(self):
            done.append("drain")

    mixer = Mixer()
    group.register(mixer)
    group.all_reduce_mean_(torch.ones(3), "a test")
    group.all_reduce_max_(torch.ones(3), "a test")
    group.broadcast_(torch.ones(3), "a test")
    assert done == ["drain", "all_reduce", "drain", "all_reduce", "drain", "broadcast"]
    del mixer
    group.all_reduce_max_(torch.ones(3), "a test")
    assert done[6:] == ["all_reduce"]


def test_no_other_package_of_the_library_imports_elastic():
    library = Path(dsgdac_accel.__file__).parent
    imports = re.compile(r"^\s*(from|import) (dsgdac_accel)?\.*elastic\b", re.MULTILINE)
    files = {file.relative_to(library): file.read_text() for file in library.rglob("*.py")}
    found = {str(file) for file, text in files.items() if imports.search(text)}
    assert found
    assert all(file.startswith("elastic/") for file in found), found


def test_without_elastic_continuing_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr("dsgdac_accel.distributed.loss_policy.entry_points", lambda **_: ())
    with pytest.raises(ImportError, match=r"on_worker_loss='continue' needs the entry point .* or use on_worker_loss="):
        WorkerGroup(CPU, on_loss="continue")


# ---- continuing


def test_continuing_is_found_by_its_name():
    group = WorkerGroup(CPU, on_loss="continue")
    assert isinstance(group.policy, ContinueWithSurvivors)
    assert group.policy.name == "continue"


def test_a_collective_is_complete_after_the_barrier_only(monkeypatch):
    group, done = group_of(3, monkeypatch)
    group.policy = ContinueWithSurvivors(group)
    assert group.collective(Work(done=done), "a test") == 1
    assert done == ["work", "barrier"]


@pytest.mark.parametrize("completed_elsewhere", [False, True])
def test_a_collective_that_is_interrupted_in_the_barrier_is_repeated_unless_another_has_passed(
    monkeypatch, completed_elsewhere
):
    group, done = group_of(3, monkeypatch)
    policy = group.policy = ContinueWithSurvivors(group)
    group.collective(Work(), "the one before")
    barrier = Work(CHANGE)
    monkeypatch.setattr(dist, "barrier", lambda group=None: barrier())
    policy._furthest = Progress({}, collectives=1 + completed_elsewhere)
    work = Work(done=done)
    done.clear()
    group.collective(work, "a test")
    assert done == ["work"] * (1 if completed_elsewhere else 2)
    policy._furthest = Progress({}, collectives=2)  # it counts once, either way
    barrier.errors = [CHANGE]
    done.clear()
    group.collective(work, "the next")
    assert done == ["work"] * 2


def test_the_last_survivor_computes_alone(monkeypatch):
    group, done = group_of(2, monkeypatch)
    group.policy = ContinueWithSurvivors(group)

    def lose_the_other():
        if group.size > 1:
            group.members.original_ranks = [0]
            raise CHANGE
        return "alone"

    assert group.collective(lose_the_other, "a test") == "alone"
    assert done == []
    assert group.lost == [1]


def test_a_section_is_left_and_repeated_as_a_whole(monkeypatch):
    group, done = group_of(3, monkeypatch)
    group.policy = ContinueWithSurvivors(group)
    collective = Work(CHANGE, done=done)

    def evaluate():
        done.append("begin")
        return group.collective(collective, "a test")

    assert group.retry_after_loss(evaluate) == 4
    assert done == ["begin", "work", "begin", "work", "barrier"]


def test_inside_another_section_the_outer_one_is_repeated(monkeypatch):
    group, _ = group_of(3, monkeypatch)
    group.policy = ContinueWithSurvivors(group)
    inner = Work(CHANGE)
    assert group.retry_after_loss(lambda: group.retry_after_loss(inner)) == 2
    with pytest.raises(WorkersChangedError), group.policy.section():
        group.retry_after_loss(Work(CHANGE))


def test_a_section_that_another_survivor_has_completed_is_not_repeated(monkeypatch):
    group, done = group_of(3, monkeypatch)
    policy = group.policy = ContinueWithSurvivors(group)
    policy._furthest = Progress({}, sections=1)  # so all others have done its work too
    work = Work(CHANGE, done=done)

    def evaluate():
        done.append("begin")
        return group.collective(work, "the last one in it")

    assert group.retry_after_loss(evaluate) == 3
    assert done == ["begin", "work", "work", "barrier"]


def test_an_exchange_is_dropped_after_a_loss_and_raises_in_a_section(monkeypatch):
    group, _ = group_of(3, monkeypatch)
    group.policy = ContinueWithSurvivors(group)
    assert group.policy.complete_exchange(Work()) is True
    assert group.policy.complete_exchange(Work(CHANGE)) is False
    with pytest.raises(WorkersChangedError), group.policy.section():
        group.policy.complete_exchange(Work(CHANGE))


def test_an_error_while_reconnecting_is_that_of_a_lost_worker(monkeypatch):
    group, _ = group_of(3, monkeypatch)
    policy = group.policy = ContinueWithSurvivors(group)
    policy._reconnecting = True
    with pytest.raises(WorkerLostError):
        policy.handle(Failure("regrouping at step 3", "Connection closed", 0), RuntimeError("Connection closed"))


# ---- Accelerate's collectives


class FakeAccelerator:
    """Records its communication; `reduce` gathers as part of it."""

    is_main_process = is_local_main_process = True

    def __init__(self):
        self.done = []

    def gather(self, tensor):
        self.done.append("gather")
        return tensor

    def reduce(self, tensor, reduction="sum"):
        return self.gather(tensor), reduction

    def gather_for_metrics(self, tensor):
        raise AssertionError

    def pad_across_processes(self, tensor):
        raise AssertionError

    def wait_for_everyone(self):
        self.done.append("wait")


def test_collectives_of_one_accelerator_are_wrapped_and_nested_ones_once(monkeypatch):
    group, done = group_of(3, monkeypatch)
    group.policy = ContinueWithSurvivors(group)
    accelerator, other = FakeAccelerator(), FakeAccelerator()
    group.policy.cover_collectives(accelerator)
    assert accelerator.reduce(1, reduction="mean") == (1, "mean")
    assert (accelerator.done, done) == (["gather"], ["barrier"])
    other.reduce(1)
    assert done == ["barrier"]
    with accelerator.main_process_first():
        assert "wait" not in accelerator.done
    assert accelerator.done[-1] == "wait"
    accelerator.is_local_main_process = False
    with accelerator.local_main_process_first():
        assert accelerator.done.count("wait") == 2
    assert accelerator.done.count("wait") == 2


def test_after_the_end_of_training_collectives_are_accelerates_own(monkeypatch):
    group, done = group_of(3, monkeypatch)
    group.policy = ContinueWithSurvivors(group)
    accelerator = FakeAccelerator()
    repeat_collectives(accelerator, group)
    group.close()
    accelerator.wait_for_everyone()
    assert (accelerator.done, done) == (["wait"], [])


def test_by_default_they_are_left_as_they_are():
    accelerator = FakeAccelerator()
    WorkerGroup(CPU).policy.cover_collectives(accelerator)
    assert "gather" not in vars(accelerator)
