"""How often the host waits for a GPU, and what it gives the GPU to do: counted on the CPU, where the same code runs."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, VirtualWorkers, WorkerGroup
from dsgdac_accel.checkpoint import staging
from dsgdac_accel.core import exchange, kernels
from dsgdac_accel.core.buckets import Use
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.distributed.poster import Poster
from dsgdac_accel.pytorch import Gossip
from tests.host_waits import GPUStandIn, HostWaits
from tests.kernel_launches import KernelLaunches
from tests.workers import run_workers

CPU = torch.device("cpu")
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "default": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def look_late(steps: list[GossipStep], group: WorkerGroup) -> None:
    """Run as on a GPU: the host looks late, and posts by itself."""
    group.poster = Poster(threaded=False)
    for step in steps:
        step.mixer.arrivals.checks_late = step.masters.checks_late = True


# ---- steps


def steps_of(optimizer_name: str, options: dict, dtype: torch.dtype, scaled: bool = False) -> list:
    workers = options.get("workers_per_process", 1)
    model = make_model(dtype) if workers == 1 else VirtualWorkers(make_model(dtype), workers)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    gossip = Gossip(model, optimizer, GossipConfig(timeout=20, power=0, **{"log_every": 0, **options}), scaler=scaler)
    look_late(gossip.steps, gossip.group)
    waits, uses, found = HostWaits(), [], []
    waits.after_wait = lambda place: uses.append(gossip.steps[0].mixer.buckets.use)
    for step in range(4):
        loss = model(torch.randn(4 * workers, 8).to(dtype)).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if dtype is torch.bfloat16:
            with torch.no_grad():
                next(model.parameters()).mul_(1.0)  # a script that writes weights
        waits.next_step()
        if step < 2:  # the first step compares settings, and momentum has no buffers yet
            optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        else:
            with waits.counted():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
            found.append(waits.take())
        optimizer.zero_grad()
    assert all(use is Use.UPDATE for use in uses), "the mix is queued before the host waits"
    return found


FREE = [
    ("fused", {}, torch.float32),
    ("momentum", {"log_every": 2}, torch.float32),
    ("fused", {"topology": "complete"}, torch.float32),
    ("fused", {"comm_dtype": "int8"}, torch.float32),
    ("fused", {}, torch.bfloat16),
]
ASKED = [
    ("default", {}),
    ("foreach", {}),
    ("fused", {"workers_per_process": 2}),
    ("default", {"workers_per_process": 8}),
]


def all_steps(rank: int) -> dict:
    free = [steps_of(*case) for case in FREE]
    asked = [steps_of(*case, torch.float32) for case in ASKED]
    return {"free": free, "asked": asked, "fp16": steps_of("default", {}, torch.float32, scaled=True)}


def test_a_step_waits_only_for_optimizers_that_cannot_skip_it_and_then_with_the_mix_queued():
    for found in run_workers(all_steps, 2):
        assert found["free"] == [[{}, {}]] * len(FREE)
        assert found["asked"] == [[{"nonfinite.py:allows_step": 1}] * 2] * len(ASKED)
        for places in found["fp16"]:
            ours = {place: count for place, count in places.items() if not place.startswith("grad_scaler.py")}
            assert ours == {"nonfinite.py:allows_step": 1}


@pytest.mark.parametrize("optimizer_name", ["default", "fused"])
def test_a_worker_of_several_skips_its_update_as_where_the_host_sees_it_at_once(optimizer_name):
    def trained(late: bool) -> tuple[torch.Tensor, dict]:
        model = VirtualWorkers(make_model(), 3)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        gossip = Gossip(model, optimizer, GossipConfig(power=0, log_every=0, workers_per_process=3))
        gossip.steps[0].mixer.arrivals.checks_late = late
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(12, 8)).square().mean().backward()
            for worker in {1: [2], 2: [0, 1, 2]}.get(step, []):
                next(model.replicas[worker].parameters()).grad.view(-1)[3] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([p.detach().flatten()[0] for p in model.parameters()]), gossip.steps[0].guard.state_dict()

    (x, counts), (late_x, late_counts) = trained(False), trained(True)
    assert torch.equal(x, late_x)
    assert counts == late_counts == {"nonfinite_steps": 4, "consecutive_nonfinite": [0, 0, 0]}


# ---- logs, evaluations, checkpoints


def logs_and_evaluations(rank: int, folder: str) -> dict:
    config = GossipConfig(timeout=20, log_every=1, workers_per_process=2)
    accelerator = GossipAccelerator(cpu=True, gossip=config)
    first, second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)), nn.Linear(1500, 1500)
    parts = [OPTIMIZERS["default"](model.parameters()) for model in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *parts)
    look_late(accelerator.gossip_steps, accelerator.group)
    records: list[dict] = []
    accelerator.consensus_logger.add_sink(lambda values, step: records.append(values))
    waits, found = HostWaits(), {}
    loss = torch.tensor(2.0)
    for step in range(2):
        accelerator.backward(first(torch.randn(8, 8)).square().mean() + second(torch.randn(8, 1500)).square().mean())
        with waits.counted() if step else contextlib.nullcontext():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with waits.counted():
        waits.take()
        figures = accelerator.training.metrics()
        found["metrics of two optimizers"] = sum(waits.take().values())
        for optimizer in optimizers:
            optimizer.step()
        waits.take()
        accelerator.consensus_logger.log({"loss": loss + 1, "accuracy": loss * 2, "text": "x"}, step=1)
        found["log"] = sum(waits.take().values())
        accelerator.measure_consensus()
        found["radius of 2.2 M parameters"] = sum(waits.take().values())
        with accelerator.deployed_model(first, calibrate=[torch.randn(8, 8) for _ in range(5)]):
            found["calibration"] = sum(waits.take().values())
        waits.take()
        with accelerator.deployed_model(first):
            found["pooling"] = sum(waits.take().values())
    assert figures["gossip/radius"] > 0
    assert (records[-1]["loss"], records[-1]["accuracy"], records[-1]["text"]) == (3.0, 4.0, "x")
    return found


def test_a_log_and_a_radius_wait_once_and_a_calibration_for_its_result_alone(tmp_path):
    for found in run_workers(logs_and_evaluations, 2, str(tmp_path / "state")):
        assert found == {
            "metrics of two optimizers": 1,
            "log": 1,
            "radius of 2.2 M parameters": 1,
            "calibration": 4,  # as pooling, the statistics of all layers, and their way back to the device
            "pooling": 4,  # for each optimizer: the mean of what is pooled, and the last difference of its pairs
        }


def test_a_background_save_waits_for_the_digests_of_what_is_not_trained_alone(tmp_path, monkeypatch):
    GPUStandIn(monkeypatch)
    monkeypatch.setattr(staging, "_is_on_gpu", lambda tensor: True)
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(log_every=0, workers_per_process=2))
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["default"](model.parameters()))
    look_late(accelerator.gossip_steps, accelerator.group)
    accelerator.backward(model(torch.randn(8, 8)).square().mean())
    optimizer.step()
    waits = HostWaits()
    with waits.counted():
        accelerator.save_state(tmp_path / "state", wait=False)
    assert waits.take() == {"tensor_bytes.py:<dictcomp>": 1}
    accelerator.finish_saving()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    accelerator.load_state(tmp_path / "state")
    assert all(map(torch.equal, before, model.parameters()))


# ---- collectives of the host


def gathers(rank: int) -> list[int]:
    """Gather objects of different lengths; return how many collectives each took."""
    group, calls, original = WorkerGroup(CPU, 20), [], dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    found = []
    for length in (0, 900, 970, 980, 990, 1000, 1010, 1100, 5000):
        calls.clear()
        assert group.all_gather_object("x" * (length + 7 * rank), "a") == ["x" * (length + 7 * n) for n in range(2)]
        found.append(len(calls))
    return found


def test_small_objects_such_as_whether_there_is_another_batch_take_one_collective():
    for found in run_workers(gathers, 2):
        assert found[:2] == [1, 1]
        assert found == sorted(found)
        assert found[-1] == 2


# ---- kernels


def launches(rank: int, topology: str) -> list[tuple[int, int, int, int]]:
    """Return, for one bucket and for two: launches on whole buckets, others, and numbers of buffers and buckets."""
    kernels._PIECE = 2**30  # as on a GPU: a CPU works in pieces that fit into its cache
    exchange._FEW_BYTES = 2**30  # posted by this thread, as with NCCL
    found = []
    for dtypes in ([torch.float32], [torch.float32, torch.float64]):
        size = 2**19
        parameters = [nn.Parameter(torch.randn(size, dtype=dtype)) for dtype in dtypes]
        optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
        group = WorkerGroup(CPU, 20)
        step = GossipStep(optimizer, group, GossipConfig(topology=topology, log_every=0, power=0))
        look_late([step], group)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.01)
            with KernelLaunches(ignored=(torch.ops.aten._local_scalar_dense,)) as launched:
                step.before_local_step()
                step.after_local_step()
        buffers = sum(len(flat.buckets) for flat in step.mixer.buckets.flats)
        buffers += sum(len(slot) for slots in step.mixer.buckets.received for slot in slots)
        gradients = len(dtypes)  # one reduction for the gradients of each dtype
        whole = launched.on(size * 4 * 9 // 10)  # the last rows of a bucket have a sum of their own
        found.append((whole - gradients, launched.on(0) - whole, buffers, len(dtypes)))
    return found


@pytest.mark.parametrize(
    ("topology", "workers", "sums"),  # of each bucket, for the edit guard; those of pairs are among the two passes
    [("one_peer_ring", 2, 0), ("complete", 3, 2), pytest.param("ring", 4, 2, marks=pytest.mark.slow)],
)
def test_a_mix_passes_twice_over_each_buffer_and_launches_few_other_kernels(topology, workers, sums):
    for found in run_workers(launches, workers, topology):
        for whole, others, buffers, buckets in found:
            assert 0 < whole <= 2 * buffers + sums * buckets
            assert others <= 50 + 8 * buffers
