"""GossipAccelerator keeps Accelerate's promises: steps, schedules, clipping, precision, neighbours (K5, K6, K8)."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dsgdac_accel import GossipAccelerator, GossipConfig, build_topology
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.simulation import Simulation
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

FAST = {"timeout": 20.0}


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def inputs(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


# ---- gradients stay local


def train_without_mixing(rank: int, launched: bool) -> tuple[torch.Tensor, bool]:
    """gamma = 0 throughout: every worker must be its own one-process run."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = False
    if launched:
        accelerator = GossipAccelerator(gossip=GossipConfig(constant=0.0, start_step=0, **FAST))
        model, optimizer = accelerator.prepare(model, optimizer)
        wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    for step in range(3):
        loss = model(inputs(rank, step)).square().mean()
        accelerator.backward(loss) if launched else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), wrapped


def test_with_gamma_0_each_worker_equals_its_own_one_process_run():
    (x_0, wrapped_0), (x_1, wrapped_1) = run_workers(train_without_mixing, 2, True)
    for rank, x in enumerate((x_0, x_1)):
        assert torch.equal(x, train_without_mixing(rank, launched=False)[0])
    assert not torch.equal(x_0, x_1)
    assert not wrapped_0
    assert not wrapped_1


# ---- schedules


def tick(rank: int, kind: str, steps: int) -> tuple[list[float], list[float]]:
    accelerator = GossipAccelerator(gossip=GossipConfig(power=1, max_rate="run", **FAST), gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = {
        "inverse": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: 1 / (1 + s)),
        "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=steps + 1),
    }
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedulers[kind](optimizer))
    used, gammas = [], []
    for micro in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs(rank, micro)).sum())
            if accelerator.sync_gradients:
                used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            gammas.append(accelerator.gossip_steps[0].gamma)
    return [*used, scheduler.get_last_lr()[0]], gammas


def test_the_scheduler_ticks_once_per_optimizer_step():
    for used, gammas in run_workers(tick, 2, "inverse", 4):
        assert used == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025, 0.02])
        assert gammas == pytest.approx([1, 0.5, 1 / 3, 0.25])


def test_a_cosine_of_20_steps_ends_at_step_20():
    for used, gammas in run_workers(tick, 3, "cosine", 20):
        assert used == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 20)) for t in range(21)], abs=1e-12)
        assert gammas == pytest.approx([rate / 0.1 for rate in used[:-1]])


def test_gamma_looks_ahead_where_the_schedule_declares_its_length():
    for used, gammas in run_workers(tick, 2, "one cycle", 10):
        assert max(used) == pytest.approx(0.1, rel=0.05)
        assert used[0] < 0.01
        assert gammas == pytest.approx([rate / max(used) for rate in used[:-1]])


def rates_apart(rank: int) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(log_every=2, **FAST))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        if step == 1:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
        accelerator.backward(model(inputs(rank, step)).sum())
        optimizer.step()


def test_rates_that_drift_apart_are_an_error_on_all_workers():
    for outcome in try_workers(rates_apart, 2):
        assert outcome.exit_code == 1
        assert "same learning rate at step 2" in outcome.error
        assert "0.05" in outcome.error


# ---- accumulation and clipping


def accumulate_and_clip(rank: int, batches: int) -> tuple[torch.Tensor, list[float]]:
    accelerator = GossipAccelerator(
        gossip=GossipConfig(topology="complete", power=0, **FAST), gradient_accumulation_steps=2
    )
    model = make_model()
    data = torch.cat([inputs(0, number) for number in range(2 * batches)])
    loader = DataLoader(TensorDataset(data), batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model), norms


def test_accumulation_with_a_left_over_window_clips_once_per_step_on_the_summed_local_gradient():
    batches = 5  # per worker: windows of 2, 2 and 1
    models = [make_model() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    simulation = Simulation(models, optimizers, build_topology("complete", 2), AdaptiveConsensus(power=0))
    norms: list[list[float]] = [[], []]
    for window in ([0, 1], [2, 3], [4]):
        for rank, model in enumerate(models):
            model.zero_grad()
            for number in window:
                (model(inputs(0, 2 * number + rank)).square().mean() / 2).backward()
            norms[rank].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        simulation.step()
    for rank, (x, clipped) in enumerate(run_workers(accumulate_and_clip, 2, batches)):
        torch.testing.assert_close(x, flat(models[rank]), rtol=0, atol=1e-12)
        assert clipped == pytest.approx(norms[rank])


# ---- fp16, bf16 and gradients that are not finite


def overflow(rank: int, who: str, fused: bool) -> dict:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=2, **FAST))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # stands in for the one that fp16 has on a GPU
    model = make_model().float()
    raw = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(raw, 1.0, 0.1, 8)
    model, optimizer, scheduler = accelerator.prepare(model, raw, scheduler)
    trace: dict = {"rates": [], "gammas": [], "scales": [], "x": [], "step": []}
    for step in range(6):
        trace["rates"].append(optimizer.param_groups[0]["lr"])
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
        assert trace["rates"] == pytest.approx([0.1 - 0.09 * t / 8 for t in range(6)])
        assert trace["gammas"] == pytest.approx([(rate / 0.1) ** 2 for rate in trace["rates"]])
        assert trace["scales"] == [256.0] * 3 + [128.0] * 3
    before, after = (torch.stack([trace["x"][t] for trace in (first, second)]) for t in (2, 3))
    mean, gamma = before.mean(0), first["gammas"][3]
    torch.testing.assert_close(after, before + gamma * (mean - before), rtol=0, atol=1e-6)
    assert (before - mean).norm() > 1e-3
    assert not torch.equal(first["x"][3], first["x"][4])


def poison(rank: int, steps: set[int], limit: int) -> dict:
    accelerator = GossipAccelerator(
        gossip=GossipConfig(topology="complete", power=0, max_consecutive_nonfinite=limit, **FAST)
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    history = []
    for step in range(6):
        loss = model(inputs(rank, step)).square().mean()
        accelerator.backward(loss * float("nan") if rank == 1 and step in steps else loss)
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(model).clone())
    return {"x": history, "skipped": accelerator.gossip_steps[0].nonfinite_steps}


def test_a_nan_gradient_is_skipped_locally_and_never_reaches_a_neighbour():
    first, second = run_workers(poison, 2, {2, 4}, 10)
    assert (first["skipped"], second["skipped"]) == (0, 2)
    for trace in (first, second):
        assert all(torch.isfinite(x).all() for x in trace["x"])
    before, after = second["x"][1], second["x"][2]
    torch.testing.assert_close(after, (first["x"][1] + before) / 2)


def test_too_many_nan_gradients_in_a_row_stop_the_run_naming_the_worker():
    first, second = try_workers(poison, 2, {1, 2, 3}, 3)
    assert second.exit_code == first.exit_code == 1
    assert "worker 1, step 3: 3 steps in a row" in second.error
    assert "max_consecutive_nonfinite=3" in second.error
    assert "worker 1, step 3: 3 steps in a row" in first.error, "the other worker says why"


def diverge(rank: int, topology: str) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology=topology, **FAST))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        accelerator.backward(model(inputs(rank, step)).square().mean())
        if rank == 1 and step == 2:
            for p in model.parameters():
                p.grad.fill_(1e308)  # finite, but the parameters overflow
            optimizer.param_groups[0]["lr"] = 100.0
        optimizer.step()
        optimizer.zero_grad()
        assert rank == 1 or torch.isfinite(flat(model)).all()
        optimizer.param_groups[0]["lr"] = 0.1


@pytest.mark.parametrize("topology", ["one_peer_ring", "complete", "ring"])
def test_parameters_that_overflow_stop_the_run_before_they_are_mixed(topology):
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


def test_bf16_computes_low_and_keeps_parameters_in_float32():
    for dtypes, finite in run_workers(bf16, 2):
        assert dtypes == [torch.bfloat16, torch.float32]
        assert finite


# ---- neighbours


def beside_others(rank: int) -> float:
    """A user's collectives between backward and step, two of our objects, and the user's group afterwards."""
    total = 0.0
    for _ in range(2):
        accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            accelerator.backward(model(inputs(rank, step)).sum())
            mine = torch.tensor([float(rank + step)])
            dist.all_reduce(mine)
            optimizer.step()
            total += float(accelerator.gather(torch.tensor([rank])).sum()) + float(mine)
        accelerator.end_training()
    last = torch.tensor([1.0])
    dist.all_reduce(last)
    return total + float(last)


def test_it_lives_beside_other_users_of_the_process_group():
    assert run_workers(beside_others, 3) == [2 * (3 * 3 + 3 + 6 + 9) + 3.0] * 3


def test_import_has_no_side_effects():
    script = (
        "import dsgdac_accel, torch, accelerate.state as s; "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); "
        "assert not s.AcceleratorState._shared_state and not s.PartialState._shared_state"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_launched_alone_it_is_the_plain_optimizer_to_the_bit():
    model, plain = make_model(), make_model()
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="one_peer_exponential"), cpu=True)
    raw = torch.optim.Adam(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(4):
        accelerator.backward(model(inputs(0, step)).square().mean())
        plain(inputs(0, step)).square().mean().backward()
        for each in (optimizer, raw):
            each.step()
            each.zero_grad()
    assert torch.equal(flat(model), flat(plain))
    metrics = accelerator.measure_consensus()
    assert metrics["gossip/radius"] == metrics["gossip/neighbor_disagreement"] == 0.0
    with accelerator.deployed_model(model) as deployed:
        assert torch.equal(flat(deployed), flat(plain))


# ---- refusals


def test_closures_are_refused():
    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="without a closure"):
        optimizer.step(lambda: model(inputs(0, 0)).sum())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.DataParallel(nn.Linear(1, 1)), "already wrapped in DataParallel"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "Keep plain BatchNorm"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "run one batch"),
        (lambda: nn.Linear(2, 2).bfloat16(), "mixed_precision='bf16'"),
    ],
)
def test_models_that_cannot_gossip_are_refused(model, words):
    accelerator = GossipAccelerator(cpu=True)
    model = model()
    with pytest.raises(ValueError, match=words):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_in_two_optimizers_is_refused():
    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ValueError, match="two optimizers"):
        accelerator.prepare(model, *optimizers)


def test_a_launch_that_accelerate_does_not_see_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    with pytest.raises(ValueError, match="4 processes were launched"):
        GossipAccelerator(cpu=True)


def different_models(rank: int) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    model = nn.Linear(2 + rank, 1)
    with pytest.raises(ValueError, match="same model") as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_workers_with_different_models_are_refused_on_all_of_them():
    for message in run_workers(different_models, 2):
        assert "(1, 2)" in message
        assert "(1, 3)" in message


def impossible_topology(rank: int) -> str:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="one_peer_exponential", **FAST))
    model = make_model()
    with pytest.raises(ValueError, match="base_graph") as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_a_topology_that_needs_a_power_of_two_is_refused_for_three():
    assert all("3" in message for message in run_workers(impossible_topology, 3))


def test_gossip_must_be_a_gossip_config():
    with pytest.raises(TypeError, match="GossipConfig"):
        GossipAccelerator(gossip={"power": 3}, cpu=True)


# ---- several optimizers, several trainings


def two_optimizers(rank: int, topology: str, sizes: tuple[int, int]) -> list[float]:
    """Two models, each with an optimizer of its own: their exchanges overlap and must not be confused."""
    accelerator = GossipAccelerator(gossip=GossipConfig(topology=topology, power=0, log_every=0, **FAST))
    models = [nn.Linear(size, 1, bias=False) for size in sizes]
    *models, first, second = accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.0) for m in models))
    with torch.no_grad():
        for number, model in enumerate(models):
            model.weight.fill_(100.0 * number + rank)
    for _ in range(20):
        first.step()
        second.step()
    return [float(model.weight.detach().max() - 100 * number) for number, model in enumerate(models)]


@pytest.mark.parametrize("topology", ["one_peer_ring", "complete", "ring"])
@pytest.mark.parametrize("sizes", [(2_000_000, 8), (1000, 1000)])
def test_exchanges_of_several_optimizers_are_kept_apart(topology, sizes):
    for values in run_workers(two_optimizers, 3, topology, sizes):
        assert values == pytest.approx([1.0, 1.0], abs=0.05)


def train_twice(rank: int) -> float:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", power=0, **FAST))
    for size in (50_000, 30):
        model = nn.Linear(size, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        with torch.no_grad():
            model.weight.fill_(float(rank))
        for _ in range(5):
            optimizer.step()
        value = float(model.weight.detach()[0, 0])
        model, optimizer = accelerator.free_memory(model, optimizer)
    return value


def test_a_second_training_after_free_memory():
    assert run_workers(train_twice, 2) == [0.5, 0.5]


def plan_ahead(rank: int, pattern: str) -> list[float]:
    accelerator = GossipAccelerator(gossip=GossipConfig(power=1, total_steps=8, **FAST))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def warm_up(of):
        return torch.optim.lr_scheduler.LambdaLR(of, lambda step: min(1.0, (step + 1) / 4))

    if pattern == "together":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, warm_up(optimizer))
    elif pattern == "scheduler first":
        scheduler = accelerator.prepare(warm_up(optimizer))
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(warm_up(optimizer.optimizer if pattern == "inner" else optimizer))
    gammas = []
    for step in range(6):
        accelerator.backward(model(inputs(rank, step)).sum())
        optimizer.step()
        scheduler.step()
        gammas.append(accelerator.gossip_steps[0].gamma)
    return gammas


@pytest.mark.parametrize("pattern", ["together", "scheduler first", "wrapped", "inner"])
def test_gamma_does_not_depend_on_how_prepare_was_called(pattern):
    for gammas in run_workers(plan_ahead, 2, pattern):
        assert gammas == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


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


def test_fp16_may_look_for_its_loss_scale_for_longer_than_the_limit_of_nan_steps():
    for scale, steps in run_workers(fp16_start, 2):
        assert scale < 2.0**97, "more overflows in a row than max_consecutive_nonfinite"
        assert steps == 12


def skip_a_step(rank: int) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(topology="complete", log_every=0, timeout=3))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        accelerator.backward(model(inputs(rank, step)).sum())
        if not (rank == 1 and step == 2):
            optimizer.step()
    with accelerator.deployed_model(model):
        pass


def test_a_worker_that_leaves_out_a_step_is_found_out():
    outcomes = try_workers(skip_a_step, 2)
    assert all(outcome.exit_code == 1 for outcome in outcomes)
    told = " ".join(outcome.error for outcome in outcomes)
    assert "left out an `optimizer.step()`" in told or "same number of optimizer steps" in told


def test_the_prepared_optimizer_can_be_copied_and_pickled():
    import copy
    import pickle

    accelerator = GossipAccelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert copy.deepcopy(optimizer).gossip is None
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1
    assert optimizer.gossip is not None


def mistake_in_a_collective(rank: int) -> str:
    from dsgdac_accel import WorkerGroup

    group = WorkerGroup(torch.device("cpu"), timeout=20)
    with pytest.raises(RuntimeError) as caught:
        group.guarded(lambda: torch.ones(2) @ torch.ones(3), "a sum")
    return type(caught.value).__name__


def test_a_mistake_is_not_called_a_lost_worker():
    assert run_workers(mistake_in_a_collective, 2) == ["RuntimeError", "RuntimeError"]
