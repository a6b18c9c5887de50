"""Reports: means, spreads and paired differences against NumPy on the files of the runs; figures against their data."""

import csv
import json
import math

import numpy as np
import pytest
import scipy.stats
from PIL import Image

from dsgdac_accel.cli import main
from tasks.studies import figures as drawing
from tasks.studies.columns import columns_of
from tasks.studies.config import ReportConfig, load_sweep
from tasks.studies.curves import Curve, curve_of
from tasks.studies.published import published
from tasks.studies.report import report_text
from tasks.studies.state import state_of, write_record
from tasks.studies.table import Paired, Spread, markdown_table, paired, pairs_of, rows_of, write_csv
from tests.unit import fake_task
from tests.unit.test_sweep import BASE, plan, write_sweep

SEEDS = [0, 1, 5]
VARIANTS = {"slow": {"learning_rate": 0.1}, "fast": {"learning_rate": 0.3}}
POWERS = [0, 1, 4]


def run_here(file):
    """The runs of a sweep by the fake task in this process, as their commands would."""
    for run in plan(file):
        words = run.command[run.command.index("--config") :]
        fake_task.run(fake_task.read_settings(words))
    return file


def study(folder, **report):
    keys = {"variants": VARIANTS, "grid": {"gossip.power": POWERS}, "seeds": SEEDS, "report": report}
    return run_here(write_sweep(folder, **keys))


def rows(file):
    return rows_of([state_of(run) for run in plan(file)])


def half_interval(values):
    """Half of SciPy's 95 % interval of the mean of independent normal values with unknown spread."""
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values))
    return (high - low) / 2


def losses(learning_rate, power):
    return np.array([fake_task.loss(learning_rate, power, seed) for seed in SEEDS])


def test_means_and_spreads_are_those_of_numpy(tmp_path):
    found = rows(study(tmp_path))
    column, accuracy = columns_of(["test_loss", "test_accuracy"])
    assert [row.setting.labels for row in found] == [(name, f"power={p}") for name in VARIANTS for p in POWERS]
    expected_of = [(variant["learning_rate"], power) for variant in VARIANTS.values() for power in POWERS]
    for row, (lr, power) in zip(found, expected_of, strict=True):
        spread = Spread.of(row.values(column))
        assert spread.mean == pytest.approx(losses(lr, power).mean())
        assert spread.std == pytest.approx(losses(lr, power).std(ddof=1))
        expected = [100 * fake_task.accuracy(power, seed) for seed in SEEDS]
        assert list(row.values(accuracy)) == pytest.approx(expected)


def test_differences_are_taken_within_a_seed(tmp_path):
    file = study(tmp_path, baselines=["slow"])
    (column,) = columns_of(["test_loss"])
    pairs = pairs_of(rows(file), load_sweep(file).report)
    assert [(p.row.setting.labels, p.baseline.setting.labels) for p in pairs] == [
        (("fast", f"power={p}"), ("slow", f"power={p}")) for p in POWERS
    ]
    for pair, power in zip(pairs, POWERS, strict=True):
        ours, theirs = losses(0.3, power), losses(0.1, power)
        found = paired(pair, column)
        assert found.difference.mean == pytest.approx((ours - theirs).mean())
        assert found.difference.std == pytest.approx((ours - theirs).std(ddof=1), abs=1e-12)
        assert found.ratio == pytest.approx(ours.mean() / theirs.mean())
        assert (found.lower, found.higher) == (0, 3 if power else 0)
    # The seeds differ far more than the settings: without pairing nothing would be seen.
    assert losses(0.3, 4).std(ddof=1) > 2 * (losses(0.3, 4) - losses(0.1, 4)).mean()


def test_only_named_settings_are_compared_and_only_seeds_that_both_have(tmp_path):
    file = study(tmp_path, baselines={"power=4": "power=1"})
    missing = plan(file)[1]
    assert (missing.seed, missing.setting.labels) == (0, ("slow", "power=1"))
    (missing.folder / "summary.json").unlink()
    (column,) = columns_of(["test_loss"])
    pairs = pairs_of(rows(file), load_sweep(file).report)
    assert [pair.row.setting.labels for pair in pairs] == [("slow", "power=4"), ("fast", "power=4")]
    counts = [paired(pair, column).difference.count for pair in pairs]
    assert counts == [2, 3]
    found, ours, theirs = paired(pairs[0], column), losses(0.1, 4)[1:], losses(0.1, 1)[1:]
    assert found.difference.mean == pytest.approx((ours - theirs).mean())
    assert found.ratio == pytest.approx(ours.mean() / theirs.mean())


def test_a_baseline_of_zero_has_no_ratio(tmp_path):
    file = run_here(write_sweep(tmp_path, variants=VARIANTS, grid={"gossip.power": [0, 1]}, seeds=[0],
                                report={"baselines": ["power=0"]}))  # fmt: skip
    (column,) = columns_of(["test_loss"])
    found = [paired(pair, column) for pair in pairs_of(rows(file), load_sweep(file).report)]
    assert [str(pair) for pair in found] == ["+0.1, higher in 1 of 1", "+0.3, higher in 1 of 1"]


def test_a_difference_tells_in_how_many_seeds_it_has_the_sign_of_most():
    assert str(Paired(Spread(-0.25, 0.1, 3), 0.5, 2, 1)) == "-0.25 ± 0.10, × 0.5, lower in 2 of 3"
    assert str(Paired(Spread(0.25, 0.1, 3), 1.5, 1, 2)) == "+0.25 ± 0.10, × 1.5, higher in 2 of 3"
    assert str(Paired(Spread.of([]), math.nan, 0, 0)) == "–"


def test_a_bar_in_a_label_does_not_part_a_cell():
    assert markdown_table(["a|b"], [["c"]]).splitlines()[0] == r"| a\|b |"


def test_columns_read_summaries_and_metrics_at_a_place(tmp_path):
    file = run_here(write_sweep(tmp_path, seeds=[2]))
    power = BASE["gossip"]["power"]
    keys = ["curvature.lambda_1", "seconds", "none.such", "gossip/radius@max", "gossip/radius@2", "gossip/radius"]
    (row,) = rows(file)
    values = [row.values(column)[2] for column in columns_of(keys)]
    radii = [fake_task.radius(epoch, power, 2) for epoch in range(fake_task.EPOCHS)]
    assert values[:2] == [2.0 * BASE["learning_rate"], 1.5]
    assert math.isnan(values[2])
    assert values[3:] == [max(radii), radii[1], radii[-1]]


def test_only_finite_numbers_of_finished_runs_are_values(tmp_path):
    file = run_here(write_sweep(tmp_path, seeds=[2]))
    folder = plan(file)[0].folder
    log = folder / "metrics.jsonl"
    not_finite = [json.dumps({"step": step, "gossip/radius": math.nan}) + "\n" for step in (1, 13)]
    log.write_text(not_finite[0] + log.read_text() + not_finite[1])
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"diverged": True}))
    largest, last, flag = columns_of(["gossip/radius@max", "gossip/radius", "diverged"])
    (row,) = rows(file)
    power = BASE["gossip"]["power"]
    assert row.values(largest)[2] == max(fake_task.radius(epoch, power, 2) for epoch in range(fake_task.EPOCHS))
    assert math.isnan(row.values(last)[2])
    assert math.isnan(row.values(flag)[2])
    (folder / "summary.json").unlink()
    (row,) = rows(file)
    assert row.states[0].records
    assert math.isnan(row.values(largest)[2]), "a run under way is not a result"


@pytest.mark.parametrize("column", ["gossip/radius@first", "test_loss@max", "gossip/radius@0", "gossip/radius@-1"])
def test_a_place_that_is_none_is_refused(column):
    with pytest.raises(ValueError, match=f"columns: {column}: "):
        columns_of([column])


def test_the_written_report_holds_every_run_and_says_what_is_missing(tmp_path, capsys):
    file = study(tmp_path, baselines=["power=0"], columns=["test_loss", "test_accuracy", "bleu"])
    runs = plan(file)
    (runs[0].folder / "summary.json").unlink()
    summary = json.loads((runs[1].folder / "summary.json").read_text())
    (runs[1].folder / "config.yaml").write_text("learning_rate: 7\n")
    for part in sorted(runs[2].folder.iterdir()):
        part.unlink()
    assert main(["report", str(file), "--no-figures"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "runs" / "report.md").read_text() == out.removesuffix("\n")
    assert "15 of 18 runs finished" in out
    assert "Not measured by any finished run: BLEU" in out
    assert f"- 1 begun, but not finished: {runs[0].name}" in out
    assert f"- 1 not there: {runs[2].name}" in out
    assert f"left out: {runs[1].name} (" in out
    assert "learning_rate: 7 -> 0.1" in out
    with open(tmp_path / "runs" / "report.csv", newline="") as stream:
        lines = list(csv.DictReader(stream))
    by_run = {(line["setting"], line["seed"]): line for line in lines if line["kind"] == "run"}
    assert len(by_run) == len(runs)
    for run in runs[3:]:
        values = json.loads((run.folder / "summary.json").read_text())
        for key in ("test_loss", "test_accuracy"):  # as the run wrote it, not in percent
            assert float(by_run[run.setting.name, str(run.seed)][key]) == values[key]
    changed = by_run[runs[1].setting.name, str(runs[1].seed)]
    assert (changed["status"], changed["test_loss"]) == ("changed", "")
    assert summary["test_loss"] is not None
    means = {line["setting"]: float(line["test_loss"]) for line in lines if line["kind"] == "mean"}
    assert means["fast, power=4"] == pytest.approx(losses(0.3, 4).mean())
    assert means["slow, power=0"] == pytest.approx(losses(0.1, 0)[1:].mean())


def test_an_empty_sweep_gives_a_table_of_dashes_and_status_1(tmp_path, capsys):
    assert main(["report", str(write_sweep(tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "| base    | 0 of 1 | –" in out
    assert "No run is finished" in out
    assert "not there: base/seed_0" in out


def test_tables_show_two_digits_of_the_spread():
    assert str(Spread(0.25137, 0.0333, 5)) == "0.251 ± 0.033"
    assert str(Spread(82.1234, 1.26, 5)) == "82.1 ± 1.3"
    assert str(Spread(5123.4, 240.0, 5)) == "5123 ± 240"
    assert str(Spread(0.0009, 0.000034, 3)) == "0.000900 ± 0.000034"
    assert str(Spread(82.1234, 0.0, 3)) == "82.12 ± 0"
    assert str(Spread.of([math.nan])) == "–"


# ---- figures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that a test draws, in order."""
    made, create = [], drawing.new_figure

    def remember(*grid, **options):
        figure, axes = create(*grid, **options)
        made.append(figure)
        return figure, axes

    monkeypatch.setattr(drawing, "new_figure", remember)
    return made


def test_all_figures_with_data_are_written_and_no_other(tmp_path):
    file = study(tmp_path)
    assert main(["report", str(file)]) == 0
    names = {path.name for path in (tmp_path / "runs").glob("*.png")}
    wanted = ("radius", "curves", "curvature", "sensitivity_gossip.power")
    assert names == {f"{name}.png" for name in wanted}
    for name in names:
        image = Image.open(tmp_path / "runs" / name)
        assert image.width in (990, 1980)  # one or two columns of 3.3 inches at 300 dots per inch
        assert (tmp_path / "runs" / name).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert f"({name})" in (tmp_path / "runs" / "report.md").read_text()


def test_curves_are_means_over_seeds_at_the_ends_of_epochs(tmp_path, drawn):
    file = study(tmp_path, figures=["radius"])
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    _, radius = drawn[0].axes
    lines = {line.get_color(): list(line.get_ydata()) for line in radius.lines}
    assert len(lines) == len(VARIANTS) * len(POWERS)
    expected = [
        [np.mean([fake_task.radius(epoch, power, seed) for seed in SEEDS]) for epoch in range(fake_task.EPOCHS)]
        for _ in VARIANTS
        for power in POWERS
    ]
    assert [list(line.get_ydata()) for line in radius.lines] == expected
    assert list(radius.lines[0].get_xdata()) == [1.0, 2.0, 3.0]
    assert radius.get_yscale() == "log"
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == [f"{name}, power={power}" for name in VARIANTS for power in POWERS]
    assert drawn[0].legends[0].get_title().get_text().replace("\n", " ") == (
        "mean of 3 runs; band: 95 % confidence interval of the mean (Student's t)"
    )
    assert all(tick == int(tick) for tick in radius.get_xticks())
    assert drawn[0].get_suptitle().endswith("fake_task, dsgd_ac, base base, seeds 0, 1, 5")


def test_accuracies_are_drawn_in_per_cent(tmp_path, drawn):
    file = run_here(write_sweep(tmp_path, report={"figures": ["curves"]}))
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    assert list(drawn[0].axes[0].lines[0].get_ydata()) == pytest.approx([0, 10, 20])


def test_what_has_no_logarithm_is_not_drawn(tmp_path, drawn):
    file = run_here(write_sweep(tmp_path, variants=VARIANTS, seeds=[0], report={"figures": ["radius"]}))
    for run, without in zip(plan(file), (3, 1), strict=True):  # a radius of 0 throughout, and at the first epoch
        log = run.folder / "metrics.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        for record in records[:without]:
            record["gossip/radius"] = 0.0
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    _, radius = drawn[0].axes
    (line,) = radius.lines
    assert np.isnan(line.get_ydata()).tolist() == [True, False, False]
    assert " ".join(radius.get_title().split()) == (
        "not positive, so not on this axis: slow not positive, so not on this axis in 1 of 3 points: fast"
    )


def test_a_figure_of_half_a_sweep_says_so(tmp_path, drawn):
    file = run_here(
        write_sweep(tmp_path, variants=VARIANTS, seeds=SEEDS, report={"figures": ["curves", "sensitivity"]})
    )
    for run in plan(file):
        if run.setting.name == "fast" or run.seed == SEEDS[0]:
            (run.folder / "summary.json").unlink()
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    notes = drawn[0].axes[0].get_title().split("\n")
    assert notes == ["2 of 3 seeds: slow", "of runs that are not finished: fast", "identical: slow; fast"]


def test_a_reference_below_0_is_drawn_too(tmp_path, drawn):
    file = run_here(write_sweep(tmp_path, seeds=[0], report={"figures": ["curvature"]}))
    (run,) = plan(file)
    log = run.folder / "metrics.jsonl"
    records = [json.loads(line) | {"curvature/A": 0.2, "curvature/B": -0.1} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    (alignment,) = (axes for axes in drawn[0].axes if axes.get_ylabel().startswith("alignment A"))
    assert [set(line.get_ydata()) for line in alignment.lines] == [{0.2}, {-0.1}]
    assert alignment.get_yscale() == "linear"


def test_a_number_is_swept_where_it_takes_two_values_or_more(tmp_path):
    grid = {"learning_rate": [1, 2], "momentum": [0.9], "gossip.power": [1, "none"], "nesterov": [True, False]}
    sweep = load_sweep(write_sweep(tmp_path, grid=grid))
    assert drawing.swept_numbers(sweep) == {"learning_rate": [1.0, 2.0]}


def test_an_unfinished_run_does_not_bend_the_mean_of_the_others_but_is_drawn_alone(tmp_path):
    file = run_here(write_sweep(tmp_path, seeds=SEEDS))
    runs = plan(file)
    log = runs[0].folder / "metrics.jsonl"
    log.write_text(log.read_text()[: 1 + log.read_text().index("\n") + 20])  # the second line is cut short
    (runs[0].folder / "summary.json").unlink()
    (row,) = rows(file)
    power = BASE["gossip"]["power"]
    curve = curve_of(row, ["gossip/radius"])
    assert curve.epochs == [1.0, 2.0, 3.0]
    assert curve.mean == [np.mean([fake_task.radius(epoch, power, seed) for seed in SEEDS[1:]]) for epoch in range(3)]
    radii = [[fake_task.radius(epoch, power, seed) for seed in SEEDS[1:]] for epoch in range(3)]
    assert curve.low == pytest.approx([np.mean(values) - half_interval(values) for values in radii])
    assert curve.high == pytest.approx([np.mean(values) + half_interval(values) for values in radii])
    for run in runs[1:]:
        (run.folder / "summary.json").unlink()
    (row,) = rows(file)
    assert curve_of(row, ["gossip/radius"]).epochs == [1.0]
    assert curve_of(row, ["none"]) is None


def test_sensitivity_shows_mean_and_spread_at_every_value(tmp_path, drawn):
    file = study(tmp_path, figures=["sensitivity"])
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    by_label = {axes.get_ylabel(): axes for axes in drawn[0].axes}
    axes = by_label["test loss"]
    assert axes.get_xlabel() == "gossip.power"
    for container, variant in zip(axes.containers, VARIANTS.values(), strict=True):
        line, _, (bars,) = container
        assert list(line.get_xdata()) == POWERS
        assert list(line.get_ydata()) == pytest.approx(
            [losses(variant["learning_rate"], power).mean() for power in POWERS]
        )
        spans = [segment[1][1] - segment[0][1] for segment in bars.get_segments()]
        assert spans == pytest.approx([2 * half_interval(losses(variant["learning_rate"], power)) for power in POWERS])


def test_many_settings_are_spread_over_figures(tmp_path):
    grid = {"gossip.power": [1, 2], "learning_rate": [1, 2, 3]}
    file = run_here(write_sweep(tmp_path, variants=VARIANTS, grid=grid, report={"figures": ["curves"]}))
    written = drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    assert [path.name for path in written if path.suffix == ".png"] == [
        f"curves_power={power},learning_rate={learning_rate}.png" for power in (1, 2) for learning_rate in (1, 2, 3)
    ]


def test_only_the_columns_asked_for_are_compared(tmp_path, capsys):
    columns = ["test_loss", "test_accuracy", "gossip/radius@max"]
    file = study(tmp_path, columns=columns, baselines=["slow"], compare=["test_loss"], figures=[])
    assert main(["report", str(file)]) == 0
    means, _, comparison = capsys.readouterr().out.partition("## Paired differences")
    assert "test accuracy" in means
    assert "test loss" in comparison
    assert "test accuracy" not in comparison
    with pytest.raises(ValueError, match=r"compare must be one of test_loss; got 'radius'"):
        ReportConfig(columns=["test_loss"], compare=["radius"])


# ---- failed runs, and the paper's values


def fail(run, words):
    """Leave of a run what a failed one leaves."""
    (run.folder / "summary.json").unlink()
    write_record(run, status=1, seconds=1.0)
    (run.folder / "log.txt").write_text(
        f"error: at first\nerror: {words}\nelastic.ChildFailedError: \nended by the launcher\n"
    )


def test_a_failed_run_is_a_row_that_says_so(tmp_path, capsys):
    file = run_here(write_sweep(tmp_path, variants=VARIANTS, seeds=SEEDS, report={"columns": ["test_loss"]}))
    slow, fast = ([run for run in plan(file) if run.setting.name == name] for name in VARIANTS)
    for run in [slow[1], *fast]:
        fail(run, f"no memory in {run.name}")
    assert main(["report", str(file), "--no-figures"]) == 0
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    mean = f"{np.mean([fake_task.loss(0.1, 3, seed) for seed in (0, 5)]):.1f}"
    assert lines[2][:2] == ["slow", "2 of 3, 1 failed"]
    assert lines[2][2].startswith(mean)
    assert lines[3:] == [["slow", "seed 1", "failed"], ["fast", "0 of 3, 3 failed", "failed"]]
    for run in [slow[1], *fast]:
        assert f"- failed: {run.name} (error: no memory in {run.name})" in out


def test_a_finished_run_without_a_finite_value_does_not_hide(tmp_path, capsys):
    file = run_here(write_sweep(tmp_path, seeds=SEEDS, report={"columns": ["test_loss"]}))
    summary = plan(file)[1].folder / "summary.json"
    summary.write_text(summary.read_text().replace('"test_loss": 2.5', '"test_loss": NaN'))
    assert main(["report", str(file), "--no-figures"]) == 0
    assert "(2 of 3)" in capsys.readouterr().out


def test_published_values_stand_beside_ours_with_the_difference_and_a_verdict(tmp_path, capsys):
    # The slow means are 2, 2.1 and 2.4, the fast one 3.2; the seeds deviate by 2.65.
    paper = {
        "slow, power=0": {"test_loss": "2.31 ± 0.05"},
        "slow, power=1": {"test_loss": "7.5 ± 0.0"},
        "slow, power=4": {"test_loss": "7.6 ± 0.0"},
        "fast, power=4": {"test_loss": "2.0 ± 0.1", "seconds": 3},
    }
    report = {"columns": ["test_loss", "test_accuracy", "seconds"], "baselines": ["slow"]}
    file = write_sweep(
        tmp_path, variants=VARIANTS, grid={"gossip.power": POWERS}, seeds=SEEDS, report=report, paper=paper
    )
    for run in plan(run_here(file)):
        if run.setting.name == "slow, power=0":
            (run.folder / "summary.json").unlink()
    assert main(["report", str(file), "--no-figures"]) == 0
    beside = capsys.readouterr().out.partition("## Beside the paper")[2]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in beside.partition("### test loss")[2].partition("###")[0].splitlines()
        if line.startswith("|")
    ]
    assert table[0] == ["variant", "power", "runs", "ours", "paper", "difference", "within 2 sd"]
    assert table[2] == ["slow", "power=0", "0 of 3", "–", "2.31 ± 0.05", "–", "–"]
    assert 5.2 < 2 * losses(0.1, 1).std(ddof=1) + 0.05 < 5.4
    assert [row[5:] for row in table[3:]] == [["-5.4", "no"], ["-5.2", "yes"], ["+1.2", "yes"]]
    assert "### test accuracy" not in beside
    pair = next(line for line in beside.splitlines() if line.startswith("| fast, power=4 | slow, power=4"))
    assert "+0.8, × 1.333" in pair
    assert "-5.6, × 0.263" in pair
    with open(tmp_path / "runs" / "report.csv", newline="") as stream:
        lines = {(line["setting"], line["kind"]): line for line in csv.DictReader(stream)}
    assert lines["fast, power=4", "paper"] | {"test_loss": "2.0", "seconds": "180.0"} == lines["fast, power=4", "paper"]


@pytest.mark.parametrize(
    ("value", "ours", "is_within"),
    [
        ("1.00 ± 0.03", (1.07, 0.0), False),
        ("1.00 ± 0.03", (1.07, 0.02), True),
        ("1.00 ± 0.03", (1.06, math.nan), True),
        ("0.0006 ± 0.0000", (0.00064, 0.0), True),  # it may be 0.00064 in full
        ("0.0006 ± 0.0000", (0.00066, 0.0), False),
        (96, (96.4, math.nan), True),
    ],
)
def test_two_standard_deviations_are_of_the_difference_and_know_of_rounding(value, ours, is_within):
    theirs = published(value)
    assert (abs(ours[0] - theirs.mean) <= theirs.allowed(ours[1]) + 1e-12) == is_within


def test_minutes_are_the_seconds_of_the_summary(tmp_path):
    file = run_here(write_sweep(tmp_path, seeds=[0]))
    summary = plan(file)[0].folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"train_seconds": 90.0}))
    (minutes,) = columns_of(["train_minutes"])
    (row,) = rows(file)
    assert list(row.values(minutes)) == [1.5]
    write_csv(tmp_path / "report.csv", [row], [minutes], {"base": {"train_minutes": published("2.0 ± 0.1")}})
    lines = list(csv.DictReader((tmp_path / "report.csv").read_text().splitlines()))
    written = {line["kind"]: float(line["train_seconds"]) for line in lines if line["train_seconds"]}
    assert (written["run"], written["paper"], written["paper_std"]) == (90.0, 120.0, 6.0)


def test_a_published_baseline_of_0_has_no_ratio(tmp_path):
    paper = {"slow": {"test_loss": "0.0 ± 0.0"}, "fast": {"test_loss": "0.5"}}
    report = {"columns": ["test_loss"], "baselines": ["slow"]}
    file = run_here(write_sweep(tmp_path, variants=VARIANTS, settings={"gossip.power": 0}, report=report, paper=paper))
    text = report_text(load_sweep(file), rows(file), columns_of(["test_loss"]))
    assert "| fast    | slow     | test loss | +0   | +0.5  |" in text  # ours is 0, too: the loss is the seed


def test_magnitudes_of_a_negative_curve_keep_its_interval():
    curve = Curve([1.0, 2.0], [-3.0, 2.0], [-4.0, -1.0], [-2.0, 5.0], seeds=3, finished=True).magnitude()
    assert (curve.mean, curve.low, curve.high) == ([3.0, 2.0], [2.0, -1.0], [4.0, 5.0])


@pytest.mark.parametrize(
    ("values", "scale"),
    [([10, 50, 75, 100, 150, 175], "linear"), ([0.1, 0.3, 0.5, 1, 2], "log"), ([0, 1, 5], "linear")],
)
def test_the_scale_of_a_swept_number_parts_its_values_most(tmp_path, drawn, values, scale):
    file = run_here(write_sweep(tmp_path, grid={"gossip.power": values}, report={"figures": ["sensitivity"]}))
    drawing.draw_figures(load_sweep(file), rows(file), tmp_path)
    assert {axes.get_xscale() for axes in drawn[0].axes if axes.get_visible()} == {scale}
    assert list(drawn[0].axes[0].get_xticks()) == values
