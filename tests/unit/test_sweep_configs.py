"""Every shipped sweep makes the runs of its table, and the task accepts the settings of each."""

from pathlib import Path

import pytest

from tasks.common.config import parse_config
from tasks.images.config import CifarConfig
from tasks.language.config import LanguageConfig
from tasks.studies.choice import chosen_rows
from tasks.studies.config import load_sweep
from tasks.studies.plan import planned_runs, require_valid
from tasks.studies.state import RunState
from tasks.studies.table import pairs_of, rows_of
from tasks.translation.config import TranslationConfig

SWEEPS = Path(__file__).resolve().parents[2] / "configs" / "sweeps"
TASKS = {"cifar.py": CifarConfig, "trainer_language.py": LanguageConfig, "wmt14.py": TranslationConfig}


def plan(name):
    file = SWEEPS / f"{name}.yaml"
    return load_sweep(file), planned_runs(load_sweep(file), file.parent)


def parsed(sweep, run):
    return parse_config(TASKS[sweep.task.name], run.arguments)


@pytest.fixture(params=sorted(file.stem for file in SWEEPS.glob("*.yaml")))
def name(request):
    return request.param


def test_the_task_accepts_every_run_and_its_folder_is_below_the_sweeps(name):
    sweep, runs = plan(name)
    require_valid(sweep, runs)
    assert sweep.output_dir == SWEEPS.parents[1] / "runs" / "sweeps" / name
    for run in runs[: len(runs) // len(sweep.seeds)] + runs[-1:]:  # seeds differ in nothing else
        config = parsed(sweep, run)
        assert config.output_dir == run.folder
        assert config.seed == run.seed


def test_columns_can_be_read_and_every_baseline_has_somebody_to_compare_with(name):
    sweep, runs = plan(name)
    assert sweep.title
    rows = chosen_rows(sweep, rows_of([RunState(run, "missing") for run in runs]))
    pairs = pairs_of(rows, sweep.report)
    assert bool(pairs) == bool(sweep.report.baselines)
    named = sweep.report.baselines.values() if isinstance(sweep.report.baselines, dict) else sweep.report.baselines
    assert all(any(label in pair.baseline.setting.labels for pair in pairs) for label in named)


def test_the_main_table_is_that_of_the_paper():
    # arXiv:2602.02899v2, table of CIFAR-100: rate and batch scale with the workers, E_start 10, 100, 150, p = 3.
    sweep, runs = plan("cifar100_main")
    configs = [parsed(sweep, run) for run in runs]
    workers = [sweep.launch.processes * config.gossip.workers_per_process for config in configs]
    rows = {
        (config.model, count, config.algorithm, config.gossip.topology)
        for config, count in zip(configs, workers, strict=True)
        if config.algorithm != "sgd"
    }
    topologies = ("one_peer_ring", "one_peer_exponential", "complete")
    assert rows == {
        (model, count, algorithm, topology)
        for model in ("wrn-28-10", "wrn-16-8")
        for count in (8, 16, 32)
        for algorithm in ("dsgd", "dsgd_ac")
        for topology in topologies
    }
    assert len(runs) == 3 * (len(rows) + 6)
    for config, count in zip(configs, workers, strict=True):
        assert config.global_batch_size == 16 * count
        assert config.learning_rate == pytest.approx(0.1 * config.global_batch_size / 128)
        assert config.gossip.start_epoch == {8: 10, 16: 100, 32: 150}[count]
        assert (config.gossip.power, config.num_train_epochs, config.data.name) == (3, 200, "cifar100")


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [("cifar10_power", "power", range(6)), ("cifar10_start", "start_epoch", [10, 50, 75, 100, 150, 175])],
)
def test_the_sensitivity_tables_are_those_of_the_paper(name, key, values):
    sweep, runs = plan(name)
    configs = [parsed(sweep, run) for run in runs]
    assert sorted(getattr(config.gossip, key) for config in configs) == sorted(3 * list(values))
    others = {"power": 3, "start_epoch": 100} | {key: None}
    for config in configs:
        assert (config.data.name, config.model, config.global_batch_size, config.learning_rate) == (
            "cifar10",
            "wrn-28-10",
            256,
            0.2,
        )
        assert sweep.launch.processes * config.gossip.workers_per_process == 16
        assert all(getattr(config.gossip, other) == value for other, value in others.items() if value is not None)


def test_the_translation_table_has_the_settings_of_the_shipped_configurations():
    sweep, runs = plan("wmt14_big")
    for run in runs:
        config = parsed(sweep, run)
        alone = parse_config(TranslationConfig, ["--config", str(SWEEPS.parent / f"wmt14_big_{config.algorithm}.yaml")])
        for key in (
            "learning_rate",
            "betas",
            "warmup_steps",
            "batch_tokens",
            "num_train_epochs",
            "model",
            "data",
            "label_smoothing",
        ):
            assert getattr(config, key) == getattr(alone, key)
        if config.algorithm == "dadam_ac":
            assert config.gossip == alone.gossip
