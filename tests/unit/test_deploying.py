"""Ending the gossip by `deploy`: every prepared model keeps the average, and training can begin again."""

import pytest
import torch
from torch import nn

from dsgdac_accel import Gossip, GossipAccelerator, GossipConfig


def step(accelerator, model, optimizer, seed: int) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_every_prepared_model_keeps_the_average():
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(workers_per_process=2, power=9, max_lr=1.0))
    pairs = []
    for _ in range(2):
        model = nn.Linear(3, 2)
        pairs.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for number, (model, optimizer) in enumerate(pairs):
        step(accelerator, model, optimizer, number)
    means = [torch.stack([replica.weight.detach().clone() for replica in m.replicas]).mean(0) for m, _ in pairs]
    assert all(not torch.equal(m.replicas[0].weight, m.replicas[1].weight) for m, _ in pairs)
    accelerator.deploy(pairs[0][0])
    for (model, _), mean in zip(pairs, means, strict=True):
        for replica in model.replicas:
            torch.testing.assert_close(replica.weight.detach(), mean)
    accelerator.end_training()


def test_after_deploy_a_step_is_refused_until_everything_is_prepared_again():
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig())
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer, 0)
    accelerator.deploy(model)
    accelerator.prepare(nn.Linear(3, 2))  # as a framework does for an evaluation
    with pytest.raises(RuntimeError, match="gossip has ended"):
        step(accelerator, model, optimizer, 1)
    optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, model, optimizer, 2)
    assert [gossip.mixer.step for gossip in accelerator.gossip_steps] == [1]
    accelerator.end_training()


def plain_step(model, optimizer, scaler=None) -> None:
    loss = model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).float().square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def test_the_optimizer_of_a_bf16_model_goes_on_after_deploy():
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    gossip = Gossip(model, optimizer)
    plain_step(model, optimizer)
    gossip.deploy()
    plain_step(model, optimizer)
    assert {value.dtype for state in optimizer.state.values() for value in state.values() if value.ndim} == {
        torch.bfloat16
    }


def test_a_disabled_grad_scaler_changes_nothing():
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, scaler in zip(models, (None, torch.amp.GradScaler("cpu", enabled=False)), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, scaler=scaler)
        plain_step(model, optimizer, scaler)
        assert gossip.steps[0].mixer.step == 1
    assert torch.equal(models[0].weight, models[1].weight)


def test_the_state_of_a_plain_loop_is_refused_inside_the_average():
    model = nn.Linear(3, 2)
    gossip = Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = gossip.state_dict()
    with gossip.deployed_model():
        with pytest.raises(RuntimeError, match="before or after"):
            gossip.state_dict()
        with pytest.raises(RuntimeError, match="before or after"):
            gossip.load_state_dict(state)
