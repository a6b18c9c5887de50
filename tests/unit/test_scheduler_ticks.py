"""How often a prepared scheduler ticks, against what the script's own arithmetic means."""

import math

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from transformers import get_scheduler, get_wsd_schedule

from dsgdac_accel.schedule import declared_length, planned_lrs, tick
from dsgdac_accel.scheduler_ticks import GossipScheduler, SchedulerTicks

WORKERS = 4


def sgd():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def linear(steps):
    return get_scheduler("linear", sgd(), num_warmup_steps=0, num_training_steps=steps)


def decide(scheduler, batches=100, loader="together", window=1, setting="auto", total=None, **accelerate):
    """Ticks of a scheduler beside a loader of so many batches, prepared together with it, before it, or not at all."""
    ticks = SchedulerTicks(setting, WORKERS, total)
    if loader == "before":
        with ticks.preparing():
            ticks.loader_sharded(batches, math.ceil(batches / WORKERS))
    with ticks.preparing():
        if loader == "together":
            ticks.loader_sharded(10, 3)  # for evaluation
            ticks.loader_sharded(batches, math.ceil(batches / WORKERS))
        prepared = GossipScheduler(AcceleratedScheduler(scheduler, [], **accelerate), ticks.call)
    return ticks.decide(prepared, window)


@pytest.mark.parametrize(
    ("scheduler", "how", "ticks", "in_doubt"),
    [
        # built from the unsharded loader, as in the scripts of Transformers: epochs * ceil(len(loader) / window)
        (linear(3 * 100), {}, 4, False),
        (linear(3 * 50), {"window": 2}, 4, False),
        (linear(3 * 101), {"batches": 101}, 4, False),
        (linear(7 * WORKERS), {}, 4, False),  # max_train_steps * num_processes
        (linear(3 * 50), {}, 4, True),  # the script accumulates 2 batches itself; as well 6 passes of one worker
        (linear(3 * 25), {}, 4, True),
        # built after the loader was sharded
        (linear(3 * 25), {"loader": "before"}, 1, True),
        (linear(3 * 13), {"loader": "before", "window": 2}, 1, True),
        (linear(3 * 25 * WORKERS), {"loader": "before"}, 4, True),  # as well 12 passes of one worker
        (linear(3 * 101), {"loader": "before", "batches": 101}, 4, False),
        (linear(17), {"loader": "before"}, 4, True),
        # the number of steps is known
        (linear(75), {"total": 75}, 1, False),
        (linear(300), {"total": 75}, 4, False),
        (linear(301), {"total": 76}, 4, False),
        (CosineAnnealingLR(sgd(), 74), {"total": 75}, 1, False),
        # no length
        (StepLR(sgd(), 10), {}, 4, True),
        (LambdaLR(sgd(), lambda step: 0.9**step), {"loader": "before"}, 4, True),
        (ReduceLROnPlateau(sgd()), {}, 1, False),
        # nothing sharded
        (linear(75), {"loader": None}, 1, True),
        # the argument
        (linear(300), {"setting": "once"}, 1, False),
        (linear(75), {"setting": "num_processes", "loader": None}, 4, False),
    ],
)
def test_the_schedule_ends_where_the_script_means_it_to(scheduler, how, ticks, in_doubt):
    decision = decide(scheduler, **how)
    assert (decision.ticks, decision.in_doubt) == (ticks, in_doubt), decision.reason


@pytest.mark.parametrize("accelerate", [{"split_batches": True}, {"step_with_optimizer": False}])
def test_where_accelerate_ticks_once_there_is_nothing_to_decide(accelerate):
    assert decide(linear(300), setting="num_processes", **accelerate) is None


def test_a_one_cycle_that_has_ended_stays_there_where_it_does_with_accelerate():
    prepared = GossipScheduler(AcceleratedScheduler(OneCycleLR(sgd(), 1.0, total_steps=2), []), 1)
    split = GossipScheduler(AcceleratedScheduler(OneCycleLR(sgd(), 1.0, total_steps=2), [], split_batches=True), 1)
    for scheduler in (prepared, split):
        scheduler.scheduler.optimizer.step()
        for _ in range(2):
            scheduler.step()
    last = prepared.get_last_lr()
    prepared.step()
    assert prepared.get_last_lr() == last
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        split.step()


def test_a_schedule_that_goes_on_long_after_its_end_is_warned_of_once(caplog):
    def warnings_of(length: int, calls: int, setting: str = "auto") -> list[str]:
        caplog.clear()
        ticks = SchedulerTicks(setting, WORKERS)
        scheduler = GossipScheduler(AcceleratedScheduler(CosineAnnealingLR(sgd(), length), []), 1)
        ticks.loader_sharded(100, 25)
        ticks.settle([scheduler], 1, quiet=False)
        scheduler.scheduler.optimizer.step()
        for _ in range(calls):
            scheduler.step()
        return [message for message in caplog.messages if "was built for" in message and "has ticked" in message]

    assert warnings_of(300, 3 * 25) == warnings_of(99, 25 + 3) == [], "to its end, and to that of a rounded loader"
    (message,) = warnings_of(10, 10)
    assert "10 ticks" in message
    assert "40 ticks" in message
    assert "scheduler_ticks='once'" in message
    assert warnings_of(10, 20, "once") == [], "the script's own matter"


def test_after_free_memory_the_next_loader_counts_and_an_old_one_only_if_it_is_reused():
    ticks = SchedulerTicks("auto", WORKERS)
    for whole in (1000, 100):
        with ticks.preparing():
            ticks.loader_sharded(whole, whole // WORKERS)
        ticks.end_training()
        prepared = GossipScheduler(AcceleratedScheduler(linear(3 * whole // WORKERS), []), ticks.call + 1)
        assert ticks.decide(prepared).ticks == 1, "built for the steps of one worker, after the loader was sharded"


def test_the_loader_of_the_first_step_counts_and_not_a_longer_one():
    class Loader:
        """Stands for a prepared one."""

    ticks, train, evaluation = SchedulerTicks("auto", WORKERS), Loader(), Loader()
    with ticks.preparing():
        ticks.loader_sharded(100, 25, train)
        ticks.loader_sharded(8000, 2000, evaluation)
    prepared = GossipScheduler(AcceleratedScheduler(linear(3 * 25), []), ticks.call + 1)
    assert ticks.decide(prepared).ticks == 4, "as if trained on the longer one"
    assert not ticks.trains_on(None)
    assert ticks.trains_on(train)
    assert ticks.decide(prepared).ticks == 1
    assert not ticks.trains_on(evaluation), "decided"


def test_declared_lengths():
    sequence = SequentialLR(opt := sgd(), [LinearLR(opt, 0.1, total_iters=4), CosineAnnealingLR(opt, 16)], [4])
    wsd = get_wsd_schedule(sgd(), num_warmup_steps=2, num_stable_steps=20, num_decay_steps=8)
    lengths = [
        (OneCycleLR(sgd(), 1.0, total_steps=30), 30), (PolynomialLR(sgd(), 9), 9), (sequence, 20), (linear(12), 12),
        (wsd, 30), (StepLR(sgd(), 3), None), (get_scheduler("constant", sgd()), None), (LinearLR(sgd()), None),
    ]  # fmt: skip
    for scheduler, length in lengths:
        assert declared_length(scheduler) == length


@pytest.mark.parametrize("make", [lambda: linear(22), lambda: OneCycleLR(sgd(), 1.0, total_steps=22)])
def test_the_plan_follows_the_ticks(make):
    scheduler, used = make(), []
    scheduler.optimizer.step()
    planned = planned_lrs(make(), ticks=4)
    for _ in range(6):
        used.append(scheduler.get_last_lr()[0])
        tick(scheduler, 4)
    assert planned == used  # ceil(22 / 4) optimizer steps
    assert scheduler.last_epoch == (22 if isinstance(scheduler, OneCycleLR) else 24)
