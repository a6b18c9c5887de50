"""Records where the host waits for the sham device, what it gives the device to do, and races between streams.

A real device works through its queues while the host goes on, and NCCL reads and writes on streams of its own. The sham
device does everything at once. So vector clocks tell what a real one may do at the same time: one for each stream, one
for each communicator, one for the host.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernel_launches import NO_KERNEL
from tests.sham_cuda import cuda

HOST = "the host"
_READS = {
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive", "unique_dim",
    "bincount", "repeat_interleave",
}  # fmt: skip
_COPIES = {"copy_", "_to_copy", "_foreach_copy_", "index_put_"}
"""Operations that also bring a single number to the device; others take it along with the launch."""
_UPLOADS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
_HELPERS = ("core/host_copy.py", "core/agreement.py", "distributed/watchdog.py", "wait_for_device")
_OURS = ("sham_cuda/recorder.py", "sham_cuda/cuda.py", "/contextlib.py")
_PAGE = 2**12

Span = tuple[int, int]
"""The first address, and the one behind the last."""


@dataclass(frozen=True)
class Access:
    """Bytes that an operation reads or writes."""

    begin: int
    end: int
    writes: bool
    stream: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} of {self.what} on {self.stream}"


class Timeline:
    """Tells which accesses to memory come after which, and finds those of the same bytes that nothing orders."""

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self._number = 0
        self._clocks: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By stream, the number of the last access of each stream that it comes after."""
        self._pages: defaultdict[int, list[Access]] = defaultdict(list)

    def mark(self, stream: str) -> Counter[str]:
        """Return the present end of a stream."""
        return self._clocks[stream].copy()

    def follow(self, stream: str, mark: Counter[str]) -> None:
        """Let what comes now on a stream come after `mark`."""
        self._clocks[stream] |= mark  # the larger number of each

    def has_passed(self, stream: str, mark: Counter[str]) -> bool:
        """Return whether the stream comes after `mark` already."""
        return mark <= self._clocks[stream]

    def access(self, stream: str, reads: Iterable[Span], writes: Iterable[Span], what: str) -> None:
        """Note what the host has queued for a stream, or has done itself."""
        self.follow(stream, self._clocks[HOST])
        self._number += 1
        self._clocks[stream][stream] = self._number
        for spans, is_write in ((reads, False), (writes, True)):
            for begin, end in spans:
                self._add(Access(begin, end, is_write, stream, self._number, what))

    def _add(self, new: Access) -> None:
        clock = self._clocks[new.stream]
        for page in _pages(new.begin, new.end):
            kept = []
            for old in self._pages.get(page, ()):
                ordered = old.number <= clock[old.stream]
                if not ordered and (old.writes or new.writes) and old.begin < new.end and new.begin < old.end:
                    self.races[f"{new}, beside a {old}"] += 1
                covered = new.begin <= old.begin and old.end <= new.end and (new.writes or not old.writes)
                if not (ordered and covered):
                    kept.append(old)
            if new.stream != HOST:  # what the host does comes before all that it queues later
                self._pages[page] = [*kept, new]

    def forget(self, begin: int, end: int) -> None:
        """Drop the accesses to memory that is freed."""
        for page in _pages(begin, end):
            left = [old for old in self._pages.pop(page, ()) if old.end <= begin or end <= old.begin]
            if left:
                self._pages[page] = left


def _pages(begin: int, end: int) -> range:
    return range(begin // _PAGE, (end - 1) // _PAGE + 1)


@dataclass
class Counted:
    """What happened in some part of a script."""

    waits: Counter[str] = field(default_factory=Counter)
    """Waits of the host by place, "core/mixer.py:120 add: copy_"."""
    launches: list[tuple[str, int]] = field(default_factory=list)
    """Operations of the device, with the bytes of the largest tensor."""

    @property
    def places(self) -> dict[str, int]:
        """Waits by file and function."""
        found: Counter[str] = Counter()
        for place, count in self.waits.items():
            file, function = place.split(": ")[0].rsplit(" ", 1)
            found[f"{file.rsplit(':', 1)[0]} {function}"] += count
        return dict(found)

    def launches_on(self, nbytes: int) -> int:
        """Return the number of launches that some tensor of so many bytes, or more, takes part in."""
        return sum(largest >= nbytes for _, largest in self.launches)


class Recorder(cuda.Observer):
    """Records inside `recording`. Races are found in all of it, waits and launches counted where `counting` is on.

    An event that was made before `next_step` has happened: the device is less than a step behind. Of any other one the
    host hears at first that it has not, and waits if it asks again.

    Args:
        on_wait: called whenever the host waits where it is counted.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self._on_wait = on_wait
        self._timeline = Timeline()
        self._counted: list[Counted] = []
        self._reached: Counter[str] = Counter()
        self._asked: set[frozenset[tuple[str, int]]] = set()
        self._thread = 0
        self._communicators: dict[int, str] = {}

    @property
    def races(self) -> list[str]:
        """Pairs of accesses that nothing orders."""
        return list(self._timeline.races)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what this thread does."""
        before, cuda.observer, self._thread = cuda.observer, self, threading.get_ident()
        cuda.device_module().note_freed(True)
        try:
            with _HiddenOperations(self), _Operations(self):
                yield self
        finally:
            cuda.device_module().note_freed(False)
            cuda.observer = before

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counted]:
        """Count waits and launches inside."""
        self._counted.append(Counted())
        try:
            yield self._counted[-1]
        finally:
            self._counted.pop()

    def next_step(self) -> None:
        """Begin a step: the device has done what is queued."""
        for stream in cuda.streams:
            self._reached |= self.mark(stream)

    # ---- events, streams and communicators

    def mark(self, stream: cuda.Stream) -> Counter[str]:
        return self._timeline.mark(str(stream))

    def is_reached(self, mark: Counter[str]) -> bool:
        if threading.get_ident() != self._thread:
            return True
        reached, place = mark <= self._reached or self._timeline.has_passed(HOST, mark), frozenset(mark.items())
        if not reached and place not in self._asked:
            self._asked.add(place)
            return False
        self.host_waits(mark)
        return True

    def host_waits(self, mark: Counter[str]) -> None:
        if threading.get_ident() != self._thread:
            return
        if not (mark <= self._reached or self._timeline.has_passed(HOST, mark)):
            self._count_wait("event")
        self._timeline.follow(HOST, mark)

    def posted(self, group: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Counter[str]:
        self._forget_freed()
        stream = self._communicators.setdefault(id(group), f"communicator {len(self._communicators)}")
        self._timeline.follow(stream, self.mark(cuda.current_stream()))
        self._timeline.access(stream, _spans(reads), _spans(writes), f"messages at {place()}")
        return self._timeline.mark(stream)

    def stream_waits(self, stream: cuda.Stream, mark: Counter[str]) -> None:
        self._timeline.follow(str(stream), mark)

    # ---- operations

    def ran(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation of torch."""
        name = func.overloadpacket.__name__
        if func.is_view or name in NO_KERNEL or func.namespace == "c10d":
            return
        self._forget_freed()
        reads, writes = _accessed(func, args, kwargs, result)
        tensors = [*reads, *writes]
        what = f"{name} at {place()}"
        if not any(tensor.is_cuda for tensor in tensors):
            self._timeline.access(HOST, _spans(reads), _spans(writes), what)
            return
        of_host = [tensor for tensor in tensors if not tensor.is_cuda and (tensor.dim() or name in _COPIES)]
        late = kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))
        is_copy = any(tensor.numel() and not (late and tensor.is_pinned()) for tensor in of_host)
        by_mask = name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        self._timeline.access(str(cuda.current_stream()), _spans(reads), _spans(writes), what)
        largest = max(tensor.nbytes for tensor in tensors)
        for counted in self._counted:
            counted.launches.append((name, largest))
        if is_copy or by_mask or name in _READS:
            self.blocks(name)

    def blocks(self, what: str) -> None:
        """Note that the host waits for all that is queued in the current stream."""
        self._count_wait(what)
        self._timeline.follow(HOST, self.mark(cuda.current_stream()))

    def host_reads(self, tensor: Tensor) -> None:
        """Note that the host reads the values of a tensor in its memory, past the operations of torch."""
        self._forget_freed()
        self._timeline.access(HOST, _spans([tensor]), (), f"values at {place()}")

    def _forget_freed(self) -> None:
        for begin, end in cuda.device_module().take_freed():
            self._timeline.forget(begin, end)

    def _count_wait(self, what: str) -> None:
        for counted in self._counted:
            counted.waits[f"{place()}: {what}"] += 1
            self._on_wait()


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # what it does with its shards follows
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not any(kind.__name__ == "FakeTensor" for kind in types):  # DTensors compute shapes with these
            self.recorder.ran(func, args, kwargs or {}, result)
        return result


class _HiddenOperations(TorchFunctionMode):
    """Notes what `_Operations` does not get to see."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.tolist, Tensor.numpy) and not args[0].is_cuda:
            self.recorder.host_reads(args[0])
        if func in _UPLOADS and result.is_cuda and not isinstance(args[-1], Tensor):
            self.recorder.blocks(func.__name__)
        return result


def place() -> str:
    """Return the place in the library that is running, "core/mixer.py:120 add", or else that in the script."""
    script = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        _, library, name = file.rpartition("/dsgdac_accel/")
        if library and not function.startswith("<") and name not in _HELPERS and function not in _HELPERS:
            return f"{name}:{frame.f_lineno} {function}"
        if not script and not library and "/torch/" not in file and not file.endswith(_OURS):
            script = f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno} {function}"
        frame = frame.f_back
    return script


def _accessed(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    arguments = {argument.name: argument for argument in func._schema.arguments}
    for name, value in {**dict(zip(arguments, args, strict=False)), **kwargs}.items():
        alias = arguments[name].alias_info
        chosen = writes if alias is not None and alias.is_write else reads
        chosen += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return reads, [*writes, *(leaf for leaf in new if not _in(leaf, writes))]


def _in(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _spans(tensors: Iterable[Tensor]) -> list[Span]:
    """Return where those tensors lie that the device can reach."""
    found = []
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.numel() and (tensor.is_cuda or tensor.is_pinned()):
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append((tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()))
    return found
