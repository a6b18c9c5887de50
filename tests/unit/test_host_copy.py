"""Values of a GPU on their way to the host, with a stand-in for the GPU."""

from typing import Any

import pytest
import torch

from dsgdac_accel.checkpoint import staging
from dsgdac_accel.checkpoint.serialization import decode, encode
from dsgdac_accel.core.host_copy import HostCopy


class GPUStandIn:
    """Stands in for events of a GPU and for page-locked memory, of which a machine without a GPU has none."""

    def __init__(self, monkeypatch: Any) -> None:
        self.events: list[Any] = []
        self.pinned: list[int] = []
        empty = torch.empty

        def allocated(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            self.pinned += [args[0]] if pin_memory else []
            return empty(*args, **kwargs)

        stand_in = self

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.blocking, self.recorded, self.waits = blocking, 0, 0
                stand_in.events.append(self)

            def record(self, stream: Any) -> None:
                self.recorded += 1

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                self.waits += 1

        monkeypatch.setattr(torch, "empty", allocated)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


class OnGPU(torch.Tensor):
    is_cuda = True


def test_whoever_waits_for_a_copy_sleeps(monkeypatch):
    gpu = GPUStandIn(monkeypatch)
    copy = HostCopy(torch.tensor([1.0, 2.0]).as_subclass(OnGPU))
    assert copy.read().tolist() == [1.0, 2.0]
    (event,) = gpu.events
    assert (event.blocking, event.recorded, event.waits) == (True, 1, 1), "a thread would spin on a processor"


def test_a_state_is_staged_in_one_buffer_and_waited_for_once(monkeypatch):
    gpu = GPUStandIn(monkeypatch)
    monkeypatch.setattr(staging, "_is_on_gpu", lambda tensor: True)
    state = {
        "weight": torch.randn(3, 5),
        "permuted": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "sliced": torch.arange(20.0)[::2],
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "step": torch.tensor(7),
    }
    expected = {name: value.clone() for name, value in state.items()}
    encoded = encode(state, copy=True)
    for value in state.values():
        value.zero_()  # the next step, which is queued behind the copy
    (event,) = gpu.events
    assert (event.blocking, event.recorded, event.waits) == (True, 1, 0)
    assert len(gpu.pinned) == 1
    found = decode(encoded)
    assert event.waits == 1
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].stride() == (value.contiguous() if name == "sliced" else value).stride()
        assert torch.equal(found[name], value)


def test_page_locked_memory_is_bounded_and_what_does_not_fit_is_copied_all_the_same(monkeypatch):
    gpu = GPUStandIn(monkeypatch)
    monkeypatch.setattr(staging, "_is_on_gpu", lambda tensor: tensor.numel() < 1000)
    monkeypatch.setattr(staging, "MOST_PINNED_BYTES", 1000)
    tensors = {str(size): torch.randn(size) for size in (100, 200, 20, 90, 1000)}
    on_host = staging.staged(tensors)
    assert gpu.pinned == [(448 + 128 + 384,)]
    assert on_host.tensors["1000"] is tensors["1000"], "a tensor of the CPU is not copied"
    for name, value in tensors.items():
        assert torch.equal(on_host.tensors[name], value)


@pytest.mark.parametrize("copy", [False, True])
def test_tensors_of_the_cpu_are_staged_nowhere(monkeypatch, copy):
    gpu = GPUStandIn(monkeypatch)
    value = torch.ones(3)
    encoded = encode({"x": value}, copy=copy)
    assert gpu.events == gpu.pinned == []
    assert (encoded.tensors["x"].data_ptr() == value.data_ptr()) != copy
