"""Scripts written for `Accelerator`, with nothing but the class swapped: schedule, evaluation and saved weights."""

from __future__ import annotations

import copy
import logging.handlers
import pickle
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import get_scheduler

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.distributed.failure_detection import WorkerLostError
from tests.workers import run_workers, try_workers

EPOCHS, BATCHES = 2, 24


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def save_pretrained(self, folder: str, state_dict: dict | None = None) -> None:
        torch.save(state_dict or self.state_dict(), Path(folder) / "model.pt")


def script(rank: int, max_steps: int | None = None, start_step: int = 0, **settings) -> tuple:
    """Everything of a usual script up to its loop: the schedule is that of the unsharded loader, or of `max_steps`."""
    accelerator = GossipAccelerator(gossip=GossipConfig(power=1, start_step=start_step, timeout=20), **settings)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4 * BATCHES, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    train, test = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ticks = EPOCHS * len(train) if max_steps is None else max_steps * accelerator.num_processes
    warm_up = 0 if max_steps is None else 2 * accelerator.num_processes
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=warm_up, num_training_steps=ticks)
    return accelerator, *accelerator.prepare(model, optimizer, train, test, schedule)


def one_pass(accelerator, model, optimizer, train, schedule, steps: int | None = None) -> list[float]:
    lrs = []
    for number, (x, y) in enumerate(train, start=1):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if number == steps:
            break
    return lrs


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def mean_of_workers(accelerator, model: nn.Module) -> torch.Tensor:
    return accelerator.group.all_reduce_mean_(weights(model), "the test's own mean")


def vector(state: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
    return torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])


def swap(rank: int, folder: str) -> dict:
    accelerator, model, optimizer, train, test, schedule = script(rank)
    lrs, gammas, evaluated, saved = [], [], [], []
    for epoch in range(EPOCHS):
        model.train()
        lrs += one_pass(accelerator, model, optimizer, train, schedule)
        gammas.append(accelerator.gossip_steps[0].gamma)
        own, mean = weights(model), mean_of_workers(accelerator, model)
        model.eval()
        for x, _ in test:
            with torch.no_grad():
                accelerator.gather_for_metrics(model(x).argmax(-1))
            evaluated.append(float((weights(model) - mean).abs().max()))
        if rank == 0:  # alone, and without a hang
            accelerator.unwrap_model(model).save_pretrained(folder)
            saved.append(vector(torch.load(f"{folder}/model.pt"), model) - mean)
            saved.append(vector(accelerator.get_state_dict(model), model) - mean)
            next(iter(test))
        assert torch.equal(weights(model), own), "training must go on from the worker's own weights"
        assert float((own - mean).abs().max()) > 1e-3
        if epoch == 0:
            accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")
    mean = mean_of_workers(accelerator, model)
    for _ in test:  # as a script does that looks at the checkpoint before it goes on
        evaluated.append(float((weights(model) - mean).abs().max()))
    model.train()
    resumed = one_pass(accelerator, model, optimizer, train, schedule)
    assert torch.equal(weights(model), own)
    return {"lrs": lrs, "gammas": gammas, "last": schedule.get_last_lr()[0], "evaluated": evaluated,
            "saved": [float(difference.abs().max()) for difference in saved], "resumed": resumed}  # fmt: skip


def test_schedule_evaluation_and_saved_weights_of_an_unchanged_script(tmp_path):
    steps = EPOCHS * BATCHES // 4
    for outcome in run_workers(swap, 4, str(tmp_path)):
        assert outcome["lrs"] == pytest.approx([0.5 * (1 - step / steps) for step in range(steps)])
        assert outcome["last"] == 0.0
        assert outcome["gammas"] == pytest.approx([1 - (steps / 2 - 1) / steps, 1 / steps])
        assert outcome["resumed"] == outcome["lrs"][steps // 2 :]
        assert max(outcome["evaluated"]) < 1e-6
        assert max(outcome["saved"], default=0.0) < 1e-6


def stopped_early(rank: int) -> None:
    """A script that leaves its only pass after max_train_steps, and measures, loads weights and goes on."""
    accelerator, model, optimizer, train, test, schedule = script(rank, max_steps=5, start_step=3)
    lrs = one_pass(accelerator, model, optimizer, train, schedule, steps=5)
    assert [*lrs, *schedule.get_last_lr()] == pytest.approx([0, 1 / 4, 1 / 2, 1 / 3, 1 / 6, 0])
    assert accelerator.gossip_steps[0].gamma == pytest.approx(lrs[4] / lrs[3])  # max_lr is that of step 3
    own, mean = weights(model), mean_of_workers(accelerator, model)
    model.eval()
    for _ in test:
        assert float((weights(model) - mean).abs().max()) < 1e-6
        radius = accelerator.measure_consensus()["gossip/radius"]
        assert radius == pytest.approx(float((own - mean).norm()), rel=1e-4)  # of two workers, both are as far away
        assert float((weights(model) - mean).abs().max()) < 1e-6
    assert torch.equal(weights(model), own)
    for _ in test:
        model.load_state_dict({name: torch.full_like(value, 2) for name, value in model.state_dict().items()})
    assert bool((weights(model) == 2).all()), "what the script loads stays"


def test_a_script_that_stops_at_max_train_steps_evaluates_the_average():
    run_workers(stopped_early, 2)


def own_weights(rank: int) -> None:
    """What an evaluation or a save of a worker's own weights says, and what is left alone."""
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel.pass_average").addHandler(said)
    accelerator, model, optimizer, train, test, schedule = script(rank)
    one_pass(accelerator, model, optimizer, train, schedule, steps=3)
    model.eval()
    own = weights(model)
    for x, _ in test:
        accelerator.gather_for_metrics(model(x))
        assert torch.equal(weights(model), own)
    accelerator.unwrap_model(model).state_dict()
    lines = ["with accelerator.deployed_model(model):", "accelerator.get_state_dict(model)"] if rank == 0 else []
    messages = [record.getMessage() for record in said.buffer]
    assert len(messages) == len(lines)
    assert all(line in message for line, message in zip(lines, messages, strict=True))
    # all together, in the middle of a pass
    mean = mean_of_workers(accelerator, model)
    assert float((vector(accelerator.get_state_dict(model), model) - mean).abs().max()) < 1e-6
    # a pass that ends, then weights of the script's own
    model.train()
    one_pass(accelerator, model, optimizer, train, schedule)
    own = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    model.eval()
    for _ in test:
        assert torch.equal(weights(model), 0.5 * own)
    assert copy.deepcopy(model).state_dict().keys() == pickle.loads(pickle.dumps(model)).state_dict().keys()
    # a training pass in eval mode
    one_pass(accelerator, model, optimizer, train, schedule)
    for _ in train:
        break
    one_pass(accelerator, model, optimizer, train, schedule)
    with pytest.raises(RuntimeError, match=r"Call model\.train\(\) before a pass that trains"):
        one_pass(accelerator, model, optimizer, test, schedule)
    # a script that evaluates the deployed model is left alone from then on
    with accelerator.deployed_model(model):
        own_in_test = [weights(model) for _ in test]
    assert torch.equal(own_in_test[0], own_in_test[-1])
    model.train()
    one_pass(accelerator, model, optimizer, train, schedule)
    assert not accelerator.pass_average.available


def test_own_weights_are_noticed_and_left_alone():
    run_workers(own_weights, 2)


def interrupted(rank: int, by_main_alone: bool) -> None:
    """Evaluation passes that are left in the middle of training passes, on all workers or on the main one alone."""
    accelerator, model, optimizer, train, test, _ = script(rank)
    single = accelerator.prepare(DataLoader(test.dataset, batch_size=4 * BATCHES, sampler=range(4 * BATCHES)))
    for sample_of in (test, single):
        model.train()
        for number, (x, y) in enumerate(train, start=1):
            if (rank == 0 or not by_main_alone) and number in (1, BATCHES // 4):
                next(iter(sample_of))
                model.eval()
                for _ in sample_of:
                    break
                model.train()
                kept = iter(sample_of)  # in the middle of its pass when the step comes
                next(kept)
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        kept = None
        assert accelerator.pass_average.available
        assert not accelerator.gradient_state.in_dataloader
        mean = mean_of_workers(accelerator, model)
        model.eval()
        for loader in (test, single):
            for _ in loader:
                assert float((weights(model) - mean).abs().max()) < 1e-6


@pytest.mark.parametrize("by_main_alone", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_evaluation_pass_that_is_left_inside_a_training_pass_changes_no_average(by_main_alone):
    run_workers(interrupted, 2, by_main_alone)


def several_loaders(rank: int) -> None:
    """Training and evaluation passes over two loaders at once; the second ends first, or last."""
    accelerator, model, optimizer, train, test, _ = script(rank)
    data = test.dataset
    short, train_short = accelerator.prepare(DataLoader(data, batch_size=24), DataLoader(data, batch_size=16))
    for (x, y), _ in zip(train, train_short):  # noqa: B905
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.step()  # as a second optimizer would
    own, mean = weights(model), mean_of_workers(accelerator, model)
    model.eval()
    for loaders in ((test, short), (short, test)):
        for _ in zip_longest(*loaders):
            with torch.no_grad():
                assert float((weights(model) - mean).abs().max()) < 1e-6
        assert torch.equal(weights(model), own)


def test_passes_over_two_loaders_at_once():
    run_workers(several_loaders, 2)


class Rows(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(4 * BATCHES + 4, 4))


def complete_scores(rank: int) -> tuple[list[int], int]:
    """What a script reads that evaluates in eval mode, and trains in eval mode from its first step."""
    data_config = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    accelerator, model, optimizer, train, _, _ = script(rank, dataloader_config=data_config)
    data = torch.randn(4 * BATCHES + 4, 4)
    uneven, other = accelerator.prepare(*(DataLoader(data, batch_size=4) for _ in range(2)))
    stream = accelerator.prepare_data_loader(DataLoader(Rows(), batch_size=4))
    read = []
    for trained in (False, True):
        if trained:
            model.train()
            one_pass(accelerator, model, optimizer, train, accelerator._schedulers[0])
        model.eval()
        for loader in (uneven, stream) if rank == 0 else (uneven,):  # the stream on the main process alone
            read.append(0)
            for _ in loader:
                with torch.no_grad():
                    read[-1] += 1
    accelerator.free_memory()
    model = Model().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps = 0
    for x in other:  # eval mode, and a training pass all the same
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        steps += 1
    return read, steps


def test_an_evaluation_in_eval_mode_reads_all_its_data_and_waits_for_nobody():
    (first, steps), (second, other_steps) = run_workers(complete_scores, 2)
    batches = BATCHES + 1
    assert first[::2] == [batches - batches // 2] * 2
    assert second == [batches // 2] * 2
    assert first[1] == first[3] > 0
    assert steps == other_steps == batches // 2


def patched_save(rank: int, folder: str) -> None:
    accelerator, model, optimizer, train, _, schedule = script(rank)
    accelerator.free_memory()
    saved, inner = [], accelerator.unwrap_model(model)

    def own(path: str) -> None:
        saved.append(weights(inner))

    inner.save_pretrained = own
    model, optimizer, train = accelerator.prepare(model, optimizer.optimizer, train)
    one_pass(accelerator, model, optimizer, train, schedule)
    mean = mean_of_workers(accelerator, model)
    inner.save_pretrained(folder)
    assert float((saved[0] - mean).abs().max()) < 1e-6
    accelerator.free_memory()
    assert inner.save_pretrained is own
    assert not accelerator.pass_average.last_steps, "of the schedule that is gone"


def test_a_save_pretrained_that_the_script_has_set_on_the_model_is_kept(tmp_path):
    run_workers(patched_save, 2, str(tmp_path))


def alone(rank: int) -> None:
    accelerator, model, optimizer, train, _, schedule = script(rank, keep_average=False)
    accelerator.group.timeout = 2.0
    one_pass(accelerator, model, optimizer, train, schedule, steps=2)
    if rank == 0:
        with pytest.raises(WorkerLostError, match="on all workers, `get_state_dict` included"):
            accelerator.get_state_dict(model)


@pytest.mark.slow
def test_a_state_dict_that_one_worker_asks_for_alone_ends_with_the_way_out():
    outcomes = try_workers(alone, 2)
    assert outcomes[0].error is None, outcomes[0].error


def single(rank: int) -> list[str]:
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel").addHandler(said)
    for _ in range(2):
        GossipAccelerator()
    return [record.getMessage() for record in said.buffer]


def test_a_single_worker_is_told_once_how_to_launch_several():
    [[message]] = run_workers(single, 1)
    assert "accelerate launch --multi_gpu --num_processes N" in message
