"""All topologies, numbers of workers and optimizers follow Algorithm 1, with virtual workers in this process."""

import pytest

from dsgdac_accel.topology import TOPOLOGIES
from tests.multiprocess.scenarios import Scenario, World, require_equal, topology_of, train


def exists(topology, workers):
    try:
        return topology_of(topology, workers)
    except ValueError:
        return None


CASES = [(n, Scenario(t, o)) for t in TOPOLOGIES for n in (2, 3, 4, 5, 8) for o in ("sgd", "adamw") if exists(t, n)]
CASES += [
    (5, Scenario(topology, optimizer, **options))
    for topology in ("one_peer_ring", "complete", "ring")
    for optimizer, options in (
        ("sgd", {"order": "mix_first"}),
        ("adamw", {"order": "mix_first"}),
        ("sgd", {"overlap": "no"}),
        ("adamw", {"mix_every": "2"}),
    )
]


@pytest.mark.parametrize(("workers", "scenario"), CASES)
def test_virtual_workers_follow_algorithm_1(workers, scenario):
    world = World(1, local_workers=workers)
    require_equal(world, scenario, [train(0, world, scenario)])
