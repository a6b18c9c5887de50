"""What is mixed, the copies of it that are exchanged, and their use, in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from dsgdac_accel import Mixer, WorkerGroup, build_topology
from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.copies import ALIGNMENT, Copy, Layout
from dsgdac_accel.core.parameters import as_parameter_list, extent, refuse_unmixable
from dsgdac_accel.core.shown import Shown
from dsgdac_accel.core.slots import Slots

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
def test_copies_hold_values_at_aligned_places_and_give_them_back(parameters):
    values = [p.detach().clone() for p in parameters]
    copy = Copy(Layout(parameters))
    copy.read(parameters)
    for group, slots, buffer in zip(copy.views, copy.layout.slots, copy.buffers, strict=True):
        for view, slot in zip(group, slots, strict=True):
            assert torch.equal(view, values[slot])
            assert view.stride() == parameters[slot].stride()
            assert view.storage_offset() * view.element_size() % ALIGNMENT == 0
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert sum(buffer.nbytes for buffer in copy.buffers) == copy.layout.nbytes
    copy.add_to(parameters, 0.5)
    for parameter, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(parameter.detach(), 1.5 * value)
    for group, slots in zip(copy.views, copy.layout.slots, strict=True):
        for view, slot in zip(group, slots, strict=True):
            assert torch.equal(view, values[slot])


@given(laid_out())
def test_extent_is_the_memory_between_the_first_and_the_last_element(parameter):
    offsets = torch.arange(10_000).as_strided(parameter.shape, parameter.stride())
    assert extent(parameter) == (int(offsets.max()) + 1 if parameter.numel() else 0)


@pytest.mark.parametrize("as_laid_out", [True, False])
def test_what_is_added_is_skipped_on_the_device_for_every_layout(as_laid_out):
    tensors = [torch.randn(4, 3).T, torch.randn(10)[::2], torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    for values in (tensors, tensors[2:]):  # with a gap inside, and without
        copy = Copy(Layout(values))
        copy.read(values)
        for skip in (0.0, 1.0):
            given = [value.clone(memory_format=torch.preserve_format) for value in values]
            if skip:
                copy.buffers[0].fill_(torch.nan)
            copy.add_to(given, 0.3, torch.tensor(skip), as_laid_out)
            for value, other in zip(values, given, strict=True):
                torch.testing.assert_close(other, value if skip else 1.3 * value)


def test_what_left_or_was_converted_is_neither_read_nor_lost():
    values = [torch.ones(3), torch.full((2,), 2.0), torch.full((4,), 3.0)]
    copy = Copy(Layout(values))
    copy.read(values)
    copy.read([torch.full((3,), 7.0), None, values[2]])
    assert [view[0].item() for view in copy.views[0]] == [7.0, 2.0, 3.0]
    converted = torch.zeros(3, dtype=torch.float64)
    copy.add_to([converted, None, values[2]], 0.5)
    assert converted.tolist() == [3.5] * 3
    assert values[1].tolist() == [2.0] * 2


def test_interleaved_slices_of_one_tensor_are_separate_parameters():
    base = torch.arange(10.0)
    even, odd = Parameter(base[::2]), Parameter(base[1::2])
    refuse_unmixable([even, odd], {})
    slots = Slots([even, odd])
    slots.select(None)
    assert len(slots.of_workers[0]) == 2


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
        Slots(model.parameters(), names).select(None)


@pytest.mark.parametrize("nonsense", [3, "weights", [1.0], [{"lr": 0.1}], None])
def test_only_parameters_are_taken(nonsense):
    with pytest.raises(TypeError, match="parameter"):
        as_parameter_list(nonsense)


# ---- the list of what is mixed


def looked(slots: Slots) -> bool:
    slots.look()
    return slots.changed


def test_parameters_that_join_leave_or_thaw_are_noticed():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slots = Slots(lambda: optimizer.param_groups)
    slots.select(None)
    assert len(slots.of_workers[0]) == 1
    assert not looked(slots)
    model.bias.requires_grad_(True)
    assert looked(slots)
    slots.select(None)
    assert len(slots.of_workers[0]) == 2
    model.bias.requires_grad_(False)
    assert not looked(slots), "it was trained, so the workers differ in it: it is mixed still"
    optimizer.param_groups[0]["params"][0] = Parameter(model.weight.detach().clone())
    assert looked(slots)
    assert slots.has_newcomers()
    slots.select(None)
    optimizer.param_groups[0]["params"].pop()
    assert looked(slots)
    assert "removed or replaced" in slots.story()


CHANGES = {
    "re-pointed": (lambda a, b: setattr(a, "data", a.data.clone()), False),
    "dtype": (lambda a, b: setattr(a, "data", a.data.double()), True),
    "shape": (lambda a, b: setattr(a, "data", torch.zeros(3, 3)), True),
    "strides": (lambda a, b: setattr(a, "data", a.data.t().contiguous().t()), True),
    "sliced": (lambda a, b: setattr(a, "data", a.data[:2]), True),
    "strides in place": (lambda a, b: setattr(a, "data", a.data.view(2, 4).t()), True),
    "tied": (lambda a, b: setattr(a, "data", b.data), True),
}


@pytest.mark.parametrize("how", CHANGES)
def test_another_kind_of_memory_is_noticed_and_other_memory_is_not(how):
    first, second = Parameter(torch.ones(4, 2)), Parameter(torch.ones(4, 2))
    slots = Slots([first, second])
    slots.select(None)
    before = slots.code()
    change, noticed = CHANGES[how]
    change(first, second)
    assert looked(slots) == noticed
    assert (slots.code() != before) == noticed
    (values,) = slots.values()
    assert (values[0] is None) == (how in ("shape", "sliced"))
    if noticed:
        slots.select(None)
        assert not looked(slots)
        assert len(slots.of_workers[0]) == (1 if how == "tied" else 2)


# ---- mixing by one process


def two_workers(*parameters: Parameter, mix_every: int = 1) -> Mixer:
    half = len(parameters) // 2
    place = {id(p): number // half for number, p in enumerate(parameters)}
    group = WorkerGroup(torch.device("cpu"), 10)
    topology = build_topology("complete", 2)
    options = {"local_workers": 2, "worker_of": lambda p: place[id(p)], "mix_every": mix_every}
    return Mixer(list(parameters), topology, group, **options)


def step(mixer: Mixer, gamma: float = 1.0) -> None:
    mixer.add(mixer.consensus_update(gamma))
    mixer.start_exchange()


def test_memory_that_is_shared_is_added_to_once():
    tied = [Parameter(torch.zeros(4)), Parameter(torch.ones(4))]
    parameters = [tied[0], Parameter(tied[0].data), tied[1], Parameter(tied[1].data)]
    mixer = two_workers(*parameters)
    step(mixer, 0.5)
    assert [p[0].item() for p in parameters] == [0.25, 0.25, 0.75, 0.75]
    for other in (1, 3):
        parameters[other].data = parameters[other].data.clone()  # no longer tied
    step(mixer, 0.0)
    for one, other in ((0, 1), (2, 3)):
        parameters[one].data = parameters[other].data  # tied again
    step(mixer, 0.0)
    step(mixer, 1.0)
    assert [p[0].item() for p in parameters] == [0.5] * 4


def test_a_newcomer_on_memory_that_is_mixed_keeps_its_values():
    parameters = [Parameter(torch.full((3,), value)) for value in (0.0, 0.0, 4.0, 4.0)]
    optimizer = torch.optim.SGD([parameters[0], parameters[2]], lr=0.1)
    place = {id(p): number // 2 for number, p in enumerate(parameters)}
    group, topology = WorkerGroup(torch.device("cpu"), 10), build_topology("complete", 2)
    mixer = Mixer(lambda: optimizer.param_groups, topology, group, local_workers=2, worker_of=lambda p: place[id(p)])
    step(mixer, 0.0)
    for own, other in ((0, 1), (2, 3)):
        parameters[other].data = parameters[own].data
    optimizer.add_param_group({"params": [parameters[1], parameters[3]]})
    step(mixer, 0.0)
    assert [p[0].item() for p in parameters] == [0.0, 0.0, 4.0, 4.0]


def test_a_list_that_changed_is_measured_as_it_is():
    first, second = Parameter(torch.zeros(4)), Parameter(torch.ones(4))
    mixer = two_workers(first, second)
    step(mixer, 0.0)
    for parameter, value in ((first, 0.0), (second, 3.0)):
        parameter.data = torch.full((9,), value)
    assert Average(mixer).measure().radius == pytest.approx(1.5 * 3)


def test_a_deployed_average_gives_back_memory_and_bytes():
    first, second = Parameter(torch.zeros(3)), Parameter(torch.full((3,), 4.0))
    mixer = two_workers(first, second)
    step(mixer, 0.5)
    own, average = [first.data, second.data], Average(mixer)
    values = [value.clone() for value in own]
    shown = Shown(average.form(), [average.copies])
    shown.show()
    assert first.tolist() == second.tolist() == [2.0] * 3
    second.data = torch.zeros(5)
    first.data.fill_(9.0)
    with pytest.raises(RuntimeError, match="deployed average"):
        mixer.start_exchange()
    shown.restore()
    for parameter, memory, value in zip((first, second), own, values, strict=True):
        assert parameter.data_ptr() == memory.data_ptr()
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("mix_every", [1, 2])
def test_a_kept_average_is_there_until_the_next_exchange_and_is_freed_then(mix_every):
    first, second = Parameter(torch.zeros(3)), Parameter(torch.full((3,), 4.0))
    mixer = two_workers(first, second, mix_every=mix_every)
    average = Average(mixer)
    shown = Shown(average.form(), [mixer.copies])
    for _ in range(2):
        assert shown.is_current()
        shown.show()
        assert first.tolist() == second.tolist() == [2.0] * 3
        shown.restore()
        assert (first.tolist(), second.tolist()) == ([0.0] * 3, [4.0] * 3)
    mixer.start_exchange()
    assert not shown.is_current()
    assert mixer.copies.mean is None


def test_an_edit_is_added_to_what_was_sent_before_it_and_the_mean_moves_by_the_edit_alone():
    first, second = Parameter(torch.zeros(3)), Parameter(torch.full((3,), 4.0))
    mixer = two_workers(first, second)
    mixer.start_exchange()
    first.data = first.data + 10.0
    step(mixer, 0.5)
    assert (first[0].item(), second[0].item()) == (11.0, 3.0)
    first.data.fill_(3.0)
    mixer.restart_exchange()
    step(mixer, 0.5)
    assert (first[0].item(), second[0].item()) == (3.0, 3.0)
