"""What torch.cuda and NCCL are where the device is a sham: queues, events in them, and gloo that carries the bytes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

_OF_ANY_SHAPE = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", *_OF_ANY_SHAPE)
_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")


def device_module() -> ModuleType:
    """Return the compiled device, which was preloaded into this process."""
    if "sham_device" not in sys.modules:
        preloaded = os.environ.pop("LD_PRELOAD")  # programs that are no Python could not load it
        specification = importlib.util.spec_from_file_location("sham_device", preloaded)
        assert specification is not None
        assert specification.loader is not None
        sys.modules["sham_device"] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules["sham_device"])
    return sys.modules["sham_device"]


class Observer:
    """Told of what orders the host, the streams of the device, and those of its communicators. This one ignores it."""

    def mark(self, stream: Stream) -> Any:
        """Return the present end of a stream."""
        return Counter()

    def is_reached(self, mark: Any) -> bool:
        """Return whether an event there has happened: the host asks, and does not wait."""
        return True

    def host_waits(self, mark: Any) -> None:
        """The host waits until the device has come there."""

    def posted(self, group: Any, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Any:
        """A communicator reads and writes tensors once the current stream has come here; return the end of that."""

    def stream_waits(self, stream: Stream, mark: Any) -> None:
        """A stream waits for an event, or for the end of a communication."""


observer = Observer()


class Stream:
    """A queue of the device. What is queued runs at once; only observers are told what a real one would wait for."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.cuda_stream = len(streams)
        streams.append(self)

    def __str__(self) -> str:
        return f"stream {self.cuda_stream}" if self.cuda_stream else "the stream"

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.pop()


streams: list[Stream] = []
"""All that were made, the default one first."""
_entered = [Stream()]
"""The current one is the last. Threads share it: those of autograd compute where the forward pass did."""


def current_stream(device: Any = None) -> Stream:
    """Return the stream that operations are queued in."""
    return _entered[-1]


class Event:
    """A place in a queue. Copies to the host before it arrive when somebody asks for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.place: int | None = None
        self.mark: Any = None

    def record(self, stream: Stream | None = None) -> None:
        self.place, self.mark = device_module().queued(), observer.mark(stream or current_stream())

    def query(self) -> bool:
        reached = self.place is None or observer.is_reached(self.mark)
        if reached and self.place is not None:
            device_module().deliver(self.place)
        return reached

    def synchronize(self) -> None:
        if self.place is not None:
            observer.host_waits(self.mark)
            device_module().deliver(self.place)

    def wait(self, stream: Stream | None = None) -> None:
        if self.place is not None:
            observer.stream_waits(stream or current_stream(), self.mark)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Work:
    """A collective or a batch of messages; only the device waits for it."""

    def __init__(self, works: list[Any], mark: Any = None) -> None:
        self.works = works
        self.mark = mark

    def wait(self, timeout: Any = None) -> bool:
        if self.mark is not None:
            observer.stream_waits(current_stream(), self.mark)
        return self.arrive()

    def arrive(self) -> bool:
        """Let the bytes arrive, although the stream waits for nothing."""
        return all(work.wait() for work in self.works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=0, max_ctas=0)


def synchronize(device: Any = None) -> None:
    """Let all copies to the host arrive."""
    for stream in streams:
        stream.synchronize()


def install() -> None:
    """Make this process, into which the device was preloaded, one with CUDA and NCCL."""
    sham = device_module()

    def index_of(device: Any) -> int:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return sham.current_device() if found.index is None else found.index

    def exchange(index: int) -> int:
        before = sham.current_device()
        sham.set_device(before if index < 0 else index)
        return before

    properties = SimpleNamespace(name="sham", major=9, minor=0, total_memory=2**34, multi_processor_count=1)
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": sham.device_count,
        "current_device": sham.current_device,
        "set_device": lambda device: sham.set_device(index_of(device)),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": lambda device=None: SimpleNamespace(
            **vars(properties), pci_domain_id=0, pci_bus_id=index_of(device), pci_device_id=int(os.environ["RANK"])
        ),
        "get_device_name": lambda device=None: "sham",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args, **options: True,
        "is_current_stream_capturing": lambda: False,
        "current_stream": current_stream,
        "default_stream": lambda device=None: streams[0],
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (2**33, 2**34),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": lambda seed: None,  # the generator is that of the CPU, which is seeded too
        "manual_seed_all": lambda seed: None,
        "_sleep": lambda cycles: time.sleep(cycles / 1.5e9),
        "Stream": Stream,
        "Event": Event,
    }.items():
        setattr(torch.cuda, name, value)
    _install_storages(sham.resize_storage)
    _install_nccl(sham.on_cpu)


def _install_storages(resize_on_device: Callable[[Any, int], None]) -> None:
    """Let storages of the device be resized, as FSDP2 does, and copied, as `copy.deepcopy` of a model does."""
    storages: Any = torch.UntypedStorage
    resize, clone = storages.resize_, storages.clone

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        resize_on_device(storage, size)
        return storage

    def cloned(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    storages.resize_, storages.clone = resized, cloned


def _install_nccl(on_cpu: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let gloo carry what NCCL would: the same memory, labelled as the CPU's."""
    from dsgdac_accel.distributed.transport import Nccl

    new_group, init = dist.new_group, dist.init_process_group

    def made(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, timeout=timeout, backend="gloo")

    def initialized(backend: Any = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        init("gloo", *args, **options)

    def batch(operations: list[Any]) -> list[Work]:
        receives_first = sorted(operations, key=lambda op: op.op is dist.isend)
        ends = [("group_dst" if op.op is dist.isend else "group_src", op) for op in receives_first]
        sends, receives = ([op.tensor for op in operations if (op.op is dist.isend) == sent] for sent in (True, False))
        mark = observer.posted(operations[0].group, sends, receives)
        works = [op.op(on_cpu(op.tensor.detach()), group=op.group, **{end: op.group_peer}) for end, op in ends]
        return [Work(works, mark)]

    def on_gloo(collective: Callable[..., Any], memory: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
            target, *_ = [*args, *options.values()]  # the first one gets the result
            tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
            mark = observer.posted(options.get("group"), tensors, tree_leaves(target)) if tensors else None
            args, options = tree_map_only(torch.Tensor, lambda tensor: memory(tensor.detach()), (args, options))
            work = Work([collective(*args, async_op=True, **options)], mark)
            return work if async_op else work.wait()

        return call

    dist.new_group, dist.init_process_group, dist.batch_isend_irecv = made, initialized, batch
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            memory = (lambda tensor: on_cpu(tensor).view(-1)) if name in _OF_ANY_SHAPE else on_cpu
            setattr(dist, name, on_gloo(getattr(dist, name), memory))
    dist.ProcessGroupNCCL = SimpleNamespace(Options=_Options)  # type: ignore[misc, assignment]
    Nccl.coalesces = lambda self, handle: True  # type: ignore[method-assign]
    _install_gathering_of_shards(on_cpu)


def _install_gathering_of_shards(on_cpu: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let gloo carry what DTensors gather."""
    functional = torch.ops._c10d_functional

    def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
        gathered = functional.all_gather_into_tensor(on_cpu(tensor.detach()), size, group)
        return functional.wait_tensor(gathered).to(tensor.device)

    _LIBRARY.impl("all_gather_into_tensor", all_gather, "CUDA")
