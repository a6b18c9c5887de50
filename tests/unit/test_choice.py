"""Settings chosen on a validation split: the best of each method, and what a report says of the others."""

import json

import pytest

from tasks.common.config import ConfigError
from tasks.studies.choice import chosen_rows
from tasks.studies.config import load_sweep
from tasks.studies.report import write_report
from tasks.studies.state import state_of
from tasks.studies.table import rows_of
from tests.unit.test_report import run_here
from tests.unit.test_sweep import plan, write_sweep

VARIANTS = {name: {"learning_rate": lr} for name, lr in {"ema 1": 0.1, "ema 2": 0.2, "plain": 0.3}.items()}
CHOOSE = {"by": "test_loss", "over": ["gossip.power"], "methods": {"ema": ["ema 1", "ema 2"]}}


def study(folder, **choose):
    report = {"choose": CHOOSE | choose, "baselines": ["plain"], "columns": ["test_loss"]}
    grid = {"gossip.power": [4, 1, 2], "size": {"small": {}, "big": {"learning_rate": 1}}}
    return run_here(write_sweep(folder, variants=VARIANTS, grid=grid, seeds=[0, 1], report=report))


def chosen(file):
    sweep = load_sweep(file)
    rows = chosen_rows(sweep, rows_of([state_of(run) for run in plan(file)]))
    return {row.setting.labels: row.chosen for row in rows}


def set_loss(file, name, loss):
    (run,) = (run for run in plan(file) if run.name == name)
    summary = json.loads((run.folder / "summary.json").read_text())
    (run.folder / "summary.json").write_text(json.dumps(summary | {"test_loss": loss}))


def test_the_mean_over_the_seeds_decides_for_each_method_and_value_that_is_not_chosen_over(tmp_path):
    file = study(tmp_path)  # the loss is learning_rate * power + seed
    assert chosen(file) == {
        ("ema", "small"): "ema 1, power=1",
        ("ema", "big"): "ema 1, power=1",  # a tie: the first one
        ("plain", "small"): "power=1",
        ("plain", "big"): "power=1",
    }
    set_loss(file, "ema_2,power=4,small/seed_0", -3.0)  # below in one seed, and in the mean
    set_loss(file, "ema_1,power=2,small/seed_1", -0.2)  # below in one seed alone
    assert chosen(file)["ema", "small"] == "ema 2, power=4"
    # A setting with a seed less does not take part, however good the others are.
    (broken,) = (run for run in plan(file) if run.name == "ema_2,power=4,small/seed_1")
    (broken.folder / "summary.json").unlink()
    assert chosen(file)["ema", "small"] == "ema 1, power=2"


def test_the_report_shows_and_compares_the_chosen_settings_and_misses_runs_of_all(tmp_path):
    file = study(tmp_path)
    (plan(file)[4].folder / "summary.json").unlink()  # of a setting that was not chosen
    sweep = load_sweep(file)
    report = write_report(sweep, plan(file), tmp_path / "report")
    figures = sorted(figure.stem for figure in report.files if figure.suffix == ".png")
    assert {"curves", "sensitivity_gossip.power"} <= set(figures)
    lines = [line.replace(" ", "") for line in report.text.splitlines()]
    assert "|variant|size|chosen|runs|testloss|" in lines
    assert "|ema|small|ema1,power=1|2|0.60±0.71|" in lines
    (difference,) = [line for line in lines if line.startswith("|ema,small|plain,small|")]
    assert "|-0.2" in difference
    assert difference.endswith("×0.75,lowerin2of2|")
    assert "35 of 36 runs finished. Each method has its setting with the smallest test loss." in report.text
    assert report.missing == 1
    assert f"- 1 begun, but not finished: {plan(file)[4].name}" in report.text
    assert len((tmp_path / "report" / "report.csv").read_text().splitlines()) == 1 + 36 + 3 * 18  # all settings


def test_a_method_without_a_finished_run_has_chosen_nothing(tmp_path):
    file = write_sweep(tmp_path, variants=VARIANTS, grid={"gossip.power": [4, 1]}, report={"choose": CHOOSE})
    assert chosen(file) == {("ema",): "", ("plain",): ""}


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        ({"over": ["gossip.powr"]}, "report.choose.over must be one of .*gossip.power.*Did you mean"),
        ({"methods": {"ema": ["ema 3"]}}, "report.choose.methods: the variant must be one of .*ema 1.*ema 3"),
        ({"methods": {"a": ["plain"], "b": ["plain"]}}, "name each variant once; 'plain' is there more often"),
        ({"by": "test_loss@last"}, "only a metric"),
        ({"by": "validation_accuracy"}, "smallest value is the best; got validation_accuracy"),
        ({"by": "test/accuracy@max"}, "smallest value is the best; got test/accuracy@max"),
        ({"by": "bleu"}, "smallest value is the best; got bleu"),
        (
            {"by": "validation_los"},
            "report.choose must be by a column of .* got validation_los. Did you mean 'validation_loss'",
        ),
    ],
)
def test_a_choice_of_nothing_is_refused(tmp_path, choose, message):
    file = write_sweep(tmp_path, variants=VARIANTS, grid={"gossip.power": [1]}, report={"choose": CHOOSE | choose})
    with pytest.raises(ConfigError, match=message):
        load_sweep(file)


@pytest.mark.parametrize(
    ("keys", "choose", "message"),
    [
        ({"grid": {}}, {"methods": {}}, "report.choose.over: the sweep has no grid; got 'gossip.power'"),
        ({"variants": {}}, {"over": []}, "report.choose.methods: .* the sweep has no variants; got 'ema 1'"),
    ],
)
def test_a_choice_in_a_sweep_without_the_section_is_refused(tmp_path, keys, choose, message):
    keys = {"variants": VARIANTS, "grid": {"gossip.power": [1]}} | keys
    with pytest.raises(ConfigError, match=message):
        load_sweep(write_sweep(tmp_path, **keys, report={"choose": CHOOSE | choose}))


@pytest.mark.parametrize("baselines", [["ema 1"], ["power=1"], {"plain": "ema 2"}, {"power=1": "plain"}])
def test_only_rows_of_the_report_are_baselines(tmp_path, baselines):
    report = {"choose": CHOOSE, "baselines": baselines}
    file = write_sweep(tmp_path, variants=VARIANTS, grid={"gossip.power": [1, 2]}, report=report)
    with pytest.raises(ConfigError, match=r"report\.baselines: no row of the report is called .* There are ema, plain"):
        load_sweep(file)


def test_any_column_of_the_report_may_decide(tmp_path):
    report = {"choose": CHOOSE | {"by": "my/own@max"}, "columns": ["my/own@max"]}
    sweep = load_sweep(write_sweep(tmp_path, variants=VARIANTS, grid={"gossip.power": [1]}, report=report))
    assert sweep.report.choose is not None
    assert sweep.report.choose.by == "my/own@max"
