"""What the processes of a sharded worker find, change or lose alone: all of them end, at once, by the same error."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.multiprocess.test_sharded import loss_of, make_model, make_optimizer, mesh_of, sharded
from tests.workers import Outcome, run_workers, try_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ALONE = 1  # the process that acts alone
SOON = 20.0  # seconds for a launch that does not wait for `timeout`


class Training:
    """Workers of two processes each, which take steps."""

    def __init__(self, rank: int, *sizes: int, kind: str = "layers", timeout: float = 60, **gossip: Any) -> None:
        self.rank, self.mesh = rank, mesh_of(*(sizes or (2, 2)))
        config = GossipConfig(timeout=timeout, log_every=0, **gossip)
        self.accelerator = GossipAccelerator(cpu=True, device_mesh=self.mesh, gossip=config)
        model = make_model(kind)
        if "tp" in self.mesh.mesh_dim_names and rank == 3 and kind == "sequence":
            model.norm.float()
        model = sharded(model, self.mesh, kind)
        optimizer = make_optimizer("sgd", model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, step: int) -> None:
        reader = self.rank // self.accelerator.group.everyone.same_data
        self.accelerator.backward(loss_of(self.model, reader, step))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the optimizer, a list that a test may change."""
        return self.optimizer.optimizer.param_groups[0]["params"]


def ended(outcomes: list[Outcome], *words: str, soon: float = SOON) -> list[str]:
    """Return the last lines of the workers' errors, all of which have the words, and came before the timeout."""
    errors = [str(outcome.error).strip().splitlines()[-1] for outcome in outcomes]
    for error, outcome in zip(errors, outcomes, strict=True):
        assert all(re.search(word, error) for word in words), error
        assert outcome.seconds < soon, (outcome.seconds, error)
    return errors


# ---- changes of parameters


def change(training: Training, how: str) -> None:
    last = training.parameters[-1]
    if how == "unfreezes":
        next(training.model.parameters()).requires_grad_(True)
    elif how == "freezes":
        last.requires_grad_(False)
    elif how == "removes":
        del training.parameters[-1]
    elif how == "adds":
        training.optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2), requires_grad=False)]})


def change_alone(rank: int, how: str, kind: str, late: bool, average: bool) -> None:
    training = Training(rank, *((2, 1, 2) if kind == "block" else (2, 2)), kind=kind)
    training.accelerator.gossip_steps[0].mixer.arrivals.checks_late = late
    for step in range(5):
        if step == 2 and rank == ALONE:
            change(training, how)
        if step == 2 and average:
            with training.accelerator.deployed_model(training.model):
                pass
        training.step(step)


WORDS = {
    "unfreezes": "rank 1 added, unfroze or put in place of others 0.weight, before step 2",
    "freezes": "rank 1 froze (3|out).bias, before step 2",
    "removes": "rank 1 removed or replaced 3.bias, before step 2",
    "adds": r"rank 1 added, unfroze or put in place of others a parameter of shape \(2,\), before step 2",
}


@pytest.mark.parametrize(
    ("how", "kind", "late", "average"),
    [
        ("unfreezes", "frozen", False, True),  # without an average, FSDP's own reduction fails before the step
        ("removes", "frozen", False, False),
        ("removes", "frozen", True, False),
        ("adds", "block", False, False),
        ("freezes", "frozen", False, True),
        ("freezes", "block", False, False),
    ],
)
def test_parameters_that_one_process_changes_alone_end_the_run_at_once_by_its_name(how, kind, late, average):
    outcomes = try_workers(change_alone, 4, how, kind, late, average)
    words = WORDS[how]
    if not average:  # the other worker hears of it by the report
        ended(outcomes[2:], "(was|were) lost", words)
        outcomes = outcomes[:2]
    ended(outcomes, "RuntimeError", words, "in the same way on all of them")


def change_together(rank: int, late: bool) -> int:
    """Unfreeze a weight before step 3, and return how many parameters are mixed in the end."""
    training = Training(rank, kind="frozen")
    training.accelerator.gossip_steps[0].mixer.arrivals.checks_late = late
    for step in range(6):
        training.model[0].weight.requires_grad_(step >= 3)
        training.step(step)
    training.accelerator.gossip_steps[0].mixer.drain()
    return len(training.accelerator.gossip_steps[0].mixer.flats[0].parameters)


@pytest.mark.parametrize("late", [False, True])
def test_what_all_processes_unfreeze_is_mixed(late):
    assert run_workers(change_together, 4, late) == [6] * 4


# ---- faults that one process finds


def edit_in_flight(rank: int, late: bool, how: str) -> None:
    training = Training(rank, constant=0.0)
    training.accelerator.gossip_steps[0].mixer.arrivals.checks_late = late
    for step in range(4):
        if step == 2 and rank == ALONE:
            time.sleep(0.5)  # once everything was sent
            own = next(bucket for flat in training.mixer.flats for bucket in flat.buckets)
            own.data.add_(1.0)
        training.step(step)


def lack_a_plan(rank: int) -> None:
    """Let the gradients of the copies of a norm differ, in the first process along `tp` of worker 1 alone."""
    training = Training(rank, 2, 1, 2, kind="block")
    if rank == 2:
        training.model.norm.bias.register_hook(lambda gradient: 2 * gradient)
    training.step(0)


def start_apart(rank: int) -> None:
    """Make the copy of a norm that one process of worker 1 starts from of another dtype."""
    training = Training(rank, 2, 1, 2, kind="sequence")
    training.step(0)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lack_a_plan, ["ValueError: worker 1: norm.bias has different gradients on rank 2 and rank 3"]),
        (start_apart, ["ValueError: worker 1: .*norm.weight.*rank 2 has .*float64.* and rank 3 has .*float32"]),
    ],
)
def test_copies_that_differ_in_one_worker_are_named_by_all_processes(act, words):
    ended(try_workers(act, 4), *words)
