"""What is sent in fewer bytes: how near it is, and that both sides of a pair stay together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsgdac_accel import Mixer, WorkerGroup
from dsgdac_accel.compressed_exchange import CompressedExchange
from dsgdac_accel.compression import CODECS, advance, difference
from dsgdac_accel.topology import Topology, build_topology

SIZES = (1, 255, 256, 257, 3000, 2**20 - 1, 2**20, 2**20 + 300)


def values_of(codec, payload, size):
    return torch.cat(list(codec.chunks(payload, size))).double()


def sent(codec, x, reference):
    payload = codec.payload(x)
    codec.encode(x, reference, payload)
    return payload


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_relative_to_the_difference(name, dtype, size):
    codec = CODECS[name]()
    generator = torch.Generator().manual_seed(size)
    x = 100 + torch.randn(size, generator=generator, dtype=dtype)
    reference = (x + 0.1 * torch.randn(size, generator=generator, dtype=dtype)).bfloat16()
    wanted = x.double() - reference.double()
    error = (values_of(codec, sent(codec, x, reference), size) - wanted).abs()
    if name == "bf16":
        assert (error <= wanted.abs() * 2**-8).all()
    else:
        padded = torch.nn.functional.pad(wanted.abs(), (0, -size % 256)).view(-1, 256)
        bound = padded.amax(1).repeat_interleave(256)[:size] / 254
        assert (error <= bound * 1.001).all()


def test_bytes_are_a_half_and_about_a_quarter():
    x = torch.zeros(1_000_000)
    size = {name: kind().payload(x).nbytes / x.nbytes for name, kind in CODECS.items()}
    assert size["bf16"] == 0.5
    assert 0.25 < size["int8"] < 0.26


@pytest.mark.parametrize("name", CODECS)
def test_adding_a_message_adds_its_values(name):
    codec = CODECS[name]()
    for size in SIZES:
        payload = sent(codec, torch.randn(size), torch.zeros(size, dtype=torch.bfloat16))
        x = torch.randn(size)
        expected = x.double() + 0.375 * values_of(codec, payload, size)
        codec.add(x, payload, 0.375)
        torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(name, broken):
    codec = CODECS[name]()
    x = torch.randn(1000)
    x[500] = broken
    reference = torch.zeros(1000, dtype=torch.bfloat16)
    theirs, mine = sent(codec, x, reference), sent(codec, torch.randn(1000), reference)
    assert not torch.isfinite(torch.cat(list(difference(codec, mine, theirs, 1000)))).all()


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 600), st.integers(0, 2**31), st.floats(1e-6, 1e3))
@settings(max_examples=60, deadline=None)
def test_both_sides_hold_the_same_reference_and_it_follows_them(name, size, seed, apart):
    codec = CODECS[name]()
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(size, generator=generator)
    a, b = (middle + apart * torch.randn(size, generator=generator) for _ in range(2))
    mine, theirs = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    for _ in range(4):
        from_a, from_b = sent(codec, a, mine), sent(codec, b, theirs)
        advance(codec, mine, from_a, from_b)
        advance(codec, theirs, from_a, from_b)
        assert torch.equal(mine, theirs)
    off = (mine.double() - (a.double() + b.double()) / 2).abs().max()
    largest = max(float(a.abs().max()), float(b.abs().max()))
    assert off <= largest * 2**-6


def test_directed_rounds_and_other_dtypes_are_refused():
    group = WorkerGroup(torch.device("cpu"))
    cycle = torch.eye(3).roll(1, 0) / 2 + torch.eye(3) / 2
    with pytest.raises(ValueError, match="comm_dtype='bf16' needs symmetric rounds"):
        CompressedExchange(group, Topology.from_matrices([cycle]), [[torch.zeros(3)]], CODECS["bf16"]())
    half = [[torch.zeros(3, dtype=torch.bfloat16)]]
    with pytest.raises(ValueError, match="comm_dtype='int8' is for parameters in float32 or float64"):
        CompressedExchange(group, build_topology("ring", 3), half, CODECS["int8"]())


def test_alone_nothing_is_sent_or_held():
    mixer = Mixer([torch.nn.Parameter(torch.ones(3))], build_topology("ring", 1), WorkerGroup(torch.device("cpu")),
                  comm_dtype="int8")  # fmt: skip
    mixer.finish(1.0)
    mixer.apply()
    assert mixer.exchange.held_bytes == 0
