"""Survivors repeat Accelerate's own collectives when a worker is lost in one of them."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.distributed.failure_detection import WorkerLostError
from tests.selection import slow_except
from tests.workers import try_workers

NAMES = (
    "gather", "gather_for_metrics", "gather_for_metrics of objects", "reduce", "pad_across_processes",
    "wait_for_everyone", "check_trigger", "main_process_first",
)  # fmt: skip


def make_accelerator(**settings):
    return GossipAccelerator(gossip=GossipConfig(timeout=20, log_every=0, **settings))


def call(accelerator, number, name):
    """The result of this collective of Accelerate, called with tensors that hold their worker's rank."""
    mine = torch.full((2,), float(number))
    if name == "main_process_first":
        with accelerator.main_process_first():
            return accelerator.group.size
    if name == "gather_for_metrics of objects":
        return accelerator.gather_for_metrics([f"worker {number}"])
    if name == "pad_across_processes":
        return list(accelerator.pad_across_processes(torch.ones(1 + number)).shape)
    if name in ("wait_for_everyone", "check_trigger"):
        return getattr(accelerator, name)()
    value = getattr(accelerator, name)(mine)
    assert torch.equal(mine, torch.full((2,), float(number)))
    return value.tolist()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_next(group):
    """Kill this worker once it has contributed, before all others know that the collective is complete."""
    guarded = group.guarded

    def guarded_once(*args, **options):
        guarded(*args, **options)
        die()

    group.guarded = guarded_once


def call_all(rank, victim, dies_at, after):
    accelerator = make_accelerator(on_worker_loss="continue")
    found = {}
    for name in NAMES:
        if (rank, name) == (victim, dies_at):
            die_in_the_next(accelerator.group) if after else die()
        found[name] = call(accelerator, rank, name)
    return found, (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process)


def expected(numbers, name):
    if name in ("gather", "gather_for_metrics"):
        return [float(number) for number in numbers for _ in range(2)]
    return {
        "gather_for_metrics of objects": [f"worker {number}" for number in numbers],
        "reduce": [float(sum(numbers))] * 2, "pad_across_processes": [1 + max(numbers)], "wait_for_everyone": None,
        "check_trigger": False, "main_process_first": len(numbers),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("dies_at", "after"),
    slow_except(
        [(name, bool(number % 4 < 2)) for number, name in enumerate(NAMES) if number % 2 or number == 0],
        [(name, after) for name in NAMES for after in (False, True)],
    ),
)
def test_survivors_repeat_a_collective_of_accelerate(dies_at, after):
    victim = 0 if NAMES.index(dies_at) % 2 else 2  # the main process, too
    outcomes = try_workers(call_all, 3, victim, dies_at, after)
    left = [number for number in range(3) if number != victim]
    assert [outcomes[number].exit_code for number in left] == [0, 0], [outcome.error for outcome in outcomes]
    for place, number in enumerate(left):
        found, about = outcomes[number].value
        assert about == (2, place, place == 0)
        for name in NAMES:
            before = NAMES.index(name) < NAMES.index(dies_at)
            assert found[name] == expected(range(3) if before else left, name), name


def gather_in_a_section(rank, on_worker_loss):
    accelerator = make_accelerator(on_worker_loss=on_worker_loss)
    model = nn.Linear(2, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def evaluate():
        with accelerator.deployed_model(model):
            if rank == 1:
                die()
            return accelerator.gather(torch.tensor([accelerator.group.rank])).tolist()

    return accelerator.group.retry_after_loss(evaluate)


def test_a_section_starts_over_as_a_whole():
    outcomes = try_workers(gather_in_a_section, 3, "continue")
    assert [outcome.value for outcome in outcomes] == [[0, 1], None, [0, 1]], [outcome.error for outcome in outcomes]


def test_if_the_run_stops_at_a_loss_errors_are_accelerates_own():
    outcomes = try_workers(gather_in_a_section, 3, "stop")
    errors = [outcomes[0].error, outcomes[2].error]
    assert all("RuntimeError" in error for error in errors), errors
    assert not any(WorkerLostError.__name__ in error for error in errors)


def read_shuffled(rank, victim):
    """Two passes over a shuffled loader; at the start of the second, the victim is lost."""
    accelerator = make_accelerator(on_worker_loss="continue")
    torch.manual_seed(rank)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.arange(24.0).unsqueeze(1))
    model, _, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(data, batch_size=2, shuffle=True)
    )
    rows = []
    for pass_ in range(2):
        if (rank, pass_) == (victim, 1):
            die()
        rows.append([int(row) for (batch,) in loader for row in batch])
    rest = [int(row) for (batch,) in accelerator.skip_first_batches(loader, 2) for row in batch]
    return rows, rest


@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_of_a_loss_at_the_start_of_a_pass_read_disjoint_shards_of_one_order(victim):
    outcomes = try_workers(read_shuffled, 3, victim)
    left = [outcome for outcome in outcomes if outcome.rank != victim]
    assert [outcome.exit_code for outcome in left] == [0, 0], [outcome.error for outcome in outcomes]
    for first, second in zip(*(outcome.value[0] + [outcome.value[1]] for outcome in left), strict=True):
        assert not set(first) & set(second)
    orders = [outcome.value[0] for outcome in left]
    assert all(sorted(first) != sorted(second) for first, second in orders)  # shuffled again
