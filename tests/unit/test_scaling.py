"""The scaling model: against all-reduces and training steps played through on an emulated network, event by event."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dsgdac_accel.cli import main
from dsgdac_accel.cli.scaling import table_lines
from dsgdac_accel.scaling import (
    MOST_BITS,
    MOST_PARAMETERS,
    SCHEMES,
    Cluster,
    complete_gossip,
    one_peer_exchange,
    one_peer_gossip,
    ring_all_reduce,
    ring_ddp,
    tree_all_reduce,
    tree_ddp,
    worker_counts,
)
from dsgdac_accel.topology import build_topology
from tasks.benchmarks.link import Network

NETWORKS = [(12.5e6, 0.01), (125e6, 0.001), (1e6, 0.0)]
ENDLESS = 1e15  # bytes: a queue that never fills


def play_ring(network, starts, size):
    """When each worker has the sum, where worker i begins its ring all-reduce of `size` bytes at starts[i]."""
    n = len(starts)
    times = list(starts)
    for _ in range(2 * (n - 1)):
        arrivals = [network.send(times[i], i, (i + 1) % n, size / n) for i in range(n)]
        times = [max(times[i], arrivals[i - 1]) for i in range(n)]
    return times


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
def test_a_ring_all_reduce_sums_with_the_bytes_and_messages_of_the_formula(n):
    # The algorithm itself, on numbers: part k of worker i, of which each message carries one.
    rng = np.random.default_rng(n)
    parts = rng.integers(0, 100, size=(n, n, 5))
    held, sent = parts.copy(), np.zeros(n, int)
    for round_ in range(n - 1):
        carried = [held[i, (i - round_) % n].copy() for i in range(n)]
        for i in range(n):
            held[(i + 1) % n, (i - round_) % n] += carried[i]
            sent[i] += 1
    for round_ in range(n - 1):
        carried = [held[i, (i + 1 - round_) % n].copy() for i in range(n)]
        for i in range(n):
            held[(i + 1) % n, (i + 1 - round_) % n] = carried[i]
            sent[i] += 1
    assert (held == parts.sum(0)).all()
    traffic = ring_all_reduce(n, size=parts[0].nbytes)
    assert (sent == traffic.messages).all()
    assert sent[0] * parts[0, 0].nbytes == pytest.approx(traffic.bytes_sent)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 64])
@pytest.mark.parametrize(("rate", "delay"), NETWORKS)
def test_a_ring_all_reduce_takes_the_seconds_of_the_formula(n, rate, delay):
    size = 4e6
    ended = play_ring(Network(rate, delay, ENDLESS), [0.0] * n, size)
    assert ended == pytest.approx([ring_all_reduce(n, size, rate, delay).seconds] * n, rel=1e-9)


@pytest.mark.parametrize("n", [2, 4, 16, 256])
@pytest.mark.parametrize(("rate", "delay"), NETWORKS)
@pytest.mark.parametrize("compute", [0.02, 0.18, 5.0])
def test_steps_of_one_peer_gossip_settle_at_the_formula_whatever_the_number_of_workers(n, rate, delay, compute):
    cluster = Cluster(parameters=1e6, compute_seconds=compute, bandwidth=rate, latency=delay)
    topology, network = build_topology("one_peer_ring", n), Network(rate, delay, ENDLESS)
    began, steps, per_step = np.zeros(n), 12, []
    for step in range(steps):  # at its start the parameters are final and sent; they are needed at its end
        ended = began + compute
        for worker in range(n):
            for peer in topology.recipients(step, worker):
                ended[peer] = max(ended[peer], network.send(began[worker], worker, peer, cluster.parameter_bytes))
        per_step.append(ended - began)
        began = ended
    predicted = one_peer_gossip(cluster, n)
    np.testing.assert_allclose(np.mean(per_step[2:], axis=0), predicted.seconds, rtol=1e-9)
    assert predicted.seconds == max(compute, predicted.exchange_seconds)
    assert max(len(topology.recipients(step, worker)) for step in range(2) for worker in range(n)) == 1


@pytest.mark.parametrize("n", [2, 4, 9])
@pytest.mark.parametrize(("rate", "delay"), NETWORKS)
@pytest.mark.parametrize(
    ("parameters", "compute", "buckets"),
    [(1e6, 0.18, None), (25e6, 0.18, None), (25e6, 100.0, None), (1e6, 0.18, 1), (1e6, 0.18, 5), (1e6, 3.0, 4),
     (1e6, 0.0, 3)],
)  # fmt: skip
def test_a_step_of_ddp_takes_the_seconds_of_the_formula(n, rate, delay, parameters, compute, buckets):
    cluster = Cluster(parameters=parameters, compute_seconds=compute, bandwidth=rate, latency=delay, buckets=buckets)
    sizes = [size for count, size in cluster.gradient_buckets() for _ in range(count)]
    network, times, ready = Network(rate, delay, ENDLESS), [0.0] * n, 0.0
    for size in sizes:
        ready += size
        computed = compute / 3 + 2 / 3 * compute * ready / cluster.gradient_bytes
        times = play_ring(network, [max(time, computed) for time in times], size)
    step = ring_ddp(cluster, n)
    assert times == pytest.approx([step.seconds] * n, rel=1e-9)
    assert sum(sizes) == pytest.approx(4 * parameters)
    assert step.bytes_sent == pytest.approx(2 * (n - 1) / n * 4 * parameters)
    assert step.messages == 2 * (n - 1) * len(sizes)


def test_ddp_reduces_the_first_mebibyte_by_itself_and_then_25_at_a_time():
    for mebibytes in (2, 26, 27, 51, 52):
        gradients = [torch.empty(2**18) for _ in range(mebibytes)]
        assigned, _ = dist._compute_bucket_assignment_by_size(gradients, [2**20, 25 * 2**20])  # torch's own
        first, (count, size) = Cluster(
            parameters=mebibytes * 2**18, compute_seconds=0.1, bandwidth=1e9
        ).gradient_buckets()
        assert first == (1, 2**20)
        assert 1 + count == len(assigned)
        assert 2**20 + count * size == pytest.approx(mebibytes * 2**20)
    assert Cluster(parameters=1000, compute_seconds=0.1, bandwidth=1e9).gradient_buckets() == ((1, 4000.0),)


@pytest.mark.timeout(20)
def test_the_largest_model_takes_no_longer_than_a_small_one():
    cluster = Cluster(parameters=MOST_PARAMETERS, compute_seconds=0.1, bandwidth=1e9, gradient_bits=MOST_BITS)
    assert len(table_lines(cluster, worker_counts(10_000))) == 17


@pytest.mark.parametrize("n", [3, 4, 100, 10_000])
def test_no_all_reduce_undercuts_what_physics_allows_and_the_tree_is_within_two_of_it(n):
    size, rate, delay = 4e6, 12.5e6, 0.01
    fewest_bytes, fewest_rounds = 2 * (n - 1) / n * size, math.ceil(math.log2(n))
    for all_reduce in (ring_all_reduce, tree_all_reduce):
        assert all_reduce(n, size).bytes_sent >= fewest_bytes * (1 - 1e-12)
        assert all_reduce(n, size, rate, delay).seconds >= max(fewest_bytes / rate, fewest_rounds * delay)
    tree = tree_all_reduce(n, size, rate, delay)
    assert tree.seconds <= 2 * (fewest_rounds * delay + fewest_bytes / rate)
    assert tree_all_reduce(n, 0.0, rate, delay).seconds == pytest.approx(2 * fewest_rounds * delay)


def test_two_workers_are_no_tree():
    assert tree_all_reduce(2, 4e6, 12.5e6, 0.01) == ring_all_reduce(2, 4e6, 12.5e6, 0.01)


def test_to_ten_thousand_workers_only_one_peer_gossip_stays_as_fast():
    cluster = Cluster(parameters=1e6, compute_seconds=0.18, bandwidth=12.5e6, latency=0.01)
    counts = worker_counts(10_000)
    assert counts[-1] == 10_000
    for scheme in (ring_ddp, tree_ddp, complete_gossip):
        seconds = [scheme(cluster, n).seconds for n in counts]
        assert seconds == sorted(seconds)
        assert seconds[-1] > 3 * seconds[1] or scheme is tree_ddp
    assert len({one_peer_gossip(cluster, n).seconds for n in counts[1:]}) == 1
    assert {scheme(cluster, 1).seconds for scheme in SCHEMES.values()} == {0.18}


def test_fewer_bits_send_less_and_no_overlap_adds_the_exchange():
    common = {"parameters": 1e6, "compute_seconds": 0.18, "bandwidth": 12.5e6, "latency": 0.01}
    full, half = Cluster(**common), Cluster(**common, bits=16)
    assert one_peer_gossip(half, 8).bytes_sent == one_peer_gossip(full, 8).bytes_sent / 2
    assert ring_ddp(half, 8) == ring_ddp(full, 8)
    exposed = one_peer_gossip(Cluster(**common, overlap=False), 8)
    assert exposed.seconds == pytest.approx(0.18 + one_peer_gossip(full, 8).exchange_seconds)
    assert one_peer_exchange(8, 65 * 2**20).messages == 2


@pytest.mark.parametrize(
    "wrong",
    [{"parameters": 0}, {"parameters": 1e14}, {"bandwidth": 0}, {"latency": -1}, {"bits": 0}, {"gradient_bits": 1e300},
     {"compute_seconds": math.nan}, {"forward_share": 2}, {"buckets": 0}],
)  # fmt: skip
def test_impossible_clusters_are_refused_by_name(wrong):
    settings = {"parameters": 1e6, "compute_seconds": 0.1, "bandwidth": 1e6} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Cluster(**settings)


@pytest.mark.parametrize("workers", [0, -1, 2.5, True, 10**9])
def test_impossible_numbers_of_workers_are_refused(workers):
    cluster = Cluster(parameters=1e6, compute_seconds=0.1, bandwidth=1e6)
    for scheme in SCHEMES.values():
        with pytest.raises(ValueError, match="workers must be"):
            scheme(cluster, workers)


def test_the_command_prints_what_the_library_says_and_draws_it(capsys, tmp_path):
    file = tmp_path / "plots" / "scaling.png"
    words = ["--parameters", "1M", "--bandwidth", "100M", "--latency", "10", "--compute", "180", "--workers", "12"]
    assert main(["scaling", *words, "--plot", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cluster = Cluster(parameters=1e6, compute_seconds=0.18, bandwidth=12.5e6, latency=0.01)
    assert lines[-1] == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in lines[3:-1]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 12]
    for row in rows:
        for place, scheme in enumerate(SCHEMES.values()):
            step = scheme(cluster, int(row[0]))
            sent, messages, milliseconds = map(float, row[1 + 3 * place : 4 + 3 * place])
            assert (sent, milliseconds) == pytest.approx((step.bytes_sent / 1e6, 1e3 * step.seconds), rel=1e-3)
            assert messages == step.messages


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "--workers must be an integer >= 1; got 0"),
        (["--workers", "100000000"], "--workers must be an integer from 1 to 10000000; got 100000000"),
        (["--parameters", "many"], "--parameters: must be a number such as 25M or 1e6; got 'many'"),
        (["--parameters", "999999999999999999G"], "--parameters must be a number in [1, 1e+13]; got 1e+27"),
        (["--bandwidth", "0"], "--bandwidth must be a finite number > 0; got 0.0. It is in bits per second."),
        (["--compute", "-1"], "--compute must be a number in [0, 1e+09]; got -1.0. It is in milliseconds."),
        (["--compute", "inf"], "--compute must be a number in [0, 1e+09]; got inf"),
        (["--latency", "nan"], "--latency must be a number in [0, 1e+09]; got nan"),
        (["--latency", "1e308"], "--latency must be a number in [0, 1e+09]; got 1e+308. It is in milliseconds."),
        (["--bits", "0"], "--bits must be a number in [0.001, 10000]; got 0.0"),
        (["--bits", "int5"], "--bits: must be a number or one of full, bf16, int8, int4, int2; got 'int5'"),
        (["--gradient-bits", "1e9"], "--gradient-bits must be"),
        (["--plot", "."], "--plot must be a file that ends in .png; got ."),
        (["--plot", "noext"], "--plot must be a file that ends in .png; got noext"),
        (["--plot", "x.svg"], "--plot must be a file that ends in .png; got x.svg"),
        (["--plot", "/proc/nope/x.png"], "--plot must be a file that can be written; /proc/nope/x.png is not"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_what_cannot_be_by_its_own_names_and_units(words, message, capsys):
    try:
        status = main(["scaling", *words])
    except SystemExit as end:
        status = end.code
    assert status == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1]
    assert out == "", "a table before the error"


def test_amounts_may_have_an_exponent_or_a_unit_up_to_tera(capsys):
    shown = []
    for parameters, bandwidth in (("1e6", "0.1T"), ("1M", "1e11"), ("1.0E3k", "100G")):
        assert main(["scaling", "--parameters", parameters, "--bandwidth", bandwidth, "--workers", "2"]) == 0
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 1


def test_without_matplotlib_a_plot_is_refused_before_the_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["scaling", "--plot", str(tmp_path / "x.png")]) == 2
    out, err = capsys.readouterr()
    assert "pip install dsgdac-accel[tasks]" in err
    assert out == ""
