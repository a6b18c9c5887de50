"""Rows of the table of scenarios on CUDA: workers follow Algorithm 1 there, too."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.multiprocess.scenarios import Scenario, require_rows
from tests.multiprocess.test_scenarios import NAMES, PAIRED, ROWS, WORLDS

pytestmark = pytest.mark.multiprocess

REFUSED = {
    ("2x2", "added"): "the processes of a worker learn of it a step later there, and mix it from then on",
    ("fused", "tied"): "a fused kernel takes both parameters of the memory at once, so one update is lost",
}
"""Pairs of values that do not combine on CUDA."""


def chosen() -> list[tuple[str, ...]]:
    """Return few rows in which every value of the table occurs; all checks are late on CUDA."""
    possible = [row for row in ROWS if row[0] in PAIRED and not REFUSED.keys() & set(permutations(row, 2))]
    left = {value for row in possible for value in values(row)}
    assert left == {value for row in ROWS if row[0] in PAIRED for value in values(row)}
    rows = []
    while left:
        rows.append(max(possible, key=lambda row: len(left & values(row))))
        left -= values(rows[-1])
    return rows


def values(row: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(name, value) for name, value in zip(NAMES, row, strict=True) if name != "checks"}


CHOSEN = chosen()


@pytest.mark.parametrize("world", PAIRED)
def test_workers_on_cuda_follow_algorithm_1(world, sham):
    require_rows(sham.run, WORLDS[world], [Scenario(*row[1:]) for row in CHOSEN if row[0] == world])
