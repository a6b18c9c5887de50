"""Gossip in fewer bytes on real workers: the mean is kept, workers come together, and training does what it should."""

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, Mixer, NonFiniteError, WorkerGroup, build_topology
from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.formats import FORMATS
from tests.multiprocess.small_model import flat, inputs, make_model
from tests.rounding import COARSE
from tests.selection import slow_except
from tests.workers import run_workers

SIZE = 2000


def start_of(number):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number)) + 3


def mix(rank, topology, comm_dtype, per_process, steps, gamma):
    group = WorkerGroup(torch.device("cpu"), 30)
    parameters = [nn.Parameter(start_of(per_process * rank + here)) for here in range(per_process)]
    mixer = Mixer(
        parameters, build_topology(topology, group.size * per_process), group, local_workers=per_process,
        comm_dtype=comm_dtype, worker_of=lambda p: next(k for k, mine in enumerate(parameters) if mine is p),
    )  # fmt: skip
    frobenius, average = [], Average(mixer)
    for _ in range(steps):
        mixer.add(mixer.consensus_update(gamma))
        frobenius.append(average.measure().frobenius)
    return [parameter.detach() for parameter in parameters], frobenius, mixer.exchange.bytes_sent, mixer.parameter_bytes


SPLITS = [("one_peer_ring", 3, 1), ("complete", 4, 1), ("grid", 4, 1), ("one_peer_ring", 2, 2), ("exponential", 2, 3)]


@pytest.mark.parametrize(
    ("topology", "processes", "per_process", "comm_dtype"),
    slow_except(
        [("one_peer_ring", 3, 1, "int2"), ("complete", 4, 1, "bf16")],
        [(*split, comm_dtype) for split in SPLITS for comm_dtype in FORMATS],
    ),
)
def test_mixing_keeps_the_mean_and_brings_workers_together(comm_dtype, topology, processes, per_process):
    results = run_workers(mix, processes, topology, comm_dtype, per_process, 40, 0.7)
    before = torch.stack([start_of(number) for number in range(processes * per_process)])
    after = torch.stack([x for parameters, *_ in results for x in parameters])
    # Sums of several neighbors differ in their last bits; a rounded exchange of x itself moves the mean by 1e-3.
    torch.testing.assert_close(after.double().mean(0), before.double().mean(0), rtol=0, atol=6e-6)
    frobenius = results[0][1]
    assert frobenius[-1] < 1e-3 * float((before - before.mean(0)).norm())
    full = run_workers(mix, processes, topology, "full", per_process, 5, 0.7)
    for ours, exact in zip(frobenius[:5], full[0][1], strict=True):
        assert ours == pytest.approx(exact, rel=0.02) or comm_dtype in COARSE


def test_bytes_sent_are_counted():
    for comm_dtype, share in (("full", 1.0), ("bf16", 0.5), ("int8", 0.254)):
        _, _, sent, size = run_workers(mix, 2, "one_peer_ring", comm_dtype, 1, 1, 1.0)[0]
        assert (sent - 4 * 8) / size == pytest.approx(share, rel=0.02)


def lose_a_parameter(rank, comm_dtype):
    group = WorkerGroup(torch.device("cpu"), 30)
    x = nn.Parameter(torch.randn(SIZE))
    mixer = Mixer([x], build_topology("ring", 3), group, comm_dtype=comm_dtype)
    with torch.no_grad():
        x[7] = torch.nan if rank == 1 else 1.0
    try:
        mixer.add(mixer.consensus_update(1.0))
    except NonFiniteError as error:
        return str(error)


@pytest.mark.parametrize("comm_dtype", ["bf16", "int8", *(pytest.param(n, marks=pytest.mark.slow) for n in COARSE)])
def test_a_worker_that_is_not_finite_is_named(comm_dtype):
    for rank, message in enumerate(run_workers(lose_a_parameter, 3, comm_dtype)):
        assert "not finite at step 0" in message
        assert ("worker 1" if rank == 1 else "one of workers [") in message


def run(rank, folder, comm_dtype, steps, save_at=None, load=None):
    accelerator = GossipAccelerator(gossip=GossipConfig(comm_dtype=comm_dtype, timeout=30, log_every=4))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if load:
        accelerator.load_state(load)
    for step in range(accelerator.gossip_steps[0].mixer.step, steps):
        accelerator.backward(model(inputs(rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            accelerator.save_state(folder)
    return flat(model)


@pytest.mark.parametrize("comm_dtype", ["int2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bf16", "int8"))])
def test_resuming_is_exact(tmp_path, comm_dtype):
    whole = run_workers(run, 3, tmp_path / "saved", comm_dtype, 13, 6)
    resumed = run_workers(run, 3, tmp_path / "other", comm_dtype, 13, None, tmp_path / "saved")
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a, b)
