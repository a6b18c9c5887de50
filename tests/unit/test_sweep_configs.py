"""Every shipped sweep makes the runs of its table, and the task accepts the settings of each."""

import re
from pathlib import Path

import pytest

from tasks.common.config import parse_config
from tasks.images.config import CifarConfig
from tasks.language.config import LanguageConfig
from tasks.studies.choice import chosen_rows
from tasks.studies.config import load_sweep
from tasks.studies.plan import planned_runs
from tasks.studies.preflight import require_valid, workers_of
from tasks.studies.smoke import small
from tasks.studies.state import RunState
from tasks.studies.table import pairs_of, rows_of
from tasks.translation.config import TranslationConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FOLDERS = ("paper", "sweeps")
TASKS = {"cifar.py": CifarConfig, "trainer_language.py": LanguageConfig, "wmt14.py": TranslationConfig}


def plan(name):
    file = CONFIGS / f"{name}.yaml"
    return load_sweep(file), planned_runs(load_sweep(file), file.parent)


def parsed(sweep, run):
    return parse_config(TASKS[sweep.task.name], run.arguments)


@pytest.fixture(
    params=sorted(f"{folder}/{file.stem}" for folder in FOLDERS for file in CONFIGS.glob(f"{folder}/*.yaml"))
)
def name(request):
    return request.param


def test_the_task_accepts_every_run_and_its_folder_is_below_the_sweeps(name):
    sweep, runs = plan(name)
    require_valid(sweep, runs)
    assert sweep.output_dir == CONFIGS.parent / "runs" / name
    for run in runs[: len(runs) // len(sweep.seeds)] + runs[-1:]:  # seeds differ in nothing else
        config = parsed(sweep, run)
        assert config.output_dir == run.folder
        assert config.seed == run.seed


def test_ci_runs_all_of_it_small_on_two_cores_and_embedded_data(name):
    whole, _ = plan(name)
    sweep = small(whole)
    runs = planned_runs(sweep, CONFIGS / "paper", rules=sweep.smoke)
    require_valid(sweep, runs)
    assert (sweep.launch.gpus, sweep.launch.nodes, sweep.launch.threads) == (0, 1, 1)
    assert len(runs) <= 16
    for run in runs:
        config = parsed(sweep, run)
        data = getattr(config, "data", None)
        assert data is None or (data.path is None and data.name in ("digits", "grammar"))
        assert getattr(config, "mixed_precision", "no") == "no"
    # No axis shrinks to a single value, or the report would have nothing to compare.
    assert all(len(kept) > 1 for kept, labels in zip(sweep.axes(), whole.axes(), strict=True) if len(labels) > 1)


def test_a_study_of_the_paper_names_its_source_its_hardware_and_the_hours(name):
    sweep, _ = plan(name)
    if name.startswith("paper/"):
        assert "arXiv:2602.02899v2, " in sweep.source
        assert "8 GPUs" in sweep.hardware
        assert sweep.gpu_hours > 0
        assert sweep.launch.gpus == sweep.launch.processes == 8
        assert sweep.paper or sweep.runs_dir


def test_the_documented_runs_and_hours_are_those_of_the_files():
    text = (CONFIGS.parent / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = re.findall(r"`configs/(paper/\w+)\.yaml` \| (?P<runs>[^|]*) \| (?P<hours>[^|]*) \|\n", text)
    assert {name for name, _, _ in rows} == {f"paper/{file.stem}" for file in CONFIGS.glob("paper/*.yaml")}
    for name, number, hours in rows:
        sweep, runs = plan(name)
        assert hours.removeprefix("the same ") == f"{sweep.gpu_hours:,.0f}"
        assert number == (str(len(runs)) if sweep.paper else "those of Table 3")


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
    sweep, runs = plan("paper/table_cifar")
    configs = [parsed(sweep, run) for run in runs]
    workers = [workers_of(run.launch, config) for run, config in zip(runs, configs, strict=True)]
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
    assert len(runs) == 3 * (len(rows) + 6) == 3 * len(sweep.paper)
    assert sweep.paper["dsgd_ac complete, WRN-16-8, 32 workers"] == {
        "test_accuracy": "79.73 ± 0.13", "test_loss": "0.955 ± 0.006", "curvature.lambda_1": "0.52 ± 0.01",
    }  # fmt: skip
    for config, count in zip(configs, workers, strict=True):
        assert config.global_batch_size == 16 * count
        assert config.learning_rate == pytest.approx(0.1 * config.global_batch_size / 128)
        assert config.gossip.start_epoch == {8: 10, 16: 100, 32: 150}[count]
        assert (config.gossip.power, config.num_train_epochs, config.data.name) == (3, 200, "cifar100")
        # The eigenvalue is of the loss over the whole training set, and costs 90 epochs of work: once, at the end.
        assert (config.curvature.every, config.curvature.batches, config.curvature.iterations) == (200, None, 30)


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [("paper/table_p", "power", range(6)), ("paper/table_start", "start_epoch", [10, 50, 75, 100, 150, 175])],
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
    sweep, runs = plan("paper/table_wmt14")
    for run in runs:
        config = parsed(sweep, run)
        alone = parse_config(TranslationConfig, ["--config", str(CONFIGS / f"wmt14_big_{config.algorithm}.yaml")])
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


@pytest.mark.parametrize("table", ["time", "sam"])
def test_training_times_are_on_nodes_of_8_with_the_batch_and_rate_of_their_workers(table):
    sweep, runs = plan(f"paper/table_{table}")
    for run in runs:
        config = parsed(sweep, run)
        workers = workers_of(run.launch, config)
        assert (workers, config.gossip.workers_per_process) == (8 * run.launch.nodes, 1)
        assert (config.global_batch_size, config.learning_rate) == (16 * workers, pytest.approx(0.1 * workers / 8))
        assert config.mixed_precision == ("no" if config.algorithm == "sam" else "fp16")  # SAM diverged in fp16
    assert {run.launch.nodes for run in runs} == ({1, 2, 4} if table == "time" else {1, 2})
