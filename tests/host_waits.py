"""Counts where the host would wait for a GPU, on the CPU.

Every tensor counts as one of the device, except what `HostCopy.read` returns and what is computed from that alone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.distributed.group import WorkerGroup

_READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive")
_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)
_UPLOADS = (torch.tensor, torch.as_tensor, torch.from_numpy)


class HostWaits:
    """Inside `counted`, waits of this thread are counted by the place that waits.

    The device works through a queue. A `HostCopy` is there once the device has come to it: reading it waits, unless the
    host has waited for something later already, or it was made before `next_step`, a whole step ago.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        """Waits by file and function."""
        self.queued = 0
        """Operations and copies given to the device so far."""
        self._reached = 0
        self._step_began = 0
        self._host: dict[int, torch.Tensor] = {}
        self._made: dict[int, tuple[HostCopy, int]] = {}
        self._paused = False
        self.after_wait: Any = None
        """Called at each wait, if set."""

    @property
    def total(self) -> int:
        """All waits."""
        return sum(self.places.values())

    def next_step(self) -> None:
        """Begin a step: the device has all but finished the one before."""
        self._step_began = self.queued

    def take(self) -> dict[str, int]:
        """Return the counts and begin anew."""
        found, self.places = dict(self.places), Counter()
        return found

    @contextlib.contextmanager
    def counted(self) -> Iterator[HostWaits]:
        """Count inside."""
        begin, read, thread = HostCopy.__init__, HostCopy.read, threading.get_ident()
        gather = WorkerGroup.all_gather_object

        def gathered(group: WorkerGroup, *args: Any) -> list[Any]:
            outside, self._paused = self._paused, True  # objects are pickled and sent by the host
            try:
                answers = gather(group, *args)
            finally:
                self._paused = outside
            for leaf in tree_leaves(answers):
                if isinstance(leaf, torch.Tensor):
                    self.on_host(leaf)
            return answers

        def noted(copy: HostCopy, values: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            outside, self._paused = self._paused, True
            begin(copy, values, *args, **kwargs)
            self._paused = outside
            self.queued += 1
            self._made[id(copy)] = copy, self.queued

        def arrived(copy: HostCopy) -> torch.Tensor:
            place = self._made.get(id(copy), (copy, 0))[1]
            if place > max(self._reached, self._step_began) and threading.get_ident() == thread:
                self.wait(self.place_of_caller(), place)
            values = read(copy)
            self.on_host(values)
            return values

        HostCopy.__init__, HostCopy.read = noted, arrived  # type: ignore[method-assign, assignment]
        WorkerGroup.all_gather_object = gathered  # type: ignore[method-assign, assignment]
        try:
            with _Functions(self), _Operations(self):
                yield self
        finally:
            HostCopy.__init__, HostCopy.read = begin, read  # type: ignore[method-assign]
            WorkerGroup.all_gather_object = gather  # type: ignore[method-assign]

    def wait(self, place: str | None, until: int | None = None) -> None:
        """Count a wait."""
        if place is not None and not self._paused:
            self._reached = max(self._reached, self.queued if until is None else until)
            self.places[place] += 1
            if self.after_wait is not None:
                self.after_wait(place)

    def on_host(self, tensor: torch.Tensor) -> None:
        """Take a tensor for one of the host. It is kept, so that no other tensor gets its memory."""
        self._host[tensor.untyped_storage().data_ptr()] = tensor

    def off_host(self, tensor: torch.Tensor) -> None:
        """Take a tensor for one of the device again."""
        self._host.pop(tensor.untyped_storage().data_ptr(), None)

    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `tensors` that are on the host."""
        return [tensor for tensor in tensors if self.is_on_host(tensor)]

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host

    def place_of_caller(self) -> str | None:
        """Return file and function of the library that waits.

        None inside torch's optimizers and collectives of objects, which compute with tensors of the host.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if "/torch/optim/" in file or "/torch/distributed/" in file:
                return None
            ours = "/torch/" not in file and not file.endswith(("host_waits.py", "host_copy.py", "contextlib.py"))
            if ours or "/torch/amp/" in file:
                return f"{file.rsplit('/', 1)[-1]}:{frame.f_code.co_name}"
            frame = frame.f_back
        return "?"


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Only numbers of the host may stand beside tensors of the device, but for copies from one to the other.
        name = func.overloadpacket.__name__
        on_host = list(map(self.waits.is_on_host, tensors))
        of_host = any(on_host) and (all(on_host) or (name != "copy_" and any(t.dim() for t in self.waits.of(tensors))))
        if not of_host:
            self.waits.queued += 1
            by_mask = name in ("index", "index_put_") and any(t.dtype == torch.bool for t in tensors[1:])
            upload = name == "copy_" and on_host[-1] and tensors[-1].dim() > 0
            if name in _READS or by_mask or upload:
                self.waits.wait(self.waits.place_of_caller())
        result = func(*args, **kwargs)
        if of_host:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.waits.on_host(leaf)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `.to(tensor.device)` is no such thing, though that device is the CPU here.
        named = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
        down = func in _METHODS or (func is torch.Tensor.to and "cpu" in named)
        # A blocking copy from pageable memory also waits for everything before it.
        own = args[0] if args and isinstance(args[0], torch.Tensor) else None
        of_host = own is not None and self.waits.is_on_host(own)
        up = func in _UPLOADS and kwargs.get("device") is not None
        if of_host and func is torch.Tensor.to and not down:
            up = any(isinstance(value, torch.device) for value in (*args[1:], *kwargs.values()))
        empty = own is not None and own.numel() == 0
        if (up or (down and not of_host)) and not empty:
            self.waits.wait(self.waits.place_of_caller())
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and (down or (up and of_host)):
            result = result.detach().clone()  # another tensor, as between a GPU and the host
            self.waits.on_host(result) if down else self.waits.off_host(result)
        return result


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
