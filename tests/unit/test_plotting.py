"""Plots: which files appear, what their lines show, and what is refused."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from tasks.common import plotting
from tasks.common.output_dir import OutputDir
from tasks.common.plotting import (
    add_legend,
    compare_runs,
    new_figure,
    plot_run,
    read_metrics,
    run_labels,
    series,
    set_logarithmic,
)

RECORDS = [
    {"step": 1, "epoch": 0.1, "gossip/lr": 0.1, "gossip/gamma": 1.0, "train/loss": 2.0, "unknown": [1]},
    {"step": 2, "gossip/radius": 0.0, "gossip/neighbor_disagreement": 0.5, "train/loss": None},
    {"step": 3, "gossip/radius": 0.7, "test/loss": 1.5, "test/accuracy": 0.25},
]


def write_run(folder, records=RECORDS, algorithm=None, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + tail)
    if algorithm is not None:
        (folder / "summary.json").write_text(json.dumps({"algorithm": algorithm}))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures that a test draws, in order."""
    figures, create = [], plotting.new_figure

    def remember(*grid):
        figures.append(create(*grid)[0])
        return figures[-1], list(figures[-1].axes)

    monkeypatch.setattr(plotting, "new_figure", remember)
    return figures


def lines_of(figure):
    return {line.get_label(): list(line.get_ydata()) for axes in figure.axes for line in axes.lines}


def test_a_run_gives_the_plots_of_what_it_logged(tmp_path):
    written = plot_run(write_run(tmp_path))
    assert [path.name for path in written] == ["lr_gamma.png", "consensus.png", "loss.png", "accuracy.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(path.name for path in written)
    for path in written:
        width, height = Image.open(path).size
        assert width > height > 500


def test_translation_runs_show_bleu(tmp_path):
    assert [path.name for path in plot_run(write_run(tmp_path, [{"step": 5, "test/bleu": 27.3}]))] == ["bleu.png"]


def test_a_run_that_logged_nothing_gives_no_plot(tmp_path):
    assert plot_run(write_run(tmp_path, [])) == []
    assert plot_run(write_run(tmp_path, [{"step": 1, "other": 1.0}])) == []


def test_lines_show_the_logged_values(tmp_path, drawn):
    plot_run(write_run(tmp_path))
    lr_gamma, consensus, loss, accuracy = (lines_of(figure) for figure in drawn)
    assert lr_gamma == {"learning rate": [0.1], "gamma": [1.0]}
    # A radius of 0 cannot be shown on a logarithmic axis.
    assert math.isnan(consensus["consensus radius"][0])
    assert consensus["consensus radius"][1] == 0.7
    assert math.isnan(loss["train (workers, smoothed)"][1])
    assert loss["test (deployed model)"] == [1.5]
    assert accuracy == {"test accuracy": [25.0]}
    assert drawn[1].axes[0].get_yscale() == "log"
    assert all(axes.get_ylabel() for figure in drawn for axes in figure.axes)


def test_few_points_are_marked_and_an_axis_without_lines_is_hidden(tmp_path, drawn):
    for count in (1, 31):
        plot_run(write_run(tmp_path, [{"step": step, "gossip/lr": 0.1} for step in range(count)]))
    assert [figure.axes[0].lines[0].get_marker() for figure in drawn] == ["o", "None"]
    assert [[axes.get_visible() for axes in figure.axes] for figure in drawn] == [[True, False]] * 2


@pytest.mark.parametrize("radii", [[0.0, 0.0], [None, None]])
def test_without_a_positive_distance_the_axis_stays_linear(tmp_path, drawn, radii):
    plot_run(write_run(tmp_path, [{"step": step, "gossip/radius": radius} for step, radius in enumerate(radii)]))
    assert drawn[0].axes[0].get_yscale() == "linear"


def test_diverged_runs_can_be_plotted(tmp_path):
    keys = ("gossip/lr", "gossip/gamma", "gossip/radius", "train/loss", "test/accuracy")
    records = [{"step": step} | dict.fromkeys(keys, value) for step, value in enumerate([None, math.nan, math.inf])]
    assert len(plot_run(write_run(tmp_path, records))) == 4


def test_a_step_logged_again_counts_once_and_steps_are_ordered():
    records = [{"step": 3, "x": 1.0}, {"step": 1, "x": 2.0}, {"step": 3, "x": 4.0}, {"x": 9.0}]
    assert series(records, "x") == ([1, 3], [2.0, 4.0])


def test_a_measurement_that_is_repeated_counts_at_its_own_step():
    records = [{"step": 4, "x": 1.0}, {"step": 6, "x": 2.0, "x_step": 5}]
    assert series(records, "x") == ([4, 5], [1.0, 2.0])


@pytest.mark.parametrize("tail", ['{"step": 4, "train/lo', '{"step": 4, "tr{"step": 4}\n', "17\n"])
def test_a_truncated_line_is_skipped_with_a_warning(tmp_path, tail):
    folder = write_run(tmp_path, tail=tail)
    with pytest.warns(UserWarning, match="line 4 is truncated"):
        assert read_metrics(folder / "metrics.jsonl") == RECORDS


def test_bytes_that_are_no_text_spoil_their_line_only(tmp_path):
    file = write_run(tmp_path) / "metrics.jsonl"
    file.write_bytes(b"\xff\x00\n" + file.read_bytes())
    with pytest.warns(UserWarning, match="line 1 is truncated or not a record"):
        assert read_metrics(file) == RECORDS


def test_blank_lines_are_no_records(tmp_path, recwarn):
    assert read_metrics(write_run(tmp_path, tail="\n\n") / "metrics.jsonl") == RECORDS
    assert not recwarn


def test_runs_side_by_side(tmp_path, drawn):
    folders = [write_run(tmp_path / name, algorithm=name) for name in ("sgd", "dsgd", "dsgd_ac")]
    output = compare_runs(folders, tmp_path / "plots" / "compare.png")
    assert Image.open(output).size[0] > 1000
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["sgd", "dsgd", "dsgd_ac"]
    # Rates left and gammas right, then three more panels.
    assert [len(axes.lines) for axes in figure.axes] == [3, 6, 6, 3, 3]
    assert len({line.get_color() for line in figure.axes[0].lines}) == 3


def test_more_runs_than_colors_and_their_bleu_side_by_side(tmp_path, drawn):
    runs = [write_run(tmp_path / str(number), [{"step": 1, "test/bleu": float(number)}]) for number in range(9)]
    compare_runs(runs, tmp_path / "compare.png")
    bleu = next(axes for axes in drawn[0].axes if "BLEU" in axes.get_title())
    assert [list(line.get_ydata()) for line in bleu.lines] == [[float(number)] for number in range(9)]
    assert len(drawn[0].legends[0].get_texts()) == 9


def test_a_panel_that_no_run_logged_says_so(tmp_path, drawn):
    compare_runs([write_run(tmp_path / "a", [{"step": 1, "train/loss": 1.0}])], tmp_path / "compare.png")
    texts = [[text.get_text() for text in axes.texts] for axes in drawn[0].axes]
    assert texts.count(["not logged"]) == 3


def test_labels_tell_runs_apart(tmp_path):
    folders = [write_run(tmp_path / name, algorithm="dsgd") for name in ("seed0", "seed1")]
    folders += [write_run(tmp_path / "first", algorithm="sgd"), write_run(tmp_path / "unfinished")]
    assert run_labels(folders) == ["dsgd (seed0)", "dsgd (seed1)", "sgd", "unfinished"]


def test_labels_of_runs_of_a_sweep_say_which_setting_they_are(tmp_path):
    runs = [write_run(tmp_path / setting / "seed_0", algorithm="dsgd_ac") for setting in ("power=2", "power=3")]
    assert run_labels(runs) == ["dsgd_ac (power=2/seed_0)", "dsgd_ac (power=3/seed_0)"]
    assert run_labels([runs[0], runs[0]]) == ["dsgd_ac (seed_0)"] * 2  # the same run


@pytest.mark.parametrize("summary", ["", "{", "[1]", '{"algorithm": 3}', "\udcff"])
def test_a_summary_that_names_no_algorithm_is_as_none(tmp_path, summary, drawn):
    run = write_run(tmp_path / "odd")
    (run / "summary.json").write_bytes(summary.encode(errors="surrogateescape"))
    compare_runs([run, write_run(tmp_path / "b", algorithm="dsgd")], tmp_path / "both.png")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "odd" if "algorithm" in summary else "odd, unfinished, step 3",
        "dsgd",
    ]


def test_what_is_no_number_is_not_drawn(tmp_path, drawn):
    odd = [{"step": step, "train/loss": 9.0} for step in ("1", None, [2], {}, True, math.nan, 10**400)]
    odd += [{"step": step, "train/loss": loss} for step, loss in enumerate(["low", [1.0], {}, True, 10**400, 0.5])]
    run = write_run(tmp_path, odd, tail="[" * 100_000 + "\n")
    with pytest.warns(UserWarning, match="line 14 is truncated or not a record"):
        plot_run(run)
    (losses,) = lines_of(drawn[0]).values()
    assert losses[-1] == 0.5
    assert all(math.isnan(loss) for loss in losses[:-1])
    assert len(losses) == 6


def test_only_a_newline_ends_a_record(tmp_path):
    records = [{"step": 1, "note": "a\u2028b\x85c"}, {"step": 2}]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\r\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    assert read_metrics(tmp_path / "metrics.jsonl") == records


@pytest.mark.parametrize("name", ["plot", "plot.jpg", "."])
def test_a_comparison_is_a_png_file(tmp_path, name):
    with pytest.raises(ValueError, match=r"output must be a file that ends in \.png; got"):
        compare_runs([write_run(tmp_path)], tmp_path / name)


def test_what_cannot_be_plotted_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl must exist"):
        plot_run(tmp_path)
    with pytest.raises(ValueError, match="at least one output_dir"):
        compare_runs([], tmp_path / "compare.png")
    with pytest.raises(ValueError, match=r"found none of gossip/lr, "):
        compare_runs([write_run(tmp_path / "empty", [])], tmp_path / "compare.png")


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install dsgdac-accel\[tasks\]"):
        plot_run(write_run(tmp_path))


def test_a_run_without_matplotlib_keeps_its_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    OutputDir.write_summary(SimpleNamespace(folder=write_run(tmp_path)), {"steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    assert "no plots: Plots need matplotlib" in capsys.readouterr().err


def test_neither_import_nor_plot_touches_pyplot(tmp_path):
    code = (
        "import sys; from tasks.common.plotting import plot_run; assert 'matplotlib' not in sys.modules; "
        f"plot_run({str(write_run(tmp_path))!r}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("low", "high"), [(2e-4, 3.0), (0.7, 6.0), (3.1, 3.9), (0.02, 0.9)])
def test_a_logarithmic_axis_has_ticks_that_can_be_read(low, high):
    figure, (axes,) = new_figure()
    axes.plot([0, 1], [low, high])
    set_logarithmic(axes)
    figure.draw_without_rendering()
    bottom, top = axes.get_ylim()
    labels = [
        label.get_text()
        for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        if bottom <= tick <= top
    ]
    assert len([label for label in labels if label]) >= 3
    assert not any("times" in label for label in labels)
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))


def test_tasks_with_scores_of_their_own_are_all_shown(tmp_path, drawn):
    write_run(tmp_path / "a", [{"step": step, "test/accuracy": 0.5, "test/loss": 1.0} for step in (1, 2)])
    write_run(tmp_path / "b", [{"step": step, "validation/bleu": 20.0, "validation/loss": 1.0} for step in (1, 2)])
    compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "c.png")
    titles = [axes.get_title() for axes in drawn[-1].axes if axes.get_visible()]
    assert "accuracy of the deployed model\ntest accuracy not logged: b" in titles
    assert "BLEU of the deployed model\ntest BLEU not logged: a" in titles
    assert "loss: test or validation (solid), smoothed train (dashed)" in [title.split("\n")[0] for title in titles]


@pytest.mark.parametrize("columns", [1, 2])
def test_a_legend_of_long_names_stays_inside_the_figure(columns):
    figure, axes = new_figure(1, columns)
    lines = [axes[0].plot([0, 1], [0, number])[0] for number in range(7)]
    add_legend(figure, lines, [f"a setting with a long name, power={number}" for number in range(7)], "a caption")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert box.y1 < min(panel.get_tightbbox().y0 for panel in axes)
    assert legend.get_title().get_text() == "a caption"


FACTS = {"algorithm": "dsgd_ac", "workers": 8, "topology": "ring", "seed": 3}
CONFIG = "algorithm: dsgd_ac\ndata: {name: digits}\nseed: 3\n"


@pytest.mark.parametrize(
    ("folder", "summary", "workers", "title"),
    [
        ("ours", FACTS, [8], "ours: dsgd_ac, digits, 8 workers, ring, seed 3"),
        ("ours", FACTS, [9, 8], "ours: dsgd_ac, digits, 9 workers, 8 at the end, ring, seed 3"),
        ("half", None, [1], "half: dsgd_ac, digits, 1 worker, seed 3, unfinished, step 3"),
        ("$x_{$", FACTS | {"seed": 1}, [8], r"\$x_{\$: dsgd_ac, digits, 8 workers, ring, seed 1"),
    ],
)
def test_the_title_says_which_run_it_is(tmp_path, drawn, folder, summary, workers, title):
    records = [*RECORDS, *({"step": 3, "workers": count} for count in workers)]
    run = write_run(tmp_path / folder, records)
    (run / "config.yaml").write_text(CONFIG)
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    plot_run(run)
    assert {figure.get_suptitle().replace("\n", "") for figure in drawn} == {title}


def test_a_title_of_a_comparison_has_what_the_runs_share_and_the_legend_what_they_do_not(tmp_path, drawn):
    runs = []
    for name, workers in (("a", 1), ("_b", 8)):
        runs.append(write_run(tmp_path / name))
        (runs[-1] / "summary.json").write_text(json.dumps(FACTS | {"workers": workers}))
    compare_runs(runs, tmp_path / "c.png")
    assert drawn[0].get_suptitle() == "2 runs, dsgd_ac, ring, seed 3"
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["dsgd_ac (a), 1 worker", "dsgd_ac (_b), 8 workers"]


def test_nothing_is_missing_without_a_note(tmp_path, drawn):
    records = [{"step": step, "gossip/radius": radius} for step, radius in ((1, 0.0), (2, 0.5), (3, 0.5))]
    records += [{"step": step, "train/loss": loss} for step, loss in ((1, 1.0), (2, None))]
    plot_run(write_run(tmp_path / "alone", records))
    consensus, loss = (figure.axes[0].get_title().split("\n")[1:] for figure in drawn)
    assert set(consensus) == {
        "neighbor disagreement not logged",
        "consensus radius not positive, so not on this axis in 1 of 3 points",
    }
    assert set(loss) == {"test loss not logged", "training loss not finite in 1 of 2 points"}
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["train (workers, smoothed)"]


def test_a_run_that_a_panel_cannot_show_apart_is_named(tmp_path, drawn):
    zero = [{"step": step, "gossip/radius": 0.0, "train/loss": 1.0} for step in (1, 2)]
    positive = [{"step": step, "gossip/radius": 0.5, "train/loss": 1.0} for step in (1, 2)]
    runs = [write_run(tmp_path / "a", zero, "sgd"), write_run(tmp_path / "b", positive, "dsgd")]
    compare_runs(runs, tmp_path / "c.png")
    titles = [axes.get_title().split("\n") for axes in drawn[0].axes]
    (consensus,) = (title for title in titles if title[0].startswith("consensus radius"))
    assert "consensus radius not positive, so not on this axis: sgd" in consensus
    (loss,) = (title for title in titles if title[0].startswith("loss"))
    assert "training loss identical: sgd; dsgd" in loss


@pytest.mark.parametrize("steps", [[1], [43], [43, 44], range(100)])
def test_ticks_of_steps_are_whole_and_begin_at_0(tmp_path, drawn, steps):
    plot_run(write_run(tmp_path, [{"step": step, "train/loss": 1.0} for step in steps]))
    (axes,) = drawn[0].axes
    assert axes.get_xlim()[0] <= 0
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.get_xlim()[1] > max(steps)
