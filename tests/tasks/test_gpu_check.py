"""The GPU check, as far as a machine without a GPU can tell: its options, its checks, and what becomes of a bad one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dsgdac_accel.core.update import Update
from tasks.common.config import parse_config
from tasks.gpu import catalog, command, one_process, sharded
from tasks.gpu.bench import Bench
from tasks.gpu.check import answer_of
from tasks.gpu.config import GpuCheckConfig
from tasks.gpu.launching import Machine
from tests.launching import ROOT
from tests.tasks import fake_gpu_checks
from tests.workers import run_workers

CPU = Machine(cuda=False, cards=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--part 3", r"part must be one of '1', '2', 'all'; got '?3"),
        ("--prat 1", r"unknown key prat\. Did you mean part\?"),
        ("--gpu 1", r"unknown key gpu\. Did you mean device\?"),
        ("--output x.json", r"unknown key output\. Did you mean json\?"),
        ("--device gpu", r"device must be cpu or cuda; got 'gpu'"),
        ("--device cuda:1", r"got 'cuda:1'\. cuda uses the GPUs of CUDA_VISIBLE_DEVICES"),
        ("--only lost_worker", r"got 'lost_worker'\. Did you mean 'lost_worker_is_named'\?"),
        ("--only x", r"got 'x'\. The checks are virtual_workers"),
        ("--part 1 --only lost_worker_is_named", r"checks of part 1; got 'lost_worker_is_named'\. Leave part out"),
        ("--json figures.txt", r"must be a file that ends in \.json; got .*figures\.txt"),
        ("--json /dev/null/x.json", r"json must be a file that can be written"),
        ("lost_worker_is_named", r"is not a setting"),
    ],
)
def test_wrong_options_are_refused_with_the_way_out(words, message):
    with pytest.raises(ValueError, match=message):
        parse_config(GpuCheckConfig, words.split())


def test_a_gpu_that_is_not_there_and_a_launcher_are_refused(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device cuda needs a GPU that torch sees"):
            command._machine(GpuCheckConfig(device="cuda"))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="Start it with python alone"):
        command._machine(GpuCheckConfig())


def test_every_check_says_what_it_suspects_and_has_a_name_of_its_own():
    names = [check.name for check in catalog.CHECKS]
    assert len(set(names)) == len(names)
    for each in catalog.CHECKS:
        assert re.match(r"Suspicion: .+", each.run.__doc__)
        assert each.seconds < command.DEADLINE_SECONDS < 8 * 60


def test_machines_without_two_gpus_skip_what_needs_them():
    (pair,) = (check for check in catalog.CHECKS if check.name == "lost_worker_is_named")
    assert "torch sees 1" in Machine(cuda=True, cards=1).reason_to_skip(pair)
    assert [Machine(cuda=True, cards=cards).processes(pair) for cards in (2, 3, 4, 8)] == [2, 2, 4, 4]
    assert (CPU.reason_to_skip(pair), CPU.processes(pair)) == ("", 2)


def test_a_core_that_mixes_twice_as_strongly_is_found(monkeypatch):
    add_to = Update.add_to

    def twice(update, *args):
        add_to(update, *args)
        add_to(update, *args)

    monkeypatch.setattr(one_process, "OPTIMIZERS", ["sgd"])
    monkeypatch.setattr(Update, "add_to", twice)
    answer = answer_of(one_process.virtual_workers_follow_algorithm_1, Bench(cuda=False))
    assert answer.status == "FAIL"
    assert answer.values["difference"] > 1e-3


def check_sharded(rank, name):
    return answer_of(getattr(sharded, name), Bench(cuda=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes"), [("a_sharded_worker_trains_like_a_whole_one", 1), ("sharded_workers_follow_algorithm_1", 4)]
)
def test_the_checks_of_sharded_workers_pass_on_a_cpu(name, processes):
    answers = run_workers(check_sharded, processes, name)
    assert {(answer.status, answer.details) for answer in answers} == {("PASS", "")}


def run(checks, tmp_path, capfd, seconds=250.0):
    """Exit status, lines and JSON file of some checks."""
    options = GpuCheckConfig(json=tmp_path / "found.json")
    status = command.run(checks, CPU, options, "tests.tasks.fake_gpu_checks", seconds)
    lines = capfd.readouterr().out.splitlines()
    return status, lines, json.loads(options.json.read_text(encoding="utf-8"))


def test_an_error_is_a_fail_and_nothing_is_started_after_the_deadline(tmp_path, capfd):
    answer = answer_of(fake_gpu_checks.raises, Bench(cuda=False))
    assert (answer.status, answer.figure, answer.spent) == ("FAIL", "ValueError: a bug", True)
    status, lines, _ = run([fake_gpu_checks.needs_a_gpu, fake_gpu_checks.passes], tmp_path, capfd, seconds=0.0)
    assert status == 1
    assert lines[-3:-1] == [
        "SKIP  1  needs_a_gpu: needs a GPU: it is about GPUs",
        "FAIL  1  passes: not run: the time of all checks is used up",
    ]
    assert run([fake_gpu_checks.needs_a_gpu], tmp_path, capfd)[0] == 0


@pytest.mark.slow
def test_a_check_that_raises_hangs_or_dies_does_not_stop_the_others(tmp_path, capfd):
    status, lines, found = run(fake_gpu_checks.CHECKS, tmp_path, capfd)
    said = {line.split(":")[0].split()[-1]: line for line in lines if line[:4] in ("PASS", "FAIL", "SKIP")}
    assert set(said) == {each.name for each in fake_gpu_checks.CHECKS}
    for name, beginning in {
        "passes": "PASS  1  passes: all right",
        "raises": "FAIL  1  raises: ValueError: a bug ",
        "is_wrong": "FAIL  1  is_wrong: off by 1",
        "hangs": "FAIL  1  hangs: HANGS: no answer from process 0 of 1 within 1 s",
        "dies": "FAIL  1  dies: process 0 of 1 ended with status -11",
        "ends_by_itself": "PASS  1  ends_by_itself: a process ended by itself: worker 0: worker 3 was lost",
        "has_no_memory": "SKIP  1  has_no_memory: needs 10^6 GB",
        "is_last": "PASS  1  is_last: in process",
        "one_of_two_raises": "FAIL  2  one_of_two_raises: worker 1: RuntimeError: only here",
        "both_agree": "PASS  2  both_agree: 0 and 1",
    }.items():
        assert said[name].startswith(beginning)
    assert status == 1
    assert lines[0].startswith("dsgdac_accel: ")
    assert lines[-1].startswith("4 passed, 5 failed, 2 skipped in ")
    by_name = {each["name"]: each for each in found["checks"]}
    assert list(by_name) == list(said)
    assert by_name["passes"]["values"] == {"figure": 3}
    assert "in raises" in by_name["raises"]["details"]
    assert found["machine"]["cards"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_processes_of_the_checks_as_well(number, status, tmp_path):
    command = [sys.executable, "tasks/gpu_check.py", "--device", "cpu", "--only", "processes_follow_algorithm_1"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE)
    workers = []
    deadline = time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        lines = [file.read_text().splitlines()[:1] for file in tmp_path.glob("gpu_check_*/answers_*")]
        workers = [json.loads(line)["pid"] for mine in lines for line in mine]
    assert len(workers) == 2
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == status
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
