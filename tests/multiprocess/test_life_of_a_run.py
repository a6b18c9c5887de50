"""What becomes of the workers' weights where a script ends, extends, saves or resumes a run."""

from __future__ import annotations

import logging.handlers
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dsgdac_accel import GossipAccelerator
from dsgdac_accel.checkpoint import CheckpointError
from tests.multiprocess.test_kept_average import close, mean, network, started, values
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess


def train(accelerator: GossipAccelerator, model: nn.Module, optimizer, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.3)


def apart(accelerator: GossipAccelerator, *models: nn.Module) -> float:
    return float((values(*models) - mean(accelerator, *models)).norm())


def freed(rank: int) -> None:
    accelerator = started()
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, model, optimizer)
    own = values(model)
    accelerator.free_memory()
    assert torch.equal(values(model), own)
    with pytest.raises(RuntimeError, match="prepare model and optimizer again"):
        train(accelerator, model, optimizer, 1)
    assert torch.equal(values(model), own)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    assert accelerator.gossip_steps[0].mixer.step == 3


def test_after_free_memory_no_worker_trains_alone():
    run_workers(freed, 2)


def prepared_again(rank: int, head_outside: bool, kind: str) -> None:
    accelerator = started()
    model, head = network(), nn.Linear(2, 2) if head_outside else nn.Identity()
    whole = nn.Sequential(model, head)
    model, optimizer = accelerator.prepare(model, sgd(whole))
    train(accelerator, whole, optimizer)
    expected = mean(accelerator, whole)
    statistics = accelerator.group.all_reduce_mean_(model[1].running_mean.clone(), "a mean")
    assert apart(accelerator, whole) > 0.01
    accelerator.free_memory()
    if kind == "other model":
        torch.manual_seed(rank)
        fresh = network()
        theirs = fresh[0].weight.detach().clone()
        fresh, _ = accelerator.prepare(fresh, sgd(fresh))
        assert torch.equal(fresh[0].weight, theirs) == (rank == 0), "a model that was not mixed starts as worker 0's"
        assert apart(accelerator, fresh) == 0
        return
    if kind in ("model", "head"):
        part = {"model": model, "head": head}[kind]
        accelerator.prepare(part, sgd(part))
        close(values(whole), expected)
        close(model[1].running_mean, statistics)
        return
    new = sgd(whole)
    accelerator.prepare(nn.Sequential(model, nn.Linear(2, 2)) if kind == "wrapped" else model, new)
    close(values(whole), expected)
    close(model[1].running_mean, statistics)
    assert apart(accelerator, whole) < 1e-6


@pytest.mark.parametrize(
    ("head_outside", "kind"),
    [(False, "same"), (True, "same"), (False, "wrapped"), (False, "other model"), (True, "model"), (True, "head")],
)
def test_a_run_that_is_prepared_again_goes_on_from_the_average(head_outside, kind):
    run_workers(prepared_again, 2, head_outside, kind)


class Wrapper(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def extended(rank: int, with_optimizer: bool, second_life: bool) -> None:
    accelerator = started()
    encoder = network()
    encoder, optimizer = accelerator.prepare(encoder, sgd(encoder))
    if second_life:
        train(accelerator, encoder, optimizer)
        accelerator.free_memory()
        encoder, optimizer = accelerator.prepare(encoder, sgd(encoder))
    train(accelerator, encoder, optimizer)
    own = [tensor.detach().clone() for tensor in (*encoder.parameters(), *encoder.buffers())]
    assert apart(accelerator, encoder) > 0.01
    torch.manual_seed(rank)
    wrapper = Wrapper(encoder)
    if with_optimizer:
        wrapper, _ = accelerator.prepare(wrapper, sgd(wrapper.head))
    else:
        wrapper = accelerator.prepare(wrapper)
    assert all(map(torch.equal, (*encoder.parameters(), *encoder.buffers()), own))
    assert apart(accelerator, wrapper.head) == 0, "what is new starts as worker 0's"
    expected = mean(accelerator, wrapper)
    with accelerator.deployed_model(wrapper):
        close(values(wrapper), expected)
    assert all(map(torch.equal, (*encoder.parameters(), *encoder.buffers()), own))
    train(accelerator, wrapper, optimizer, 1)


@pytest.mark.parametrize(("with_optimizer", "second_life"), [(False, False), (True, False), (False, True)])
def test_a_model_that_is_prepared_in_mid_run_leaves_what_is_mixed_alone(with_optimizer, second_life):
    run_workers(extended, 2, with_optimizer, second_life)


def hooked(rank: int, folder: str, pops: str) -> None:
    accelerator = started()
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, model, optimizer)
    own = values(model)

    def save_model_hook(models: list, weights: list, output_dir: str) -> None:
        if pops == "all" or (pops == "main" and accelerator.is_main_process):
            weights.pop()
            torch.save(model.state_dict(), Path(output_dir) / f"{rank}.pt")

    def load_model_hook(models: list, input_dir: str) -> None:
        if pops == "all":
            models.pop().load_state_dict(torch.load(Path(input_dir) / f"{rank}.pt"))

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    if pops == "main":
        with pytest.raises(CheckpointError, match="save_model_hook of register_save_state_pre_hook"):
            accelerator.save_state(folder)
        return
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel.pass_average").addHandler(heard)
    for number in (1, 2):
        accelerator.save_state(folder + str(number))
    assert sum("an EMA" in record.getMessage() for record in heard.buffer) == (rank == 0)
    train(accelerator, model, optimizer)
    accelerator.load_state(folder + "2")
    assert torch.equal(values(model), own)


@pytest.mark.parametrize("pops", ["main", "all", "none"])
def test_a_hook_that_pops_the_weights_on_the_main_process_alone_is_named(tmp_path, pops):
    run_workers(hooked, 2, str(tmp_path / "state"), pops)
