"""Launching a sweep: what is skipped, what goes on after a failure, and what an interrupt leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsgdac_accel.cli import main
from tasks.studies.plan import planned_runs
from tasks.studies.runner import GRACE_SECONDS, duration
from tasks.studies.state import LOG, RECORD, state_of, write_record
from tests.unit.test_sweep import load_sweep, plan, real_sweep, write_sweep

VARIANTS = {"dsgd": {"gossip.power": 0}, "ours": {}}


def starts(run):
    file = run.folder / "starts.txt"
    return len(file.read_text().splitlines()) if file.exists() else 0


def statuses(file):
    return [state_of(run).status for run in plan(file)]


def test_finished_runs_are_skipped_and_the_rest_is_launched(tmp_path, capsys):
    file = write_sweep(tmp_path, variants=VARIANTS, seeds=[0, 1])
    assert statuses(file) == ["missing"] * 4
    assert main(["sweep", str(file), "--only", "dsgd"]) == 0
    assert statuses(file) == ["finished", "missing", "finished", "missing"]
    assert main(["sweep", str(file)]) == 0
    assert [starts(run) for run in plan(file)] == [1, 1, 1, 1]
    out = capsys.readouterr().out
    assert "2 of 4 runs are finished already" in out
    assert "[1/2] ours/seed_0 finished in" in out
    assert " left" in out


def test_a_failed_run_does_not_stop_the_others_and_is_named_with_the_end_of_its_log(tmp_path, capsys):
    file = write_sweep(tmp_path, variants={"bad": {"behavior": "fail"}, **VARIANTS})
    assert main(["sweep", str(file)]) == 1
    assert statuses(file) == ["failed", "finished", "finished"]
    captured = capsys.readouterr()
    assert "[1/3] bad/seed_0 FAILED (exit status 1)" in captured.out
    assert "bad/seed_0 failed (exit status 1); the end of" in captured.err
    assert "  progress 20 %\n  error: the data are not there" in captured.err
    assert "progress 10 %" not in captured.err
    assert "1 of 3 runs failed" in captured.err
    assert main(["sweep", str(file)]) == 1  # it is tried again
    assert [starts(run) for run in plan(file)] == [2, 1, 1]


def test_a_run_that_ends_well_without_a_summary_has_failed(tmp_path, capsys):
    file = write_sweep(tmp_path, settings={"behavior": "silent"})
    assert main(["sweep", str(file)]) == 1
    assert "has not written summary.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"variants": {"ours": {"learning_rate": 0.25}}}, "learning_rate: 0.5 -> 0.25"),
        ({"variants": {"ours": {"momentum": 0.9}}}, "momentum: not set -> 0.9"),
        ({"launch": {"kind": "torchrun", "processes": 2}}, "launch.processes: None -> 2"),
    ],
)
def test_a_run_that_finished_with_other_settings_is_refused_by_name(tmp_path, capsys, changed, message):
    file = write_sweep(tmp_path, variants=VARIANTS)
    assert main(["sweep", str(file)]) == 0
    file = write_sweep(tmp_path, **({"variants": VARIANTS} | changed))
    assert main(["sweep", str(file)]) == 2
    error = capsys.readouterr().err
    assert "seed_0" in error
    assert message in error
    assert "--rerun-changed" in error


def test_a_misspelt_setting_is_refused_before_anything_starts_and_finished_runs_stay(tmp_path, capsys):
    finished = plan(real_sweep(tmp_path))[0]
    write_record(finished, status=0, seconds=1.0)
    (finished.folder / "summary.json").write_text('{"test_loss": 1.0}')
    file = real_sweep(tmp_path, settings={"learning_rat": 0.1}, seeds=[0, 1])
    for options in ([], ["--rerun-changed"], ["--print-commands"]):
        assert main(["sweep", str(file), *options]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "learning_rat" in captured.err
        assert "--rerun-changed" not in captured.err
    assert [folder.name for folder in finished.folder.parent.iterdir()] == ["seed_0"]


def test_a_key_that_the_base_no_longer_sets_is_a_change(tmp_path):
    file = write_sweep(tmp_path)
    assert main(["sweep", str(file)]) == 0
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + "momentum: 0.9\n")
    assert statuses(file) == ["changed"]
    assert state_of(plan(file)[0]).changes == ("momentum: not set -> 0.9",)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"momentum": 0.9}, {}, "momentum: 0.9 -> not set"),
        ({"betas": [0.9]}, {"betas": [0.9, 0.98]}, "betas: [0.9] -> [0.9, 0.98]"),
    ],
)
def test_a_setting_taken_out_or_made_longer_is_a_change(tmp_path, before, after, message):
    write_record(plan(write_sweep(tmp_path, settings=before))[0])
    file = write_sweep(tmp_path, settings=after)
    assert state_of(plan(file)[0]).changes == (message,)


def test_what_was_begun_with_other_settings_is_none_of_the_runs(tmp_path):
    (run,) = plan(write_sweep(tmp_path, settings={"momentum": 0.9}))
    write_record(run)
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    assert state_of(run).status == "unfinished"
    state = state_of(plan(write_sweep(tmp_path))[0])
    assert (state.status, state.records) == ("missing", [])


def test_a_run_started_by_hand_counts_with_the_paths_that_its_task_has_resolved(tmp_path):
    file = write_sweep(tmp_path, settings={"start_from": "weights/first.pt"})
    assert main(["sweep", str(file)]) == 0
    (run,) = plan(file)
    (run.folder / RECORD).unlink()
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("weights/first.pt", f"{tmp_path}/weights/first.pt"))
    assert statuses(file) == ["finished"]
    config.write_text(config.read_text().replace("first.pt", "second.pt"))
    assert statuses(file) == ["changed"]


def test_what_changes_no_result_is_no_change(tmp_path):
    file = write_sweep(tmp_path, settings={"data.path": "./a"})
    assert main(["sweep", str(file)]) == 0
    base = tmp_path / "base.yaml"
    base.write_text("# a comment\n" + base.read_text().replace("0.5", "5e-1"))
    write = {"settings": {"data.path": "./b"}, "launch": {"threads": 3}, "seeds": [0, 1], "title": "other"}
    kept = base.read_text()
    file = write_sweep(tmp_path, **write)
    base.write_text(kept)
    assert statuses(file) == ["finished", "missing"]


def test_rerun_changed_keeps_the_earlier_folder(tmp_path, capsys):
    file = write_sweep(tmp_path, variants=VARIANTS)
    assert main(["sweep", str(file)]) == 0
    file = write_sweep(tmp_path, variants=VARIANTS | {"ours": {"learning_rate": 0.25}})
    assert main(["sweep", str(file), "--rerun-changed"]) == 0
    assert statuses(file) == ["finished", "finished"]
    before, after = (
        json.loads((tmp_path / "runs" / "ours" / name / "summary.json").read_text())["test_loss"]
        for name in ("seed_0.earlier_1", "seed_0")
    )
    assert (before, after) == (0.5 * 3, 0.25 * 3)
    assert [starts(run) for run in plan(file)] == [1, 1]


def test_printed_commands_do_what_the_sweep_does_and_their_runs_count_as_finished(tmp_path, capsys):
    file = write_sweep(tmp_path, variants=VARIANTS, settings={"word": "it's"})
    assert main(["sweep", str(file), "--print-commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert statuses(file) == ["missing", "missing"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in lines:
        subprocess.run(["sh", "-c", line], check=True, env=os.environ | {"PATH": path})
    assert statuses(file) == ["finished", "finished"]
    file = write_sweep(tmp_path, variants=VARIANTS, settings={"word": "other"})
    assert statuses(file) == ["changed", "changed"]


def test_several_jobs_run_at_the_same_time(tmp_path):
    file = write_sweep(tmp_path, variants=VARIANTS, settings={"behavior": "meet"})
    began = time.monotonic()
    assert main(["sweep", str(file), "--jobs", "2"]) == 0
    assert time.monotonic() - began < 15  # each waits for the other, 20 s alone


def test_settings_given_on_the_command_line_win_and_belong_to_the_run(tmp_path, capsys):
    file = write_sweep(tmp_path, variants=VARIANTS | {"ours": {"learning_rate": 0.25}})
    assert main(["sweep", str(file), "--set", "learning_rate=0.125", "--only", "ours"]) == 0
    ours = next(run for run in plan(file) if run.setting.labels == ("ours",))
    assert json.loads((ours.folder / "summary.json").read_text())["test_loss"] == 0.125 * 3
    assert state_of(ours).changes == ("learning_rate: 0.125 -> 0.25",)
    again = planned_runs(load_sweep(file), tmp_path, {"learning_rate": 0.125})
    assert state_of(next(run for run in again if run.setting.labels == ("ours",))).status == "finished"


def test_list_says_what_became_of_each_run(tmp_path, capsys):
    file = write_sweep(tmp_path, variants=VARIANTS)
    assert main(["sweep", str(file), "--only", "ours"]) == 0
    capsys.readouterr()
    assert main(["sweep", str(file), "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["missing     dsgd/seed_0", "finished    ours/seed_0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_and_what_it_started_and_the_same_command_goes_on(tmp_path, capsys, number):
    file = write_sweep(tmp_path, variants={"slow": {"behavior": "wait"}, **VARIANTS})
    note = plan(file)[0].folder / "child.txt"

    def interrupt():
        wait_until(lambda: note.exists() and note.read_text())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    # What a shell starts in the background ignores Ctrl-C, and so do the runs of such a sweep.
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN
    before, began = signal.signal(signal.SIGINT, handler), time.monotonic()
    try:
        thread.start()
        assert main(["sweep", str(file), "--jobs", "1"]) == 130
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < GRACE_SECONDS, "the run was not told to end"
    assert "interrupted: the runs under way were stopped; the same command continues" in capsys.readouterr().err
    wait_until(lambda: not is_running(int(note.read_text())))
    assert statuses(file) == ["unfinished", "missing", "missing"]
    assert main(["sweep", str(file), "--only", "dsgd"]) == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and waits for whoever inherited it to notice


def wait_until(condition, timeout=30):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_that_cannot_start_is_a_failed_run_with_a_log(tmp_path, capsys):
    task = tmp_path / "broken.py"
    task.write_text("def (")
    file = write_sweep(tmp_path, task=str(task))
    assert main(["sweep", str(file)]) == 1
    log = tmp_path / "runs" / "base" / "seed_0" / LOG
    assert "SyntaxError" in log.read_text()
    assert "SyntaxError" in capsys.readouterr().err


def test_a_run_does_not_take_itself_for_the_process_that_the_sweep_is(tmp_path, monkeypatch):
    task = tmp_path / "task.py"
    task.write_text(
        "import os; print({name: os.environ.get(name) for name in ('RANK', 'WORLD_SIZE', 'KEPT', 'OMP_NUM_THREADS')})"
    )
    for name in ("RANK", "WORLD_SIZE", "KEPT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    main(["sweep", str(write_sweep(tmp_path, task=str(task), launch={"threads": 3}))])
    log = (tmp_path / "runs" / "base" / "seed_0" / LOG).read_text()
    assert log.startswith("{'RANK': None, 'WORLD_SIZE': None, 'KEPT': '7', 'OMP_NUM_THREADS': '3'}")


def test_a_finished_run_without_its_summary_has_to_go_on(tmp_path):
    file = write_sweep(tmp_path)
    assert main(["sweep", str(file)]) == 0
    (plan(file)[0].folder / "summary.json").unlink()
    assert statuses(file) == ["unfinished"]


def test_a_pattern_that_selects_nothing_is_an_error(tmp_path, capsys):
    assert main(["sweep", str(write_sweep(tmp_path)), "--only", "ours"]) == 2
    assert "--only ours selects no run. Runs are called base/seed_0" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["learning_rate", "=1", "seed=3"])
def test_a_setting_that_is_none_is_an_error(tmp_path, capsys, word):
    assert main(["sweep", str(write_sweep(tmp_path)), "--set", word]) == 2
    assert "error: " in capsys.readouterr().err


def test_durations_never_lose_more_than_a_hundredth():
    assert duration(9.94) == "9.9 s"
    assert duration(119) == "119 s"
    assert duration(7200) == "2.0 h"
    assert duration(float("nan")) == "nan s"
