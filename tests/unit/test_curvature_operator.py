"""Hessian products against dense algebra and finite differences, without changes to the model."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Sequence

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dsgdac_accel.curvature import HessianOperator, flatten, set_parameters
from dsgdac_accel.curvature.batches import checksum
from dsgdac_accel.curvature.measurement_context import fresh_batch
from dsgdac_accel.curvature.measures import batches_for_noise

VOCABULARY = 5


def squared(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def inputs(count, rows=6, features=3, outputs=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(rows, width, generator=generator, dtype=dtype) for width in (features, outputs))
        for _ in range(count)
    ]


def dense_hessian(model, loss_fn, batches):
    """Hessian (d, d) and gradient (d,) of the mean loss by torch's own second derivatives of a flat vector."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = [p.shape for p in trainable.values()]

    class Called(nn.Module):
        def __init__(self, state):
            super().__init__()
            self.state = state

        def forward(self, *args, **kwargs):
            return functional_call(model, self.state, args, kwargs)

    def mean_loss(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        state = {name: part.view(shape) for name, part, shape in zip(trainable, parts, shapes, strict=True)}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return torch.stack([loss_fn(Called(state | buffers), batch) for batch in batches]).mean()

    point = torch.cat([p.detach().reshape(-1) for p in trainable.values()])
    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(mean_loss, point)
        (gradient,) = torch.autograd.grad(mean_loss(point.requires_grad_()), point)
    return hessian, gradient


def as_matrix(hvp):
    return torch.stack([hvp(unit) for unit in torch.eye(hvp.dim, dtype=hvp.dtype)], dim=1)


# ---- networks


class BatchNormNet(nn.Module):
    """BatchNorm that trains, BatchNorm frozen inside a block, a frozen layer and an unused one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        self.block[2][0].running_mean.fill_(0.3)
        self.block[2][0].running_var.fill_(2.0)

    def forward(self, x):
        return self.block(self.frozen(self.first(x)))


class AttentionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):  # (rows, 3) as one sequence of three tokens each
        tokens = x[:, :, None] * torch.linspace(0.5, 2.0, 4, dtype=x.dtype) + torch.arange(3)[:, None]
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(mixed.mean(1))


class TiedNet(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 3)
        self.hidden = nn.Linear(3, 3)
        self.output = nn.Linear(3, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids):
        return self.output(torch.tanh(self.hidden(self.embedding(ids))))


def next_token(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def sentences(count):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (3, 4), generator=generator) for _ in range(count)]


def make(kind):
    torch.manual_seed(0)
    if kind == "tied":
        return TiedNet().double(), next_token, sentences(3)
    net = {"batch norm": BatchNormNet, "attention": AttentionNet}[kind]().double()
    if kind == "batch norm":
        net.block[2][0].eval()
    return net, squared, inputs(3)


@pytest.mark.parametrize(
    ("kind", "graph_memory"),
    [
        ("batch norm", 5000),
        pytest.param("batch norm", 2**30, marks=pytest.mark.slow),
        ("attention", 2**30),
        pytest.param("attention", 5000, marks=pytest.mark.slow),
        ("tied", 2**30),
        ("tied", 5000),
    ],
)
def test_products_and_gradient_equal_those_of_the_dense_hessian(kind, graph_memory):
    net, loss_fn, batches = make(kind)
    hessian, gradient = dense_hessian(net, loss_fn, batches)
    hvp = HessianOperator(net, loss_fn, batches, graph_memory=graph_memory)
    assert hvp.dim == len(gradient) == sum(p.numel() for p in net.parameters() if p.requires_grad)
    torch.testing.assert_close(as_matrix(hvp), hessian, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(hvp.gradient, gradient, rtol=1e-9, atol=1e-11)


def test_unused_parameters_have_rows_of_zeros_and_frozen_ones_none():
    net, loss_fn, batches = make("batch norm")
    hvp = HessianOperator(net, loss_fn, batches)
    named = {name: parameter for name, parameter in net.named_parameters() if not name.startswith("frozen")}
    rows = dict(zip(named, as_matrix(hvp).norm(dim=1).split([p.numel() for p in named.values()]), strict=True))
    assert rows["unused.weight"].max() == 0
    assert rows["first.weight"].min() > 1e-3


def test_float32_products_agree_with_float64():
    net, loss_fn, batches = make("batch norm")
    v = torch.randn(flatten(net).numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = HessianOperator(net, loss_fn, batches)(v)
    narrow = HessianOperator(net.float(), loss_fn, [tuple(t.float() for t in batch) for batch in batches])
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow(v.float()).double(), expected, rtol=1e-4, atol=1e-5)


def test_batches_weighted_by_their_samples_have_the_hessian_of_the_mean_over_all_samples():
    torch.manual_seed(0)
    net, (everything,) = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), inputs(1, rows=14)
    batches = list(zip(*(part.split(6) for part in everything), strict=True))
    hessian, gradient = dense_hessian(net, squared, [everything])
    hvp = HessianOperator(net, squared, batches, weights=[6, 6, 2])
    torch.testing.assert_close(as_matrix(hvp), hessian, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(hvp.gradient, gradient, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(hvp.batch_gradient(2), dense_hessian(net, squared, batches[2:])[1])
    assert batches_for_noise([6, 6, 2], 9) == [0, 1], "the smaller batch has larger noise"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"one finite number above 0 for each of the 2 batches; got 1\..*number of samples"),
        ([2, 0], "got 0"),
        ([2, float("nan")], "got nan"),
        ([float("inf"), 1], "got inf"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    net, batches = simple()
    with pytest.raises(ValueError, match=message):
        HessianOperator(net, squared, batches, weights=weights)


def test_a_loss_linear_in_the_parameters_has_a_hessian_of_zero():
    net = nn.Linear(3, 1)
    hvp = HessianOperator(net, lambda model, x: model(x).mean(), [torch.randn(4, 3)])
    assert torch.equal(hvp(torch.ones(4)), torch.zeros(4))


def test_a_model_in_eval_mode_is_measured_as_it_trains_except_for_frozen_modules():
    net, loss_fn, batches = make("batch norm")
    v = torch.linspace(-1, 1, flatten(net).numel(), dtype=torch.float64)
    expected = HessianOperator(net, loss_fn, batches)(v)
    net.eval()
    as_frozen = HessianOperator(net, loss_fn, batches, frozen=[net.block[2][0]])(v)
    without = HessianOperator(net, loss_fn, batches)(v)
    torch.testing.assert_close(as_frozen, expected, rtol=1e-12, atol=1e-12)
    assert (without - expected).norm() > 1e-3 * expected.norm()
    assert not any(module.training for module in net.modules())


# ---- the model stays unchanged


class Everything(nn.Module):
    """Everything that a pass in training mode writes to or draws from."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.instance = nn.InstanceNorm2d(3, track_running_stats=True)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3 * 16, 2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        x = F.dropout(F.gelu(self.norm(self.conv(x))), 0.3, self.training)
        noise = random.random() + numpy.random.rand()
        return self.linear(self.instance(x).flatten(1)) * noise


def snapshot(model):
    return (
        {name: (id(value), value.clone()) for name, value in model.named_buffers()},
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        [p._version for p in model.parameters()],
    )


@pytest.mark.parametrize("graph_memory", [2**30, 0])
def test_products_are_symmetric_and_repeatable_and_leave_the_model_unchanged(graph_memory):
    torch.manual_seed(0)
    net = Everything().double()
    net.norm.eval()
    x = [torch.randn(4, 1, 6, 6, dtype=torch.float64) for _ in range(3)]
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    loss(net, x[0]).backward()
    torch.rand(3)
    before = snapshot(net)
    hvp = HessianOperator(net, loss, x, graph_memory=graph_memory)
    u, v = torch.randn(2, hvp.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    hu, hv = hvp(u), hvp(v)
    assert hvp.gradient.norm() > 0
    assert torch.dot(u, hv).item() == pytest.approx(torch.dot(v, hu).item(), rel=1e-9)
    assert torch.equal(hvp(u), hu)
    after = snapshot(net)
    for mine, theirs in zip(before, after, strict=True):
        assert repr(mine) == repr(theirs)
    # The same masks and start of every buffer in another order and number of passes:
    other = HessianOperator(net, loss, x, graph_memory=0)
    torch.testing.assert_close(other(u), hu, rtol=1e-12, atol=1e-12)
    assert (HessianOperator(net, loss, x, seed=1)(u) - hu).norm() > 1e-3 * hu.norm()


def test_a_shared_buffer_stays_shared():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[1].running_mean = net[0].running_mean
    with fresh_batch(net, seed=0, number=0):
        assert net[0].running_mean is net[1].running_mean
        net[0].running_mean.fill_(7)
    assert net[0].running_mean is net[1].running_mean
    assert net[0].running_mean.tolist() == [0, 0, 0]


def test_matrix_products_have_full_precision_during_a_product():
    seen, before = [], torch.get_float32_matmul_precision()

    def loss(model, batch):
        seen.append(torch.get_float32_matmul_precision())
        return squared(model, batch)

    net, batches = simple()
    torch.set_float32_matmul_precision("medium")
    try:
        HessianOperator(net, loss, batches)(torch.ones(8))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"] * len(batches)


class Checkpointed(nn.Module):
    """Recomputes the activations of its first part in the backward pass."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh())
        self.second = nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.second(self.first(x))
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("graph_memory", [2**30, 0])
def test_activation_checkpoints_change_nothing(graph_memory):
    torch.manual_seed(0)
    net, batches = Checkpointed().double(), inputs(2)
    v = torch.ones(flatten(net).numel(), dtype=torch.float64)
    expected = HessianOperator(net, squared, batches)(v)
    net.reentrant = False
    hvp = HessianOperator(net, squared, batches, graph_memory=graph_memory)
    for _ in range(2):
        torch.testing.assert_close(hvp(v), expected, rtol=1e-12, atol=1e-12)
    assert net.first[1].num_batches_tracked == 0
    assert torch.equal(net.first[1].running_mean, torch.zeros(4, dtype=torch.float64))
    net.reentrant = True  # its parameters would look unused
    asking = [(x.requires_grad_(), y) for x, y in batches]
    with pytest.raises(ValueError, match=r"reentrant activation checkpoints.*use_reentrant=False"):
        HessianOperator(net, squared, asking)(v)


def test_dropout_masks_depend_on_the_number_of_the_batch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    batches = inputs(2)
    alone = HessianOperator(net, squared, batches[:1])
    both = HessianOperator(net, squared, batches)
    expected = alone.gradient
    torch.rand(1)  # the stream outside moves on
    torch.testing.assert_close(both.batch_gradient(0), expected, rtol=0, atol=0)
    twice = HessianOperator(net, squared, batches[:1] * 2)
    assert not torch.equal(twice.batch_gradient(0), twice.batch_gradient(1)), "equal masks in two batches"


def test_outer_autocast_no_grad_and_inference_mode_do_not_matter():
    torch.manual_seed(0)
    net, batches = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), inputs(2, dtype=torch.float32)
    expected = HessianOperator(net, squared, batches)(torch.ones(26))
    for around in (torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode()):
        with around:
            assert torch.equal(HessianOperator(net, squared, batches)(torch.ones(26)), expected)


def test_the_attention_setting_is_restored():
    net, loss_fn, batches = make("attention")
    seen = []

    def recording(model, batch):
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return loss_fn(model, batch)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        hvp = HessianOperator(net, recording, batches)
        hvp(torch.ones(hvp.dim, dtype=torch.float64))
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert set(seen) == {(False, False)}
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_transformer_agrees_with_finite_differences(attention):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_implementation=attention, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().train()
    ids = torch.randint(11, (2, 6))
    mask = torch.tensor([[1] * 6, [0, 0] + [1] * 4])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    loss = lambda model, batch: model(**batch).loss  # noqa: E731

    hvp = HessianOperator(model, loss, [batch])
    v = torch.randn(hvp.dim, dtype=torch.float64)
    product, point, step = hvp(v), hvp.point, 1e-5
    gradients = []
    for sign in (1, -1):
        set_parameters(model, point + sign * step * v)
        gradients.append(HessianOperator(model, loss, [batch]).gradient)  # the same dropout masks
    difference = (gradients[0] - gradients[1]) / (2 * step)
    assert (product - difference).norm() < 1e-3 * product.norm()


def test_a_wide_resnet_in_float32_is_symmetric():
    from tasks.images.wide_resnet import WideResNet

    torch.manual_seed(0)
    net = WideResNet(10, 1, num_classes=10)
    batches = [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(2)]
    hvp = HessianOperator(net, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batches)
    u, v = torch.randn(2, hvp.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).float()
    one, other = (torch.dot(a.double(), hvp(b).double()) for a, b in ((u, v), (v, u)))
    assert (one - other).abs() < 1e-4 * u.norm() * hvp(v).norm() / hvp.dim**0.5


# ---- memory


@pytest.mark.parametrize("graph_memory", [pytest.param(budget, marks=pytest.mark.slow) for budget in (2**30, 0, 6_000)])
def test_memory_is_flat_over_hundreds_of_products(graph_memory):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

    def live():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    empty = live()
    hvp = HessianOperator(net, squared, inputs(4, dtype=torch.float32), graph_memory=graph_memory)
    v = torch.ones(hvp.dim)
    for _ in range(3):
        hvp(v)
    before = live()
    for _ in range(150):
        hvp(v)
    assert live() == before
    kept = len(hvp.kept)
    assert kept == {2**30: 4, 0: 0}.get(graph_memory, kept)
    assert graph_memory != 6_000 or 0 < kept < 4
    del hvp, v
    assert live() == empty, "graphs outlive their operator"


class MadeWhenRead(Sequence):
    """Batches of which a new copy is made at each reading, and the largest number of copies alive at a time."""

    def __init__(self, count, change=0.0):
        self.batches, self.change = inputs(count), change
        self.copies, self.most, self.reads = weakref.WeakSet(), 0, 0

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        x, y = self.batches[number]
        copy = Copy(x + self.change * self.reads)
        self.copies.add(copy)
        self.reads += 1
        self.most = max(self.most, len(self.copies))
        return copy.x, y, copy


class Copy:
    """Stands for the memory of a batch."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("graph_memory", [0, 3000])
def test_batches_made_when_read_are_in_memory_one_at_a_time(graph_memory):
    net, loss = nn.Linear(3, 2).double(), lambda model, batch: squared(model, batch[:2])
    most, kept = set(), set()
    for count in (12, 36):
        batches = MadeWhenRead(count)
        hvp = HessianOperator(net, loss, batches, graph_memory=graph_memory)
        batches.reads = 0
        for reads in (count, 2 * count):
            hvp(torch.ones(8, dtype=torch.float64))
            assert batches.reads == reads, "each product reads each batch once"
        kept.add(len(hvp.kept))
        most.add(batches.most)
    assert most <= {1, 2}
    assert len(kept) == 1, "more graphs are kept of more batches"
    changing = HessianOperator(net, loss, MadeWhenRead(2, change=1.0), graph_memory=0)
    with pytest.raises(RuntimeError, match=r"batch 0 changed.*the same batch each time"):
        changing(torch.ones(8, dtype=torch.float64))


# ---- refusals


def simple():
    torch.manual_seed(0)
    return nn.Linear(3, 2), inputs(2, dtype=torch.float32)


def test_checksums_tell_names_shapes_and_kinds_apart():
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)]
    things = [{"a": 1}, {"b": 1}, [1], (1, 1), None, *tensors, *(tensor.numpy() for tensor in tensors)]
    assert len({checksum(thing) for thing in things}) == len(things)
    assert [checksum(thing) for thing in things] == [checksum(copy.deepcopy(thing)) for thing in things]


def test_batches_that_are_not_a_list_or_empty_are_refused():
    net, batches = simple()
    loader = torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=4)
    for other in (iter(batches), (batch for batch in batches), loader):
        with pytest.raises(TypeError, match=r"batches must be a list.*Pass list\(\.\.\.\)"):
            HessianOperator(net, squared, other)
    with pytest.raises(ValueError, match="at least one batch"):
        HessianOperator(net, squared, [])


def lengthen(net, batches):
    batches.append(batches[0])


def overwrite(net, batches):
    batches[1][0].mul_(2)


def overwrite_unseen(net, batches):
    batches[1][0].data.mul_(2)


def exchange(net, batches):
    batches[0], batches[1] = batches[1], batches[0]


def train(net, batches):
    with torch.no_grad():
        net.bias += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lengthen, "2 batches, now 3.*new HessianOperator"),
        (overwrite, "batch 1 changed.*Pass copies"),
        (overwrite_unseen, "batch 1 changed"),
        (exchange, "batch 0 changed"),
        (train, "the parameters changed.*new HessianOperator"),
    ],
)
@pytest.mark.parametrize("graph_memory", [2**30, 0])
def test_changes_between_products_are_refused(change, message, graph_memory):
    net, batches = simple()
    hvp = HessianOperator(net, squared, batches, graph_memory=graph_memory)
    hvp(torch.ones(8))
    change(net, batches)
    with pytest.raises(RuntimeError, match=message):
        hvp(torch.ones(8))
    with pytest.raises(RuntimeError, match=message):
        _ = hvp.gradient


def test_changes_of_arrays_in_a_batch_are_refused():
    net = nn.Linear(3, 2)
    batch = {"x": numpy.ones((4, 3), dtype=numpy.float32), "name": ["a"]}
    hvp = HessianOperator(net, lambda model, b: model(torch.from_numpy(b["x"])).square().mean(), [batch])
    hvp(torch.ones(8))
    batch["x"][2, 1] = 5
    with pytest.raises(RuntimeError, match="batch 0 changed"):
        hvp(torch.ones(8))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda model, batch: model(batch[0]).square(), r"shape \(\); got shape \(6, 2\) for batch 0.*mean\(\)"),
        (lambda model, batch: 1.0, "got float"),
        (lambda model, batch: model(batch[0]).mean() * float("nan"), "batch 0 is nan"),
        (lambda model, batch: squared(model, batch).exp().exp().exp() * 1e38, "batch 0 is inf"),
        (lambda model, batch: model(batch[0]).mean().detach(), "does not depend on a trainable parameter"),
    ],
)
def test_losses_that_have_no_hessian_are_refused(loss_fn, message):
    net, batches = simple()
    hvp = HessianOperator(net, loss_fn, batches)
    with pytest.raises(ValueError, match=message):
        hvp(torch.ones(8))
    assert net.training


@pytest.mark.parametrize("v", [torch.ones(7), torch.ones(8, 1), torch.ones(8, dtype=torch.float64)])
def test_vectors_of_other_shapes_or_dtypes_are_refused(v):
    net, batches = simple()
    with pytest.raises(ValueError, match=r"expected a vector of shape \(8,\), torch.float32 on cpu; got"):
        HessianOperator(net, squared, batches)(v)


def test_models_without_exact_parameters_are_refused():
    batches = simple()[1]
    with pytest.raises(ValueError, match=r"float32 or float64.*weight is torch.bfloat16.*float\(\)"):
        HessianOperator(nn.Linear(3, 2).bfloat16(), squared, batches)
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        HessianOperator(nn.Linear(3, 2).requires_grad_(False), squared, batches)


def test_parameters_that_are_not_ordinary_tensors_are_refused_by_name():
    class Shard(torch.Tensor):
        pass

    net = nn.Linear(2, 1)
    net.bias = nn.Parameter(torch.zeros(1).as_subclass(Shard))
    with pytest.raises(ValueError, match="ordinary parameters; bias is a Shard"):
        flatten(net)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.ParameterList([torch.zeros(0)])])
def test_a_model_without_parameters_is_not_called_frozen(model):
    with pytest.raises(ValueError, match="needs a trainable parameter; the model has none"):
        HessianOperator(model, squared, simple()[1])
