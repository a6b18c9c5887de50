"""Choose which cases of a parametrized test run by default, and skip tests whose data are not there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest


def slow_except(fast: Collection[tuple[Any, ...]], cases: Collection[tuple[Any, ...]]) -> list[Any]:
    """Mark all `cases` as slow except those in `fast`, in the same order. Each case holds all arguments of a test."""
    missing = [case for case in fast if case not in cases]
    if missing:
        raise ValueError(f"fast cases must be among all cases; {missing} are not.")
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def real_data(name: str) -> Path:
    """Return the folder of a development data set beside the repository, or skip the test if it is not there."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"development data set '{name}' is not beside the repository")
    return folder
