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
from dsgdac_accel.theory import (
    gaussian_norm,
    modal_variance,
    predicted_radius,
    radius_along,
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


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.75])
def test_the_edges_of_the_stability_region_are_outside_it(momentum):
    # Powers of two, so that nothing rounds; the edges are an eigenvalue of 1 and one of -1.
    alpha, gamma, mu = 0.25, 0.5, 0.5
    for edge, eigenvalue in ((-(1 - momentum) * 0.25, 1.0), ((1 + momentum) * (2 - 0.25), -1.0)):
        step, _ = of_one_mode(alpha, gamma, mu, edge / alpha, momentum)
        assert np.linalg.det(step - eigenvalue * np.eye(2)) == pytest.approx(0.0, abs=1e-15)
        inward = eigenvalue * 1e-9
        lam = torch.tensor([edge + inward, edge, edge - inward], dtype=torch.float64) / alpha
        for sigma2 in (1.0, 0.0):
            stable = modal_variance(alpha, gamma, mu, lam, sigma2, momentum).isfinite()
            assert stable.tolist() == [True, False, False]


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
def test_without_momentum_the_variance_is_theorem_1(alpha, gamma, mu, lam):
    d = gamma * mu + alpha * lam
    assume(1e-6 < d < 2 - 1e-6)
    variance = modal_variance(alpha, gamma, mu, lam, 3.0)
    assert variance.item() == pytest.approx(3 * alpha**2 / (1 - (1 - d) ** 2), rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_where_mixing_is_weak_the_variance_tends_to_that_of_lr_over_one_minus_momentum(momentum):
    errors = []
    for gamma in (1e-3, 1e-4, 1e-5):
        limit = (0.1 / (1 - momentum)) ** 2 * 2.0 / (2 * gamma * 0.5)  # Remark 1
        errors.append(abs(modal_variance(0.1, gamma, 0.5, 0.0, 2.0, momentum) / limit - 1).item())
    assert errors[0] < 0.01
    assert errors[2] < 0.2 * errors[1] < 0.2**2 * errors[0]


def test_momentum_lets_a_tenth_of_the_negative_curvature_destabilize():
    lam = torch.linspace(-1, 0, 1001, dtype=torch.float64)
    threshold = {b: lam[modal_variance(0.1, 0.1, 0.5, lam, 1.0, b).isfinite()].min().item() for b in (0.0, 0.9)}
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


def graph_modes(topology):
    """Eigenvalues and eigenvectors of I - W without the consensus mode mu = 0."""
    mu_N, vectors_NN = torch.linalg.eigh(torch.eye(topology.num_workers).double() - topology.matrix(0))
    return mu_N[1:], vectors_NN[:, 1:]


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


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", STATIC)
def test_a_static_round_has_the_closed_form_of_every_mode_and_so_has_the_same_round_twice(name, momentum):
    once = build_topology(name, 6)
    twice = Topology.from_matrices([once.matrix(0)] * 2)
    mu_J, vectors_NJ = graph_modes(once)
    lam, sigma2 = [3.0, 0.0, -0.02, -9.0], [1.0, 3.0, 2.0, 1.0]
    modes_JK = modal_variance(0.05, 0.3, mu_J[:, None], lam, sigma2, momentum)
    assert modes_JK[..., 3].isinf().all()
    for topology in (once, twice):
        predicted = predicted_radius(topology, 0.3, 0.05, lam, sigma2, momentum)
        exact(predicted.variance_TNK[..., :3], (vectors_NJ**2 @ modes_JK)[..., :3].expand(topology.period, -1, -1))
        assert predicted.variance_TNK[..., 3].isinf().all()


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
    # At p = 2, alpha^2 / gamma = max_lr^2 for any alpha, so the limit of Remark 1 is known in advance.
    topology = build_topology("ring", 6)
    mu_J, _ = graph_modes(topology)
    planned = [0.2 * x for x in cosine(1000)]
    final = radius_along(topology, AdaptiveConsensus(power=2), planned, 0.0, 3.0, momentum=0.5)[-1]
    limit = ((0.2 / (1 - 0.5)) ** 2 * 3.0 / (2 * mu_J)).sum().sqrt().item()
    assert final.frobenius == pytest.approx(limit, rel=0.03)


def test_divergence_beyond_the_largest_float_is_infinite():
    final = radius_along(build_topology("one_peer_ring", 4), [0.0] * 600, [1.0] * 600, -1.0, 1.0)[-1]
    assert final.radius == final.frobenius == math.inf


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
        with pytest.raises(ValueError, match=message):
            predicted_radius(build_topology("ring", 4), **settings_)


def test_rounding_of_an_eigenvalue_is_accepted():
    assert modal_variance(**{**GOOD, "mu": -1e-16}) == modal_variance(**{**GOOD, "mu": 0.0})
    assert modal_variance(**{**GOOD, "mu": 2 + 1e-15}) == modal_variance(**{**GOOD, "mu": 2.0})


def test_refusals_say_what_to_do():
    ring = build_topology("ring", 4)
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
