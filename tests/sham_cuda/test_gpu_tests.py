"""Tests of `tests/gpu` on the sham device, so that what they do on CUDA has run before a GPU is there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import test_one_process as one
from tests.gpu import test_processes as several
from tests.gpu.machine import call
from tests.multiprocess.scenarios import Scenario

FAST: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (several.test_processes_follow_algorithm_1, {"scenario": Scenario("ring", "fused")}),
    (one.test_virtual_workers_follow_algorithm_1, {"scenario": Scenario("ring", "fused_sgd", nonfinite="yes")}),
    (one.test_nan_gradients_change_neither_parameters_nor_moments_nor_the_count_of_steps, {"optimizer": "sgd"}),
]
SLOW: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (several.test_processes_follow_algorithm_1, {"scenario": Scenario("complete")}),
    (several.test_sharded_workers_follow_algorithm_1, {"optimizer": "sgd", "shards": 1}),
    (several.test_a_buffer_on_the_cpu_does_not_reach_nccl, {}),
    (several.test_optimizers_in_another_order_are_refused_or_mixed_right, {}),
    (one.test_a_sharded_worker_trains_like_a_whole_one, {"scenario": Scenario(optimizer="fused")}),
    (one.test_nan_parameters_stop_the_run_before_they_reach_another_worker, {}),
    (one.test_deployed_model_and_checkpoint_are_exact, {}),
    (one.test_late_copies_follow_side_streams, {}),
    (one.test_the_default_device_may_be_the_gpu, {}),
]


@pytest.mark.parametrize(
    ("test", "arguments"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_it_passes(test, arguments, sham, tmp_path, monkeypatch):
    def started(start: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda body, device, *args, workers=1: start(call, workers, body, device, args)

    for module in (one, several):
        monkeypatch.setattr(module, "launch", started(sham.run))
    monkeypatch.setattr(several, "try_launch", started(sham.attempt))
    monkeypatch.setattr(several, "workers_on", lambda device: 4)
    if "tmp_path" in inspect.signature(test).parameters:
        arguments = arguments | {"tmp_path": tmp_path}
    test("cuda", **arguments)
