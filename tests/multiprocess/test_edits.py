"""Weights that a script changes while their exchange is in flight: an error by name on all workers, or right values."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, Mixer, WorkerGroup, build_topology
from dsgdac_accel.core import messages
from tests.selection import slow_except
from tests.workers import run_workers, try_workers

STEPS = 3
EDITOR = 1


def train(rank: int, how: str, options: dict, late: bool) -> float:
    """Average without training; the editor changes a weight after the first step. Return the change of a weight."""
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(timeout=10, power=0, **options))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(2000, 1000))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    accelerator.gossip_steps[0].mixer.arrivals.checks_late = late
    weight = model[1].weight
    with accelerator.deployed_model(model) as average:
        average[1].weight.data.fill_(7.0)  # no exchange is in flight here, and it is given back
    start = float(weight.detach()[5, 5])
    for step in range(STEPS):
        if step == 1 and rank == EDITOR:
            edit(weight, how)
        if step == 0 and rank != EDITOR:
            # Posts late, so that the editor's values are read while they are changed.
            late_once = optimizer.optimizer.register_step_post_hook(lambda *_: time.sleep(0.3))
        optimizer.step()
        if step == 0 and rank != EDITOR:
            late_once.remove()
    accelerator.gossip_steps[0].mixer.state_dict()  # reads what a late check found
    return float(weight.detach()[5, 5]) - start


def edit(weight: nn.Parameter, how: str) -> None:
    if how == "undone":  # as an evaluation of averaged weights does: store, copy to, restore
        kept = weight.detach().clone()
        weight.data.fill_(1000.0)
        time.sleep(0.8)
        weight.data.copy_(kept)
    elif how == "element":  # once everything was sent
        time.sleep(0.8)
        weight.data.view(-1)[1_000_000] += 1e-3
    elif how == "element of a view":
        weight.detach().view(-1)[1_000_000] = weight.detach().view(-1)[1_000_000]
    elif how == "elsewhere":  # the bucket keeps what was posted; the values are adopted at the next step
        weight.data = weight.data.clone()
        with torch.no_grad():
            weight.copy_(weight)
    elif how == "data":
        weight.data.add_(6.0)
    elif how == "no_grad":
        with torch.no_grad():
            weight.add_(6.0)


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["undone", "data", pytest.param("no_grad", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"topology": "one_peer_ring"}),
        pytest.param(3, {"topology": "complete"}, marks=pytest.mark.slow),
        (2, {"topology": "complete", "comm_dtype": "int8"}),
    ],
)
def test_an_edit_in_flight_ends_the_run_by_name_or_does_no_harm(workers, options, how, late):
    outcomes = try_workers(train, workers, how, options, late, timeout=60)
    errors = [outcome.error for outcome in outcomes]
    if how != "no_grad" and errors == [None] * workers:  # it was copied, rounded or sent before or after the edit
        change = 0.0 if how == "undone" else 6.0 / workers
        assert [outcome.value for outcome in outcomes] == pytest.approx([change] * workers, abs=1e-3)
        return
    by_difference = options["topology"] == "one_peer_ring" and how != "no_grad"
    who = f"worker {1 - EDITOR} or worker {EDITOR}" if by_difference else f"worker {EDITOR}"
    for error in errors:
        assert f"{who}: 1.weight was changed while its exchange was in flight" in error
    assert any("overlap=False" in error for error in errors)


ONE_PEER = {"topology": "one_peer_ring"}


@pytest.mark.parametrize(
    ("workers", "options", "how", "who"),
    [
        (2, ONE_PEER, "element", "worker 0 or worker 1"),
        (2, ONE_PEER, "element of a view", f"worker {EDITOR}"),
        (2, ONE_PEER | {"comm_dtype": "int8"}, "element", f"worker {EDITOR}"),
        pytest.param(3, {"topology": "complete"}, "element", f"worker {EDITOR}", marks=pytest.mark.slow),
        pytest.param(4, {"topology": "ring"}, "element", f"worker {EDITOR}", marks=pytest.mark.slow),
    ],
)
def test_one_element_that_is_changed_once_in_a_large_model_is_noticed(workers, options, how, who):
    for outcome in try_workers(train, workers, how, options, False, timeout=60):
        assert f"{who}: 1.weight was changed while its exchange was in flight at step 1" in outcome.error


def finish(rank: int, folder: str, how: str) -> str:
    """Change an element once everything was sent, the last time that the two meet; return the error."""
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(timeout=20, power=0, **ONE_PEER))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(2000, 1000))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(STEPS):
        if step == 1 and rank == EDITOR:
            edit(model[1].weight, "element")
        optimizer.step()
    try:
        if how == "save":
            accelerator.save_state(folder)
        else:
            with accelerator.deployed_model(model):
                pass
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["save", "average"])
def test_an_element_that_is_changed_before_the_last_meeting_is_noticed_at_the_end(tmp_path, how):
    errors = run_workers(finish, 4, str(tmp_path / "state"), how)
    assert len(set(errors)) == 1
    assert "worker 1 or worker 2: 1.weight was changed while its exchange was in flight at step 1" in errors[0]
    assert not (tmp_path / "state").exists()


def test_without_overlap_weights_may_be_changed_between_steps():
    changes = run_workers(train, 2, "data", {"overlap": False}, False)
    assert changes == pytest.approx([3.0, 3.0], abs=1e-5)


@pytest.mark.parametrize("how", ["none", "elsewhere"])
def test_weights_that_nobody_changes_are_no_edit(how):
    assert run_workers(train, 2, how, {}, False) == [0.0, 0.0]


def edit_and_unfreeze(rank: int) -> None:
    """Lay the buckets out anew between an edit and the moment at which a late check is read."""
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(timeout=10, power=0))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 400))
    model[2].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    accelerator.gossip_steps[0].mixer.arrivals.checks_late = True
    for step in range(4):
        if step == 1:
            model[2].requires_grad_(True)
            if rank == EDITOR:
                model[1].bias.data.fill_(7.0)
        optimizer.step()


def test_a_late_finding_is_named_by_the_layout_that_it_was_made_in():
    for outcome in try_workers(edit_and_unfreeze, 2, timeout=60):
        assert f"worker {EDITOR}: " in outcome.error
        assert "1.bias" in outcome.error


def make_equal_again(rank: int) -> tuple[float, float]:
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(timeout=20, topology="one_peer_ring", constant=0.0))
    model, optimizer = (found := nn.Linear(2, 2)), torch.optim.SGD(found.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> float:
        model.weight.grad = torch.full_like(model.weight, float(rank))
        before = float(model.weight.detach()[0, 0])
        optimizer.step()
        return float(model.weight.detach()[0, 0]) - before

    step()
    accelerator.make_equal([model])
    equal = float(model.weight.detach()[0, 0])
    return equal, step()


def test_workers_can_be_made_equal_in_the_middle_of_training():
    (first, change), (second, other_change) = run_workers(make_equal_again, 2)
    assert first == second
    assert (change, other_change) == pytest.approx((0.0, -1.0))


# ---- workers that are not in step


def mix_with_equal_tags(rank: int, what: str, topology: str, options: dict, late: bool) -> str:
    """Mix the parameters of two optimizers, as on NCCL, which ignores tags. Return the error."""
    messages._CHANNELS = messages._ROUNDS = 1
    group = WorkerGroup(torch.device("cpu"), 10)
    mixers: dict[str, Mixer] = {}
    for name in sorted("a" if what == "nothing" else "ab", reverse=what == "order" and rank == 1):
        parameter = nn.Parameter(torch.full((3,), float(rank)))
        mixers[name] = Mixer([parameter], build_topology(topology, group.size), group, **options)
        mixers[name].arrivals.checks_late = late
    if what == "step" and rank == 1:
        mixers["a"].start_at(1)
    try:
        for _ in range(2):
            for _, mixer in sorted(mixers.items()):
                mixer.add(mixer.consensus_update(0.5))
                if what == "nothing" and rank == 0:  # worker 1 posts within the next step, and sums nothing
                    mixer.start_exchange()
    except RuntimeError as error:
        return str(error)
    return "no error"


KINDS = [("ring", 2, {}), ("complete", 3, {}), ("ring", 2, {"comm_dtype": "int8"}), ("ring", 3, {})]


@pytest.mark.parametrize(
    ("topology", "workers", "options", "late", "what"),
    slow_except(
        [("ring", 2, {}, False, "order"), ("ring", 2, {}, False, "nothing"), ("complete", 3, {}, True, "step")],
        [(*kind, late, what) for kind in KINDS for late in (False, True) for what in ("step", "order", "nothing")],
    ),
)
def test_workers_of_different_steps_or_optimizers_are_not_mixed_silently(topology, workers, options, late, what):
    errors = run_workers(mix_with_equal_tags, workers, what, topology, options, late)
    expected = {
        "step": ("worker 1", "at step 0", "at step 1", "All workers must take every optimizer step"),
        "order": ("different optimizers", "in the same order on all workers"),
        "nothing": ("no error",),
    }
    for words in expected[what]:
        assert all(words in error for error in errors)
