"""Digests tell tensors apart that differ in any bit, and no others."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsgdac_accel.tensor_bytes import as_bytes, digest, is_plain


def of_bits(*patterns):
    return torch.tensor([struct.unpack("<f", struct.pack("<I", bits))[0] for bits in patterns])


ROW = 1024
NUMBERS = torch.arange(3 * ROW + 5)
PAIRS = {
    "zeros of other signs": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "NaN with other payloads": (of_bits(0x7FC00000), of_bits(0x7FC00001)),
    "other dtype": (torch.zeros(2, dtype=torch.int32), torch.zeros(2)),
    "other shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "longer by a zero": (torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
    "two elements swapped": (NUMBERS, NUMBERS[[1, 0, *range(2, len(NUMBERS))]]),
    "two rows swapped": (NUMBERS, torch.cat([NUMBERS[ROW : 2 * ROW], NUMBERS[:ROW], NUMBERS[2 * ROW :]])),
    "last byte": (torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), torch.tensor([1, 2, 3, 4, 6], dtype=torch.uint8)),
    "opposite changes": (torch.tensor([5, 5]), torch.tensor([6, 4])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_any_difference_changes_the_digest(name):
    one, other = PAIRS[name]
    assert digest(one) != digest(other)
    assert (digest(one), digest(other)) == (digest(one.clone()), digest(other.clone()))


def test_no_two_signs_cancel():
    """In a sum of 64-bit words with keys, the highest bits of two words cancel for half of all keys."""
    zeros = torch.zeros(300)
    seen = {digest(zeros)}
    for first in range(0, 300, 7):
        for second in range(first + 1, 300, 11):
            changed = zeros.clone()
            changed[[first, second]] = -0.0
            seen.add(digest(changed))
    assert len(seen) == 1 + sum(len(range(first + 1, 300, 11)) for first in range(0, 300, 7))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]),
    st.integers(0, 40),
    st.integers(0, 3),
    st.integers(0, 2**20),
)
def test_the_digest_is_that_of_the_elements_and_not_of_their_memory(dtype, rows, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 2, (rows * 6 + offset,), generator=generator).to(dtype)
    own = memory[offset:].view(rows, 6)
    plain = digest(own.clone())
    assert digest(own) == plain
    assert digest(own.T.contiguous().T) == plain
    assert digest(nn.Parameter(own, requires_grad=False)) == plain
    if dtype.is_complex:
        assert digest(own.conj()) == digest(own.conj().resolve_conj())


def test_the_digest_stays_the_same_in_every_version():
    """Checkpoints hold it. The value was computed with integers of unlimited size, from the formula."""
    values = (torch.arange(ROW + 3) - 1000) * 987_654_321_987
    assert digest(values) == _by_the_formula(values.tolist(), "torch.int64")


def _by_the_formula(words, dtype):
    bits = hashlib.shake_256(b"dsgdac_accel.digest").digest(2 * ROW * 8)
    keys = [int.from_bytes(bits[place : place + 8], "little", signed=True) for place in range(0, len(bits), 8)]
    parts = [f"{dtype} [{len(words)}]".encode()]
    for start in range(0, len(words), ROW):
        row = words[start : start + ROW]
        halves = (row, keys[:ROW]), ([x >> 32 for x in row], keys[ROW:])
        sums = [sum(x * key for x, key in zip(half, of, strict=False)) % 2**64 for half, of in halves]
        parts.append(b"".join(found.to_bytes(8, "little") for found in sums))
    found = hashlib.sha256()
    for part in (*parts, b""):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


# ---- quantized weights


class QuantState:
    """As bitsandbytes keeps it: scales, their own quantization, and plain values."""

    def __init__(self, absmax, blocksize=64, nested=None):
        self.absmax, self.blocksize, self.state2 = torch.tensor(absmax), blocksize, nested


class Quantized(nn.Parameter):
    """A parameter whose scales are in an attribute."""

    def __new__(cls, state=None, owner=None):
        parameter = torch.Tensor._make_subclass(cls, torch.arange(8, dtype=torch.uint8), False)
        parameter.quant_state, parameter.module = state, owner
        return parameter


def test_the_state_of_a_quantized_weight_counts():
    one = Quantized(QuantState([1.0], nested=QuantState([2.0])), nn.Linear(2, 2))
    same = Quantized(QuantState([1.0], nested=QuantState([2.0])), nn.Linear(2, 2))
    assert digest(one) == digest(same), "the module that holds a weight is no part of it"
    others = [
        Quantized(QuantState([1.5], nested=QuantState([2.0]))),
        Quantized(QuantState([1.0], nested=QuantState([2.5]))),
        Quantized(QuantState([1.0], 32, QuantState([2.0]))),
        Quantized(),
    ]
    assert len({digest(one), *map(digest, others)}) == 5
    assert not is_plain(one)
    assert is_plain(others[-1])
    assert digest(others[-1]) == digest(torch.arange(8, dtype=torch.uint8))


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_what_has_no_bytes_of_its_own_is_refused(tensor):
    with pytest.raises(ValueError, match="cannot be compared"):
        digest(tensor)


def test_bytes_of_no_element_and_of_one():
    assert as_bytes(torch.empty(0, 3)).shape == (0,)
    assert as_bytes(torch.arange(4)[1::2][:1]).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]  # contiguous, with a stride of 2


def test_bytes_at_any_place_in_memory_have_a_digest():
    values = torch.arange(16, dtype=torch.uint8)
    for first in range(8):
        base = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=first)
        for offset in range(9):
            part = base[offset : offset + 16]
            part.copy_(values)
            assert digest(part) == digest(values)
