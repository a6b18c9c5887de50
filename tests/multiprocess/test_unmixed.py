"""Networks that a script updates by itself: averaged like the rest while the average is deployed, and given back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dsgdac_accel import GossipAccelerator, GossipConfig
from tests.workers import run_workers


class Byol(nn.Module):
    """An online network, and a frozen target that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(3, 2)
        self.target = nn.Linear(3, 2).requires_grad_(False)
        self.steps = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)  # equal on all workers

    def forward(self, x):
        return (self.online(x) - self.target(x)).square().mean()


def train(rank: int, folder, local_workers: int, keep_average: bool) -> dict:
    config = GossipConfig(
        topology="one_peer_ring", power=2.0, max_lr=1.0, timeout=30, workers_per_process=local_workers
    )
    accelerator = GossipAccelerator(cpu=True, gossip=config, keep_average=keep_average)
    torch.manual_seed(0)
    model, teacher = Byol(), nn.Linear(3, 2).requires_grad_(False)
    model, teacher, optimizer = accelerator.prepare(model, teacher, torch.optim.SGD(model.parameters(), lr=0.3))
    replicas, teachers = (each.replicas if local_workers > 1 else [each] for each in (model, teacher))
    ema = AveragedModel(replicas[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(4):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        accelerator.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
        for replica, own_teacher in zip(replicas, teachers, strict=True):
            for network in (replica.target, own_teacher):
                network.weight.data.lerp_(replica.online.weight.data, 0.5)
        ema.update_parameters(replicas[0])
    own = torch.stack([replica.target.weight.clone() for replica in replicas])
    own_teacher = torch.stack([each.weight.clone() for each in teachers])
    own_ema = ema.module.online.weight.clone()
    with accelerator.deployed_model(model) as deployed:
        target, steps = deployed.target.weight.clone(), deployed.steps.clone()
        teacher_average = teachers[-1].weight.clone()
    with accelerator.deployed_model(ema) as deployed:
        ema_average = deployed.module.online.weight.clone()
    accelerator.save_model(model, folder)
    assert torch.equal(own, torch.stack([replica.target.weight for replica in replicas]))
    assert torch.equal(own_teacher, torch.stack([each.weight for each in teachers]))
    assert torch.equal(own_ema, ema.module.online.weight)
    teacher_values = {"own_teacher": own_teacher, "teacher": teacher_average}
    return teacher_values | {"own": own, "target": target, "ema": own_ema, "ema_average": ema_average, "steps": steps}


@pytest.mark.parametrize(("processes", "local_workers"), [(3, 1), (2, 2)])
def test_a_target_and_an_averaged_copy_are_averaged_while_the_model_is_deployed(tmp_path, processes, local_workers):
    results = run_workers(train, processes, tmp_path, local_workers, True)
    own = torch.cat([result["own"] for result in results])
    assert (own - own[0]).abs().max() > 1e-3, "the workers' targets differ"
    own_teacher = torch.cat([result["own_teacher"] for result in results])
    assert (own_teacher - own_teacher[0]).abs().max() > 1e-3, "the workers' teachers differ"
    for result in results:
        torch.testing.assert_close(result["target"], own.mean(0))
        torch.testing.assert_close(result["teacher"], own_teacher.mean(0))
        torch.testing.assert_close(result["ema_average"], torch.stack([r["ema"] for r in results]).mean(0))
        assert result["steps"].tolist() == [0, 0]
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")["target.weight"], own.mean(0))


def count_apart(rank: int) -> str:
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(timeout=30))
    model = Byol()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    accelerator.backward(model(torch.ones(1, 3)))
    optimizer.step()
    model.steps.data += rank
    with pytest.raises(ValueError, match="no average") as caught, accelerator.deployed_model(model):
        pass
    return str(caught.value)


def test_whole_numbers_that_differ_are_refused_by_name():
    for message in run_workers(count_apart, 2):
        assert message.startswith("steps (torch.int64) is not mixed, differs between the workers, and has no average")
