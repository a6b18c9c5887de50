"""When a Trainer that got a signal saves and stops, without workers."""

from types import SimpleNamespace

import pytest

from dsgdac_accel import StoppedBySignal
from dsgdac_accel.trainer.stopping import SignalStop


@pytest.fixture
def stop():
    accelerator = SimpleNamespace(
        should_stop=lambda: True,
        stop_reason="SIGTERM",
        group=SimpleNamespace(everyone=SimpleNamespace(barrier=lambda what: None)),
    )
    trainer = SimpleNamespace(
        accelerator=accelerator, state=SimpleNamespace(global_step=4, max_steps=9, epoch=0.5), model="model", saved=[],
        args=SimpleNamespace(output_dir="out"), is_world_process_zero=lambda: False,
    )  # fmt: skip
    trainer._save_checkpoint = lambda model, trial: trainer.saved.append(model)
    return SignalStop(trainer)


def control():
    return SimpleNamespace(should_save=False, should_training_stop=False)


def test_in_mid_epoch_it_saves_and_stops_before_the_evaluation(stop):
    told = control()
    stop.on_step_end(stop.trainer.state, told)
    assert (told.should_save, told.should_training_stop) == (True, True)
    stop.checkpoint_saved(4)
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM at step 4 of 9; checkpoint in out"):
        stop.on_epoch_end(control())
    assert stop.trainer.saved == []


def test_at_the_end_of_an_epoch_the_trainer_evaluates_and_saves_first(stop):
    stop.trainer.state.epoch = 1.0
    told = control()
    stop.on_step_end(stop.trainer.state, told)
    assert (told.should_save, told.should_training_stop) == (True, False)
    stop.checkpoint_saved(4)
    after = control()
    stop.on_epoch_end(after)
    assert after.should_save
    with pytest.raises(StoppedBySignal):
        stop.on_epoch_begin()
    assert stop.trainer.saved == ["model"], "a checkpoint from before the evaluation does not count"


def test_the_last_step_ends_as_always(stop):
    stop.trainer.state.global_step = 9
    told = control()
    stop.on_step_end(stop.trainer.state, told)
    assert (told.should_save, told.should_training_stop) == (True, False)
    stop.on_epoch_end(control())
    stop.on_epoch_begin()


def test_a_checkpoint_that_the_trainer_does_not_save_is_saved(stop):
    stop.on_step_end(stop.trainer.state, control())
    with pytest.raises(StoppedBySignal):
        stop.on_epoch_end(control())
    assert stop.trainer.saved == ["model"]
