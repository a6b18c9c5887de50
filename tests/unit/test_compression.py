"""What is sent in fewer bytes: how near it is, and that both sides of a pair stay together."""

from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsgdac_accel import GossipConfig, Mixer, WorkerGroup
from dsgdac_accel.core import compression, formats
from dsgdac_accel.core.compression import Edge, Rounding
from dsgdac_accel.core.formats import FORMATS
from dsgdac_accel.topology import Topology, build_topology
from tests.kernel_launches import KernelLaunches
from tests.rounding import COARSE, DEFINITIONS

SIZES = (1, 255, 256, 257, 3000, 2**17 - 1, 2**17, 2**18 + 300)  # a CPU works on pieces of 2**17


def values_of(form, message, size):
    values = torch.empty(size, dtype=torch.float64)
    form.read(message, 0, values)
    return values


def sent(form, x, reference):
    message = form.message(x)
    Rounding(form, x).encode(x, reference, message)
    return message


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_relative_to_the_difference(name, dtype, size):
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(size)
    x = 100 + torch.randn(size, generator=generator, dtype=dtype)
    reference = (x + 0.1 * torch.randn(size, generator=generator, dtype=dtype)).bfloat16()
    wanted = x.double() - reference.double()
    error = (values_of(form, sent(form, x, reference), size) - wanted).abs()
    if name == "bf16":
        assert (error <= wanted.abs() * 2**-8).all()
    else:
        padded = torch.nn.functional.pad(wanted.abs(), (0, -size % 256)).view(-1, 256)
        bound = padded.amax(1).repeat_interleave(256)[:size] / 254
        assert (error <= bound * 1.001).all()


def test_messages_have_the_bits_that_formats_name():
    x = torch.zeros(1_000_000)
    for name, bits in {"bf16": 16, "int8": 8.125, "int4": 4.125, "int2": 2.125}.items():
        assert FORMATS[name].bits == bits
        assert FORMATS[name].message(x).nbytes * 8 / len(x) == pytest.approx(bits, rel=1e-3)
    assert {"full", *FORMATS} == set(get_args(get_type_hints(GossipConfig)["comm_dtype"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 1023, 2**17 + 300])
def test_coarse_formats_round_as_their_definition_says(size, dtype):
    generator = torch.Generator().manual_seed(size)
    # Rows of every kind: of a few large values, of zeros, of one value, and of values that are nearly 0.
    x = torch.randn(size, generator=generator, dtype=dtype).pow_(3)
    x[300:700], x[700:1000], x[1000:1023] = 0.0, 1e-35, 3.0
    for name in COARSE:
        found = values_of(FORMATS[name], sent(FORMATS[name], x, torch.zeros_like(x)), size)
        torch.testing.assert_close(found, DEFINITIONS[name](x.double()), rtol=1e-5, atol=0, msg=name)


@given(
    st.lists(
        st.floats(-(2.0**40), 2.0**40, width=32).filter(lambda v: v == 0 or abs(v) > 1e-15), min_size=1, max_size=700
    ),
    st.sampled_from(COARSE),
)
@settings(max_examples=60, deadline=None)
def test_coarse_messages_leave_no_more_than_there_was(values, name):
    x = torch.tensor([1.0, *values])
    q = values_of(FORMATS[name], sent(FORMATS[name], x, torch.zeros_like(x)), len(x))
    assert (q[x == 0] == 0).all()
    for part, rounded in zip(x.double().split(256), q.split(256), strict=True):
        left = (part - rounded).norm()
        assert left < part.norm() or left == part.norm() == 0
        assert part @ rounded <= part.square().sum() * (1 + 1e-6)
    assert (x.double() - q).norm() <= x.double().norm()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("edges", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_the_difference_of_the_messages_is_measured_and_added(name, edges, apart):
    form = FORMATS[name]
    for size in SIZES:
        rounding = Rounding(form, torch.empty(size))
        out = torch.randn(size)  # holds the difference to workers of this process, or what was sent
        zero = torch.zeros(size, dtype=torch.bfloat16 if form.is_fine else None)
        met = [
            Edge(0.25 + k, zero.clone(), sent(form, torch.randn(size), zero), sent(form, torch.randn(size), zero))
            for k in range(edges)
        ]
        wanted = sum(
            e.weight * (values_of(form, e.theirs, size) - values_of(form, e.mine, size)) for e in met
        ) + (out.double() if apart else 0)  # fmt: skip
        assert float(rounding.advance(met, out, apart)) == pytest.approx(float(wanted.square().sum()), rel=1e-4)
        for edge in met:
            middle = (values_of(form, edge.mine, size) + values_of(form, edge.theirs, size)) / 2
            torch.testing.assert_close(edge.reference.double(), middle, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(name, broken):
    form = FORMATS[name]
    x = torch.randn(1000)
    x[500] = broken
    reference = torch.zeros(1000, dtype=torch.bfloat16)
    theirs, mine = sent(form, x, reference), sent(form, torch.randn(1000), reference)
    for edge in (Edge(1.0, reference, mine, theirs), Edge(1.0, reference, theirs, mine)):
        assert not torch.isfinite(Rounding(form, x).advance([edge], torch.empty(1000)))


@pytest.mark.parametrize("name", FORMATS)
def test_values_with_squares_beyond_float32_arrive(name):
    x = torch.ones(300)
    x[0] = 1e30
    arrived = values_of(FORMATS[name], sent(FORMATS[name], x, torch.zeros_like(x)), 300)
    assert arrived.isfinite().all()
    assert float(arrived[0]) == pytest.approx(1e30, rel=0.1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-44])
def test_blocks_of_next_to_nothing_arrive_as_such(name, value):
    form = FORMATS[name]
    x = torch.full((300,), value)
    arrived = values_of(form, sent(form, x, torch.zeros(300, dtype=torch.bfloat16)), 300)
    assert (arrived.abs() <= 2 * value).all()


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 600), st.integers(0, 2**31), st.floats(1e-6, 1e3))
@settings(max_examples=60, deadline=None)
def test_both_sides_hold_the_same_reference_and_take_opposite_steps(name, size, seed, apart):
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(size, generator=generator)
    a, b = (middle + apart * torch.randn(size, generator=generator) for _ in range(2))
    mine, theirs = torch.zeros(2, size, dtype=torch.bfloat16 if form.is_fine else None)
    rounding = Rounding(form, a)
    for _ in range(4):
        from_a, from_b = sent(form, a, mine), sent(form, b, theirs)
        here, there = Edge(1.0, mine, from_a, from_b), Edge(1.0, theirs, from_b, from_a)
        steps = torch.zeros(size), torch.zeros(size)
        assert torch.equal(rounding.advance([here], steps[0]), rounding.advance([there], steps[1]))
        assert torch.equal(mine, theirs)
        assert torch.equal(steps[0], -steps[1])
    off = (mine.double() - (a.double() + b.double()) / 2).abs().max()
    largest = max(float(a.abs().max()), float(b.abs().max()))
    assert off <= largest * 2**-6 or not form.is_fine


def test_directed_rounds_are_refused():
    cycle = torch.eye(3).roll(1, 0) / 2 + torch.eye(3) / 2
    group = SimpleNamespace(size=3, members=SimpleNamespace(size=3, rank=0))
    with pytest.raises(ValueError, match=r"comm_dtype='bf16'.*directed rounds"):
        Mixer(nn.Parameter(torch.zeros(1)), Topology.from_matrices([cycle]), group, comm_dtype="bf16")


def test_alone_nothing_is_sent_or_held():
    mixer = Mixer([torch.nn.Parameter(torch.ones(3))], build_topology("ring", 1), WorkerGroup(torch.device("cpu")),
                  comm_dtype="int8")  # fmt: skip
    mixer.add(mixer.consensus_update(1.0))
    assert mixer.copies.received == mixer.copies.sent == []
    assert mixer.compressor is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_mixed_dtypes_save_launches_and_change_no_bit(name, dtype, monkeypatch):
    torch.manual_seed(0)
    size = 12 * 256
    x, y = torch.randn(2, size, dtype=dtype)
    x[300:600], y[300:600] = 0.0, 1e-42
    y[700] = torch.inf
    y[1300] = torch.nan

    def exchanged(mixes):
        for module in (compression, formats):
            monkeypatch.setattr(module, "mixes_dtypes", lambda device: mixes)
        rounding, difference = Rounding(FORMATS[name], x), torch.empty(size, dtype=dtype)
        edge = Edge(1.0, torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16(), None, None)
        with KernelLaunches(ignored=(torch.ops.aten.zeros,)) as launched:
            edge.mine, edge.theirs = (sent_with(rounding, value, edge.reference) for value in (x, y))
            square = rounding.advance([edge], difference)
        return [edge.mine, edge.theirs, edge.reference, square, difference], launched.on(size)

    (separate, many), (mixed, few) = exchanged(False), exchanged(True)
    assert (many, few) == {"bf16": (14, 10), "int8": (24, 16)}[name], "passes over a bucket"
    for one, other in zip(separate, mixed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def sent_with(rounding, x, reference):
    message = rounding.format.message(x)
    rounding.encode(x, reference, message)
    return message
