"""Layouts, refusals and changes of parameters, and the use of the receive buffers, in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from dsgdac_accel.core.buckets import Buckets, Use
from dsgdac_accel.core.edits import OF_PARAMETERS, block_checksums, parameters_between
from dsgdac_accel.core.flat_parameters import ALIGNMENT, FlatParameters, changing_alike
from dsgdac_accel.core.parameter_guard import MixedParameters, as_parameter_list, extent, refuse_unmixable
from dsgdac_accel.core.spare_buffers import SpareBuffers

shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def laid_out(draw):
    """A tensor of random shape, seen through a random permutation and slicing."""
    tensor = torch.randn(draw(shapes), dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    if tensor.ndim:
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        tensor = tensor[:: draw(st.integers(1, 3))]
    return Parameter(tensor)


@given(st.lists(laid_out(), min_size=1, max_size=6))
def test_adoption_keeps_values_shapes_strides_and_aligns(parameters):
    values = [p.detach().clone() for p in parameters]
    strides = [p.stride() for p in parameters]
    flat = FlatParameters(parameters)
    for parameter, value, stride in zip(parameters, values, strides, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.stride() == stride
    for bucket in flat.buckets:
        for view in bucket.views:
            assert view.storage_offset() * view.element_size() % ALIGNMENT == 0
        bucket.data.add_(1.0)
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter, value + 1.0), "the parameter is a view of the buffer"
        assert parameter.untyped_storage().nbytes() == extent(parameter) * parameter.element_size()
        assert parameter.storage_offset() == 0
    assert not flat.moved()


@given(laid_out())
def test_extent_is_the_memory_between_the_first_and_the_last_element(parameter):
    offsets = torch.arange(10_000).as_strided(parameter.shape, parameter.stride())
    assert extent(parameter) == (int(offsets.max()) + 1 if parameter.numel() else 0)


def test_interleaved_slices_of_one_tensor_are_separate_parameters():
    base = torch.arange(10.0)
    even, odd = Parameter(base[::2]), Parameter(base[1::2])
    refuse_unmixable([even, odd], {})
    FlatParameters([even, odd])
    assert even.tolist() == [0, 2, 4, 6, 8]
    assert odd.tolist() == [1, 3, 5, 7, 9]


def test_parameters_on_the_same_memory_share_a_place():
    first = Parameter(torch.ones(4))
    second, other = Parameter(first.data), Parameter(torch.zeros(4))
    flat = FlatParameters([first, second, other])
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()
    assert int(flat.buckets[0].data.count_nonzero()) == 4, "it is stored once"
    flat.release()
    assert first.data_ptr() == second.data_ptr()


BASE = torch.zeros(10)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([Parameter(torch.zeros(2, dtype=torch.bfloat16))], "mixed_precision='bf16'"),
        ([Parameter(torch.zeros(2, dtype=torch.float16))], "mixed_precision='bf16'"),
        ([Parameter(torch.zeros(2, dtype=torch.complex64))], "float32 or float64"),
        ([Parameter(torch.zeros(1).expand(5))], "clone"),
        ([Parameter(torch.zeros(2, device="meta"))], "meta"),
        ([nn.LazyLinear(3).weight], "run one batch"),
        ([Parameter(BASE[:6]), Parameter(BASE[4:])], "share part of their memory"),
        ([Parameter(BASE[::2]), Parameter(BASE[::4])], "share part of their memory"),
    ],
)
def test_what_cannot_be_mixed_exactly_is_refused(parameters, words):
    with pytest.raises(ValueError, match=words):
        refuse_unmixable(parameters, {})


def test_a_refusal_names_the_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    names = {id(p): name for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"1\.weight"):
        MixedParameters(model.parameters(), names).select(None)


@pytest.mark.parametrize("nonsense", [3, "weights", [1.0], [{"lr": 0.1}], None])
def test_only_parameters_are_taken(nonsense):
    with pytest.raises(TypeError, match="parameter"):
        as_parameter_list(nonsense)


def test_re_pointed_parameters_are_brought_back():
    model = nn.Linear(3, 2)
    flat = FlatParameters(list(model.parameters()))
    model.weight.data = model.weight.data.clone() + 1
    assert [p is model.weight for p, _ in flat.moved()] == [True]
    expected = model.weight.detach().clone()
    assert flat.bring_back() == []
    assert not flat.moved()
    assert torch.equal(model.weight, expected)
    model.weight.data = model.weight.data.double()
    assert [p is model.weight for p, _ in flat.bring_back()] == [True]


@pytest.mark.parametrize("sizes", [[1], [40, 3], [2**17, 5], [2**18 + 7, 5000], [2**21 + 2**14 + 40]])
def test_every_edit_changes_the_sum_of_its_block_alone(sizes):
    flat = FlatParameters([Parameter(torch.randn(size)) for size in sizes])
    (bucket,) = flat.buckets
    count, size = (rule(bucket.data.nbytes) for rule in (OF_PARAMETERS.count, OF_PARAMETERS.size))
    before = block_checksums([bucket.data])
    assert len(before) == count <= 130
    for parameter in flat.parameters:
        for place in (0, len(parameter) // 2, -1):
            kept = parameter.data[place].clone()
            parameter.data[place] = torch.nextafter(kept, torch.tensor(1e9))
            (block,) = (block_checksums([bucket.data]) != before).nonzero().flatten().tolist()
            assert any(found is parameter for found in parameters_between(bucket, block * size, (block + 1) * size))
            parameter.data[place] = kept
    assert torch.equal(block_checksums([bucket.data]), before)


def test_parameters_that_join_leave_or_thaw_are_noticed():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixed = MixedParameters(lambda: optimizer.param_groups)
    assert [len(mine) for mine in mixed.select(None)] == [1]
    assert not mixed.changed()
    model.bias.requires_grad_(True)
    assert mixed.changed()
    assert [len(mine) for mine in mixed.select(None)] == [2]
    model.bias.requires_grad_(False)
    assert not mixed.changed(), "it was trained, so the workers differ in it: it is mixed still"
    optimizer.param_groups[0]["params"][0] = Parameter(model.weight.detach().clone())
    assert mixed.changed()
    mixed.select(None)
    optimizer.param_groups[0]["params"].pop()
    assert mixed.changed()


# ---- the receive buffers have one use at a time


def test_a_converted_parameter_changes_as_much_as_the_view_that_it_left():
    x = Parameter(torch.ones(3))
    flat = FlatParameters([x])
    x.data = x.data.double()
    with changing_alike(flat.bring_back(), lambda parameter: "x"):
        flat.buckets[0].data.add_(0.5)
    assert (x.tolist(), x.dtype) == ([1.5] * 3, torch.float64)
    x.data = torch.ones(2)
    resized = changing_alike(flat.bring_back(), lambda parameter: "x")
    with pytest.raises(RuntimeError, match=r"x became \(2,\) after \(3,\)"), resized:
        pass


def reserved(*sizes: int) -> tuple[Buckets, list[Parameter]]:
    parameters = [Parameter(torch.full((size,), float(number))) for number, size in enumerate(sizes)]
    buckets = Buckets()
    buckets.lay_out([parameters])
    buckets.reserve([1])
    return buckets, parameters


ALLOWED = {
    Use.FREE: {Use.FREE, Use.RECEIVING, Use.UPDATE, Use.SCRATCH, Use.BACKUP, Use.RELEASED},
    Use.RECEIVING: {Use.RECEIVED, Use.FREE},
    Use.RECEIVED: {Use.UPDATE, Use.FREE},
    Use.UPDATE: {Use.FREE},
    Use.SCRATCH: {Use.FREE},
    Use.BACKUP: {Use.FREE},
    Use.RELEASED: set(),
}


@pytest.mark.parametrize("now", Use)
@pytest.mark.parametrize("then", Use)
def test_a_use_begins_only_where_the_last_one_has_ended(now, then):
    buckets, _ = reserved(3)
    buckets.use = now
    if then in ALLOWED[now]:
        buckets.claim(then)
        assert buckets.use is then
        return
    with pytest.raises(RuntimeError):
        buckets.claim(then)
    assert buckets.use is now


def test_the_backup_is_in_the_receive_buffers_and_comes_back_to_the_byte():
    buckets, (first, second) = reserved(3, 5)
    spare = SpareBuffers(buckets)
    spare.back_up()
    assert spare.backup[0][0] is buckets.received[0][0][0], "no memory of its own"
    for x in buckets.values(0):
        x.fill_(7.0)
    second.data = torch.zeros(5)
    with pytest.raises(RuntimeError, match="deployed average"):
        buckets.claim(Use.RECEIVING)
    spare.restore()
    assert (first.tolist(), second.tolist(), buckets.use) == ([0.0] * 3, [1.0] * 5, Use.FREE)


def test_a_backup_survives_new_receive_buffers():
    buckets, (x,) = reserved(3)
    spare = SpareBuffers(buckets)
    spare.back_up()
    x.data.fill_(7.0)
    buckets.reserve([2])
    spare.restore()
    assert x.tolist() == [0.0] * 3


def test_a_measurement_uses_the_receive_buffers_only_if_they_are_free():
    buckets, _ = reserved(3)
    spare = SpareBuffers(buckets)
    with spare.scratch(0) as scratch:
        assert scratch is buckets.received[0][0][0]
        with pytest.raises(RuntimeError, match="measurement"):
            buckets.claim(Use.RECEIVING)
    for use in (Use.RECEIVED, Use.UPDATE):
        buckets.use = use
        with spare.scratch(0) as scratch:
            assert scratch is not buckets.received[0][0][0]
        assert buckets.use is use


def test_buffers_smaller_than_buckets_hold_messages_alone():
    buckets, (x,) = reserved(4)
    buckets.reserve([1], lambda data: data.new_zeros(2))
    spare = SpareBuffers(buckets)
    spare.back_up()
    x.data.fill_(7.0)
    spare.restore()
    assert x.tolist() == [0.0] * 4
    with spare.scratch(0) as scratch:
        assert len(scratch) == len(buckets.values(0)[0])
