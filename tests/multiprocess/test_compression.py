"""Gossip in fewer bytes: the mean is kept, workers come together, bytes are counted, and runs resume."""

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, Mixer, NonFiniteError, WorkerGroup, build_topology
from tests.multiprocess.small_model import flat, inputs, make_model
from tests.rounding import COARSE, DEFINITIONS, Replay
from tests.workers import run_workers

SIZE = 2000


@pytest.mark.parametrize("comm_dtype", DEFINITIONS)
def test_rounded_differences_keep_the_mean_and_bring_workers_together(comm_dtype):
    """By the replay, which workers follow: see test_scenarios."""
    topology, replay = build_topology("grid", 4), Replay(comm_dtype)
    x_ND = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0)).double() + 3
    mean, apart = x_ND.mean(0), float((x_ND - x_ND.mean(0)).norm())
    for step in range(40):
        updates = replay([[x] for x in x_ND], topology.matrix(step), 0.7)
        exact = x_ND + 0.7 * (topology.matrix(step) @ x_ND - x_ND)
        x_ND = x_ND + torch.stack([u for (u,) in updates])
        if step == 0 and comm_dtype not in COARSE:
            assert float((x_ND - mean).norm()) == pytest.approx(float((exact - mean).norm()), rel=0.02)
    torch.testing.assert_close(x_ND.mean(0), mean, rtol=0, atol=1e-12)
    assert float((x_ND - mean).norm()) < 1e-3 * apart


def mix_once(rank, comm_dtype):
    group = WorkerGroup(torch.device("cpu"), 30)
    mixer = Mixer([nn.Parameter(torch.ones(SIZE))], build_topology("one_peer_ring", 2), group, comm_dtype=comm_dtype)
    mixer.add(mixer.consensus_update(1.0))
    return mixer.exchange.bytes_sent, mixer.parameter_bytes


def test_bytes_sent_are_counted():
    for comm_dtype, share in (("full", 1.0), ("bf16", 0.5), ("int8", 0.254)):
        sent, size = run_workers(mix_once, 2, comm_dtype)[0]
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
