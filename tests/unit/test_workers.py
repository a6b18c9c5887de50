"""VirtualWorkers in one process: each replica computes what a process of its own would."""

from __future__ import annotations

import copy
import logging
import operator
import pickle
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from dsgdac_accel import GossipAccelerator, GossipConfig, VirtualWorkers
from dsgdac_accel.data.batch_parts import batch_size, cut, even_sizes, join
from dsgdac_accel.randomness import WorkerStreams, seed_workers_differently


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2)).double()


def make_batch(size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, 2, generator=generator, dtype=torch.float64)


def gradients_of_own_process(worker: int, x: torch.Tensor, y: torch.Tensor, seed: int) -> nn.Module:
    """Return a model with the gradient of this worker's samples alone, under its random stream."""
    model = make_model()
    with WorkerStreams(seed, [worker]).swapped() as use:
        use(0)
        (model(x) - y).square().mean().backward()
    return model


@pytest.mark.parametrize("sizes", [None, [5, 4, 3], [2, 2, 8]])
def test_each_replica_computes_what_a_process_of_its_own_would(sizes):
    workers = VirtualWorkers(make_model(), 3)
    workers.streams.seed(7, range(3))
    x, y = make_batch()
    before = torch.get_rng_state()
    if sizes is None:
        (workers(x) - y).square().mean().backward()
    else:
        with workers.cut_at(sizes):
            (workers(x) - y).square().mean().backward()
    assert torch.equal(torch.get_rng_state(), before), "replicas must not draw from the global stream"
    for worker, (mine, own) in enumerate(zip(x.split(sizes or 4), y.split(sizes or 4), strict=True)):
        expected = gradients_of_own_process(worker, mine, own, seed=7)
        for name, parameter in expected.named_parameters():
            found = workers.replicas[worker].get_parameter(name)
            torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-12, atol=1e-14)
        for name, buffer in expected.named_buffers():
            assert torch.equal(workers.replicas[worker].get_buffer(name), buffer)


def test_worker_streams_equal_those_of_separate_processes_and_resume_from_a_checkpoint():
    torch.manual_seed(7)
    outside = torch.get_rng_state()
    expected = []
    for rank in range(3):
        torch.manual_seed(7)
        seed_workers_differently(SimpleNamespace(rank=rank, all_gather_object=lambda seed, what: [seed]))
        expected.append(torch.rand(6))
    torch.set_rng_state(outside)
    assert len({tuple(numbers.tolist()) for numbers in expected}) == 3, "every worker has its own stream"
    streams = WorkerStreams(7, range(3))
    drawn = [torch.empty(0)] * 3
    for visited in ([0, 1, 2], [2, 0, 1]):
        with streams.swapped() as use:
            for worker in visited:
                use(worker)
                drawn[worker] = torch.cat([drawn[worker], torch.rand(2)])
        assert torch.equal(torch.get_rng_state(), outside)
    resumed = WorkerStreams(1, range(3))
    resumed.load_state_dict(streams.state_dict())
    with resumed.swapped() as use:
        for worker in range(3):
            use(worker)
            assert torch.equal(torch.cat([drawn[worker], torch.rand(2)]), expected[worker])


def test_a_salt_changes_a_workers_random_numbers_repeatably():
    def drawn(*salt):
        torch.manual_seed(7)
        seed_workers_differently(SimpleNamespace(rank=1, all_gather_object=lambda seed, what: [seed]), *salt)
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    assert drawn(5) == drawn(5)
    assert all(len({*draws}) == 3 for draws in zip(drawn(), drawn(5), drawn(6), strict=True))


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple | None = None


class LanguageModel(nn.Module):
    """Computes its own loss, like Transformers models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(10, 8).double(), nn.Linear(8, 10).double()
        self.config = {"use_cache": False}

    def forward(self, input_ids, labels=None, scale=1.0, num_items_in_batch=None):
        hidden = self.embedding(input_ids)
        logits = self.head(hidden) * scale
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return Output(loss=total / count, logits=logits, hidden=(hidden, None))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(24).reshape(4, 6) % 10
    labels = (ids + 1) % 10
    labels[0, 2:] = -100  # token counts differ between the workers
    return ids, labels


def test_a_loss_computed_by_the_model_is_computed_per_worker():
    workers = VirtualWorkers(LanguageModel(), 2)
    ids, labels = tokens()
    output = workers(input_ids=ids, labels=labels, scale=2.0)
    assert type(output) is Output
    assert output.logits.shape == (4, 6, 10)
    assert output.hidden[0].shape == (4, 6, 8)
    output.loss.backward()
    losses = []
    for worker in range(2):
        alone, rows = LanguageModel(), slice(2 * worker, 2 * worker + 2)
        loss = alone(input_ids=ids[rows], labels=labels[rows], scale=2.0).loss
        loss.backward()
        losses.append(loss)
        torch.testing.assert_close(workers.replicas[worker].head.weight.grad, alone.head.weight.grad)
        torch.testing.assert_close(output.logits[rows], alone(ids[rows], labels[rows], scale=2.0).logits)
    torch.testing.assert_close(output.loss, sum(losses) / 2)
    assert workers.config == {"use_cache": False}, "the wrapper passes attributes through"


@pytest.mark.parametrize("own", [False, True])
def test_the_token_count_of_a_window_is_passed_to_each_worker(own):
    ids, labels = tokens()
    counts = torch.tensor([(labels[:2] != -100).sum(), (labels[2:] != -100).sum()])
    workers = VirtualWorkers(LanguageModel(), 2)
    loss = workers(input_ids=ids, labels=labels, num_items_in_batch=counts if own else int(counts.sum())).loss
    loss.backward()
    one = LanguageModel()
    expected = one(input_ids=ids, labels=labels, num_items_in_batch=int(counts.sum())).loss
    if not own:
        torch.testing.assert_close(loss, expected)
    for worker in range(2):
        alone, rows = LanguageModel(), slice(2 * worker, 2 * worker + 2)
        divisor = int(counts[worker]) if own else int(counts.sum()) / 2
        alone(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=divisor).loss.backward()
        torch.testing.assert_close(workers.replicas[worker].head.weight.grad, alone.head.weight.grad)


def test_shared_workers_are_one_model_with_batch_statistics_per_part():
    x, y = make_batch()
    model, reference = make_model(), make_model()
    for module in (model[2], reference[2]):
        module.p = 0.0
    workers = VirtualWorkers(model, 3, shared=True)
    assert len(list(workers.parameters())) == len(list(model.parameters()))
    (workers(x) - y).square().mean().backward()
    for mine, own in zip(x.split(4), y.split(4), strict=True):
        ((reference(mine) - own).square().mean() / 3).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_splitting_and_joining_keep_the_structure():
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    table = torch.eye(2)
    parts = cut((x, {"y": y, "table": table, "name": "a"}), {"flags": [y, None]}, [2, 1])
    (first, of_first), (second, of_second) = parts
    assert torch.equal(first[0], x[:2])
    assert torch.equal(second[0], x[2:])
    assert first[1]["table"] is table
    assert second[1]["name"] == "a"
    assert torch.equal(of_first["flags"][0], y[:2])
    assert of_second["flags"][1] is None
    joined = join([{"a": x[:2], "n": 3, "s": "p"}, {"a": x[2:], "n": 3, "s": "q"}], [2, 1])
    assert torch.equal(joined["a"], x)
    assert joined["n"] == 3
    assert joined["s"] == ("p", "q")
    assert even_sizes(2, 3) == [1, 1, 0]
    assert batch_size((["text"], torch.tensor(0.5), x), {}) == 3
    with pytest.raises(ValueError, match="outputs of different structures"):
        join([(x, y), {"logits": x, "labels": y}], [3, 3])


@pytest.mark.parametrize(
    ("values", "joined"),
    [
        ([1.0, 4.0], torch.tensor(3.0)),  # a mean over samples, of which the second worker has twice as many
        ([1.0 + 3j, 4.0], torch.tensor(3.0 + 1j)),
        ([5, 5], torch.tensor(5)),
        ([5, 6], torch.tensor([5, 6])),  # a count has no mean
        ([True, False], torch.tensor([True, False])),
    ],
)
def test_scalars_are_joined_by_their_dtype(values, joined):
    torch.testing.assert_close(join([torch.tensor(value) for value in values], [1, 2]), joined)


def test_a_small_last_batch_leaves_workers_without_an_update_and_is_warned_of_once(caplog):
    workers = VirtualWorkers(nn.Linear(4, 2).double(), 3)
    x, _ = make_batch()
    workers(x).sum().backward()
    workers.zero_grad()
    workers(x[:2]).mean().backward()
    assert [replica.weight.grad is None for replica in workers.replicas] == [False, False, True]
    workers(x[:2])
    assert caplog.text.count("a last batch of 2 samples leaves some of 3 workers without any") == 1


def test_small_batches_are_fine_in_evaluation_and_do_not_count_as_training_batches(caplog):
    workers = VirtualWorkers(nn.Linear(4, 2).double(), 3)
    x, _ = make_batch()
    workers.eval()
    torch.testing.assert_close(workers(x[:2]), workers.replicas[0](x[:2]))
    workers(x)
    assert not caplog.records
    workers.train()
    with pytest.raises(ValueError, match="2 samples are too few for 3 workers"):
        workers(x[:2])


def test_cut_at_and_whole_apply_inside_their_context_only():
    workers = VirtualWorkers(nn.Linear(4, 2).double(), 3)
    with torch.no_grad():
        for number, replica in enumerate(workers.replicas):
            replica.bias.fill_(number)
            replica.weight.zero_()
    x, _ = make_batch(6)

    def computed_by():
        return workers(x)[:, 0].tolist()

    with workers.cut_at([1, 1, 4]):
        assert computed_by() == [0, 1, 2, 2, 2, 2]
    with pytest.raises(RuntimeError), workers.cut_at([1, 1, 4]):
        workers(x[:, :1])
    with pytest.raises(ValueError, match="there are 3 workers in this process; got 2 sizes"), workers.cut_at([3, 3]):
        pass
    assert computed_by() == [0, 0, 1, 1, 2, 2]
    with workers.whole():
        with workers.whole():
            assert computed_by() == [0] * 6
        assert computed_by() == [0] * 6
    assert computed_by() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: VirtualWorkers(make_model(), 0), "num_workers must be at least 1; got 0"),
        (lambda: VirtualWorkers(make_model(), 4)(torch.zeros(3, 4)), "3 samples are too few for 4 workers"),
        (lambda: VirtualWorkers(make_model(), 2)(3.0), "contain no tensor with a dimension"),
        (lambda: VirtualWorkers(make_model(), 3)(make_batch(4)[0]), "worker 1 of 3 got one .* drop_last=True"),
        (lambda: VirtualWorkers(_Ragged(), 2)(torch.zeros(3, 4)), r"differ in more than .*\(2, 2\), \(1, 1\)"),
        (lambda: VirtualWorkers(_Uncopyable(), 2), "it cannot be copied: no copies"),
    ],
)
def test_batches_that_cannot_be_split_and_models_that_cannot_be_copied_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_errors_of_the_model_are_raised_unchanged():
    with pytest.raises(ValueError, match=r"^a mistake of the model's$"):
        VirtualWorkers(_Mistaken(), 2)(torch.zeros(4, 1))


class _Mistaken(nn.Module):
    def forward(self, x):
        raise ValueError("a mistake of the model's")


class _Ragged(nn.Module):
    def forward(self, x):
        return x[:, : len(x)]


class _Uncopyable(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


def test_the_optimizer_gets_the_parameters_of_every_replica():
    model = make_model()
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD(
        [{"params": [item for item in named if item[1].dim() > 1], "weight_decay": 0.1}, {"params": named[1:2]}],
        lr=0.1,
        momentum=0.9,
    )
    first = named[0][1]
    optimizer.state[first]["momentum_buffer"] = torch.ones_like(first)
    workers = VirtualWorkers(model, 3)
    workers.complete(optimizer)
    workers.complete(optimizer)  # idempotent
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 3]
    assert optimizer.param_groups[0]["param_names"][2:4] == ["replicas.1.0.weight", "replicas.1.4.weight"]
    twin = workers.replicas[2][0].weight
    assert optimizer.param_groups[0]["params"][4] is twin
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert torch.equal(optimizer.state[twin]["momentum_buffer"], torch.ones_like(twin))
    assert optimizer.state[twin]["momentum_buffer"] is not optimizer.state[first]["momentum_buffer"]


# ---- in an accelerator


def prepared(count: int = 3, **options):
    accelerator = GossipAccelerator(gossip=GossipConfig(workers_per_process=count, **options))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = list(model.parameters())  # as a loop that lists parameters before `prepare`
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, kept


def test_an_evaluation_that_is_open_already_does_not_hide_the_average():
    accelerator, model, optimizer, _ = prepared()
    x, y = make_batch()
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step()
    with accelerator.not_training(), accelerator.deployed_model(model):
        errors = accelerator.consensus_errors(model)
    summed = [torch.stack([error[key] for error in errors]).sum(0) for key in errors[0]]
    assert max(float(total.abs().max()) for total in summed) < 1e-12
    assert max(float(value.abs().max()) for value in errors[0].values()) > 1e-6


@pytest.mark.parametrize("listed_before", [False, True])
def test_each_worker_is_clipped_by_its_own_norm(listed_before):
    accelerator, model, _, kept = prepared()
    x, y = make_batch()
    accelerator.backward((model(x) - 10 * y).square().mean())
    before = [[p.grad.clone() for p in own] for own in model.by_worker()]
    norms = [torch.linalg.vector_norm(torch.cat([g.flatten() for g in own])) for own in before]
    assert min(norms) > 1
    assert len({float(norm) for norm in norms}) == 3
    found = accelerator.clip_grad_norm_(kept if listed_before else model.parameters(), 1.0)
    torch.testing.assert_close(found, torch.stack(norms).mean())
    for own, gradients, norm in zip(model.by_worker(), before, norms, strict=True):
        for parameter, gradient in zip(own, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / (norm + 1e-6))


def test_only_the_worker_with_a_nonfinite_gradient_skips_its_update(caplog):
    accelerator, model, optimizer, _ = prepared(topology="complete", power=0)
    x, y = make_batch()
    for step in range(3):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        if step == 1:
            model.replicas[1][0].weight.grad[0, 0] = torch.nan
        optimizer.step()
        optimizer.zero_grad()
    assert "worker 1, step 1: the gradient is not finite" in caplog.text
    assert caplog.text.count("not finite") == 1
    assert accelerator.gossip_steps[0].metrics()["nonfinite_steps"] == 1
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert len(optimizer.optimizer.state) == len(list(model.parameters()))


def test_the_deployed_model_averages_all_virtual_workers():
    accelerator, model, _, _ = prepared()
    with torch.no_grad():
        for number, replica in enumerate(model.replicas):
            replica[0].weight.fill_(float(number))
            replica[1].running_mean.fill_(float(number))
            replica[1].running_var.fill_(1.0)
    x, _ = make_batch()
    with accelerator.deployed_model(model) as deployed:
        assert deployed is accelerator.unwrap_model(model) is model.replicas[0]
        assert torch.equal(deployed[0].weight, torch.ones_like(deployed[0].weight))
        torch.testing.assert_close(deployed[1].running_var, torch.full_like(deployed[1].running_var, 1 + 2 / 3))
        assert torch.equal(model(x), deployed(x)), "the wrapper must compute the deployed model"
        assert set(accelerator.get_state_dict(model)) == set(make_model().state_dict())
    assert model.training
    assert [float(r[0].weight[0, 0].detach()) for r in model.replicas] == [0.0, 1.0, 2.0]
    accelerator.deploy(model)
    assert all(bool((replica[0].weight == 1).all()) for replica in model.replicas)


def test_loose_parameters_and_other_worker_counts_are_refused():
    accelerator = GossipAccelerator(gossip=GossipConfig(workers_per_process=2))
    model, loose = make_model(), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \(3,\) that is in no prepared model"):
        accelerator.prepare(model, torch.optim.SGD([*model.parameters(), loose], lr=0.1))
    with pytest.raises(ValueError, match="VirtualWorkers of 3 workers, but workers_per_process is 2"):
        accelerator.prepare(VirtualWorkers(make_model(), 3))
    with pytest.raises(ValueError, match="workers_per_process must be an integer >= 1; got 0"):
        GossipConfig(workers_per_process=0)


def test_the_other_replicas_follow_the_first():
    accelerator, model, optimizer, _ = prepared()
    x, _ = make_batch()
    inner = accelerator.unwrap_model(model)
    inner[0].requires_grad_(False)
    inner[1].eval()
    accelerator.backward(model(x).mean())
    optimizer.step()  # parameters that were trained once stay mixed
    assert all(replica[0].weight.grad is None for replica in model.replicas)
    assert not any(replica[1].training for replica in model.replicas)
    inner.load_state_dict(make_model().state_dict())
    for replica in model.replicas:
        for mine, loaded in zip(replica.state_dict().values(), make_model().state_dict().values(), strict=True):
            assert torch.equal(mine, loaded)
    kept = copy.deepcopy(inner)
    kept.load_state_dict({name: value + 1 for name, value in kept.state_dict().items()})
    assert torch.equal(model.replicas[1][0].weight, make_model()[0].weight), "copies do not load into the replicas"
    assert pickle.loads(pickle.dumps(inner)) is not None
    own = {name: value.clone() for name, value in model.state_dict().items() if name != "_extra_state"}
    own["replicas.2.0.weight"] += 1
    model.load_state_dict(own, strict=False)
    assert torch.equal(model.replicas[2][0].weight, own["replicas.2.0.weight"]), "each replica loads its own"
    assert torch.equal(model.replicas[1][0].weight, own["replicas.1.0.weight"])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tau, self.config = nn.BatchNorm1d(2), 1.0, SimpleNamespace(power=1)
        self.register_buffer("scale", torch.ones(()))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.norm(x) * self.scale * self.tau**self.config.power


def scaled() -> tuple[GossipAccelerator, Any, nn.Module]:
    accelerator = GossipAccelerator(cpu=True, gossip=GossipConfig(workers_per_process=3))
    model = Scaled()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(prepared(torch.randn(6, 2)).sum())
    optimizer.step()
    return accelerator, prepared, model


SETTINGS = {
    "an attribute of the wrapper": (lambda wrapper, first: setattr(wrapper, "tau", 5.0), "tau", 5.0),
    "an attribute": (lambda wrapper, first: setattr(first, "tau", 7.0), "tau", 7.0),
    "a new attribute": (lambda wrapper, first: setattr(first, "theta", (1, 2)), "theta", (1, 2)),
    "a setting of the config": (lambda wrapper, first: setattr(wrapper.config, "power", 2), "config.power", 2),
    "a buffer in place": (lambda wrapper, first: wrapper.scale.fill_(3), "scale", 3.0),
    "a buffer of the wrapper": (lambda wrapper, first: setattr(wrapper, "scale", torch.tensor(4.0)), "scale", 4.0),
    "a buffer registered anew": (
        lambda wrapper, first: (delattr(first, "scale"), first.register_buffer("scale", torch.tensor(2.0))),
        "scale",
        2.0,
    ),
    "a buffer put in place of another": (lambda wrapper, first: setattr(first, "scale", torch.tensor(4.0)), "scale", 4),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("change", SETTINGS)
def test_what_a_script_sets_on_a_prepared_model_reaches_all_replicas(change, inside):
    accelerator, wrapper, first = scaled()
    edit, name, value = SETTINGS[change]
    statistics = [replica.norm.running_mean.clone() for replica in wrapper.replicas]
    if inside and "buffer" not in change:  # which the deployed model gives back
        with accelerator.deployed_model(wrapper):
            edit(wrapper, first)
    else:
        edit(wrapper, first)
        with accelerator.deployed_model(wrapper) as deployed:
            deployed(torch.randn(6, 2)).sum()
            deployed.norm.running_mean.mul_(2)  # which is given back
    wrapper.eval()
    wrapper(torch.zeros(6, 2))
    for replica, own in zip(wrapper.replicas, statistics, strict=True):
        assert operator.attrgetter(name)(replica) == value
        assert torch.equal(replica.norm.running_mean, own), "statistics stay those of each worker"
    assert len({replica.seen for replica in wrapper.replicas}) == 1
    assert len({replica.scale.data_ptr() for replica in wrapper.replicas}) == 3


def test_what_only_one_replica_would_get_is_an_error_and_a_loaded_state_stays():
    _, wrapper, first = scaled()
    with pytest.raises(RuntimeError, match=r"model\.head is set to a Linear"):
        wrapper.head = nn.Linear(2, 2)
    state = {name: value + 1 for name, value in wrapper.state_dict().items() if "extra" not in name}
    expected = [torch.as_tensor(replica.norm.running_mean) + 1 for replica in wrapper.replicas]
    wrapper.load_state_dict(state, strict=False)
    wrapper.eval()
    wrapper(torch.zeros(6, 2))
    for replica, own in zip(wrapper.replicas, expected, strict=True):
        torch.testing.assert_close(replica.norm.running_mean, own)
    first.head = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="modules were added"):
        wrapper(torch.zeros(6, 2))


def test_calling_a_submodule_of_the_first_replica_is_warned_of_once(caplog):
    model = VirtualWorkers(LanguageModel(), 2)
    for _ in range(2):
        model.head(torch.zeros(1, 8, dtype=torch.float64))
    assert caplog.text.count("head runs on the first of this process's workers only") == 1
    assert model.config == {"use_cache": False}
    assert "config" not in caplog.text


def test_gradients_through_several_models_are_per_worker():
    torch.manual_seed(3)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    chain = VirtualWorkers(first, 3), VirtualWorkers(second, 3)
    x, y = make_batch()
    inputs = x.clone().requires_grad_()
    (chain[1](torch.tanh(chain[0](chain[0](inputs)))) - y).square().mean().backward()
    for worker, (mine, own) in enumerate(zip(x.split(4), y.split(4), strict=True)):
        torch.manual_seed(3)
        alone = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
        mine = mine.clone().requires_grad_()
        (alone[1](torch.tanh(alone[0](alone[0](mine)))) - own).square().mean().backward()
        for virtual, expected in zip(chain, alone, strict=True):
            torch.testing.assert_close(virtual.replicas[worker].weight.grad, expected.weight.grad, rtol=1e-12, atol=0)
        # Outside the workers, the loss is the mean over the whole batch.
        torch.testing.assert_close(inputs.grad[4 * worker : 4 * worker + 4], mine.grad / 3, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([torch.zeros(2, 3), torch.zeros(4, 3)], "a list of 2 tensors that differ in shape"),
        ({"texts": ["a", "b"], "x": torch.zeros(2, 3)}, "a list of 2 texts"),
        (nn.utils.rnn.pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)]), "a PackedSequence"),
    ],
)
def test_ragged_batches_are_refused(batch, words):
    with pytest.raises(ValueError, match=f"the model got {words}. Pad the batch"):
        VirtualWorkers(nn.Linear(3, 2), 2)(batch)


def test_models_and_optimizers_are_prepared_one_by_one():
    accelerator = GossipAccelerator(gossip=GossipConfig(workers_per_process=2))
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 4
    other = accelerator.prepare(other)
    x = torch.ones(64, 4, dtype=torch.float64)
    assert not torch.equal(model(x) == 0, other(x) == 0), "each model must have its own dropout stream"


def test_statistics_that_are_nan_are_not_pooled():
    accelerator, model, _, _ = prepared()
    for replica in model.replicas:
        replica[1].running_mean.fill_(2.0)
    model.replicas[1][1].running_mean.fill_(torch.nan)
    with accelerator.deployed_model(model) as deployed:
        assert bool((deployed[1].running_mean == 2.0).all())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_replicas_see_their_updates_under_autocast(precision):
    accelerator = GossipAccelerator(
        gossip=GossipConfig(workers_per_process=2, topology="complete", power=0), mixed_precision=precision
    )
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.cat([torch.ones(2, 4), -torch.ones(2, 4)])
    outputs = []
    for _ in range(2):
        output = model(x)
        accelerator.backward(output.float().mean())
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach().float())
    assert outputs[0].abs().max() == 0
    assert outputs[1].abs().min() > 0
    assert outputs[1].dtype == torch.float32


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO, logging.WARNING])
def test_the_first_step_says_once_who_mixes_and_by_which_gamma(level, capsys, caplog):
    caplog.set_level(level, logger="dsgdac_accel")
    config = GossipConfig(workers_per_process=2, topology="complete", power=2, start_step=3, mix_every=4)
    accelerator, model = GossipAccelerator(cpu=True, gossip=config), nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(4, 3)).sum())
        optimizer.step()
    accelerator.end_training()
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dsgdac_accel: ")]
    logged = [record.message for record in caplog.records if record.levelno == logging.INFO]
    said = {logging.NOTSET: printed, logging.INFO: logged, logging.WARNING: []}[level]
    assert len(said) == (level != logging.WARNING)
    assert len(printed + logged) == len(said)
    words = ("2 workers", "complete", "every 4 steps", "(lr / max_lr)^2", "from step 3")
    assert all(word in line for line in said for word in words)
