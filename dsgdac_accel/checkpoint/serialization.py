"""Training state as files without pickle: tensors as safetensors, everything else as JSON in the file's metadata.

A file can hold values only, never code, so an untrusted checkpoint cannot execute anything when it is read.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import math
import os
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dsgdac_accel.checkpoint.local_shards import LocalShard, local_shard
from dsgdac_accel.checkpoint.staging import staged
from dsgdac_accel.distributed.shards import is_sharded
from dsgdac_accel.tensor_bytes import as_bytes

FORMAT = 7
"""Version of the files and of the manifest, the only one that is read. Raise it when the layout of either changes."""
_LAST_READERS = {"5": "c05c811", "6": "18367cf"}
"""The last commits that read older formats."""


def reader_of(found: object) -> str:
    """Return which version of the library reads a format, for messages."""
    commit = _LAST_READERS.get(str(found))
    return f"commit {commit} of dsgdac_accel" if commit else "the version of dsgdac_accel that wrote it"


PARTIAL = ".partial"
"""Suffix of a file that is being written."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors."""

LOAD_ANOTHER = "Load another checkpoint."
"""Way out of most errors in reading."""

_TREE = "dsgdac_accel.tree"
_FORMAT = "dsgdac_accel.format"
_MAX_DEPTH = 100
_STORED_AS_IS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_ARRAY_KINDS = "biufc"  # numbers only; other dtypes may hold objects


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or the one to load is damaged, incomplete, or of another run."""


# ---- trees of state


@dataclass(frozen=True)
class Reference:
    """Stands in a worker's file for a tensor that is equal on all workers, and is kept outside of their files."""

    digest: str
    """As of `tensor_bytes.digest`; of a DTensor, with the part of it that was digested."""
    dtype: str
    shape: tuple[int, ...]
    stored: bool
    """Whether the checkpoint holds it, under its digest. Otherwise the model to load into must have it already."""


@dataclass
class Encoded:
    """A tree of state, ready to be written."""

    text: str
    """The tree as JSON, with the name of a tensor in place of each."""
    tensors: dict[str, Tensor]
    """Contiguous tensors on the CPU, by name."""
    wait: Callable[[], None] = lambda: None
    """Returns when their values are there; from a GPU they are on their way."""


def encode(state: Any, copy: bool = False) -> Encoded:
    """Split a tree into JSON and tensors.

    A tree consists of dict, OrderedDict, Counter, list and tuple. Its leaves are tensors, `Reference`, NumPy arrays and
    scalars, None, bool, int, float, str, bytes, torch.dtype, torch.device and torch.Size. `decode` returns all of them
    bit by bit, parameters as plain CPU tensors, tensors of a subclass that consists of plain ones (quantized optimizer
    states) as such, and DTensors as this rank's `LocalShard`.

    Args:
        state: the tree.
        copy: copy tensors that are on the CPU already, so that later changes of `state` do not reach the result.

    Raises:
        CheckpointError: the tree contains anything else; the message names its place.

    >>> encode({"step": 3, "momentum": [torch.ones(2)]}).text
    '{"step": 3, "momentum": [{"$tensor": "momentum/0"}]}'
    """
    encoder = _Encoder(copy)
    tree = encoder.encoded(state, ())
    on_host = staged(encoder.tensors)
    return Encoded(json.dumps(tree), on_host.tensors, on_host.wait)


def decode(encoded: Encoded) -> Any:
    """Return the tree that `encode` split. Its tensors share memory with `encoded.tensors`.

    A file cannot make the program import anything: the classes of tensors must have been imported already, as they are
    once the optimizer that uses them exists.

    Raises:
        CheckpointError: the text is not from `encode`, or a class of tensors is not there.
    """
    encoded.wait()
    try:
        return _decoded(json.loads(encoded.text), encoded.tensors)
    except CheckpointError:
        raise
    except Exception as error:  # a forged tree can lead to any error
        raise CheckpointError(
            f"the saved state is not a tree of values as this library writes it ({type(error).__name__}: {error})."
        ) from error


class _Encoder:
    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.tensors: dict[str, Tensor] = {}
        """Contiguous tensors, on their devices."""

    def encoded(self, value: Any, path: tuple) -> Any:
        kind = type(value)
        as_is = kind in (bool, str) or (kind is int and value.bit_length() <= 1024)
        if value is None or as_is or (kind is float and math.isfinite(value)):
            return value
        number = isinstance(value, numpy.generic) and value.dtype.kind in _ARRAY_KINDS
        if number or kind in _VALUES:
            tag, written, _ = _VALUES[numpy.generic if number else kind]
            return {tag: written(value)}
        if len(path) > _MAX_DEPTH:
            raise CheckpointError(
                f"the state is nested deeper than {_MAX_DEPTH} levels, or contains itself: {named(path)}. Let its "
                f"state_dict() give a flatter tree."
            )
        if kind is list:
            return [self.encoded(item, (*path, number)) for number, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encoded(item, (*path, number)) for number, item in enumerate(value)]}
        if kind in _DICTS:
            return self._encoded_dict(value, path)
        if isinstance(value, Tensor):
            return self._encoded_tensor(value, path)
        if kind is numpy.ndarray and value.dtype.kind in _ARRAY_KINDS:
            octets = numpy.frombuffer(bytearray(value.tobytes()), dtype=numpy.uint8)  # a copy, in C order
            return {"$array": [self._put(torch.from_numpy(octets), path), value.dtype.str, list(value.shape)]}
        raise CheckpointError(
            f"a checkpoint keeps tensors, arrays and plain values, without pickle; {named(path)} is a "
            f"{kind.__module__}.{kind.__qualname__}. Let its state_dict() give plain values instead."
        )

    def _encoded_dict(self, value: dict, path: tuple) -> Any:
        if any(isinstance(key, Tensor) for key in value):
            raise CheckpointError(
                f"keys of {named(path)} are tensors, which are found by their identity, and no other process has it. "
                f"Let its state_dict() give plain keys, such as the parameters' numbers."
            )
        items = [(key, self.encoded(item, (*path, key))) for key, item in value.items()]
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {_DICTS[type(value)]: [[self.encoded(key, (*path, "key")), item] for key, item in items]}

    def _encoded_tensor(self, value: Tensor, path: tuple) -> Any:
        if is_sharded(value):
            return self._encoded_shard(value, path)
        if is_traceable_wrapper_subclass(value) and not value.is_nested:
            return self._encoded_subclass(value, path)
        dense = value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
        if is_lazy(value) or not dense or type(value.data) is not Tensor:  # that of a Parameter is a plain tensor
            raise CheckpointError(
                f"a checkpoint keeps whole, dense tensors; {named(path)} is a {type(value).__name__} "
                f"({value.layout}, {value.dtype}, on {value.device}). Save it in another form."
            )
        own = value.detach().resolve_conj().resolve_neg()
        order = sorted(range(own.ndim), key=own.stride, reverse=True)
        if not own.is_contiguous() and own.permute(order).is_contiguous():
            # Keep the memory order: fused optimizers iterate over parameters and states in it at once.
            stored = self._encoded_values(own.permute(order), value, path)
            return {"$permuted": [stored, [order.index(dimension) for dimension in range(own.ndim)]]}
        return self._encoded_values(own.contiguous(), value, path)

    def _encoded_shard(self, value: Tensor, path: tuple) -> Any:
        try:
            shard = local_shard(value)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{named(path)} is a DTensor that a checkpoint cannot keep: {error}.") from error
        where = [list(shard.shape), list(shard.offsets), list(shard.dims), list(shard.placements)]
        return {"$shard": [self._encoded_tensor(shard.values, path), *where]}

    def _encoded_subclass(self, value: Any, path: tuple) -> Any:
        kind, (inner, context) = type(value), value.__tensor_flatten__()
        try:
            _tensor_class(kind.__module__, kind.__qualname__)
            shared = self.encoded(context, (*path, "context"))
        except CheckpointError as error:
            raise CheckpointError(
                f"a checkpoint keeps whole tensors, or tensors made of whole ones; {named(path)} is a "
                f"{kind.__name__}: {error}"
            ) from error
        parts = {name: self.encoded(getattr(value, name), (*path, name)) for name in inner}
        return {"$subclass": [kind.__module__, kind.__qualname__, parts, shared, list(value.shape), value.stride()]}

    def _encoded_values(self, own: Tensor, original: Tensor, path: tuple) -> Any:
        if self.copy and own.device.type == "cpu" and own.data_ptr() == original.data_ptr():
            own = own.clone()
        if own.dtype in _STORED_AS_IS:
            return {"$tensor": self._put(own, path)}
        return {"$cast": [self._put(as_bytes(own), path), str(own.dtype).removeprefix("torch."), list(own.shape)]}

    def _put(self, tensor: Tensor, path: tuple) -> str:
        # Names only have to be unique, since the tree refers to them. The path is for people who open the file.
        plain = "/".join(map(str, path)).encode("utf-8", "replace").decode() or "state"
        name, number = plain, 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{plain}#{number}"
        self.tensors[name] = tensor
        return name


def named(path: tuple) -> str:
    """Return how messages call the value at a path of a state."""
    return "the state itself" if not path else "state" + "".join(f"[{key!r}]" for key in path)


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decoded(item, tensors) for key, item in value.items()}
    (content,) = value.values()
    if tag in _DICTS.values():
        kind: Any = next(kind for kind, name in _DICTS.items() if name == tag)
        return kind({_decoded(key, tensors): _decoded(item, tensors) for key, item in content})
    if tag == "$tuple":
        return tuple(_decoded(item, tensors) for item in content)
    if tag == "$tensor":
        return tensors[content]
    if tag == "$permuted":
        stored, order = content
        return _decoded(stored, tensors).permute(order)
    if tag == "$cast":
        name, dtype, shape = content
        octets, dtype = tensors[name], _torch_dtype(dtype)
        # An empty tensor cannot be viewed. The shape must match the bytes, so a forged one allocates nothing.
        return (octets.view(dtype) if octets.numel() else torch.empty(0, dtype=dtype, device="cpu")).reshape(shape)
    if tag == "$array":
        name, dtype, shape = content
        return numpy.frombuffer(tensors[name].numpy().tobytes(), dtype=_number_dtype(dtype)).reshape(shape).copy()
    if tag == "$shard":
        return LocalShard(_decoded(content[0], tensors), *map(tuple, content[1:]))
    if tag == "$subclass":
        module, qualname, parts, context, shape, stride = (_decoded(part, tensors) for part in content)
        kind = _tensor_class(module, qualname)
        return kind.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(stride))
    _, _, read = next(found for found in _VALUES.values() if found[0] == tag)
    return read(content)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype


def _number_dtype(name: str) -> numpy.dtype:
    dtype = numpy.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"{name} is not a numeric dtype")
    return dtype


_VALUES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    # Python limits the length of decimal numbers that it converts, and JSON has neither NaN nor infinity.
    int: ("$int", hex, lambda text: int(text, 16)),
    float: (
        "$float",
        lambda value: struct.pack(">d", value).hex(),
        lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    ),
    bytes: ("$bytes", lambda value: binascii.b2a_base64(value, newline=False).decode(), binascii.a2b_base64),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch."), _torch_dtype),
    torch.device: ("$device", str, torch.device),
    torch.Size: ("$size", list, torch.Size),
    Reference: (
        "$reference",
        lambda value: [value.digest, value.dtype, list(value.shape), value.stored],
        lambda content: Reference(content[0], content[1], tuple(content[2]), content[3]),
    ),
    numpy.generic: (
        "$scalar",
        lambda value: [value.dtype.str, value.tobytes().hex()],
        lambda content: numpy.frombuffer(bytes.fromhex(content[1]), _number_dtype(content[0]))[0],
    ),
}
"""Values that JSON does not have: tag, to JSON and back."""


def _tensor_class(module: str, qualname: str) -> Any:
    """Return a class of tensors that are made of plain ones, by the name of its module and its own."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise CheckpointError(
            f"there is no tensor class {module}.{qualname} in this program. Import it, or make the optimizer that uses "
            f"it, at the top of a module."
        )
    return found


# ---- files


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint, as its manifest describes it."""

    name: str
    """Relative to the checkpoint's folder."""
    size: int
    """Bytes."""
    sha256: str


def write_whole(path: Path, parts: Iterable[Any]) -> tuple[int, str]:
    """Write a file that exists in full or not at all, even after a power failure. Returns its size and sha256."""
    partial = path.with_name(path.name + PARTIAL)
    size, digest = 0, hashlib.sha256()
    try:
        # Unbuffered: a process forked meanwhile would inherit the lock of a Python buffer as held.
        with partial.open("wb", buffering=0) as file:
            for part in parts:
                digest.update(part)
                size += len(part)
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def safetensors_parts(encoded: Encoded) -> Iterator[Any]:
    """Yield the bytes of a safetensors file without copying the tensors.

    `safetensors.torch.save_file` refuses tensors that share memory, and hashing its file would mean reading it again.
    """
    header: dict[str, Any] = {"__metadata__": {_FORMAT: str(FORMAT), _TREE: encoded.text, "format": "pt"}}
    place = 0
    for name, tensor in encoded.tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _STORED_AS_IS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, place + size],
        }  # fmt: skip
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the plain values of a state may take {MAX_HEADER_BYTES:,} bytes as JSON; these take {len(text):,}. "
            f"Give long lists of numbers as arrays or tensors."
        )
    yield struct.pack("<Q", len(text))
    yield text
    encoded.wait()
    for tensor in encoded.tensors.values():
        if tensor.numel():
            yield as_bytes(tensor).numpy().data


def read_state(folder: Path, file: SavedFile) -> Any:
    """Return the tree in a file of a checkpoint, after checking its size and sha256.

    Raises:
        CheckpointError: the file is missing, truncated, altered, or of another format.
    """
    path = folder / file.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}). {LOAD_ANOTHER}") from error
    if len(content) != file.size:
        raise CheckpointError(f"{path} has {len(content):,} bytes, and {file.size:,} were written. {LOAD_ANOTHER}")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise CheckpointError(f"{path} was altered since it was written: its sha256 differs. {LOAD_ANOTHER}")
    try:
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        metadata = header["__metadata__"]
        encoded = Encoded(metadata[_TREE], parse_safetensors(content))
        found = metadata[_FORMAT]
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path} is not a state file of this library ({error}). {LOAD_ANOTHER}") from error
    if found != str(FORMAT):
        raise CheckpointError(
            f"{path} has format {found}; this version reads format {FORMAT}. Load it with {reader_of(found)}."
        )
    return decode(encoded)
