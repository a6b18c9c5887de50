"""The estimated radius of every step between real gloo workers: beside training, in order, and when one is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.core.sketch import RadiusEstimate, relative_error
from tests.multiprocess.small_model import flat, inputs, make_model
from tests.workers import Launch, run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS = 10
WHOLE = 4096  # more numbers than the small model has parameters: the estimate is exact then


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2000), nn.Tanh(), nn.Linear(2000, 1)).double()


def begin(rank: int, make, **options):
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=30, power=1, **options))
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return accelerator, model, optimizer


def take_step(accelerator, model, optimizer, number: int) -> None:
    here = accelerator.workers_per_process
    first = here * accelerator.group.members.original_ranks[accelerator.group.rank]
    x = torch.cat([inputs(worker, number) for worker in range(first, first + here)])
    accelerator.backward((model(x) - 1).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def recorded(accelerator) -> dict[int, tuple[float, float]]:
    """Radius and Frobenius norm by step, of all estimates from now on."""
    estimate: RadiusEstimate = accelerator.gossip_steps[0].estimate
    found: dict[int, tuple[float, float]] = {}
    make = estimate._estimate

    def make_and_record(*args):
        consensus = make(*args)
        if consensus is not None:
            found[consensus.step] = (consensus.radius, consensus.frobenius)
        return consensus

    estimate._estimate = make_and_record
    return found


def finish(accelerator, patience: float = 20.0) -> None:
    estimate = accelerator.gossip_steps[0].estimate
    for future in list(estimate._under_way) if estimate is not None else ():
        future.result(patience)


def measure_both(rank: int, make, options: dict) -> dict:
    accelerator, model, optimizer = begin(rank, make, log_every=1, **options)
    exact, logged = {}, []
    estimated = recorded(accelerator) if options.get("sketch") else {}
    for number in range(STEPS):
        take_step(accelerator, model, optimizer, number)
        consensus = accelerator.gossip_steps[0].average.latest
        exact[consensus.step] = (consensus.radius, consensus.frobenius)
        if number % 2:  # some are looked at when they are there, some when others came after them
            finish(accelerator)
            logged.append(accelerator.gossip_steps[0].metrics().get("radius_estimate_step"))
    return {"exact": exact, "estimated": estimated, "logged": logged, "x": flat(model)}


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {"sketch": WHOLE}),
        (3, {"sketch": WHOLE, "topology": "complete", "order": "mix_first"}),
        pytest.param(4, {"sketch": WHOLE, "overlap": False}, marks=pytest.mark.slow),
        (2, {"sketch": WHOLE, "workers_per_process": 3}),
    ],
)
def test_estimates_of_a_small_model_are_its_exact_radii(processes, options):
    first, *others = run_workers(measure_both, processes, make_model, options)
    assert first["estimated"].keys() == first["exact"].keys() == set(range(1, STEPS + 1))
    for step, exact in first["exact"].items():
        assert min(exact) > 1e-3, "the workers have to be apart in this test"
        assert first["estimated"][step] == pytest.approx(exact, rel=1e-9)
    assert first["logged"] == [2.0, 4.0, 6.0, 8.0, 10.0]
    for other in others:
        assert other["estimated"] == {}
        assert other["logged"] == [None] * (STEPS // 2)


def test_estimates_of_a_larger_one_are_near_and_change_nothing():
    numbers = 1024
    first, *_ = both = run_workers(measure_both, 3, large_model, {"sketch": numbers})
    for step, exact in first["exact"].items():
        assert first["estimated"][step] == pytest.approx(exact, rel=4 * relative_error(numbers))
        assert first["estimated"][step] != pytest.approx(exact, rel=1e-9)
    without = run_workers(measure_both, 3, large_model, {})
    for mine, expected in zip(both, without, strict=True):
        assert torch.equal(mine["x"], expected["x"])
    assert without[0]["logged"] == [None] * (STEPS // 2)


def be_late(rank: int, done: Path) -> dict:
    """Worker 1 sends the sketch of a step only when worker 0 is done with that step and the next."""
    accelerator, model, optimizer = begin(rank, make_model, sketch=WHOLE, log_every=0)
    estimate, collected = accelerator.gossip_steps[0].estimate, recorded(accelerator)
    take_step(accelerator, model, optimizer, 0)
    finish(accelerator)
    if rank == 1:  # after its parameters are on their way, before its sketch is
        post = estimate.post

        def post_late(flats, step):
            deadline = time.monotonic() + 20
            while step == 2 and not done.exists():
                assert time.monotonic() < deadline, "worker 0 was kept waiting"
                time.sleep(0.01)
            post(flats, step)

        estimate.post = post_late
    for number in (1, 2):
        take_step(accelerator, model, optimizer, number)
    seen = accelerator.gossip_steps[0].metrics().get("radius_estimate_step")
    if rank == 0:
        done.touch()
    take_step(accelerator, model, optimizer, 3)
    finish(accelerator)
    return {"seen": seen, "collected": list(collected)}


def test_a_late_sketch_keeps_nobody_waiting(tmp_path):
    first, _ = run_workers(be_late, 2, tmp_path / "done")
    assert first["seen"] == 1.0
    assert first["collected"] == [1, 2, 3, 4]


def lag(rank: int) -> list[int]:
    """Worker 0's thread is kept busy until as many steps are under way as may be, and a while longer."""
    accelerator, model, optimizer = begin(rank, make_model, sketch=WHOLE, log_every=0)
    estimate = accelerator.gossip_steps[0].estimate
    take_step(accelerator, model, optimizer, 0)
    goes_on, released = threading.Event(), False
    if rank == 0:
        estimate._thread.submit(goes_on.wait, 60)
    under_way = []
    for number in range(1, 40):
        take_step(accelerator, model, optimizer, number)
        under_way.append(len(estimate._under_way))
        if under_way[-1] >= 16 and not released:
            released = True
            threading.Timer(0.5, goes_on.set).start()
    return under_way


def test_few_are_under_way_at_once():
    for under_way in run_workers(lag, 2):
        assert 16 <= max(under_way) <= 17


def lose(rank: int, victim: int, at: int, policy: str, how: int, timeout: float) -> dict:
    options = {"topology": "complete", "sketch": WHOLE, "on_worker_loss": policy, "log_every": 0}
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=timeout, **options))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    found = recorded(accelerator)
    for number in range(STEPS):
        if rank == victim and number == at:
            os.kill(os.getpid(), how)
        take_step(accelerator, model, optimizer, number)
    finish(accelerator)
    exact = accelerator.measure_consensus()
    return {"found": found, "exact": (exact["gossip/radius"], exact["gossip/frobenius"]), "metrics": exact}


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_survivors_of_a_loss_estimate_among_themselves(victim):
    outcomes = try_workers(lose, 4, victim, 4, "continue", signal.SIGKILL, 30.0, timeout=60)
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert [outcome.exit_code for outcome in survivors] == [0, 0, 0], [outcome.error for outcome in survivors]
    first, *others = [outcome.value for outcome in survivors]
    assert STEPS in first["found"]
    assert first["found"][STEPS] == pytest.approx(first["exact"], rel=1e-9)
    assert first["metrics"]["gossip/radius_estimate_step"] == STEPS
    assert all(other["found"] == {} for other in others)


@pytest.mark.slow
def test_a_silent_worker_is_left_behind():
    launched = Launch(lose, 3, 1, 4, "continue", signal.SIGSTOP, 3.0, timeout=60)
    for rank in (0, 2):
        launched.processes[rank].join(45)
    assert not any(launched.processes[rank].is_alive() for rank in (0, 2))
    launched.processes[1].kill()
    first, _, third = launched.outcomes()
    assert first.exit_code == third.exit_code == 0, (first.error, third.error)
    assert first.value["found"][STEPS] == pytest.approx(first.value["exact"], rel=1e-9)


@pytest.mark.slow
def test_a_lost_worker_ends_the_run_as_without():
    outcomes = try_workers(lose, 3, 1, 4, "stop", signal.SIGKILL, 30.0, timeout=60)
    assert [outcome.exit_code for outcome in outcomes] == [1, -signal.SIGKILL, 1]
    for outcome in (outcomes[0], outcomes[2]):
        assert "WorkerLostError" in outcome.error
        assert outcome.seconds < 25
