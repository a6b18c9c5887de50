"""How the cost of mixing grows, and what it must cost."""

import json

import pytest
import torch

from dsgdac_accel import WorkerGroup
from tasks.benchmarks import growth
from tasks.benchmarks.growth import Case, GrowthBenchmarkConfig, Machine, build
from tasks.benchmarks.mixing import bytes_of_a_mix


def test_a_steps_bytes_are_those_of_a_mix_and_of_its_gradients():
    case = Case(parameters=3200, tensors=4, workers=6)
    mixer = build(case, WorkerGroup(torch.device("cpu"), 10)).mixer
    gradients = sum(parameter.grad.nbytes for parameter in mixer.parameters.find())
    assert case.workers * case.bytes_moved() == bytes_of_a_mix(mixer) + gradients


def test_the_formula_adds_a_call_for_each_tensor_to_the_bytes():
    machine = Machine(bytes_per_second=40e9, call_seconds=1e-6)
    case = Case(parameters=10**6, tensors=100)
    assert machine.seconds(case) == pytest.approx(5.5 * 4e6 / 40e9 + 100e-6)
    assert machine.seconds(case.but(workers=64)) == machine.seconds(case)  # no worker costs another one anything


def test_growth_is_measured_written_and_drawn(tmp_path, capsys, monkeypatch):
    output = tmp_path / "new" / "growth.json"
    config = GrowthBenchmarkConfig(
        workers=(2, 4), processes=(2, 4), parameters=(100, 1000), tensors=(1, 8), other_parameters=100,
        few_parameters=100, rounds=1, output=output,
    )  # fmt: skip
    monkeypatch.setattr(growth, "parse_config", lambda *args, **kwargs: config)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(growth, "_TURN_SECONDS", 1e-3)
    monkeypatch.setattr(growth, "_COPIED", 2**10)
    monkeypatch.setattr(growth, "measure_in_processes", lambda case: 1e-3 * case.processes**2)
    growth.main([])
    found = json.loads(output.read_text())["growth"]
    assert {what: list(costs["measured"]) for what, costs in found.items()} == {
        "workers": ["2", "4"], "processes": ["2", "4"], "parameters": ["100", "1000"], "tensors": ["1", "8"],
    }  # fmt: skip
    assert all(seconds > 0 for costs in found.values() for seconds in costs["measured"].values())
    assert output.with_suffix(".png").is_file()
    assert "processes: measured ^2.00, formula ^0.00;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"processes": (2, 3)}, "must be even, since workers mix in pairs; got 3"),
        ({"tensors": (1, 10), "few_parameters": 5}, "few_parameters must be at least one for each of 10 tensors"),
        ({"parameters": (10, 1)}, "parameters must be several growing numbers, or none"),
        ({"workers": (2,)}, "workers must be several growing numbers, or none"),
        ({"parameters": (0, 1)}, "parameters must be"),
    ],
)
def test_growth_that_cannot_be_measured_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GrowthBenchmarkConfig(**wrong)
