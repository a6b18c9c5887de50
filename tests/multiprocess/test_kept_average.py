"""What the average at the end of a pass holds, and what it leaves alone until a script reads it."""

from __future__ import annotations

import logging.handlers
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.core.copies import Use
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess
DATA = torch.randn(16, 3, generator=torch.Generator().manual_seed(7))


def started(**settings) -> GossipAccelerator:
    torch.manual_seed(0)
    return GossipAccelerator(gossip=GossipConfig(power=2, max_lr=1.0, log_every=0, timeout=30, **settings))


def loaders(accelerator: GossipAccelerator) -> list:
    return [accelerator.prepare(DataLoader(DATA, batch_size=4, shuffle=train)) for train in (True, False)]


def values(*modules: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for module in modules for p in module.parameters()])


def mean(accelerator: GossipAccelerator, *modules: nn.Module) -> Tensor:
    return accelerator.group.all_reduce_mean_(values(*modules), "the test's own mean")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def one_pass(accelerator: GossipAccelerator, loss_of, optimizer, train) -> None:
    for x in train:
        accelerator.backward(loss_of(x * (1 + accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()


def close(one: Tensor, other: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


# ---- one list


def frozen_later(rank: int, folder: str) -> None:
    accelerator = started()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    train, test = loaders(accelerator)
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        one_pass(accelerator, lambda x: model(x).square().mean(), optimizer, train)
    own, expected = values(model), mean(accelerator, model)
    assert float((own - expected)[: model[0].weight.numel()].abs().max()) > 1e-3, "the frozen layer differs"
    model.eval()
    for _ in test:
        close(values(model), expected)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder)
    for found in (state, load_file(Path(folder) / "model.safetensors")):
        close(torch.cat([found[name].flatten() for name, _ in model.named_parameters()]), expected)
    assert torch.equal(values(model), own)


def test_a_layer_that_is_frozen_later_is_averaged_wherever_the_average_is_read(tmp_path):
    run_workers(frozen_later, 2, str(tmp_path))


def head_outside(rank: int) -> None:
    accelerator = started()
    encoder, head = network(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.3)
    encoder, optimizer = accelerator.prepare(encoder, optimizer)
    train, test = loaders(accelerator)
    one_pass(accelerator, lambda x: head(encoder(x)).square().mean(), optimizer, train)
    own, expected = values(encoder, head), mean(accelerator, encoder, head)
    assert float((own - expected)[-3:].abs().max()) > 1e-3
    encoder.eval()
    for _ in test:
        close(values(encoder, head), expected)
    assert torch.equal(values(encoder, head), own)


def test_what_only_the_optimizer_has_is_averaged_in_an_evaluation():
    run_workers(head_outside, 2)


# ---- between a forward pass and its backward


def adversarial(rank: int) -> None:
    """DCGAN's order: the generator's graph is from before the step of the critic."""
    accelerator = started()
    generator, critic = network(), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    generator, critic, optimizer, critic_optimizer = accelerator.prepare(generator, critic, *optimizers)
    train, test = loaders(accelerator)
    for x in train:
        critic_optimizer.zero_grad()
        optimizer.zero_grad()
        fake = generator(x * (1 + rank))
        accelerator.backward(critic(fake.detach()).square().mean())
        loss = fake.square().mean()
        critic_optimizer.step()
        accelerator.backward(loss)
        optimizer.step()
    expected = mean(accelerator, generator, critic)
    norms = [model[1] for model in (generator, critic)]
    statistics = [accelerator.group.all_reduce_mean_(norm.running_mean.clone(), "a mean") for norm in norms]
    generator.eval()
    critic.eval()
    for _ in test:
        close(values(generator, critic), expected)
        for norm, running_mean in zip(norms, statistics, strict=True):
            close(norm.running_mean, running_mean)


def test_the_last_step_of_a_pass_may_lie_between_a_forward_and_its_backward():
    run_workers(adversarial, 2)


def read_inside(rank: int, how: str) -> None:
    """Read the average between a forward and its backward."""
    accelerator = started()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train, test = loaders(accelerator)
    one_pass(accelerator, lambda x: model(x).square().mean(), optimizer, train)
    if how != "calibrated":  # which leaves frozen statistics alone
        model[1].eval()
    model(DATA).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss = model(DATA).square().mean()
    before = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    if how == "pass":
        with torch.no_grad():
            seen = [values(model) for _ in test]
    else:
        with accelerator.deployed_model(model, calibrate=train if how == "calibrated" else None) as deployed:
            seen = [values(deployed)]
    assert float((seen[0] - values(model)).abs().max()) > 1e-3
    for tensor, value in zip((*model.parameters(), *model.buffers()), before, strict=True):
        assert torch.equal(tensor, value)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("how", ["pass", "pooled", "calibrated"])
def test_the_average_may_be_read_between_a_forward_and_its_backward(how):
    run_workers(read_inside, 2, how)


# ---- where it is kept


def untouched(rank: int, settings: dict, dtype: torch.dtype, inside: str) -> None:
    accelerator = started(**settings)
    model = network()
    model[0].to(dtype)
    model[2].to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    train, test = loaders(accelerator)

    def loss_of(x: Tensor) -> Tensor:
        return model[2](model[1](model[0](x.to(dtype)).float()).to(dtype)).square().mean()

    one_pass(accelerator, loss_of, optimizer, train)
    (gossip,) = accelerator.gossip_steps
    assert gossip.mixer.copies.use is Use.KEPT
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in (*tensors, *gossip.masters.values())]
    versions = [tensor._version for tensor in tensors]
    expected, atol = mean(accelerator, model), 1e-6 if dtype == torch.float32 else 5e-3
    model.eval()
    for _ in (*test, *test):
        pass
    for _ in test:
        close(values(model), expected, atol)
        if inside == "measured":
            assert accelerator.measure_consensus()["gossip/radius"] > 0
        if inside == "saved":
            accelerator.get_state_dict(model)
    assert all(map(torch.equal, (*tensors, *gossip.masters.values()), before))
    assert [tensor._version for tensor in tensors] == versions
    model.train()
    one_pass(accelerator, loss_of, optimizer, train)


@pytest.mark.parametrize(
    ("settings", "dtype", "inside"),
    [
        ({}, torch.float32, "measured"),
        ({"comm_dtype": "int8"}, torch.float32, "saved"),
        ({}, torch.bfloat16, "measured"),
        ({"comm_dtype": "int8"}, torch.bfloat16, ""),
        ({"overlap": False}, torch.bfloat16, "saved"),
    ],
)
def test_the_average_is_shown_in_a_pass_and_every_byte_and_version_is_back_after_it(settings, dtype, inside):
    run_workers(untouched, 2, settings, dtype, inside)


def read_by_a_persistent_iterator(rank: int) -> None:
    accelerator = started()
    critic, model = network(), network()
    model, critic, optimizer = accelerator.prepare(
        model, critic, torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.3)
    )
    train, test = loaders(accelerator)
    for _ in range(2):
        model.train()
        critic.train()
        one_pass(accelerator, lambda x: (model(x) * critic(x)).square().mean(), optimizer, train)
        if rank == 0:
            model(DATA)  # a look in train mode, which changes the statistics of BatchNorm
        statistics = model[1].running_mean.clone()
        expected = mean(accelerator, model)
        state = accelerator.get_state_dict(model)
        close(torch.cat([state[name].flatten() for name, _ in model.named_parameters()]), expected)
        assert torch.equal(model[1].running_mean, statistics)
        model.eval()
        critic.eval()
        iterator = iter(test)  # which lives on in the next pass
        next(iterator)
        close(values(model), expected)
    model.train()
    critic.train()
    for _ in train:
        assert not torch.equal(values(model), expected)
        break
    before = [critic[1].running_mean.clone(), critic[0].weight.grad]
    with accelerator.deployed_model(model):
        critic(DATA).sum().backward()
    assert torch.equal(critic[1].running_mean, before[0])
    assert critic[0].weight.grad is before[1]


def test_an_evaluation_is_left_open_and_a_worker_runs_the_model_by_itself():
    run_workers(read_by_a_persistent_iterator, 2)


class Counting(nn.Sequential):
    """A network whose evaluation writes buffers, in place and by new objects."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen * 0.9 + x.mean()
        self.counted.add_(1)
        return super().forward(x)


def written_inside(rank: int, what: str) -> None:
    accelerator = started()
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel.pass_average").addHandler(heard)
    model = Counting()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    train, test = loaders(accelerator)
    one_pass(accelerator, lambda x: model(x).square().mean(), optimizer, train)
    loaded = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    loaded["0.bias"] += 1 + rank  # all else is equal to the average
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    model.eval()
    with torch.no_grad():
        for x in test:
            model(x)
            if what == "converted":
                model.double().float()
            if what in ("loaded", "loaded and back"):
                average = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(loaded)
            if what == "loaded":
                assert float(accelerator.get_state_dict(model)["0.bias"][0]) == float(loaded["0.bias"][0])
            if what == "loaded and back":
                model.load_state_dict(average)
    after = model.state_dict(keep_vars=True)
    for name, (tensor, value) in before.items():
        if what == "loaded":
            assert torch.equal(after[name], loaded[name]), f"{name} is not what was loaded"
        else:
            assert after[name] is tensor
            assert torch.equal(tensor, value), f"{name} was not given back"
    own = sum("written into the deployed average" in record.getMessage() for record in heard.buffer)
    assert own == (what == "loaded" and rank == 0)


@pytest.mark.parametrize("what", ["buffers", "converted", "loaded", "loaded and back"])
def test_a_pass_gives_back_what_it_overwrote_and_keeps_what_a_script_wrote(what):
    run_workers(written_inside, 2, what)


def beside(rank: int) -> None:
    """A prepared average of a script's own, and a buffer that has no average."""
    accelerator = started()
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel.pass_average").addHandler(heard)
    model = network()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    model, ema, optimizer = accelerator.prepare(model, ema, torch.optim.SGD(model.parameters(), lr=0.3))
    train, _ = loaders(accelerator)
    for x in train:
        accelerator.backward(model(x * (1 + rank)).square().mean())
        ema.update_parameters(model)
        optimizer.step()
        optimizer.zero_grad()
    expected = mean(accelerator, ema)
    statistics = accelerator.group.all_reduce_mean_(ema.module[1].running_mean.clone(), "a mean")
    state = accelerator.get_state_dict(ema)
    close(torch.cat([state[name].flatten() for name, _ in ema.named_parameters()]), expected)
    close(state["module.1.running_mean"], statistics)
    model.register_buffer("lengths", torch.zeros(1 + rank))
    one_pass(accelerator, lambda x: model(x).square().mean(), optimizer, train)
    assert not accelerator.pass_average.available
    assert sum("buffer lengths" in record.getMessage() for record in heard.buffer) == (rank == 0)
    with pytest.raises(ValueError, match="buffer lengths"), accelerator.deployed_model(model):
        pass


def test_what_lies_beside_the_mixed_parameters_is_averaged_or_named():
    run_workers(beside, 2)


def held_by_main_alone(rank: int) -> None:
    """The main process looks at samples, and its iterators live on."""
    accelerator = started()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    train, test = loaders(accelerator)
    short = accelerator.prepare(DataLoader(DATA, batch_size=8))  # a batch for each worker
    held = [iter(loader) for loader in (short, test)] if rank == 0 else []
    for iterator in held:
        next(iterator)
    one_pass(accelerator, lambda x: model(x).square().mean(), optimizer, train)
    expected = mean(accelerator, model)
    model.eval()
    for loader in (short, test):
        for _ in loader:
            close(values(model), expected)


def test_samples_that_the_main_process_looks_at_change_no_average():
    run_workers(held_by_main_alone, 2)
