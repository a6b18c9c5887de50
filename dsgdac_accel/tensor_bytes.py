"""The bytes of tensors: contiguous, as a digest, and written to tensors that repeat memory."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COLUMNS = 1024
"""Words of 64 bits in a row."""
_CPU_ROWS, _OTHER_ROWS = 64, 8192
"""Rows hashed at a time: what fits into the cache of a CPU core, and 64 MiB elsewhere."""
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_PLAIN_VALUES = (type(None), bool, int, float, str, bytes, torch.dtype, Enum)
_MAX_DEPTH = 4  # bitsandbytes: parameter, quant_state, state2, its tensors


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in order as bytes, shape (numel * element_size,), on its device.

    The result shares memory with a contiguous tensor.
    """
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not own.numel():
        return torch.empty(0, dtype=torch.uint8, device=own.device)
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)  # a single element is contiguous with any stride


def as_words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of a dense tensor as int64 words, (numel * element_size // 8,), and the bytes that remain.

    Both are on the tensor's device.
    """
    octets = as_bytes(tensor)
    if octets.data_ptr() % 8 or octets.storage_offset() % 8:  # `view` looks at the offset
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    return octets[:whole].view(torch.int64), octets[whole:].clone()  # without the memory of the others


def on_host(scalars: Sequence[Tensor]) -> list[Any]:
    """Return the values of tensors of shape () and one dtype. The host waits once for those of one device."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist() if scalars else []


def bits_differ(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return for each two dense tensors of one dtype whether they have other elements. Waits like `on_host`."""
    differ = []
    for pair in pairs:
        (words, rest), (other_words, other_rest) = map(as_words, pair)
        same = (words.device, words.shape, rest.shape) == (other_words.device, other_words.shape, other_rest.shape)
        flag = (words != other_words).any() | (rest != other_rest).any() if same else words.new_ones(())
        differ.append(flag.bool())
    return on_host(differ)


def version_of(tensor: Tensor) -> int:
    """Return the number that operations in place count up; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def narrowed(tensor: Tensor, like: Tensor) -> Tensor:
    """Narrow `tensor` to one entry along dimensions that `like` expands: torch writes to no memory twice."""
    for dimension, stride in enumerate(like.stride()):
        if stride == 0 and like.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


# ---- digests


def is_plain(tensor: Tensor) -> bool:
    """Return whether its dtype, shape and elements are all of a tensor.

    False for tensor subclasses (torchao), and for parameters that keep tensors in attributes (bitsandbytes).
    """
    return type(tensor.data) is Tensor and not _attached(tensor)


def digest(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and every bit of a tensor, the same on all devices. Memory order does not count.

    The inner tensors of a subclass (torchao) and those in a parameter's attributes (bitsandbytes) count, too.

    The tensor stays on its device: sums of its words, weighted by fixed random keys, hash each row of 8 KiB, and
    SHA-256 joins the hashes of the rows. Over the choice of the keys, two different tensors have the same digest with a
    probability of 2^-33 at most (Lemire and Kaser 2014, Strongly universal string hashing is fast). That guards against
    accidents, not against forgery.

    Raises:
        ValueError: the tensor is sparse, quantized by torch, nested or without values (meta).

    >>> zero = torch.zeros(2)
    >>> digest(zero) == digest(zero.clone()), digest(zero) == digest(-zero)
    (True, False)
    """
    return finish_digests([begin_digest(tensor)])[0]


def begin_digest(tensor: Tensor) -> list[bytes | Tensor]:
    """Return what `finish_digests` needs of a tensor for its `digest`; the host does not wait for its device."""
    return list(_parts(tensor))


def finish_digests(begun: Sequence[list[bytes | Tensor]]) -> list[str]:
    """Return a digest for each result of `begin_digest`. The host waits once for all those of a device."""
    on_devices: dict[torch.device, list[Tensor]] = {}
    for part in itertools.chain.from_iterable(begun):
        if isinstance(part, Tensor):
            on_devices.setdefault(part.device, []).append(as_bytes(part))
    arrived = {
        device: iter(torch.cat(parts).cpu().split([len(part) for part in parts]))
        for device, parts in on_devices.items()
    }
    digests = []
    for parts in begun:
        found = hashlib.sha256()
        for part in parts:
            content = next(arrived[part.device]).numpy().tobytes() if isinstance(part, Tensor) else part
            found.update(len(content).to_bytes(8, "little"))
            found.update(content)
        digests.append(found.hexdigest())
    return digests


def _parts(value: Any, depth: int = 0) -> Iterator[bytes | Tensor]:
    """Yield what describes a value, in an order that is the same in all processes. Tensors stand for their bytes."""
    if isinstance(value, Tensor):
        yield from _parts_of_tensor(value, depth)
        return
    children = _children(value) if depth < _MAX_DEPTH else None
    yield (repr(value) if isinstance(value, _PLAIN_VALUES) else _type_name(value)).encode()
    for name, child in children or ():
        yield name.encode()
        yield from _parts(child, depth + 1)


def _parts_of_tensor(tensor: Tensor, depth: int) -> Iterator[bytes | Tensor]:
    yield f"{tensor.dtype} {list(tensor.shape)}".encode()
    if is_traceable_wrapper_subclass(tensor):
        inner, context = tensor.__tensor_flatten__()
        yield _type_name(tensor).encode()
        yield from _parts([getattr(tensor, name) for name in inner], depth)
        yield from _parts(context, depth)
        return
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is {kind}, and cannot be compared bit by bit. Load its values, or "
            f"make it dense."
        )
    if type(tensor.data) is not Tensor:
        raise ValueError(f"a {_type_name(tensor)} cannot be compared bit by bit. Convert it to an ordinary tensor.")
    words, rest = as_words(tensor)
    yield from _row_hashes(words)
    yield rest
    yield from _parts(_attached(tensor), depth) if _attached(tensor) else ()


def _row_hashes(words: Tensor) -> Iterator[Tensor]:
    """Yield sum_c k_c x_rc and sum_c l_c floor(x_rc / 2^32), mod 2^64, for the rows r of `words`, some rows at a time.

    Where two rows differ in the upper half of a word, the second sums are equal with
    a probability of 2^-33 at most; otherwise the first sums are. In the first one alone, the sign bits of two words
    could cancel.
    """
    first, second = _keys(words.device)
    whole = len(words) // _COLUMNS * _COLUMNS
    rows = _CPU_ROWS if words.device.type == "cpu" else _OTHER_ROWS
    blocks = [*(words[:whole].view(-1, _COLUMNS).split(rows) if whole else ()), words[whole:].view(1, -1)]
    for block in blocks if len(words) > whole else blocks[:-1]:
        columns = block.shape[1]
        sums = _times(block, first[:columns]), _times(block >> 32, second[:columns])
        yield torch.stack(sums)


def _times(rows: Tensor, key: Tensor) -> Tensor:
    """Return the products of rows with a vector, mod 2^64. CUDA has no matrix products of integers."""
    return torch.mv(rows, key) if rows.device.type == "cpu" else (rows * key).sum(1)


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """Return two keys, shape (2, columns): fixed bits, because torch's generators may change between versions.

    They stay on the device: the host would wait for every tensor while they are copied there.
    """
    bits = hashlib.shake_256(b"dsgdac_accel.digest").digest(2 * _COLUMNS * 8)
    return torch.from_numpy(numpy.frombuffer(bits, dtype="<i8").astype(numpy.int64)).view(2, _COLUMNS).to(device)


# ---- what a parameter keeps in attributes


def _attached(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter of another class that hold tensors."""
    own = {} if type(tensor) in _ORDINARY else getattr(tensor, "__dict__", {})
    return {name: value for name, value in own.items() if _holds_tensor(value)}


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    return depth < _MAX_DEPTH and any(_holds_tensor(child, depth + 1) for _, child in _children(value))


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the named values inside a container or an object; nothing for modules, functions and classes."""
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [(str(number), child) for number, child in enumerate(value)]
    if isinstance(value, (*_PLAIN_VALUES, nn.Module)) or callable(value):
        return []
    return sorted(getattr(value, "__dict__", {}).items())


def _type_name(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
