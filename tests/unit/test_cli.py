"""The dsgdac command: what it prints, and how it ends."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsgdac_accel import cli
from dsgdac_accel.cli import REMOVED, TASK_COMMANDS, main
from dsgdac_accel.version import __version__
from tasks.studies.run_commands import find_task

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_task.py")
COMMANDS = (*TASK_COMMANDS, "doctor")


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


@pytest.mark.parametrize(
    ("word", "advice"), [("reprt", "Did you mean 'report'?"), ("zebra", "Commands: doctor, sweep")]
)
def test_a_word_that_is_no_command_gets_a_suggestion_or_the_list(capsys, word, advice):
    status, _, error = run(capsys, word)
    assert status == 2
    assert f"no command '{word}'. {advice}" in error


@pytest.mark.parametrize("words", [["sweepp"], ["show"], ["sweep"], ["show", "a", "--no"]])
def test_words_that_are_not_understood_end_with_status_2(capsys, words):
    status, _, error = run(capsys, *words)
    assert status == 2
    assert "usage: " in error


@pytest.mark.parametrize("command", REMOVED)
def test_a_removed_command_names_the_way_out(capsys, command):
    status, out, error = run(capsys, command, "--x", "1")
    assert (status, out) == (2, "")
    assert f"dsgdac {command} was removed. {REMOVED[command]}" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--timeout", "3", "--timeout=4"], "--timeout is given twice. Keep one."),
        (["sweep", "a.yaml", "--job", "3"], "unrecognized arguments: --job 3. Did you mean --jobs?"),
        (["sweep", "a.yaml", "--print_commands"], "Did you mean --print-commands?"),
        (["doctor", "--topology", "ring", "--topology", "grid"], "--topology is given twice"),
        (["report", "a.yaml", "--out", "folder"], "unrecognized arguments: --out folder. Did you mean --output?"),
        (["report", "a.yaml", "--output-dir=folder"], "Did you mean --output?"),
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


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dsgdac", "doctor", "--topology", "ringg"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("dsgdac_accel", run_name="__main__", alter_sys=False)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: topology must be one of")
    assert "Did you mean 'ring'?" in error


def test_commands_of_the_tasks_send_users_of_a_wheel_to_a_clone(monkeypatch, capsys):
    monkeypatch.setattr(cli, "HAS_TASKS", False)
    for command in TASK_COMMANDS:
        status, out, error = run(capsys, command, "FILE")
        assert (status, out) == (2, "")
        assert f"dsgdac {command} needs the tasks" in error
        assert "clone" in error
    assert "sweep" not in run(capsys, "--help")[1].partition("commands:")[2]


def test_building_the_parser_imports_nothing_slow():
    # In a process of its own. The commands of the tasks are part of the parser.
    code = (
        "import sys; from dsgdac_accel.cli import build_parser; parser, commands = build_parser(); "
        "parser.format_help(); assert 'sweep' in commands; "
        "assert not {'torch', 'numpy', 'pandas', 'yaml', 'ruamel', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
