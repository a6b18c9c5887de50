"""The benchmark started as its users start it, in small, and its shipped configurations."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks import benchmark
from tasks.benchmark import SUBCOMMANDS
from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.mixing import MixingBenchmarkConfig
from tasks.benchmarks.trainer import TrainerBenchmarkConfig
from tasks.common.config import parse_config
from tests.launching import ROOT, error_lines, finish, forked, start

CONFIGS = sorted((ROOT / "configs" / "benchmark").glob("*.yaml"))
SCRIPT = str(ROOT / "tasks" / "benchmark.py")
OTHERS = {"mixing": MixingBenchmarkConfig, "trainer": TrainerBenchmarkConfig}
OURS = [file for file in CONFIGS if file.stem not in OTHERS]
SMALL = ["--rounds", "2", "--steps", "2", "--batch_size", "1"]


@pytest.fixture(params=OURS, ids=lambda file: file.stem)
def shipped(request):
    return request.param


def test_a_shipped_configuration_loads_and_names_the_command_that_runs_it(shipped):
    config = parse_config(BenchmarkConfig, ["--config", str(shipped)])
    named = re.findall(
        r"^#   (.*tasks/benchmark\.py) --config (\S+)", shipped.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [ROOT / file for _, file in named] == [shipped]
    assert config.output in (None, ROOT / "runs" / "benchmark" / f"{shipped.stem}.json")
    starts_by_itself = named[0][0].startswith("python ")
    assert starts_by_itself == (config.workers is not None)
    assert config.network is None or starts_by_itself


def test_the_networks_and_targets_of_the_shipped_configurations_are_those_of_their_names():
    by_name = {file.stem: parse_config(BenchmarkConfig, ["--config", str(file)]) for file in OURS}
    fast, slow = (by_name[f"network_{name}"] for name in ("100mbit", "10mbit"))
    assert (fast.network.rate_mbit, fast.network.delay_ms, fast.workers) == (100, 10, 4)
    assert (slow.network.rate_mbit, slow.network.delay_ms, slow.workers) == (10, 50, 4)
    assert {config.network.queue_kb for config in (fast, slow)} == {512}
    assert all(config.targets for name, config in by_name.items() if name != "wrn")


@pytest.mark.parametrize("name", [file.stem for file in CONFIGS if file.stem in OTHERS])
def test_the_configuration_of_a_subcommand_loads_and_names_the_command_that_runs_it(name):
    file = CONFIGS[0].with_name(f"{name}.yaml")
    parse_config(OTHERS[name], ["--config", str(file)])
    command = f"tasks/benchmark.py {name} --config {file.relative_to(ROOT)}\n"
    assert command in file.read_text(encoding="utf-8")


def test_every_subcommand_says_how_it_is_used(monkeypatch, capsys):
    assert set(SUBCOMMANDS) == set(OTHERS)
    for name in SUBCOMMANDS:
        monkeypatch.setattr(sys, "argv", [SCRIPT, name, "--help"])
        with pytest.raises(SystemExit) as ended:
            benchmark.main()
        assert not ended.value.code
        assert f"usage: benchmark.py {name} " in capsys.readouterr().out


@pytest.mark.task
def test_two_workers_on_an_emulated_network_send_what_the_formulas_say(tmp_path):
    file = tmp_path / "result.json"
    variants = ["local", "ddp", "decent_dp", "gossip", "gossip:complete", "gossip+no_overlap+mix_first", "gossip+bf16"]
    words = ["--model", "transformer-2-128", "--network.rate_mbit", "1000", "--network.delay_ms", "1"]
    words += ["--variants", f"[{', '.join(variants)}]", "--output", str(file)]
    words += ["--targets", "[memory gossip <= 2.01]", "--gossip.log_every", "0"]
    status, out, err = finish(start([*forked(2), SCRIPT, *words, *SMALL], tmp_path))
    assert (status, error_lines(err)) == (0, []), err
    result = json.loads(file.read_text())
    assert file.with_suffix(".png").is_file()
    measured = result["variants"]
    installed = find_spec("decent_dp") is not None and find_spec("loguru") is not None
    assert ("decent_dp" in measured) == installed
    assert installed or "decent_dp is left out: it is not installed" in out
    size = 4 * result["parameters"]  # also what a ring of two sends for an all-reduce
    expected = dict.fromkeys(measured, size) | {"local": 0, "gossip+bf16": size / 2}
    for name, row in measured.items():
        assert row["bytes_sent"] == pytest.approx(expected[name], rel=0.01), name
        assert 0 <= row["bytes_carried"] - row["bytes_sent"] < 4096, name  # headers and the meeting at the start
        assert (row["waited"] is not None) == name.startswith("gossip")
        assert len(row["rounds"]["seconds"]) == 2
    assert [target["met"] for target in result["targets"]] == [True]
    assert measured["local"]["extra_copies"] == measured["ddp"]["extra_copies"] == 0
    assert measured["gossip"]["extra_copies"] == pytest.approx(2, abs=0.01)
    assert "by a relay of connections" in out


@pytest.mark.slow
@pytest.mark.task
def test_sharded_workers_send_what_the_formulas_say_and_have_one_staging_buffer_more(tmp_path):
    file = tmp_path / "result.json"
    words = ["--model", "transformer-2-128", "--workers", "2", "--shards", "2", "--network.rate_mbit", "1000"]
    words += ["--network.delay_ms", "1", "--output", str(file)]
    words += ["--variants", "[fsdp, fsdp+bytes, hsdp, gossip, gossip+bf16]"]
    status, out, err = finish(start([*forked(), SCRIPT, *words, "--gossip.log_every", "0", *SMALL], tmp_path))
    assert (status, error_lines(err)) == (0, []), err
    assert "2 workers of 2 processes" in out
    result = json.loads(file.read_text())
    measured, shard = result["variants"], 4 * result["parameters"] / 2
    expected = {"fsdp": 0, "fsdp+bytes": shard, "hsdp": shard, "gossip": shard, "gossip+bf16": shard / 2}
    assert sorted(measured) == sorted(expected)
    for name, row in measured.items():
        assert row["bytes_sent"] == pytest.approx(expected[name], rel=0.01), name
        assert 0 <= row["bytes_carried"] - row["bytes_sent"] < 4096, name
    assert [measured[name]["extra_copies"] for name in ("fsdp", "hsdp")] == [0, 0]
    assert measured["gossip"]["extra_copies"] == pytest.approx(2, abs=0.01)  # of a shard


@pytest.mark.slow
@pytest.mark.task
def test_the_script_starts_its_workers_itself(tmp_path):
    words = ["--model", "tiny-3", "--workers", "2", "--variants", "[local, gossip]", *SMALL]
    status, out, err = finish(start([*forked(), SCRIPT, *words], tmp_path))
    assert (status, error_lines(err)) == (0, []), err
    assert "2 workers" in out


BROKEN = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from tasks.benchmarks import measurement

def of_launcher(word):
    children = pathlib.Path(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children").read_text().split()
    return next(int(child) for child in children if word in pathlib.Path(f"/proc/{{child}}/cmdline").read_text())

really, turns = measurement._take_turn, []
def take_turn(*arguments):
    turns.append(1)
    if os.environ["RANK"] == "1" and len(turns) == 2:
        exec(os.environ["BREAK"])
    return really(*arguments)
measurement._take_turn = take_turn
if __name__ == "__main__":
    from tasks import benchmark
    benchmark.main()
"""


@pytest.mark.slow
@pytest.mark.task
@pytest.mark.parametrize(
    ("broken", "statuses", "said", "blamed"),
    [
        ("os.kill(os.getppid(), signal.SIGINT)", {130}, "interrupted", "nobody"),
        ("os.kill(of_launcher('.relay'), signal.SIGKILL)", {1}, "connections was ended by SIGKILL", "the relay"),
        ("os.kill(os.getpid(), signal.SIGKILL)", {1, 137}, "worker 1", "worker 1"),  # the other may be found first
        ("raise OSError('no space left')", {1}, "error: worker 1: no space left", "worker 1"),
    ],
    ids=["interrupt", "relay", "worker", "file"],
)
def test_measuring_that_ends_early_says_why_in_few_lines(broken, statuses, said, blamed, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    words = ["--model", "tiny-4", "--workers", "2", "--variants", "[ddp, gossip]", *SMALL]
    words += ["--network.delay_ms", "1"]
    status, _, err = finish(start([*forked(), script, *words], tmp_path, BREAK=broken))
    assert status in statuses, err
    lines = [line for line in err.splitlines() if not line.startswith("[rank")]  # torch's own, of broken connections
    assert "Traceback" not in err
    assert said in err
    assert len(lines) <= 6, err
    assert all(blamed in line for line in error_lines(err)), err


@pytest.mark.task
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "[gossip:one_peer_exponential]"], "got 3. Use 'base_graph'"),
        (["--output", "/proc/nope/a.json"], "output must be a file that can be written"),
    ],
    ids=["odd count", "no place for output"],
)
def test_mistakes_end_in_one_line_and_status_2(words, message, tmp_path):
    status, _, err = finish(start([*forked(), SCRIPT, "--model", "tiny-3", "--workers", "3", *words], tmp_path))
    assert status == 2
    assert len(error_lines(err)) == 1
    assert message in err
    assert not list(Path(tmp_path).iterdir())
