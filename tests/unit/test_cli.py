"""The dsgdac command: what it prints, and how it ends."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from dsgdac_accel import AdaptiveConsensus, Topology, build_topology
from dsgdac_accel.cli import main
from dsgdac_accel.topology import TOPOLOGIES, steps_to_mix
from dsgdac_accel.version import __version__
from tasks.studies.run_commands import find_task

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_task.py")
COMMANDS = ("sweep", "report", "show", "plot", "curvature", "topology", "schedule", "scaling", "doctor")


def run(capsys, *words):
    """Exit status, standard output and error of a command."""
    try:
        status = main(list(words))
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def write_run(folder, summary=None, **config):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"batch_size": 8} | config))
    records = [{"step": 1, "epoch": 0, "train/loss": 2.0}, {"step": 2, "epoch": 1, "test/accuracy": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_version_and_help(capsys):
    assert run(capsys, "--version") == (0, f"dsgdac_accel {__version__}\n", "")
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(f"\n    {command}" in out for command in COMMANDS)
    for command in COMMANDS:
        status, out, _ = run(capsys, command, "--help")
        assert (status, "example" in out) == (0, True)


def test_nothing_asked_for_prints_the_help_and_is_a_mistake(capsys):
    status, out, _ = run(capsys)
    assert status == 2
    assert "usage: dsgdac" in out


@pytest.mark.parametrize("words", [["topologyy"], ["topology", "ring", "x"], ["sweep"], ["show", "a", "--no"]])
def test_words_that_are_not_understood_end_with_status_2(capsys, words):
    status, _, error = run(capsys, *words)
    assert status == 2
    assert "usage: " in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedule", "--epochs", "3", "--epochs=4"], "--epochs is given twice. Keep one."),
        (["schedule", "--epoch", "3"], "unrecognized arguments: --epoch 3. Did you mean --epochs?"),
        (["schedule", "--rate", "cosine"], "unrecognized arguments: --rate cosine. Did you mean --lr_scheduler_type?"),
        (["schedule", "--lr=cosine"], "Did you mean --lr_scheduler_type?"),
        (["schedule", "--max-rate", "run"], "Did you mean --max_lr?"),
        (["schedule", "--num_train_epochs", "9"], "Did you mean --epochs?"),
        (["sweep", "a.yaml", "--print_commands"], "Did you mean --print-commands?"),
        (["scaling", "--bits", "8", "--bits", "8"], "--bits is given twice"),
        (["report", "a.yaml", "--out", "folder"], "unrecognized arguments: --out folder. Did you mean --output?"),
        (["doctor", "--timeout", "1e300"], "--timeout must be a number > 0 and <= 1e+09; got 1e+300"),
    ],
)
def test_an_option_has_its_whole_name_and_stands_once(capsys, words, message):
    status, out, error = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in error


def test_what_may_be_repeated_can_be(capsys, tmp_path):
    (tmp_path / "base.yaml").write_text("a: 1\n")
    (tmp_path / "task.py").touch()
    (tmp_path / "sweep.yaml").write_text("{task: task.py, base: base.yaml, output_dir: out, seeds: [0, 1, 2]}")
    only = ["--only", "base/seed_0", "--only", "base/seed_2", "--set", "a=2", "--set", "b=3"]
    status, out, _ = run(capsys, "sweep", str(tmp_path / "sweep.yaml"), "--list", *only)
    assert (status, out.split()) == (0, ["missing", "base/seed_0", "missing", "base/seed_2"])


@pytest.mark.parametrize("words", [["topology", "ring", "17", "--matrices"], ["schedule", "--plot", "/proc/no/a.png"]])
def test_what_cannot_be_done_is_said_before_anything_is_printed(capsys, words):
    status, out, error = run(capsys, *words)
    assert (status, out) == (2, "")
    assert error.startswith("error: --")


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dsgdac", "topology", "ringg", "4"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("dsgdac_accel", run_name="__main__", alter_sys=False)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: topology must be one of")
    assert "Did you mean 'ring'?" in error


def test_building_the_parser_imports_nothing_slow():
    # In a process of its own. The entry points of the tasks are part of the parser.
    code = (
        "import sys; from dsgdac_accel.cli import build_parser; parser, commands = build_parser(); "
        "parser.format_help(); assert 'sweep' in commands; "
        "assert not {'torch', 'numpy', 'pandas', 'yaml', 'ruamel', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- topology


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-9])
def test_steps_to_mix_is_the_first_step_within_the_tolerance(name, workers, tolerance):
    if name == "one_peer_exponential" and workers & (workers - 1):
        pytest.skip("needs a power of two")
    topology = build_topology(name, workers)
    product, steps = np.eye(workers), 0
    while np.linalg.norm(product - 1 / workers, ord=2) > tolerance:
        product, steps = topology.rounds[steps % topology.period] @ product, steps + 1
    assert steps_to_mix(topology, tolerance) == steps


def test_topology_prints_weights_and_numbers(capsys):
    status, out, _ = run(capsys, "topology", "one_peer_ring", "8")
    assert status == 0
    gap = build_topology("one_peer_ring", 8).spectral_gap()
    assert f"spectral gap of a period   {gap:.6g}\n" in out
    assert "steps to mix exactly       never" in out
    assert "worker 0   own 0.5   7: 0.5" in out.split("round 1")[1]
    status, out, _ = run(capsys, "topology", "base_graph", "6")
    assert f"exactly       {steps_to_mix(build_topology('base_graph', 6), 1e-9)}\n" in out
    status, out, _ = run(capsys, "topology", "ring", "4", "--matrices")
    assert "  0.3333 0.3333      . 0.3333\n" in out


def test_topologies_are_listed_and_refused_as_the_library_does(capsys):
    status, out, _ = run(capsys, "topology")
    assert [line.split()[0] for line in out.splitlines()] == list(TOPOLOGIES)
    status, _, error = run(capsys, "topology", "one_peer_exponential", "6")
    assert (status, error.count("\n")) == (2, 1)
    assert "a power of two; got 6. Use 'base_graph'" in error
    assert run(capsys, "topology", "ring")[0] == 2


@pytest.mark.parametrize("words", [["one_peer_ring", "1000000000"], ["one_peer_ring", "1001"], ["complete", "5000"]])
@pytest.mark.timeout(20)
def test_too_many_workers_are_refused_before_memory_is_allocated(capsys, words):
    status, out, error = run(capsys, "topology", *words)
    assert (status, out) == (2, "")
    assert "of mixing matrices; the limit is 0.067 GB. Use fewer workers." in error


def test_a_topology_that_never_mixes_has_no_number_of_steps():
    with pytest.raises(ValueError, match="never mixes"):
        steps_to_mix(Topology.from_matrices([[[0, 1], [1, 0]]]), 1e-3)


# ---- schedule


def test_schedule_prints_what_the_library_computes(capsys, tmp_path):
    file = tmp_path / "plots" / "gamma.png"
    words = ["--power", "0,2", "--epochs", "20", "--warmup", "2", "--start", "4", "--plot", str(file)]
    status, out, _ = run(capsys, "schedule", *words)
    assert status == 0
    assert file.is_file()
    rows = {int(line.split()[0]): list(map(float, line.split()[1:])) for line in out.splitlines()[1:22]}
    assert rows[2][0] == pytest.approx(1, abs=1e-3)  # the end of the warm-up
    assert rows[11][0] == pytest.approx(0.5, abs=1e-2)  # half of the decay
    largest = rows[4][0]
    for epoch, (rate, plain, squared) in rows.items():
        assert plain == 1
        expected = 1 if epoch < 4 else AdaptiveConsensus(power=2, max_lr=largest).gamma(0, min(rate, largest))
        assert squared == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "0"],
        ["--power", "-1"],
        ["--start", "300"],
        ["--warmup", "-2"],
        ["--warmup", "nan"],
        ["--epochs", "4", "--warmup", "50"],
        ["--warmup", "1e308"],
        ["--epochs", "1000000000"],
        ["--epochs", "100000", "--power", "1,2"],
        ["--power", "a"],
        ["--lines", "0"],
        ["--plot", "."],
    ],
)
def test_a_schedule_that_cannot_be_is_refused(capsys, words):
    status, _, error = run(capsys, "schedule", *words)
    assert status == 2
    assert "error: " in error


def test_a_short_run_has_a_short_warm_up(capsys):
    status, out, _ = run(capsys, "schedule", "--epochs", "4")
    assert status == 0
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["0.0500", "0.8946"]  # 5 % of the run are 20 steps


def test_the_scheduler_of_the_translation_task(capsys):
    words = ["--lr_scheduler_type", "inverse_sqrt", "--epochs", "16", "--warmup", "4", "--max_lr", "run"]
    status, out, _ = run(capsys, "schedule", *words)
    assert status == 0
    rows = {int(line.split()[0]): list(map(float, line.split()[1:])) for line in out.splitlines()[1:18]}
    assert rows[16] == pytest.approx([0.5, 0.125], abs=1e-3)


# ---- runs


def test_show_prints_summaries_side_by_side(capsys, tmp_path):
    one = write_run(tmp_path / "one", {"algorithm": "dsgd", "test_loss": 0.123456789, "curvature": {"lambda_1": 2.5}})
    two = write_run(tmp_path / "two", {"algorithm": "sgd", "test_loss": None, "seed": 3})
    status, out, _ = run(capsys, "show", str(one))
    assert status == 0
    assert [line.split() for line in out.splitlines()] == [
        ["algorithm", "dsgd"], ["test_loss", "0.12346"], ["curvature.lambda_1", "2.5"],
    ]  # fmt: skip
    _, out, _ = run(capsys, "show", str(one), str(two))
    assert [line.split() for line in out.splitlines()] == [
        [str(one), str(two)], ["algorithm", "dsgd", "sgd"], ["seed", "–", "3"], ["test_loss", "0.12346", "–"],
        ["curvature.lambda_1", "2.5", "–"],
    ]  # fmt: skip


def test_a_folder_without_a_summary_says_what_it_is(capsys, tmp_path):
    begun = write_run(tmp_path / "begun")
    assert "the run is not finished" in run(capsys, "show", str(begun))[2]
    assert "it is not the output folder of a run" in run(capsys, "show", str(tmp_path))[2]
    (begun / "summary.json").write_text("{")
    assert run(capsys, "show", str(begun))[0] == 2


def test_plot_draws_one_run_or_compares_several(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    status, out, _ = run(capsys, "plot", str(one))
    assert (status, out.splitlines()) == (0, [str(one / "loss.png"), str(one / "accuracy.png")])
    assert run(capsys, "plot", str(one), str(two))[1] == "comparison.png\n"
    assert (tmp_path / "comparison.png").is_file()
    status, _, error = run(capsys, "plot", str(tmp_path))
    assert status == 2
    assert "metrics.jsonl must exist" in error


def test_curvature_is_the_tasks_with_its_exit_status(tmp_path, capfd):
    folder = write_run(tmp_path / "run")
    assert main(["curvature", str(folder), "--task", str(FAKE), "--probes", "3"]) == 7
    assert capfd.readouterr().out.split() == ["curvature", "asked", "for", str(folder), "--probes", "3"]


def test_the_task_of_a_run_is_found_by_its_configuration(capsys, tmp_path):
    assert find_task(write_run(tmp_path / "images")) == ROOT / "tasks" / "cifar.py"
    assert find_task(write_run(tmp_path / "text", batch_tokens=9)) == ROOT / "tasks" / "wmt14.py"
    assert "it is not the output folder of a run" in run(capsys, "curvature", str(tmp_path / "none"))[2]
    assert run(capsys, "curvature", str(tmp_path / "images"), "--task", "none.py")[0] == 2
