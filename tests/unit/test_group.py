"""A group of one process: the mean over its workers against torch's, and its reuse for another training."""

import torch

from dsgdac_accel import WorkerGroup


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
    assert not group.serves(cpu, 5.0, "continue")
    assert not group.serves(torch.device("meta"), 5.0)
    group.close()
    assert not group.serves(cpu, 5.0)
