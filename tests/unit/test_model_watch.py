"""Parts of a model that are replaced after `prepare`: the new ones would be neither trained nor mixed."""

import pytest
import torch
from torch import nn

from dsgdac_accel import GossipAccelerator, GossipConfig, WorkerGroup
from dsgdac_accel.core.model_watch import OptimizerWatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def replace_head(net, optimizer):
    net.head = nn.Linear(4, 2)


def replace_inside(net, optimizer):
    net.body[1] = nn.Sequential(nn.Linear(4, 4))


def replace_parameter(net, optimizer):
    net.head.bias = nn.Parameter(torch.zeros(3))


def replace_and_tell_the_optimizer(net, optimizer):
    net.head = nn.Linear(4, 2)
    optimizer.add_param_group({"params": list(net.head.parameters())})


def wrap(net, optimizer):
    net.head = nn.Sequential(net.head)


def remove_a_layer(net, optimizer):
    net.body = net.body[:1]


def freeze_a_new_head(net, optimizer):
    net.head = nn.Linear(4, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_head, "head"),
        (replace_inside, "body.1"),
        (replace_parameter, "head.bias"),
        (replace_and_tell_the_optimizer, None),
        (wrap, None),
        (remove_a_layer, None),
        (freeze_a_new_head, None),
    ],
)
def test_a_part_that_was_replaced_is_named_unless_the_optimizer_has_the_new_one(change, name):
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig())
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(net(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    change(net, optimizer.optimizer)
    if name is None:
        step()
    else:
        with pytest.raises(RuntimeError, match=rf"^{name} was replaced in the model"):
            step()
    accelerator.end_training()


def test_momentum_that_decay_makes_equal_to_the_weights_is_no_copy_of_them():
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.SGD([weight], lr=0.0, momentum=0.5, weight_decay=0.5)
    watch = OptimizerWatch(optimizer, WorkerGroup(torch.device("cpu"), timeout=1))
    weight.grad = 1e-6 * torch.randn(4, 3)
    for _ in range(8):
        with watch.local_step(optimizer):
            optimizer.step()
    assert torch.dist(optimizer.state[weight]["momentum_buffer"], weight) < 0.01 * weight.norm()
