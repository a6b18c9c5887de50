"""The mean over workers, of one process that holds several of them, against torch's."""

import torch

from dsgdac_accel import WorkerGroup


def workers(count, size=25):
    return list(torch.randn(count, size, generator=torch.Generator().manual_seed(count)))


def test_equal_workers_have_exactly_themselves_as_their_mean():
    group = WorkerGroup(torch.device("cpu"))
    for count in range(2, 12):
        (x,) = workers(1, 1000)
        assert torch.equal(group.mean_(x.clone(), "a test", others=[x.clone() for _ in range(count - 1)]), x)


def test_the_mean_is_that_of_all_workers_element_by_element_and_leaves_the_others_as_they_are(monkeypatch):
    monkeypatch.setattr(f"{WorkerGroup.__module__}._MEAN_CHUNK", 10)  # the last part is smaller
    for count in (1, 2, 3):
        x, *others = workers(count)
        kept = [other.clone() for other in others]
        expected = torch.stack([x, *others]).double().mean(0).float()
        assert torch.equal(WorkerGroup(torch.device("cpu")).mean_(x, "a test", others), expected)
        assert all(torch.equal(other, before) for other, before in zip(others, kept, strict=True))
