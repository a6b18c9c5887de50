"""Every test starts from the same state of Accelerate and of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in classes and the environment: the precision of a test would be that of the next."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
