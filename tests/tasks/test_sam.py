"""Sharpness-aware minimization against its equation, however the batch is split, and what it must leave alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from dsgdac_accel import GossipConfig
from tasks.common.algorithms import make_accelerator
from tasks.common.config import ConfigError, parse_config
from tasks.common.sam import PerWorkerSharpnessAwareBackward, SharpnessAwareBackward
from tasks.images.config import CifarConfig
from tests.workers import run_workers

RHO, RATE, MOMENTUM, WEIGHT_DECAY = 0.3, 0.1, 0.9, 1e-2
STEPS, BATCH = 4, 12


def network(dtype=torch.float64, *, norm=False, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.BatchNorm1d(7) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(7, 3)).to(dtype)


def batches(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (STEPS, BATCH, 5), (STEPS, BATCH)
    inputs = torch.randn(shapes[0], generator=generator, dtype=torch.float64).to(dtype)
    return zip(inputs, torch.randint(3, shapes[1], generator=generator), strict=True)


def by_hand(parts_of=lambda rows: [rows]):
    """Parameters after each step of x <- x - a v, v <- m v + mean_w g_w(x + rho g_w(x) / ||g_w(x)||) + w x.

    Args:
        parts_of: the rows of a batch by the workers that ascend along gradients of their own.
    """
    model = network()
    names, x = zip(*model.named_parameters(), strict=True)
    x = [value.detach() for value in x]
    velocity, trace = [torch.zeros_like(value) for value in x], []

    def gradient(at, inputs, labels):
        at = [value.clone().requires_grad_() for value in at]
        loss = F.cross_entropy(functional_call(model, dict(zip(names, at, strict=True)), inputs), labels)
        return torch.autograd.grad(loss, at)

    for inputs, labels in batches():
        found = []
        for rows in parts_of(torch.arange(BATCH)):
            uphill = gradient(x, inputs[rows], labels[rows])
            length = sum((g**2).sum() for g in uphill).sqrt()
            ascended = [v + RHO * g / length for v, g in zip(x, uphill, strict=True)]
            found.append(gradient(ascended, inputs[rows], labels[rows]))
        used = [torch.stack(gradients).mean(0) for gradients in zip(*found, strict=True)]
        velocity = [MOMENTUM * m + g + WEIGHT_DECAY * v for m, g, v in zip(velocity, used, x, strict=True)]
        x = [v - RATE * m for v, m in zip(x, velocity, strict=True)]
        trace.append(torch.cat([value.flatten() for value in x]))
    return torch.stack(trace)


def prepared(model, accumulation=1, scale=None, kind=SharpnessAwareBackward, local_workers=1, **options):
    gossip = GossipConfig(timeout=30, workers_per_process=local_workers)
    accelerator = make_accelerator("sam", gossip, gradient_accumulation_steps=accumulation)
    if scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, kind(accelerator, model, optimizer, RHO)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def take_step(accelerator, model, optimizer, backward, micro_batches):
    for inputs, labels in micro_batches:
        with accelerator.accumulate(model):
            backward(lambda inputs=inputs, labels=labels: F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()


def train(rank, accumulation):
    options = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    accelerator, model, *rest = prepared(network(), accumulation, **options)
    trace = []
    for inputs, labels in batches():
        mine = slice(rank, None, accelerator.num_processes)
        micro = zip(inputs[mine].chunk(accumulation), labels[mine].chunk(accumulation), strict=True)
        take_step(accelerator, model, *rest, micro)
        trace.append(flat(model))
    return torch.stack(trace)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_every_split_of_the_batch_gives_the_step_of_the_equation(processes, accumulation):
    expected = by_hand()
    for trace in run_workers(train, processes, accumulation):
        torch.testing.assert_close(trace, expected, rtol=1e-9, atol=1e-12)


def train_per_worker(rank, local_workers, accumulation):
    options = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    kind = PerWorkerSharpnessAwareBackward
    accelerator, model, optimizer, backward = prepared(
        network(), accumulation, kind=kind, local_workers=local_workers, **options
    )
    trace = []
    for inputs, labels in batches():
        mine = slice(rank, None, accelerator.num_processes)
        for micro in zip(inputs[mine].chunk(accumulation), labels[mine].chunk(accumulation), strict=True):
            parts = zip(*(tensor.chunk(local_workers) for tensor in micro), strict=True)
            losses = [lambda x=x, y=y: F.cross_entropy(backward.bare(x), y) for x, y in parts]
            with accelerator.accumulate(model):
                backward(losses)
                optimizer.step()
                optimizer.zero_grad()
        trace.append(flat(model))
    return torch.stack(trace)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("processes", "local_workers", "accumulation"), [(1, 2, 2), (2, 1, 2), (2, 3, 1)])
def test_workers_that_ascend_alone_take_the_step_of_the_equation_of_m_sam(processes, local_workers, accumulation):
    def parts_of(rows):
        micro = [rows[rank::processes].chunk(accumulation) for rank in range(processes)]
        parts = [[part.chunk(local_workers) for part in own] for own in micro]
        return [torch.cat([part[local] for part in own]) for own in parts for local in range(local_workers)]

    expected = by_hand(parts_of)
    for trace in run_workers(train_per_worker, processes, local_workers, accumulation):
        torch.testing.assert_close(trace, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(expected, by_hand(), rtol=1e-4), "m-SAM has to differ from SAM in this test"


def train_alone(rank, kind):
    """Steps of two micro-batches with BatchNorm and dropout; then parameters, statistics and the random stream."""
    accelerator, model, optimizer, backward = prepared(network(norm=True, dropout=0.5), accumulation=2, kind=kind)
    for inputs, labels in batches():
        for x, y in zip(inputs.chunk(2), labels.chunk(2), strict=True):
            with accelerator.accumulate(model):
                loss = lambda x=x, y=y: F.cross_entropy(model(x), y)  # noqa: E731
                backward(loss if kind is SharpnessAwareBackward else [loss])
                optimizer.step()
                optimizer.zero_grad()
    return [flat(model), *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


@pytest.mark.multiprocess
def test_for_one_worker_both_are_the_same():
    (together,), (alone,) = (
        run_workers(train_alone, 1, kind) for kind in (SharpnessAwareBackward, PerWorkerSharpnessAwareBackward)
    )
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))


def leave_traces(rank):
    """One step of two micro-batches with BatchNorm and dropout: what was drawn, and what was there at the update."""
    model = network(norm=True, dropout=0.5)
    before, twin, drawn, at_update = flat(model), copy.deepcopy(model), [], []
    model[3].register_forward_hook(lambda module, inputs, output: drawn.append(output == 0))
    parts = prepared(model, accumulation=2)
    optimizer = parts[2].optimizer
    optimizer.register_step_pre_hook(lambda *_: at_update.append((flat(model), [p.grad for p in model.parameters()])))
    inputs, labels = next(iter(batches()))
    micro_batches = list(zip(inputs.chunk(2), labels.chunk(2), strict=True))
    stream = torch.get_rng_state()
    take_step(*parts, micro_batches)
    after = torch.get_rng_state()
    torch.set_rng_state(stream)
    for part, part_labels in micro_batches:
        (F.cross_entropy(twin(part), part_labels) / 2).backward()
    buffers = zip(model.buffers(), twin.buffers(), strict=True)
    (at_step, gradients), plain = at_update[0], [p.grad for p in twin.parameters()]
    return {
        "drawn": drawn,
        "same parameters": torch.equal(at_step, before),
        "same statistics": all(torch.equal(mine, plain) for mine, plain in buffers),
        "same stream": torch.equal(after, torch.get_rng_state()),
        "change of gradient": max((g - p).abs().max().item() for g, p in zip(gradients, plain, strict=True)),
    }


@pytest.mark.multiprocess
def test_the_second_pass_repeats_dropout_and_leaves_parameters_statistics_and_streams():
    (traces,) = run_workers(leave_traces, 1)
    first, second, *again = traces["drawn"]
    assert not torch.equal(first, second)
    assert [torch.equal(*pair) for pair in zip((first, second), again, strict=True)] == [True, True]
    assert traces["same parameters"]
    assert traces["same statistics"]
    assert traces["same stream"]
    assert traces["change of gradient"] > 1e-3  # it did run elsewhere


def train_in_float32(rank, scale, factor):
    model = network(torch.float32)
    start = flat(model)
    accelerator, _, optimizer, backward = prepared(model, scale=scale)
    for inputs, labels in batches(torch.float32):
        with accelerator.accumulate(model):
            backward(lambda inputs=inputs, labels=labels: factor * F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    return start, flat(model)


@pytest.mark.multiprocess
def test_a_loss_scale_cancels_to_the_bit():
    ((_, plain),) = run_workers(train_in_float32, 1, None, 1.0)
    ((start, scaled),) = run_workers(train_in_float32, 1, 1024.0, 1.0)
    assert torch.equal(scaled, plain)
    assert not torch.equal(scaled, start)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("scale", "factor"), [(None, 0.0), (2.0**127, 1e3)], ids=["zero", "overflow"])
def test_a_gradient_without_direction_moves_nothing(scale, factor):
    ((start, end),) = run_workers(train_in_float32, 1, scale, factor)
    assert torch.equal(end, start)


def test_only_sam_has_workers_that_ascend_alone():
    assert parse_config(CifarConfig, ["--algorithm", "sam", "--sam_per_worker", "true"]).sam_per_worker
    with pytest.raises(ConfigError, match=r"sam_per_worker is for algorithm: sam; got algorithm: dsgd_ac\. Leave"):
        parse_config(CifarConfig, ["--sam_per_worker", "true"])


@pytest.mark.parametrize("rho", ["0", "-0.05", ".inf", "nan"])
def test_a_radius_that_is_none_is_refused(rho):
    with pytest.raises(ConfigError, match=r"sam_rho.*(> 0.*algorithm: sgd|number)"):
        parse_config(CifarConfig, ["--sam_rho", rho])
