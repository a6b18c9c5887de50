"""Accelerators and loaders that are pickled, copied, deleted or used under inference mode, as Accelerate's can be."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from itertools import chain

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from dsgdac_accel import GossipAccelerator, GossipConfig
from dsgdac_accel.accelerator import GossipOptimizer
from tests.multiprocess.small_model import FAST, flat, inputs, make_model
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess


def prepared(**options):
    """An accelerator with a model, an optimizer, a scheduler and a loader, all prepared."""
    accelerator = GossipAccelerator(gossip=GossipConfig(total_steps=8, **FAST, **options))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 16)  # 2 ticks a step: it rises to the end
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def train(rank, model, optimizer, scheduler, numbers):
    for number in numbers:
        model(inputs(rank, number)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return flat(model).clone()


def rows(loader):
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]


# ---- pickles and copies


def pickled(rank: int, options: dict) -> dict:
    accelerator, model, optimizer, scheduler, loader = prepared(**options)
    train(rank, model, optimizer, scheduler, range(3))
    copies = pickle.loads(pickle.dumps(accelerator))
    alone = pickle.loads(pickle.dumps((model, optimizer, scheduler)))
    twins = [pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)]
    for twin in (copies, *twins):
        assert type(twin) in (GossipAccelerator, type(loader))
    own = train(rank, model, optimizer, scheduler, range(3, 6))
    of_the_copy = train(rank, copies._models[0], copies._optimizers[0], copies._schedulers[0], range(3, 6))
    with copies.deployed_model(copies._models[0]) as deployed:
        mean = flat(deployed)
    return {
        "x": own,
        "copy": of_the_copy,
        "alone": train(rank, *alone, range(3, 6)),
        "mean": mean,
        "metrics": copies.gossip_steps[0].metrics()["gamma"] == accelerator.gossip_steps[0].metrics()["gamma"],
        "rows": [rows(loader), *map(rows, twins), rows(copies._dataloaders[0])],
        "same": copy.deepcopy(accelerator) is accelerator and copies.group is accelerator.group,
        "pickle": pickle.dumps((accelerator, loader)),
    }


@pytest.mark.parametrize(
    "options",
    [{"start_step": 4}, pytest.param({"comm_dtype": "int8", "sketch": 8}, marks=pytest.mark.slow)],
    ids=["full", "int8"],
)
def test_a_pickled_accelerator_and_a_pickled_optimizer_gossip_on_as_the_first_would(options):
    first, second = run_workers(pickled, 2, options)
    assert not torch.equal(first["x"], second["x"])
    for rank, result in enumerate((first, second)):
        assert torch.equal(result["copy"], result["x"])
        assert torch.equal(result["alone"], result["x"])
        torch.testing.assert_close(result["mean"], (first["x"] + second["x"]) / 2, rtol=0, atol=1e-12)
        assert result["rows"] == [[[0, 1], [4, 5]] if rank == 0 else [[2, 3], [6, 7]]] * 4
        assert result["metrics"]
        assert result["same"]
    # Here, in another process, the loader still deals that worker's batches, and nothing waits for the other worker.
    accelerator, loader = pickle.loads(second["pickle"])
    assert rows(loader.base_dataloader) == [[2, 3], [6, 7]]
    assert accelerator.num_workers == 2
    for collective in (accelerator._optimizers[0].step, accelerator.measure_consensus):
        with pytest.raises(RuntimeError, match=r"pickled in another process.*Make a new one here"):
            collective()


class Special(Accelerator):
    pass


class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8).split(2))


def test_a_pickled_accelerator_of_one_worker_trains_and_covers_every_kind_of_loader():
    accelerator = GossipAccelerator.adopt(Special(cpu=True))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = [DataLoader(range(8), batch_size=2, shuffle=True), DataLoader(Counting(), batch_size=None)]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *kinds)
    twin = pickle.loads(pickle.dumps(accelerator))
    assert type(twin) is type(accelerator)
    assert rows(twin._dataloaders[1]) == rows(loaders[1]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(chain(*rows(twin._dataloaders[0]))) == list(range(8))
    twin.backward(twin._models[0](inputs(0, 0)).sum())
    twin._optimizers[0].step()
    assert not torch.equal(flat(twin._models[0]), flat(model))
    assert isinstance(twin._optimizers[0], GossipOptimizer)
    assert twin.gossip_steps[0].mixer.step == 1 + accelerator.gossip_steps[0].mixer.step
    accelerator.free_memory()


# ---- the last reference


def deleted(rank: int) -> list[list[str]]:
    gc.disable()
    survivors = []
    for adopted in (False, True, True):
        if adopted:
            accelerator = GossipAccelerator.adopt(Accelerator(cpu=True), GossipConfig(**FAST))
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        else:
            accelerator, model, optimizer, scheduler, loader = prepared()
        for _ in loader:
            train(rank, model, optimizer, scheduler, [0])
        with accelerator.deployed_model(model, calibrate=loader):
            pass
        accelerator.log({"loss": 1.0})
        names = {"accelerator": accelerator, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        references = {name: weakref.ref(value) for name, value in names.items()}
        references |= {"weight": weakref.ref(model[0].weight), "loader": weakref.ref(loader)}
        del accelerator, model, optimizer, scheduler, names  # with an exchange in flight
        survivors.append([name for name, reference in references.items() if reference() is not None])
        del loader
        survivors.append([name for name, reference in references.items() if reference() is not None])
    return survivors


def test_everything_ends_with_its_last_reference_and_a_loader_keeps_nothing_else_alive():
    for survivors in run_workers(deleted, 2):
        assert survivors == [["loader"], []] * 3


# ---- inference mode


def evaluate_under_inference_mode(rank: int, action: str, options: dict, folder: str) -> list[str]:
    accelerator, model, optimizer, scheduler, _ = prepared(**options)
    model[2].requires_grad_(False)
    train(rank, model, optimizer, scheduler, range(2))
    frozen_later = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    if not options.get("workers_per_process"):
        optimizer.add_param_group({"params": [frozen_later]})
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # other strides: the layout changes
    accelerator.save_state(f"{folder}/before")
    with torch.inference_mode():
        if action == "deploy":
            with accelerator.deployed_model(model) as deployed:
                deployed(inputs(rank, 9))
        elif action == "load":
            accelerator.load_state(f"{folder}/before")
        elif action == "measure":
            accelerator.measure_consensus()
        else:
            accelerator.save_model(model, f"{folder}/model")
            accelerator.free_memory()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = accelerator.prepare(model, optimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(rank, model, optimizer, scheduler, range(3))
    with accelerator.deployed_model(model):
        pass
    train(rank, model, optimizer, scheduler, range(2))
    return [name for name, parameter in model.named_parameters() if parameter.is_inference()]


@pytest.mark.parametrize(
    ("action", "options"),
    [
        ("deploy", {}),
        pytest.param("load", {}, marks=pytest.mark.slow),
        pytest.param("prepare", {"comm_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("deploy", {"comm_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("load", {"comm_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("measure", {"topology": "complete"}, marks=pytest.mark.slow),
        pytest.param("prepare", {"topology": "complete", "sketch": 8, "overlap": False}, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_after_a_layout_change_that_inference_mode_saw_first(action, options, tmp_path):
    assert run_workers(evaluate_under_inference_mode, 2, action, options, str(tmp_path)) == [[], []]


# ---- batches made by a sampler, for a loader with batch_size=None


class Rows(Dataset):
    """Is asked for whole lists of rows, as `datasets.Dataset` can be."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, rows):
        assert isinstance(rows, list)
        return torch.tensor(rows)


class Backwards(BatchSampler):
    """A batch sampler of the user's own, which shuffles with the global stream."""

    def __iter__(self):
        order = torch.randperm(8).tolist()
        return iter([order[number : number + 2] for number in range(0, 8, 2)])


def deal(rank: int, folder: str) -> dict:
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST))
    torch.manual_seed(rank)
    ordered, shuffled, own = accelerator.prepare(
        *(
            DataLoader(Rows(), batch_size=None, sampler=sampler)
            for sampler in (
                BatchSampler(SequentialSampler(range(8)), 2, False),
                BatchSampler(RandomSampler(range(8)), 2, False),
                Backwards(SequentialSampler(range(8)), 2, False),
            )
        )
    )
    found = {"ordered": rows(ordered), "shuffled": [rows(shuffled), rows(shuffled)], "own": rows(own)}
    batches = iter(shuffled)
    next(batches)
    accelerator.save_state(folder)
    rest = rows(batches)
    accelerator.load_state(folder)
    found["resumed"] = rows(accelerator.resumed_batches(shuffled)) == rest
    found["skipped"] = rows(accelerator.skip_first_batches(ordered, 1))
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=None)).double()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def forward(model, batch):
        return model(batch.double().unsqueeze(1))

    with accelerator.deployed_model(model, calibrate=shuffled, calibration_forward=forward) as deployed:
        found["mean"] = float(deployed[0].running_mean)
    return found


def test_a_batch_sampler_in_place_of_the_sampler_is_dealt_as_by_accelerate(tmp_path):
    first, second = run_workers(deal, 2, str(tmp_path / "state"))
    assert (first["ordered"], second["ordered"]) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert (first["skipped"], second["skipped"]) == ([[4, 5]], [[6, 7]])
    pairs = [*zip(first["shuffled"], second["shuffled"], strict=True), (first["own"], second["own"])]
    for of_first, of_second in pairs:
        assert sorted(chain(*of_first, *of_second)) == list(range(8))
        assert [len(batch) for batch in of_first] == [2, 2]
    assert first["shuffled"][0] != first["shuffled"][1]
    assert first["resumed"]
    assert second["resumed"]
    assert first["mean"] == second["mean"] == 3.5
