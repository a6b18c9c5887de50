"""float32 masters of bf16 and fp16 parameters, in one process."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dsgdac_accel import Gossip, GossipAccelerator, GossipConfig, VirtualWorkers
from dsgdac_accel.core import masters as masters_module
from dsgdac_accel.core.copies import Copies
from dsgdac_accel.core.masters import Masters
from dsgdac_accel.core.slots import Slots
from tests.held import held

X = torch.ones(3, 4, dtype=torch.bfloat16)


def prepared(model: nn.Module, optimizer: Callable[..., Any] = torch.optim.SGD, **settings: Any) -> tuple:
    accelerator = GossipAccelerator(gossip=GossipConfig(**settings), cpu=True)
    return accelerator, *accelerator.prepare(model, optimizer(model.parameters(), lr=0.1))


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2).to(dtype)


def master(accelerator: GossipAccelerator, parameter: nn.Parameter) -> torch.Tensor:
    return held(accelerator, parameter).detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_are_not_lost(dtype):
    plain, model = nn.Linear(1, 1, bias=False).to(dtype), nn.Linear(1, 1, bias=False).to(dtype)
    for each in (plain, model):
        nn.init.ones_(each.weight)
    accelerator, model, optimizer = prepared(model)
    raw = torch.optim.SGD(plain.parameters(), lr=0.1)
    for group in (raw.param_groups[0], optimizer.param_groups[0]):
        group["lr"] = 2**-3
    for _ in range(200):
        for each, stepped in ((plain, raw), (model, optimizer)):
            (each.weight * 2**-10).sum().backward()  # 2^-13 is below half a unit in the last place of 1
            stepped.step()
            stepped.zero_grad()
    assert plain.weight.item() == 1.0
    assert master(accelerator, model.weight).item() == 1 - 200 * 2**-13
    assert torch.equal(model.weight, master(accelerator, model.weight).to(dtype))


@pytest.mark.parametrize("clear", ["optimizer", "before prepare", "model"])
def test_gradients_are_float32_and_every_way_to_clear_them_works(clear):
    model = linear()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = GossipAccelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, raw)
    by = {"optimizer": optimizer, "before prepare": raw, "model": model}[clear]
    for _ in range(3):
        by.zero_grad()
        for _ in range(257):  # in bf16, 256 + 1 is 256
            model(X[:1]).sum().backward()
        assert model.weight.grad.dtype == torch.float32
        assert bool((model.weight.grad == 257).all())
    by.zero_grad(set_to_none=False)
    assert bool((model.weight.grad == 0).all())


@pytest.mark.parametrize("through", ["model", "optimizer", "accelerator"])
def test_clipping_reaches_the_masters(through):
    accelerator, model, optimizer = prepared(linear())
    before = master(accelerator, model.weight).clone()
    accelerator.backward(model(X).float().sum())
    mine = model.parameters() if through != "optimizer" else optimizer.param_groups[0]["params"]
    clip = accelerator.clip_grad_norm_ if through == "accelerator" else nn.utils.clip_grad_norm_
    assert float(clip(mine, 1e-3)) == pytest.approx((4 * 2 * 9 + 2 * 9) ** 0.5)
    optimizer.step()
    assert master(accelerator, model.weight).grad is None, "or `model.zero_grad()` would not free it"
    step = (master(accelerator, model.weight) - before).norm() / 0.1
    assert float(step) == pytest.approx(1e-3 * (72 / 90) ** 0.5, rel=1e-3)


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def replace_data(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("edit", [clamp, clamp_data, replace_data])
@pytest.mark.parametrize("order", ["local_first", "mix_first"])
def test_what_a_script_writes_into_the_model_is_trained_from(edit, order):
    accelerator, model, optimizer = prepared(linear(), order=order)
    accelerator.backward(model(X).float().sum())
    optimizer.step()
    optimizer.zero_grad()
    before, kept = master(accelerator, model.weight).clone(), model.weight.detach().abs() <= 0.1
    edit(model.weight)
    optimizer.step()  # without a gradient
    after = master(accelerator, model.weight)
    assert torch.equal(after[kept], before[kept]), "the others keep the bits that bf16 does not show"
    assert bool((after[~kept].abs() == torch.tensor(0.1).bfloat16()).all())
    assert 0 < kept.sum() < kept.numel()


def test_weights_that_are_swapped_and_put_back_leave_the_master_alone():
    accelerator, model, optimizer = prepared(linear())
    accelerator.backward(model(X).float().sum())
    optimizer.step()
    optimizer.zero_grad()
    before, own = master(accelerator, model.weight).clone(), model.weight.data.clone()
    model.weight.data.fill_(1000)
    model.weight.data.copy_(own)
    optimizer.step()
    assert torch.equal(master(accelerator, model.weight), before)
    model.load_state_dict({name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()})
    optimizer.step()
    assert bool((master(accelerator, model.weight) == 0.25).all())


def test_edits_are_compared_by_bits():
    accelerator, model, optimizer = prepared(linear())
    with torch.no_grad():
        model.weight.zero_()
    optimizer.step()
    model.weight.data[0, 0] = -0.0
    model.weight.data[1, 1] = torch.nan
    before = master(accelerator, model.bias).clone()
    model.bias.data = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"bias became \(3,\)"):
        optimizer.step()
    model.bias.data = before.bfloat16()
    model.float()
    with pytest.raises(RuntimeError, match=r"weight became.* torch.float32, after.* torch.bfloat16"):
        optimizer.step()
    model.bfloat16()
    accelerator.gossip_steps[0].masters.read()
    weight = master(accelerator, model.weight)
    assert bool(weight[0, 0].signbit())
    assert bool(weight[1, 1].isnan())
    assert torch.equal(master(accelerator, model.bias), before)


def test_frozen_parameters_stay_as_they_are_and_are_trained_once_unfrozen():
    model = nn.Sequential(linear(), nn.Linear(2, 2).bfloat16())
    model[0].requires_grad_(False)
    accelerator, model, optimizer = prepared(model, torch.optim.AdamW)
    dtypes = [held(accelerator, parameter).dtype for parameter in model.parameters()]
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2
    for unfrozen in (False, True, True):
        model[0].requires_grad_(unfrozen)
        accelerator.backward(model(X).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert all(held(accelerator, parameter).dtype == torch.float32 for parameter in model.parameters())
    assert len({float(state["step"]) for state in optimizer.state.values()} ^ {2.0, 3.0}) == 0
    assert torch.equal(model[0].weight, master(accelerator, model[0].weight).bfloat16())


@pytest.mark.parametrize("edited", [False, True])
def test_a_parameter_that_leaves_the_optimizer_for_a_while_keeps_its_master_and_what_was_written(edited):
    model = nn.Sequential(linear(), nn.Linear(2, 2).bfloat16())
    accelerator = GossipAccelerator(cpu=True)
    raw = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model], lr=0.1)
    model, optimizer = accelerator.prepare(model, raw)
    first = held(accelerator, model[0].weight)
    for turn in range(3):
        if turn == 1:
            optimizer.param_groups.pop(0)
        if turn == 2:
            if edited:
                model[0].weight.data.fill_(2)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        accelerator.backward(model(X).float().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert held(accelerator, model[0].weight) is first
    assert torch.equal(model[0].weight, first.bfloat16())
    assert (model[0].weight.mean().item() > 1.5) == edited


def test_the_optimizer_gets_the_model_back_and_can_be_prepared_again():
    model = linear()
    raw = torch.optim.AdamW(model.parameters(), lr=0.1)
    accelerator = GossipAccelerator(cpu=True)
    for steps in (1.0, 2.0):
        model, optimizer = accelerator.prepare(model, raw)
        accelerator.backward(model(X).float().sum())
        optimizer.step()
        accelerator.deploy(model)
        assert [p is own for p, own in zip(raw.param_groups[0]["params"], model.parameters(), strict=True)] == [
            True
        ] * 2
        assert "zero_grad" not in vars(raw)
        assert (model.weight.grad_dtype, model.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        assert float(raw.state[model.weight]["step"]) == steps
        accelerator.free_memory()


def test_parameters_that_share_their_memory_share_a_master():
    model = nn.Sequential(linear(), linear())
    model[1].weight.data = model[0].weight.data
    accelerator, model, optimizer = prepared(model)
    for layer in model:
        layer(X).float().sum().backward()
    before = master(accelerator, model[0].weight).clone()
    optimizer.step()
    for layer in model:
        torch.testing.assert_close(master(accelerator, layer.weight), before - 2 * 0.1 * 3)
        assert torch.equal(layer.weight, master(accelerator, layer.weight).bfloat16())
    optimizer.zero_grad()
    model[0].weight.data.fill_(0.25)
    optimizer.step()
    assert bool((master(accelerator, model[1].weight) == 0.25).all())


@pytest.mark.parametrize("tied_first", [False, True])
def test_a_tie_that_changes_after_the_masters_were_made_is_refused_by_name(tied_first):
    model = nn.Sequential(linear(), linear())
    if tied_first:
        model[1].weight.data = model[0].weight.data
    _, model, optimizer = prepared(model)
    optimizer.step()
    model[1].weight.data = model[0].weight.data.clone() if tied_first else model[0].weight.data
    with pytest.raises(RuntimeError, match=r"1\.weight \(torch.bfloat16\) was tied or untied"):
        optimizer.step()


class LoadsByItself(torch.optim.AdamW):
    """Casts what it loads to the dtypes of its parameters, without hooks, like the optimizers of bitsandbytes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (group,), (saved,) = self.param_groups, state_dict["param_groups"]
        for number, parameter in zip(saved["params"], group["params"], strict=True):
            state = state_dict["state"].get(number, {})
            self.state[parameter] = {name: value.to(parameter.dtype) for name, value in state.items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, LoadsByItself])
def test_a_script_finds_the_models_parameters_in_the_optimizer_and_float32_in_its_state(kind):
    accelerator, model, optimizer = prepared(linear(), kind)
    accelerator.backward(model(X).float().square().sum())
    optimizer.step()
    inside = []
    optimizer.optimizer.register_step_pre_hook(lambda raw, *_: inside.extend(raw.param_groups[0]["params"]))
    optimizer.step()
    assert all(map(operator.is_, inside, [held(accelerator, p) for p in model.parameters()]))
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], model.parameters()))
    moment = optimizer.state[model.weight]["exp_avg"]
    assert moment.dtype == torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())
    saved = copy.deepcopy(optimizer.state_dict())
    moment.zero_()
    with pytest.raises(ValueError, match=r"parameter group|unpack"):
        optimizer.load_state_dict({**saved, "param_groups": []})
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], model.parameters()))
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], saved["state"][0]["exp_avg"])


def test_a_local_step_that_raises_gives_the_optimizer_the_models_parameters_back():
    _, model, optimizer = prepared(linear())

    def fail(*_: Any) -> None:
        raise KeyError("by the script")

    hook = optimizer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is model.weight
    hook.remove()
    optimizer.step()


@pytest.mark.parametrize("rounded", [False, True])
def test_masters_live_in_the_send_buffer_unless_messages_are_rounded(rounded):
    model = nn.Sequential(linear(), nn.Linear(2, 2), linear(torch.float16))
    masters = Masters(torch.optim.SGD(model.parameters(), lr=0.1), {})
    slots, copies = Slots(model.parameters(), source=masters), Copies()
    slots.select(None)
    if rounded:
        copies.lay_out(slots.values(), [1], torch.empty_like)
    else:
        copies.lay_out(slots.values(), [1], rounded_to=[slot.rounded_to for slot in slots.of_workers[0]])
    slots.arrange(copies)
    sent = [buffer.untyped_storage().data_ptr() for buffer in copies.sent[0].buffers]
    assert len(sent) == (1 if rounded else 3)
    for p in (model[0].weight, model[2].bias):
        assert (masters.master_of(p).untyped_storage().data_ptr() in sent) is not rounded
        assert torch.equal(masters.master_of(p).to(p.dtype), p)


def test_masters_of_parameters_that_are_gone_are_freed():
    accelerator, model, optimizer = prepared(nn.Sequential(linear(), linear()))
    gone = weakref.ref(held(accelerator, model[1].weight))
    for turn in range(2):
        if turn == 0:
            model[1] = linear()
            optimizer.param_groups[0]["params"][2:] = list(model[1].parameters())
        accelerator.backward(model[0](X).float().sum() + model[1](X).float().sum())
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert gone() is None


def test_masters_end_with_their_last_reference():
    gc.disable()
    try:
        accelerator, model, optimizer = prepared(linear(), LoadsByItself)
        model(X).float().sum().backward()
        optimizer.step()
        ends = [weakref.ref(each) for each in (model.weight, held(accelerator, model.weight), optimizer.optimizer)]
        raw = copy.deepcopy(optimizer.optimizer)
        del accelerator, model, optimizer
        assert [end() for end in ends] == [None] * 3
        raw.load_state_dict(raw.state_dict())
    finally:
        gc.enable()


def test_a_plain_loop_that_saved_an_edit_resumes_with_it():
    runs = []
    for _ in range(2):
        model = VirtualWorkers(linear(), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append((Gossip(model, optimizer, GossipConfig(workers_per_process=2, power=0)), model, optimizer))

    def train(gossip: Gossip, model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        model(torch.cat([X, 2 * X])).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [value.detach().clone() for value in gossip.steps[0].masters.values()]

    train(*runs[0])
    runs[0][1].replicas[1].weight.data.fill_(2)
    saved = copy.deepcopy([part.state_dict() for part in runs[0]])
    for part, state in zip(runs[1], saved, strict=True):
        part.load_state_dict(state)
    for one, other in zip(train(*runs[0]), train(*runs[1]), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_was_unfrozen_just_before_saving_is_resumed(tmp_path):
    found = []
    for resumed in (False, True):
        model = nn.Sequential(linear(), nn.Linear(2, 2).bfloat16())
        model[0].requires_grad_(False)
        accelerator, model, optimizer = prepared(model, torch.optim.AdamW)
        model[0].requires_grad_(True)
        if resumed:
            accelerator.load_state(tmp_path / "c")
        else:
            accelerator.save_state(tmp_path / "c")
        accelerator.backward(model(X).float().square().sum())
        optimizer.step()
        found.append(master(accelerator, model[0].weight).clone())
    assert torch.equal(*found)


def test_newcomers_that_are_measured_before_their_first_step_start_equal():
    accelerator, model, optimizer = prepared(linear(), workers_per_process=2, power=0, topology="complete")
    late = [nn.Parameter(torch.full((2,), float(value), dtype=torch.bfloat16)) for value in (1, 2)]
    for replica, parameter in zip(model.replicas, late, strict=True):
        replica.late = parameter
        optimizer.param_groups[0]["params"].append(parameter)
    accelerator.measure_consensus()
    optimizer.step()
    assert [parameter.tolist() for parameter in late] == [[1.0, 1.0]] * 2


def test_a_parameter_may_join_while_another_one_is_put_into_other_memory():
    accelerator, model, optimizer = prepared(linear())
    optimizer.step()
    late = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer.param_groups[0]["params"].append(late)
    model.weight.data = model.weight.data.clone()
    late.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    assert held(accelerator, late).dtype == torch.float32
    torch.testing.assert_close(held(accelerator, late).detach(), torch.full((2,), 0.9))


def test_a_local_step_that_was_interrupted_after_it_moved_the_masters_leaves_them_in_the_model():
    accelerator, model, optimizer = prepared(linear())
    accelerator.backward(model(X).float().sum())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = model.weight.detach().clone()
    optimizer.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(model.weight, master(accelerator, model.weight).bfloat16())
    assert not torch.equal(model.weight, before)


def test_states_of_every_shape_follow_the_masters():
    model = linear()
    raw = torch.optim.Adafactor(model.parameters(), lr=0.1)
    for turn in range(3):
        if turn == 1:
            accelerator = GossipAccelerator(cpu=True)
            model, optimizer = accelerator.prepare(model, raw)
        if turn == 2:
            accelerator.free_memory()
        model(X).float().square().sum().backward()
        (optimizer if turn == 1 else raw).step()
        dtype = torch.float32 if turn == 1 else torch.bfloat16
        assert raw.state[model.weight]["row_var"].dtype == dtype
        raw.zero_grad()


def test_a_backward_pass_through_the_graph_of_an_earlier_step_is_an_error():
    _, model, optimizer = prepared(nn.Sequential(linear(), nn.Linear(2, 2).bfloat16()))
    loss = model(X).float().square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_gradients_inside_an_accumulation_window_are_saved_in_float32(tmp_path):
    accelerator = GossipAccelerator(cpu=True, gradient_accumulation_steps=2)
    model = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def train(first: int, last: int) -> torch.Tensor:
        for number in range(first, last):
            with accelerator.accumulate(model):
                accelerator.backward(model(X * (number + 1) / 7).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return master(accelerator, model.weight).clone()

    train(0, 3)
    with accelerator.deployed_model(model):
        pass
    accelerator.save_state(tmp_path / "c")
    gradient, whole = model.weight.grad.clone(), train(3, 6)
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.weight.grad, gradient)
    assert gradient.dtype == torch.float32
    assert torch.equal(train(3, 6), whole)


def test_a_plain_loop_saves_its_masters():
    runs = []
    for _ in range(2):
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        runs.append((Gossip(model, optimizer), model, optimizer))

    def train(gossip: Gossip, model: nn.Module, optimizer: Any) -> torch.Tensor:
        for _ in range(2):
            model(X).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return gossip.steps[0].masters.values()[0].detach().clone()

    train(*runs[0])
    saved = [part.state_dict() for part in runs[0]]
    for part, state in zip(runs[1], copy.deepcopy(saved), strict=True):
        part.load_state_dict(state)
    assert torch.equal(train(*runs[0]), train(*runs[1]))
    with pytest.raises(ValueError, match="1 masters of bf16 and fp16 parameters, and this model 2"):
        runs[1][0].load_state_dict({**saved[0], "masters": [saved[0]["masters"][0][:1]]})


def test_fp16_with_loss_scaling_clips_the_unscaled_gradient():
    accelerator = GossipAccelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # stands in for that of fp16 on a GPU
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    model = linear(torch.float16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = master(accelerator, model.weight).clone()
    accelerator.backward(model(X.half()).float().sum())
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(90**0.5)
    optimizer.step()
    torch.testing.assert_close(master(accelerator, model.weight), before - 0.3)


def test_virtual_workers_mix_their_masters_and_are_clipped_one_by_one():
    accelerator, model, optimizer = prepared(linear(), workers_per_process=2, topology="complete", power=0)
    before = master(accelerator, model.replicas[0].weight).clone()
    x = torch.cat([X[:1], 3 * X[:1]])
    accelerator.backward(model(x).float().mean())
    norms = [0.5 * 10**0.5, 0.5 * 74**0.5]  # of the mean over two outputs: 4 inputs of 1 or 3 for each, and a bias
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(sum(norms) / 2)
    optimizer.step()
    with accelerator.deployed_model(model) as deployed:
        mean = before - 0.1 * (0.5 / norms[0] + 1.5 / norms[1]) / 2
        torch.testing.assert_close(deployed.weight.detach().float(), mean, rtol=2**-8, atol=0)
        errors = accelerator.consensus_errors(model)
    half = 0.1 * (1.5 / norms[1] - 0.5 / norms[0]) / 2
    torch.testing.assert_close(errors[0]["weight"].flatten(), torch.full((8,), half))


def test_the_average_is_that_of_edited_weights_and_so_is_the_next_mix():
    accelerator, model, optimizer = prepared(linear(), workers_per_process=2, topology="complete", power=0)
    for number, replica in enumerate(model.replicas):
        replica.weight.data.fill_(number)
    with accelerator.deployed_model(model) as deployed:
        assert bool((deployed.weight == 0.5).all())
    assert [replica.weight.unique().tolist() for replica in model.replicas] == [[0.0], [1.0]]
    for number, replica in enumerate(model.replicas):
        replica.weight.data.fill_(2 * number)
    optimizer.step()
    assert [replica.weight.unique().tolist() for replica in model.replicas] == [[1.0], [1.0]]


def test_a_torch_without_wide_gradients_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(masters_module, "WIDE_GRADIENTS", False)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16.*torch 2\.10.*dtype=torch.float32.*bf16=True"):
        GossipAccelerator(cpu=True).prepare(model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_a_refused_preparation_leaves_the_optimizer_as_it_was():
    model = nn.Sequential(linear(), linear())
    model[1].weight = nn.Parameter(model[1].weight.detach().to(torch.float8_e4m3fn))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"1\.weight is torch.float8_e4m3fn.*dtype=torch.float32"):
        GossipAccelerator(cpu=True).prepare(model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert model[0].weight.grad_dtype == torch.bfloat16
