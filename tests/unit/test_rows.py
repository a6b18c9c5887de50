"""What the processes of a worker decide together: a shard that is empty or alone in its fault, and one voice."""

import contextlib
import logging
import math
import weakref
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from dsgdac_accel import GossipConfig
from dsgdac_accel.core.agreement import Agreement
from dsgdac_accel.core.gamma import GammaSchedule
from dsgdac_accel.core.gradients import clip_worker_grad_norms_
from dsgdac_accel.core.list_changes import ListChanges
from dsgdac_accel.core.nonfinite import GradientGuard, ParameterGuard
from dsgdac_accel.core.slots import Slots
from dsgdac_accel.core.update import Update
from dsgdac_accel.distributed import process_groups
from dsgdac_accel.distributed.equal_values import make_equal_
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.members import Members
from dsgdac_accel.distributed.processes import Processes
from dsgdac_accel.distributed.row import Row
from dsgdac_accel.distributed.worker_mesh import WorkerMesh

CPU = torch.device("cpu")
MESH = SimpleNamespace(is_sharded=lambda parameter: True)


class TwoShards:
    """The processes of a worker of two shards, of which the other one contributes `other` to every collective."""

    rank, size = 0, 2
    first = WorkerGroup.first

    def __init__(self, other=0.0, device="cpu"):
        self.other, self.device, self.seen = other, torch.device(device), []

    def all_reduce_mean_(self, tensor, what):
        self.seen.append(tensor.device.type)
        return tensor.add_(torch.as_tensor(self.other, dtype=tensor.dtype, device=tensor.device)).div_(2)

    def all_reduce_max_(self, tensor, what):
        """Like gloo, which keeps the other one's value if this one's is NaN."""
        self.seen.append(tensor.device.type)
        other = torch.full_like(tensor, 0.0 if tensor.is_meta else self.other)
        return tensor.copy_(torch.where(tensor > other, tensor, other))

    def all_gather_object(self, value, what):
        return [value, self.other]


@pytest.mark.parametrize("method", [Row.sum, Row.max])
def test_what_is_on_the_cpu_without_elements_travels_from_the_device_of_the_row(method):
    ranks = TwoShards(device="meta")
    method(Row(ranks, MESH), torch.zeros(1), "testing")  # on the CPU it would take another process group
    assert Row(ranks, MESH).any(True, "testing")  # what the host has decided stays there
    assert ranks.seen == ["meta", "cpu"]


def parameter(gradient):
    made = Parameter(torch.zeros(gradient.shape))
    made.grad = gradient
    return made


def clip(gradients, row, norm_type=2.0):
    return float(clip_worker_grad_norms_([list(map(parameter, gradients))], 1.0, norm_type, row))


@pytest.mark.parametrize(("norm_type", "total"), [(2.0, 2.0), (math.inf, 4.0)])
def test_empty_shards_and_none_at_all_have_no_part_in_the_norm(norm_type, total):
    row = Row(TwoShards(other=4.0), MESH)  # the sum of squares, or the largest
    assert clip([torch.zeros(0, 3)], row, norm_type) == total
    assert clip([torch.zeros(0, 3), torch.zeros(2)], row, norm_type) == total
    assert clip([], row, norm_type) == total


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_a_shard_with_nan_is_not_finite(norm_type):
    assert not math.isfinite(clip([torch.tensor([1.0, math.nan])], Row(TwoShards(other=4.0), MESH), norm_type))


def test_an_order_of_the_norm_without_a_sum_over_shards_is_refused():
    with pytest.raises(ValueError, match="norm_type must be > 0 for a sharded model; got -inf"):
        clip([torch.ones(2)], Row(TwoShards(), MESH), -math.inf)


def test_a_mesh_with_one_process_per_worker_clips_sparse_gradients():
    one = SimpleNamespace(rank=0, size=1, device=CPU)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    total = float(clip_worker_grad_norms_([[embedding.weight]], 1.0, 2.0, Row(one, MESH)))
    assert total == pytest.approx(math.sqrt(2 * 4 + 2))
    assert float(embedding.weight.grad.to_dense().norm()) == pytest.approx(1.0)


# ---- errors


COMPARISONS = {
    "values": lambda group: group.require_equal(3, "numbers"),
    "models": lambda group: make_equal_([("weight", torch.ones(2))], group),
}


@pytest.mark.parametrize("compare", COMPARISONS)
def test_all_processes_of_a_worker_raise_what_one_shard_has_found(compare):
    group = WorkerGroup(CPU)
    group.members = Members(0, 2)
    group.all_gather_object = lambda value, what: [value, value]  # the same shard of the other worker is equal
    group.row = Row(TwoShards(None), MESH)
    COMPARISONS[compare](group)
    group.row = Row(TwoShards("the other shard differs"), MESH)
    with pytest.raises(ValueError, match="the other shard differs"):
        COMPARISONS[compare](group)


def test_only_one_process_of_the_first_worker_warns(caplog):
    for rank in (0, 1):
        group = SimpleNamespace(rank=0, everyone=SimpleNamespace(rank=rank))
        optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
        schedule = GammaSchedule(optimizer, group, GossipConfig(power=2.0))
        for step in range(3):
            schedule.next_gamma(step)
            optimizer.param_groups[0]["lr"] *= 2
        schedule._say_if_it_waits(torch.zeros((), device="meta"))
        with caplog.at_level(logging.WARNING):
            assert len(caplog.records) == 2


def test_processes_that_save_together_are_in_the_order_of_their_workers():
    """Also where the shards are the first dimension of the mesh, so that a worker holds every second process."""
    everyone = SimpleNamespace(all_gather_object=lambda value, what: [0, 1, 2, 3])
    row = SimpleNamespace(rank=0, size=2, mesh=SimpleNamespace(rows=[[0, 2], [1, 3]]))
    processes = Processes(SimpleNamespace(rank=1, size=2, row=row, everyone=everyone))
    assert processes.all_gather_object(None, "a test") == [0, 2, 1, 3]
    assert (processes.rank, processes.size, processes.members.me) == (2, 4, "rank 0 of worker 1")


# ---- settings and measurements


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 30), ("cuda", 120)])
def test_collectives_of_fsdp_on_nccl_give_up_after_those_of_the_library(device, seconds, monkeypatch):
    limits = []
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.append(limit))
    device_mesh = MagicMock(device_type=device)
    WorkerMesh.limit(SimpleNamespace(device_mesh=device_mesh), 30)
    device_mesh.__getitem__.assert_called_once_with("dp_shard")
    assert limits == [timedelta(seconds=seconds)]


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 30), ("cuda", 120)])
def test_collectives_of_accelerate_on_nccl_give_up_after_those_of_the_library(device, seconds, monkeypatch):
    limits = []
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.append(limit))
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    transport = SimpleNamespace(backend=backend)
    monkeypatch.setattr(process_groups, "transport_for", lambda device, distributed: transport)
    groups = process_groups.ProcessGroups(torch.device(device), 30, Members(0, 2))
    groups.world = object()
    groups.limit_default_group()
    assert limits == [timedelta(seconds=seconds)]


def code_of(changed, *trained):
    """The number that stands for a list of parameters, and its square, of one process."""
    code = hash(trained) % 2**15 * 2 + changed
    return code, code * code


class Listener:
    """Votes on a number, and keeps what it is told."""

    def __init__(self, agreement):
        self.agreement, self.heard = agreement, []

    def vote(self, number):
        return self.agreement.vote("header", [number], self.hear)

    def hear(self, sums, step):
        self.heard.append((sums, step))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mixes", [True, False])
def test_one_collective_holds_all_that_the_processes_of_a_worker_decide_in_a_step(mixes, late):
    ranks = TwoShards()
    plan = SimpleNamespace(weights={1: 0.5})
    rounds = SimpleNamespace(workers=range(1), local_workers=1, plan=lambda round_: plan)
    group = SimpleNamespace(row=Row(ranks, MESH), device=CPU, rank=0)
    weight = parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    slots = Slots(lambda: optimizer.param_groups)
    slots.select(CPU)
    agreement = Agreement(group)
    agreement.late = late
    changes = ListChanges(slots, group, agreement)
    parameters = ParameterGuard(group, rounds, slots, SimpleNamespace(), agreement)
    guard = GradientGuard(optimizer, slots, rounds, group, agreement, limit=9)
    listener = Listener(agreement)
    for step, (mine, other) in enumerate([(0.0, 0.0), (math.nan, 0.0), (0.0, 1.0), (0.0, 0.0)]):
        weight.grad.fill_(mine)
        slots.look()
        ranks.other = torch.tensor([other, step, *code_of(False, True), *[16.0] * mixes], dtype=torch.float64)
        guard.find_nonfinite(step)
        listener.vote(0.0)
        changes.vote()
        parameters.vote([Update(1.0, [torch.tensor([3.0])], [torch.tensor(9.0)])] if mixes else [], step)
        agreement.close(step)
        assert len(listener.heard) == step + (not late)
        before = parameters.disagreement
        assert guard.allows_step() == (mine == other == 0.0)
        agreement.resolve()
        assert before == parameters.disagreement == (5.0 if mixes else 0.0)
        assert listener.heard[step:] == [([float(step)], step)]
        assert not changes.pending
        assert len(ranks.seen) == step + 1
    assert guard.skipped == 2


def test_a_worker_skips_its_step_on_the_device_if_several_of_its_shards_are_not_finite():
    group = SimpleNamespace(row=Row(TwoShards(other=1.0), MESH), device=CPU)
    optimizer = torch.optim.Adam([parameter(torch.full((2,), math.nan))], lr=0.1, fused=True)
    slots = Slots(lambda: optimizer.param_groups)
    agreement = Agreement(group)
    agreement.late = True
    guard = GradientGuard(optimizer, slots, SimpleNamespace(workers=range(1)), group, agreement, limit=9)
    guard.find_nonfinite(0)
    agreement.close(0)
    assert guard.allows_step()
    assert optimizer.found_inf == 1.0, "torch skips at 1, not at the number of shards"
    optimizer.step()
    guard.put_back()
    assert not optimizer.param_groups[0]["params"][0].any()


@pytest.mark.parametrize("others_change", [True, False])
def test_processes_of_a_worker_that_changed_alike_go_on_together(others_change):
    ranks = TwoShards()
    ranks.all_gather_object = lambda value, what: [value, "rank 1 froze weight"]
    everyone = SimpleNamespace(members=SimpleNamespace(me="rank 0"))
    group = SimpleNamespace(row=Row(ranks, MESH), device=CPU, everyone=everyone, report=lambda message: None)
    optimizer = torch.optim.SGD([parameter(torch.zeros(2))])
    slots = Slots(lambda: optimizer.param_groups)
    slots.select(CPU)
    optimizer.add_param_group({"params": [parameter(torch.zeros(3))]})
    slots.look()
    agreement = Agreement(group)
    changes = ListChanges(slots, group, agreement)
    ranks.other = torch.tensor(code_of(others_change, True, True), dtype=torch.float64)
    changes.vote()
    assert not changes.pending
    with contextlib.nullcontext() if others_change else pytest.raises(RuntimeError, match="rank 1 froze weight"):
        agreement.close(4)
    assert changes.pending == others_change


def test_processes_of_a_worker_that_train_other_parameters_end_by_the_name_of_what_changed():
    ranks = TwoShards()
    ranks.all_gather_object = lambda value, what: [value, "rank 1 froze weight"]
    everyone = SimpleNamespace(members=SimpleNamespace(me="rank 0"))
    group = SimpleNamespace(row=Row(ranks, MESH), device=CPU, everyone=everyone, report=lambda message: None)
    slots = Slots([parameter(torch.zeros(2))])
    slots.select(CPU)
    slots.note()
    agreement = Agreement(group)
    changes = ListChanges(slots, group, agreement)
    ranks.other = torch.tensor(code_of(False, False), dtype=torch.float64)
    changes.vote()
    with pytest.raises(RuntimeError, match=r"^rank 1 froze weight, before step 4 and not on all processes alike"):
        agreement.close(4)


# ---- a worker of one process


def late_agreement() -> Agreement:
    agreement = Agreement(SimpleNamespace(row=Row(), device=CPU))
    agreement.late = True
    return agreement


def test_votes_of_a_step_that_did_not_end_are_replaced_and_forgotten_ones_are_not_read():
    agreement = late_agreement()
    listener = Listener(agreement)
    listener.vote(1.0)
    listener.vote(2.0)
    agreement.close(3)
    assert listener.heard == []
    agreement.resolve()
    agreement.resolve()
    assert listener.heard == [([2.0], 3)]
    listener.vote(4.0)
    agreement.close(4)
    listener.vote(5.0)
    agreement.forget()
    agreement.resolve()
    agreement.close(5)
    agreement.resolve()
    assert len(listener.heard) == 1


def test_a_vote_of_one_process_travels_at_once_and_may_be_resolved_before_the_others():
    agreement = late_agreement()
    first, second = Listener(agreement), Listener(agreement)
    vote = first.vote(1.0)
    assert vote.read() == [1.0]
    agreement.vote("another", torch.tensor([[2.0, 3.0]]), second.hear)
    agreement.close(7)
    vote.resolve()
    assert (first.heard, second.heard) == ([([1.0], 7)], [])
    agreement.resolve()
    assert (first.heard, second.heard) == ([([1.0], 7)], [([2.0, 3.0], 7)])


def test_whoever_has_voted_ends_with_its_last_reference():
    agreement = late_agreement()
    listener = Listener(agreement)
    listener.vote(1.0)
    agreement.close(0)
    kept = weakref.ref(listener)
    del listener
    assert kept() is None
    agreement.resolve()
