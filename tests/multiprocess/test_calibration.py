"""BatchNorm of the deployed model: exact, equal on all workers, from batches of any form."""

from __future__ import annotations

import logging.handlers
import warnings
from collections import namedtuple

import numpy
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dsgdac_accel import GossipAccelerator
from tests.multiprocess.batch_norm_model import Net, Vectors, everything, make_accelerator
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess


# ---- BatchNorm


def opposite_weights(rank: int, calibrate: bool) -> dict[str, torch.Tensor]:
    """Weights +1 and -1; the average is 0, so the activations have variance 0, not 4."""
    accelerator = make_accelerator()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    model, _optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model[0].weight.fill_(1.0 if rank == 0 else -1.0)
    data = torch.tensor([[0.0], [4.0]])  # variance 4
    for _ in range(500):
        model(data)
    data = [data] if calibrate else None
    with accelerator.deployed_model(model, calibrate=data) as deployed:
        return everything(deployed)


def test_calibration_gives_the_true_variance_where_pooling_cannot():
    pooled, calibrated = run_workers(opposite_weights, 2, False), run_workers(opposite_weights, 2, True)
    for state in pooled:
        assert state["0.weight"].item() == 0
        assert state["1.running_var"].item() == pytest.approx(8 + 4, rel=0.01)  # unbiased 8, means +2 and -2 apart
    for state in calibrated:
        assert state["1.running_mean"].item() == 0
        assert state["1.running_var"].item() == 0


def calibrate_on(rank: int, form: str, length: int, batch: int, prepared: bool, options: dict) -> dict:
    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(0)
    model = Net()
    model, _optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(Vectors(length, form), batch_size=batch, shuffle=True)
    if prepared:
        loader = accelerator.prepare(loader)
    with accelerator.deployed_model(model, calibrate=loader) as deployed:
        return everything(deployed)


FORMS = [
    ("tensor", 20, 4, True, {}),
    ("tuple", 20, 4, True, {}),
    ("list", 19, 4, True, {}),
    ("dict", 17, 4, True, {}),  # the last batch would be one vector
    ("dict", 17, 6, True, {"split_batches": True}),
    ("dict", 7, 16, True, {}),
    ("dict", 17, 4, False, {}),
]


@pytest.mark.parametrize(("form", "length", "batch", "prepared", "options"), FORMS)
def test_calibration_is_exact_for_any_batch_form_and_equal_on_all_workers(form, length, batch, prepared, options):
    results = run_workers(calibrate_on, 3, form, length, batch, prepared, options)
    x = Vectors(length).x
    x = x if prepared else x.repeat(3, 1)  # a local loader: every worker reads all of it
    for state in results:
        torch.testing.assert_close(state["norm.running_mean"], x.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state["norm.running_var"], x.var(0), rtol=1e-6, atol=1e-7)
        assert all(torch.equal(state[name], results[0][name]) for name in state)


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((3,), 0.0 if index < 8 else 1000.0)


def calibrate_subset(rank: int, kind: str) -> float:
    from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

    accelerator = make_accelerator()
    model = Net()
    samplers = {
        "subset": SubsetRandomSampler(range(8)),
        "weighted": WeightedRandomSampler([1.0] * 8 + [0.0] * 8, 64),
        "oversampled": [9, *[0] * 15],
    }
    loader = DataLoader(Numbers(), batch_size=2, sampler=samplers[kind])
    model, _optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with accelerator.deployed_model(model, calibrate=loader) as deployed:
        return deployed.norm.running_mean[0].item()


@pytest.mark.parametrize(("kind", "mean"), [("subset", 0.0), ("weighted", 0.0), ("oversampled", 62.5)])
def test_calibration_reads_the_rows_that_training_draws_as_often_as_it_does(kind, mean):
    assert run_workers(calibrate_subset, 2, kind) == [mean, mean]


class Prefetcher:
    """Wraps a loader under the name `loader`, and changes its batches, as timm's does."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return (batch - 100 for batch in self.loader)


def test_a_wrapper_around_a_loader_is_iterated_itself():
    accelerator = GossipAccelerator(cpu=True)
    model = accelerator.prepare(Net())
    data = torch.randn(8, 3) + 100
    with accelerator.deployed_model(model, calibrate=Prefetcher(DataLoader(data, batch_size=4))) as deployed:
        torch.testing.assert_close(deployed.norm.running_mean, (data - 100).mean(0), rtol=1e-3, atol=1e-4)


# ---- forward arguments


Batch = namedtuple("Batch", "pixel_values labels")


def test_a_batch_without_a_forward_argument_is_an_error_with_the_way_out():
    accelerator = GossipAccelerator(cpu=True)
    model = accelerator.prepare(Net())
    batches = [{"images": torch.randn(4, 3)}]
    with (
        pytest.raises(ValueError, match=r"\['images'\].*pixel_values.*calibration_forward"),
        accelerator.deployed_model(model, calibrate=batches),
    ):
        pass
    forward = lambda model, batch: model(batch["images"])  # noqa: E731
    with accelerator.deployed_model(model, calibrate=batches, calibration_forward=forward) as deployed:
        torch.testing.assert_close(deployed.norm.running_mean, batches[0]["images"].mean(0))
    with accelerator.deployed_model(model, calibrate=[Batch(batches[0]["images"], 0)]) as deployed:
        torch.testing.assert_close(deployed.norm.running_mean, batches[0]["images"].mean(0))


def test_empty_calibration_data_is_an_error_with_the_way_out():
    accelerator = GossipAccelerator(cpu=True)
    model = accelerator.prepare(Net())
    with pytest.raises(ValueError, match="calibrate=None"), accelerator.deployed_model(model, calibrate=[]):
        pass


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_frozen_layers_keep_their_statistics(momentum):
    accelerator = GossipAccelerator(cpu=True)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    model.append(nn.BatchNorm1d(3, track_running_stats=False))
    model = accelerator.prepare(model)
    model[1].eval()
    with accelerator.deployed_model(model, calibrate=[torch.randn(8, 3) + 4]) as deployed:
        assert deployed[0].running_mean.mean() > 2
        assert torch.equal(deployed[1].running_mean, torch.zeros(3))
        assert deployed[3].running_mean is None
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert [layer.training for layer in model] == [True, False, True, True]
    assert all(layer.track_running_stats for layer in model[:3])


def test_frozen_batch_norm_stays_frozen_when_the_model_is_put_into_eval_mode_first():
    accelerator = GossipAccelerator(cpu=True)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].eval()
    accelerator.backward(model(torch.randn(4, 3)).sum())
    optimizer.step()
    model.eval()
    with accelerator.deployed_model(model, calibrate=[torch.randn(8, 3) + 5]) as deployed:
        assert torch.equal(deployed[0].running_mean, torch.zeros(3))
        assert not torch.equal(deployed[1].running_mean, torch.zeros(3))


def test_a_batch_of_one_sample_is_an_error_with_the_way_out():
    accelerator = GossipAccelerator(cpu=True)
    model = accelerator.prepare(Net())
    with (
        pytest.raises(ValueError, match=r"batch of one.*larger batches"),
        accelerator.deployed_model(model, calibrate=[torch.randn(1, 3)]),
    ):
        pass


class OwnBatches:
    """A batch sampler without an inner sampler, over the first half of the rows, with its own generator."""

    batch_size, drop_last = 2, False

    def __init__(self):
        self.rng = numpy.random.default_rng(0)

    def __len__(self):
        return 4

    def __iter__(self):
        order = self.rng.permutation(8).tolist()
        return iter([order[i : i + 2] for i in range(0, 8, 2)])


def own_batches(rank: int, calibrate: bool) -> tuple[list[list[int]], float]:
    accelerator = make_accelerator()
    model = Net()
    loader = DataLoader(Rows(), batch_sampler=OwnBatches())
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    epochs, mean = [], 0.0
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch[:, 0].int().tolist()
            accelerator.backward(model(batch).sum())
            optimizer.step()
        if calibrate:
            with accelerator.deployed_model(model, calibrate=loader) as deployed:
                mean = deployed.norm.running_mean[0].item()
    return epochs, mean


class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((3,), float(index))


def test_a_custom_batch_sampler_is_calibrated_on_its_rows_and_keeps_its_order():
    calibrated, plain = run_workers(own_batches, 2, True), run_workers(own_batches, 2, False)
    for (epochs, mean), (undisturbed, _) in zip(calibrated, plain, strict=True):
        assert mean == 3.5
        assert epochs == undisturbed
        assert epochs[0] != epochs[1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(72.0).reshape(24, 3))


def stream_and_calibrate(rank: int, workers: int, dispatch: bool | None) -> int:
    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model = Net()
    loader = DataLoader(Stream(), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shuffling, which this stream does not do
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        if number == 2:
            with accelerator.deployed_model(model, calibrate=loader) as deployed:
                next(iter(loader))
                assert deployed.norm.running_mean[0].item() == pytest.approx(34.5)
    return accelerator.gossip_steps[0].mixer.step


@pytest.mark.parametrize(("workers", "dispatch"), [(0, None), (0, False), (1, False)])
def test_calibrating_on_a_stream_in_mid_epoch_does_not_cut_the_epoch(workers, dispatch):
    assert run_workers(stream_and_calibrate, 2, workers, dispatch) == [6, 6]


def trained_in_eval_mode(rank: int) -> None:
    """Statistics that training does not use stay as they are; those of a model that another optimizer trains count."""
    accelerator = make_accelerator()
    frozen, live = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(2, track_running_stats=True))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (frozen, live)]
    frozen, live, *optimizers = accelerator.prepare(frozen, live, *optimizers)
    frozen.eval()
    for number in (0, 1, 2):
        layer, optimizer = (live[0], optimizers[1]) if number == 1 else (frozen, optimizers[0])
        live.train(number == 1)
        accelerator.backward(layer(torch.randn(4, 3) + 5).sum())
        if number == 1:
            live[1](torch.randn(2, 2, 8) + rank)
        optimizer.step()
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("dsgdac_accel.deployed_model").addHandler(heard)
    for model in (frozen, live, frozen, live):
        with accelerator.deployed_model(model, calibrate=[torch.randn(8, 3) + 5] if model is frozen else None):
            assert torch.equal(frozen.running_mean, torch.zeros(3))
        with accelerator.deployed_model(
            live, calibrate=[torch.randn(8, 3) + 9], calibration_forward=lambda m, x: m[0](x)
        ):
            assert live[0].running_mean.mean() > 7, "a model in eval mode while another one trains is calibrated"
    named = [record.getMessage() for record in heard.buffer]
    assert [("1.running_mean" in text, "0.running_mean" in text) for text in named] == [(True, False)] * (rank == 0)


def test_statistics_that_training_did_not_use_stay_and_others_that_differ_are_named():
    run_workers(trained_in_eval_mode, 2)
