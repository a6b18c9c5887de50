"""A worker that raises, is killed or falls silent ends the run on all others, in time, by an error that names it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn
from transformers import Trainer, TrainerCallback

from dsgdac_accel import CheckpointError, Gossip, GossipAccelerator, GossipCallback, GossipConfig, WorkerLostError
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.watchdog import WAITS
from tests.multiprocess.trainer_model import Model, Rows, arguments
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


# ---- one worker decides alone


def loop_alone(rank: int, what: str) -> None:
    """Train with 2 workers, of which one goes its own way after step 3."""
    accelerator = GossipAccelerator(gossip=GossipConfig(log_every=0))  # the timeout is 600 s
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 9):
        if what == "slow" and rank == FAULTY and step in (4, 6):
            time.sleep(6)
        if what == "breaks" and rank == FAULTY and step == 4:
            break
        if what == "skips" and rank == FAULTY and step == 4:
            continue
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if what == "deploys" and rank == 0 and step == 3:
            with accelerator.deployed_model(model):
                pass
        if what == "saves" and rank == 0 and step == 8:
            accelerator.save_state("not reached")
        if what == "starts anew" and rank == 0 and step == 3:
            accelerator.restart_exchange()
        if what == "gathers" and rank == 0 and step == 3:
            accelerator.gather(torch.ones(1))
        if what == "slow" and step == 5:
            accelerator.wait_for_everyone()
    with accelerator.deployed_model(model):
        pass


def plain_loop_alone(rank: int, what: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = Gossip(model, optimizer, GossipConfig(topology="complete"))
    for step in range(1, 9):
        if rank == FAULTY and step == 4:
            break
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    gossip.deploy()


def find_batch_size(rank: int, where: str) -> tuple[list[int], list]:
    accelerator = GossipAccelerator(gossip=GossipConfig(log_every=0))
    sizes = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(size: int) -> list:
        sizes.append(size)
        accelerator.free_memory()
        torch.manual_seed(rank)
        model = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        start = model.weight.tolist()
        for step in range(1, 5):
            if size == 8 and step == 3 and (where == "all" or rank == FAULTY):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rank} GiB.")
            accelerator.backward(model(torch.ones(size, 4)).square().mean())
            optimizer.step()
        return start

    return sizes, train()


class OutOfMemory(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def trainer_alone(rank: int, what: str) -> None:
    gossip = GossipCallback(GossipConfig())
    callbacks = [gossip, OutOfMemory()] if rank == FAULTY else [gossip]
    settings = arguments("unused", auto_find_batch_size=True)
    Trainer(Model(), settings, train_dataset=Rows(120), callbacks=callbacks).train()


ALONE = {
    "breaks": (loop_alone, "worker 0 in the exchange of step 4, worker 1 in averaging the workers at step 3"),
    "deploys": (loop_alone, "worker 0 in averaging the workers at step 3, worker 1 in the exchange of step 4"),
    "saves": (
        loop_alone,
        "worker 0 in agreeing on a checkpoint at step 8, worker 1 in averaging the workers at step 8",
    ),
    "batch size": (find_batch_size, "worker 1 in starting again with a smaller batch after OutOfMemoryError: CUDA out"),
}
"""What one worker does alone, in which function, and what is said of it."""
SLOW_ALONE = {
    "skips": (loop_alone, "worker 0 in the exchange of step 8, worker 1 in averaging the workers at step 7"),
    "starts anew": (loop_alone, "worker 0 in the exchange of step 3, worker 1 in"),
    "gathers": (loop_alone, "worker 0 in torch.distributed.all_gather, worker 1 in"),
    "trainer": (trainer_alone, "worker 1 in starting again with a smaller batch after OutOfMemoryError: CUDA out"),
    "plain": (plain_loop_alone, "worker 0 in the exchange of step 4, worker 1 in averaging the workers at step 3"),
}


def speaks_into(rank: int, folder: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function`, with what this process says in a file."""
    os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    return function(rank, *args)


@pytest.mark.parametrize("cases", [ALONE, pytest.param(SLOW_ALONE, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_workers_that_wait_for_each_other_end_within_seconds(cases, tmp_path):
    launches = {}
    for name, (function, _) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        launches[name] = Launch(speaks_into, 2, str(folder), function, name, timeout=60)
    for name, launch in launches.items():
        outcomes = launch.outcomes()
        said = "".join((tmp_path / name / str(rank)).read_text() + (outcomes[rank].error or "") for rank in (0, 1))
        function, words = cases[name]
        assert [outcome.exit_code for outcome in outcomes] == [1, 1], name
        assert f"the workers wait for each other: {words}" in said or f", {words}" in said, (name, said)
        assert f"in {function.__name__}" in said, "where one of them hangs"
        assert "after WorkerLostError" not in said, "a lost worker is not out of memory"


def slow_network(rank: int) -> None:
    """Wait at once for messages that are on their way: worker 1 is 10 rounds ahead, and waits for worker 0."""
    WorkerGroup(torch.device("cpu"))
    for round_ in range(1 + 10 * rank):
        WAITS.enter("rounds", round_)
    with WAITS.waiting("a round", "rounds", [0, 1]):
        time.sleep(8)
    WAITS.enter("collectives")
    with WAITS.waiting("a collective", "collectives", [0, 1]):
        time.sleep(8)


@pytest.mark.slow
def test_workers_that_wait_for_a_slow_one_or_for_the_network_go_on():
    network = Launch(slow_network, 2)
    assert run_workers(loop_alone, 3, "slow") == [None] * 3
    assert [outcome.exit_code for outcome in network.outcomes()] == [0, 0]


def test_all_workers_start_again_with_a_smaller_batch_from_equal_values():
    (sizes, start), (other_sizes, other_start) = run_workers(find_batch_size, 2, "all")
    assert sizes == other_sizes == [8, 7]
    assert start == other_start
