"""Models and loaders that are pickled, copied, deleted or used under inference mode, as Accelerate's can be."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from itertools import chain

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
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


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def copied_loaders(rank: int) -> dict:
    config = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST), dataloader_config=config)
    even, uneven, endless = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2),
        DataLoader(range(10), batch_size=2),
        DataLoader(Counting(), batch_size=2),
    )
    copies = [[pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)] for loader in (even, uneven, endless)]
    assert [type(twin) for twin in copies[0]] == [type(even)] * 2
    with torch.no_grad():  # an evaluation, which asks nobody
        evaluated = [rows(loader) for loader in (endless, *copies[2])]
    with pytest.raises(RuntimeError, match="Prepare another loader"):
        rows(copies[2][0])
    return {
        "even": [rows(loader) for loader in (even, *copies[0])],
        "uneven": [rows(loader) for loader in (uneven, *copies[1])],
        "evaluated": evaluated,
        "pickle": pickle.dumps((even, uneven)),
    }


def test_copied_and_pickled_loaders_deal_the_batches_of_their_worker():
    for rank, result in enumerate(run_workers(copied_loaders, 2)):
        mine = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank]
        assert result["even"] == result["uneven"] == [mine] * 3
        assert result["evaluated"][0] == result["evaluated"][1] == result["evaluated"][2]
        # Here, in another process, they still deal that worker's batches, and nothing waits for the other worker.
        even, uneven = pickle.loads(result["pickle"])
        assert rows(even.base_dataloader) == mine
        assert rows(uneven) == mine


class Special(Accelerator):
    pass


def test_a_pickled_loader_of_one_worker_deals_all_batches():
    accelerator = GossipAccelerator.adopt(Special(cpu=True))
    kinds = [DataLoader(range(8), batch_size=2, shuffle=True), DataLoader(Counting(), batch_size=2)]
    loaders = accelerator.prepare(*kinds)
    shuffled, counting = pickle.loads(pickle.dumps(loaders))
    assert rows(counting) == rows(loaders[1]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(chain(*rows(shuffled))) == list(range(8))
    accelerator.free_memory()


def test_processes_of_a_loader_that_are_spawned_read_its_batches():
    accelerator = GossipAccelerator(gossip=GossipConfig(**FAST), cpu=True)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    )
    assert rows(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def copy_others(rank: int) -> dict:
    accelerator, model, optimizer, scheduler, _ = prepared()
    train(rank, model, optimizer, scheduler, range(3))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before = flat(model).clone()
    state = io.BytesIO()
    torch.save(optimizer.state_dict(), state)
    for call in (copy.deepcopy, pickle.dumps):
        for thing in (optimizer, scheduler, accelerator.gossip_steps[0]):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\).*save_state"):
                call(thing)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*GossipAccelerator"):
        pickle.dumps(accelerator)
    own = train(rank, model, optimizer, scheduler, range(3, 6))
    state.seek(0)
    return {
        "own": own,
        "twins": [torch.equal(flat(twin), before) for twin in twins],
        "momentum": len(torch.load(state)["state"]),
        "same": copy.deepcopy(accelerator) is accelerator,
    }


def test_models_and_states_are_copied_and_what_communicates_is_refused():
    first, second = run_workers(copy_others, 2)
    undisturbed = run_workers(trained, 2)
    for result, expected in zip((first, second), undisturbed, strict=True):
        assert torch.equal(result["own"], expected)
        assert result["twins"] == [True, True]
        assert result["momentum"] > 0
        assert result["same"]


def trained(rank: int) -> torch.Tensor:
    _, model, optimizer, scheduler, _ = prepared()
    return train(rank, model, optimizer, scheduler, range(6))


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
        pytest.param("prepare", {"topology": "complete", "overlap": False}, marks=pytest.mark.slow),
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
