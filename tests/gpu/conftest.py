"""Tests of this folder skip where the machine has fewer GPUs than they need."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu(N)` on a machine with fewer than N GPUs."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    (needed,) = marker.args
    found = torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, found {found}")
