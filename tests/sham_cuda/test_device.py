"""The sham device is one: values, memory, copies that arrive late, and two of them."""

import torch


def compute(rank):
    x = torch.arange(6.0).view(2, 3)
    on_device = x.to("cuda")
    product = (on_device @ on_device.T).cpu()
    return str(on_device.device), torch.equal(product, x @ x.T), str(torch.ones(2, device="cuda:1").device)


def test_values_are_those_of_the_cpu(sham):
    ((device, equal, other),) = sham.run(compute, 1)
    assert (device, equal, other) == ("cuda:0", True, "cuda:1")


def copy_late(rank):
    values = torch.arange(4.0, device="cuda")
    pinned, pageable = torch.empty(4, pin_memory=True), torch.empty(4)
    pinned.copy_(values, non_blocking=True)
    pageable.copy_(values, non_blocking=True)
    too_early = pinned.clone()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    event.query()
    return pinned.is_pinned(), pageable.is_pinned(), too_early, pinned.clone(), pageable.clone()


def test_a_copy_into_pinned_memory_arrives_when_an_event_after_it_is_asked_for(sham):
    ((is_pinned, other, too_early, arrived, pageable),) = sham.run(copy_late, 1)
    expected = torch.arange(4.0)
    assert (is_pinned, other) == (True, False)
    assert not torch.equal(too_early, expected)
    assert torch.equal(arrived, expected)
    assert torch.equal(pageable, expected)
