"""fp16 overflows, bf16, and gradients or parameters that are not finite."""

from __future__ import annotations

import pytest
import torch

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.multiprocess.small_model import FAST, flat, inputs, make_model
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

# ---- fp16, bf16 and gradients that are not finite


def overflow(rank: int, who: str, fused: bool) -> dict:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=2, **FAST))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # stands in for the GradScaler of fp16 on a GPU
    model = make_model().float()
    raw = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(raw, 1.0, 0.1, 8)
    model, optimizer, scheduler = accelerator.prepare(model, raw, scheduler)
    trace: dict = {"lrs": [], "gammas": [], "scales": [], "x": [], "step": []}
    for step in range(6):
        trace["lrs"].append(optimizer.param_groups[0]["lr"])
        loss = model(inputs(rank, step).float()).square().mean()
        if step == 3 and (who == "all" or rank == 1):
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trace["gammas"].append(accelerator.gossip_steps[0].gamma)
        trace["scales"].append(accelerator.scaler.get_scale())
        trace["x"].append(flat(model).clone())
        trace["step"].append(accelerator.gossip_steps[0].mixer.step)
    return trace


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("who", ["all", "one"])
def test_an_fp16_overflow_anywhere_skips_the_local_update_of_all_and_mixing_goes_on(who, fused):
    first, second = run_workers(overflow, 2, who, fused)
    for trace in (first, second):
        assert trace["step"] == [1, 2, 3, 4, 5, 6]
        assert trace["lrs"] == pytest.approx([0.1 - 0.09 * t / 8 for t in range(6)])
        assert trace["gammas"] == pytest.approx([(lr / 0.1) ** 2 for lr in trace["lrs"]])
        assert trace["scales"] == [256.0] * 3 + [128.0] * 3
    before, after = (torch.stack([trace["x"][t] for trace in (first, second)]) for t in (2, 3))
    mean, gamma = before.mean(0), first["gammas"][3]
    torch.testing.assert_close(after, before + gamma * (mean - before), rtol=0, atol=1e-6)
    assert (before - mean).norm() > 1e-3
    assert not torch.equal(first["x"][3], first["x"][4])


def poison(rank: int) -> None:
    accelerator = GossipAccelerator(
        gossip=GossipConfig(topology="complete", power=0, max_consecutive_nonfinite=3, **FAST)
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(6):
        loss = model(inputs(rank, step)).square().mean()
        accelerator.backward(loss * float("nan") if rank == 1 and step in (1, 2, 3) else loss)
        optimizer.step()
        optimizer.zero_grad()


def test_too_many_nan_gradients_in_a_row_stop_the_run_naming_the_worker():
    first, second = try_workers(poison, 2)
    assert second.exit_code == first.exit_code == 1
    assert "worker 1, step 3: 3 steps in a row" in second.error
    assert "max_consecutive_nonfinite=3" in second.error
    assert "worker 1, step 3: 3 steps in a row" in first.error, "the other worker reports the reason"


def diverge(rank: int, topology: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology=topology, **FAST))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        accelerator.backward(model(inputs(rank, step)).square().mean())
        if step == 2:
            optimizer.param_groups[0]["lr"] = 100.0
            for p in model.parameters():
                p.grad.fill_(1e308 if rank == 1 else 0.0)  # finite, but the parameters overflow
        optimizer.step()
        optimizer.zero_grad()
        assert rank == 1 or torch.isfinite(flat(model)).all()
        optimizer.param_groups[0]["lr"] = 0.1


@pytest.mark.parametrize("topology", ["one_peer_ring", "complete", "ring"])
def test_nonfinite_parameters_stop_the_run_before_they_are_mixed(topology):
    outcomes = try_workers(diverge, 3, topology)
    assert all(outcome.exit_code == 1 for outcome in outcomes)
    told = " ".join(outcome.error for outcome in outcomes)
    assert "AssertionError" not in told
    assert "not finite at step 3" in told
    assert "worker 1" in told


def bf16(rank: int) -> tuple[list[torch.dtype], bool]:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST), mixed_precision="bf16")
    model = make_model().float()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = []
    model[0].register_forward_hook(lambda module, args, output: inner.append(output.dtype))
    accelerator.backward(model(inputs(rank, 0).float()).sum())
    optimizer.step()
    return [inner[0], model[0].weight.dtype], bool(torch.isfinite(flat(model)).all())


def test_bf16_computes_in_low_precision_and_keeps_parameters_in_float32():
    for dtypes, finite in run_workers(bf16, 2):
        assert dtypes == [torch.bfloat16, torch.float32]
        assert finite


def fp16_start(rank: int) -> tuple[float, int]:
    accelerator = GossipAccelerator(gossip=GossipConfig(max_consecutive_nonfinite=3, **FAST))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    model = make_model().float()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(12):
        loss = model(inputs(rank, 0).float()).square().mean() * 2.0**35
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.scaler.get_scale(), accelerator.gossip_steps[0].mixer.step


def test_the_search_for_the_fp16_loss_scale_does_not_count_as_nonfinite_steps():
    for scale, steps in run_workers(fp16_start, 2):
        assert scale < 2.0**97, "more overflows in a row than max_consecutive_nonfinite"
        assert steps == 12
