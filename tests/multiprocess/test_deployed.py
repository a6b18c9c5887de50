"""The deployed model is the average of the workers, and leaving it restores every byte."""

from __future__ import annotations

import random
import time

import numpy
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.multiprocess.batch_norm_model import Net, Vectors, everything, make_accelerator
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess


def integer_buffers(rank: int) -> dict[str, torch.Tensor]:
    accelerator = make_accelerator()
    model = Net()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.norm.num_batches_tracked.fill_(3 + rank)
    with accelerator.deployed_model(model) as deployed:
        state = everything(deployed)
    assert int(model.norm.num_batches_tracked) == 3 + rank
    return state


def test_integer_buffers_are_worker_0s_and_load_strictly():
    for state in run_workers(integer_buffers, 2):
        assert state["norm.num_batches_tracked"].item() == 3
        assert state["norm.num_batches_tracked"].dtype == torch.int64
        Net().load_state_dict(state, strict=True)


# ---- restoring


def snapshot(model: nn.Module, accelerator: GossipAccelerator) -> list:
    numbers = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    modes = [module.training for module in model.modules()]
    return [
        [(t.data_ptr(), t.dtype) for t in (*model.parameters(), *model.buffers())],
        numbers,
        modes,
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ]


def look_and_leave(rank: int, how: str) -> bool:
    torch.manual_seed(rank)
    accelerator = make_accelerator()
    model = Net()
    loader = DataLoader(Vectors(24, "dict"), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    model.drop.eval()
    for step in range(2):
        accelerator.backward(model(torch.randn(4, 3)).square().mean() * (step + 1))
        optimizer.step()
    accelerator.gossip_steps[0].mixer.drain()
    before = snapshot(model, accelerator)

    def evaluate(deployed):
        assert not any(module.training for module in deployed.modules())
        torch.rand(3), random.random(), numpy.random.rand()
        if how == "half":
            deployed.half()
        if how == "train inside":
            with pytest.raises(RuntimeError, match="deployed average"):
                optimizer.step()
        if how == "reload":
            deployed.load_state_dict({k: torch.zeros_like(v) for k, v in deployed.state_dict().items()}, assign=False)
        if how == "nested":
            with accelerator.deployed_model(model) as inner:
                assert inner is deployed
        if how == "exception" and rank == 1:
            raise KeyError("a bug in the evaluation")

    try:
        with accelerator.deployed_model(model, calibrate=loader) as deployed:
            evaluate(deployed)
    except KeyError:
        assert how == "exception"
    after = snapshot(model, accelerator)
    for old, new in zip(before[1], after[1], strict=True):
        assert torch.equal(old, new)
    return before[0] == after[0] and before[2:] == after[2:]


@pytest.mark.parametrize("how", ["plain", "half", "train inside", "reload", "nested", "exception"])
def test_every_byte_of_training_state_is_restored(how):
    assert run_workers(look_and_leave, 2, how) == [True, True]


def train_and_evaluate(rank: int, every: int, workers: int) -> dict[str, torch.Tensor]:
    """Evaluate in mid-epoch and mid-window, calibrate on the training loader, and leave some test passes early."""
    torch.manual_seed(3)
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = Net()
    training = DataLoader(Vectors(44, "dict"), batch_size=4, shuffle=True, num_workers=workers)
    testing = DataLoader(Vectors(12, "dict"), batch_size=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    model, optimizer, training, testing, scheduler = accelerator.prepare(model, optimizer, training, testing, scheduler)
    micro = 0
    for _ in range(2):
        for batch in training:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            micro += 1
            if every and micro % every == 0:
                with accelerator.deployed_model(model, calibrate=training) as deployed, torch.no_grad():
                    for number, held_out in enumerate(testing):
                        deployed(held_out["pixel_values"])
                        if number == 0 and micro % 2:
                            break
                accelerator.measure_consensus()
    return {**everything(model), "steps": torch.tensor(accelerator.gossip_steps[0].mixer.step)}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_evaluating_never_changes_training(workers):
    undisturbed = run_workers(train_and_evaluate, 2, 0, workers, timeout=120)
    disturbed = run_workers(train_and_evaluate, 2, 1 if not workers else 5, workers, timeout=120)
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert int(one["steps"]) == 6  # 6 batches per worker and epoch, two to a step
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(undisturbed[0]["linear.weight"], undisturbed[1]["linear.weight"])


# ---- saving


def save_deployed(rank: int, folder: str, compiled: bool) -> torch.Tensor:
    accelerator = make_accelerator(dynamo_backend="eager" if compiled else "no")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        accelerator.backward((model(torch.randn(4, 3)) * torch.randn(4, 2)).sum() * (rank + 1))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, folder)
    return accelerator.unwrap_model(model, keep_torch_compile=False)[0].weight.detach().clone()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_saved_model_is_the_mean_of_the_workers_and_loads_into_a_plain_model(tmp_path, compiled):
    weights = torch.stack(run_workers(save_deployed, 3, str(tmp_path), compiled))
    saved = load_file(tmp_path / "model.safetensors")
    nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).load_state_dict(saved, strict=True)
    torch.testing.assert_close(saved["0.weight"], weights.mean(0), rtol=0, atol=1e-6)
    assert (weights[0] - saved["0.weight"]).abs().max() > 1e-3


def state_dicts(rank: int) -> bool:
    accelerator = make_accelerator()
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 3) + rank).square().sum().backward()
    optimizer.step()
    average = accelerator.get_state_dict(model)
    assert not torch.equal(average["norm.running_mean"], model.norm.running_mean)
    if rank == 0:  # a model that is not prepared is the process's own matter
        assert accelerator.get_state_dict(Net()).keys() == average.keys()
    with accelerator.deployed_model(model):
        inside = accelerator.get_state_dict(model)
    return all(torch.equal(average[name], value) for name, value in inside.items())


def test_a_state_dict_is_that_of_the_deployed_model():
    assert run_workers(state_dicts, 2) == [True, True]


# ---- several models, caches, conversions


def nested_models(rank: int) -> dict[str, torch.Tensor | bool]:
    accelerator = make_accelerator()
    models = [Net(), Net()]
    first, second, *_ = accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in models))
    for model in (first, second):
        model.norm.running_mean.fill_(10.0 * rank)
        with torch.no_grad():
            model.linear.weight.fill_(float(rank))
    with accelerator.deployed_model(first), accelerator.deployed_model(second, calibrate=[torch.full((4, 3), 7.0)]):
        inside = [first.norm.running_mean[0].item(), second.norm.running_mean[0].item(), second.training]
        weights = [first.linear.weight[0, 0].item(), second.linear.weight[0, 0].item()]
    after = [model.norm.running_mean[0].item() for model in models] + [
        model.linear.weight[0, 0].item() for model in models
    ]
    return {"inside": inside, "weights": weights, "after": after}


def test_contexts_of_two_models_nest():
    for rank, result in enumerate(run_workers(nested_models, 2)):
        assert result["inside"] == [5.0, 7.0, False]
        assert result["weights"] == [0.5, 0.5]
        assert result["after"] == [10.0 * rank, 10.0 * rank, rank, rank]


def grown_cache(rank: int, persistent: bool) -> str:
    accelerator = make_accelerator()
    model = Net()
    model.register_buffer("cache", torch.zeros(4), persistent=persistent)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.cache = torch.zeros(4 + 46 * rank)
    try:
        with accelerator.deployed_model(model):
            return str(len(model.cache))
    except ValueError as error:
        return str(error)


def test_buffers_of_different_shapes_stay_local_or_are_refused_by_name():
    assert run_workers(grown_cache, 2, False) == ["4", "50"]
    for message in run_workers(grown_cache, 2, True):
        assert "buffer cache" in message
        assert "(50,)" in message


def half_with_frozen(rank: int) -> tuple[set, bool]:
    accelerator = make_accelerator()
    model = Net()
    model.linear.bias.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(4, 3)).sum())
    gradient = model.linear.weight.grad.clone()
    with accelerator.deployed_model(model) as deployed:
        deployed.half()
    optimizer.step()
    accelerator.backward(model(torch.randn(4, 3)).sum())
    return {p.dtype for p in model.parameters()}, gradient.dtype == model.linear.weight.grad.dtype


def test_converting_inside_leaves_frozen_weights_and_gradients_alone():
    assert run_workers(half_with_frozen, 2) == [({torch.float32}, True)] * 2


def read_inside(rank: int, inside: bool) -> list[list[float]]:
    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(1)
    model = Net()
    loader = DataLoader(torch.arange(16.0), batch_size=2, shuffle=True)
    model, _optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    epochs = []
    for _ in range(3):
        epochs.append([float(x) for batch in loader for x in batch])
        if inside:
            with accelerator.deployed_model(model):
                assert sum(1 for _ in loader) == 4
    return epochs


def test_reading_the_training_loader_inside_keeps_the_order_of_later_epochs():
    assert run_workers(read_inside, 2, True) == run_workers(read_inside, 2, False)


def test_a_backward_pass_inside_leaves_an_open_accumulation_window_alone():
    accelerator = GossipAccelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(4, 3)).sum())
    before = [p.grad.clone() for p in model.parameters()]
    with accelerator.deployed_model(model) as deployed:
        assert all(p.grad is None for p in deployed.parameters())
        deployed(torch.randn(4, 3)).square().sum().backward()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), before, strict=True))


def test_a_pass_left_by_break_inside_does_not_become_the_active_one():
    accelerator = GossipAccelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    training, testing = (DataLoader(Vectors(12), batch_size=4) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, training, testing = accelerator.prepare(model, optimizer, training, testing)
    steps = []
    for batch in training:
        with accelerator.accumulate(model):
            steps.append(accelerator.sync_gradients)
            accelerator.backward(model(batch).sum())
            optimizer.step()
        with accelerator.deployed_model(model):
            next(iter(testing))
        assert accelerator.gradient_state.active_dataloader is training
    assert steps == [False, True, True], "the last window has one batch"


def without_optimizer(rank: int, trains: bool) -> str:
    accelerator = make_accelerator()
    model = accelerator.prepare(Net())
    if trains:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)))
        output.square().sum().backward()  # a plain sum behind BatchNorm has hardly a gradient that tells workers apart
        optimizer.step()
    try:
        with accelerator.deployed_model(model) as deployed:
            return f"deployed {sum(float(p.sum()) for p in deployed.parameters())}"
    except ValueError as error:
        return str(error)


def test_deploying_unmixed_workers_is_refused_unless_they_are_equal():
    refusals = run_workers(without_optimizer, 2, True)
    assert all("no prepared optimizer mixes the workers" in told for told in refusals), refusals
    first, second = run_workers(without_optimizer, 2, False)
    assert first == second
    assert first.startswith("deployed"), "equal workers can be evaluated"


def on_the_main_process_only(rank: int) -> None:
    accelerator = GossipAccelerator(gossip=GossipConfig(timeout=3))
    model = Net()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.is_main_process:
        with accelerator.deployed_model(model):
            pass
    else:
        time.sleep(5)  # does other work


@pytest.mark.slow
def test_evaluating_on_one_worker_only_is_an_error_with_the_way_out():
    told = " ".join(outcome.error for outcome in try_workers(on_the_main_process_only, 3))
    assert "workers 1, 2 did not answer within 3 s in averaging the workers at step 0" in told
    assert "enter `deployed_model`, `save_model` and evaluation on all workers" in told
