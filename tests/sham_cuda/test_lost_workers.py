"""A worker that is lost on CUDA, by the fake of NCCL: all others end in time and name it."""

import pytest

from tests.multiprocess.test_nccl_form import (
    lose,
    require_end_that_names_the_lost_worker,
    require_error_that_names_the_lost_worker,
)


@pytest.mark.parametrize("where", ["reading", pytest.param("connecting", marks=pytest.mark.slow)])
def test_the_step_names_it(where, sham, tmp_path):
    require_error_that_names_the_lost_worker(sham.attempt(lose, 4, where, str(tmp_path), {}), where)


@pytest.mark.parametrize("where", ["elsewhere", pytest.param("in a reduction", marks=pytest.mark.slow)])
def test_a_host_that_hangs_in_item_is_ended(where, sham, tmp_path):
    outcomes = sham.attempt(lose, 4, where, str(tmp_path), {})
    require_end_that_names_the_lost_worker(outcomes, where, tmp_path)
