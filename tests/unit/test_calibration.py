"""The deployed model in one process: which statistics are measured or pooled, and what is restored."""

import math

import pytest
import torch
from torch import nn

from dsgdac_accel import WorkerGroup
from dsgdac_accel.calibration import (
    StatisticsCache,
    calibrate_batch_norm,
    frozen_layers,
    pooled_batch_norm,
    run_model,
)
from dsgdac_accel.deployed_model import deployed_model
from dsgdac_accel.distributed.model_state import cloned

BATCHES = [torch.randn(8, 3, generator=torch.Generator().manual_seed(number)) for number in range(3)]


@pytest.fixture
def group():
    return WorkerGroup(torch.device("cpu"))


def layers_with(*variances):
    layers = []
    for variance in variances:
        layers.append(nn.BatchNorm1d(2))
        layers[-1].running_var.fill_(variance)
    return layers


def pool(layers, group):
    for buffer, value in pooled_batch_norm([[layer] for layer in layers], group):
        buffer.copy_(value)


def test_statistics_of_diverged_workers_are_left_out_unless_all_have_diverged(group):
    for variances, expected in (((2.0, 4.0), 3.0), ((2.0, math.nan), 2.0), ((math.inf, 4.0), 4.0)):
        layers = layers_with(*variances)
        pool(layers, group)
        assert layers[0].running_var.tolist() == [expected] * 2
    layers = layers_with(math.nan, math.nan)
    pool(layers, group)
    assert layers[0].running_var.isnan().all()


def test_no_layer_counts_as_frozen_in_a_model_in_eval_mode(group):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[0].eval()
    assert frozen_layers(model) == [model[0]]
    assert frozen_layers(model.eval()) == []
    calibrate_batch_norm(model, BATCHES, group)
    torch.testing.assert_close(model[0].running_mean, torch.cat(BATCHES).mean(0))


@pytest.mark.parametrize("calibrate", [None, BATCHES])
def test_the_deployed_model_is_in_eval_mode_and_gets_its_own_modes_back(group, calibrate):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))
    model[1].eval()
    with deployed_model(model, [], group, calibrate=calibrate) as deployed:
        assert not any(module.training for module in deployed.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_statistics_are_reused_at_the_same_step_only():
    cache, model = StatisticsCache(), nn.Sequential(nn.BatchNorm1d(2))

    def applied(mean, step):
        model[0].running_mean.fill_(mean)
        cache.apply(model, step)
        return model[0].running_mean.tolist()

    assert not cache.has(4)
    assert applied(1.0, step=4) == [1.0, 1.0]
    assert cache.has(4)
    assert applied(2.0, step=4) == [1.0, 1.0], "those kept for this step"
    assert not cache.has(5)
    assert applied(3.0, step=5) == [3.0, 3.0]
    assert not cache.has(4)


def test_a_forward_with_keyword_arguments_gets_the_whole_batch():
    class Model(nn.Module):
        def forward(self, x, **others):
            return sorted(others)

    assert run_model(Model(), {"x": 1, "mask": 2, "labels": 3}) == ["labels", "mask"]


def test_cloned_keeps_whole_shared_tensors_shared_and_separates_views():
    whole = torch.arange(6.0)
    state = {"a": whole, "b": whole, "begin": whole[:2], "square": whole.view(2, 3), "empty": torch.empty(0), "n": 3}
    copies = cloned(state)
    assert copies["a"] is copies["b"]
    assert len({id(value) for value in copies.values()}) == len(state) - 1
    whole.zero_()
    assert copies["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [copies[name].shape for name in state if name != "n"] == [state[name].shape for name in state if name != "n"]
