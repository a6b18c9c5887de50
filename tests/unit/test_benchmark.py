"""The parts of the benchmark: names, targets, models, counters, and the relay that emulates a network."""

import json
import os
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dsgdac_accel import GossipConfig, WorkerGroup, WorkerLostError
from tasks.benchmarks import launching, measurement, variants
from tasks.benchmarks.config import BenchmarkConfig, NetworkConfig
from tasks.benchmarks.link import Network
from tasks.benchmarks.measurement import Measured, Turns, measure, quartiles, summarize
from tasks.benchmarks.memory import all_storages, extra_copies
from tasks.benchmarks.models import TRANSFORMERS, LanguageModel, build_workload, check_model_name
from tasks.benchmarks.names import VariantName
from tasks.benchmarks.relay import Direction
from tasks.benchmarks.relay_process import RelayClient, running_relay
from tasks.benchmarks.relayed_store import RelayedStore, port_in, replaced
from tasks.benchmarks.report import check_output, report
from tasks.benchmarks.targets import Target
from tasks.common.config import parse_config

CPU = torch.device("cpu")


def workload(name, seed=0):
    return build_workload(name, batch_size=2, image_size=8, device=CPU, seed=seed)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variants": ("local", "gosip")}, "Did you mean 'gossip'"),
        ({"variants": ()}, "name at least one"),
        ({"variants": ("local", "local")}, "got 'local' twice. Keep one"),
        ({"variants": ("gossip:ringg",)}, "Did you mean 'ring'"),
        ({"variants": ("gossip+int9",)}, "got 'int9'"),
        ({"variants": ("gossip+bf16+int8",)}, "contradict"),
        ({"variants": ("gossip+every_0",)}, "got 'every_0'"),
        ({"variants": ("ddp:ring",)}, "have no topology"),
        ({"variants": ("decent_dp:grid",)}, "must be one of ring, one-peer-exp, complete"),
        ({"targets": ("gossip < 0.5 of ddp",)}, "of the form"),
        ({"targets": ("gossip <= 0.5",)}, "of the form"),
        ({"targets": ("gossip+bf16 <= 0.5 of ddp",)}, "about variants that are measured; got .gossip.bf16. in"),
        ({"model": "wrn-11-2"}, "depth of a wide ResNet"),
        ({"model": "tiny-0"}, "at least 1"),
        ({"model": "resnet"}, "transformer-10m"),
        ({"rounds": 0}, "rounds"),
        ({"workers": 0}, "workers"),
        ({"gossip": GossipConfig(workers_per_process=2)}, "workers_per_process"),
        ({"variants": ("gossip+every_2+every_3",)}, "contradict"),
        ({"targets": ("gossip <= 1.2.3 of ddp",)}, "of the form"),
        ({"output": Path("x.png")}, "ends in .json; got x.png"),
        ({"shards": 0}, "shards"),
        ({"shards": 2, "variants": ("gossip", "ddp")}, "fsdp, hsdp, gossip where workers have several .* got 'ddp'"),
        ({"variants": ("gossip", "hsdp")}, "kind hsdp need shards >= 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkConfig(**settings)


@pytest.mark.parametrize(
    "wrong", [{"rate_mbit": 0}, {"delay_ms": -1}, {"queue_kb": 1}, {"rate_mbit": float("inf")}], ids=str
)
def test_networks_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NetworkConfig(**wrong)


def test_another_number_of_workers_than_was_launched_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="the number that was launched, 3; got 4"):
        BenchmarkConfig(workers=4)
    sharded = {"shards": 2, "variants": ("gossip",)}
    with pytest.raises(ValueError, match="the number that was launched, 3; got 3 of 2 processes"):
        BenchmarkConfig(workers=3, **sharded)
    with pytest.raises(ValueError, match="shards must divide the number of processes, 3; got 2"):
        BenchmarkConfig(**sharded)


def test_sections_and_lists_come_from_the_command_line():
    words = ["--network.rate_mbit", "10", "--variants", "[local, gossip+bf16]"]
    config = parse_config(BenchmarkConfig, words)
    assert config.network == NetworkConfig(rate_mbit=10)
    assert config.network.bytes_per_second == 1.25e6
    assert config.variants == ("local", "gossip+bf16")
    assert parse_config(BenchmarkConfig, []).network is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gossip", {}),
        ("gossip:complete+no_overlap", {"topology": "complete", "overlap": False}),
        ("gossip+mix_first+int8", {"order": "mix_first", "comm_dtype": "int8"}),
        ("gossip:ring+bf16+every_4", {"topology": "ring", "comm_dtype": "bf16", "mix_every": 4}),
        ("gossip+int2", {"comm_dtype": "int2"}),
        ("ddp+bf16", {}),
    ],
)
def test_a_name_says_which_settings_it_changes(name, changes):
    assert VariantName.parse(name).changes() == changes
    settings = VariantName.parse(name).settings(GossipConfig(topology="grid", log_every=7))
    assert settings.log_every == 7
    assert all(getattr(settings, key) == value for key, value in changes.items())
    assert settings.topology == changes.get("topology", "grid")


def test_a_model_is_known_by_one_spelling():
    assert BenchmarkConfig(model=" Tiny-1000 ").model == "tiny-1000"


# ---- what is measured


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [("tiny-400", None, 400), ("tiny-7", None, 7), ("transformer-10m", 10e6, None), ("wrn-10-1", None, None),
     ("translation-tiny", None, None)],
)  # fmt: skip
def test_models_have_the_size_of_their_name_and_train(name, parameters, tensors):
    check_model_name(name, 8)
    work = workload(name)
    found = trained(work.model)
    total = sum(parameter.numel() for parameter in found)
    assert parameters is None or total == pytest.approx(parameters, rel=0.05)
    assert tensors is None or len(found) == tensors
    work.loss(work.model).backward()
    assert all(parameter.grad is not None for parameter in found)
    again = workload(name, seed=1)
    assert all(map(torch.equal, found, trained(again.model)))


def test_the_larger_transformer_has_40_million_parameters():
    with torch.device("meta"):
        model = LanguageModel(*TRANSFORMERS["transformer-40m"])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(40e6, rel=0.05)


@pytest.mark.parametrize("buffers", [*(pytest.param(count, marks=pytest.mark.slow) for count in (0, 1)), 3])
def test_memory_beyond_model_gradients_and_optimizer_is_counted_in_copies(buffers):
    before = all_storages()
    model = torch.nn.Linear(100, 99, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    held = [torch.empty(9900) for _ in range(buffers)]
    views = [buffer[:10] for buffer in held]  # the same memory
    assert extra_copies(before, model, variants._tensors_of(optimizer)) == pytest.approx(len(views))


def test_tables_hold_medians_and_ratios_within_rounds():
    noisy, twice = [1.0, 10.0, 3.0, 2.0, 5.0], [2.0, 20.0, 6.0, 4.0, 10.0]
    table = summarize({"local": Turns(noisy, cpu_seconds=noisy), "ddp": Turns(twice, cpu_seconds=noisy, waited=noisy)})
    assert table["ddp"]["ratios"]["local"] == {"q1": 2.0, "median": 2.0, "q3": 2.0}
    assert table["local"]["ratios"]["ddp"]["median"] == 0.5
    assert (table["ddp"]["seconds"], table["ddp"]["cpu_ratios"]["local"]["median"]) == (6.0, 1.0)
    assert (table["ddp"]["waited"], table["local"]["waited"]) == (3.0, None)
    assert quartiles([3.0], [2.0]) == {"q1": 1.5, "median": 1.5, "q3": 1.5}


@pytest.mark.parametrize("ratios", [[1.0, 5.0], [1.0, 1.1, 9.0]])
def test_quartiles_are_within_what_was_measured(ratios):
    found = quartiles(ratios, [1.0] * len(ratios))
    assert min(ratios) <= found["q1"] <= found["median"] <= found["q3"] <= max(ratios)


def test_where_every_variant_is_left_out_the_report_says_why(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "decent_dp", None)
    config = BenchmarkConfig(model="tiny-4", variants=("decent_dp",), rounds=2, output=tmp_path / "result.json")
    measured = measure(config, WorkerGroup(CPU))
    assert measured.turns == {}
    report(config, measured, 1)
    out = capsys.readouterr().out
    assert "decent_dp is left out: it is not installed" in out
    assert "pip install decent-dp==0.2.3" in out
    assert json.loads(config.output.read_text())["variants"] == {}


@pytest.mark.parametrize("when", ["building it", "the first steps", "a turn"])
def test_a_lost_worker_is_named_whatever_the_variant_communicates_by(when, monkeypatch):
    calls = []

    def broken():
        calls.append(1)
        if when != "a turn" or len(calls) > 3:
            raise torch.distributed.DistBackendError("Connection closed by peer")

    def build(*_):
        if when == "building it":
            broken()
        model = torch.nn.Linear(2, 2)
        return variants.Variant(SimpleNamespace(model=model, batch=()), broken, lambda: iter(()))

    monkeypatch.setattr(measurement, "build_variant", build)
    with pytest.raises(WorkerLostError, match=f"was lost in {when.replace('it', 'ddp')}"):
        measure(BenchmarkConfig(model="tiny-4", variants=("ddp",)), WorkerGroup(CPU))


@pytest.mark.parametrize(
    ("text", "measured", "met"),
    [
        ("gossip <= 0.5 of ddp", 0.5, True),
        ("gossip <= 0.49 of ddp", 0.5, False),
        ("cpu gossip <= 2 of ddp", 3.0, False),
        ("memory gossip <= 1.0", 1.0004, True),
        ("memory gossip <= 1.0", 1.001, False),
        ("gossip <= 1 of decent_dp", None, None),
    ],
)
def test_targets_are_judged_by_medians(text, measured, met):
    copies = measured if text.startswith("memory") else 0.0
    turns = {
        "ddp": Turns([2.0, 4.0], cpu_seconds=[1.0, 2.0]),
        "gossip": Turns([1.0, 2.0], cpu_seconds=[3.0, 6.0], extra_copies=copies),
    }
    verdict = Target.parse(text).judge(summarize(turns))
    assert (verdict.measured, verdict.met) == (measured, met)
    assert {True: "met", False: "MISSED", None: "unknown"}[met] in verdict.line()


def test_the_report_says_what_was_measured_what_was_left_out_and_what_became_of_targets(tmp_path, capsys):
    file = tmp_path / "deep" / "result.json"
    names = ("local", "ddp", "gossip", "decent_dp")
    config = BenchmarkConfig(
        model="tiny-4", variants=names, output=file, targets=("gossip <= 0.5 of ddp", "gossip <= 1 of decent_dp")
    )
    turns = {
        "local": Turns([0.1, 0.1], cpu_seconds=[0.1, 0.1]),
        "ddp": Turns([0.4, 0.4], cpu_seconds=[0.1, 0.1]),
        "gossip": Turns([0.3, 0.3], cpu_seconds=[0.1, 0.1], waited=[0.2, 0.2], bytes_sent=4000.0, bytes_carried=4100.0),
    }
    result = report(config, Measured(turns, {"decent_dp": "it is not installed"}, 1000), 4, ["by magic"])
    out = capsys.readouterr().out
    assert "decent_dp is left out: it is not installed" in out
    assert "gossip at most 0.5 of ddp, measured 0.750: MISSED" in out
    assert "by magic" in out
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    assert [target["met"] for target in result["targets"]] == [False, None]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("there", ["result.json", "result.png", None])
def test_files_that_cannot_be_written_are_noticed_before_anything_is_measured(there, tmp_path):
    file = tmp_path / "deep" / "result.json"
    check_output(file)
    assert [*file.parent.iterdir()] == []
    file.write_text("kept")
    check_output(file)
    assert file.read_text() == "kept"
    file.unlink()
    if there is not None:
        (file.parent / there).mkdir()
    with pytest.raises(ValueError, match="output must be a file that can be written"):
        check_output(file if there else Path("/proc/nope/result.json"))


def test_a_plot_that_cannot_be_drawn_is_noticed_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install dsgdac-accel\[tasks\]\. Or leave out output"):
        check_output(tmp_path / "result.json")


# ---- the emulated network


def test_a_line_carries_one_piece_after_the_other_both_ways_at_once():
    network = Network(rate=1000.0, delay=0.5, queue=1e9)
    assert network.send(0.0, 0, 1, 1000) == 1.5
    assert network.send(0.0, 1, 0, 1000) == 1.5  # full duplex
    assert network.send(0.0, 0, 2, 1000) == 2.5  # behind the first one
    assert network.send(0.0, 3, 1, 1000) == 2.5  # its line out is free, but that into 1 is not
    assert network.send(10.0, 0, 1, 500) == 11.0


def test_small_pieces_take_as_long_as_one_large_one():
    whole, cut = Network(1000.0, 0.5, 1e9), Network(1000.0, 0.5, 1e9)
    assert max(cut.send(0.0, 0, 1, 10) for _ in range(100)) == pytest.approx(whole.send(0.0, 0, 1, 1000))


def test_a_full_queue_makes_the_sender_wait():
    network = Network(rate=1000.0, delay=0.5, queue=2000.0)
    assert network.room_at(0.0, 0, 1) == 0.0
    network.send(0.0, 0, 1, 3000)
    assert network.room_at(0.0, 0, 1) == pytest.approx(1.0)  # until only 2000 are left
    assert network.room_at(0.0, 0, 2) == pytest.approx(1.0)
    assert network.room_at(0.0, 2, 1) == pytest.approx(1.0)  # the same on the way in
    assert network.room_at(5.0, 0, 1) == 5.0
    assert network.room_at(0.0, 3, 2) == 0.0


def test_the_relay_hands_on_every_byte_both_ways_and_counts_them():
    there, back = os.urandom(3_000_001), os.urandom(100_000)
    with (
        running_relay(rate=1e9, delay=0.001, queue=64 * 1024) as control,
        socket.create_server(("127.0.0.1", 0)) as peer,
    ):
        client = RelayClient(control)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        port = peer.getsockname()[1]
        assert client.ask(f"owner 1 {port}") == "ok"
        route = int(client.ask(f"route 0 {port}"))
        with socket.create_connection(("127.0.0.1", route)) as near, peer.accept()[0] as far:
            near.settimeout(60)
            far.settimeout(60)
            far.sendall(back)
            assert receive(near, len(back)) == back
            near.sendall(there)  # nobody reads yet: the relay has to keep what the receiver cannot take
            assert receive(far, len(there)) == there
            near.close()
            assert far.recv(1) == b""
        counters = client.counters()
        assert counters.bytes_sent == {0: len(there), 1: len(back)}
        assert 0 <= counters.late <= counters.latest
        with pytest.raises(RuntimeError, match="did not carry out 'dance'"):
            client.ask("dance")
        client.close()
    with pytest.raises(ConnectionError, match=r"relay that carries .* does not answer .*(refused|reset)"):
        RelayClient(control)


def test_a_relay_that_ended_by_itself_is_named_by_whoever_asks_and_in_the_end(monkeypatch, capfd):
    started, really = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **options: started.append(really(*words, **options)) or started[0]
    )
    with running_relay(rate=1e9, delay=0.0, queue=64 * 1024) as control:
        assert os.getpgid(started[0].pid) == started[0].pid  # the terminal's Ctrl-C is for others
        client = RelayClient(control)
        here = launching.Joined(WorkerGroup(CPU), client)
        with pytest.raises(WorkerLostError, match="it was the worker"), here.relay_is_blamed():
            raise WorkerLostError("it was the worker")
        started[0].kill()
        started[0].wait()
        with pytest.raises(ConnectionError, match=r"relay that carries .* does not answer"), here.relay_is_blamed():
            raise WorkerLostError("it was the worker")
        client.close()
    assert capfd.readouterr().err == "the relay that carries the workers' connections was ended by SIGKILL\n"


@pytest.mark.parametrize("takes", [1, 7, 1000])
def test_the_relay_goes_on_where_a_receiver_took_a_part(takes):
    class Line:
        def __init__(self, data=b""):
            self.data, self.written = data, bytearray()

        def recv(self, size):
            piece, self.data = self.data[:size], self.data[size:]
            return piece

        def send(self, piece):
            self.written += piece[:takes]
            return min(takes, len(piece))

    def end(line):
        wanted = []
        return SimpleNamespace(socket=line, open=True, want=lambda *change: wanted.append(change), wanted=wanted)

    data, counted, timers = os.urandom(250), [], []
    source, target = end(Line(data)), end(Line())
    relay = SimpleNamespace(
        network=Network(1e6, 1.0, 1e6),
        piece=100,
        at=lambda *timer: timers.append(timer),
        count=lambda *c: counted.append(c),
    )
    direction = Direction(relay, source, target, 0, 1)
    for _ in range(3):
        direction.read()
    first = timers[0][0]
    direction.deliver(first - 1e-6)
    assert not target.socket.written  # nothing arrives early
    for _ in range(300):
        direction.deliver(timers[-1][0])
    assert target.socket.written == data
    assert target.wanted[-1] == (select.EPOLLOUT, False)
    assert ((select.EPOLLOUT, True) in target.wanted) == (takes < 100)
    assert len(counted) == 3
    source.socket.data = b""
    source.close = target.close = lambda: counted.append("closed")
    direction.read()
    assert counted[3:] == ["closed", "closed"]


def receive(connection, size):
    found = bytearray()
    while len(found) < size:
        found += connection.recv(size - len(found))
    return bytes(found)


def announcement(port, host=(127, 0, 0, 1)):
    return b"\x00vm" + b"\x02\x00" + struct.pack(">H", port) + bytes(host) + bytes(8) + b"\x07\x00"


def test_addresses_of_workers_are_found_and_replaced_in_what_gloo_announces():
    assert port_in(announcement(40_001)) == 40_001
    assert port_in(announcement(40_001, host=(10, 0, 0, 1))) is None
    assert port_in(b"") is None
    assert replaced(announcement(40_001), bytes((127, 0, 0, 2)), 513) == announcement(513, host=(127, 0, 0, 2))


def test_a_worker_connects_to_lower_ranks_by_the_relay_and_waits_for_higher_ones():
    class FakeRelay:
        asked: list = []

        def ask(self, line):
            self.asked.append(line)
            return "1234"

    shared, relay = dist.HashStore(), FakeRelay()
    stores = [RelayedStore(shared, rank, relay) for rank in range(3)]
    for rank, store in enumerate(stores):
        store.set(f"worker/{rank}", announcement(40_000 + rank))
    assert relay.asked == [f"owner {rank} {40_000 + rank}" for rank in range(3)]
    assert stores[1].get("worker/0") == announcement(1234, host=(0, 0, 0, 0))
    assert relay.asked[3:] == ["route 1 40000"]
    assert stores[1].get("worker/1") == announcement(40_001)
    assert stores[1].get("worker/2") == announcement(40_002, host=(127, 0, 0, 2))
    stores[0].set("word", "text")
    assert stores[2].get("word") == b"text"


def test_processes_of_a_worker_connect_without_the_relay_and_share_its_line():
    asked: list = []
    shared, relay = dist.HashStore(), SimpleNamespace(ask=lambda line: asked.append(line) or "1234")
    stores = [RelayedStore(shared, rank, relay, shards=2) for rank in range(4)]
    for rank, store in enumerate(stores):
        store.set(f"process/{rank}", announcement(40_000 + rank))
    assert asked == [f"owner {rank // 2} {40_000 + rank}" for rank in range(4)]
    assert stores[3].get("process/2") == announcement(40_002, host=(0, 0, 0, 0))
    assert stores[2].get("process/3") == announcement(40_003, host=(127, 0, 0, 2))
    assert stores[2].get("process/1") == announcement(1234, host=(0, 0, 0, 0))
    assert asked[4:] == ["route 1 40001"]
    assert [store.routes for store in stores] == [0, 0, 1, 0]


def test_the_launcher_keeps_the_relay_while_its_workers_run(monkeypatch, capfd):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    config = BenchmarkConfig(workers=3, network=NetworkConfig(), model="tiny-4")
    assert launching.must_launch(config)
    started, ended = [], []

    def join():
        client = RelayClient(int(os.environ[launching._RELAY]))
        started.append(client.counters().bytes_sent)
        client.close()
        if ended:
            raise ended[0]
        return True

    def fake(function, arguments, count, join_them=None, **how):
        started.append((arguments[:2], count, arguments[2]["WORLD_SIZE"]))
        return SimpleNamespace(processes=[], join=join)

    monkeypatch.setattr(launching.mp, "start_processes", fake)
    assert launching.launch_workers(config, print, ["--x"]) == 0
    assert started == [((print, ["--x"]), 3, "3"), {}]
    exited = launching.mp.ProcessExitedException
    ended.append(exited("", error_index=1, error_pid=1, exit_code=7))
    assert launching.launch_workers(config, print, []) == 7
    ended[0] = exited("", error_index=1, error_pid=1, exit_code=-9, signal_name="SIGKILL")
    assert launching.launch_workers(config, print, []) == 137
    assert capfd.readouterr().err == "error: worker 1 was ended by SIGKILL\n"
    ended[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        launching.launch_workers(config, print, [])
    monkeypatch.setitem(os.environ, "RANK", "0")
    assert not launching.must_launch(config)


@pytest.mark.parametrize(
    ("settings", "launched", "message"),
    [
        ({"network": NetworkConfig()}, None, "needs several workers on one machine; got 1"),
        ({"network": NetworkConfig()}, (4, 2), "got 4, 2 of them on this one"),
        ({"variants": ("gossip:one_peer_exponential",), "workers": 6}, None, "that is a power of two; got 6"),
        ({"variants": ("gossip:one_peer_exponential",)}, (3, 3), "that is a power of two; got 3"),
    ],
)
def test_impossible_numbers_of_workers_are_refused_before_they_start(settings, launched, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if launched:
        for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), (0, *launched), strict=True):
            monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=message):
        launching.check_workers(BenchmarkConfig(model="tiny-4", **settings))
