"""Two GPUs or more: lost workers, and workers out of step, of which NCCL does not tell."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable

import pytest

from tests.gpu.algorithm import Training
from tests.gpu.machine import Here, on_devices, try_launch, workers_on

pytestmark = pytest.mark.multiprocess

TIMEOUTS = {"cpu": 3.0, "cuda": 20.0}
"""Seconds after which a lost worker is noticed at the latest."""
NOTICE_SECONDS = 10.0
"""Seconds beyond the timeout to find out which worker was lost."""


def step_until_an_error(training: Training, timeout: float, after_step: Callable[[], object] = lambda: None) -> None:
    started = time.perf_counter()
    try:
        for step in range(6):
            training.step(step)
            after_step()
        training.accelerator.gossip_steps[0].state_dict()  # waits for what is in flight
    finally:
        assert time.perf_counter() - started < timeout + NOTICE_SECONDS, "the error came late"


def lose_the_last_worker(here: Here, timeout: float, script_waits: bool, folder: str) -> None:
    os.dup2(os.open(f"{folder}/{here.rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    training = Training.prepared(here, "sgd", topology="ring", timeout=timeout)
    for step in range(3):
        training.step(step)
    if here.rank == here.size - 1:
        os._exit(0)
    step_until_an_error(training, timeout, here.synchronize if script_waits else lambda: None)


@on_devices(2)
def test_a_lost_worker_is_named(device, tmp_path):
    workers = workers_on(device)
    outcomes = try_launch(lose_the_last_worker, device, TIMEOUTS[device], False, str(tmp_path), workers=workers)
    for outcome in outcomes[:-1]:
        assert "WorkerLostError" in (outcome.error or "no error")
        assert f"worker {workers - 1}" in outcome.error


@on_devices(2)
def test_a_lost_worker_ends_a_script_that_hangs(device, tmp_path):
    """Where the script waits for the GPU, as in `loss.item()`, a process may end with a message instead of an error."""
    workers = workers_on(device)
    outcomes = try_launch(lose_the_last_worker, device, TIMEOUTS[device], True, str(tmp_path), workers=workers)
    for outcome in outcomes[:-1]:
        assert outcome.exit_code == 1, "it hangs"
        told = (outcome.error or "") + (tmp_path / str(outcome.rank)).read_text()
        assert re.search(r"worker \d+\b.*(lost|not answer)", told), told


def go_one_step_ahead(here: Here, timeout: float) -> None:
    training = Training.prepared(here, "sgd", topology="ring", timeout=timeout)
    for step in range(2):
        training.step(step)
    mixer = training.accelerator.gossip_steps[0].mixer
    if here.rank == 1:
        mixer.start_at(mixer.step + 2)  # discards the exchange of this step, and is one step ahead of the others then
    step_until_an_error(training, timeout)


@on_devices(2, slow_on_cpu=True)
def test_a_worker_one_step_off_is_noticed_by_all(device):
    """NCCL ignores tags, so it would mix one step's parameters with another's."""
    for outcome in try_launch(go_one_step_ahead, device, TIMEOUTS[device], workers=workers_on(device)):
        assert "RuntimeError" in (outcome.error or "no error") or "WorkerLostError" in outcome.error
