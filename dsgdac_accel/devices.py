"""Decides which kinds of devices workers can train on, and asks accelerators for more than tensor operations.

Several processes need a backend that sends between neighbors: gloo on CPU, NCCL on CUDA. A single process, with any
number of virtual workers, may use any accelerator that `torch.accelerator` names and on which the core's memory layout
works, see `refuse_unsuitable`. Only CUDA is read late, by pinned copies and events; the host waits for all others.

No other file of the library names `torch.cuda` or pinned memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend for parameters between processes, by type of device."""
_YES, _NO = ("1", "true", "t", "yes", "y", "on"), ("", "0", "false", "f", "no", "n", "off")


def refuse_unsuitable(device: torch.device) -> None:
    """Raise ValueError unless the workers of one process can gossip on a device of this type."""
    if device.type in BACKENDS:
        return
    problem = _shortcoming(device.type)
    if problem:
        raise ValueError(
            f"gossip cannot run on '{device}': {problem}. Train on CPU or CUDA (cpu=True, or ACCELERATE_USE_CPU=true)."
        )


@functools.cache
def _shortcoming(kind: str) -> str | None:
    """Return why a single process cannot gossip on this type of device, found out by trying; None if it can."""
    try:
        exact = float(torch.ones(4, device=kind).double().sum())
    except Exception as error:  # not built in, no such device, no float64: each has an error of its own
        return f"it does not sum in float64, which averages need ({_first_line(error)})"
    return None if exact == 4.0 else "its float64 sums are wrong"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def is_on(device: torch.device, expected: torch.device) -> bool:
    """Return whether a tensor's device is the expected one; without an index, any of its type.

    >>> is_on(torch.device("cuda:1"), torch.device("cuda:0")), is_on(torch.device("cuda:1"), torch.device("cuda"))
    (False, True)
    """
    # Accelerate calls the only CPU of a process cpu:0, its tensors cpu.
    return device.type == expected.type and (device.type == "cpu" or expected.index in (None, device.index))


def cpu_is_demanded(variables: Mapping[str, str]) -> bool:
    """Return whether the environment asks Accelerate for the CPU, in any spelling that Accelerate accepts.

    Raises ValueError for a value that is neither yes nor no.

    >>> cpu_is_demanded({"ACCELERATE_USE_CPU": "Yes"}), cpu_is_demanded({})
    (True, False)
    """
    value = variables.get("ACCELERATE_USE_CPU", "")
    if value.lower() not in (*_YES, *_NO):
        raise ValueError(f"ACCELERATE_USE_CPU must be true or false; got {value!r}.")
    return value.lower() in _YES


def accelerator_streams() -> tuple[str, Any] | None:
    """Return type and module ("cuda" and torch.cuda) of the accelerator in use; None if none is initialized.

    The module has `get_rng_state`, `set_rng_state` and `manual_seed`, for its current device. Asking initializes
    nothing.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    initialized = getattr(module, "is_initialized", torch.accelerator.is_available)  # torch.mps has nothing to ask
    return (device.type, module) if initialized() else None


def identity_of(device: torch.device) -> str | None:
    """Return what tells one GPU of a machine from another, like NCCL the PCI address; None for other devices.

    Parts of one NVIDIA GPU (MIG) have the same address: NCCL does not connect them either.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:  # older torch
        return str(getattr(properties, "uuid", "")) or None
    address = f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}"
    return f"PCI {address}{_partition(device)}"


def _partition(device: torch.device) -> str:
    """Return which part of an AMD GPU a device is, as its number among all devices of the machine.

    RCCL connects partitions of an MI300X. They differ in the function of their PCI address, which torch does not tell.
    """
    if torch.version.hip is None:
        return ""
    number = str(indexed(device).index)
    hip = "HIP_VISIBLE_DEVICES" if os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    for variable in (hip, "ROCR_VISIBLE_DEVICES"):  # each counts within the next one
        visible = os.environ.get(variable, "").split(",")
        if number.isdigit() and visible != [""] and int(number) < len(visible):
            number = visible[int(number)].strip()
    return f", device {number}"


class Placement(NamedTuple):
    """The device on which a process trains."""

    kernel: str
    """The running kernel, which containers of a machine share."""
    host: str
    device: str
    gpu: str | None
    """`identity_of` the device."""
    mistake: str | None = None
    """`mistake_on` the device."""

    def __str__(self) -> str:
        return f"{self.device} of {self.host}"


def mistake_on(device: torch.device, processes: int) -> str | None:
    """Return how this process would use CUDA wrongly, with the way out; None if all is well.

    Args:
        device: of the parameters, with an index.
        processes: number of all processes.
    """
    if device.type != "cuda":
        return None
    current = torch.cuda.current_device()
    if current != device.index:  # batches of messages may hang, and random states are those of the current device
        return (
            f"the current CUDA device must be that of the model; cuda:{current} is current, and the model is on "
            f"{device}. Call torch.cuda.set_device({device.index}) first."
        )
    for variable in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        word = os.environ.get(variable, "")
        if processes > 1 and word.lower() in _YES:
            return f"{variable} must be off, or the host waits for every exchange; got {word!r}. Unset it."
    return None


def refuse_misplaced(placements: Sequence[Placement]) -> None:
    """Raise ValueError if two processes have one GPU, some train on CPU and others on CUDA, or one made a mistake.

    Args:
        placements: of all processes, by rank, the same on all of them. So all raise.
    """
    seen: dict[tuple[str, str], int] = {}
    for rank, placed in enumerate(placements):
        if placed.mistake is not None:
            raise ValueError(placed.mistake if len(placements) == 1 else f"worker {rank}: {placed.mistake}")
        if torch.device(placed.device).type != torch.device(placements[0].device).type:
            raise ValueError(
                f"all processes must train on the same kind of device; worker 0 is on {placements[0]} and worker "
                f"{rank} on {placed}. Give every process a GPU, or set ACCELERATE_USE_CPU=true for all."
            )
        if placed.gpu is None:
            continue
        first = seen.setdefault((placed.kernel, placed.gpu), rank)
        if first != rank:
            raise ValueError(
                f"every process needs a GPU of its own; workers {first} and {rank} have the same one ({placed.gpu}): "
                f"{placements[first]} and {placed}. Launch at most as many processes as GPUs (--num_processes, "
                f"CUDA_VISIBLE_DEVICES), or let each hold several workers (workers_per_process)."
            )


def default_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU without one, or if ACCELERATE_USE_CPU asks for it."""
    if cpu_is_demanded(os.environ) or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured: a replay would send nothing and keep gamma and the round."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "an optimizer step that gossips cannot be captured in a CUDA graph: the host chooses gamma and the "
            "neighbors of every step. Capture forward and backward only, and call optimizer.step() outside of it."
        )


# ---- streams, events and pinned memory


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index, which "cuda" alone does not name."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def using(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make this the current device of the thread inside. A new thread begins on cuda:0, where calls cost memory."""
    several = device.type in ("cuda", "xpu")
    return torch.get_device_module(device).device(device) if several else contextlib.nullcontext()


def event(device: torch.device, timed: bool = False) -> Any:
    """Return an event at the present end of the current stream of a CUDA device.

    A thread that waits for it sleeps; by default it would spin on a processor.
    """
    marked = torch.cuda.Event(enable_timing=timed, blocking=True)
    marked.record(torch.cuda.current_stream(device))
    return marked


def follow(last: Any, device: torch.device) -> Any:
    """Let the current stream of a CUDA device come after all that is queued in `last`, and return the current stream.

    Args:
        last: what this function returned before; None at first. If it is the current stream, nothing is queued.
        device: other devices have no streams, and None is returned.
    """
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    if last is not None and last != current:
        current.wait_stream(last)
    return current


def pinned(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory of the host into which CUDA copies by itself. Raises RuntimeError if the system refuses it."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done what is queued; other devices are not waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
