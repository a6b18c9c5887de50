"""The helpers that launch workers for other tests."""

import random

import pytest

from tests.launching import free_port
from tests.workers import run_workers


def seeded_port(rank):
    random.seed(42)  # as the Trainer does
    return free_port()


@pytest.mark.multiprocess
def test_processes_that_seed_alike_get_different_ports():
    first, second = run_workers(seeded_port, 2)
    assert first != second
