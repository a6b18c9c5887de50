"""What a script may do to parameters between two steps, and what workers that are not in step with each other get."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from dsgdac_accel import AdaptiveConsensus, Gossip, GossipAccelerator, GossipConfig, Mixer, WorkerGroup, build_topology
from dsgdac_accel.core import rounds
from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.shown import Shown
from dsgdac_accel.simulation import Simulation
from tests.selection import slow_except
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS, WORKERS = 8, 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def loss_of(model: nn.Module, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    inputs, wanted = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (5, 3))
    return (model(inputs) - wanted).square().mean()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- scripts: what each does before a step, the same to a model in the simulation


def swap_average(model: Any, step: int) -> None:
    """Evaluate an average of the weights, which takes time: it is put in and out through `.data`."""
    own = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    time.sleep(0.01)
    for p, value in zip(model.parameters(), own, strict=True):
        p.data.copy_(value)


def clamp(model: Any, step: int) -> None:
    """As a critic of Wasserstein GANs."""
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def through_a_vector(model: Any, step: int) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0.9 * vector, model.parameters())


def to_dtype_and_back(model: Any, step: int) -> None:
    model.float()
    model.double()


def other_layout_and_back(model: Any, step: int) -> None:
    for p in model.parameters():
        if p.ndim == 2:
            p.data = p.data.t().contiguous().t()
    if step % 2:
        for p in model.parameters():
            p.data = p.data.contiguous()


def tie(model: Any, step: int) -> None:
    if step == 3:
        model[0].bias.data = model[2].bias.data


def rewind(model: Any, step: int) -> None:
    if step == 0:
        model.start = copy.deepcopy(model.state_dict())
    if step == 4:
        model.load_state_dict(model.start)


def copy_raw_model(model: Any, step: int) -> None:
    """Copy, pickle and save the model: its parameters are ordinary tensors with storages of their own."""
    one, other = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in (one, other):
        assert all(map(torch.equal, twin.parameters(), model.parameters()))
    path = Path(f"{torch.initial_seed()}-{id(model)}.safetensors")
    save_model(model, str(path))
    load_model(one, str(path))
    path.unlink()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def freeze_in_turns(model: Any, step: int) -> None:
    model[2].requires_grad_(step % 3 != 1)


SCRIPTS: dict[str, Callable[[Any, int], None]] = {
    "swapped average": swap_average,
    "clamp": clamp,
    "vector": through_a_vector,
    "dtype": to_dtype_and_back,
    "layout": other_layout_and_back,
    "tied": tie,
    "rewind": rewind,
    "copies": copy_raw_model,
    "frozen": freeze_in_turns,
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(rank: int, script: str, folder: Path) -> list[torch.Tensor]:
    """Train by gossip and return the parameters after each step; worker 1 is slow."""
    import os

    os.chdir(folder)
    model = make_model()
    optimizer = optimizer_of(model)
    Gossip(model, optimizer, GossipConfig(topology="one_peer_ring", power=1.0, log_every=0, timeout=30))
    found = []
    for step in range(STEPS):
        SCRIPTS[script](model, step)
        if rank == 1:
            time.sleep(0.02)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9
        found.append(values(model))
    return found


def simulate(script: str) -> list[list[torch.Tensor]]:
    models = [make_model() for _ in range(WORKERS)]
    optimizers = [optimizer_of(model) for model in models]
    simulation = Simulation(models, optimizers, build_topology("one_peer_ring", WORKERS), AdaptiveConsensus(power=1.0))
    found = []
    for step in range(STEPS):
        for worker, model in enumerate(models):
            SCRIPTS[script](model, step)
            loss_of(model, worker, step).backward()
        simulation.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
        found.append([values(model) for model in models])
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_does_between_steps_is_right(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = simulate(script)
    for worker, found in enumerate(run_workers(train, WORKERS, script, tmp_path)):
        for step, x in enumerate(found):
            torch.testing.assert_close(x, expected[step][worker], rtol=0, atol=1e-12, msg=f"{worker} {step}")


def edit_and_resume(rank: int, folder: Path, comm_dtype: str, masters: bool, when: str, overlap: bool) -> bool:
    """Whether a run that edits its weights before every step ends as it does when it is resumed in the middle."""

    def run(first: int) -> torch.Tensor:
        config = GossipConfig(log_every=0, power=1, timeout=30, comm_dtype=comm_dtype, overlap=overlap)
        accelerator = GossipAccelerator(gossip=config)
        model = make_model().to(torch.bfloat16 if masters else torch.float32)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if first:
            accelerator.load_state(folder)
        for step in range(first, STEPS):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            for p in model.parameters() if when != "before saving" else ():
                p.data.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
            x = torch.randn(4, 5, generator=generator).to(model[0].weight)
            accelerator.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters() if when != "after saving" else ():
                p.data.mul_(0.99)
            if not first and step == STEPS // 2:
                accelerator.save_state(folder)
        accelerator.free_memory()
        return values(model)

    return torch.equal(run(0), run(STEPS // 2 + 1))


@pytest.mark.parametrize(
    ("comm_dtype", "masters", "when", "overlap"),
    slow_except(
        [("full", True, "both", False), ("full", True, "after saving", True), ("int8", True, "before saving", True)],
        [*product(("full", "bf16", "int8"), (False, True), ("before saving", "after saving", "both"), (True, False))],
    ),
)
def test_a_run_that_edits_its_weights_in_every_step_resumes_bit_by_bit(tmp_path, comm_dtype, masters, when, overlap):
    assert all(run_workers(edit_and_resume, WORKERS, tmp_path / "saved", comm_dtype, masters, when, overlap))


def mean_in_float32(rank: int, topology: str, steps: int) -> float:
    """Mix and edit for many steps, and return how far the mean of the workers is from what was added to it."""
    group = WorkerGroup(torch.device("cpu"), 30)
    x = nn.Parameter(torch.zeros(256))
    mixer = Mixer([x], build_topology(topology, group.size), group)
    noise, added = torch.Generator().manual_seed(rank), torch.zeros(256, dtype=torch.float64)
    for _ in range(steps):
        edit = 2.0**-8 * torch.randint(-8, 9, (256,), generator=noise).float()
        x.data.add_(edit)
        added += edit.double()
        mixer.add(mixer.consensus_update(0.3))
        mixer.start_exchange()
    mixer.drain()
    both = torch.stack([x.detach().double(), added])
    group.all_reduce_mean_(both.view(-1), "comparing")
    return float((both[0] - both[1]).abs().max())


@pytest.mark.parametrize(
    ("topology", "steps"),
    slow_except([("ring", 500)], [(name, steps) for name in ("ring", "complete") for steps in (500, 10_000)]),
)
def test_the_mean_of_float32_workers_keeps_to_the_edits(topology, steps):
    # A random walk of roundings, each of at most half a unit in the last place of values below 2.
    bound = 2.0**-24 * 8 * steps**0.5
    assert max(run_workers(mean_in_float32, 3, topology, steps, timeout=400)) < bound


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


def load_apart(rank: int, restarted: bool) -> float:
    """Give both workers the same weights in mid-run, and return how far they are apart one step later."""
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20, topology="complete", power=0, log_every=0))
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = torch.full_like(model.weight, float(rank))
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(3.0)
    if restarted:
        accelerator.restart_exchange()
    optimizer.zero_grad()
    optimizer.step()
    return accelerator.measure_consensus()["gossip/radius"]


def test_weights_that_a_script_loads_are_mixed_at_once_if_the_exchange_is_restarted():
    assert run_workers(load_apart, 2, True) == [0.0, 0.0]
    assert min(run_workers(load_apart, 2, False)) > 0.1


def interrupt(rank: int, at_the_end: bool) -> bool:
    """Interrupt both workers while they wait, or right after that, and return whether their average is right."""
    group = WorkerGroup(torch.device("cpu"), 30)
    x = nn.Parameter(torch.full((3_000_000,), float(rank)))
    mixer = Mixer([x], build_topology("one_peer_ring", 2), group)
    mixer.start_exchange()
    transport, wait = group.process_groups.transport, group.process_groups.transport.wait

    def interrupted(*arguments: Any) -> None:
        if at_the_end:
            wait(*arguments)
        raise KeyboardInterrupt

    transport.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        mixer.drain()
    transport.wait = wait
    average = Average(mixer)
    shown = Shown(average.form(), [average.copies])
    shown.show()
    right = bool((x == 0.5).all())
    shown.restore()
    return right and bool((x == float(rank)).all())


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_exchange_goes_on_after_an_interrupt_by_the_user(at_the_end):
    assert run_workers(interrupt, 2, at_the_end) == [True, True]


def freeze_and_resume(rank: int, folder: Path) -> bool:
    """Whether a run ends as the unbroken one where a parameter, frozen in mid-run, is frozen before `prepare`."""

    def run(first: int) -> torch.Tensor:
        accelerator = GossipAccelerator(gossip=GossipConfig(log_every=0, power=1, timeout=30))
        model = make_model()
        model[2].requires_grad_(first == 0)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        if first:
            accelerator.load_state(folder)
        for step in range(first, STEPS):
            model[2].requires_grad_(step < 2)
            accelerator.backward(loss_of(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
            if not first and step == STEPS // 2:
                accelerator.save_state(folder)
        accelerator.free_memory()
        return values(model)

    return torch.equal(run(0), run(STEPS // 2 + 1))


def test_what_was_mixed_once_stays_mixed_in_a_resumed_run(tmp_path):
    assert run_workers(freeze_and_resume, 2, tmp_path / "saved") == [True, True]


# ---- a list that one worker changes alone


def change_alone(rank: int, how: str, workers: int, topology: str, comm_dtype: str) -> None:
    """One worker changes its list; the others hear of it within a period of the topology."""
    config = GossipConfig(topology=topology, log_every=0, timeout=60, comm_dtype=comm_dtype)
    accelerator = GossipAccelerator(gossip=config)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    groups = optimizer.optimizer.param_groups
    for step in range(12):
        if step == 2 and rank == 1:
            if how == "unfreezes":
                model[0].weight.requires_grad_(True)
            elif how == "removes":
                del groups[0]["params"][-1]
            elif how == "adds":
                optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
            elif how == "replaces":
                model[1].bias = nn.Parameter(torch.ones(3))
                groups[0]["params"][-1] = model[1].bias
            elif how == "reshapes":
                model[1].weight.data = torch.zeros(3, 4)
                model[1].in_features = 4
                model[0] = nn.Linear(3, 4).requires_grad_(False)
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()


WORDS = {
    "unfreezes": "worker 1 added, unfroze or put in place of others 0.weight, before step",
    "removes": "worker 1 removed or replaced 1.bias, before step",
    "adds": "worker 1 added, unfroze or put in place of others a parameter of shape (5,), before step",
    "replaces": "worker 1 added, unfroze or put in place of others 1.bias and removed or replaced",
    "reshapes": "worker 1 gave parameters another dtype, shape, device or tie, before step",
}
ALONE = [("unfreezes", 4, "one_peer_ring", "full"), ("replaces", 3, "ring", "int8")]
ALL_ALONE = [
    (how, workers, topology, comm_dtype)
    for how in WORDS
    for workers, topology, comm_dtype in [(4, "one_peer_ring", "full"), (3, "complete", "full"), (3, "ring", "int8")]
]


@pytest.mark.parametrize(("how", "workers", "topology", "comm_dtype"), slow_except(ALONE, ALL_ALONE))
def test_what_one_worker_changes_alone_ends_the_run_by_name_within_seconds(how, workers, topology, comm_dtype):
    outcomes = try_workers(change_alone, workers, how, workers, topology, comm_dtype, timeout=60)
    assert WORDS[how] in outcomes[1].error
    for outcome in outcomes:
        assert "changed what it trains" in outcome.error or WORDS[how] in outcome.error, outcome.error
        assert outcome.seconds < 30


def learn_unequally(rank: int) -> None:
    group = WorkerGroup(torch.device("cpu"), 30)
    model = make_model()
    optimizer = optimizer_of(model)
    gossip = Gossip(model, optimizer, GossipConfig(log_every=0, timeout=30))
    assert gossip.group.size == group.size
    for step in range(4):
        if step == 2 and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.05
        loss_of(model, rank, step).backward()
        optimizer.step()


def test_another_learning_rate_is_noticed_at_the_next_mix():
    for outcome in try_workers(learn_unequally, 2, timeout=60):
        assert "ValueError: all workers must have the same learning rate" in outcome.error
        assert "at step 3" in outcome.error
        assert "0.05" in outcome.error


# ---- workers that are not in step


def mix_with_equal_tags(rank: int, what: str, topology: str, options: dict, late: bool) -> str:
    """Mix the parameters of two optimizers, as on NCCL, which ignores tags. Return the error."""
    rounds._CHANNELS = rounds._ROUNDS = 1
    group = WorkerGroup(torch.device("cpu"), 10)
    mixers: dict[str, Mixer] = {}
    for name in sorted("a" if what == "nothing" else "ab", reverse=what == "order" and rank == 1):
        parameter = nn.Parameter(torch.full((3,), float(rank)))
        mixers[name] = Mixer([parameter], build_topology(topology, group.size), group, **options)
        mixers[name].agreement.late = late
    if what == "step" and rank == 1:
        mixers["a"].start_at(1)
    try:
        for _ in range(2):
            for _, mixer in sorted(mixers.items()):
                mixer.add(mixer.consensus_update(0.5))
                if what == "nothing" and rank == 0:  # worker 1 posts within the next step
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


# ---- compiled


def train_compiled(rank: int, what: str) -> torch.Tensor:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="one_peer_ring", power=1.0, log_every=0, timeout=60))
    model = make_model()
    optimizer = optimizer_of(model)
    if what == "model":
        model = torch.compile(model, backend="eager")
    model, optimizer = accelerator.prepare(model, optimizer)
    take_step = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step
    for step in range(STEPS):
        accelerator.backward(loss_of(model, rank, step))
        take_step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "model"])
def test_a_compiled_step_and_a_compiled_model_mix_as_they_do_otherwise(what):
    for compiled, plain in zip(run_workers(train_compiled, 2, what), run_workers(train_compiled, 2, ""), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-12)
