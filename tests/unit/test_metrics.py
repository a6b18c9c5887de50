"""ConsensusLogger merges the consensus metrics into records and passes them to any sink."""

from __future__ import annotations

import json

import numpy
import pytest
import torch
from torch import nn

from dsgdac_accel import ConsensusLogger, GossipAccelerator, JsonlSink
from dsgdac_accel.metrics import consensus_metrics


def test_jsonl_is_strict_json_flushed_line_by_line(tmp_path):
    sink = JsonlSink(tmp_path / "deep" / "metrics.jsonl")
    sink({"a": float("nan"), "b": torch.tensor(2.5), "c": numpy.float32(0.5), "d": float("inf"), "e": "text"}, 3)
    sink({"a": 1}, None)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in sink.path.read_text().splitlines()]
    assert lines == [{"step": 3, "a": None, "b": 2.5, "c": 0.5, "d": None, "e": "text"}, {"step": None, "a": 1}]
    sink.close()


def test_every_sink_gets_values_and_metrics_and_values_win():
    first, second = [], []
    logger = ConsensusLogger(lambda: {"gossip/gamma": 0.5, "x": 1}, [lambda values, step: first.append((step, values))])
    logger.add_sink(lambda values, step: second.append((step, values)))
    assert logger.log({"x": 2}, step=4) == {"gossip/gamma": 0.5, "x": 2}
    assert first == second == [(4, {"gossip/gamma": 0.5, "x": 2})]


def test_tensors_of_one_element_are_logged_as_numbers():
    records = []
    logger = ConsensusLogger(None, [lambda values, step: records.append(values)])
    image, parameter = torch.ones(2), nn.Parameter(torch.ones(1))
    values = {"loss": torch.tensor(0.5, dtype=torch.bfloat16), "count": torch.tensor([3]), "image": image, "n": 1}
    assert logger.log(values, step=1) is records[0]
    assert records[0] == {"loss": 0.5, "count": 3, "image": image, "n": 1}
    assert (type(records[0]["loss"]), type(records[0]["count"])) == (float, int)
    assert logger.log({"scale": parameter}, step=2) == {"scale": 1.0}


def test_log_merges_consensus_metrics_into_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = GossipAccelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    records: list = []
    accelerator.consensus_logger.add_sink(lambda values, step: records.append((step, values)))
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))
    accelerator.init_trackers("run")
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.log({"train/loss": 1.5}, step=1)
    accelerator.log({"train/loss": 1.0})
    accelerator.trackers[0].finish()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert {"train/loss", "gossip/lr", "gossip/gamma", "gossip/radius"} <= set(events.Tags()["scalars"])
    assert events.Scalars("gossip/lr")[0].value == pytest.approx(0.25)
    assert [step for step, _ in records] == [1, 1], "without a step, the number of optimizer steps"
    assert records[0][1]["train/loss"] == 1.5


def test_further_optimizers_get_prefixes_of_their_own():
    accelerator = GossipAccelerator(cpu=True)
    models = [nn.Linear(2, 1) for _ in range(2)]
    accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.1 * (i + 1)) for i, m in enumerate(models)))
    metrics = consensus_metrics(accelerator.gossip_steps)
    assert metrics["gossip/lr"] == pytest.approx(0.1)
    assert metrics["gossip/1/lr"] == pytest.approx(0.2)
