"""The theory against dense algebra: Lyapunov equations solved as one linear system, eigenvalues, autograd."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.simulation import consensus_update
from dsgdac_accel.theory import (
    consensus_penalty,
    gaussian_norm,
    graph_modes,
    is_mixing_dominated,
    is_stable,
    mixing_dominated_variance,
    modal_variance,
    modal_variance_bounds,
    predicted_radius,
    radius_along,
    simulate_quadratic,
)
from dsgdac_accel.topology import Topology, build_topology

exact = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
STATIC = ("ring", "exponential", "complete", "grid")
DIRECTED = [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]

lrs = st.floats(1e-3, 1.0)
gammas = st.floats(0.0, 1.0)
eigenvalues = st.floats(0.0, 2.0)
curvatures = st.floats(-5.0, 10.0)
momenta = st.floats(0.0, 0.95)


def of_one_mode(alpha, gamma, mu, lam, momentum):
    """The recursion of (z, m) in one step, and the direction in which a unit of noise enters."""
    step = np.array([[1 - gamma * mu - alpha * lam, -alpha * momentum], [lam, momentum]])
    return step, np.array([-alpha, 1.0])


def of_all_workers(topology, gamma, lr, lam, momentum):
    """As above for all workers in one direction of the Hessian, for each round, with the mean removed."""
    n = topology.num_workers
    center = np.eye(n) - 1 / n
    for round_ in topology.rounds:
        momentum_row = np.hstack([lam * np.eye(n), momentum * np.eye(n)])
        mixing_row = np.hstack([np.eye(n) - gamma * (np.eye(n) - round_), np.zeros((n, n))])
        step = np.vstack([mixing_row - lr * momentum_row, momentum_row])
        yield np.kron(np.eye(2), center) @ step, np.vstack([-lr * center, center])


def dense_lyapunov(step, noise):
    """S = A S A' + Q, as the linear system (I - A x A) vec S = vec Q."""
    size = len(step)
    return np.linalg.solve(np.eye(size * size) - np.kron(step, step), noise.ravel()).reshape(size, size)


def dense_variances(topology, gamma, lr, lam, momentum):
    """The stationary variance of every worker after each round, unit noise: (T, N)."""
    rounds = list(of_all_workers(topology, gamma, lr, lam, momentum))
    step, noise = np.eye(2 * topology.num_workers), np.zeros((2 * topology.num_workers,) * 2)
    for A, B in rounds:
        step, noise = A @ step, A @ noise @ A.T + B @ B.T
    covariance = dense_lyapunov(step, noise)
    variances = []
    for A, B in rounds:
        covariance = A @ covariance @ A.T + B @ B.T
        variances.append(np.diag(covariance)[: topology.num_workers].copy())
    return torch.tensor(np.array(variances))


# One mode


@given(lrs, gammas, eigenvalues, curvatures, momenta)
def test_a_mode_is_stable_when_the_eigenvalues_of_its_recursion_are_inside_the_unit_circle(alpha, gamma, mu, lam, b):
    step, _ = of_one_mode(alpha, gamma, mu, lam, b)
    largest = abs(np.linalg.eigvals(step)).max()
    assume(abs(largest - 1) > 1e-7)
    assert is_stable(alpha, gamma, mu, lam, b).item() == (largest < 1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.75])
def test_the_edges_of_the_stability_region_are_outside_it(momentum):
    # Powers of two, so that nothing rounds; the edges are an eigenvalue of 1 and one of -1.
    alpha, gamma, mu = 0.25, 0.5, 0.5
    for edge, eigenvalue in ((-(1 - momentum) * 0.25, 1.0), ((1 + momentum) * (2 - 0.25), -1.0)):
        step, _ = of_one_mode(alpha, gamma, mu, edge / alpha, momentum)
        assert np.linalg.det(step - eigenvalue * np.eye(2)) == pytest.approx(0.0, abs=1e-15)
        inward = eigenvalue * 1e-9
        assert is_stable(alpha, gamma, mu, [(edge + inward) / alpha], momentum).tolist() == [True]
        assert is_stable(alpha, gamma, mu, [edge / alpha, (edge - inward) / alpha], momentum).tolist() == [False, False]
        assert modal_variance(alpha, gamma, mu, edge / alpha, [1.0, 0.0], momentum).tolist() == [math.inf, math.inf]


@given(lrs, gammas, eigenvalues, curvatures, momenta, st.floats(0.0, 10.0))
def test_modal_variance_solves_the_lyapunov_equation_of_its_recursion(alpha, gamma, mu, lam, b, sigma2):
    step, enters = of_one_mode(alpha, gamma, mu, lam, b)
    largest = abs(np.linalg.eigvals(step)).max()
    assume(abs(largest - 1) > 1e-4)
    variance = modal_variance(alpha, gamma, mu, lam, sigma2, b).item()
    if largest > 1:
        assert variance == math.inf
    else:
        covariance = dense_lyapunov(step, sigma2 * np.outer(enters, enters))
        assert variance == pytest.approx(covariance[0, 0], rel=1e-6, abs=1e-9)


@given(lrs, gammas, eigenvalues, curvatures)
def test_without_momentum_the_variance_is_theorem_1_and_within_the_bounds_of_remark_1(alpha, gamma, mu, lam):
    d = gamma * mu + alpha * lam
    assume(1e-6 < d < 2 - 1e-6)
    variance = modal_variance(alpha, gamma, mu, lam, 3.0)
    assert variance.item() == pytest.approx(3 * alpha**2 / (1 - (1 - d) ** 2), rel=1e-6)
    for d_max in (None, 0.5 * (d + 2)):
        lower, upper = modal_variance_bounds(alpha, gamma, mu, lam, 3.0, d_max=d_max)
        assert lower * (1 - 1e-12) <= variance <= upper * (1 + 1e-12)


def test_bounds_use_the_largest_damping_among_the_stable_modes():
    lower, upper = modal_variance_bounds(0.1, 1.0, mu=[0.5, 1.0], lam=[0.0, 2.0], sigma2=1.0)
    exact(upper, 0.01 / ((2 - 1.2) * torch.tensor([0.5, 1.2], dtype=torch.float64)))
    with_unstable = modal_variance_bounds(0.1, 1.0, mu=[0.5, 1.0, 1.0, 0.0], lam=[0.0, 2.0, 10.0, -1.0], sigma2=1.0)
    exact(with_unstable[0], torch.cat([lower, torch.tensor([math.inf, math.inf])]))
    exact(with_unstable[1], torch.cat([upper, torch.tensor([math.inf, math.inf])]))
    for d_max in (1.1, 2.0, math.nan):
        with pytest.raises(ValueError, match=r"d_max must be < 2 and at least the largest damping .* 1.2; got"):
            modal_variance_bounds(0.1, 1.0, mu=[0.5, 1.0], lam=[0.0, 2.0], sigma2=1.0, d_max=d_max)


@given(lrs, st.floats(1e-3, 1.0), st.floats(1e-2, 1.0), st.floats(-0.9, 0.9), st.floats(0.0, 0.9))
def test_in_mixing_dominated_modes_the_variance_is_a_constant_times_lr_squared_over_mixing(a, gamma, mu, x, rho):
    # Remark 1: (1 - rho) gamma mu <= d <= (1 + rho) gamma mu, and d (2 - d) for d <= d_max < 2.
    lam = x * gamma * mu / a
    assume(abs(abs(x) - rho) > 1e-9)
    assert is_mixing_dominated(a, gamma, mu, lam, rho).item() == (abs(x) < rho)
    if abs(x) < rho:
        ratio = (modal_variance(a, gamma, mu, lam, 1.0) / mixing_dominated_variance(a, gamma, mu, 1.0)).item()
        d_max = (1 + rho) * gamma * mu
        assert 1 / (1 + rho) <= ratio <= 2 / ((1 - rho) * (2 - d_max)) * (1 + 1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_with_momentum_a_mode_is_mixing_dominated_where_its_variance_is_about_that_of_a_flat_loss(momentum):
    # |alpha lam| <= rho gamma mu (1 - b) moves the factor s of the variance by at most rho.
    alpha, gamma, mu, rho = 0.01, 0.01, 0.5, 0.25
    edge = rho * gamma * mu * (1 - momentum) / alpha
    lam = torch.tensor([-1.001, -0.999, 0.0, 0.999, 1.001], dtype=torch.float64) * edge
    assert is_mixing_dominated(alpha, gamma, mu, lam, rho, momentum).tolist() == [False, True, True, True, False]
    ratio = modal_variance(alpha, gamma, mu, lam, 1.0, momentum) / modal_variance(alpha, gamma, mu, 0.0, 1.0, momentum)
    exact(ratio[[1, 3]], torch.tensor([1 / (1 - rho), 1 / (1 + rho)], dtype=torch.float64), rtol=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_where_mixing_is_weak_the_variance_tends_to_that_of_lr_over_one_minus_momentum(momentum):
    errors = []
    for gamma in (1e-3, 1e-4, 1e-5):
        limit = mixing_dominated_variance(0.1, gamma, 0.5, 2.0, momentum)
        errors.append(abs(modal_variance(0.1, gamma, 0.5, 0.0, 2.0, momentum) / limit - 1).item())
        exact(limit, mixing_dominated_variance(0.1 / (1 - momentum), gamma, 0.5, 2.0))
    assert errors[0] < 0.01
    assert errors[2] < 0.2 * errors[1] < 0.2**2 * errors[0]
    assert mixing_dominated_variance(0.1, [0.0, 0.1], [0.5, 0.0], 1.0, momentum).tolist() == [math.inf, math.inf]


def test_momentum_lets_a_tenth_of_the_negative_curvature_destabilize():
    lam = torch.linspace(-1, 0, 1001, dtype=torch.float64)
    threshold = {b: lam[is_stable(0.1, 0.1, 0.5, lam, b)].min().item() for b in (0.0, 0.9)}
    assert threshold[0.0] == pytest.approx(10 * threshold[0.9], abs=0.02)
    # The formula of the paper, without momentum, is far off.
    assert modal_variance(0.1, 0.1, 0.5, 0.0, 1.0, 0.9) > 50 * modal_variance(0.1, 0.1, 0.5, 0.0, 1.0)


def test_arguments_broadcast_and_may_be_lists_arrays_or_tensors():
    mu, lam = np.array([[0.5], [1.5]]), torch.tensor([1.0, 2.0, 3.0])
    table = modal_variance(0.1, 0.5, mu, lam, [1.0, 2.0, 3.0], momentum=0.5)
    assert table.shape == (2, 3)
    for row, column in itertools.product(range(2), range(3)):
        alone = modal_variance(0.1, 0.5, mu[row, 0], lam[column], column + 1, momentum=0.5)
        assert alone.shape == ()
        assert alone == table[row, column]
    assert modal_variance(torch.tensor(0.5).bfloat16().float(), 1, 1, 0, 1).dtype is torch.float64


# A topology


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("num_workers", [1, 2, 5, 8])
def test_graph_modes_diagonalize_the_laplacian_without_the_mean(name, num_workers):
    topology = build_topology(name, num_workers)
    mu_J, vectors_NJ = graph_modes(topology)
    laplacian_NN = torch.eye(num_workers, dtype=torch.float64) - topology.matrix(0)
    exact(vectors_NJ * mu_J @ vectors_NJ.T, laplacian_NN)
    exact(vectors_NJ.T @ vectors_NJ, torch.eye(num_workers - 1, dtype=torch.float64))
    exact(vectors_NJ.sum(0), torch.zeros(num_workers - 1, dtype=torch.float64))
    assert ((mu_J > 0) & (mu_J <= 2)).all()
    assert mu_J.tolist() == sorted(mu_J.tolist(), reverse=True)


TOPOLOGIES = [
    build_topology("one_peer_ring", 2),
    build_topology("one_peer_ring", 4),
    build_topology("one_peer_ring", 5),
    build_topology("one_peer_exponential", 4),
    build_topology("base_graph", 3),
    build_topology("ring", 5),
    build_topology("grid", 6),  # its workers have different degrees
    Topology.from_matrices([DIRECTED], "directed"),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
@pytest.mark.parametrize(("momentum", "gamma"), [(0.0, 1.0), (0.0, 0.2), (0.9, 1.0), (0.9, 0.2)])
def test_predicted_radius_solves_the_lyapunov_equation_of_a_whole_period(topology, momentum, gamma):
    lam, sigma2 = [5.0, 0.3, 0.0, -0.02], [4.0, 1.0, 0.0, 0.25]
    predicted = predicted_radius(topology, gamma, 0.05, lam, sigma2, momentum)
    dense_TNK = torch.stack(
        [s * dense_variances(topology, gamma, 0.05, x, momentum) for x, s in zip(lam, sigma2, strict=True)], dim=-1
    )
    exact(predicted.variance_TNK, dense_TNK)
    assert predicted.frobenius**2 == pytest.approx(dense_TNK.mean(0).sum().item())
    extra_loss = (dense_TNK.mean(0).sum(0) @ torch.tensor(lam).double() / 2).item()
    assert predicted.envelope == pytest.approx(extra_loss)
    assert predicted.exposure == pytest.approx(2 * extra_loss / 5)


@pytest.mark.parametrize("name", STATIC)
def test_a_static_round_and_the_same_round_twice_are_one_topology(name):
    once = build_topology(name, 6)
    twice = Topology.from_matrices([once.matrix(0)] * 2)
    settings_ = {"gamma": 0.3, "lr": 0.05, "lam": [3.0, 0.0, -0.02, -9.0], "sigma2": 1.0, "momentum": 0.5}
    modes, period = predicted_radius(once, **settings_), predicted_radius(twice, **settings_)
    exact(period.variance_TNK, modes.variance_TNK.expand(2, -1, -1))
    assert modes.variance_TNK[..., 3].isinf().all()


def test_frobenius_is_theorem_1_summed_over_all_modes():
    topology, lam, sigma2 = build_topology("exponential", 8), [2.0, 0.0], [1.0, 3.0]
    mu_J, _ = graph_modes(topology)
    total = sum(modal_variance(0.1, 0.4, mu, x, s).item() for mu in mu_J for x, s in zip(lam, sigma2, strict=True))
    assert predicted_radius(topology, 0.4, 0.1, lam, sigma2).frobenius ** 2 == pytest.approx(total)


@pytest.mark.parametrize("name", ["ring", "one_peer_ring"])
def test_an_unstable_direction_makes_the_norms_infinite_and_no_error(name):
    settings_ = {"gamma": 0.1, "lr": 0.1, "sigma2": 1.0}
    error = predicted_radius(build_topology(name, 4), lam=[1.0, -3.0], **settings_)
    assert error.variance_TNK[..., 0].isfinite().all()
    assert error.variance_TNK[..., 1].isinf().all()
    assert error.radius == error.frobenius == math.inf
    assert error.envelope == error.exposure == -math.inf
    assert "radius=inf" in repr(error)
    for lam, gamma in ((0.0, 0.0), (1000.0, 0.1)):  # a random walk, and an lr too large for the curvature
        assert predicted_radius(build_topology(name, 4), gamma, 0.1, lam, 1.0).frobenius == math.inf
    # An unstable direction does not matter if its count, or for the envelope its curvature, is 0.
    without = predicted_radius(build_topology(name, 4), lam=[1.0, -3.0], counts=[1, 0], **settings_)
    alone = predicted_radius(build_topology(name, 4), lam=1.0, **settings_)
    assert (without.radius, without.frobenius) == pytest.approx((alone.radius, alone.frobenius))
    assert predicted_radius(build_topology(name, 4), 0.0, 0.1, [1.0, 0.0], 1.0).envelope < math.inf


@pytest.mark.parametrize("repeats", [1, 2])
def test_workers_that_only_swap_their_parameters_are_a_random_walk(repeats):
    swap = Topology.from_matrices([[[0.0, 1.0], [1.0, 0.0]]] * repeats)  # mu = 2: at gamma = 1 an eigenvalue of -1
    assert predicted_radius(swap, 1.0, 0.1, 0.0, 1.0).frobenius == math.inf
    assert predicted_radius(swap, 1.0, 0.1, 1.0, 1.0).frobenius == math.inf
    assert predicted_radius(swap, 1.0, 0.1, -1.0, 1.0).frobenius < math.inf  # and d = 1.9 with negative curvature
    assert predicted_radius(swap, 0.99, 0.1, 0.0, 1.0).frobenius < math.inf


@pytest.mark.parametrize("num_workers", [4, 6, 8, 10])
def test_rounding_of_an_eigenvalue_at_the_edge_does_not_make_it_stable(num_workers):
    # Without own weight, mu = 2 on an even ring. Eigenvalue routines miss it by about an ulp.
    neighbors = np.roll(np.eye(num_workers), 1, axis=0) / 2
    topology = Topology.from_matrices([neighbors + neighbors.T])
    assert predicted_radius(topology, 1.0, 0.1, 0.0, 1.0).frobenius == math.inf
    assert predicted_radius(topology, 0.9, 0.1, 0.0, 1.0).frobenius < math.inf


@pytest.mark.parametrize("name", ["ring", "one_peer_ring", "complete"])
def test_one_worker_never_disagrees(name):
    alone = predicted_radius(build_topology(name, 1), 1.0, 0.1, [1.0, -1.0], 1.0, momentum=0.9)
    assert (alone.radius, alone.frobenius, alone.envelope) == (0, 0, 0)


# The radius, a mean of norms


@pytest.mark.parametrize("dim", [1, 2, 7, 1000, 10**6])
def test_the_norm_of_equal_gaussians_is_that_of_the_chi_distribution(dim):
    chi = math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    variance, count = torch.tensor([9.0]).double(), torch.tensor([float(dim)]).double()
    assert gaussian_norm(variance, count).item() == pytest.approx(3 * chi, rel=1e-9)


def test_the_norm_of_unequal_gaussians_is_that_of_random_draws_and_scales():
    variance_K = torch.tensor([4.0, 1.0, 0.01, 0.0]).double()
    draws = torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0)).double()
    norms = (draws * variance_K.sqrt()).norm(dim=1)
    expected = gaussian_norm(variance_K, torch.ones(4).double())
    assert abs(norms.mean() - expected) < 4 * norms.std() / math.sqrt(len(norms))
    exact(
        gaussian_norm(1e-30 * torch.stack([variance_K, 0 * variance_K]), torch.ones(4).double()) * 1e15,
        torch.stack([expected, 0 * expected]),
    )
    pairs = gaussian_norm(variance_K[:2], torch.tensor([2.0, 3.0]).double())
    exact(pairs, gaussian_norm(torch.tensor([4.0, 4.0, 1.0, 1.0, 1.0]).double(), torch.ones(5).double()))


def test_the_radius_is_at_most_the_root_mean_square_and_near_it_with_many_directions():
    ratio = {
        count: (error.radius / error.frobenius) * math.sqrt(8)
        for count in (1, 10, 1000)
        for error in [predicted_radius(build_topology("one_peer_ring", 8), 0.5, 0.1, 0.0, 1.0, 0.9, counts=count)]
    }
    assert ratio[1] == pytest.approx(math.sqrt(2 / math.pi))  # E|g| of one Gaussian
    assert ratio[1] < ratio[10] < ratio[1000] < 1
    assert ratio[1000] > 0.999


# A schedule


def cosine(num_steps, warm_up=0):
    decay = [0.5 * (1 + math.cos(math.pi * step / (num_steps - warm_up))) for step in range(num_steps - warm_up)]
    return [step / warm_up for step in range(warm_up)] + decay


@pytest.mark.parametrize("topology", [TOPOLOGIES[2], TOPOLOGIES[5], TOPOLOGIES[7]], ids=repr)
def test_with_constant_settings_the_recursion_arrives_at_the_stationary_state(topology):
    settings_ = {"lam": [2.0, 0.0], "sigma2": [1.0, 3.0], "momentum": 0.6}
    num_steps = 40 * topology.period
    along = radius_along(topology, [0.8] * num_steps, [0.1] * num_steps, **settings_)
    stationary = predicted_radius(topology, 0.8, 0.1, **settings_)
    reached_TNK = torch.cat([error.variance_TNK for error in along[-topology.period :]])
    exact(reached_TNK, stationary.variance_TNK, rtol=1e-4)
    assert along[0].frobenius ** 2 == pytest.approx((topology.num_workers - 1) * 4 * 0.1**2)  # the first step's noise


def test_the_recursion_is_the_dense_one_with_the_lr_and_gamma_of_each_step():
    topology, lam, momentum, steps = build_topology("one_peer_ring", 4), 0.7, 0.9, 12
    schedule = AdaptiveConsensus(power=2, start_step=3)
    planned = [0.1 * x for x in cosine(steps, warm_up=2)]
    along = radius_along(topology, schedule, planned, lam, 2.0, momentum)
    assert schedule.active_since is None  # a copy ran
    covariance = np.zeros((8, 8))
    for step, (lr, error) in enumerate(zip(planned, along, strict=True)):
        gamma = schedule.gamma(step, lr)
        A, B = list(of_all_workers(topology, gamma, lr, lam, momentum))[step % 2]
        covariance = A @ covariance @ A.T + 2.0 * B @ B.T
        exact(error.variance_TNK[0, :, 0], torch.from_numpy(np.diag(covariance)[:4].copy()))
    assert along[0].frobenius == 0  # the first lr of a warm-up is 0


def final_radius(power, num_steps, momentum):
    schedule = AdaptiveConsensus(power=power, start_step=num_steps // 20)
    planned = [0.3 * x for x in cosine(num_steps, warm_up=num_steps // 20)]
    return radius_along(build_topology("one_peer_ring", 4), schedule, planned, 0.0, 1.0, momentum)[-1].frobenius


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_final_radius_against_the_length_of_a_cosine_is_corollary_2(momentum):
    # E z^2 ~ lr^(2 - p): as lr ends lower in a longer run, p < 2 vanishes, p = 2 stays, p > 2 grows.
    radius = {power: [final_radius(power, steps, momentum) for steps in (200, 800)] for power in range(5)}
    assert radius[0][1] < 0.2 * radius[0][0]
    assert 0.3 < radius[1][1] / radius[1][0] < 0.8
    assert radius[2][1] == pytest.approx(radius[2][0], rel=0.05)
    assert 1.15 < radius[3][1] / radius[3][0] < 1.3
    assert 1.3 < radius[4][1] / radius[4][0] < 2
    assert [lengths[1] for lengths in radius.values()] == sorted(lengths[1] for lengths in radius.values())


def test_under_power_2_a_flat_loss_tends_to_the_mixing_dominated_variance_of_any_lr():
    # At p = 2, alpha^2 / gamma = max_lr^2 for any alpha, so the limit is known in advance.
    topology = build_topology("ring", 6)
    mu_J, _ = graph_modes(topology)
    planned = [0.2 * x for x in cosine(1000)]
    final = radius_along(topology, AdaptiveConsensus(power=2), planned, 0.0, 3.0, momentum=0.5)[-1]
    limit = mixing_dominated_variance(0.2, 1.0, mu_J, 3.0, momentum=0.5).sum().sqrt().item()
    assert final.frobenius == pytest.approx(limit, rel=0.03)


def test_divergence_beyond_the_largest_float_is_infinite():
    final = radius_along(build_topology("one_peer_ring", 4), [0.0] * 600, [1.0] * 600, -1.0, 1.0)[-1]
    assert final.radius == final.frobenius == math.inf


# The surrogate objective


@pytest.mark.parametrize("name", ["ring", "one_peer_ring", "grid"])
def test_a_gradient_step_on_the_penalty_is_the_consensus_update(name):
    mixing_NN, gamma, alpha = build_topology(name, 6).matrix(1), 0.3, 0.05
    x_ND = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    penalty = consensus_penalty(x_ND, mixing_NN, gamma, alpha)
    (gradient_ND,) = torch.autograd.grad(penalty, x_ND)
    update_N = consensus_update([[x_D] for x_D in x_ND.detach()], mixing_NN, gamma)
    exact(-alpha * gradient_ND, torch.cat([x for (x,) in update_N]).view(6, 4))
    pairs = itertools.product(range(6), repeat=2)
    by_hand = sum(mixing_NN[i, j] * (x_ND[i] - x_ND[j]).square().sum() for i, j in pairs)
    exact(penalty, gamma / (4 * alpha) * by_hand)


# Refusals

GOOD = {"alpha": 0.1, "gamma": 0.5, "mu": 0.5, "lam": 1.0, "sigma2": 1.0, "momentum": 0.0}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("alpha", 0.0, "alpha must be > 0; got 0.0"),
        ("alpha", [0.1, -0.2], "alpha must be > 0; got -0.2"),
        ("alpha", math.inf, "alpha must be finite; got inf"),
        ("gamma", 1.5, r"gamma must be in \[0, 1\]; got 1.5"),
        ("gamma", -0.1, r"gamma must be in \[0, 1\]; got -0.1"),
        ("mu", 2.1, r"mu must be in \[0, 2\]; got 2.1"),
        ("mu", [0.5, -0.1], r"mu must be in \[0, 2\]; got -0.1"),
        ("lam", [1.0, math.nan], "lam must be finite; got nan"),
        ("lam", "1", "lam must be a real number or an array of them; got '1'"),
        ("lam", [True], r"lam must be a real number or an array of them; got \[True\]"),
        ("lam", 1j, "lam must be a real number"),
        ("sigma2", -1.0, "sigma2 must be >= 0; got -1.0"),
        ("momentum", 1.0, r"momentum must be in \[0, 1\); got 1.0. Use 0 for plain SGD"),
        ("momentum", -0.5, r"momentum must be in \[0, 1\); got -0.5"),
    ],
)
def test_a_bad_argument_is_refused_by_name_everywhere(name, value, message):
    with pytest.raises(ValueError, match=message):
        modal_variance(**{**GOOD, name: value})
    if name in ("gamma", "lam", "sigma2", "momentum"):
        settings_ = {key: GOOD[key] for key in ("gamma", "lam", "sigma2", "momentum")} | {"lr": 0.1, name: value}
        for function in (predicted_radius, simulate_quadratic):
            with pytest.raises(ValueError, match=message):
                function(build_topology("ring", 4), **settings_)


def test_rounding_of_an_eigenvalue_is_accepted():
    assert modal_variance(**{**GOOD, "mu": -1e-16}) == modal_variance(**{**GOOD, "mu": 0.0})
    assert modal_variance(**{**GOOD, "mu": 2 + 1e-15}) == modal_variance(**{**GOOD, "mu": 2.0})
    assert is_stable(**{key: GOOD[key] for key in ("gamma", "mu", "lam")}, alpha=0.0)  # mixing alone


def test_refusals_say_what_to_do():
    ring, alternating = build_topology("ring", 4), build_topology("one_peer_ring", 4)
    for topology in (alternating, Topology.from_matrices([DIRECTED])):
        with pytest.raises(ValueError, match=r"single symmetric round; got Topology\(.*Use predicted_radius"):
            graph_modes(topology)
    with pytest.raises(ValueError, match="lr must be > 0; got 0"):
        predicted_radius(ring, 0.5, 0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"gamma must be one number; got shape \(2,\). Call once for each value"):
        predicted_radius(ring, [0.5, 0.1], 0.1, 1.0, 1.0)
    for lam, sigma2 in (([1.0, 2.0], [1.0, 2.0, 3.0]), ([[1.0]], 1.0), ([], 1.0)):
        with pytest.raises(ValueError, match=r"lists with one entry per direction, or single numbers; got shapes"):
            predicted_radius(ring, 0.5, 0.1, lam, sigma2)
    with pytest.raises(ValueError, match=r"counts must be >= 0; got -1.0"):
        predicted_radius(ring, 0.5, 0.1, 1.0, 1.0, counts=-1)
    with pytest.raises(ValueError, match=r"got 2 gammas and 3 lrs. Pass an AdaptiveConsensus"):
        radius_along(ring, [1.0] * 2, [0.1] * 3, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"lrs must be >= 0; got -0.1"):
        radius_along(ring, [1.0], [-0.1], 1.0, 1.0)
    for lrs_T in (0.1, []):
        with pytest.raises(ValueError, match=r"lrs must be a list with one entry per step, at least one; got shape"):
            radius_along(ring, [1.0], lrs_T, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"rho must be in \[0, 1\); got 1"):
        is_mixing_dominated(0.1, 0.1, 0.5, 0.0, rho=1)
    with pytest.raises(ValueError, match=r"got \(2, 2\) for 3 workers"):
        consensus_penalty(torch.zeros(3, 1), torch.eye(2), 0.5, 0.1)
    for name, value in (("chains", 1), ("steps", 0), ("burn_in", -1), ("steps", 1.5), ("chains", True)):
        with pytest.raises(ValueError, match=rf"{name} must be an integer >= \d; got {value}"):
            simulate_quadratic(ring, 0.5, 0.1, 1.0, 1.0, **{name: value})
    with pytest.raises(ValueError, match=r"momentum=0.9 the direction of curvature -0.5 grows by .* Raise gamma"):
        simulate_quadratic(alternating, 0.1, 0.1, [1.0, -0.5], 1.0, momentum=0.9)
