"""Theorem 1 and its extensions against DSGD-AC on quadratics, within the statistical error of the simulation.

The error comes from the spread of independent chains, so correlation within a chain needs no model. A quantity agrees
when it is off by a few of these errors; that the errors are small enough to tell theories apart is tested as well.
"""

import math

import pytest
import torch
from torch import nn

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.simulation import gossip_step
from dsgdac_accel.theory import (
    graph_modes,
    modal_variance,
    predicted_radius,
    quadratic_chains,
    quadratic_step,
    radius_along,
    simulate_quadratic,
    slowest_decay,
)
from dsgdac_accel.topology import Topology, build_topology

LAM = [5.0, 1.0, 0.0, -0.05]
SIGMA2 = [4.0, 1.0, 0.25, 0.25]
# With momentum 0.9, a mode has ten times the memory and tolerates a tenth of the negative curvature.
PLAIN = {"gamma": 0.5, "lr": 0.1, "lam": LAM, "sigma2": SIGMA2, "momentum": 0.0}
HEAVY_BALL = {"gamma": 0.5, "lr": 0.02, "lam": LAM, "sigma2": SIGMA2, "momentum": 0.9}
SETTINGS = pytest.mark.parametrize("settings", [PLAIN, HEAVY_BALL], ids=["plain", "heavy_ball"])


def errors_off(estimate, expected):
    """Return the error of the measured values in standard errors."""
    return (estimate.value - expected) / estimate.standard_error


def agrees(estimate, expected):
    """Return whether no value is off by 5 standard errors of 64 chains (1 in 200,000), and the sum only by chance."""
    off = errors_off(estimate, expected)
    return off.abs().max() < 5 and off.square().mean() < 2


# The simulation is the algorithm


@SETTINGS
@pytest.mark.parametrize("name", ["ring", "one_peer_ring", "base_graph"])
def test_the_simulation_takes_the_steps_of_gossip_step_on_a_dense_hessian(name, settings):
    topology, steps, chains = build_topology(name, 6), 12, 3
    gamma, lr, momentum = settings["gamma"], settings["lr"], settings["momentum"]
    generator = torch.Generator().manual_seed(0)
    basis_DK, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator))
    lam_K = torch.tensor(LAM, dtype=torch.float64)
    hessian_DD = basis_DK * lam_K @ basis_DK.T
    x_NCK = torch.randn(6, chains, 4, dtype=torch.float64, generator=generator)
    parameters = [[nn.Parameter(x_K @ basis_DK.T) for x_K in x_CK] for x_CK in x_NCK]  # a chain is a parameter here
    optimizers = [torch.optim.SGD(xs, lr=lr, momentum=momentum) for xs in parameters]
    momentum_NCK = torch.zeros_like(x_NCK)
    for step in range(steps):
        noise_NCK = torch.randn(x_NCK.shape, dtype=torch.float64, generator=generator)
        for xs, noise_CK in zip(parameters, noise_NCK, strict=True):
            for x, noise_K in zip(xs, noise_CK, strict=True):
                x.grad = hessian_DD @ x.detach() + basis_DK @ noise_K
        gossip_step(parameters, optimizers, topology.matrix(step), gamma)
        x_NCK, momentum_NCK = quadratic_step(
            x_NCK, momentum_NCK, lam_K * x_NCK + noise_NCK, topology.matrix(step), gamma, lr, momentum
        )
    dense_NCD = torch.stack([torch.stack([x.detach() for x in xs]) for xs in parameters])
    torch.testing.assert_close(x_NCK, dense_NCD @ basis_DK, rtol=0, atol=1e-12)


def test_removing_the_mean_changes_no_deviation():
    # The same noise without re-centering, over few enough steps for the mean of the negative curvature to stay small.
    topology, steps = build_topology("one_peer_ring", 5), 40
    lam_K = torch.tensor(LAM, dtype=torch.float64)
    x_NCK = momentum_NCK = torch.zeros(5, 3, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    centered = quadratic_chains(topology, [0.3] * steps, [0.02] * steps, LAM, SIGMA2, 0.9, chains=3, seed=7)
    for step, delta_NCK in enumerate(centered):
        noise = torch.tensor(SIGMA2, dtype=torch.float64).sqrt() * torch.randn(
            x_NCK.shape, dtype=torch.float64, generator=generator
        )
        x_NCK, momentum_NCK = quadratic_step(
            x_NCK, momentum_NCK, lam_K * x_NCK + noise, topology.matrix(step), 0.3, 0.02, 0.9
        )
        torch.testing.assert_close(delta_NCK, x_NCK - x_NCK.mean(0), rtol=0, atol=1e-12)
    assert x_NCK.mean(0).abs().max() > 0.1


def test_a_growing_mean_does_not_swamp_the_deviations():
    # With curvature -0.5 the mean mode grows by e^(0.05 t): by 1e42 in these steps.
    settings = {"gamma": 1.0, "lr": 0.1, "lam": -0.5, "sigma2": 1.0}
    run = simulate_quadratic(build_topology("complete", 4), **settings, steps=2000, chains=16)
    expected = predicted_radius(build_topology("complete", 4), **settings)
    assert abs(errors_off(run.frobenius(), expected.frobenius)) < 5


# The stationary state


@SETTINGS
@pytest.mark.parametrize("name", ["ring", "exponential", "complete"])
def test_every_mode_has_the_variance_of_theorem_1(name, settings):
    topology = build_topology(name, 8)
    run = simulate_quadratic(topology, **settings, steps=600)
    mu_J, _ = graph_modes(topology)
    expected_JK = modal_variance(settings["lr"], settings["gamma"], mu_J[:, None], LAM, SIGMA2, settings["momentum"])
    measured = run.modal_variance()
    assert measured.value.shape == expected_JK.shape == (7, 4)
    assert agrees(measured, expected_JK)
    assert (measured.standard_error < 0.06 * expected_JK).all()
    expected = predicted_radius(topology, **settings)
    assert abs(errors_off(run.frobenius(), expected.frobenius)) < 4
    assert abs(errors_off(run.radius(), expected.radius)) < 4
    assert run.frobenius().standard_error < 0.01 * expected.frobenius


@SETTINGS
@pytest.mark.parametrize(
    "topology",
    [
        build_topology("one_peer_ring", 8),
        build_topology("one_peer_ring", 5),
        Topology.from_matrices([[[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]], "directed"),
    ],
    ids=repr,
)
def test_rounds_without_common_modes_have_the_variance_of_the_periodic_solution(topology, settings):
    run = simulate_quadratic(topology, **settings, steps=600)
    expected = predicted_radius(topology, **settings)
    assert run.variance().value.shape == (topology.period, topology.num_workers, 4)
    assert agrees(run.variance(), expected.variance_TNK)
    assert abs(errors_off(run.frobenius(), expected.frobenius)) < 4
    assert abs(errors_off(run.radius(), expected.radius)) < 4


def test_the_simulation_tells_the_theories_apart():
    # Wrong theories: the formula without momentum, and the average of the rounds in place of the rounds.
    alternating = build_topology("one_peer_ring", 8)
    averaged = Topology.from_matrices([sum(alternating.matrix(step) for step in range(2)) / 2])
    settings = {**HEAVY_BALL, "gamma": 1.0}
    run = simulate_quadratic(alternating, **settings, steps=600)
    measured = run.frobenius()
    assert abs(errors_off(measured, predicted_radius(alternating, **settings).frobenius)) < 4
    assert abs(errors_off(measured, predicted_radius(averaged, **settings).frobenius)) > 20
    assert abs(errors_off(measured, predicted_radius(alternating, **{**settings, "momentum": 0.0}).frobenius)) > 20
    # An error of two percent in the radius is detected as well.
    louder = [1.04 * sigma2 for sigma2 in SIGMA2]
    assert abs(errors_off(measured, predicted_radius(alternating, **{**settings, "sigma2": louder}).frobenius)) > 5


def test_four_times_the_steps_halve_the_error():
    topology = build_topology("complete", 4)
    errors = [simulate_quadratic(topology, **PLAIN, steps=n, chains=256).frobenius()[1].item() for n in (100, 400)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.3)


def test_the_slowest_decay_is_per_step_for_any_period():
    once = build_topology("ring", 4)
    twice, lam_K = Topology.from_matrices([once.matrix(0)] * 2), torch.tensor([0.5, 0.0], dtype=torch.float64)
    mu_J, _ = graph_modes(once)
    expected = 1 - 0.3 * mu_J.min().item()  # the flat direction, in the mode of the graph that mixes least
    for topology in (once, twice):
        assert slowest_decay(topology, 0.3, 0.1, lam_K, 0.0) == pytest.approx(expected)


def test_the_same_seed_gives_the_same_run_and_steps_round_up_to_periods():
    settings = {**PLAIN, "chains": 2, "burn_in": 3}
    topology = build_topology("one_peer_ring", 4)
    once, again, longer, other = (
        simulate_quadratic(topology, **settings, steps=steps, seed=seed)
        for steps, seed in ((5, 0), (5, 0), (6, 0), (5, 1))
    )
    assert torch.equal(once.moments_CTKNN, again.moments_CTKNN)
    assert torch.equal(once.moments_CTKNN, longer.moments_CTKNN)
    assert not torch.equal(once.moments_CTKNN, other.moments_CTKNN)
    assert simulate_quadratic(build_topology("ring", 1), **PLAIN, steps=1).frobenius().value == 0


# Along a schedule


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_along_a_cosine_the_spread_of_many_runs_is_that_of_the_recursion(momentum):
    topology, steps, chains = build_topology("one_peer_ring", 8), 120, 1500
    lrs = [0.05 * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    arguments = (topology, AdaptiveConsensus(power=3, start_step=10), lrs, [2.0, 0.0], [4.0, 1.0], momentum)
    expected = radius_along(*arguments)
    for step, delta_NCK in enumerate(quadratic_chains(*arguments, chains=chains)):
        if step in (5, 60, steps - 1):
            for measured_C, value in (
                (delta_NCK.square().sum((0, 2)), expected[step].frobenius ** 2),
                (delta_NCK.norm(dim=2).mean(0), expected[step].radius),
                ((delta_NCK.square() * torch.tensor([2.0, 0.0])).sum((0, 2)) / 2, expected[step].envelope),
            ):
                assert abs(measured_C.mean() - value) < 4 * measured_C.std() / math.sqrt(chains)
                assert measured_C.std() / math.sqrt(chains) < 0.02 * value
    assert expected[-1].radius > expected[60].radius / 2 > 0  # kept apart
