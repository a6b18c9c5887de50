"""What asynchronous averaging refuses before a run, and a schedule that follows progress."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsgdac_accel import Gossip, GossipAccelerator, GossipConfig, WorkerGroup, build_topology
from dsgdac_accel.compatibility import refuse_asynchronous_launch, refuse_unsupported_trainer, supported_with_shards
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.scheduler_ticks import GossipScheduler
from tasks.images.config import CifarConfig
from tasks.translation.config import TranslationConfig


@pytest.mark.parametrize(
    "setting",
    [
        {"topology": "complete"},
        {"topology": build_topology("one_peer_ring", 4)},
        {"workers_per_process": 2},
        {"comm_dtype": "int8"},
        {"mix_every": 2},
        {"order": "mix_first"},
        {"overlap": False},
        {"sketch": 8},
        {"start_epoch": 1},
        {"on_worker_loss": "continue"},
        {"asynchronous": "yes"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_do_not_fit_are_refused_by_name(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        GossipConfig(**{"asynchronous": True, **setting})


def test_what_needs_lockstep_is_refused_when_it_is_prepared():
    config = GossipConfig(asynchronous=True)
    accelerator = GossipAccelerator(gossip=config)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Gossip"):
        Gossip(model, optimizer, config)
    with pytest.raises(ValueError, match="stop_on_signals"):
        accelerator.stop_on_signals()
    with pytest.raises(ValueError, match="stop_on_request"):
        accelerator.stop_on_request()
    with pytest.raises(ValueError, match="with a length"):
        accelerator.equal_steps(iter([1]))
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        accelerator.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="ChainedScheduler"):
        accelerator.prepare(
            torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])
        )
    low = torch.nn.Linear(2, 2).bfloat16()
    optimizers = [torch.optim.SGD(some.parameters(), lr=0.1) for some in (low, torch.nn.Linear(2, 2))]
    with pytest.raises(ValueError, match="bfloat16"):
        accelerator.prepare(low, optimizers[0])
    with pytest.raises(ValueError, match="single optimizer"):
        accelerator.prepare(model, optimizer, optimizers[1])
    with pytest.raises(ValueError, match="the Trainer"):
        refuse_unsupported_trainer(SimpleNamespace(args=None), config)
    with pytest.raises(ValueError, match="framework"):
        GossipAccelerator.adopt(accelerator, gossip=config)
    with pytest.raises(ValueError, match="device_mesh"):
        supported_with_shards(config, accelerator)
    prepared = accelerator.prepare(model, optimizer)  # nothing has changed so far
    with pytest.raises(ValueError, match="single optimizer"):
        accelerator.prepare(optimizers[1])
    assert accelerator.prepare(*prepared) == prepared
    for size, device, found in ((3, "cpu", "even number"), (4, "meta", "on the CPU")):
        with pytest.raises(ValueError, match=found):
            refuse_asynchronous_launch(SimpleNamespace(num_processes=size, device=torch.device(device), scaler=None))


@pytest.mark.parametrize("config_class", [CifarConfig, TranslationConfig])
def test_tasks_refuse_the_mode_before_a_run(config_class):
    with pytest.raises(ValueError, match=r"gossip\.asynchronous"):
        config_class(gossip=GossipConfig(asynchronous=True))


def test_nobody_copies_the_parameters_during_a_local_step():
    step = GossipStep(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
        WorkerGroup(torch.device("cpu")),
        GossipConfig(asynchronous=True),
    )
    for expected in (1.0, 2.0):
        step.before_local_step()
        assert step.mixer.shared.lock.locked()
        step.after_local_step()
        assert not step.mixer.shared.lock.locked()
        assert step.progress == expected


def test_a_schedule_follows_progress_and_is_stepped_after_every_step():
    GossipAccelerator()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    prepared = SimpleNamespace(scheduler=scheduler, optimizers=[], step_with_optimizer=True, split_batches=False)
    clock = SimpleNamespace(progress=0.0, taken_steps=0)
    follower = GossipScheduler(prepared, call=1, clock=clock)
    lrs = []
    for own, progress in enumerate([0.9, 2.7, 2.7, 5.1], start=1):
        optimizer.step()
        clock.taken_steps, clock.progress = own, progress
        follower.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs == [1, 1 / 3, 1 / 3, 1 / 6]
    clock.taken_steps += 7  # as for a schedule that is stepped once per epoch
    with pytest.raises(ValueError, match="7 steps ago"):
        follower.step()
