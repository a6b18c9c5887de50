"""Layouts and refusals of the flat buffers, in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from dsgdac_accel.core.buckets import ALIGNMENT, FlatParameters, as_parameter_list, extent

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
    for buffer in flat.buffers:
        for view in buffer.views:
            assert view.storage_offset() * view.element_size() % ALIGNMENT == 0
        buffer.data.add_(1.0)
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter, value + 1.0), "the parameter is a view of the buffer"
    assert not flat.moved()


@given(laid_out())
def test_extent_is_the_memory_between_the_first_and_the_last_element(parameter):
    offsets = torch.arange(10_000).as_strided(parameter.shape, parameter.stride())
    assert extent(parameter) == (int(offsets.max()) + 1 if parameter.numel() else 0)


def test_interleaved_slices_of_one_tensor_are_separate_parameters():
    base = torch.arange(10.0)
    even, odd = Parameter(base[::2]), Parameter(base[1::2])
    FlatParameters([even, odd])
    assert even.tolist() == [0, 2, 4, 6, 8]
    assert odd.tolist() == [1, 3, 5, 7, 9]


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
        FlatParameters(parameters)


def test_a_refusal_names_the_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    names = {id(p): name for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"1\.weight"):
        FlatParameters(model.parameters(), names)


@pytest.mark.parametrize("nonsense", [3, "weights", [1.0], [{"lr": 0.1}], None])
def test_only_parameters_are_taken(nonsense):
    with pytest.raises(TypeError, match="parameter"):
        as_parameter_list(nonsense)


def test_changes_are_noticed():
    model = nn.Linear(3, 2)
    flat = FlatParameters(model.parameters())
    flat.remember_versions()
    assert flat.holds(list(model.parameters()))
    with torch.no_grad():
        model.bias.add_(1)
    assert [p is model.bias for p in flat.edited()] == [True]
    model.weight.data = model.weight.data.clone() + 1
    assert [p is model.weight for p, _ in flat.moved()] == [True]
    expected = model.weight.detach().clone()
    assert flat.bring_back() == []
    assert not flat.moved()
    assert torch.equal(model.weight, expected)
    assert not flat.holds([model.weight])
    model.weight = Parameter(model.weight.detach().clone())
    assert not flat.holds(list(model.parameters()))
