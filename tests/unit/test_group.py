"""A group of one process: the mean over its workers against torch's, its reuse, and how a loss in it ends the run."""

import pytest
import torch
import torch.distributed as dist

from dsgdac_accel import WorkerGroup, WorkerLostError
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.row import Row


def workers(count, size=25):
    return list(torch.randn(count, size, generator=torch.Generator().manual_seed(count)))


def test_the_mean_of_equal_workers_is_exact():
    group = WorkerGroup(torch.device("cpu"))
    for count in range(2, 12):
        (x,) = workers(1, 1000)
        assert torch.equal(group.all_reduce_mean_(x.clone(), "a test", others=[x.clone() for _ in range(count - 1)]), x)


def test_the_mean_is_over_all_workers_and_leaves_the_others_unchanged(monkeypatch):
    monkeypatch.setattr(f"{WorkerGroup.__module__}._MEAN_CHUNK", 10)  # the last part is smaller
    for count in (1, 2, 3):
        x, *others = workers(count)
        kept = [other.clone() for other in others]
        expected = torch.stack([x, *others]).double().mean(0).float()
        assert torch.equal(WorkerGroup(torch.device("cpu")).all_reduce_mean_(x, "a test", others), expected)
        assert all(torch.equal(other, before) for other, before in zip(others, kept, strict=True))


def test_a_group_serves_another_training_until_it_is_closed():
    cpu = torch.device("cpu")
    group = WorkerGroup(cpu, timeout=5.0)
    assert group.serves(cpu, 5.0)
    assert not group.serves(cpu, 6.0)
    assert not group.serves(torch.device("meta"), 5.0)
    assert WorkerGroup.make(None, cpu, 5.0, group) is group
    assert WorkerGroup.make(None, cpu, 6.0, group) is not group
    group.row.mesh = object()  # the column of a mesh
    assert WorkerGroup.make(None, cpu, 5.0, group) is not group
    group.close()
    assert not group.serves(cpu, 5.0)


def test_the_workers_refuse_what_does_not_go_with_shards():
    group = WorkerGroup(torch.device("cpu"))
    group.refuse_combinations(call="examine")
    group.row = Row(WorkerGroup(torch.device("cpu")))
    group.row.group.members = Members(0, 2)
    with pytest.raises(ValueError, match="examine does not work with sharded workers"):
        group.refuse_combinations(call="examine")


@pytest.mark.parametrize("peer", [None, 0])
def test_a_loss_ends_the_run(peer):
    def communicate():
        raise dist.DistBackendError("Connection closed by peer")

    with pytest.raises(WorkerLostError, match="in a test at step 0"):
        WorkerGroup(torch.device("cpu")).guarded(communicate, "a test", peer)


def test_what_communicates_in_the_background_is_drained_before_every_reduction_and_broadcast(monkeypatch):
    group, done = WorkerGroup(torch.device("cpu")), []
    group.members, group.process_groups.reduction = Members(0, 2), "connected"
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None, group=None: done.append("all_reduce"))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, group_src, group=None: done.append("broadcast"))

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
