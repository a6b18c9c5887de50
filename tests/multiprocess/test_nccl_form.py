"""The code for NCCL on gloo, by a fake that orders only the device's queue; see `tests.fake_nccl`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, WorkerGroup
from dsgdac_accel.distributed import transport, watchdog
from tests import fake_nccl
from tests.multiprocess.small_model import inputs, make_model
from tests.multiprocess.test_against_simulation import STEPS, loss_of, make_scheduler, simulate
from tests.multiprocess.test_against_simulation import make_model as simulated_model
from tests.multiprocess.test_late_checks import FUSED
from tests.selection import slow_except
from tests.workers import Outcome, run_workers, try_workers

pytestmark = pytest.mark.multiprocess

TIMEOUT = 2.0


def shorten_waits(group: WorkerGroup) -> None:
    """Wait for `TIMEOUT` from now on. Before, workers may be late on a loaded machine: none is lost yet."""
    torch.distributed.barrier()
    group.timeout = group.process_groups.transport.watchdog.seconds = TIMEOUT
    fake_nccl.device_seconds = TIMEOUT


def prepared(model: nn.Module, optimizer_name: str = "sgd", shorten: bool = False, **options: object):
    accelerator = GossipAccelerator(gossip=GossipConfig(**{"timeout": 30.0, "log_every": 0} | options))
    if shorten:
        shorten_waits(accelerator.group)
    optimizer = FUSED[optimizer_name](model.parameters())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make_scheduler(optimizer))
    (gossip,) = accelerator.gossip_steps
    gossip.mixer.agreement.late = True  # as on a GPU
    return accelerator, model, optimizer, scheduler, gossip


# ---- a run


def train(rank: int, topology: str, options: dict) -> dict:
    fake_nccl.install()
    transport._GLOO_BYTES = 64  # a buffer would be cut into several messages
    accelerator, model, optimizer, scheduler, gossip = prepared(
        simulated_model(), topology=topology, power=2.0, start_step=6, **options
    )
    buffers = len(gossip.mixer.copies.sent[0].buffers)
    connections, batches, waits = len(fake_nccl.connections), len(fake_nccl.batches), []
    for step in range(STEPS):
        if step == STEPS - 3 and rank == 1:
            time.sleep(0.4)
        accelerator.backward(loss_of(model, rank, step))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        waits.append(gossip.metrics()["wait_seconds"])
    gossip.mixer.release()
    return {
        "x": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "connected late": len(fake_nccl.connections) - connections,
        "operations": set(fake_nccl.batches[batches:]),
        "buffers": buffers,
        "groups": fake_nccl.groups,
        "waits": waits,
    }


CASES = slow_except(
    [("ring", 4, {"overlap": False})],
    [("ring", 4, {"overlap": False}), ("one_peer_ring", 4, {}), ("complete", 3, {})],
)


@pytest.mark.parametrize(("topology", "workers", "options"), CASES, ids=lambda x: str(x))
def test_it_follows_algorithm_1_and_nothing_blocks_after_the_construction(topology, workers, options):
    _, expected = simulate(workers, topology, "sgd")
    results = run_workers(train, workers, topology, options)
    # With overlap, what the late worker sends is waited for in the step after.
    late = STEPS - 2 if options.get("overlap") is False else STEPS - 1
    for rank, (found, parameters) in enumerate(zip(results, expected, strict=True)):
        torch.testing.assert_close(found["x"], torch.cat([p.flatten() for p in parameters]), rtol=1e-9, atol=1e-11)
        assert found["connected late"] == 0, "the first exchange of a pair blocks without a timeout"
        # Every buffer, and the header, is one message.
        neighbors = {"one_peer_ring": 1, "ring": 2, "complete": 0}[topology]
        expected_operations = {2 * neighbors * (found["buffers"] + 1)} if neighbors else set()
        assert found["operations"] == expected_operations, "a buffer is several messages"
        assert len(found["groups"]) == 1, "of all the library, besides that of `init_process_group`"
        options = found["groups"][0]["pg_options"]
        assert options.is_high_priority_stream
        assert 4 <= options.config.max_ctas <= 8
        assert found["groups"][0]["timeout"].total_seconds() == 2 * 30 + 60, "NCCL may abort before anybody is named"
        if topology != "one_peer_ring" and rank in (0, 2):
            assert found["waits"][late] > 0.3, "waiting for a late worker is not measured, or not a step later"


# ---- lost workers


def lose(rank: int, where: str, folder: str, options: dict) -> str:
    sys.stderr = open(f"{folder}/{rank}", "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    fake_nccl.install()
    watchdog._GRACE = 0.5
    if where == "connecting" and rank == 1:
        torch.distributed.batch_isend_irecv = lambda operations: os._exit(0)
    accelerator, model, optimizer, _, gossip = prepared(
        make_model(), shorten=where == "connecting", topology="ring", **options
    )
    for step in range(8):
        if step == 4:
            shorten_waits(accelerator.group)
            began = time.monotonic()
        loss = model(inputs(rank, step).to(accelerator.device)).square().mean()
        accelerator.backward(loss)
        if step == 4 and rank == 1:
            os._exit(0)
        if where == "in a reduction" and step == 4:
            gossip.mixer.drain()
            accelerator.group.all_reduce_max_(torch.ones(1, device=accelerator.device), "a reduction")
        if where != "reading" and step >= 4:
            # As in `step()` for what is read there.
            loss.item() if loss.is_cuda else fake_nccl.FakeEvent().synchronize()
        try:
            optimizer.step()
        except BaseException:
            assert time.monotonic() - began < TIMEOUT + 20
            raise
        optimizer.zero_grad()
    return "no error"


def require_error_that_names_the_lost_worker(outcomes: list[Outcome], where: str) -> None:
    for rank in (0, 2, 3):
        assert outcomes[rank].exit_code == 1
        assert "WorkerLostError" in outcomes[rank].error
    told = " ".join(outcomes[rank].error for rank in (0, 2, 3))
    assert "worker 1 did not answer" in told or "worker 1 was lost" in told
    assert ("the exchange of step" if where == "reading" else "connecting the neighbors") in told


@pytest.mark.parametrize("where", ["reading", "connecting"])
def test_a_lost_worker_is_named_where_the_host_would_wait_without_end(where, tmp_path):
    outcomes = try_workers(lose, 4, where, str(tmp_path), {}, timeout=60.0)
    require_error_that_names_the_lost_worker(outcomes, where)


def require_end_that_names_the_lost_worker(outcomes: list[Outcome], where: str, folder: Path) -> None:
    told = ""
    for rank in (0, 2, 3):
        assert outcomes[rank].exit_code == 1, "it hangs"
        assert outcomes[rank].error is None, "it was ended, since nothing else was possible"
        told += (folder / str(rank)).read_text()
    assert "worker 1 did not answer" in told or "worker 1 was lost" in told
    assert ("a reduction" if where == "in a reduction" else "the exchange of step") in told
    assert "in synchronize" in told, "where it hung"


@pytest.mark.parametrize("where", ["elsewhere", pytest.param("in a reduction", marks=pytest.mark.slow)])
def test_a_host_that_hangs_elsewhere_is_ended_with_a_message_that_names_the_lost_worker(where, tmp_path):
    outcomes = try_workers(lose, 4, where, str(tmp_path), {}, timeout=60.0)
    require_end_that_names_the_lost_worker(outcomes, where, tmp_path)


def compute_for_long(rank: int) -> str:
    fake_nccl.install()
    watchdog._GRACE = 0.5
    accelerator, model, optimizer, _, gossip = prepared(make_model(), topology="one_peer_ring", overlap=False)
    for step in range(6):
        if step == 2:
            shorten_waits(accelerator.group)
            fake_nccl.Computation(1.5 * TIMEOUT)
        accelerator.backward(model(inputs(rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    gossip.mixer.release()
    return "no error"


def test_a_step_that_the_device_computes_for_longer_than_the_timeout_is_no_lost_worker():
    began = time.monotonic()
    assert run_workers(compute_for_long, 2) == ["no error"] * 2
    assert time.monotonic() - began > 1.5 * TIMEOUT, "the host did not wait for the device"


# ---- groups that fall apart


def debug(rank: int) -> str:
    fake_nccl.install()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    accelerator, model, optimizer, _, _ = prepared(make_model(), topology="one_peer_ring")
    for step in range(2):
        accelerator.backward(model(inputs(rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return "no error"


def test_torch_that_takes_groups_apart_to_debug_them_is_refused_on_all_workers():
    for outcome in try_workers(debug, 2, timeout=30.0):
        assert "ValueError: sends and receives must form one NCCL group" in (outcome.error or "it hangs")
        assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in outcome.error


# ---- a post that blocks


def block(rank: int) -> str:
    model = nn.Linear(512, 512)  # too large to be posted in the training thread
    accelerator, model, optimizer, _, _ = prepared(model, topology="complete")
    send = torch.distributed.isend
    for step in range(6):
        if step == 3:
            shorten_waits(accelerator.group)
            if rank == 0:
                torch.distributed.isend = lambda *args, **kwargs: time.sleep(3600) or send(*args, **kwargs)
        accelerator.backward(model(torch.ones(2, 512)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return "no error"


def test_a_post_that_blocks_ends_in_time():
    outcomes = try_workers(block, 2, timeout=60.0)
    for outcome in outcomes:
        assert "WorkerLostError" in (outcome.error or "it hangs")
    assert "the transport blocks" in outcomes[0].error
