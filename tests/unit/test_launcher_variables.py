"""Tasks of a Slurm step find each other; processes that do not are refused, whichever launcher started them."""

import logging
import os

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

from dsgdac_accel import Gossip, GossipAccelerator, GossipCallback, WorkerGroup, join_slurm_step
from dsgdac_accel.distributed.launcher_variables import launched_processes

STEP = {
    "SLURM_JOB_ID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
"""What Slurm 22.05 set in `srun -N 2 -n 3`."""
TASKS = [
    {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    for rank, local, node in ((0, 0, 0), (1, 1, 0), (2, 0, 1))
]
JOINED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Set the variables of a launcher, without any others, and forget what is set meanwhile."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "PMI", "PET")) or name in JOINED]:
        monkeypatch.delenv(name)
    kept = dict(os.environ)
    yield lambda found: os.environ.update(found)
    os.environ.clear()
    os.environ.update(kept)


def joined():
    join_slurm_step()
    return tuple(os.environ.get(name) for name in JOINED)


@pytest.mark.parametrize(
    ("task", "expected"),
    list(zip(TASKS, [("0", "3", "0", "2"), ("1", "3", "1", "2"), ("2", "3", "0", "1")], strict=True)),
)
def test_the_tasks_of_a_step_get_torchruns_variables(variables, task, expected):
    variables(STEP | task)
    assert joined() == (*expected, "node0", "20203")
    assert joined() == (*expected, "node0", "20203")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (STEP | TASKS[2] | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, ("2", "3", "0", "1", "a", "1")),
        (
            STEP | TASKS[0] | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
            ("0", "2", "0", "2", "127.0.0.1", "20203"),
        ),
        (STEP | TASKS[0] | {"WORLD_SIZE": "1"}, (None, "1", None, None, None, None)),  # alone, or torchrun's
        (STEP | TASKS[0] | {"SLURM_STEP_NUM_TASKS": "1"}, (None,) * 6),
        ({"SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, (None,) * 6),  # a batch script, outside of any step
        (STEP | TASKS[0] | {"PMI_SIZE": "8"}, (None,) * 6),  # Slurm has started the daemons of MPI
        (STEP | TASKS[0] | {"PMI_SIZE": "3", "SLURM_PTY_PORT": "1"}, ("0", "3", "0", "2", "node0", "20203")),
    ],
)
def test_what_is_set_stays_and_a_single_task_stays_alone(variables, found, expected):
    variables(found)
    assert joined() == expected


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"SLURM_PTY_PORT": "1"}, r"3 tasks of an interactive step \(srun --pty\)"),
        ({"SLURM_HET_SIZE": "2"}, "a heterogeneous job of 2 components"),
        ({"SLURM_PROCID": "3"}, "got task 3 of 3"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "the rank of each of its 3 tasks"),
        ({"SLURM_NODEID": ""}, "the rank of each of its 3 tasks"),
    ],
)
def test_steps_whose_tasks_cannot_find_each_other_are_refused(variables, found, words, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    variables(STEP | TASKS[0] | found)
    with pytest.raises(ValueError, match=words + r".*set WORLD_SIZE=1\.$"):
        join_slurm_step()
    assert "RANK" not in os.environ


LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "join_slurm_step",
    "OMPI_COMM_WORLD_SIZE": "Launch with torchrun",
    "PMI_SIZE": "Launch with torchrun",
    "PET_NNODES": "Launch with torchrun",
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_processes_that_would_train_alone_are_refused(variables, name, tmp_path):
    model = nn.Linear(2, 1)
    Accelerator(cpu=True)  # Accelerate reads the launcher's variables once
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    variables({name: "3"})
    for train in (
        lambda: GossipAccelerator(cpu=True),
        lambda: Trainer(model, args, callbacks=[GossipCallback()]),
        lambda: Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: WorkerGroup(torch.device("cpu")),
    ):
        with pytest.raises(ValueError, match=rf"3 processes were launched \({name}\).*{LAUNCHERS[name]}"):
            train()


def test_the_launcher_that_started_most_counts(variables):
    variables({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "8"})
    assert launched_processes() == (8, "OMPI_COMM_WORLD_SIZE")
    variables({"WORLD_SIZE": "1"})
    assert launched_processes() == (1, "WORLD_SIZE")


def test_launchers_in_a_step_that_do_not_know_each_other_are_told(variables, caplog):
    variables(STEP | TASKS[0] | {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"})
    with caplog.at_level(logging.WARNING):
        GossipAccelerator(cpu=True)
    assert "3 tasks of this Slurm step" in caplog.text
    assert "--nnodes" in caplog.text
