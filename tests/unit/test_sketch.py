"""The sketched radius: the projection against its own dense matrix, its error against the bound that is stated."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.core.sketch import Projection, consensus_of, relative_error

LENGTH = 63


def dense(projection: Projection, size: int) -> torch.Tensor:
    """The matrix of a projection, (k, D), one column at a time."""
    return torch.stack([projection([row]) for row in torch.eye(size, dtype=torch.float64)], dim=1)


def test_each_element_goes_to_one_number_with_a_sign():
    projection = Projection(8, LENGTH, seed=3)
    matrix = dense(projection, 300)
    assert matrix.shape == (8, 300)
    assert torch.equal(matrix.abs().sum(0), torch.ones(300, dtype=torch.float64))
    x = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(projection([x]), matrix @ x)
    torch.testing.assert_close(projection([x[:1], x[1:70], x[70:]]), matrix @ x)
    mixed = projection([x[:100].float(), x[100:]])
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, matrix @ torch.cat([x[:100].float().double(), x[100:]]))
    assert projection([x.float()]).dtype == torch.float32
    assert torch.equal(Projection(8, LENGTH, seed=3)([x]), projection([x])), "alike on all workers"
    assert not torch.equal(Projection(8, LENGTH, seed=4)([x]), projection([x]))


def vectors() -> dict[str, torch.Tensor]:
    """What an unlucky projection would see badly, beside what is easy."""
    size, place = 9 * LENGTH + 10, torch.arange(9 * LENGTH + 10, dtype=torch.float64)
    return {
        "normal": torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        "constant": torch.ones(size, dtype=torch.float64),
        "one column": (place % LENGTH == 5).double(),
        "slow wave": torch.sin(place / 50),
        "same rows": torch.sin((place % LENGTH) ** 2),
        "few": (place % 150 == 3).double(),
        "less than a row": torch.ones(50, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", vectors())
def test_the_squared_length_is_kept_with_the_stated_variance(name):
    x, count, numbers = vectors()[name], 500, 16
    ratios = torch.stack([Projection(numbers, LENGTH, seed)([x]).square().sum() for seed in range(count)])
    ratios /= x.square().sum()
    bound = 2 * relative_error(numbers, LENGTH)
    deviation = float(ratios.std())
    assert abs(float(ratios.mean()) - 1) < 4.5 * bound / count**0.5
    # The sample variance of so heavy-tailed a quantity is itself uncertain by about a tenth.
    assert deviation < 1.2 * bound
    if name == "normal":
        assert deviation > 0.7 * bound, "the bound is no larger than it has to be"


def test_the_stated_error_is_that_of_the_distances():
    assert relative_error(1024) == pytest.approx((1 / 2048) ** 0.5, rel=0.04)
    assert relative_error(256, 2**31 - 1) == pytest.approx(2 * relative_error(1024, 2**31 - 1))


def test_a_small_model_is_not_projected():
    x = torch.randn(30)
    assert torch.equal(Projection(64)([x[:10], x[10:]]), x)
    assert torch.equal(Projection(30)([x]), x)
    assert Projection(64)([]).shape == (0,)
    assert len(Projection(29)([x])) == 29


def test_the_radius_of_rows_is_that_of_the_definition():
    x = torch.randn(5, 40, dtype=torch.float64)
    errors = x - x.mean(0)
    found = consensus_of(x, 3)
    assert found.radius == pytest.approx(float(sum(error.norm() for error in errors)) / 5)
    assert found.frobenius == pytest.approx(float(errors.norm()))
    assert found.step == 3


def test_rounding_does_not_reach_small_radii():
    generator = torch.Generator().manual_seed(2)
    center = torch.randn(100_000, generator=generator)
    center *= 10 / center.norm()
    apart = torch.randn(4, 100_000, generator=generator)
    apart *= 1e-4 / apart.norm(dim=1, keepdim=True)
    workers = center + apart
    projection = Projection(512, 2**12 - 1)
    estimate = consensus_of(torch.stack([projection([x]) for x in workers]), 0)
    assert estimate.radius == pytest.approx(consensus_of(workers, 0).radius, rel=4 * relative_error(512, 2**12 - 1))


# ---- of workers in training


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))


def cnn():
    layers = (nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(512, 10)).to(memory_format=torch.channels_last)


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))


def train(make, workers, dtype, steps=4, **options):
    torch.manual_seed(0)
    config = GossipConfig(workers_per_process=workers, log_every=0, **options)
    accelerator = GossipAccelerator(gossip=config, cpu=True)
    model = make().to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(steps):
        images = torch.randn(4 * workers, 1, 8, 8, dtype=dtype)
        accelerator.backward(model(images).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator


@pytest.mark.parametrize(
    ("make", "workers", "dtype"),
    [(mlp, 2, torch.float32), (cnn, 5, torch.float32), (transformer, 8, torch.float32), (cnn, 3, torch.float64)],
)
def test_estimates_are_as_good_as_stated(make, workers, dtype):
    accelerator = train(make, workers, dtype)
    mixer = accelerator.gossip_steps[0].mixer
    exact = accelerator.gossip_steps[0].average.measure()
    numbers, length, count = 64, 1023, 40
    errors = []
    for seed in range(count):
        projection = Projection(numbers, length, seed)
        sketches = [projection([bucket.data for bucket in flat.buckets]) for flat in mixer.buckets.flats]
        found = consensus_of(torch.stack(sketches), mixer.step)
        errors.append((found.radius / exact.radius - 1, found.frobenius / exact.frobenius - 1))
    bound = relative_error(numbers, length)
    for of_one in torch.tensor(errors).T:
        assert of_one.square().mean().sqrt() < 1.25 * bound
        assert abs(of_one.mean()) < 4.5 * bound / count**0.5
        assert of_one.std() > 0.2 * bound / workers**0.5, "different random numbers, different errors"


def test_the_radius_of_every_step_is_logged_beside_the_exact_one():
    numbers = 512
    accelerator = train(mlp, 4, torch.float32, steps=3, sketch=numbers, topology="complete")
    step = accelerator.gossip_steps[0]
    while len(step.estimate._under_way):
        step.estimate._under_way[0].result()
        figures = step.metrics()
    assert figures["radius_estimate_step"] == 3
    assert "radius" not in figures
    exact = step.average.measure()
    assert figures["radius_estimate"] == pytest.approx(exact.radius, rel=4 * relative_error(numbers))
    assert figures["frobenius_estimate"] == pytest.approx(exact.frobenius, rel=4 * relative_error(numbers))
    assert step.metrics()["radius"] == exact.radius
    assert accelerator.measure_consensus()["gossip/radius_estimate"] == figures["radius_estimate"]


def test_it_changes_neither_training_nor_random_streams():
    outcomes = []
    for sketch in (0, 128):
        random.seed(4)
        numpy.random.seed(4)
        accelerator = train(mlp, 3, torch.float64, sketch=sketch)
        flats = accelerator.gossip_steps[0].mixer.buckets.flats
        outcomes.append(([flat.buckets[0].data.clone() for flat in flats], random.random(), numpy.random.rand()))
        outcomes[-1] += (torch.rand(3),)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    (without, *drawn), (with_, *also_drawn) = outcomes
    assert all(map(torch.equal, without, with_))
    assert drawn[:2] == also_drawn[:2]
    assert torch.equal(drawn[2], also_drawn[2])


def test_one_worker_is_no_distance_from_itself():
    figures = train(mlp, 1, torch.float32, steps=2, sketch=64).gossip_steps[0].metrics()
    assert (figures["radius_estimate"], figures["radius_estimate_step"]) == (0.0, 2.0)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "radius_estimate" not in train(mlp, 1, torch.float32, steps=1).gossip_steps[0].metrics()


@pytest.mark.parametrize("value", [-1, 2.5, True, "many"])
def test_a_number_of_numbers_is_asked_for(value):
    with pytest.raises(ValueError, match=r"sketch must be an integer >= 0; got .* or about 1024"):
        GossipConfig(sketch=value)
