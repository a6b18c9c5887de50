"""What mixing takes of a step, and the memory that it passes over."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsgdac_accel import GossipConfig, Mixer, WorkerGroup, build_topology
from tasks.benchmarks import mixing
from tasks.benchmarks.mixing import MixingBenchmarkConfig, Stopwatch, bytes_of_a_mix
from tasks.benchmarks.training import Training

CPU = torch.device("cpu")


class CountsTraffic(TorchDispatchMode):
    """Bytes of the tensors that operations read, and of those that they write, views aside."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "sub":
            self.bytes += sum(tensor.nbytes for tensor in [*args[:2], result])
        elif name in ("_foreach_copy_", "_foreach_add_"):  # an addition also reads what it writes
            written = sum(tensor.nbytes for tensor in args[0])
            self.bytes += written * (2 if name == "_foreach_copy_" else 3)
        return result


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_bytes_of_a_mix_are_those_that_its_operations_read_and_write(workers):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(1024)) for _ in range(workers)]
    place = {id(parameter): number for number, parameter in enumerate(parameters)}
    mixer = Mixer(
        parameters,
        build_topology("one_peer_ring", workers),
        WorkerGroup(CPU, 10),
        local_workers=workers,
        worker_of=lambda parameter: place[id(parameter)],
    )
    for _ in range(2):
        with CountsTraffic() as traffic:
            mixer.add(mixer.consensus_update(1.0))
        assert traffic.bytes == bytes_of_a_mix(mixer)


def test_a_case_is_measured_and_written(tmp_path, capsys, monkeypatch):
    output = tmp_path / "new" / "mixing.json"
    config = MixingBenchmarkConfig(
        cases=("tiny-8 adam 2",), steps=3, passes=4, gossip=GossipConfig(workers_per_process=4, log_every=0),
        output=output, most_of_step=1.0, least_of_copy=1e-9,
    )  # fmt: skip
    monkeypatch.setattr(mixing, "parse_config", lambda *args, **kwargs: config)
    mixing.main([])
    (case,) = json.loads(output.read_text())["cases"]
    low, share, high = case["share"]
    assert 0 < low <= share <= high < 1
    assert case["of_copy"][1] > 0
    assert case["parameters"] >= sum(p.numel() for p in benchmark_mixing_model().parameters())
    printed = capsys.readouterr().out
    assert "4 workers in one process" in printed
    assert printed.count(": met") == 2


def benchmark_mixing_model() -> nn.Module:
    from tasks.benchmarks.models import build_workload

    return build_workload("tiny-8", batch_size=1, image_size=8, device=CPU, seed=0).model


def test_the_aims_are_judged(capsys):
    result = SimpleNamespace(
        case="a sgd 1", parameters=1, step_seconds=1.0, share=[0.01, 0.03, 0.04], of_copy=[0.5, 0.7, 0.9],
        copy_bytes_per_second=1e9,
    )  # fmt: skip
    _, share, bandwidth = mixing.lines(result, MixingBenchmarkConfig())
    assert "3.00 % of the step (quartiles 1.00 to 4.00); aim: at most 2 %: missed" in share
    assert "0.700 of the bytes per second of a copy (quartiles 0.500 to 0.900)" in bandwidth
    assert bandwidth.endswith("1.0 GB/s; aim: at least 0.8: missed")


def test_time_within_spans_is_added_up_by_name_and_taken_once(monkeypatch):
    moments = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(mixing.time, "perf_counter", lambda: next(moments))
    watch = Stopwatch(CPU)
    assert watch.timed("a", lambda value: value + 1)(1) == 2
    with watch.span("a"):
        pass
    assert watch.take() == {"a": 3.0}
    assert watch.take() == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cases": ()}, "name at least one"),
        ({"cases": ("wrn-16-4 sgd",)}, "'<model> <optimizer> <samples per worker>'"),
        ({"cases": ("wrn-16-4 lamb 2",)}, "one of sgd, adam"),
        ({"cases": ("wrn-16-4 sgd ²",)}, "samples per worker"),
        ({"cases": ("wrn-17-4 sgd 2",)}, "depth of a wide ResNet"),
        ({"cases": ("translation-huge sgd 2",)}, "translation-big"),
        ({"gossip": GossipConfig(workers_per_process=3)}, "an even number"),
        ({"gossip": GossipConfig(workers_per_process=1)}, "an even number"),
        ({"gossip": GossipConfig(workers_per_process=2, topology="ring")}, "got 2 workers, topology 'ring'"),
        ({"gossip": GossipConfig(workers_per_process=2, comm_dtype="int8")}, "comm_dtype 'int8'"),
        ({"gossip": GossipConfig(workers_per_process=2, mix_every=2)}, "mix_every 2"),
        ({"steps": 0}, "steps"),
        ({"least_of_copy": 0}, "least_of_copy"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MixingBenchmarkConfig(**settings)


def test_a_training_makes_its_optimizer():
    parameters = [nn.Parameter(torch.ones(2))]
    assert isinstance(Training.of("mlp adam 4").make_optimizer(parameters), torch.optim.Adam)
    assert Training.of("mlp sgd 4").make_optimizer(parameters).defaults["momentum"] == 0.9
