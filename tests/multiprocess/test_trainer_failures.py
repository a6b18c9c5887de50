"""A worker lost while a Trainer trains, evaluates or saves stops the others in time, with its name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from transformers import Trainer, TrainerCallback

from dsgdac_accel import GossipCallback, GossipConfig
from tests.multiprocess.trainer_model import Model, Rows, arguments
from tests.workers import Launch, LaunchesAhead

pytestmark = pytest.mark.multiprocess

TIMEOUT = 4.0


class Failure(TrainerCallback):
    """Makes worker 1 fail in a given way at a given event of step 4."""

    def __init__(self, rank: int, how: str, when: str) -> None:
        self.rank, self.how = rank, how
        setattr(self, f"on_{when}", self._fail)

    def _fail(self, args, state, control, **kwargs):
        if self.rank != 1 or state.global_step < 4:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raise":
            raise ZeroDivisionError("a mistake of the user")
        if self.how == "stop":
            control.should_training_stop = True
        if self.how == "epoch":
            control.should_epoch_stop = state.global_step == 4
        if self.how == "silence":
            time.sleep(10 * TIMEOUT + 60)  # it is killed when the others have ended


def train(rank: int, folder: Path, how: str, when: str) -> None:
    model = Model(batch_norm=True)
    Trainer(
        model,
        arguments(
            str(folder), max_steps=12, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
            per_device_eval_batch_size=2, logging_strategy="steps", logging_steps=4,
        ),
        train_dataset=Rows(40),
        eval_dataset=Rows(16, 1),
        callbacks=[Failure(rank, how, when), GossipCallback(GossipConfig(timeout=TIMEOUT))],
    ).train()  # fmt: skip


CASES = [
    ("kill", "step_begin"),
    ("kill", "prediction_step"),
    ("kill", "log"),
    ("kill", "evaluate"),
    ("kill", "save"),
    ("raise", "prediction_step"),
    ("raise", "pre_optimizer_step"),
    ("silence", "prediction_step"),
    ("silence", "step_begin"),
    ("stop", "step_end"),
    ("epoch", "step_end"),
]
FAST = [("kill", "step_begin"), ("kill", "save"), ("raise", "prediction_step"), ("stop", "step_end")]


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory):
    """Launch the selected cases, several at a time: they mostly wait for a lost worker."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    selected = [item.callspec.params["case"] for item in here]

    def launch(case):
        return Launch(train, 3, tmp_path_factory.mktemp("run"), *case, timeout=10 * TIMEOUT + 60)

    ahead = LaunchesAhead(launch, selected)
    yield ahead
    ahead.stop()


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids="-".join
)
def test_a_lost_worker_is_named_in_time(case, launches):
    how, _ = case
    outcomes = launches.outcomes(case, hanging=1 if how == "silence" else None)
    if how == "raise":
        assert "a mistake of the user" in outcomes[1].error
    for rank in (0, 2):
        last = outcomes[rank].error.splitlines()[-1]
        assert outcomes[rank].exit_code == 1
        assert "WorkerLostError" in last or "different collectives" in last, last
        assert "worker 1" in outcomes[rank].error, last
        assert outcomes[rank].seconds < TIMEOUT + 30
