"""Averages that a script keeps itself: their mean over the workers is read, or a warning says what is."""

from __future__ import annotations

import logging.handlers

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dsgdac_accel import GossipAccelerator
from tests.multiprocess.test_kept_average import close, loaders, mean, network, started, values
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess
WAY_OUT = "copy them into the prepared model on all workers"


class Ema:
    """As diffusers' `EMAModel`."""

    def __init__(self, model: nn.Module) -> None:
        self.shadows = [p.detach().clone() for p in model.parameters()]

    def step(self, model: nn.Module) -> None:
        for shadow, p in zip(self.shadows, model.parameters(), strict=True):
            shadow.lerp_(p.detach(), 0.5)

    def copy_to(self, model: nn.Module) -> None:
        for shadow, p in zip(self.shadows, model.parameters(), strict=True):
            p.data.copy_(shadow)


def trained() -> tuple[GossipAccelerator, nn.Module, Ema, AveragedModel, list, list[str]]:
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel.pass_average").addHandler(heard)
    accelerator = started()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    train, test = loaders(accelerator)
    ema, swa = Ema(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        for x in train:
            accelerator.backward(model(x * (1 + accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            ema.step(model)
            swa.update_parameters(model)
    assert not heard.buffer, "training reads no state"
    return accelerator, model, ema, swa, test, heard.buffer


def warned(buffer: list) -> int:
    return sum(WAY_OUT in record.getMessage() for record in buffer)


def swapped_inside(rank: int, how: str) -> None:
    accelerator, model, ema, _, test, heard = trained()
    own = values(model)
    for _ in range(2):
        with accelerator.deployed_model(model):
            average = [p.detach().clone() for p in model.parameters()]
            if how != "nothing":
                ema.copy_to(model)
            if how == "restored":
                for _ in test:
                    pass
                for p, value in zip(model.parameters(), average, strict=True):
                    p.data.copy_(value)
    assert warned(heard) == (1 if rank == 0 and how != "nothing" else 0)
    assert torch.equal(values(model), own)


@pytest.mark.parametrize("how", ["nothing", "left", "restored"])
def test_weights_of_a_scripts_own_inside_the_deployed_model_are_noticed(how):
    run_workers(swapped_inside, 2, how)


def saved(rank: int, folder: str) -> None:
    accelerator, model, ema, swa, _, heard = trained()
    accelerator.get_state_dict(model)
    assert warned(heard) == 0
    state = accelerator.get_state_dict(swa)
    assert torch.equal(state["module.0.weight"], swa.module[0].weight)
    assert warned(heard) == (rank == 0)
    # the way out
    own = values(model)
    ema.copy_to(model)
    expected = mean(accelerator, model)
    assert float((values(model) - expected).norm()) > 1e-3
    accelerator.save_model(model, folder)
    found = load_file(f"{folder}/model.safetensors")
    close(torch.cat([found[name].flatten() for name, _ in model.named_parameters()]), expected)
    with accelerator.deployed_model(model):
        close(values(model), expected)
    assert not torch.equal(values(model), own)
    assert warned(heard) == (rank == 0)


def test_the_state_of_an_average_that_was_not_prepared_warns_and_the_way_out_is_the_mean(tmp_path):
    run_workers(saved, 2, str(tmp_path))
