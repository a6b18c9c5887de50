"""The training loop without workers or files: which steps, records and evaluations it makes, and where it goes on."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tasks.common import training_loop
from tasks.common.config import ConfigError
from tasks.common.training_loop import Prepared, TrainingLoop
from tasks.common.weight_average import WeightAverageConfig

STEPS_PER_EPOCH, ACCUMULATION = 3, 2


class FakeAccelerator:
    """Lets every second micro-batch be a step."""

    gossip_steps = ()
    num_workers = 1
    is_main_process = True
    device = torch.device("cpu")

    def __init__(self):
        self.group = SimpleNamespace(steps_taken=0, all_gather_object=lambda mine, what: [mine])
        self.seen = self.passes = 0
        self.logged = []

    @property
    def sync_gradients(self):
        return self.seen % ACCUMULATION == 0

    def accumulate(self, model):
        self.seen += 1
        return nullcontext()

    def log(self, values, step):
        self.logged.append((step, values))

    def register_for_checkpointing(self, loop):
        self.registered = loop


class RecordingTask:
    """Notes what the loop calls."""

    def __init__(self):
        self.calls = []

    def begin_epoch(self):
        self.calls.append(f"begin {self.loop.epoch}")

    def backward(self, batch):
        return torch.tensor(float(batch)), 1.0

    def after_step(self):
        self.calls.append(f"step {self.loop.step}")
        self.weighed = self.loop.loss.sums["since_record"][1]

    def record_values(self):
        return {"steps": self.weighed / ACCUMULATION}, {}

    def end_epoch(self):
        self.calls.append("end")

    def evaluate(self, done, measure_curvature):
        self.calls.append(f"evaluate{' last' * done}{' curvature' * measure_curvature}")


@pytest.fixture
def make(monkeypatch):
    """Builds a loop and a task on a fake accelerator."""

    def build(total_steps, eval_every=1, curvature_every=None, logging_steps=100):
        accelerator = FakeAccelerator()
        saved = []
        checkpoints = SimpleNamespace(save_if_due=saved.append, finish=lambda: saved.append("finish"))
        monkeypatch.setattr(training_loop, "Checkpoints", lambda *arguments: checkpoints)
        accelerator.data_position = lambda loader: SimpleNamespace(epoch=loop.step // STEPS_PER_EPOCH)
        accelerator.resumed_batches = lambda loader, replay: loader[taken(loop) :]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = SimpleNamespace(step=lambda: None)
        model = SimpleNamespace(train=lambda: None)
        prepared = Prepared(model, optimizer, list(range(STEPS_PER_EPOCH * ACCUMULATION)), scheduler)

        def due(epoch, last):
            return curvature_every is not None and (last or (epoch + 1) % curvature_every == 0)

        config = SimpleNamespace(
            eval_every=eval_every,
            curvature=SimpleNamespace(due=due),
            weight_average=WeightAverageConfig(),
            algorithm="sgd",
            seed=0,
            logging_steps=logging_steps,
        )
        output = SimpleNamespace(logged_bytes=lambda: 7)
        loop = TrainingLoop("task", config, accelerator, prepared, output, STEPS_PER_EPOCH, total_steps)
        task = RecordingTask()
        task.loop, task.saved = loop, saved
        return loop, task

    def taken(loop):
        return (loop.step - loop.epoch * STEPS_PER_EPOCH) * ACCUMULATION

    return build


def test_steps_of_accumulated_micro_batches_end_in_an_evaluation_of_every_epoch(make):
    loop, task = make(total_steps=6)
    loop.run(task)
    epochs = [f"begin {epoch}" for epoch in range(2)]
    steps = [[f"step {step}" for step in range(3 * epoch + 1, 3 * epoch + 4)] for epoch in range(2)]
    assert task.calls == [epochs[0], *steps[0], "end", "evaluate", epochs[1], *steps[1], "end", "evaluate last"]
    assert loop.loss.last_epoch == 2.5  # the mean of 0, 1, .. 5
    assert task.saved == [1, 2, 3, 4, 5, 6, "finish"]
    assert loop.accelerator.group.steps_taken == 6
    assert loop.lr == 0.5


@pytest.mark.parametrize(
    ("settings", "evaluated"),
    [
        ({"eval_every": 2}, {1: "evaluate", 3: "evaluate", 4: "evaluate last"}),
        ({"eval_every": 9}, {4: "evaluate last"}),
        ({"eval_every": 9, "curvature_every": 3}, {2: "evaluate curvature", 4: "evaluate last curvature"}),
    ],
)
def test_evaluations_are_as_far_apart_as_asked_and_the_last_epoch_has_one(make, settings, evaluated):
    loop, task = make(total_steps=15, **settings)
    loop.run(task)
    epochs = " ".join(task.calls).split("begin ")[1:]
    assert {int(text.split()[0]): text[text.index("evaluate") :].strip() for text in epochs if "evaluate" in text} == (
        evaluated
    )


def test_a_run_may_end_in_the_middle_of_an_epoch(make):
    loop, task = make(total_steps=4)
    loop.run(task)
    assert task.calls[-3:] == ["step 4", "end", "evaluate last"]
    assert not loop.epoch_is_complete


@pytest.mark.parametrize(("saved_at", "total", "calls"), [(4, 6, ["step 5", "step 6"]), (6, 6, []), (4, 4, [])])
def test_a_loaded_loop_goes_on_where_it_was_saved(make, saved_at, total, calls):
    first, task = make(total_steps=saved_at)
    first.run(task)
    first.loss.add(torch.tensor(3.0), 2.0)
    state = first.state_dict()
    loop, task = make(total_steps=total)
    loop.load_state_dict(state)
    assert (loop.epoch, loop.step, loop.lr, loop.loss.last_epoch, loop.log_bytes) == (
        1, saved_at, 0.5, first.loss.last_epoch, 7,
    )  # fmt: skip
    assert loop.loss.sums == first.loss.sums
    loop.run(task)
    assert task.calls == ["begin 1", *calls, "end", "evaluate last"]


def test_a_checkpoint_beyond_the_last_step_is_refused(make):
    first, task = make(total_steps=5)
    first.run(task)
    loop, _ = make(total_steps=4)
    with pytest.raises(ConfigError, match="the checkpoint is of step 5, but this run has only 4 steps"):
        loop.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("logging_steps", "points"),
    [
        (2, {2: 1.5, 4: 2.5, 6: 3.5}),  # 0 1 2 3 | 4 5 0 1 | 2 3 4 5: windows go on across the epoch of 3 steps
        (4, {4: 2.0}),  # steps 5 to 7 are no complete window
        (9, {7: 15 * 2 / 14 + 1 / 14}),  # a shorter run is one window
    ],
)
def test_each_recorded_loss_is_a_mean_over_equally_many_steps(make, logging_steps, points):
    loop, task = make(total_steps=7, logging_steps=logging_steps)
    loop.run(task)
    assert {step: values["train/loss"] for step, values in loop.accelerator.logged} == pytest.approx(points)
    assert {values["steps"] for _, values in loop.accelerator.logged} == {min(logging_steps, 7)}


def test_a_window_that_a_checkpoint_interrupts_is_completed(make):
    whole, task = make(total_steps=6, logging_steps=4)
    states = {}
    whole.checkpoints.save_if_due = lambda step: states.setdefault(step, whole.state_dict())
    whole.run(task)
    rest, task = make(total_steps=6, logging_steps=4)
    rest.load_state_dict(states[2])
    rest.run(task)
    assert rest.accelerator.logged == whole.accelerator.logged
    assert rest.loss.last_epoch == whole.loss.last_epoch


def test_records_and_the_summary_say_where_the_run_is(make):
    loop, task = make(total_steps=3, logging_steps=3)
    loop.run(task)
    values = {"train/loss": 2.5, "steps": 3.0, "epoch": 0, "workers": 1, "gossip/lr": 0.5}
    assert loop.accelerator.logged == [(3, values)]
    summary = loop.summary()
    assert (summary["steps"], summary["epochs"], summary["topology"], summary["radius"]) == (3, 1, "all-reduce", 0.0)
    assert "lost_workers" not in summary
