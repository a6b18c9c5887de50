"""Faults at random moments, fewer than in `python -m tests.soak.faults`, and memory over thousands of steps."""

import random
from collections import Counter

import pytest

from tests.soak.chains import BETWEEN, STEP, Chain, run_chain
from tests.soak.faults import soak, table
from tests.soak.runs import SETUPS, Setup
from tests.soak.sabotage import Fault
from tests.soak.steady import train_long
from tests.workers import run_workers

pytestmark = pytest.mark.task

SHORT = Setup("cifar", "dsgd_ac", 2, "one_peer_ring", ("--num_train_epochs", "2", "--model", "cnn", "--dropout", "0"))


@pytest.mark.slow
def test_a_run_that_is_interrupted_again_and_again_ends_like_an_undisturbed_one(tmp_path):
    planned = [
        [Fault("kill", 1, STEP, 5)],
        [Fault("pause", 1, STEP, 1, seconds=0.3), Fault("SIGTERM", 0, STEP, 2, number=1)],
        [Fault("altered file", 0, BETWEEN)],
    ]
    recorded = []
    (tmp_path / "chain").mkdir()
    chain = Chain(SHORT, tmp_path / "chain", tmp_path, random.Random(0), Counter(), recorded.append)
    end = run_chain(chain, lambda: planned.pop(0) if planned else [])
    assert [fault["problems"] for fault in recorded] == [[]] * 4
    assert [fault["codes"] for fault in recorded] == [[1, -9], [75, 75], [75, 75], [2, 2]]
    assert "worker 1 was lost" in recorded[0]["said"]
    assert "SIGTERM to worker 0" in recorded[2]["said"]
    assert "sha256" in recorded[3]["said"]
    assert (end["launches"], end["bitwise"]) == (4, True)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_no_fault_hangs_or_loses_a_checkpoint_or_changes_the_result(tmp_path):
    setups = [SETUPS[2], SETUPS[1], SETUPS[0], SETUPS[3]]
    results = soak(tmp_path / "faults.json", tmp_path, faults=24, seed=1, setups=setups)
    print(table(results))
    assert not results.problems
    assert len(results.faults) >= 24


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_memory_stays_flat_over_thousands_of_steps_with_delays(tmp_path):
    for measured in run_workers(train_long, 2, tmp_path, 4000, timeout=900):
        assert max(measured[-10:]) - max(measured[:10]) < 8.0  # MB, over 200 saves and 40 evaluations
