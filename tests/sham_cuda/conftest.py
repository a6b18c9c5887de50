"""The sham device for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sham_cuda.launching import ShamCuda


@pytest.fixture(scope="session")
def sham() -> Iterator[ShamCuda]:
    """Workers with a sham device; skips without a compiler."""
    try:
        launcher = ShamCuda()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    yield launcher
    launcher.close()
