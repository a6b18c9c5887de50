"""What the processes of a sharded worker find, change or lose alone: all of them end, at once, by the same error."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
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

    def __init__(self, rank: int, kind: str = "layers", timeout: float = 60, **gossip: Any) -> None:
        self.rank, self.mesh = rank, mesh_of(2, 2)
        config = GossipConfig(timeout=timeout, log_every=0, **gossip)
        self.accelerator = GossipAccelerator(cpu=True, device_mesh=self.mesh, gossip=config)
        model = sharded(make_model(kind), self.mesh)
        optimizer = make_optimizer(model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, step: int) -> None:
        self.accelerator.backward(loss_of(self.model, self.rank, step))
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


def change_alone(rank: int, how: str, late: bool, average: bool) -> None:
    training = Training(rank, kind="frozen")
    training.accelerator.gossip_steps[0].mixer.agreement.late = late
    for step in range(5):
        if step == 2 and rank == ALONE:
            change(training, how)
        if step == 2 and average:
            with training.accelerator.deployed_model(training.model):
                pass
        training.step(step)


WORDS = {
    "unfreezes": "rank 1 added, unfroze or put in place of others 0.weight, before step 2",
    "freezes": "rank 1 froze 3.bias, before step 2",
    "removes": "rank 1 removed or replaced 3.bias, before step 2",
    "adds": r"rank 1 added, unfroze or put in place of others a parameter of shape \(2,\), before step 2",
}


@pytest.mark.parametrize(
    ("how", "late", "average"),
    [
        ("unfreezes", False, True),  # without an average, FSDP's own reduction fails before the step
        ("removes", False, False),
        ("removes", True, False),
        ("adds", False, False),
        ("freezes", False, True),
    ],
)
def test_parameters_that_one_process_changes_alone_end_the_run_at_once_by_its_name(how, late, average):
    outcomes = try_workers(change_alone, 4, how, late, average)
    words = WORDS[how]
    if not average:  # the other worker hears of it by the report
        ended(outcomes[2:], "(was|were) lost", words)
        outcomes = outcomes[:2]
    ended(outcomes, "RuntimeError", words, "in the same way on all of them")


def change_together(rank: int, late: bool) -> int:
    """Unfreeze a weight before step 3, and return how many parameters are mixed in the end."""
    training = Training(rank, kind="frozen")
    training.accelerator.gossip_steps[0].mixer.agreement.late = late
    for step in range(6):
        training.model[0].weight.requires_grad_(step >= 3)
        training.step(step)
    training.accelerator.gossip_steps[0].mixer.drain()
    return len(training.accelerator.gossip_steps[0].mixer.slots.of_workers[0])


@pytest.mark.parametrize("late", [False, True])
def test_what_all_processes_unfreeze_is_mixed(late):
    assert run_workers(change_together, 4, late) == [6] * 4


def train_unlike(rank: int) -> None:
    """Freeze a weight before `prepare` in the second process of each worker, whose columns then are equal."""
    accelerator = GossipAccelerator(cpu=True, device_mesh=mesh_of(2, 2), gossip=GossipConfig(timeout=60))
    model = sharded(make_model(), mesh_of(2, 2))
    model[3].bias.requires_grad_(rank % 2 == 0)
    accelerator.prepare(model, make_optimizer(model))


def replace_alone(rank: int) -> None:
    """Replace a parameter right before a step: in the next pass FSDP2 would put its own one back."""
    training = Training(rank)
    for step in range(3):
        training.accelerator.backward(loss_of(training.model, rank, step))
        if step == 1 and rank == ALONE:
            training.model[3].bias = nn.Parameter(training.model[3].bias.detach().clone())
        training.optimizer.step()
        training.optimizer.zero_grad()


def test_processes_of_a_worker_that_train_other_parameters_are_refused_by_all():
    ended(try_workers(train_unlike, 4), "ValueError: all workers must have the same trainable parameters", "3.bias")


def test_what_one_process_replaces_in_its_model_is_told_to_all():
    ended(try_workers(replace_alone, 4), "(rank 1|RuntimeError): 3.bias was replaced in the model")


# ---- faults that one process finds


def not_finite(rank: int) -> list[str]:
    """Return what is logged where the gradient of one process is not finite."""
    training, said = Training(rank), []
    logging.getLogger("dsgdac_accel.core.nonfinite").addFilter(lambda record: said.append(record.getMessage()) or True)
    training.model.register_forward_hook(lambda model, x, out: out * (torch.nan if rank == 3 else 1.0))
    training.step(0)
    return said


def test_a_worker_says_once_that_its_gradient_is_not_finite():
    assert [len(said) for said in run_workers(not_finite, 4)] == [0, 0, 1, 0]


# ---- several models, and trainings that end


def evaluate_another(rank: int) -> dict[str, bool]:
    """Run a second model inside and after an evaluation of the first one; FSDP keeps its root gathered."""
    training = Training(rank)
    second = sharded(make_model(), training.mesh)
    second, optimizer = training.accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
    for step in range(3):
        training.step(step)
        training.accelerator.backward(loss_of(second, rank, step))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        with training.accelerator.deployed_model(training.model):
            inside = loss_of(second, 0, 0)
        after = loss_of(second, 0, 0)
        second.reshard()
        own = loss_of(second, 0, 0)
        with training.accelerator.deployed_model(second):
            mean = loss_of(second, 0, 0)
    return {"restored": torch.equal(own, after), "averaged": torch.equal(inside, mean), "differs": own != mean}


def test_every_prepared_model_is_gathered_anew_at_both_ends_of_an_evaluation():
    for result in run_workers(evaluate_another, 4):
        assert result == {"restored": True, "averaged": True, "differs": True}


# ---- calls on one process alone


def gather_alone(rank: int) -> None:
    """Ask for the whole model on one process, where no average is formed first."""
    training = Training(rank, timeout=4.0)
    training.step(0)
    training.accelerator.deploy(training.model)
    if rank == 0:
        training.accelerator.get_state_dict(training.model)
    time.sleep(6.0)


def test_a_process_that_gathers_the_model_alone_is_told_to_call_it_on_all():
    error = str(try_workers(gather_alone, 4)[0].error)
    assert re.search("WorkerLostError: .*did not answer within 4 s in gathering the whole model", error)
    assert "`get_state_dict` included" in error


def begin_alone(rank: int) -> list[str]:
    """Return what is logged where all processes are one worker."""
    said: list[str] = []
    logging.getLogger("dsgdac_accel.compatibility").addFilter(lambda record: said.append(record.getMessage()) or True)
    GossipAccelerator(cpu=True, device_mesh=mesh_of(1, 2))
    return said


def test_a_single_sharded_worker_is_told_once_how_to_get_more():
    (first,), others = run_workers(begin_alone, 2)
    assert "all 2 processes shard the model of 1 worker" in first
    assert not others


# ---- lost processes

STAGES = ["prepare", "deployed model", "measure", "save", "load", "end"]
PATIENCE = 10.0


def lose_a_process(rank: int, stage: str, folder: Path) -> None:
    """Process 3 dies as soon as the others enter a stage."""
    dies = rank == 3

    def enter(name: str) -> None:
        if dies and name == stage:
            os._exit(0)

    accelerator = GossipAccelerator(cpu=True, device_mesh=mesh_of(2, 2), gossip=GossipConfig(timeout=PATIENCE))
    model = sharded(make_model(), mesh_of(2, 2))
    optimizer = make_optimizer(model)
    enter("prepare")
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        accelerator.backward(loss_of(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
    enter("measure")
    accelerator.measure_consensus()
    enter("deployed model")
    with accelerator.deployed_model(model):
        pass
    enter("save")
    accelerator.save_state(folder)
    enter("load")
    accelerator.load_state(folder)
    accelerator.backward(loss_of(model, rank, 2))
    optimizer.step()
    enter("end")
    accelerator.end_training()


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_that_dies_in_any_stage_ends_all_others_by_its_name(stage, tmp_path):
    outcomes = try_workers(lose_a_process, 4, stage, tmp_path / "saved")
    lost = "WorkerLostError: .*(worker 1|rank 3) was lost in"
    # In the end nothing is left to be received: the barrier behind the test notices it.
    ended(outcomes[:3], lost if stage != "end" else f"{lost}|Connection", soon=PATIENCE + 10)
