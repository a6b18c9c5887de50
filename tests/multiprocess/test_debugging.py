"""`TORCH_DISTRIBUTED_DEBUG=DETAIL`, with which torch compares the calls of all workers before each collective."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dsgdac_accel import WorkerGroup
from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.topology import Topology
from tests.multiprocess.scenarios import Scenario, World, require_equal, train
from tests.workers import Launch, run_workers

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")


def debug() -> None:
    """Make the process groups to come like those of a launch with the variable."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)


def train_checked(rank: int) -> dict:
    debug()
    return train(rank, World(5), Scenario())


def test_workers_that_send_unequally_many_messages_follow_algorithm_1():
    require_equal(World(5), Scenario(), run_workers(train_checked, 5))


PAIR = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
ALL = np.full((3, 3), 1 / 3)


def mix_checked(rank: int) -> float:
    debug()
    group = WorkerGroup(CPU, 20)
    parameter = torch.nn.Parameter(torch.full((4,), float(rank), dtype=torch.float64))
    mixer = Mixer(parameter, Topology.from_matrices([PAIR, 0.5 * ALL + 0.5 * np.eye(3), ALL]), group)
    for step in range(3):
        mixer.add(mixer.consensus_update(0.5))
        group.barrier(f"step {step}")
        assert group.all_gather_object(rank, "who is here") == [0, 1, 2]
    mixer.drain()
    return float(parameter.detach()[0])


def test_messages_and_sums_in_turn_are_not_taken_for_different_calls():
    expected = np.arange(3.0)
    for matrix in (PAIR, 0.5 * ALL + 0.5 * np.eye(3), ALL):
        expected = expected + 0.5 * (matrix @ expected - expected)
    assert run_workers(mix_checked, 3) == pytest.approx(list(expected), abs=1e-12)


def wait_for_a_missing_worker(rank: int) -> None:
    debug()
    group = WorkerGroup(CPU, 3)
    if rank == 1:
        time.sleep(60)
    group.barrier("a test")


@pytest.mark.slow
def test_a_missing_worker_is_named():
    outcomes = Launch(wait_for_a_missing_worker, 3).outcomes(hanging=1)
    assert "WorkerLostError: worker 0: worker 1 did not" in outcomes[0].error
