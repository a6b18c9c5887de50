"""Topologies against the definitions in the paper: linear algebra on their matrices, for any name and worker count."""

import itertools
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsgdac_accel.topology import TOPOLOGIES, Topology, build_topology

NAMES = sorted(TOPOLOGIES)
ANY_COUNT = sorted(set(NAMES) - {"one_peer_exponential"})
HALVES = [[0.5, 0.5], [0.5, 0.5]]
no_deadline = settings(deadline=None)  # the first call of a linear algebra routine can be slow


@st.composite
def topologies(draw, max_workers=24):
    name = draw(st.sampled_from(NAMES))
    powers_of_two = st.sampled_from([1, 2, 4, 8, 16])
    num_workers = draw(powers_of_two if name == "one_peer_exponential" else st.integers(1, max_workers))
    return build_topology(name, num_workers)


def all_rounds(topology):
    return [topology.matrix(step) for step in range(topology.period)]


# Requirements of the paper on W, for every topology of the library


@no_deadline
@given(topologies())
def test_every_round_is_symmetric_doubly_stochastic_and_non_negative(topology):
    for mixing_NN in all_rounds(topology):
        ones = torch.ones(topology.num_workers, dtype=torch.float64)
        assert mixing_NN.dtype == torch.float64
        assert (mixing_NN >= 0).all()
        assert torch.equal(mixing_NN, mixing_NN.T)
        torch.testing.assert_close(mixing_NN @ ones, ones, rtol=0, atol=1e-12)


@no_deadline
@given(topologies(), st.integers(0, 2**32 - 1))
def test_mixing_keeps_the_mean_and_a_period_brings_the_workers_closer(topology, seed):
    x_ND = torch.randn(topology.num_workers, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mixed_ND = topology.period_matrix() @ x_ND
    step_by_step_ND = x_ND
    for mixing_NN in all_rounds(topology):
        step_by_step_ND = mixing_NN @ step_by_step_ND
    torch.testing.assert_close(mixed_ND, step_by_step_ND, rtol=0, atol=1e-12)
    torch.testing.assert_close(mixed_ND.mean(0), x_ND.mean(0), rtol=0, atol=1e-12)
    gap = topology.spectral_gap()
    assert 0 < gap <= 1
    before, after = (x_ND - x_ND.mean(0)).norm(), (mixed_ND - mixed_ND.mean(0)).norm()
    assert after <= (1 - gap) * before + 1e-12


@no_deadline
@given(topologies())
def test_the_rounds_together_connect_all_workers(topology):
    union = sum(all_rounds(topology))
    paths = torch.linalg.matrix_power(union / topology.period, topology.num_workers)
    assert (paths > 0).all()


@no_deadline
@given(topologies(), st.integers(0, 1000))
def test_neighbors_and_recipients_are_rows_and_columns_of_the_matrix(topology, step):
    mixing_NN = topology.matrix(step)
    rebuilt_NN = torch.diag(torch.diag(mixing_NN))
    for worker in range(topology.num_workers):
        peers = topology.neighbors(step, worker)
        assert list(peers) == sorted(peers)
        assert worker not in peers
        for peer, weight in peers.items():
            rebuilt_NN[worker, peer] = weight
            assert topology.neighbors(step, peer)[worker] == weight  # rounds of the library are symmetric
            assert worker in topology.recipients(step, peer)
        assert set(topology.recipients(step, worker)) == set(peers)
    assert torch.equal(rebuilt_NN, mixing_NN)


@no_deadline
@given(topologies(), st.integers(0, 1000))
def test_steps_repeat_with_the_period(topology, step):
    assert torch.equal(topology.matrix(step), topology.matrix(step % topology.period))


@no_deadline
@given(topologies())
def test_averaging_groups_rebuild_the_round_or_are_none(topology):
    for step, mixing_NN in enumerate(all_rounds(topology)):
        groups = topology.averaging_groups(step)
        uniform_NN = torch.eye(topology.num_workers, dtype=torch.float64)
        for group in groups or ():
            assert len(group) >= 2
            uniform_NN[np.ix_(group, group)] = 1 / len(group)
        assert torch.allclose(uniform_NN, mixing_NN, rtol=0, atol=1e-12) == (groups is not None)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_worker_has_the_trivial_topology(name):
    topology = build_topology(name, 1)
    assert topology.period == 1
    assert topology.matrix(5).tolist() == [[1.0]]
    assert topology.neighbors(5, 0) == {}
    assert topology.recipients(5, 0) == ()
    assert topology.averaging_groups(5) == ()
    assert topology.spectral_gap() == 1.0


# Exact averaging in one period


def assert_averages_exactly(topology):
    average_NN = torch.full((topology.num_workers,) * 2, 1 / topology.num_workers, dtype=torch.float64)
    torch.testing.assert_close(topology.period_matrix(), average_NN, rtol=0, atol=1e-12)
    assert topology.spectral_gap() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16, 32, 64])
def test_one_peer_exponential_averages_exactly_in_log2_rounds(num_workers):
    topology = build_topology("one_peer_exponential", num_workers)
    assert 2**topology.period == num_workers
    assert_averages_exactly(topology)


@pytest.mark.parametrize("num_workers", [*range(1, 41), 63, 64, 65, 96, 127, 128, 129, 130])
def test_base_graph_averages_exactly_with_one_peer_per_round(num_workers):
    topology = build_topology("base_graph", num_workers)
    assert_averages_exactly(topology)
    assert topology.period <= 2 * np.log2(num_workers) + 1  # Theorem 1 of Takezawa et al. (2023), k = 1
    degrees = [(mixing_NN > 0).sum(1) - 1 for mixing_NN in all_rounds(topology)]
    assert max(int(degree.max()) for degree in degrees) <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_complete_averages_exactly_in_one_round(num_workers):
    topology = build_topology("complete", num_workers)
    assert topology.period == 1
    assert_averages_exactly(topology)


# The one-peer ring


def test_one_peer_ring_of_four_alternates_partners_by_step():
    topology = build_topology("one_peer_ring", 4)
    for step in range(6):
        for worker in range(4):
            away = 1 if (worker + step) % 2 == 0 else -1
            assert topology.neighbors(step, worker) == {(worker + away) % 4: 0.5}


def test_one_peer_ring_of_two_is_one_round():
    topology = build_topology("one_peer_ring", 2)
    assert topology.period == 1
    assert topology.matrix(0).tolist() == HALVES


@pytest.mark.parametrize("num_workers", [3, 5, 7, 9, 15])
def test_odd_one_peer_ring_rotates_the_rest_and_alternates_partners(num_workers):
    topology = build_topology("one_peer_ring", num_workers)
    steps = range(2 * topology.period)
    resting, edges = [], set()
    for step in range(topology.period):
        idle = [worker for worker in range(num_workers) if not topology.neighbors(step, worker)]
        assert len(idle) == 1
        assert topology.matrix(step)[idle[0], idle[0]] == 1
        resting += idle
        edges |= {frozenset(group) for group in topology.averaging_groups(step)}
    assert sorted(resting) == list(range(num_workers))
    assert edges == {frozenset({i, (i + 1) % num_workers}) for i in range(num_workers)}
    for worker in range(num_workers):
        partners = [peer for step in steps for peer in topology.neighbors(step, worker)]
        assert all(a != b for a, b in itertools.pairwise(partners))


# Static graphs against values from the literature and a second derivation


@pytest.mark.parametrize("num_workers", [3, 4, 5, 8, 9])
def test_ring_has_the_eigenvalues_of_a_circulant(num_workers):
    angles = 2 * torch.pi * torch.arange(num_workers, dtype=torch.float64) / num_workers
    expected = (1 / 3 + 2 / 3 * angles.cos()).sort().values
    ring = build_topology("ring", num_workers)
    torch.testing.assert_close(torch.linalg.eigvalsh(ring.matrix(0)), expected, rtol=0, atol=1e-12)
    assert ring.spectral_gap() == pytest.approx(1 - expected[:-1].abs().max().item(), abs=1e-12)


def test_small_static_graphs_are_complete():
    for name, num_workers in [("ring", 2), ("ring", 3), ("exponential", 2), ("exponential", 3), ("exponential", 4)]:
        assert build_topology(name, num_workers) == build_topology("complete", num_workers)


def test_exponential_links_powers_of_two_on_both_sides():
    assert build_topology("exponential", 16).neighbors(0, 1) == {
        peer: pytest.approx(1 / 8) for peer in sorted({2, 3, 5, 9, 0, 15, 13})
    }


def test_grid_of_six_has_metropolis_weights_of_a_2_by_3_grid():
    # 0 1 2
    # 3 4 5   Corners have degree 2, workers 1 and 4 degree 3.
    grid = build_topology("grid", 6)
    assert grid.neighbors(0, 0) == {1: 1 / 4, 3: 1 / 3}
    assert grid.neighbors(0, 1) == {0: 1 / 4, 2: 1 / 4, 4: 1 / 4}
    assert grid.matrix(0)[0, 0] == pytest.approx(5 / 12)


def test_grid_of_a_prime_is_a_path():
    assert [list(build_topology("grid", 5).neighbors(0, worker)) for worker in range(5)] == [
        [1],
        [0, 2],
        [1, 3],
        [2, 4],
        [3],
    ]


# Refusals


@no_deadline
@given(st.sampled_from(NAMES), st.integers(-2, 70))
def test_every_name_and_number_of_workers_is_built_or_refused(name, num_workers):
    if num_workers < 1:
        with pytest.raises(ValueError, match="num_workers must be an integer >= 1"):
            build_topology(name, num_workers)
    elif name == "one_peer_exponential" and num_workers.bit_count() > 1:
        with pytest.raises(ValueError, match=rf"power of two.*{num_workers}.*base_graph"):
            build_topology(name, num_workers)
    else:
        assert build_topology(name, num_workers).num_workers == num_workers


def test_an_unknown_name_lists_the_names_and_suggests_the_closest():
    with pytest.raises(ValueError, match="Did you mean 'one_peer_ring'") as caught:
        build_topology("onepeer_ring", 4)
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(ValueError, match="must be one of"):
        build_topology(None, 4)


@pytest.mark.parametrize("num_workers", [0, -1, 2.0, True, "4", None])
def test_the_number_of_workers_is_an_integer_from_one(num_workers):
    with pytest.raises(ValueError, match=re.escape(f"num_workers must be an integer >= 1; got {num_workers!r}")):
        build_topology("complete", num_workers)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([], "at least one round"),
        ([[[0.5, 0.5]]], r"square.*\(1, 2\)"),
        ([[0.5, 0.5], [0.5, 0.5]], r"square.*\(2,\).*\[W\]"),
        ([torch.ones(0, 0)], "square"),
        ([[[1.0], [0.5, 0.5]]], "matrix of real numbers"),
        ([[["a", "b"], ["c", "d"]]], "matrix of real numbers"),
        ([torch.tensor(HALVES, dtype=torch.complex64)], "matrix of real numbers"),
        ([HALVES, [[1.0]]], "same number of workers"),
        ([[[float("nan"), 0.5], [0.5, 0.5]]], r"finite.*W\[0, 0\] = nan"),
        ([[[0.5, float("inf")], [0.5, 0.5]]], r"finite.*W\[0, 1\] = inf"),
        ([HALVES, [[1.5, -0.5], [-0.5, 1.5]]], r">= 0.*round 1 has W\[0, 1\] = -0.5"),
        ([[[0.6, 0.5], [0.4, 0.5]]], r"doubly stochastic.*row 0 of round 0 sums to 1.1"),
        ([[[0.6, 0.4], [0.5, 0.5]]], r"doubly stochastic.*column 0 of round 0 sums to 1.1"),
        ([torch.full((3, 3), 1 / 3)], "doubly stochastic.*float64"),
        ([torch.eye(2)], "connect all workers.*worker 1"),
        ([torch.block_diag(torch.tensor(HALVES), torch.tensor(HALVES))] * 2, "connect all workers.*worker 2"),
    ],
)
def test_from_matrices_refuses_invalid_rounds(matrices, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_matrices(matrices)


def test_the_constructor_refuses_as_well():
    with pytest.raises(ValueError, match="doubly stochastic"):
        Topology("broken", ([[0.9]],))


def test_negative_steps_and_unknown_workers_are_refused():
    topology = build_topology("ring", 4)
    with pytest.raises(ValueError, match="step counts from 0; got -1"):
        topology.matrix(-1)
    for worker in (-1, 4):
        with pytest.raises(ValueError, match=f"from 0 to 3; got {worker}"):
            topology.neighbors(0, worker)


# Custom topologies


def test_a_directed_round_has_different_neighbors_and_recipients():
    # Each worker receives from the worker on its right.
    cycle = 0.75 * np.eye(3) + 0.25 * np.roll(np.eye(3), 1, axis=1)
    topology = Topology.from_matrices([cycle])
    assert topology.neighbors(0, 0) == {1: 0.25}
    assert topology.recipients(0, 0) == (2,)
    assert topology.averaging_groups(0) is None
    # The circulant's eigenvalues are .75 + .25 exp(2 pi i k / 3); it is normal, so they give its singular values.
    assert topology.spectral_gap() == pytest.approx(1 - abs(0.75 + 0.25 * np.exp(2j * np.pi / 3)))


def test_a_permutation_keeps_all_disagreement():
    assert Topology.from_matrices([[[0.0, 1.0], [1.0, 0.0]]]).spectral_gap() == 0
    assert Topology.from_matrices([[[0.0, 1.0], [1.0, 0.0]]]).averaging_groups(0) is None


def test_rounds_that_connect_only_together_are_accepted():
    pair, idle = torch.tensor(HALVES), torch.eye(1)
    topology = Topology.from_matrices([torch.block_diag(pair, idle), torch.block_diag(idle, pair)])
    assert topology.averaging_groups(0) == ((0, 1),)
    assert topology.averaging_groups(1) == ((1, 2),)


def test_rounding_residues_of_zero_become_zero():
    pair, idle = np.array(HALVES), np.eye(1)
    clean = [np.block([[pair, np.zeros((2, 1))], [np.zeros((1, 2)), idle]]), np.roll(np.eye(3), 1, axis=0)]
    for residue in (-1e-17, -0.0):
        rounded = Topology.from_matrices([np.where(matrix == 0, residue, matrix) for matrix in clean])
        assert rounded == Topology.from_matrices(clean)
        assert rounded.neighbors(0, 0) == {1: 0.5}
        assert (rounded.matrix(0) >= 0).all()


def test_lists_arrays_and_tensors_of_any_dtype_give_the_same_topology():
    kinds = [HALVES, np.array(HALVES), np.float32(HALVES), torch.tensor(HALVES, requires_grad=True)]
    built = [Topology.from_matrices([matrix]) for matrix in kinds]
    built.append(Topology.from_matrices(torch.tensor([HALVES])))
    assert len(set(built)) == 1
    assert built[0].matrix(0).requires_grad is False


# Identity


def test_equality_and_fingerprint_depend_on_the_rounds_alone():
    ring = build_topology("one_peer_ring", 6)
    renamed = Topology.from_matrices(all_rounds(ring), name="mine")
    assert renamed == ring
    assert hash(renamed) == hash(ring)
    assert renamed.fingerprint == ring.fingerprint
    assert re.fullmatch("[0-9a-f]{64}", ring.fingerprint)
    others = [build_topology(name, 6) for name in ANY_COUNT if name != "one_peer_ring"]
    shifted = Topology.from_matrices(all_rounds(ring)[::-1])
    assert len({ring, shifted, build_topology("one_peer_ring", 8), *others}) == 3 + len(others)
    assert ring != "one_peer_ring"


def test_a_topology_is_immutable():
    source = np.array(HALVES)
    topology = Topology.from_matrices([source])
    source[0, 0] = 7
    topology.matrix(0)[0, 0] = 7
    topology.period_matrix()[0, 0] = 7
    assert topology.matrix(0).tolist() == HALVES
    with pytest.raises(ValueError, match="read-only"):
        topology.rounds[0][0, 0] = 7
    with pytest.raises(AttributeError):
        topology.name = "other"


def test_a_topology_survives_pickling_and_prints_itself():
    topology = build_topology("base_graph", 5)
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert repr(topology) == "Topology('base_graph', num_workers=5, period=5)"
