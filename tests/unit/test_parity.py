"""All topologies, numbers of workers and optimizers follow Algorithm 1, with virtual workers in this process."""

import pytest

from tests.multiprocess.test_against_simulation import ALLOWED
from tests.multiprocess.test_virtual_workers import assert_follows, simulate, train

CASES = [
    (t, n, o, {})
    for t, counts in ALLOWED.items()
    for n in sorted({min(counts), max(counts), 8})
    for o in ("sgd", "adam")
]
CASES += [
    (topology, 5, optimizer, options)
    for topology in ("one_peer_ring", "complete", "ring")
    for optimizer, options in (
        ("sgd", {"order": "mix_first"}),
        ("adam", {"order": "mix_first"}),
        ("sgd", {"overlap": False}),
        ("adam", {"mix_every": 2}),
        ("sgd", {"log_every": 3}),
    )
]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.parametrize(("topology", "num_workers", "optimizer", "options"), CASES)
def test_virtual_workers_follow_algorithm_1(topology, num_workers, optimizer, options):
    simulated = simulate(num_workers, topology, optimizer, options)
    assert_follows(*simulated, [train(0, num_workers, topology, optimizer, options)])
