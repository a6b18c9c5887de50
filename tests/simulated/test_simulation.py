"""The simulation against Algorithm 1 written with matrices, the plain optimizer, and the corollary of Theorem 1."""

import functools
import math

import pytest
import torch
from torch import nn

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.simulation import Simulation, gossip_step
from dsgdac_accel.topology import Topology, build_topology

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
plain_sgd = functools.partial(torch.optim.SGD, lr=0.1)


def workers_at_random(num_workers, dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(dim, dtype=torch.float64, generator=generator)) for _ in range(num_workers)]


def simulate(topology, schedule, optimizer=plain_sgd, num_steps=6, order="local_first", x_N=None):
    """Noisy gradients of ||x||^2 / 20, the same noise for the same worker and step in every simulation."""
    x_N = workers_at_random(topology.num_workers) if x_N is None else x_N
    workers = Simulation([[x] for x in x_N], [optimizer([x]) for x in x_N], topology, schedule, order)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for x in x_N:
            x.grad = 0.1 * x.detach() + torch.randn(x.shape, dtype=x.dtype, generator=generator)
        yield workers
        workers.step()
    yield workers


def last(states):
    *_, workers = states
    return torch.stack([xs[0].detach() for xs in workers.parameters_N])


# The step


@pytest.mark.parametrize("order", ["local_first", "mix_first"])
def test_a_step_is_algorithm_1_written_with_matrices(order):
    mixing_NN = build_topology("ring", 5).matrix(0)
    x_N = workers_at_random(5)
    grad_ND = torch.stack([x.detach() for x in workers_at_random(5, seed=1)])
    x_ND = torch.stack([x.detach().clone() for x in x_N])
    for x, grad in zip(x_N, grad_ND, strict=True):
        x.grad = grad.clone()
    lr, decay, gamma = 0.1, 0.01, 0.3
    optimizers = [torch.optim.SGD([x], lr=lr, weight_decay=decay) for x in x_N]
    gossip_step([[x] for x in x_N], optimizers, mixing_NN, gamma, order=order)
    mixed_ND = x_ND + gamma * (mixing_NN @ x_ND - x_ND)
    decayed_ND = x_ND if order == "local_first" else mixed_ND  # weight decay sees the mixed point with mix_first
    expected_ND = mixed_ND - lr * (grad_ND + decay * decayed_ND)
    torch.testing.assert_close(torch.stack([x.detach() for x in x_N]), expected_ND, rtol=0, atol=1e-14)


def test_a_directed_round_takes_from_the_row_of_the_receiver():
    mixing_NN = torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.75, 0.25], [0.25, 0.0, 0.75]], dtype=torch.float64)
    x_N = workers_at_random(3)
    x_ND = torch.stack([x.detach().clone() for x in x_N])
    workers = Simulation(
        [[x] for x in x_N], [plain_sgd([x]) for x in x_N], Topology.from_matrices([mixing_NN]), AdaptiveConsensus()
    )
    workers.step()
    torch.testing.assert_close(torch.stack([x.detach() for x in x_N]), mixing_NN @ x_ND, rtol=0, atol=1e-15)


def test_a_skipped_worker_mixes_but_takes_no_local_step():
    x_N = [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([3.0]))]
    x_N[0].grad, x_N[1].grad = torch.tensor([math.nan]), torch.tensor([1.0])
    optimizers = [SGD([x]) for x in x_N]
    gossip_step([[x] for x in x_N], optimizers, torch.full((2, 2), 0.5), gamma=0.5, skip={0})
    assert x_N[0].item() == 1.5
    assert x_N[1].item() == pytest.approx(3 - 0.1 * (1 + 0.01 * 3) - 0.5)
    assert not optimizers[0].state


def test_tied_parameters_are_mixed_and_measured_once():
    x_N = [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([3.0]))]
    topology = build_topology("complete", 2)
    optimizers = [plain_sgd([x]) for x in x_N]
    workers = Simulation([[x, x] for x in x_N], optimizers, topology, AdaptiveConsensus(constant=0.5))
    assert workers.radius() == pytest.approx(1.0)
    assert workers.frobenius() == pytest.approx(math.sqrt(2))
    workers.step()
    assert [x.item() for x in x_N] == [1.5, 2.5]  # mixed twice: 1.75 and 2.25
    assert workers.deployed_parameters() == [torch.tensor([2.0])]


def test_an_overflow_in_a_worker_without_peers_does_not_spread():
    mixing_NN = build_topology("one_peer_ring", 3).matrix(0)  # worker 2 sits the round out
    x_N = [torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([math.inf])]
    gossip_step([[x] for x in x_N], [plain_sgd([x]) for x in x_N], mixing_NN, gamma=1.0)
    assert [x.item() for x in x_N] == [2.0, 2.0, math.inf]


def test_refusals_name_what_is_wrong():
    x_N = workers_at_random(2)
    optimizers, topology = [SGD([x]) for x in x_N], build_topology("ring", 2)
    with pytest.raises(ValueError, match="got 1 models and 2 optimizers for a topology of 2 workers"):
        Simulation([[x_N[0]]], optimizers, topology, AdaptiveConsensus())
    with pytest.raises(ValueError, match="order must be one of local_first, mix_first; got 'last'"):
        gossip_step([], [], torch.eye(1), 1.0, order="last")


# Configurations that must agree


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("order", ["local_first", "mix_first"])
def test_power_0_and_not_yet_active_are_plain_dsgd_to_the_bit(optimizer, order):
    topology = build_topology("one_peer_ring", 5)
    settings = [{"power": 0}, {"start_step": 10**6}, {"constant": 1.0}, {"max_lr": 1e-9}]
    runs = [last(simulate(topology, AdaptiveConsensus(**setting), optimizer, order=order)) for setting in settings]
    assert all(torch.equal(run, runs[0]) for run in runs)
    adaptive = last(simulate(topology, AdaptiveConsensus(power=3, max_lr=1.0), optimizer, order=order))
    assert not torch.equal(adaptive, runs[0])


def test_dsgd_is_the_matrix_recursion_over_the_rounds():
    topology = build_topology("base_graph", 6)
    x_ND = torch.stack([x.detach().clone() for x in workers_at_random(6)])
    for step, workers in zip(range(6), simulate(topology, AdaptiveConsensus(power=0)), strict=False):
        grad_ND = torch.stack([xs[0].grad for xs in workers.parameters_N])
        x_ND = topology.matrix(step) @ x_ND - 0.1 * grad_ND
    final_ND = last(simulate(topology, AdaptiveConsensus(power=0)))
    torch.testing.assert_close(final_ND, x_ND, rtol=0, atol=1e-13)


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@pytest.mark.parametrize("order", ["local_first", "mix_first"])
def test_one_worker_is_the_plain_optimizer_to_the_bit(optimizer, order):
    topology = build_topology("one_peer_ring", 1)
    workers = list(simulate(topology, AdaptiveConsensus(), optimizer, order=order))[-1]
    (x,) = workers_at_random(1)
    local = optimizer([x])
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        x.grad = 0.1 * x.detach() + torch.randn(x.shape, dtype=x.dtype, generator=generator)
        local.step()
    assert torch.equal(workers.parameters_N[0][0], x)
    assert torch.equal(workers.deployed_parameters()[0], x)
    assert workers.radius() == workers.frobenius() == 0


@pytest.mark.parametrize("name", ["one_peer_ring", "exponential", "base_graph", "grid"])
def test_the_mean_moves_by_the_mean_of_the_local_updates_alone(name):
    topology = build_topology(name, 6)
    mean_D = torch.stack(list(workers_at_random(6))).detach().mean(0)
    states = simulate(topology, AdaptiveConsensus(max_lr=0.2))
    for workers in states:
        torch.testing.assert_close(workers.deployed_parameters()[0], mean_D, rtol=0, atol=1e-14)
        mean_D = mean_D - 0.1 * torch.stack([xs[0].grad for xs in workers.parameters_N]).mean(0)
    assert len(workers.gammas) == 6


def test_on_a_quadratic_the_deployed_model_of_any_gamma_is_synchronous_sgd():
    # The gradient is linear, so its mean over the workers is the gradient at their mean.
    topology = build_topology("complete", 4)
    x_D = torch.stack(workers_at_random(4)).detach().mean(0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        noise_ND = torch.stack([torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(4)])
        x_D = x_D - 0.1 * (0.1 * x_D + noise_ND.mean(0))
    for gamma in (0.0, 0.3, 1.0):
        *_, workers = simulate(topology, AdaptiveConsensus(constant=gamma))
        torch.testing.assert_close(workers.deployed_parameters()[0], x_D, rtol=0, atol=1e-14)


def test_complete_averaging_leaves_only_the_last_local_updates_apart():
    # gamma = 1: x_i = x_bar - lr g_i, so the deviation is that of the last updates and nothing older.
    states = simulate(build_topology("complete", 4), AdaptiveConsensus(power=0))
    workers = next(states)
    for _ in range(6):
        grad_ND = torch.stack([xs[0].grad.clone() for xs in workers.parameters_N])
        next(states)
        expected_ND = -0.1 * (grad_ND - grad_ND.mean(0))
        assert workers.frobenius() == pytest.approx(expected_ND.norm().item(), rel=1e-12)
        assert workers.radius() == pytest.approx(expected_ND.norm(dim=1).mean().item(), rel=1e-12)
    assert len(workers.gammas) == 6


def test_gamma_is_logged_from_the_lr_of_the_group_with_the_largest_base_lr():
    models = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = [
        torch.optim.SGD([{"params": model.bias, "lr": 0.01}, {"params": model.weight, "lr": 0.4}]) for model in models
    ]
    halves = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    workers = Simulation(models, optimizers, build_topology("ring", 2), AdaptiveConsensus(power=2, start_step=1))
    for _ in range(4):
        workers.step()
        for scheduler in halves:
            scheduler.step()
    assert workers.gammas == [1.0, 1.0, 0.25, 0.0625]


# Edits between two steps


def edited(edit, topology=None, order="local_first", mix_every=1, overlap=True, restart=False, num_steps=7):
    """Train six workers whose script calls `edit(worker, step, x)` before each step; what it returns lasts."""
    topology = topology or build_topology("one_peer_ring", 6)
    x_N = workers_at_random(topology.num_workers)
    mean_D = torch.stack(list(x_N)).detach().mean(0)
    schedule = AdaptiveConsensus(constant=0.7)
    workers = Simulation(
        [[x] for x in x_N], [plain_sgd([x]) for x in x_N], topology, schedule, order, mix_every, overlap
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for worker, x in enumerate(x_N):
            x.grad = torch.randn(x.shape, dtype=x.dtype, generator=generator)
            mean_D = mean_D + (edit(worker, step, x) - 0.1 * x.grad) / len(x_N)
        if restart:
            workers.restart_exchange()
        workers.step()
    return torch.stack([x.detach() for x in x_N]), mean_D


def nothing(worker, step, x):
    return 0.0


def undone(worker, step, x):
    kept, x.data = x.data, torch.full_like(x, math.nan)  # another tensor in and out, as for an average of weights
    x.data = kept.clone()
    return 0.0


def lasting(worker, step, x):
    change_D = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(10 * step + worker))
    x.data = x.data + change_D
    return change_D


@pytest.mark.parametrize("name", ["one_peer_ring", "ring", "complete", "base_graph"])
@pytest.mark.parametrize(
    "options", [{}, {"order": "mix_first"}, {"mix_every": 2}, {"overlap": False}, {"restart": True}], ids=str
)
def test_the_mean_moves_by_local_updates_and_lasting_edits_alone(name, options):
    x_ND, mean_D = edited(lasting, build_topology(name, 6), **options)
    torch.testing.assert_close(x_ND.mean(0), mean_D, rtol=0, atol=1e-14)
    at_once = edited(lasting, build_topology(name, 6), **options | {"overlap": False})[0]
    assert torch.equal(x_ND, at_once) == ("overlap" in options or "restart" in options)


def test_an_edit_that_is_undone_changes_nothing():
    assert torch.equal(edited(undone)[0], edited(nothing)[0])


def pair(*x_N, **options):
    """Two workers with gamma 1 and without gradients."""
    optimizers = [plain_sgd([x]) for x in x_N]
    topology = build_topology("complete", 2)
    return Simulation([[x] for x in x_N], optimizers, topology, AdaptiveConsensus(power=0), **options)


@pytest.mark.parametrize(
    ("options", "restart", "expected"),
    [({}, False, [4.0, 0.0]), ({}, True, [2.0, 2.0]), ({"overlap": False}, False, [2.0, 2.0])],
)
def test_an_edit_in_flight_is_added_to_what_was_mixed_and_one_before_the_copy_is_mixed(options, restart, expected):
    x_N = [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([3.0]))]
    workers = pair(*x_N, **options)
    workers.step()
    assert [x.item() for x in x_N] == [2.0, 2.0]
    x_N[0].data.fill_(4.0)
    x_N[1].data.fill_(0.0)
    if restart:
        workers.restart_exchange()
    workers.step()
    assert [x.item() for x in x_N] == expected


def test_parameters_that_leave_are_left_alone_and_newcomers_start_as_those_of_worker_0():
    models = [nn.ParameterList([torch.tensor([float(worker)])]) for worker in range(2)]
    optimizers = [plain_sgd(model.parameters()) for model in models]
    workers = Simulation(models, optimizers, build_topology("complete", 2), AdaptiveConsensus(constant=0.5))
    workers.step()
    assert [model[0].item() for model in models] == [0.25, 0.75]
    for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model.append(torch.tensor([10.0 + worker]))
        optimizer.param_groups[0]["params"] = [model[1]]
        model[1].grad = torch.tensor([10.0 * worker])
    workers.step()
    assert [[x.item() for x in model] for model in models] == [[0.25, 10.0], [0.75, 9.0]]
    for model in models:
        model[1].grad = None
    workers.step()
    assert [[x.item() for x in model] for model in models] == [[0.25, 9.75], [0.75, 9.25]]


def test_parameters_on_the_same_memory_are_mixed_once():
    x_N = [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([3.0]))]
    tied_N = [[x, nn.Parameter(x.data)] for x in x_N]
    optimizers = [plain_sgd(xs) for xs in tied_N]
    Simulation(tied_N, optimizers, build_topology("complete", 2), AdaptiveConsensus(constant=0.5)).step()
    assert [x.item() for x in x_N] == [1.5, 2.5]


# Statements of the paper on the radius


def cosine(step, num_steps):
    return 0.5 * (1 + math.cos(math.pi * step / num_steps))


def radii_along_a_cosine(power, num_steps=400):
    x_N = workers_at_random(8, dim=50)
    schedule = AdaptiveConsensus(power=power)
    radii = []
    for step, workers in enumerate(
        simulate(build_topology("one_peer_ring", 8), schedule, num_steps=num_steps, x_N=x_N)
    ):
        radii.append(workers.radius())
        for optimizer in workers.optimizers:
            optimizer.param_groups[0].update(lr=0.1 * cosine(step, num_steps), initial_lr=0.1)
    return radii


def test_disagreement_vanishes_under_dsgd_and_stays_under_adaptive_consensus():
    # With 8 x 50 independent coordinates, one run is within about 10 % of its expectation; the margins are wider.
    dsgd, adaptive = radii_along_a_cosine(power=0), radii_along_a_cosine(power=3)
    assert dsgd[-1] < 0.01 * dsgd[40]
    assert adaptive[-1] > 0.9 * adaptive[40]


def radius_of_the_recursion(power, num_steps):
    """Root of E||z||^2 over the modes of a ring of 8 with a flat loss: z <- (1 - gamma mu) z - lr xi, unit noise."""
    mu_N = 1 - torch.linalg.eigvalsh(build_topology("ring", 8).matrix(0))[:-1]  # without the mean mode, mu = 0
    schedule = AdaptiveConsensus(power=power)
    variance_N = torch.zeros_like(mu_N)
    for step in range(num_steps):
        lr = cosine(step, num_steps)
        variance_N = (1 - schedule.gamma(step, lr) * mu_N) ** 2 * variance_N + lr**2
    return variance_N.sum().sqrt().item(), (1 / (2 * mu_N)).sum().sqrt().item()


def test_final_radius_against_run_length_is_the_corollary_of_theorem_1():
    # E z^2 = lr^2 / (d (2 - d)) with d = gamma mu tends to lr^(2 - p) / (2 mu) as lr falls.
    radius = {p: [radius_of_the_recursion(p, steps)[0] for steps in (420, 1400, 5600)] for p in (1, 2, 3, 4)}
    limit = radius_of_the_recursion(2, 1)[1]
    assert radius[1][0] > 1.3 * radius[1][1] > 1.3**2 * radius[1][2]
    assert radius[2] == pytest.approx([limit] * 3, rel=0.02)
    for power in (3, 4):
        assert radius[2][2] < 1.05 * radius[power][0] < radius[power][1] < radius[power][2] < 3 * radius[power][0]
