"""The doctor's findings from facts, settings and times, and the command in a single process."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dsgdac_accel import GossipAccelerator, GossipConfig, Topology, build_topology
from dsgdac_accel.cli import doctor, main
from dsgdac_accel.cli.doctor import launched_processes
from dsgdac_accel.doctor import Report, comparison, examine
from dsgdac_accel.doctor.data import Share, check_shards, check_steps, share_of
from dsgdac_accel.doctor.examination import check_topology
from dsgdac_accel.doctor.links import Link, Measured, check_links, matchings
from dsgdac_accel.doctor.report import Finding
from dsgdac_accel.topology import TOPOLOGIES
from tests.launching import ROOT

MINE = comparison.collect_facts(0, torch.device("cpu"))


def workers(count, **changes):
    """Facts of healthy workers on one machine of as many cores."""
    settings = {"threads": 1, "cores": tuple(range(count)), "core_limit": count, "announced": count}
    return [replace(MINE, rank=rank, **(settings | changes)) for rank in range(count)]


def levels(findings):
    return [(finding.level, finding.subject) for finding in findings if finding.level != "ok"]


# ---- facts


def test_healthy_workers_have_no_warning():
    streams = [{"torch": str(rank), "numpy": str(rank)} for rank in range(4)]
    found = [replace(fact, streams=streams[fact.rank]) for fact in workers(4)]
    assert levels(comparison.compare(found)) == []


@pytest.mark.parametrize(
    ("count", "threads", "cores", "limit", "device", "expected"),
    [
        (4, 1, 4, 4.0, "cpu", None),
        (4, 1, 2, 2.0, "cpu", None),  # nothing to set: one thread each is the least
        (4, 2, 4, 4.0, "cpu", "OMP_NUM_THREADS=1"),
        (2, 4, 6, 6.0, "cpu", "OMP_NUM_THREADS=3"),
        (2, 4, 16, 4.0, "cpu", "OMP_NUM_THREADS=2"),  # a container with a quota
        (2, 1, 16, 16.0, "cpu", "OMP_NUM_THREADS=8"),  # idle cores
        (2, 1, 4, 4.0, "cpu", "OMP_NUM_THREADS=2"),  # half of them are
        (2, 1, 16, 16.0, "cuda:0", None),
    ],
)
def test_threads_against_cores(count, threads, cores, limit, device, expected):
    found = workers(count, threads=threads, cores=tuple(range(cores)), core_limit=limit, device=device)
    (finding,) = comparison.check_threads(found)
    assert finding.level == ("ok" if expected is None else "warning")
    assert expected is None or expected in finding.advice


def test_machines_are_counted_by_themselves():
    found = [replace(fact, machine="ab"[fact.rank // 2], threads=2) for fact in workers(4, cores=(0, 1, 2, 3))]
    assert [finding.level for finding in comparison.check_threads(found)] == ["ok", "ok"]


def test_workers_that_share_a_gpu_are_named():
    found = [replace(fact, device="cuda:0", gpu=f"m {fact.rank // 2}") for fact in workers(3)]
    (finding,) = comparison.check_devices(found)
    assert (finding.level, finding.workers, "workers_per_process" in finding.advice) == ("error", (0, 1), True)
    mixed = [replace(fact, device=device) for fact, device in zip(workers(2), ("cpu", "cuda:0"), strict=True)]
    assert levels(comparison.check_devices(mixed)) == [("error", "device")]
    each = [replace(fact, device=f"cuda:{fact.rank}", gpu=f"m {fact.rank}") for fact in workers(2)]
    assert comparison.check_devices(each) == []


def test_processes_that_do_not_see_each_other_are_an_error():
    (finding,) = comparison.check_launch(workers(1, announced=4))
    assert (finding.level, "4 processes were launched" in finding.message) == ("error", True)
    assert "--multi_gpu" in finding.advice


def test_many_differences_are_shortened():
    found = workers(2)
    found[1] = replace(found[1], settings={f"key{number}": number for number in range(30)})
    lines = [finding.line() for finding in comparison.check_settings(found)]
    assert len(lines) == 9
    assert "worker 1: key0 = 0, but worker 0: key0 = nothing" in lines[0]
    assert "22 more" in lines[-1]


def test_streams_of_workers_within_processes_must_differ_too():
    own = [
        {"torch": "ab"[rank], "torch, virtual worker 0": "c", "torch, virtual worker 1": "de"[rank]} for rank in (0, 1)
    ]
    (finding,) = comparison.check_streams(own)
    assert (finding.level, finding.workers, "virtual workers" in finding.message) == ("error", (0, 1), True)


def test_equal_numpy_streams_are_a_warning():
    assert levels(comparison.check_streams([{"torch": "a", "numpy": "c"}, {"torch": "b", "numpy": "c"}])) == [
        ("warning", "random streams")
    ]
    assert comparison.check_streams([{}, {}]) == []


def test_missing_variables_of_a_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK must be a number from 0 to WORLD_SIZE - 1; got RANK=None"):
        launched_processes()
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ValueError, match="got RANK=4, WORLD_SIZE=4"):
        launched_processes()


def test_a_containers_share_of_processors_is_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_QUOTA", tmp_path / "cpu.max")
    for quota, limit in (("250000 100000", 2.5), ("max 100000", os.cpu_count())):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert comparison.collect_facts(0, torch.device("cpu")).core_limit == limit


def test_other_values_of_the_same_sum_are_another_start():
    def start(value):
        model = nn.Linear(2, 1, bias=False)
        model.load_state_dict({"weight": torch.tensor([[value, -value]])})
        return comparison.collect_facts(0, torch.device("cpu"), model=model, fresh=True).start

    assert start(1.0) == start(1.0) != start(2.0)


def test_frozen_parameters_are_not_exchanged():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(5, 5))
    model[1].requires_grad_(False)
    assert comparison.parameter_bytes(model) == 4 * (3 * 2 + 2)


# ---- topology


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_topologies_are_described(name):
    (finding,) = check_topology(build_topology(name, 8))
    assert finding.level == "ok"
    assert f"spectral gap {build_topology(name, 8).spectral_gap():.3g}" in finding.message


def test_a_topology_that_never_mixes_is_an_error():
    swap = Topology.from_matrices([[[0, 1], [1, 0]]])
    (finding,) = check_topology(swap)
    assert (finding.level, "never agree" in finding.message) == ("error", True)


# ---- links


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("per_process", [1, 2])
def test_matchings_are_disjoint_and_hold_every_pair(name, count, per_process):
    topology = build_topology(name, count * per_process)
    found = matchings(topology, per_process)
    for joined in found:
        ends = [end for pair in joined for end in pair]
        assert len(ends) == len(set(ends))
    expected = {
        tuple(sorted((worker // per_process, peer // per_process)))
        for step in range(topology.period)
        for worker in range(topology.num_workers)
        for peer in topology.neighbors(step, worker)
        if worker // per_process != peer // per_process
    }
    assert sorted(pair for joined in found for pair in joined) == sorted(expected)


def times(*seconds, measured=10**6):
    links = tuple(Link((number, number + 1), took, 10**6) for number, took in enumerate(seconds))
    return Measured(10**6, measured, links, rounds=(0.1, 0.3))


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ((0.1, 0.1, 0.12), None),
        ((0.1, 0.1, 0.6), (2, 3)),
        ((0.1, 0.6), (1, 2)),
        ((0.001, 0.001, 0.006), None),  # too short to notice
        ((1.0, 1.0, 3.0), None),  # no link stands out
        ((0.1,), None),
    ],
)
def test_a_link_is_slow_if_it_stands_out(seconds, slow):
    link, exchange = check_links(times(*seconds), build_topology("ring", 8))
    assert (link.level, link.workers) == (("ok", ()) if slow is None else ("warning", slow))
    one = max(range(len(seconds)), key=seconds.__getitem__)
    assert f"slowest, workers {one} and {one + 1}: " in link.message
    assert "takes 200 ms, 300 ms in the slowest round (1 of 1)" in exchange.message


def test_a_scaled_measurement_says_so():
    (_, exchange) = check_links(times(0.1, measured=2**19), build_topology("ring", 8))
    assert "estimated from 512 KiB" in exchange.message


# ---- data


def test_a_pass_over_the_numbers_of_samples_leaves_no_trace():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            raise AssertionError("the data must not be read")

    torch.manual_seed(0)
    loader = DataLoader(Data(), batch_size=4, shuffle=True, num_workers=2, pin_memory=False)
    prepared = GossipAccelerator(gossip=GossipConfig()).prepare(loader)
    state, base = torch.get_rng_state(), prepared.base_dataloader
    kept = dict(vars(base))
    first, second = share_of(prepared), share_of(prepared)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(base) == kept
    assert sorted(first.samples) == list(range(10))
    assert list(first.samples) == list(second.samples)  # it is the next pass, that nobody has begun
    assert (first.steps, first.batch_size, first.total) == (3, 4, 10)
    assert prepared.iteration == 0


def test_of_a_long_pass_the_beginning_is_looked_at(monkeypatch):
    monkeypatch.setattr("dsgdac_accel.doctor.data.MOST_SAMPLES", 5)
    prepared = GossipAccelerator(gossip=GossipConfig()).prepare(DataLoader(range(10), batch_size=2))
    references = list(prepared.gradient_state.dataloader_references)
    share = share_of(prepared)
    assert (share.steps, list(share.samples)) == (5, [0, 1, 2, 3, 4, 5])
    assert prepared.gradient_state.dataloader_references == references  # the pass is not under way any more
    assert list(map(list, prepared)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_an_iterable_is_not_read():
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError("the data must not be read")

    share = share_of(DataLoader(Stream(), batch_size=2))
    assert (share.steps, share.samples) == (None, None)


def share(samples, **changes):
    samples = np.asarray(samples)
    known = {"steps": len(samples) // 2, "samples": samples, "batch_size": 2, "prepared": True, "total": 100}
    return Share(**(known | changes))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([share(range(8)), share(range(8, 16))], []),
        ([share(range(8)), share([8, 9, 10, 11, 12, 13, 0, 1])], []),  # filled up
        ([share(range(8)), share(range(8))], [("error", "shards")]),
        ([share([0, 1]), share([0, 1])], [("error", "shards")]),  # though so few might fill a last batch
        ([share(range(8)), share(range(8, 18))], [("warning", "steps")]),
        ([share(range(8), prepared=False), share(range(8, 18), prepared=False)], [("error", "steps")]),
        ([share(range(8)), share(range(0))], [("error", "steps")]),
        ([share(range(8), steps=None), share(range(8, 16))], []),
        ([share(range(8), steps=None, prepared=False), share(range(8, 16))], [("error", "steps")]),
    ],
)
def test_findings_from_shares(shares, expected):
    assert levels([*check_steps(shares), *check_shards(shares)]) == expected


# ---- reports


def test_a_report_counts_and_writes_what_it_found(tmp_path):
    report = Report()
    assert (report.level, report.exit_status, report.lines()) == ("ok", 0, ["doctor: no problems found"])
    report.add([Finding("warning", "a", "b"), Finding("ok", "c", "d")])
    assert (report.level, report.exit_status, report.lines()[-1]) == ("warning", 0, "doctor: 1 warning")
    report.add([Finding("error", "e", "several\nlines", "Mend it", (1,))])
    assert report.lines()[2:] == ["error    e              several lines. Mend it.", "doctor: 1 error, 1 warning"]
    assert report.exit_status == 1
    report.write_json(tmp_path / "sub" / "report.json")
    written = json.loads((tmp_path / "sub" / "report.json").read_text())
    assert written["findings"][2]["workers"] == [1]


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    Report().write_json(tmp_path / "report.json")

    def full(path, *args, **kwargs):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        Report([Finding("error", "a", "b")]).write_json(tmp_path / "report.json")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["level"] == "ok"


# ---- in one process


def test_one_process_is_told_how_to_launch(capsys):
    report = examine(GossipAccelerator(gossip=GossipConfig()), nn.Linear(2, 2))
    (finding,) = [finding for finding in report.of_level("warning") if finding.subject == "workers"]
    assert "torchrun --nproc_per_node N" in finding.advice
    assert main(["doctor", "--parameters", "1k"]) == 0
    assert "no other worker to mix with" in capsys.readouterr().out
    assert main(["doctor", "--parameters", "1k", "--workers_per_process", "4", "--topology", "grid"]) == 0
    out = capsys.readouterr().out
    assert "4 (1 process x 4)" in out
    assert "the 4 workers exchange 3.91 KiB in the memory of this process" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--topology", "ringg"], "Did you mean 'ring'?"),
        (["--topology", "one_peer_exponential", "--workers_per_process", "3"], "a power of two; got 3"),
        (["--parameters", "many"], "must be a number such as 25M"),
        (["--parameters", "0"], "--parameters must be a number >= 1"),
        (["--workers_per_process", "0"], "workers_per_process must be"),
        (["--timeout", "0"], "--timeout must be"),
        (["--rate", "3"], "unrecognized arguments: --rate 3"),
        (["--topologie", "ring"], "Did you mean --topology?"),
        (["--config", "none.yaml"], "none.yaml does not exist"),
        (["--config", str(ROOT / "configs" / "digits.yaml"), "--topology", "ring"], "--gossip.topology"),
        (["--config", str(ROOT / "configs" / "digits.yaml"), "--epoch", "3"], "epoch"),
        (["--json", "."], "--json must be a file"),
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
    assert (
        main([*words, "--gossip.workers_per_process", "2", "--global_batch_size", "32", "--json", str(tmp_path / "j")])
        == 0
    )
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "j").read_text())
    assert "dsgd_ac on digits of scikit-learn: 1437 training images, 2 workers, 880 steps" in out
    assert f"{folder} holds another run" in out
    assert report["steps_per_pass"] == [1437 // 32]
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(
        ("metrics.jsonl", "summary.json"), "of an earlier run"
    )
    assert main([*words, "--global_batch_size", "5000"]) != 0


def test_without_the_tasks_a_configuration_cannot_be_examined(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "entry_points", lambda group: ())
    assert main(["doctor", "--config", str(ROOT / "configs" / "digits.yaml")]) == 2
    assert "--config needs the tasks of the repository" in capsys.readouterr().err
