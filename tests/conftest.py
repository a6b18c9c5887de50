"""Every test starts from the same state of Accelerate and of the environment, and computes with one thread."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

# Before PyTorch is imported. The threads of several test processes on few cores spin while they wait for each other:
# with two threads in each of two processes, an example of docs/ took 10 s in place of 0.2 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("SLURM_STEP_NUM_TASKS", None)  # tests start their own workers, also inside a step of several tasks


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collections, and let later ones skip what the imports left: 0.3 s each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in classes and the environment: the precision of a test would be that of the next."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    state = sys.modules.get("accelerate.state")  # not imported here: pytest-xdist's controller would wait for it
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
