"""EMA, SWA and LAWA against a replay of recorded weights, on any split of the workers, and through a resume."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from dsgdac_accel import VirtualWorkers
from dsgdac_accel.curvature import flatten
from tasks.common.config import ConfigError, parse_config
from tasks.common.diagnostics import CurvatureConfig, measure_run
from tasks.common.weight_average import WeightAverage, WeightAverageConfig
from tasks.images.config import CifarConfig, DataConfig
from tasks.images.curvature import to_measure
from tasks.images.run import ImageRun
from tests.workers import run_workers

STEPS, PER_EPOCH = 12, 3


def one_process():
    return SimpleNamespace(gossip_steps=(), group=SimpleNamespace(size=1), device=torch.device("cpu"))


def wander(average, model, visited):
    """Move to each of the visited weights (steps, d), and take them; where it was resumed, the rest of them."""
    for step, weights in enumerate(visited, start=1):
        if step > average.resumed_at:
            nn.utils.vector_to_parameters(weights.clone(), model.parameters())
            average.after_step(step)


def averaged(average, model):
    with average.swapped_in(model):
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def make(config, model):
    average = WeightAverage(config, model, one_process(), PER_EPOCH, STEPS)
    average.resumed_at = 0
    return average


def ema(visited, decay):
    mean = visited[0]
    for weights in visited[1:]:
        mean = decay * mean + (1 - decay) * weights
    return mean


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "ema", "decay": 0.7}, lambda visited: ema(visited, 0.7)),
        ({"kind": "ema", "start_epoch": 1, "every": 2}, lambda visited: ema(visited[4::2], 0.99)),
        ({"kind": "swa"}, lambda visited: visited[11]),  # three quarters of 4 epochs leave the last one
        ({"kind": "swa", "start_epoch": 1}, lambda visited: visited[5::3].mean(0)),
        ({"kind": "swa", "start_epoch": 0, "every": 4}, lambda visited: visited[3::4].mean(0)),
        ({"kind": "lawa", "last": 2}, lambda visited: visited[[8, 11]].mean(0)),
        ({"kind": "lawa", "every": 5}, lambda visited: visited[[4, 9]].mean(0)),
        ({"kind": "none"}, lambda visited: visited[11]),
    ],
)
def test_the_average_is_that_of_a_replay_also_resumed_and_leaves_the_weights_alone(settings, expected):
    visited = torch.randn(STEPS, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model, config = nn.Linear(3, 2).double(), WeightAverageConfig(**settings)
    average = make(config, model)
    wander(average, model, visited)
    found = averaged(average, model)
    torch.testing.assert_close(found, expected(visited), rtol=1e-12, atol=1e-12)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), visited[-1])
    for step in (1, 5, 9):
        before, after = make(config, model), make(config, model)
        wander(before, model, visited[:step])
        after.load_state_dict(before.state_dict())
        after.resumed_at = step
        wander(after, model, visited)
        assert torch.equal(averaged(after, model), found)


def test_before_the_first_snapshot_the_weights_are_the_present_ones():
    model = nn.Linear(3, 2)
    average = make(WeightAverageConfig(kind="lawa"), model)
    average.after_step(2)
    assert torch.equal(averaged(average, model), nn.utils.parameters_to_vector(model.parameters()))


def test_the_replicas_of_a_process_are_averaged_before_the_steps():
    workers = VirtualWorkers(nn.Linear(3, 2), 3)
    average = make(WeightAverageConfig(kind="ema", decay=0.5), workers)
    means = []
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in workers.parameters():
                parameter.add_(torch.randn_like(parameter))
        means.append(torch.stack([flatten(replica) for replica in workers.replicas]).mean(0))
        average.after_step(step)
    torch.testing.assert_close(averaged(average, workers.replicas[0]), ema(means, 0.5))


def study(folder, **changes):
    config = CifarConfig(
        data=DataConfig(train_limit=200, test_limit=90, validation_limit=30),
        model="mlp", num_train_epochs=3, global_batch_size=40, warmup_epochs=1.0, crop_padding=0, flip=False,
        learning_rate=0.5, report_to=(), output_dir=Path(folder), save_steps=1000,
        weight_average=WeightAverageConfig(kind="ema", decay=0.8),
    )  # fmt: skip  # 5 steps an epoch
    return replace(config, **changes)


def gossip(config, local_workers, **settings):
    return replace(config, gossip=replace(config.gossip, workers_per_process=local_workers, timeout=30, **settings))


def train(rank, folder, algorithm, local_workers):
    """Train four workers and record their mean after every step; the deployed weights, and what is left of them."""
    config = study(f"{folder}/{algorithm}_{local_workers}", algorithm=algorithm, curvature=CurvatureConfig(every=3))
    run = ImageRun(gossip(config, local_workers))
    run.output.write_summary = lambda summary: found.update(summary=summary)
    found, means = {}, []

    def record():
        with run.accelerator.deployed_model(run.model) as workers_mean:
            means.append(flatten(workers_mean))
        found["last"] = [parameter.detach().clone() for parameter in run.model.parameters()]

    run.after_step = record
    run.train()
    kept = [parameter.detach().clone() for parameter in run.model.parameters()]
    with run.loop.deployed_model(run.loader, run._calibration_forward) as deployed:
        found |= {"deployed": flatten(deployed), "statistics": deployed[2].running_mean.clone()}
        logits = deployed(run.inputs.plain(run.data.validation_images))
        found["validation"] = nn.functional.cross_entropy(logits, run.data.validation_labels).item()
        plain = AveragedModel(run.accelerator.unwrap_model(deployed))
    batches = [run.inputs.augmented(run.data.train_images[start : start + 20]) for start in range(0, 200, 20)]
    update_bn(batches, plain)
    same = zip(run.model.parameters(), kept, found.pop("last"), strict=True)
    left = all(torch.equal(now, before) and torch.equal(now, last) for now, before, last in same)
    return found | {"means": torch.stack(means), "of_torch": plain.module[2].running_mean, "left": left}


def assert_average_of_steps_with_its_own_statistics(found):
    torch.testing.assert_close(found["deployed"], ema(found["means"], 0.8), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["statistics"], found["of_torch"], rtol=1e-4, atol=1e-5)
    assert found["left"]
    if "summary" in found:  # the main worker writes it
        assert found["summary"]["validation_loss"] == pytest.approx(found["validation"], rel=1e-4)
    assert (found["deployed"] - found["means"][-1]).norm() > 0.1


@pytest.mark.multiprocess
def test_the_average_of_the_steps_is_deployed_with_its_own_statistics_and_gives_the_workers_back(tmp_path):
    assert_average_of_steps_with_its_own_statistics(run_workers(train, 1, str(tmp_path), "dsgd_ac", 4)[0])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", ["dsgd_ac", "sgd"])
def test_every_split_of_the_workers_deploys_the_same_average(tmp_path, algorithm):
    (alone,) = run_workers(train, 1, str(tmp_path), algorithm, 4)
    split = run_workers(train, 2, str(tmp_path), algorithm, 2)
    for found in (alone, *split):
        assert_average_of_steps_with_its_own_statistics(found)
    torch.testing.assert_close(split[0]["deployed"], alone["deployed"], rtol=1e-4, atol=1e-5)
    assert torch.equal(split[0]["deployed"], split[1]["deployed"])
    saved = load_file(tmp_path / f"{algorithm}_2" / "deployed" / "model.safetensors")
    first = saved["1.weight"].flatten()
    assert torch.equal(first, split[0]["deployed"][: len(first)])
    of_split = split[0]["summary"]["curvature"]
    measure_run([str(tmp_path / f"{algorithm}_4")], to_measure, "curvature")
    measured = json.loads((tmp_path / f"{algorithm}_4" / "curvature.json").read_text(encoding="utf-8"))
    for key in ("lambda_1", "Q"):
        expected = pytest.approx(alone["summary"]["curvature"][key], rel=1e-2)
        assert of_split[key] == expected
        assert measured[key] == expected


# ---- a resumed task


class Stopped(Exception):
    """Ends a run."""


def stop():
    raise Stopped


def train_through(rank, folder, stops_at=None):
    """Train to the end, or be stopped in the middle of an epoch, one step after a checkpoint."""
    run = ImageRun(gossip(study(folder, algorithm="dsgd_ac", save_steps=7), 2))
    run.output.write_summary = lambda summary: None
    run.after_step = lambda: stop() if run.loop.step == stops_at else None
    begun = run.loop.step
    with contextlib.suppress(Stopped):
        run.train()
    run.accelerator.finish_saving()
    with run.loop.deployed_model(run.loader, run._calibration_forward) as deployed:
        return begun, flatten(deployed), deployed[2].running_var.clone()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_resumed_run_deploys_the_same_average(tmp_path):
    whole = run_workers(train_through, 2, str(tmp_path / "whole"))
    run_workers(train_through, 2, str(tmp_path / "broken"), 8)
    resumed = run_workers(train_through, 2, str(tmp_path / "broken"))
    assert [begun for begun, *_ in resumed] == [7, 7]
    for (_, *expected), (_, *found) in zip(whole, resumed, strict=True):
        assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    # Each process has a part of the average, so their number must stay.
    settings = gossip(study(tmp_path / "whole", algorithm="dsgd_ac", save_steps=7), 2, on_other_worker_count="deployed")
    with pytest.raises(ConfigError, match="of 2 workers, and 1 were launched"):
        ImageRun(settings)
    part = WeightAverage(settings.weight_average, nn.Linear(3, 2), one_process(), PER_EPOCH, STEPS)
    with pytest.raises(ConfigError, match=r"weight_average: .* parts from 2 processes, and there are 1"):
        part.load_state_dict({"count": 7, "kept": [], "processes": 2})


# ---- settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weight_average.kind", "polyak"], "none.*ema.*swa.*lawa"),
        (["--weight_average.decay", "0.9"], r"decay is for kind ema; got 0\.9 with kind none\..*set kind"),
        (["--weight_average.kind", "swa", "--weight_average.last", "3"], "last is for kind lawa; got 3 with kind swa"),
        (["--weight_average.kind", "lawa", "--weight_average.start_epoch", "3"], "start_epoch is for kind ema or swa"),
        (["--weight_average.kind", "ema", "--weight_average.decay", "1"], "decay must be in .0, 1., below 1"),
        (["--weight_average.kind", "ema", "--weight_average.decay", "0"], "decay must be .* > 0"),
        (["--weight_average.kind", "lawa", "--weight_average.last", "0"], "last must be an integer >= 1"),
        (["--weight_average.kind", "ema", "--weight_average.every", "0"], "every must be an integer >= 1"),
        (["--weight_average.kind", "swa", "--weight_average.start_epoch", "-1"], "start_epoch must be an integer >= 0"),
        (
            ["--weight_average.kind", "swa", "--weight_average.start_epoch", "200"],
            "weight_average.start_epoch must be below num_train_epochs = 200.*nothing is averaged",
        ),
        (["--weight_average.kind", "ema", "--calibrate", "false"], "calibrate must be true with weight_average.kind"),
        (["--ema", "0.9"], "weight_average"),
        (["--swa_start", "3"], "weight_average"),
        (["--average_last", "5"], "Use weight_average.kind: lawa, with weight_average.last"),  # `last` alone is refused
    ],
)
def test_averages_that_cannot_be_meant_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(CifarConfig, words)


def test_a_run_that_ends_before_the_first_snapshot_is_refused():
    with pytest.raises(ConfigError, match=r"first of its updates would be at step 13 .* the run has 12\. Lower"):
        make(WeightAverageConfig(kind="lawa", every=13), nn.Linear(3, 2))
