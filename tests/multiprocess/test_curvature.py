"""Curvature shared over workers equals that of one process, and a failure is the same error on all of them."""

from __future__ import annotations

import math
import os
import re
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dsgdac_accel import GossipAccelerator, GossipConfig, WorkerGroup, WorkerLostError
from dsgdac_accel.curvature import (
    HessianOperator,
    consensus_errors,
    flatten,
    hutchinson_trace,
    lanczos,
    measure_curvature,
    measure_penalty,
    set_parameters,
)
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess


def workers(timeout=20.0):
    return WorkerGroup(torch.device("cpu"), timeout)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make_net():
    """Has BatchNorm and dropout, so that a batch must give the same result on every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)
    ).double()  # fmt: skip


def make_batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.randint(3, (6,), generator=generator))
        for _ in range(count)
    ]


def worker_states(count):
    generator = torch.Generator().manual_seed(2)
    return [
        {
            name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
            for name, p in make_net().named_parameters()
        }
        for _ in range(count)
    ]


# ---- equal to one process


def measure(rank, held, batches, launched=True):
    """Return all figures, with `held[r]` workers on process r."""
    group = workers() if launched else None
    net, states = make_net(), worker_states(sum(held))
    deltas, mean = consensus_errors(states, net)
    deltas = deltas[sum(held[:rank]) :][: held[rank]] if launched else deltas
    set_parameters(net, mean)
    torch.manual_seed(rank)  # workers have different random streams
    costs, done = [], []
    report = measure_curvature(
        net, classify, make_batches(batches), deltas, weights=[6] * (batches - 1) + [2], group=group, iterations=12,
        probes=3, noise_batches=3, progress=lambda cost: costs.append(cost) or (lambda: done.append(1)),
    )  # fmt: skip
    assert costs[0].products == 12 + 3 + sum(held) + min(3, batches - 1)
    assert len(done) == costs[0].computations
    assert costs[0].seconds > 0
    return torch.tensor(list(report.as_dict().values()), dtype=torch.float64)


@pytest.mark.parametrize(("held", "batches"), [((1, 1), 5), ((1, 1, 1), 2), ((2, 2), 3), ((3, 0), 3)])
def test_any_share_of_workers_and_batches_gives_the_figures_of_one_process(held, batches):
    expected = measure(0, held, batches, launched=False)
    assert expected.isfinite().all()
    results = run_workers(measure, len(held), held, batches)
    for figures in results:
        assert torch.equal(figures, results[0])
        torch.testing.assert_close(figures, expected, rtol=1e-9, atol=1e-10)


class Diagonal:
    """A product that is not sharded."""

    dim, dtype, device = 3, torch.float32, torch.device("cpu")

    def __call__(self, v):
        return v * torch.tensor([-7.0, 4.0, 1.0])


def worked_example(rank):
    group, hvp = workers(), Diagonal()
    delta = torch.tensor([1.0, 1.0, 0.0]) * (1 - 2 * rank)
    penalty = measure_penalty([delta], hvp, group)
    trace = hutchinson_trace(hvp, probes=1).value
    return lanczos(hvp).values[0].item(), penalty.exposure(4.0), penalty.alignment(4.0), trace


def test_the_worked_example_over_two_workers():
    for top, *others in run_workers(worked_example, 2):
        assert top == pytest.approx(4, rel=1e-6)
        assert others == [-1.5, -0.375, -2]


# ---- a live run


def train_and_measure(rank, per_process, measured):
    accelerator = GossipAccelerator(
        gossip=GossipConfig(power=2, timeout=20, log_every=0, workers_per_process=per_process)
    )
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(rank)
    figures = None

    def step():
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        accelerator.backward(classify(model, (x, x[:, :3].argmax(1))))
        optimizer.step()
        optimizer.zero_grad()

    for number in range(6):
        step()
        if measured and number == 3:
            own = flatten(model).view(per_process, -1)
            consensus = accelerator.measure_consensus()
            with accelerator.deployed_model(model) as deployed:
                deltas = [flatten(deployed, errors) for errors in accelerator.consensus_errors(model)]
                report = measure_curvature(
                    deployed, classify, make_batches(3), deltas, group=accelerator.group, probes=3
                )
            figures = own, report.as_dict(), consensus["gossip/radius"]
    state = {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    return figures, state


@pytest.mark.parametrize(("processes", "per_process"), [(2, 1), (1, 3)])
def test_a_live_run_is_measured_at_its_average_and_continues_unchanged(processes, per_process):
    measured, undisturbed = (run_workers(train_and_measure, processes, per_process, how) for how in (True, False))
    for (_, state), (_, expected) in zip(measured, undisturbed, strict=True):
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    net = make_net()
    flats = torch.cat([figures[0] for figures, _ in measured])
    set_parameters(net, flats.mean(0))
    deltas = list(flats - flats.mean(0))
    expected = measure_curvature(net, classify, make_batches(3), deltas, probes=3).as_dict()
    assert torch.stack(deltas).norm(dim=1).mean().item() == pytest.approx(measured[0][0][2])
    for (_, report, _), _ in measured:
        assert report == pytest.approx(expected, rel=1e-8, abs=1e-10)


# ---- wrapped models, in fresh processes because some settings are process-wide


def wrapped_products(rank, kind):
    net, batches = make_net().float(), [(x.float(), y) for x, y in make_batches(2)]
    v = torch.linspace(-1, 1, flatten(net).numel())
    expected = HessianOperator(net, classify, batches)(v)
    exact = classify(net.eval(), batches[0])
    net.train()
    if kind == "autocast":
        model = GossipAccelerator(mixed_precision="bf16").prepare(net)
    elif kind == "DDP":
        model = DistributedDataParallel(net)
    elif kind == "compiled in place":
        net.compile(backend="aot_eager")
        model = net
    else:
        model = torch.compile(net, backend="aot_eager")
    assert torch.equal(HessianOperator(model, classify, batches)(v), expected)
    if kind != "DDP":  # a loss that calls the wrapped model by its own name
        assert torch.equal(HessianOperator(model, lambda _, batch: classify(model, batch), batches)(v), expected)
    if kind == "autocast":
        assert not torch.equal(classify(model.eval(), batches[0]), exact), "autocast is on again"


@pytest.mark.parametrize("kind", ["autocast", "compiled", "compiled in place"])
def test_wrapped_models_are_measured_in_full_precision_and_eagerly(kind):
    run_workers(wrapped_products, 1, kind)


def test_a_model_in_ddp_is_measured_without_it():
    run_workers(wrapped_products, 2, "DDP")


# ---- failures


def ask(rank, fault):
    group = workers(timeout=5.0)
    net, batches = make_net(), make_batches(4)
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if rank == 1 and fault == "raises":
            raise OSError("the disk is gone")
        if rank == 1 and fault == "nan":
            return classify(model, batch) * math.nan
        if rank == 1 and fault == "killed" and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return classify(model, batch)

    if rank == 1 and fault == "other parameters":
        with torch.no_grad():
            net[0].weight[0, 0] += 1e-3
    if rank == 1 and fault == "other batches":
        batches[2][0][0, 0] += 1
    if rank == 1 and fault == "other count":
        batches.pop()
    hvp = HessianOperator(net, loss_fn, batches, group=group)
    v = torch.ones(hvp.dim, dtype=torch.float64)
    if rank == 1 and fault == "other vector":
        v = v[1:]
    if rank == 1 and fault == "changed":
        hvp(v)
        batches[1][0].zero_()
    elif fault == "changed":
        hvp(v)
    return hvp(v)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raises", "RuntimeError", "worker 1 failed in a Hessian product: the disk is gone"),
        ("nan", "ValueError", "worker 1 failed in a Hessian product: the loss of batch 1 is nan"),
        ("other vector", "ValueError", r"worker 1 failed in a Hessian product: expected a vector of shape \(53,\)"),
        ("changed", "RuntimeError", "worker 1 failed in a Hessian product: batch 1 changed between products"),
        ("other parameters", "ValueError", r"same values of the parameters.*`deployed_model`"),
        ("other batches", "ValueError", r"same batches.*Pass the whole list"),
        ("other count", "ValueError", r"same batches.*Pass the whole list"),
    ],
)
def test_a_fault_of_one_worker_is_an_error_on_all_at_once(fault, kind, message):
    healthy, _ = outcomes = try_workers(ask, 2, fault)
    assert re.search(f"{kind}: .*{message}", healthy.error, re.DOTALL), healthy.error
    assert all(outcome.exit_code == 1 for outcome in outcomes)
    assert all(outcome.seconds < 4 for outcome in outcomes), "a worker waited for a timeout"


def test_a_worker_that_is_killed_is_named_in_time():
    started = time.monotonic()
    healthy, _ = try_workers(ask, 2, "killed")
    assert WorkerLostError.__name__ in healthy.error
    assert "worker 1 was lost in a Hessian product" in healthy.error
    assert time.monotonic() - started < 30
