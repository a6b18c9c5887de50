"""The sham device for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sham_cuda.build import Unavailable
from tests.sham_cuda.launching import ShamCuda


@pytest.fixture(scope="session")
def sham() -> Iterator[ShamCuda]:
    """Workers with a sham device; skips where there is none, unless `REQUIRE_SHAM_CUDA` is set, as in CI."""
    try:
        launcher = ShamCuda()
    except Unavailable as error:
        if os.environ.get("REQUIRE_SHAM_CUDA"):
            raise
        pytest.skip(str(error))
    yield launcher
    launcher.close()
