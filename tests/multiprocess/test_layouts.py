"""Every parameter is mixed exactly once, whatever its memory layout and history."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from dsgdac_accel import GossipAccelerator, GossipConfig, Mixer, WorkerGroup, build_topology
from dsgdac_accel.core.consensus import Average
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")


def make_mixer(parameters: object, topology: str = "complete", **options) -> Mixer:
    group = WorkerGroup(CPU, timeout=20)
    return Mixer(parameters, build_topology(topology, group.size), group, **options)


def mix(mixer: Mixer, gamma: float = 1.0) -> None:
    mixer.add(mixer.consensus_update(gamma))


def value(rank: int) -> float:
    return 1.0 + 2.0 * rank  # 1 and 3 for two workers: mean 2


# ---- layouts


def odd_layouts(rank: int) -> list[Parameter]:
    base = torch.full((3, 4), value(rank))
    channels_last = torch.full((2, 3, 4, 5), value(rank)).to(memory_format=torch.channels_last)
    tensors = [
        base.T,
        torch.full((10,), value(rank))[::2],
        torch.full((6, 6), value(rank))[1:4, 2:5],
        channels_last,
        torch.tensor(value(rank)),
        torch.empty(0, 3),
        torch.full((7,), value(rank), dtype=torch.float64),
    ]
    return [Parameter(tensor) for tensor in tensors]


def mix_odd_layouts(rank: int) -> list:
    parameters = odd_layouts(rank)
    strides = [p.stride() for p in parameters]
    mixer = make_mixer(parameters)
    mix(mixer)
    return [(p.detach().clone(), p.stride() == stride) for p, stride in zip(parameters, strides, strict=True)]


def test_any_layout_is_sent_right_and_keeps_its_strides():
    for result in run_workers(mix_odd_layouts, 2):
        for mixed, kept in result:
            torch.testing.assert_close(mixed, torch.full_like(mixed, 2.0))
            assert kept


def distinct_elements(rank: int) -> list[torch.Tensor]:
    """Each element has a value of its own, so that a permutation in transit would show."""
    torch.manual_seed(rank)
    parameters = [
        Parameter(torch.randn(5, 4).T),
        Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        Parameter(torch.randn(12)[::3]),
    ]
    before = [p.detach().clone() for p in parameters]
    mixer = make_mixer(parameters, "one_peer_ring")
    mix(mixer, 0.5)
    return [before, [p.detach().clone() for p in parameters]]


def test_elements_meet_their_counterparts():
    (before_0, after_0), (before_1, after_1) = run_workers(distinct_elements, 2)
    for x, y, mixed_x, mixed_y in zip(before_0, before_1, after_0, after_1, strict=True):
        torch.testing.assert_close(mixed_x, x + 0.25 * (y - x))
        torch.testing.assert_close(mixed_y, y + 0.25 * (x - y))


def mix_containers(rank: int) -> list[tuple[float, float]]:
    seen = []
    for build in (
        lambda p: (q for q in p),
        lambda p: p,
        lambda p: p[0],
        lambda p: [{"params": p[:1]}, {"params": p[1:], "lr": 0.1}],
        lambda p: nn.ParameterList(p).named_parameters(),
    ):
        parameters = [Parameter(torch.full((3,), value(rank))), Parameter(torch.full((2, 2), value(rank)))]
        mixer = make_mixer(build(parameters))
        average = Average(mixer)
        for _ in range(5):
            with torch.no_grad():
                parameters[0].add_(rank + 1.0)
            before = average.measure().radius
            mix(mixer)
            seen.append((before, average.measure().radius))
    return seen


def test_parameters_may_come_in_any_container():
    for seen in run_workers(mix_containers, 2):
        assert len(seen) == 25
        assert all(before > 0.1 and after == 0 for before, after in seen)


def train_sparse(rank: int, sparse: bool) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 1))
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20, log_every=1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        tokens = torch.tensor([[1 + rank, 2, 3 + step]])
        accelerator.backward(model(tokens).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), float(norm)


def test_sparse_embeddings_equal_dense_ones():
    sparse, dense = run_workers(train_sparse, 2, True), run_workers(train_sparse, 2, False)
    for (x, norm), (y, dense_norm) in zip(sparse, dense, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
        assert norm == pytest.approx(dense_norm, rel=1e-5)


# ---- aliases


def mix_shared_memory(rank: int) -> tuple[float, float, bool]:
    first = Parameter(torch.full((4,), value(rank)))
    second = Parameter(first.data)
    mixer = make_mixer([first, second])
    mix(mixer, 0.5)
    return float(first[0]), float(second[0]), first.data_ptr() == second.data_ptr()


def test_two_parameters_on_the_same_memory_stay_one():
    assert run_workers(mix_shared_memory, 2) == [(1.5, 1.5, True), (2.5, 2.5, True)]


# ---- changes during training


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, use_right=True):
        return self.left(x) + (self.right(x) if use_right else 0)


def use_branch(rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=20, power=0))
    model = TwoBranches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    start = model.right.weight.detach().clone()
    with torch.no_grad():
        model.right.weight.copy_(start + rank)
    before = model.right.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2), use_right=rank != 1).sum())
    optimizer.step()
    return before, model.right.weight.detach().clone()


def test_an_unused_branch_still_mixes_and_does_not_decay():
    (before_0, _), (before_1, after_1) = run_workers(use_branch, 2)
    torch.testing.assert_close(after_1, (before_0 + before_1) / 2)


def change_parameters(rank: int, change: str) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=0, timeout=20))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(scale):
        accelerator.backward(model(torch.full((1, 2), scale)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    step(1.0 + rank)
    if change == "replace":
        model[1] = nn.Linear(2, 2)
        optimizer.param_groups[0]["params"][2:] = list(model[1].parameters())
    elif change == "assign":
        model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)
    elif change == "double":
        model.double()
    if change == "double":
        accelerator.backward(model(torch.ones(1, 2, dtype=torch.float64)).square().sum())
        optimizer.step()
    else:
        step(1.0 + rank)
        step(1.0 + rank)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # without a local update: with gamma 1 on the complete graph all become equal
    return [p.detach().double().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("change", ["replace", "double"])
def test_parameters_that_change_during_training_are_mixed(change):
    first, second = run_workers(change_parameters, 2, change)
    assert first == pytest.approx(second, abs=1e-6)


def replace_behind_the_optimizer(rank: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        change_parameters(rank, "assign")
    return str(caught.value)


def test_a_parameter_replaced_behind_the_optimizer_is_refused_by_name():
    for message in run_workers(replace_behind_the_optimizer, 2):
        assert message.startswith("0.weight was replaced in the model")
        assert "assign=False" in message


# ---- size, order, memory


def exchange_64_mb(rank: int) -> float:
    parameter = Parameter(torch.full((16 * 2**20,), float(rank)))
    mixer = make_mixer(parameter, "ring")
    for _ in range(5):
        mix(mixer)
        mixer.start_exchange()
    mixer.drain()
    return float(parameter.detach()[0]), float(parameter.detach()[-1])


@pytest.mark.slow
def test_64_mb_around_a_ring_does_not_deadlock():
    x = torch.arange(4.0)
    for _ in range(5):
        x = (x + x.roll(1) + x.roll(-1)) / 3
    for rank, ends in enumerate(run_workers(exchange_64_mb, 4, timeout=60)):
        assert ends == pytest.approx((float(x[rank]), float(x[rank])), abs=1e-5)


def drop_in_flight(rank: int) -> float:
    """Drop a mixer whose exchange is in flight, as an exception in a notebook does, and mix by a new one."""
    group = WorkerGroup(torch.device("cpu"), timeout=10.0)
    topology = build_topology("one_peer_ring", 2)
    dropped = Mixer([Parameter(torch.full((4,), value(rank)))], topology, group)
    for worker in range(2):
        if rank == worker:
            dropped.start_exchange()
            del dropped
            gc.collect()
        group.barrier("taking turns")
    parameter = Parameter(torch.full((4,), value(rank)))
    mix(Mixer([parameter], topology, group))
    group.all_reduce_max_(torch.zeros(1), "ending")  # waits for what was dropped
    assert not group._in_flight
    return float(parameter.detach()[0])


def test_dropping_a_mixer_in_flight_leaves_the_connections_intact():
    assert run_workers(drop_in_flight, 2, timeout=40.0) == [2.0, 2.0]


def bytes_of_copies(rank: int, topology: str) -> tuple[int, int]:
    mixer = make_mixer([Parameter(torch.zeros(1000, 100)), Parameter(torch.zeros(50))], topology)
    received = [buffer for slots in mixer.copies.received for slot in slots for buffer in slot]
    sent = [buffer for copy in mixer.copies.sent for buffer in copy.buffers]
    return sum(buffer.nbytes for buffer in [*sent, *received]), mixer.parameter_bytes


@pytest.mark.parametrize(
    ("topology", "copies"), [("one_peer_ring", 2), ("complete", 2), ("base_graph", 2), ("ring", 3)]
)
def test_memory_is_a_copy_to_send_and_one_for_each_neighbor(topology, copies):
    for held, parameters in run_workers(bytes_of_copies, 4, topology):
        assert held == copies * parameters
        assert parameters < 1.01 * 4 * (1000 * 100 + 50)
