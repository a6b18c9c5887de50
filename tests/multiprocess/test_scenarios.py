"""Real workers follow Algorithm 1, parameter by parameter after each step, in every mode and every pair of modes."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.multiprocess.scenarios import Scenario, World, require_rows, topology_of
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

WORLDS = {
    "2": World(2),
    "4": World(4),
    "5": World(5),
    "2*3": World(2, local_workers=3),
    "3*2": World(3, local_workers=2),
    "2x2": World(4, shards=2),
    "2|2": World(4, shards=2, spread=True),
    "3x2": World(6, shards=2),
    "2x3": World(6, shards=3),
    "1x2": World(2, shards=2),
    "2x1": World(2, shards=1),
}
"""Processes; processes * workers of each; workers x shards."""
PAIRED = ("2", "4", "2*3", "2x2")
"""Worlds in which every pair of modes occurs. The others add numbers of workers and shards."""

TABLE = """
world topology             optimizer dtype   comm_dtype order       overlap mix_every checks edit      nonfinite
2     ring                 sgd       float64 int4       local_first yes     2         now    none      yes
2     complete             sgd       float32 bf16       mix_first   no      2         now    evaluated yes
2     base_graph           adamw     float32 int8       mix_first   no      1         now    shared    yes
2     alone                adamw     float32 int8       local_first yes     1         late   undone    yes
2     complete             fused     mixed   int2       local_first yes     2         late   repointed yes
2     base_graph           sgd       float64 bf16       local_first no      2         late   repointed no
2     exponential          fused     float64 int8       mix_first   yes     2         late   lasting   yes
2     one_peer_ring        adamw     bf16    int2       mix_first   no      1         now    restarted no
2     complete             sgd       bf16    int8       mix_first   yes     2         late   restarted no
2     grid                 sgd       mixed   full       mix_first   no      1         now    frozen    yes
2     alone                sgd       bf16    full       local_first yes     1         late   added     yes
2     complete             sgd       float64 full       local_first yes     1         late   removed   yes
2     one_peer_exponential sgd       mixed   full       local_first yes     1         late   tied      yes
2     one_peer_ring        sgd       float64 full       local_first yes     1         now    none      no
4     complete             adamw     bf16    int8       mix_first   no      2         now    none      yes
4     exponential          fused     float64 int4       mix_first   yes     1         late   evaluated yes
4     alone                sgd       bf16    bf16       local_first yes     1         late   shared    yes
4     exponential          adamw     float64 int4       mix_first   no      2         late   shared    no
4     ring                 fused     float32 int2       mix_first   no      2         now    undone    no
4     one_peer_ring        sgd       bf16    bf16       mix_first   yes     2         late   undone    yes
4     grid                 sgd       mixed   int8       mix_first   no      2         now    repointed no
4     complete             adamw     mixed   int4       mix_first   no      1         late   lasting   no
4     alone                fused     mixed   full       mix_first   no      2         now    lasting   no
4     base_graph           fused     mixed   full       local_first no      2         late   restarted yes
4     one_peer_exponential sgd       float32 int4       mix_first   yes     2         late   frozen    yes
4     one_peer_ring        fused     mixed   full       mix_first   yes     1         now    added     no
4     ring                 fused     bf16    full       local_first yes     1         late   removed   yes
4     alone                adamw     float32 full       local_first no      1         now    tied      yes
4     one_peer_ring        adamw     float64 full       local_first yes     1         now    none      no
5     one_peer_ring        sgd       float64 full       local_first yes     1         now    none      yes
5     one_peer_ring        adamw     float64 full       local_first no      2         now    none      no
5     base_graph           fused     float32 full       local_first yes     1         late   none      no
5     exponential          adamw     float64 full       local_first yes     1         now    none      no
5     complete             sgd       float64 full       mix_first   yes     1         now    none      no
5     ring                 sgd       float64 int8       local_first yes     1         now    none      no
5     grid                 adamw     float64 bf16       local_first yes     1         now    none      no
2*3   base_graph           fused     float32 bf16       mix_first   no      1         late   none      no
2*3   exponential          sgd       bf16    int2       local_first no      2         now    none      no
2*3   alone                adamw     bf16    int2       mix_first   no      2         now    evaluated no
2*3   grid                 fused     mixed   int2       local_first no      1         late   shared    yes
2*3   complete             sgd       float64 int4       mix_first   no      2         now    undone    yes
2*3   alone                adamw     float32 int4       mix_first   no      1         late   repointed no
2*3   exponential          adamw     bf16    full       mix_first   yes     2         now    repointed no
2*3   one_peer_ring        sgd       bf16    int4       local_first yes     2         now    lasting   yes
2*3   ring                 adamw     float64 bf16       local_first yes     2         late   restarted yes
2*3   complete             adamw     bf16    int8       mix_first   yes     1         now    frozen    yes
2*3   complete             sgd       float32 full       local_first no      2         late   added     yes
2*3   alone                adamw     mixed   full       mix_first   no      2         now    removed   no
2*3   exponential          fused     float64 full       mix_first   no      2         now    tied      no
2*3   complete             sgd       mixed   full       local_first yes     1         now    tied      no
2*3   one_peer_ring        adamw     float64 full       local_first yes     1         now    none      no
3*2   base_graph           adamw     float64 full       local_first yes     1         now    none      yes
3*2   one_peer_ring        sgd       float64 int2       local_first yes     1         now    none      no
2x2   alone                adamw     mixed   full       mix_first   no      1         now    none      no
2x2   one_peer_ring        adamw     float64 int8       local_first no      2         now    evaluated no
2x2   exponential          sgd       mixed   full       local_first no      1         now    evaluated no
2x2   complete             adamw     float64 full       mix_first   no      2         now    shared    no
2x2   one_peer_exponential sgd       mixed   full       mix_first   no      1         now    undone    yes
2x2   grid                 fused     float32 bf16       local_first no      2         late   lasting   no
2x2   alone                fused     float64 int2       local_first no      1         now    lasting   yes
2x2   alone                sgd       float32 int4       local_first no      2         now    restarted yes
2x2   alone                fused     mixed   bf16       local_first yes     2         now    frozen    no
2x2   alone                sgd       float64 int2       mix_first   no      1         late   frozen    yes
2x2   ring                 adamw     float64 full       mix_first   no      2         now    added     yes
2x2   base_graph           sgd       float32 full       mix_first   yes     2         now    removed   yes
2x2   one_peer_ring        fused     float64 full       local_first yes     1         late   none      yes
2|2   one_peer_ring        sgd       float64 full       local_first yes     1         late   none      yes
2|2   complete             sgd       float64 full       local_first yes     1         now    evaluated no
3x2   ring                 sgd       float64 full       local_first yes     1         now    none      yes
3x2   one_peer_ring        sgd       float64 full       local_first yes     1         now    shared    no
2x3   one_peer_ring        sgd       float64 full       local_first no      1         now    none      yes
2x3   one_peer_ring        adamw     float64 full       local_first yes     1         now    shared    no
2x3   one_peer_ring        sgd       float64 full       local_first yes     2         now    evaluated no
1x2   one_peer_ring        adamw     float64 full       local_first yes     1         now    none      no
2x1   one_peer_ring        sgd       float64 full       local_first yes     1         now    shared    no
"""
NAMES, *ROWS = (tuple(line.split()) for line in TABLE.strip().splitlines())

REFUSED = {
    ("2x2", "bf16"): "a shard has no master",
    ("2x2", "repointed"): "FSDP2 gathers from memory of its own",
    ("2x2", "tied"): "FSDP2 gathers from memory of its own",
    ("bf16", "tied"): "each parameter has a master of its own",
    **{
        (comm_dtype, change): "references of a new layout: see test_changing_parameters"
        for comm_dtype in ("bf16", "int8", "int4", "int2")
        for change in ("added", "removed", "tied")
    },
}
"""Pairs of values that do not combine, whatever the others are."""

KINDS = {"one_peer_ring": "pairs", "one_peer_exponential": "pairs", "base_graph": "pairs", "complete": "all"}
KINDS |= dict.fromkeys(("ring", "exponential", "grid"), "several")
"""Topologies that are alike for all but the world."""


@pytest.mark.parametrize(
    "world", [w if w in (*PAIRED, "5") else pytest.param(w, marks=pytest.mark.slow) for w in WORLDS]
)
def test_workers_follow_algorithm_1(world):
    require_rows(run_workers, WORLDS[world], [Scenario(*row[1:]) for row in ROWS if row[0] == world])


def test_every_pair_of_modes_is_in_the_table():
    rows = [row for row in ROWS if row[0] in PAIRED]
    columns = dict(zip(NAMES, zip(*rows, strict=True), strict=True))
    columns["kind"] = tuple(KINDS.get(topology, topology) for topology in columns["topology"])
    missing = []
    for one, other in combinations(columns, 2):
        by_world = {one, other} == {"world", "topology"}
        if by_world or "topology" not in (one, other):
            found = {*zip(columns[one], columns[other], strict=True)}
            pairs = product(set(columns[one]), set(columns[other]))
            missing += [
                pair for pair in pairs if pair not in found | REFUSED.keys() and (not by_world or exists(*pair))
            ]
    assert not missing


def exists(world: str, topology: str) -> bool:
    try:
        return bool(topology_of(topology, WORLDS[world].workers))
    except ValueError:
        return False
