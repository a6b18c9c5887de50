"""The doctor's findings from facts, settings and times, and the command in a single process."""

from dataclasses import dataclass

import pytest

from dsgdac_accel import GossipAccelerator, GossipConfig, Topology, build_topology, cli
from dsgdac_accel.cli import main, rank_and_world_size
from dsgdac_accel.doctor import (
    check_equal,
    check_links,
    check_streams,
    examine,
    flat_settings,
    link_times,
)
from dsgdac_accel.topology import TOPOLOGIES
from tests.launching import ROOT


def levels(findings):
    return [(finding.level, finding.name) for finding in findings if finding.level != "ok"]


# ---- settings, models, streams


def test_a_version_that_may_differ_is_a_warning():
    workers = [{"torch": "2.1", "numpy": "1.0"}, {"torch": "2.1", "numpy": "2.0"}, {"torch": "2.2", "numpy": "1.0"}]
    found = check_equal("versions", workers, "", may_differ=("numpy",))
    assert [(finding.level, finding.text) for finding in found] == [
        ("error", "worker 2: torch = 2.2, but worker 0: torch = 2.1"),
        ("warning", "worker 1: numpy = 2.0, but worker 0: numpy = 1.0"),
    ]


def test_many_differences_are_shortened():
    found = check_equal("configuration", [{}, {f"key{number}": number for number in range(30)}], "")
    assert len(found) == 9
    assert found[0].text == "worker 1: key0 = 0, but worker 0: key0 = nothing"
    assert "22 more" in found[-1].text


def test_settings_tell_topologies_of_the_same_name_apart():
    @dataclass
    class Run:
        topology: Topology

    one, other = (Topology.from_matrices([matrix]) for matrix in ([[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.1], [0.1, 0.9]]))
    assert (
        flat_settings({"run": Run(one)}) == flat_settings({"run.topology": one}) != flat_settings({"run": Run(other)})
    )


def test_equal_streams_are_an_error_for_torch_and_a_warning_for_numpy():
    workers = [{"torch": "a", "numpy": "c"}, {"torch": "b", "numpy": "c"}, {"torch": "a", "numpy": "d"}]
    found = check_streams(workers)
    assert levels(found) == [("error", "random streams"), ("warning", "random streams")]
    assert found[0].text == "workers 0, 2 draw the same random numbers (torch)"
    # Two processes that have not used CUDA yet have no stream of it.
    assert levels(check_streams([{"torch": "a", "cuda": "c"}, {"torch": "b"}, {"torch": "c"}])) == []


@pytest.mark.parametrize(("rank", "size"), [(None, "4"), ("4", "4"), ("1", None)])
def test_contradictory_variables_of_a_launcher_are_refused(monkeypatch, rank, size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    rule = f"RANK must be a number from 0 to WORLD_SIZE - 1; got RANK={rank}, WORLD_SIZE={size}"
    with pytest.raises(ValueError, match=rule):
        rank_and_world_size()


# ---- links


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("per_process", [1, 2])
def test_the_slowest_of_all_links_is_found(name, count, per_process):
    topology = build_topology(name, count * per_process)
    expected = {
        tuple(sorted((worker // per_process, peer // per_process)))
        for step in range(topology.period)
        for worker in range(topology.num_workers)
        for peer in topology.neighbors(step, worker)
        if worker // per_process != peer // per_process
    }
    for slow in expected:
        times = [[0.1] * count for _ in range(topology.period)]
        for step, round_ in enumerate(topology.rounds):
            one, other = (slice(end * per_process, (end + 1) * per_process) for end in slow)
            if round_[one, other].any():
                times[step][slow[0]] = times[step][slow[1]] = 0.9
        links = link_times(topology, times, per_process)
        assert set(links) == expected
        assert {pair for pair, seconds in links.items() if seconds == 0.9} == {slow}


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ((0.1, 0.1, 0.12), False),
        ((0.1, 0.1, 0.6), True),
        ((0.1, 0.6), True),
        ((0.001, 0.001, 0.006), False),  # too short to notice
        ((1.0, 1.0, 3.0), False),  # no link stands out
        ((0.1,), False),
    ],
)
def test_a_link_is_slow_if_it_stands_out(seconds, slow):
    links = {(number, number + 1): took for number, took in enumerate(seconds)}
    link = check_links(10**6, links)
    assert link.level == ("warning" if slow else "ok")
    one = max(range(len(seconds)), key=seconds.__getitem__)
    assert f"an exchange of 1 MB each; slowest, workers {one} and {one + 1}: {1e3 * max(seconds):.3g} ms" in link.text


# ---- in one process


def test_one_process_is_told_how_to_launch(capsys):
    findings = examine(GossipAccelerator(gossip=GossipConfig()), 10)
    (finding,) = [finding for finding in findings if finding.level == "warning"]
    assert "torchrun --nproc_per_node N" in finding.advice
    assert main(["doctor", "--parameters", "1k"]) == 0
    assert "no other worker to mix with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--topology", "ringg"], "Did you mean 'ring'?"),
        (["--parameters", "many"], "must be a number such as 25M"),
        (["--parameters", "0"], "--parameters must be a number in [1, 1e+12]"),
        (["--parameters", "1e999"], "--parameters must be a number in [1, 1e+12]"),
        (["--timeout", "0"], "--timeout must be"),
        (["--rate", "3"], "unrecognized arguments: --rate 3"),
        (["--topologie", "ring"], "Did you mean --topology?"),
        (["--config", "none.yaml"], "none.yaml does not exist"),
        (["--config", str(ROOT / "configs" / "digits.yaml"), "--topology", "ring"], "--gossip.topology"),
        (["--config", str(ROOT / "configs" / "digits.yaml"), "--epoch", "3"], "epoch"),
    ],
)
def test_bad_usage_ends_with_one_line_and_status_2(capsys, words, expected):
    try:
        status = main(["doctor", *words])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("error: ") == 1
    assert expected in captured.err


@pytest.mark.task
def test_the_run_of_a_task_is_examined_and_its_folder_left_alone(tmp_path, capsys):
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).write_text("of an earlier run")
    words = ["doctor", "--config", str(ROOT / "configs" / "digits.yaml"), "--output_dir", str(folder)]
    assert main([*words, "--gossip.workers_per_process", "2", "--global_batch_size", "32"]) == 0
    out = capsys.readouterr().out
    assert "dsgd_ac on digits of scikit-learn: 1437 training images, 2 workers, 880 steps" in out
    assert "2 (1 processes x 2), cpu" in out
    assert out.endswith("doctor: no problems found\n")
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(
        ("metrics.jsonl", "summary.json"), "of an earlier run"
    )
    assert main([*words, "--global_batch_size", "5000"]) != 0


def test_without_the_tasks_a_configuration_cannot_be_examined(monkeypatch, capsys):
    monkeypatch.setattr(cli, "HAS_TASKS", False)
    assert main(["doctor", "--config", str(ROOT / "configs" / "digits.yaml")]) == 2
    assert "--config needs the tasks" in capsys.readouterr().err
