"""Gamma against the formula of the paper and published schedules; planned learning rates against real schedulers."""

import copy
import functools
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from transformers import get_cosine_schedule_with_warmup, get_inverse_sqrt_schedule

from dsgdac_accel.schedule import AdaptiveConsensus, adaptive_gamma, current_lr, planned_lrs

lrs = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
powers = st.floats(min_value=0, max_value=100)


def gammas(consensus, lrs):
    return [consensus.gamma(step, lr) for step, lr in enumerate(lrs)]


# adaptive_gamma


@given(lr=lrs, max_lr=lrs, power=powers)
def test_gamma_is_between_0_and_1_for_any_lrs(lr, max_lr, power):
    assert 0 <= adaptive_gamma(lr, max_lr, power) <= 1


@given(lr=lrs, max_lr=lrs)
def test_power_0_is_exactly_1(lr, max_lr):
    assert adaptive_gamma(lr, max_lr, power=0) == 1.0


def test_gamma_at_the_edges_of_the_range():
    assert adaptive_gamma(0.0, 0.0, power=3) == 1.0
    assert adaptive_gamma(0.1, 0.0, power=3) == 1.0
    assert adaptive_gamma(0.0, 0.1, power=3) == 0.0
    assert adaptive_gamma(0.2, 0.1, power=3) == 1.0


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, True, "0.1", None])
def test_an_invalid_lr_is_refused(value):
    with pytest.raises(ValueError, match="lr must be a finite number >= 0"):
        adaptive_gamma(value, 0.1, 2)
    with pytest.raises(ValueError, match="max_lr must be a finite number >= 0"):
        adaptive_gamma(0.1, value, 2)
    with pytest.raises(ValueError, match="lr must be a finite number >= 0"):
        AdaptiveConsensus(start_step=10).gamma(0, value)


def test_the_paper_s_transformer_schedule_gives_a_quarter_at_update_16000():
    # Warm-up 4000 updates to 5e-4, then the inverse square root; update t counted from 1 is step t - 1.
    def lr(step):
        return 5e-4 * min((step + 1) / 4000, (4000 / (step + 1)) ** 0.5)

    consensus = AdaptiveConsensus(power=2, start_step=3999)
    assert consensus.gamma(0, lr(0)) == 1.0
    assert [consensus.gamma(step, lr(step)) for step in (3998, 3999, 15999)] == [1.0, 1.0, pytest.approx(0.25)]


# When consensus is adaptive


def test_gamma_is_1_before_start_step_and_the_formula_from_it_on():
    assert gammas(AdaptiveConsensus(power=1, start_step=2), [0.4, 0.1, 0.4, 0.2]) == [1.0, 1.0, 1.0, 0.5]


def test_a_start_epoch_starts_at_its_first_step():
    consensus = AdaptiveConsensus(power=1, start_epoch=1)
    seen = [(0, 0.8, 0), (1, 0.4, 0), (2, 0.4, 1), (3, 0.2, 1), (4, 0.1, 2)]
    # The lr 0.8 came before the start and does not count for max_lr.
    assert [consensus.gamma(step, lr, epoch) for step, lr, epoch in seen] == [1.0, 1.0, 1.0, 0.5, 0.25]


def test_activation_stays_even_if_the_epoch_counter_starts_again():
    consensus = AdaptiveConsensus(power=1, start_epoch=1)
    consensus.gamma(5, 0.4, epoch=1)
    assert consensus.gamma(6, 0.2, epoch=0) == 0.5


def test_a_step_before_the_start_keeps_gamma_1_when_asked_for_afterwards():
    consensus = AdaptiveConsensus(power=1, start_epoch=1)
    assert [consensus.gamma(1, 0.2, epoch=0), consensus.gamma(2, 0.4, epoch=1)] == [1.0, 1.0]
    # An lr from before the start does not count for max_lr, no matter when gamma is asked for.
    assert [consensus.gamma(1, 0.8, epoch=0), consensus.gamma(3, 0.2, epoch=1)] == [1.0, 0.5]


def test_a_start_epoch_without_an_epoch_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"start_epoch=3 is set.*step 7.*Pass epoch"):
        AdaptiveConsensus(start_epoch=3).gamma(7, 0.1)


def test_asking_twice_changes_nothing():
    once, thrice = AdaptiveConsensus(start_step=1), AdaptiveConsensus(start_step=1)
    for step, lr in enumerate([0.3, 0.1, 0.2, 0.05]):
        first = thrice.gamma(step, lr)
        assert [thrice.gamma(step, lr), thrice.gamma(step, lr)] == [first, first]
        assert once.gamma(step, lr) == first


# max_lr

WARMED_UP = [0.25, 0.5, 1.0, 0.5, 0.25]


def test_without_a_plan_max_lr_is_the_running_maximum():
    assert gammas(AdaptiveConsensus(power=1), WARMED_UP) == [1.0, 1.0, 1.0, 0.5, 0.25]


def test_a_plan_gives_the_true_maximum_from_the_first_active_step():
    assert gammas(AdaptiveConsensus(power=1, planned_lrs=WARMED_UP), WARMED_UP) == WARMED_UP


def test_active_and_run_differ_for_a_late_start():
    for planned in (None, WARMED_UP):
        active = AdaptiveConsensus(power=1, start_step=3, planned_lrs=planned)
        run = AdaptiveConsensus(power=1, start_step=3, max_lr="run", planned_lrs=planned)
        assert gammas(active, WARMED_UP) == [1.0, 1.0, 1.0, 1.0, 0.5]
        assert gammas(run, WARMED_UP) == [1.0, 1.0, 1.0, 0.5, 0.25]


def test_run_with_a_plan_knows_a_later_maximum():
    assert AdaptiveConsensus(power=1, max_lr="run", planned_lrs=WARMED_UP).gamma(0, 0.25) == 0.25


def test_a_number_as_max_lr_clamps_larger_lrs():
    assert gammas(AdaptiveConsensus(power=1, max_lr=0.5), WARMED_UP) == [0.5, 1.0, 1.0, 1.0, 0.5]


def test_an_lr_above_the_plan_raises_max_lr():
    consensus = AdaptiveConsensus(power=1, planned_lrs=[0.1, 0.1, 0.1])
    assert gammas(consensus, [0.1, 0.4, 0.1]) == [1.0, 1.0, 0.25]


def test_a_plan_shorter_than_the_start_falls_back_on_the_running_maximum():
    assert AdaptiveConsensus(power=1, start_step=9, planned_lrs=[5.0]).gamma(9, 0.1) == 1.0


def test_warm_up_from_zero_gives_no_nan():
    assert gammas(AdaptiveConsensus(), [0.0, 0.1, 0.0]) == [1.0, 1.0, 0.0]
    assert gammas(AdaptiveConsensus(planned_lrs=[0.0, 0.1, 0.0]), [0.0, 0.1, 0.0]) == [0.0, 1.0, 0.0]


# Floor, constant, and random settings


def test_gamma_never_falls_below_the_floor():
    assert gammas(AdaptiveConsensus(power=1, floor=0.3), WARMED_UP)[-2:] == [0.5, 0.3]


def test_a_constant_holds_once_active_and_ignores_the_lr():
    assert gammas(AdaptiveConsensus(constant=0.1, start_step=2), WARMED_UP) == [1.0, 1.0, 0.1, 0.1, 0.1]
    assert AdaptiveConsensus(constant=0).gamma(0, 0.5) == 0.0


@given(
    power=powers,
    start_step=st.integers(0, 5),
    max_lr=st.one_of(st.sampled_from(["active", "run"]), st.floats(1e-6, 1e6)),
    floor=st.floats(0, 1),
    seen=st.lists(lrs, max_size=8),
    planned=st.none() | st.lists(lrs, max_size=8),
)
def test_gamma_stays_between_floor_and_1_and_is_1_before_the_start(power, start_step, max_lr, floor, seen, planned):
    settings = {"power": power, "start_step": start_step, "max_lr": max_lr, "floor": floor}
    given_gammas = gammas(AdaptiveConsensus(**settings, planned_lrs=planned), seen)
    assert all(floor <= gamma <= 1 for gamma in given_gammas)
    assert all(gamma == 1 for gamma in given_gammas[:start_step])


# Resuming


@pytest.mark.parametrize("resume_at", range(7))
@pytest.mark.parametrize("max_lr", ["active", "run", 0.7])
@pytest.mark.parametrize("start", [{"start_step": 3}, {"start_epoch": 2}])
def test_resuming_from_json_equals_an_uninterrupted_run(resume_at, max_lr, start):
    seen = [0.8, 0.1, 0.3, 0.6, 0.7, 0.2, 0.1]
    whole = AdaptiveConsensus(max_lr=max_lr, **start)
    before = AdaptiveConsensus(max_lr=max_lr, **start)
    after = AdaptiveConsensus(max_lr=max_lr, **start)
    expected = [whole.gamma(step, lr, epoch=step // 2) for step, lr in enumerate(seen)]
    resumed = [before.gamma(step, seen[step], epoch=step // 2) for step in range(resume_at)]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed += [after.gamma(step, seen[step], epoch=step // 2) for step in range(resume_at, len(seen))]
    assert resumed == expected


def test_a_resumed_run_needs_no_plan_to_find_the_same_max_lr():
    planned = AdaptiveConsensus(power=1, planned_lrs=WARMED_UP)
    planned.gamma(0, 0.25)
    resumed = AdaptiveConsensus(power=1)
    resumed.load_state_dict(planned.state_dict())
    assert resumed.gamma(1, 0.5) == planned.gamma(1, 0.5) == 0.5


def test_an_incomplete_or_invalid_state_is_refused():
    with pytest.raises(ValueError, match=r"lacks \['active_since'\]"):
        AdaptiveConsensus().load_state_dict({"largest_lr": 0.1})
    with pytest.raises(ValueError, match="active_since must be an integer >= 0; got -1"):
        AdaptiveConsensus().load_state_dict({"active_since": -1, "largest_lr": 0.1})


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"power": -1}, "power must be a finite number >= 0; got -1. Use 0 for plain DSGD"),
        ({"floor": -0.1}, r"floor must be a number in \[0, 1\]; got -0.1"),
        ({"constant": False}, "constant must be"),
        ({"start_epoch": -1}, "start_epoch must be"),
        ({"max_lr": -0.1}, "max_lr must be"),
        ({"max_lr": None}, "max_lr must be"),
        ({"planned_lrs": [0.1, -0.1]}, "each planned lr must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveConsensus(**settings)


def test_numpy_and_torch_numbers_are_numbers():
    consensus = AdaptiveConsensus(power=np.int64(1), max_lr=np.float32(0.5), planned_lrs=np.array(WARMED_UP))
    assert consensus.gamma(np.int64(0), torch.tensor(0.25)) == 0.5
    json.dumps(consensus.state_dict())


def test_repr_shows_what_was_set():
    assert repr(AdaptiveConsensus(power=2, start_epoch=10)) == (
        "AdaptiveConsensus(power=2.0, start_epoch=10, max_lr='active', floor=0.0)"
    )


# The future learning rates of a scheduler


def warm_up_then_cosine(optimizer):
    parts = [LinearLR(optimizer, start_factor=0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=16)]
    return SequentialLR(optimizer, parts, milestones=[4])


SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "lambda_per_group": lambda optimizer: LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.5**step]),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=20),
    "step": lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.3),
    "sequential": warm_up_then_cosine,
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)]),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.5, 1.0], total_steps=20),
    "cyclic": lambda optimizer: CyclicLR(optimizer, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "hugging_face_cosine": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 5, 20),
    "hugging_face_inverse_sqrt": lambda optimizer: get_inverse_sqrt_schedule(optimizer, 5),
}
OPTIMIZERS = {"sgd": functools.partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.AdamW}


def two_groups(optimizer_name, as_tensors=False):
    low, high = (torch.tensor(0.05), torch.tensor(0.2)) if as_tensors else (0.05, 0.2)
    groups = [{"params": [torch.ones(2)], "lr": low}, {"params": [torch.ones(3)], "lr": high}]
    return OPTIMIZERS[optimizer_name](groups)


def lrs_by_stepping(scheduler, optimizer, total_steps):
    found = []
    for _ in range(total_steps):
        found.append(float(optimizer.param_groups[1]["lr"]))  # the second group has the larger base lr
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # SequentialLR warns about itself
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
def test_planned_lrs_equal_those_of_stepping_the_scheduler(scheduler_name, optimizer_name, as_tensors):
    optimizer = two_groups(optimizer_name, as_tensors)
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    planned = planned_lrs(scheduler, total_steps=20)
    assert planned == lrs_by_stepping(scheduler, optimizer, 20)
    assert len(set(planned)) > 1


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
def test_planning_changes_neither_scheduler_nor_optimizer_nor_random_states(scheduler_name, optimizer_name, recwarn):
    optimizer = two_groups(optimizer_name)
    scheduler = SCHEDULERS[scheduler_name](optimizer)

    def everything():
        chances = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        settings = {key: str(value) for key, value in scheduler.__dict__.items() if key != "optimizer"}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return copy.deepcopy((chances, settings, groups, scheduler.get_last_lr(), len(optimizer.state)))

    recwarn.clear()
    before, parameters = everything(), [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(planned_lrs(scheduler, total_steps=20)) == 20
    assert everything() == before
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == parameters
    assert scheduler.optimizer is optimizer
    assert not getattr(optimizer, "_opt_called", False)
    assert not recwarn


def test_the_number_of_steps_is_taken_from_schedulers_that_declare_it():
    optimizer = two_groups("adam")
    assert len(planned_lrs(OneCycleLR(optimizer, max_lr=1.0, total_steps=30))) == 30
    cosine = get_cosine_schedule_with_warmup(two_groups("adam"), num_warmup_steps=4, num_training_steps=12)
    planned = planned_lrs(cosine)
    assert planned is not None
    assert len(planned) == 12
    assert planned[0] == 0
    assert max(planned) == planned[4] == 0.2


def test_the_future_is_unknown_without_a_length_on_a_plateau_or_under_way():
    assert planned_lrs(StepLR(two_groups("sgd"), 5)) is None
    assert planned_lrs(LambdaLR(two_groups("sgd"), lambda step: 1.0)) is None
    assert planned_lrs(ReduceLROnPlateau(two_groups("sgd")), total_steps=10) is None
    optimizer = two_groups("sgd")
    scheduler = StepLR(optimizer, 5)
    optimizer.step()
    scheduler.step()
    assert planned_lrs(scheduler, total_steps=10) is None


def test_a_scheduler_that_cannot_be_copied_or_stepped_is_unknown():
    class Stubborn:
        def __call__(self, step):
            return 1.0

        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    assert planned_lrs(LambdaLR(two_groups("sgd"), Stubborn()), total_steps=10) is None
    assert planned_lrs(object(), total_steps=10) is None


def test_a_plan_goes_on_where_a_one_cycle_has_ended():
    planned = planned_lrs(OneCycleLR(two_groups("sgd"), max_lr=1.0, total_steps=5), total_steps=50)
    assert planned[5:] == [planned[5]] * 45


def test_named_parameters_and_a_fused_optimizer_can_be_planned():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1, fused=True)
    assert planned_lrs(StepLR(optimizer, 1, gamma=0.5), total_steps=3) == [0.1, 0.05, 0.025]


@pytest.mark.parametrize("total_steps", [-1, True, 2.5])
def test_an_invalid_number_of_steps_is_refused(total_steps):
    with pytest.raises(ValueError, match="total_steps must be an integer >= 0"):
        planned_lrs(StepLR(two_groups("sgd"), 5), total_steps)


def test_the_current_lr_is_that_of_the_group_with_the_largest_base_lr():
    optimizer = two_groups("sgd")
    assert current_lr(optimizer) == 0.2
    LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.0])  # the lr of the leading group falls below the other
    assert current_lr(optimizer) == 0.0
