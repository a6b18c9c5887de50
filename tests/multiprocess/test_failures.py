"""A worker that raises, is killed or falls silent ends the run on all others, in time, by an error that names it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time

import pytest
import torch
from torch import nn

from dsgdac_accel import CheckpointError, GossipAccelerator, GossipConfig, WorkerLostError
from tests.workers import Launch, LaunchesAhead, run_workers, try_workers

pytestmark = pytest.mark.multiprocess

TIMEOUT = 3.0
FAULTY, AT_STEP = 1, 4
FAULTS = ("raises", "killed", "silent")


def fail(how: str) -> None:
    if how == "raises":
        raise ValueError("a bug in the user's loop")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(0)
    if how == "silent":
        time.sleep(10 * TIMEOUT + 60)  # killed when the others have ended


def train_with_fault(rank: int, topology: str, where: str, how: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology=topology, timeout=TIMEOUT, log_every=0))
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [torch.randn(8, 64) for _ in range(3)]

    def calibration():
        for number, batch in enumerate(data):
            if where == "calibration" and rank == FAULTY and number == 1:
                fail(how)
            yield batch

    for step in range(8):
        accelerator.backward(model(data[0]).square().mean())
        if rank == FAULTY and step == AT_STEP and where == "step":
            fail(how)
        optimizer.step()
        optimizer.zero_grad()
        if step == AT_STEP and where != "step":
            if rank == FAULTY and where == "before averaging":
                fail(how)
            with accelerator.deployed_model(model, calibrate=calibration()):
                if rank == FAULTY and where == "evaluation":
                    fail(how)


CASES = [
    *itertools.product(("one_peer_ring", "complete"), ("step", "before averaging", "evaluation"), FAULTS),
    *itertools.product(("one_peer_ring",), ("calibration",), FAULTS),  # without an exchange in flight
    ("one_peer_ring", "step", "exits"),
    ("complete", "step", "exits"),
]
# A silent worker costs the others the whole timeout.
SLOW = [case for case in CASES if "silent" in case and case != ("one_peer_ring", "step", "silent")]


@pytest.fixture(scope="module")
def launches(request):
    """The selected cases, several at a time, since they mostly wait for a lost worker."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    selected = [
        item.callspec.params["case"] for item in here if hasattr(item, "callspec") and "case" in item.callspec.params
    ]
    ahead = LaunchesAhead(lambda case: Launch(train_with_fault, 3, *case, timeout=10 * TIMEOUT + 60), selected)
    yield ahead
    ahead.stop()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES], ids="-".join
)
def test_a_lost_worker_ends_the_run_everywhere(case, launches):
    outcomes = launches.outcomes(case, hanging=FAULTY if "silent" in case else None)
    for outcome in outcomes:
        if outcome.rank == FAULTY:
            continue
        assert outcome.exit_code == 1, f"worker {outcome.rank} did not stop: {outcome.error}"
        assert "WorkerLostError" in outcome.error
        assert outcome.seconds < TIMEOUT + 15
    told = " ".join(outcome.error for outcome in outcomes if outcome.rank != FAULTY)
    steps = {int(step) for step in re.findall(r"step (\d+)", told)}
    # A worker that sits out a round, or has another neighbor first, notices up to one period later.
    assert steps
    assert steps <= set(range(AT_STEP, AT_STEP + 4))
    assert f"worker {FAULTY}" in told or f"Rank {FAULTY}" in told or f"worker(s) {FAULTY}" in told


def save_as_others_do(rank: int, folder: str) -> None:
    """Save into a folder of this worker's own, and then on worker 0 alone."""
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=TIMEOUT))
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="one folder on shared storage"):
        accelerator.save_state(f"{folder}/{rank}")
    if rank == 0:
        with pytest.raises(WorkerLostError, match="`save_state` and `load_state` on all workers, not on rank 0 alone"):
            accelerator.save_state(folder)


@pytest.mark.slow
def test_checkpoints_of_one_worker_alone_or_in_its_own_folder_are_refused_with_the_way_out(tmp_path):
    run_workers(save_as_others_do, 2, str(tmp_path))


def lose_while_accelerate_gathers(rank: int) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20, log_every=0))
    model = nn.Linear(2, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.deployed_model(model):
        if rank == FAULTY:
            fail("killed")
        accelerator.gather(torch.tensor([rank]))


def test_errors_of_accelerates_own_collectives_are_accelerates_own() -> None:
    outcomes = try_workers(lose_while_accelerate_gathers, 3)
    errors = [outcomes[0].error, outcomes[2].error]
    assert all("RuntimeError" in error for error in errors), errors
    assert not any(WorkerLostError.__name__ in error for error in errors)
