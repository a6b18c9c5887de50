"""The doctor with real workers, one of which is deliberately wrong: the finding must name it."""

import os
import re
import time

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, doctor
from dsgdac_accel.doctor import errors_of, examine, quick_check
from dsgdac_accel.randomness import seed_workers_differently
from tests.launching import finish, forked, start
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

WORKERS, PARAMETERS = 3, 250_000
SLOW_SECONDS = 0.12

# ---- one worker of a run is wrong


def healthy(rank, patches, settings):
    pass


def other_version(rank, patches, settings):
    if rank == 1:
        versions = doctor.package_versions() | {"torch": "1.0"}
        patches.setattr(doctor, "package_versions", lambda: versions)


def other_setting(rank, patches, settings):
    settings |= {"data": {"name": "digits"}, "lr": 0.3 if rank == 2 else 0.1}


def slow_link(rank, patches, settings):
    """Messages of worker 1 to worker 2 take longer."""
    if rank == 1:
        from dsgdac_accel.distributed import transport

        send = transport.dist.isend

        def slow_send(chunk, **kwargs):
            time.sleep(SLOW_SECONDS if kwargs["group_dst"] == 2 else 0)
            return send(chunk, **kwargs)

        patches.setattr(transport.dist, "isend", slow_send)


CASES = (healthy, other_version, other_setting, slow_link)


def examine_all(rank):
    """The findings of each case, in one launch."""
    reports = {}
    for case in CASES:
        torch.manual_seed(3)
        accelerator = GossipAccelerator(gossip=GossipConfig(total_steps=50))
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.MonkeyPatch.context() as patches:
            settings = {}
            case(rank, patches, settings)
            if case is not slow_link:
                patches.setattr(doctor, "_BUDGET_SECONDS", 0.5)
            before = torch.get_rng_state()
            reports[case.__name__] = examine(accelerator, PARAMETERS, settings=settings, timeout=20)
            assert torch.equal(before, torch.get_rng_state())
    return reports


@pytest.fixture(scope="module")
def reports():
    return run_workers(examine_all, WORKERS, timeout=120)


def only(reports, case, level, subject):
    """The findings of a case that are not ok; they are of one subject, and the same on all workers."""
    found = [finding for finding in reports[0][case] if finding.level != "ok"]
    assert {(finding.level, finding.name) for finding in found} == {(level, subject)}, found
    for report in reports[1:]:
        assert [finding for finding in report[case] if finding.level != "ok"] == found
    return found


def test_a_healthy_run_has_no_warning(reports):
    for report in reports:
        assert [finding.line() for finding in report["healthy"] if finding.level != "ok"] == []
    text = "\n".join(finding.line() for finding in reports[0]["healthy"])
    assert "workers         3 (3 processes x 1), cpu, gloo" in text
    assert "links           3 measured, an exchange of 1 MB each; slowest, workers " in text


def test_another_version_is_an_error_that_names_the_worker(reports):
    (finding,) = only(reports, "other_version", "error", "versions")
    assert "worker 1: torch = 1.0, but worker 0: torch = 2" in finding.text


def test_another_setting_is_named_with_its_key_and_values(reports):
    (finding,) = only(reports, "other_setting", "error", "configuration")
    assert finding.text == "worker 2: lr = 0.3, but worker 0: lr = 0.1"
    assert "links" not in [finding.name for finding in reports[0]["other_setting"]], "such workers might wait"


def test_a_slow_link_is_named_by_its_pair(reports):
    (finding,) = only(reports, "slow_link", "warning", "links")
    assert "slowest, workers 1 and 2: " in finding.text
    slowest, median = (float(ms) for ms in re.findall(r"([\d.e+]+) ms", finding.text))
    assert slowest >= 950 * SLOW_SECONDS > median


# ---- silence


def await_files(*files, seconds=60):
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"of {files} not all appeared"
        time.sleep(0.02)


def meet_without_one(rank, folder):
    accelerator = GossipAccelerator(gossip=GossipConfig())
    if rank == 1:
        await_files(folder / "0", folder / "2")
        return None
    started = time.monotonic()
    report = examine(accelerator, 10, timeout=3)
    (folder / str(rank)).touch()
    return report, time.monotonic() - started


@pytest.mark.slow
def test_a_worker_that_does_not_come_is_named_in_time(tmp_path):
    first, _, last = run_workers(meet_without_one, WORKERS, tmp_path)
    for report, seconds in (first, last):
        (finding,) = errors_of(report)
        assert finding.name == "lost worker"
        assert "worker 1, which does not answer, was lost in connecting the workers" in finding.text
        assert seconds < 10


def lose_one_on_the_way(rank, folder):
    accelerator = GossipAccelerator(gossip=GossipConfig())
    if rank == 2:
        doctor.package_versions = lambda: await_files(folder / "0", folder / "1")
    started = time.monotonic()
    report = examine(accelerator, 10, timeout=2)
    (folder / str(rank)).touch()
    return report, time.monotonic() - started


@pytest.mark.slow
def test_a_worker_that_falls_silent_is_named(tmp_path):
    first, second, _ = run_workers(lose_one_on_the_way, WORKERS, tmp_path)
    for report, seconds in (first, second):
        (finding,) = errors_of(report)
        assert finding.name == "lost worker"
        assert "worker 2 did not answer" in finding.text
        assert seconds < 20


# ---- the quick check


def check_quickly(rank):
    accelerator = GossipAccelerator(gossip=GossipConfig())
    group = accelerator.group
    seed_workers_differently(group)
    found = {"healthy": quick_check(group, {"lr": 0.1})}
    took = []
    for _ in range(5):
        started = time.perf_counter()
        quick_check(group, {"lr": 0.1})
        took.append(time.perf_counter() - started)
    for name, settings in (("lr", {"lr": 0.1 + rank}), ("seed", {"lr": 0.1})):
        torch.manual_seed(1)
        try:
            quick_check(group, settings)
        except ValueError as error:
            found[name] = str(error)
    return found, min(took)


def test_the_quick_check_refuses_what_would_be_wrong_and_costs_nothing():
    for found, seconds in run_workers(check_quickly, 2):
        assert found["healthy"] == []
        assert "worker 1: lr = 1.1, but worker 0: lr = 0.1" in found["lr"]
        assert "workers 0, 1 draw the same random numbers (torch)" in found["seed"]
        assert seconds < 0.25  # the fastest of five, which take a millisecond or two


# ---- the command


PROLOGUE = """
import os, sys, time
rank = os.environ["RANK"]
"""
CALL = """
from dsgdac_accel.cli import main
raise SystemExit(main())
"""


def launch(tmp_path, workers, *words, before=""):
    script = tmp_path / "launch.py"
    script.write_text(PROLOGUE + before + CALL)
    return finish(start([*forked(workers), script, "doctor", *map(str, words)], tmp_path), timeout=60)


def test_worker_0_alone_reports(tmp_path):
    status, out, err = launch(tmp_path, 2, "--parameters", "100k", "--topology", "ring")
    assert status == 0, err
    assert out.count("doctor: no problems found") == 1
    assert "links           1 measured" in out


def test_other_arguments_of_one_worker_are_found_before_the_run_is_built(tmp_path):
    before = "sys.argv += ['--learning_rate', '0.3'] if rank == '1' else []"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    words = ["--config", f"{root}/configs/digits.yaml", "--output_dir", tmp_path / "runs"]
    status, out, _ = launch(tmp_path, 2, *words, before=before)
    assert status == 1
    assert "error    configuration   worker 1: learning_rate = 0.3, but worker 0: learning_rate = 0.2." in out
    assert not (tmp_path / "runs").exists()


def test_a_worker_that_is_not_launched_is_named(tmp_path):
    before = "time.sleep(60 if rank == '1' else 0)"
    status, out, _ = launch(tmp_path, 2, "--timeout", "2", before=before)
    assert status == 1
    assert "error    lost worker     worker 1 did not answer within 2 s at the start" in out


def test_the_failure_of_one_worker_ends_the_launch_with_its_reason(tmp_path):
    before = """
from dsgdac_accel import doctor
def fail(*args, **kwargs):
    raise OSError("the data set is not on this machine")
if rank == "1":
    doctor.examine = fail
"""
    started = time.monotonic()
    status, _, err = launch(tmp_path, 2, "--timeout", "100", before=before)
    assert status != 0
    assert "worker 1: the data set is not on this machine" in err
    assert time.monotonic() - started < 50  # worker 0 waits in a collective, whose timeout is 100 s


@pytest.mark.parametrize(
    ("workers", "name", "expected"),
    [(2, "ringg", "Did you mean 'ring'?"), (3, "one_peer_exponential", "a power of two; got 3")],
)
def test_a_mistake_is_said_once(tmp_path, workers, name, expected):
    status, out, err = launch(tmp_path, workers, "--topology", name)
    assert (status, out) == (2, "")
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [err.strip()]
    assert expected in err
