"""The consensus update in one process: the pure function, several workers of one process, and misuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from dsgdac_accel import GossipConfig, Mixer, NonFiniteError, WorkerGroup, build_topology
from dsgdac_accel.core.consensus import Average
from dsgdac_accel.core.kernels import add_scaled
from dsgdac_accel.core.shown import Shown
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.core.update import Update, group_update, neighbors_update, pair_update
from dsgdac_accel.simulation import gossip_step
from dsgdac_accel.topology import Topology

CPU = torch.device("cpu")
GAMMA = 0.3


def tensors(count: int, size: int = 7) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(count)]


@pytest.mark.parametrize("weights", [[0.5], [0.25, 0.5], [0.1, 0.2, 0.3]], ids=len)
def test_the_update_is_gamma_times_the_weighted_differences(weights):
    x, *neighbors = tensors(1 + len(weights))
    expected = GAMMA * sum(w * (x_j - x) for w, x_j in zip(weights, neighbors, strict=True))
    out = neighbors[0]  # as in the receive buffers
    update = neighbors_update(GAMMA, weights, [x], [[x_j] for x_j in neighbors], [out])
    assert float(update.square().sqrt()) == pytest.approx(float(expected.norm()) / (GAMMA * sum(weights)))
    torch.testing.assert_close(moved(x, update), x + expected)


def moved(x: torch.Tensor, update: Update) -> torch.Tensor:
    return x + update.scale * update.difference[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pair_forms_one_difference_with_the_same_bits(threads):
    size = 2**19 + 96
    low, high = (x.float() for x in tensors(2, size))
    before, *_ = torch.get_num_threads(), torch.set_num_threads(threads)
    try:
        pairs = [(low, high, True), (high, low, False)]
        first, second = (pair_update(GAMMA, 0.5, [x], [o], c, [torch.empty(size)]) for x, o, c in pairs)
        for x, other, update in ((low, high, first), (high, low, second)):
            torch.testing.assert_close(moved(x, update), x + GAMMA * 0.5 * (other - x))
            assert float(update.square().sqrt()) == pytest.approx(float((other - x).double().norm()), rel=1e-5)
        assert torch.equal(first.difference[0], second.difference[0])
        assert first.scale == -second.scale
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [3, 5])
def test_the_update_of_a_group_moves_towards_its_mean(count):
    xs = tensors(count)
    mean = torch.stack(xs).mean(0)
    update = group_update(GAMMA, count, [xs[1]], [sum(xs)], [torch.empty(7, dtype=torch.float64)])
    torch.testing.assert_close(moved(xs[1], update), xs[1] + GAMMA * (mean - xs[1]))
    others = torch.stack([x for x in xs if x is not xs[1]]).mean(0)
    torch.testing.assert_close(update.square().sqrt(), (others - xs[1]).norm())


def mixer_of(parameters: list[list[Parameter]], topology: Topology, **options) -> Mixer:
    place = {id(p): worker for worker, mine in enumerate(parameters) for p in mine}
    return Mixer(
        [p for mine in parameters for p in mine],
        topology,
        WorkerGroup(CPU, 10),
        local_workers=len(parameters),
        worker_of=lambda p: place[id(p)],
        **options,
    )


DIRECTED = Topology.from_matrices([torch.eye(4) / 2 + torch.eye(4).roll(1, 0) / 2])
TOPOLOGIES = [
    *(build_topology("one_peer_ring", n) for n in (2, 4, 5)),
    *(build_topology(name, n) for name in ("complete", "ring", "grid") for n in (3, 4, 6)),
    build_topology("base_graph", 6),
    DIRECTED,
]


@pytest.mark.parametrize("order", ["local_first", "mix_first"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t.name}-{t.num_workers}")
def test_workers_of_one_process_follow_the_matrices(topology, order):
    torch.manual_seed(0)
    start = [[torch.randn(5, dtype=torch.float64), torch.randn(3, 2).T] for _ in range(topology.num_workers)]
    mine, theirs = ([[Parameter(x.clone()) for x in one] for one in start] for _ in range(2))
    mixer = mixer_of(mine, topology, order=order)
    optimizers = [[torch.optim.SGD(one, lr=0.1, weight_decay=0.1) for one in both] for both in (mine, theirs)]
    for step in range(2 * topology.period + 1):
        for worker in range(topology.num_workers):
            for one, other in zip(mine[worker], theirs[worker], strict=True):
                one.grad = torch.full_like(one, 0.1 * worker)
                other.grad = torch.full_like(other, 0.1 * worker)
        updates = mixer.consensus_update(GAMMA)
        for optimizer in optimizers[0]:
            optimizer.step()
        mixer.add(updates)
        gossip_step(theirs, optimizers[1], topology.matrix(step), GAMMA, order=order)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)
    assert mixer.step == 2 * topology.period + 1


# ---- misuse and failures


def two_workers(**options) -> tuple[Mixer, list[list[Parameter]]]:
    parameters = [[Parameter(torch.full((3,), float(worker)))] for worker in range(2)]
    return mixer_of(parameters, build_topology("complete", 2), **options), parameters


def test_an_update_is_added_once():
    mixer, parameters = two_workers()
    updates = mixer.consensus_update(1.0)
    mixer.add(updates)
    with pytest.raises(RuntimeError, match="no longer there"):
        mixer.add(updates)
    assert [p.tolist() for (p,) in parameters] == [[0.5] * 3, [0.5] * 3]
    assert mixer.step == 1


def test_the_average_is_refused_before_the_update_is_added():
    mixer, parameters = two_workers()
    average = Average(mixer)
    updates = mixer.consensus_update(1.0)
    with pytest.raises(RuntimeError, match="not added yet"):
        average.form()
    with pytest.raises(RuntimeError, match="not added yet"):
        average.measure()
    mixer.add(updates)
    assert average.measure().radius == 0
    assert [p.tolist() for (p,) in parameters] == [[0.5] * 3, [0.5] * 3]


def test_training_is_refused_inside_the_average_and_after_the_end():
    mixer, parameters = two_workers()
    average = Average(mixer)
    shown = Shown(average.form(), [average.copies])
    shown.show()
    assert average.swapped_in
    assert [p.tolist() for (p,) in parameters] == [[0.5] * 3, [0.5] * 3]
    assert [errors[id(parameters[0][0])].tolist() for errors in average.errors()] == [[-0.5] * 3, [0.5] * 3]
    with pytest.raises(RuntimeError, match="deployed average"):
        mixer.consensus_update(1.0)
    shown.restore()
    assert [p.tolist() for (p,) in parameters] == [[0.0] * 3, [1.0] * 3]
    with pytest.raises(RuntimeError, match="ask inside"):
        average.errors()
    mixer.release()
    with pytest.raises(RuntimeError, match="gossip has ended"):
        mixer.consensus_update(1.0)


def test_after_a_local_step_that_failed_the_step_can_be_taken_again():
    mixer, parameters = two_workers()
    mixer.consensus_update(1.0)  # the optimizer raises: no `add`
    mixer.add(mixer.consensus_update(1.0))
    assert [p.tolist() for (p,) in parameters] == [[0.5] * 3, [0.5] * 3]


def test_after_parameters_that_are_not_finite_the_average_can_still_be_had():
    mixer, parameters = two_workers()
    average = Average(mixer)
    parameters[1][0].data[0] = torch.nan
    with pytest.raises(NonFiniteError, match="worker 1 are not finite at step 0"):
        mixer.consensus_update(1.0)
    assert parameters[0][0].tolist() == [0.0] * 3, "it was mixed"
    shown = Shown(average.form(), [average.copies])
    shown.show()
    shown.restore()


@pytest.mark.parametrize("alike", [True, False])
def test_a_flag_on_the_device_keeps_nan_out(alike):
    for skip, expected in ((1.0, [1.0] * 3), (0.0, [1.0, 2.0, 3.0])):
        x = torch.ones(3)
        added = torch.full((3,), torch.nan) if skip else torch.tensor([0.0, 2.0, 4.0])
        add_scaled([x], [added], 0.5, torch.tensor(skip), alike=alike)
        assert x.tolist() == expected


def test_step_is_the_two_halves_around_the_optimizer():
    models = [nn.Linear(3, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps.append(GossipStep(optimizer, WorkerGroup(CPU, 10), GossipConfig(log_every=0)))
        model(torch.ones(2, 3)).sum().backward()
    steps[0].step()
    if steps[1].before_local_step():
        steps[1].optimizer.step()
    steps[1].after_local_step()
    assert steps[0].mixer.step == steps[1].mixer.step == 1
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_a_local_step_that_raised_leaves_no_gradient_for_the_next_one(monkeypatch):
    first, second = (Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    worker_of = {id(first): 0, id(second): 1}
    config = GossipConfig(workers_per_process=2, log_every=0, power=0)
    step = GossipStep(optimizer, WorkerGroup(CPU, 10), config, worker_of=lambda p: worker_of[id(p)])
    first.grad, second.grad = torch.ones(2), torch.full((2,), torch.nan)

    def fail():
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            step.step()
    first.grad, second.grad = torch.ones(2), torch.full((2,), 3.0)
    step.step()
    assert torch.equal(second.grad, torch.full((2,), 3.0))


def test_a_save_inside_a_step_is_refused_and_one_after_a_local_step_that_raised_is_not():
    first, second = (Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    config = GossipConfig(workers_per_process=2, log_every=0)
    gossip = GossipStep(optimizer, WorkerGroup(CPU, 10), config, worker_of=lambda p: int(p is second))
    gossip.step()
    hook = optimizer.register_step_post_hook(lambda *_: gossip.state_dict())
    with pytest.raises(RuntimeError, match="save after the optimizer step"):
        gossip.step()
    hook.remove()
    assert gossip.state_dict()["mixer"]["step"] == 1


@pytest.mark.parametrize("order", ["local_first", "mix_first"])
def test_a_local_step_that_raised_and_is_retried_is_mixed_once(order):
    x = [Parameter(torch.full((2,), float(value))) for value in (0, 4)]
    optimizer = torch.optim.SGD(x, lr=1.0)
    config = GossipConfig(topology="complete", workers_per_process=2, log_every=0, power=1, order=order)
    gossip = GossipStep(optimizer, WorkerGroup(CPU, 10), config, worker_of=lambda p: int(p is x[1]))
    gossip.schedule.next_gamma = lambda *_: 0.5

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        gossip.step()
    hook.remove()
    gossip.load_state_dict(gossip.state_dict())
    gossip.step()
    assert [p.tolist() for p in x] == [[1.0, 1.0], [3.0, 3.0]]
    gossip.step()
    assert [p.tolist() for p in x] == [[1.5, 1.5], [2.5, 2.5]]


@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_that_joins_a_second_optimizer_is_refused(tied):
    group, x = WorkerGroup(CPU, 10), [Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD(x[:1], lr=1.0), torch.optim.SGD(x[1:2], lr=1.0)]
    steps = [GossipStep(optimizer, group, GossipConfig(log_every=0)) for optimizer in optimizers]
    x[2].data = x[0].data
    optimizers[1].add_param_group({"params": [x[2] if tied else x[0]]})
    steps[0].step()
    with pytest.raises(ValueError, match="two optimizers"):
        steps[1].step()
