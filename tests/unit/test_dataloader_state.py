"""A pass that is resumed in its middle hands out the rest of its batches, with the same random numbers."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState, PartialState
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsgdac_accel.checkpoint.serialization import decode, encode
from dsgdac_accel.data.dataloader_state import (
    DataPosition,
    OpenPass,
    ResumedBatches,
    data_position,
    epoch_of,
    record_passes,
    recorder_of,
    unwatched_pass,
)
from dsgdac_accel.randomness import random_state, set_random_state

SIZE, BATCH = 14, 2


class Noisy(Dataset):
    """Samples augmented at random by the process that reads them; counts its reads."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor([index, torch.rand(()).item(), random.random()], dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self):
        self.rows = Noisy()

    def __iter__(self):
        return (self.rows[index] for index in range(SIZE))


@pytest.fixture(autouse=True)
def alone():
    PartialState._reset_state()
    PartialState(cpu=True)
    yield
    PartialState._reset_state()
    GradientState._reset_state()


def make_loader(kind, active=lambda: True, around=unwatched_pass):
    data = Stream() if kind == "stream" else Noisy()
    plain = DataLoader(
        data, BATCH, shuffle=kind != "stream", num_workers=2 * (kind == "processes"), generator=torch.Generator()
    )
    prepared = prepare_data_loader(
        plain, torch.device("cpu"), put_on_device=True, dispatch_batches=kind == "dispatched",
        use_stateful_dataloader=kind == "stateful",
    )  # fmt: skip
    return record_passes(prepared, [], active, around)


def seed():
    torch.manual_seed(3)
    random.seed(4)


KINDS = ["map", "stream", "dispatched", "processes", "stateful"]


@pytest.mark.parametrize("taken", [1, 4, 6, 7])  # of 7 batches
@pytest.mark.parametrize("replay", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_pass_is_that_of_the_unbroken_one(kind, replay, taken):
    if kind == "stateful":
        pytest.importorskip("torchdata")
    seed()
    loader = make_loader(kind)
    earlier = int(kind != "stateful")  # the order of the first pass of a stateful loader was once drawn too early
    for _ in range(earlier):
        list(loader)
    batches, draws, state, streams = [], [], None, None
    for number, batch in enumerate(loader, 1):
        batches.append(batch)
        draws.append(torch.rand(()).item())
        if number == taken:
            state, streams = decode(encode([recorder_of(loader).state_dict(), random_state()]))
            at = DataPosition(earlier, taken) if taken < 7 else DataPosition(earlier + 1, 0)
            assert data_position(loader) == at
    following = list(loader)

    torch.manual_seed(99)  # a new process
    resumed = make_loader(kind)
    recorder_of(resumed).load_state_dict(state, streams)
    set_random_state(streams)
    rest = resumed if kind == "stateful" and replay is None else ResumedBatches(resumed, replay)
    if taken < 7:
        assert data_position(resumed) == at
        assert kind == "stream" or rest is resumed or len(rest) == 7 - taken
        for batch, draw, expected in zip(rest, draws[taken:], batches[taken:], strict=True):
            assert torch.equal(batch, expected)
            assert torch.rand(()).item() == draw
            assert epoch_of(resumed) == earlier
    assert data_position(resumed) == DataPosition(earlier + 1, 0)
    assert torch.equal(torch.cat(list(resumed)), torch.cat(following))


def test_batches_that_are_skipped_in_the_sampler_are_not_read():
    loader = make_loader("map")
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = recorder_of(loader).state_dict()
    resumed = make_loader("map")
    recorder_of(resumed).load_state_dict(state, random_state())
    assert len(list(ResumedBatches(resumed))) == 3
    assert resumed.dataset.reads == 3 * BATCH


def test_without_resuming_a_loaded_pass_starts_over():
    seed()
    loader = make_loader("map")
    iterator = iter(loader)
    first = next(iterator)
    state, streams = recorder_of(loader).state_dict(), random_state()
    resumed = make_loader("map")
    recorder_of(resumed).load_state_dict(state, streams)
    batches = list(resumed)
    assert len(batches) == 7
    assert torch.equal(batches[0][:, 0], first[:, 0])  # the same order


def test_passes_left_by_break_count_if_they_were_trained_in_and_evaluation_does_not():
    training, passes = True, []

    @contextmanager
    def around(loader):
        passes.append(OpenPass(None))
        yield passes[-1]

    def step():
        passes[-1].trained_in = True

    loader = make_loader("map", lambda: training, around)
    next(iter(loader))  # a look at a sample
    kept = iter(loader)
    next(kept)
    assert data_position(loader) == DataPosition(0, 1)
    for _ in loader:
        step()
        break
    assert data_position(loader) == DataPosition(1, 0), "the iterator that is kept is none of a pass"
    training = False
    assert len(list(loader)) == 7
    training = True
    assert data_position(loader).epoch == 1
    iterator = iter(loader)
    next(iterator)
    step()
    assert (epoch_of(loader), epoch_of(None)) == (1, None)
    training = False
    list(loader)  # in the middle of a training pass
    training = True
    next(iterator)
    next(iter(loader))
    assert data_position(loader) == DataPosition(1, 2)
    state = recorder_of(loader).state_dict()
    resumed = make_loader("map")
    recorder_of(resumed).load_state_dict(state, random_state())
    next(iter(resumed))
    next(iter(ResumedBatches(resumed)))
    assert len(list(ResumedBatches(resumed))) == 5, "looks at a sample before it leave the loaded position"


def test_a_loader_of_other_samplers_is_refused():
    saved = make_loader("map")
    state = recorder_of(saved).state_dict()
    with pytest.raises(ValueError, match=r"of a loader made of RecordedShard.*RandomSampler.* Prepare the loader as"):
        recorder_of(make_loader("stream")).load_state_dict(state, random_state())
    recorder_of(make_loader("stream")).load_state_dict(state, None)  # rescaled: as far as samplers are alike
    with pytest.raises(TypeError, match="passed through `prepare`; got a list"):
        data_position([])
