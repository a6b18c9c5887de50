"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the class: the precision of one test would be that of the next one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
